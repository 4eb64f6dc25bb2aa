"""What no schedule can beat: with the weights where a setting puts them, and for the
routing of a trace wherever experts lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.advice.times.work import ALL_LAYERS, Setting, decode_work
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.ranking import Forecast, Prospect
    from moesim.runs.bound import RoutingBound

HOST = "host memory"
DEVICE = "GPU memory"


@dataclass(frozen=True, slots=True)
class ByteBound:
    """The least seconds of one decode step.

    Attributes:
        seconds: the bound.
        resource: memory that sets it.
        host_bytes: read from host memory.
        device_bytes: read from graphics memory.
    """

    seconds: float
    resource: str
    host_bytes: float
    device_bytes: float

    @property
    def tokens_per_s(self) -> float:
        """Speed of one sequence that nothing can beat."""
        return 1 / self.seconds


def placement_bound(
    machine: Machine,
    model: ModelContents,
    setting: Setting,
    context_tokens: float = 0.0,
) -> ByteBound:
    """Bound one decode step with the weights where a setting puts them."""
    work = decode_work(model, setting, context_tokens)
    host_s = work.host_bytes / most_host_bytes_per_s(machine)
    # A machine without a card has no rate to divide by.
    device_s = 0.0
    if work.device_bytes:
        device_s = work.device_bytes / most_device_bytes_per_s(machine)

    if machine.unified:
        # One memory serves both processors, so their times add.
        total = host_s + device_s
        return ByteBound(total, HOST, work.host_bytes, work.device_bytes)
    resource = HOST if host_s >= device_s else DEVICE
    return ByteBound(
        max(host_s, device_s), resource, work.host_bytes, work.device_bytes
    )


def most_host_bytes_per_s(machine: Machine) -> float:
    """Return the highest rate at which host memory can be read."""
    # A probe above the wires' rate means that the wires are better than stated.
    probed = max(machine.probes.host_read.values(), default=0.0)
    return max(machine.host_peak_bytes_per_s, probed)


def most_device_bytes_per_s(machine: Machine) -> float:
    """Return the highest rate at which all cards together can read their memories."""
    # Schedules may cut layers across cards, so rates add.
    stated = sum(card.bytes_per_s * card.count for card in machine.graphics)
    return max(stated, machine.probes.device_read or 0.0)


def most_link_bytes_per_s(machine: Machine) -> float:
    """Return the highest rate at which all cards together get copies."""
    # Each card has a link of its own.
    stated = machine.link_bytes_per_s * machine.gpu_count
    return max(stated, machine.probes.link or 0.0)


# Belady's choice takes microseconds per access; more would delay an answer.
MOST_ACCESSES = 200_000


def bound_of_routing(forecast: Forecast, best: Prospect, file: Path) -> RoutingBound:
    """Bound any schedule of a routing in the memories that a setting leaves to experts.

    Args:
        forecast: of machine and model.
        best: the setting.
        file: a trace of the model, or the name of one that ships.

    Raises:
        AdviceError: a machine without a card of its own memory, a trace of another
            model, or one without decode steps.
        TraceError: a broken trace.
    """
    # Answers without a trace need not load what reads one.
    from moesim.runs.bound import (  # noqa: PLC0415
        Bandwidths,
        flattened,
        least_reads,
        routing_bound,
    )

    model = forecast.model
    machine = forecast.machine
    if not machine.graphics or machine.unified:
        raise AdviceError(
            f"--trace: {machine.name} has no graphics card with memory of its own, so"
            " it is all the same which experts lie where; leave out --trace"
        )
    steps = list(_decode_steps(file, model, forecast.job.sequences))
    if len(steps) < 2:
        raise AdviceError(
            f"{file}: expected at least two decode steps, found {len(steps)}; record"
            " answers too, with moesim record --new-tokens"
        )
    uses = [
        (layer, experts.tolist())
        for layers in steps
        for layer, experts in enumerate(layers)
    ]
    sizes = [
        model.layers[at].expert_bytes // model.layers[at].experts
        for at in model.moe_layers
    ]
    accesses = [sizes[layer] for layer, experts in uses for _ in experts]

    # Any content at the beginning: the prompt may have left the best one.
    bill = best.candidate.bill
    room = bill.gpu["experts"] + max(0.0, bill.gpu_left)
    slots = np.array([int(room // min(sizes))])
    reads = least_reads(*flattened(uses), slots, shared=True, warm=True)

    # Without experts on the card only what every token reads there is left.
    bare = replace(best.candidate.setting, cpu_layers=ALL_LAYERS, gpu_layers=ALL_LAYERS)
    work = decode_work(model, replace(bare, chosen_layers=None))
    rates = Bandwidths(
        host=most_host_bytes_per_s(machine),
        link=most_link_bytes_per_s(machine),
        device=most_device_bytes_per_s(machine),
    )
    return routing_bound(accesses, reads, len(steps), work.device_bytes, rates)


def _decode_steps(
    file: Path, model: ModelContents, sequences: int
) -> Iterator[list[np.ndarray]]:
    """Yield experts by MoE layer, int [A] each once, of as many decode steps as an
    answer has time for.
    """
    # As above.
    from moesim.traces.format.batch import compose  # noqa: PLC0415
    from moesim.traces.format.reader import open_trace  # noqa: PLC0415
    from moesim.traces.format.schema import Phase  # noqa: PLC0415

    trace = open_trace(file)
    layer = model.layers[model.moe_layers[0]]
    expected = (len(model.moe_layers), layer.experts, layer.top_k)
    shape = trace.shape
    if (shape.layers, shape.experts, shape.top_k) != expected:
        raise AdviceError(
            f"--trace {trace.path}: expected routing of {model.name}, {expected[0]} MoE"
            f" layers of {expected[1]} experts, {expected[2]} per token, found"
            f" {shape.layers} of {shape.experts}, {shape.top_k} per token; record it"
            " from that model"
        )
    accesses = 0
    for step in compose(trace, batch=sequences):
        if step.phase == Phase.DECODE:
            layers = [routed.experts for routed in step.layers]
            yield layers
            accesses += sum(map(len, layers))
            if accesses >= MOST_ACCESSES:
                return
