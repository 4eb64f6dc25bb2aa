"""Checks by real runs of what ships: answers, plans, copies beside products."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moesim.hwprofiles.profile import HardwareProfile, load_profile
from moesim.runs.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.runtime.doctor import Finding

_PROMPT: Final = "import os\nimport sys\n\ndef main():\n"
REPORT: Final = "report it with `moesim doctor --report FILE` and the file"
"""The way out of what should not be."""


def rough_profile() -> HardwareProfile:
    """A profile whose lanes are this machine's, for runs that nobody times."""
    from moesim.runtime.measure.profile import workers_of  # noqa: PLC0415 - torch

    kind, cores = this_machine()
    shipped = load_profile("two-core-host")
    number = replace(shipped.numbers["cores"], value=cores)
    return replace(
        shipped,
        name="this-machine",
        accelerator=kind,
        workers=workers_of(cores, 0 if kind == "host" else 1, reads_share=False),
        numbers={**shipped.numbers, "cores": number},
    )


def check_runs() -> Iterable[tuple[str, Finding]]:
    """Run the shipped model and trace for real: exact output, the same plans from the
    same views, and copies beside products.
    """
    from moesim.runtime.doctor import (  # noqa: PLC0415 - torch
        ONE_CORE,
        fails,
        holds,
    )

    profile = rough_profile()
    with tempfile.TemporaryDirectory() as folder:
        passed, words = _exact(profile, Path(folder))
        yield (
            "exact output",
            holds(words) if passed else fails(words, f"answers are wrong; {REPORT}"),
        )
        run, words = _parity(profile, Path(folder))
        yield "parity", holds(words) if run is not None else fails(words, REPORT)
        if run is not None:
            # On one core threads overlap in time without getting anything done.
            alone = this_machine()[1] < 2
            yield "copies and products", ONE_CORE if alone else _overlap(run)


def _exact(profile: HardwareProfile, folder: Path) -> tuple[bool, str]:
    from moesim.runs.live import run_live  # noqa: PLC0415 - torch

    live = run_live(
        "tiny",
        [_PROMPT, _PROMPT[:12]],
        "greedy",
        prefetch="next-gate",
        cache_ratio=0.25,
        hw=profile,
        batch=2,
        max_new_tokens=4,
        store=folder / "tiny",
        verify=True,
    )
    verdict = live.verification
    assert verdict is not None, "it was asked for"
    words = (
        f"the shipped model's logits differ by {verdict.largest:.1e} at most, rounding"
        f" explains {verdict.tolerance:.1e}"
    )
    return verdict.passed, words


def _parity(profile: HardwareProfile, folder: Path) -> tuple[Any, str]:
    """A run from the SSD, and a fresh planner that is told what it saw."""
    from moesim.policies.base import PolicyError  # noqa: PLC0415
    from moesim.policies.planner.observers import repeat  # noqa: PLC0415
    from moesim.runs.config import MemoryOptions, RunConfig  # noqa: PLC0415
    from moesim.runs.measured import run_trace  # noqa: PLC0415
    from moesim.runs.setup import Setup, needed_columns  # noqa: PLC0415
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch
    from moesim.traces.format.batch import compose  # noqa: PLC0415
    from moesim.traces.format.future import RecordedFuture  # noqa: PLC0415
    from moesim.traces.format.reader import open_trace  # noqa: PLC0415
    from moesim.traces.shipped import resolve_trace  # noqa: PLC0415

    trace = open_trace(resolve_trace("tiny"))
    shape = shape_for(trace.shape, "qwen3-30b-a3b/16")
    total = shape.routed_bytes
    memory = MemoryOptions(cache_ratio=0.25, host_memory_bytes=total // 2)
    policy = "on-demand+lru+next-gate"
    run = run_trace(
        trace,
        policy,
        memory=memory,
        shape="qwen3-30b-a3b/16",
        dtype="float32",
        distinct=32,
        steps=4,
        hw=profile,
        store=folder / "experts",
    )
    config = RunConfig.of(policy=policy, memory=memory)
    setup = Setup(
        config, shape, profile, config.system, future=RecordedFuture.of(trace)
    )
    columns = ("weights", *needed_columns(setup.policies()))
    try:
        plans = repeat(
            run.decision_log.entries,
            setup.planner(),
            compose(trace, steps=4, columns=columns),
        )
    except PolicyError as error:
        return None, str(error)
    return run, f"{len(plans)} plans repeat from what the run saw"


def _overlap(run: Any) -> Finding:
    """How much of the copies' and reads' time something was computed."""
    from moesim.runtime.doctor import holds, limited  # noqa: PLC0415 - torch

    spans = run.timeline.frame()
    spans = spans[spans["end_s"] >= spans["start_s"]]
    busy = spans[spans["kind"].isin(["compute", "dense"])]
    moves = spans[spans["kind"].isin(["fetch", "prefetch", "read"])]
    hidden_s = sum(
        max(0.0, min(move_end, end) - max(move_start, start))
        for move_start, move_end in moves[["start_s", "end_s"]].to_numpy()
        for start, end in busy[["start_s", "end_s"]].to_numpy()
    )
    total_s = float((moves["end_s"] - moves["start_s"]).sum())
    share = min(1.0, hidden_s / total_s) if total_s else 0.0
    words = f"{share:.0%} of copying and reading was hidden behind computing"
    if share > 0.0 or not total_s:
        return holds(words, share=share)
    return limited(
        words, "give the process two cores or more, or see `--perfetto`", share=share
    )
