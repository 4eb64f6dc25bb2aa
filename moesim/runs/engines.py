"""Which clock simulates a run: the fast one, or SimPy's.

Both walk the same layer steps and give the same results to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.sim.replay import Replay
from moesim.traces.format.layer_steps import layer_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.engine.planner import Planner
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace
    from moesim.traces.timeline.spans import Timeline

MOST_KEPT_ROWS = 1 << 16
"""Rows of a trace whose blocks are kept for the next run: about ten megabytes."""

SIMPY = "simpy"
FAST = "fast"


def clock_of(engine: str) -> dict[str, Any]:
    """What `Replay` is given to run on a clock: ``simpy``, or ``fast``, which ``auto``
    means, too.
    """
    if engine != SIMPY:
        return {}
    # SimPy is imported where it runs.
    from moesim.sim.simpy_clock import SimpyClock  # noqa: PLC0415 - see above

    return {"clock": SimpyClock}


def run_trace(
    trace: Trace,
    planner: Planner,
    profile: HardwareProfile,
    timeline: Timeline,
    *,
    engine: str = FAST,
    batch: int = 1,
    steps: int | None = None,
    noise_seed: int | None = None,
    progress: Callable[[RoutedStep], None] | None = None,
) -> ReplayResult:
    """Walk a planner through a trace.

    Raises:
        TraceError: a damaged trace.
        PolicyError: a policy answered something illegal.
    """
    replay = Replay(
        profile, planner, timeline, noise_seed=noise_seed, **clock_of(engine)
    )
    return replay.run(_blocks(trace, planner, batch=batch, steps=steps), progress)


def _blocks(
    trace: Trace, planner: Planner, *, batch: int, steps: int | None
) -> Iterable[LayerSteps]:
    """What a run reads of a trace."""
    reads = planner.reads
    blocks = layer_steps(trace, batch=batch, steps=steps, **reads)
    if reads["columns"] or reads["routing"] or trace.rows > MOST_KEPT_ROWS:
        return blocks
    # Runs of a sweep differ in policies and machines far more often than in this.
    cut = (trace.passes, batch, steps)
    if cut not in trace.last_cut:
        kept = list(blocks)
        trace.last_cut.clear()
        trace.last_cut[cut] = kept
    return trace.last_cut[cut]
