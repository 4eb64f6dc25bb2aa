"""The physical bound beside every measured decode speed: no real run may beat it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.advice.measured.targets import machine_of, spills
from moesim.advice.times.byte_bound import (
    most_device_bytes_per_s,
    most_host_bytes_per_s,
    placement_bound,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.advice.measured.engine_cases import EngineRun
    from moesim.advice.measured.rows import Run


@dataclass(frozen=True, slots=True)
class BoundShare:
    """One measured run beside its bound.

    Attributes:
        place: file and line of the row.
        machine: that it was measured on.
        model: that it ran.
        share: measured speed over the bound's.
    """

    place: str
    machine: str
    model: str
    share: float


def decode_shares(runs: Iterable[Run]) -> list[BoundShare]:
    """Put decode runs of llama.cpp beside bytes over bandwidth."""
    shares = []
    for run in runs:
        # Beyond the cliff it is not known which memory serves what.
        if run.kind != "decode" or spills(run):
            continue
        machine = machine_of(run, probed=True)
        depth = run.depth + run.tokens / 2
        bound = placement_bound(machine, run.model, run.setting, depth)
        share = run.tokens_per_s / bound.tokens_per_s
        shares.append(
            BoundShare(run.row.place, run.machine_name, run.model_name, share)
        )
    return shares


def engine_shares(runs: Iterable[EngineRun]) -> list[BoundShare]:
    """Put engines with an expert cache beside theirs: misses must leave host memory."""
    shares = []
    for run in runs:
        if run.work is None:
            continue
        work = run.work
        misses = sum(
            (on_cpu + copies) * count for (on_cpu, copies), count in work.steps.items()
        )
        active = sum(work.steps.values()) * work.top_k
        host_bytes = misses * work.expert_bytes
        # Copied experts may be read by the GPU or not; those on the CPU are not.
        on_device = max(0.0, active - misses)
        device_bytes = on_device * work.expert_bytes + sum(work.dense.values())

        # A probe of this very run may show more than the machine's own figures.
        host_rate = max(most_host_bytes_per_s(run.machine), run.host.cpu, run.host.link)
        host_s = host_bytes / host_rate
        device_s = device_bytes / most_device_bytes_per_s(run.machine)
        share = run.tokens_per_s * max(host_s, device_s)
        shares.append(
            BoundShare(run.row.place, run.machine_name, run.model.name, share)
        )
    return shares
