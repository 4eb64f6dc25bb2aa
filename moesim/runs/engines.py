"""Which engine simulates a run: the compiled one, or SimPy.

Both give the same results to the last bit. SimPy's is the one to read; it also runs
what the compiled one does not know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.policies.base import PolicyError
from moesim.traces.format.batch import compose
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.format.schema import PREDICTION_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.planner import Planner
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace
    from moesim.traces.timeline.spans import Timeline

MOST_KEPT_ROWS = 1 << 16
"""Rows of a trace whose blocks are kept for the next run: about ten megabytes."""

SIMPY = "simpy"
COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Engine:
    """A choice of engine.

    Attributes:
        name: ``simpy`` or ``compiled``.
        reason: why it is not the compiled one; empty if it is, or if SimPy was asked
            for.
    """

    name: str
    reason: str = ""

    def described(self) -> dict[str, Any]:
        """Describe the engine as results do."""
        return {"engine": self.name, "engine_reason": self.reason or None}

    def run(
        self,
        trace: Trace,
        planner: Planner,
        profile: HardwareProfile,
        timeline: Timeline,
        *,
        batch: int,
        steps: int | None,
        noise_seed: int | None,
        progress: Callable[[RoutedStep], None] | None,
    ) -> ReplayResult:
        """Walk a planner through a trace.

        Raises:
            TraceError: a damaged trace.
            PolicyError: a policy answered something illegal.
        """
        policies = planner.policies.all()
        columns = tuple(
            dict.fromkeys(column for policy in policies for column in policy.needs)
        )
        # Engines are imported when they run: each brings a library of its own.
        if self.name == SIMPY:
            from moesim.sim.replay import Replay  # noqa: PLC0415 - see above

            walk = compose(trace, batch=batch, steps=steps, columns=columns)
            return Replay(
                profile, planner.costs, planner, timeline, noise_seed=noise_seed
            ).run(walk, progress)

        from moesim.sim.compiled.engine import CompiledReplay  # noqa: PLC0415 - as above

        blocks = _blocks(trace, planner, columns, batch=batch, steps=steps)
        return CompiledReplay(
            profile, planner.costs, planner, timeline, noise_seed=noise_seed
        ).run(blocks, progress)


def _blocks(
    trace: Trace,
    planner: Planner,
    columns: tuple[str, ...],
    *,
    batch: int,
    steps: int | None,
) -> Iterable[LayerSteps]:
    """Return what the compiled engine reads of a trace, for the policies of a run."""
    from moesim.sim.compiled.support import (  # noqa: PLC0415 - as above
        all_bring_kernels,
        answers_with_kernels,
    )

    policies = planner.policies
    prefetch = policies.prefetch
    predictors: tuple[str, ...] = ()
    # Policies in Python are shown every layer step as an object.
    routed = not all_bring_kernels(planner)
    tokens = any(policy.reads_tokens for policy in policies.all())
    routing = tokens or policies.routing.alters or prefetch.foretells
    routing |= policies.assignment.defers
    if answers_with_kernels(prefetch):
        predictors = tuple(
            name for name in prefetch.needs if name in PREDICTION_COLUMNS
        )
        routing |= prefetch.reads_routing
    blocks = layer_steps(
        trace,
        batch=batch,
        steps=steps,
        columns=columns,
        predictors=predictors,
        routing=routing,
        tokens=tokens,
        routed=routed,
    )
    if columns or routing or routed or trace.rows > MOST_KEPT_ROWS:
        return blocks
    # Runs of a sweep differ in policies and machines far more often than in this.
    cut = (trace.passes, batch, steps)
    if cut not in trace.last_cut:
        kept = list(blocks)
        trace.last_cut.clear()
        trace.last_cut[cut] = kept
    return trace.last_cut[cut]


SIMPY_S = 1e-4
"""Seconds of a layer step in SimPy, about (0.8e-4 to 2e-4 measured)."""


def choose_engine(
    wanted: str,
    planner: Planner,
    profile: HardwareProfile,
    *,
    arrivals: bool = False,
    layer_steps: float = math.inf,
) -> Engine:
    """Choose the engine of a run.

    Args:
        wanted: ``simpy``, ``compiled``, or ``auto`` for the compiled one where it knows
            everything that is involved.
        planner: of the run.
        profile: the machine.
        arrivals: whether requests arrive over time: what runs then depends on the time.
        layer_steps: of the run, about. Where compiling the engine would take longer
            than SimPy, ``auto`` takes SimPy for the first such run; whoever runs a
            second will run more.

    Raises:
        PolicyError: the compiled engine is wanted and does not know something.
    """
    if wanted == SIMPY:
        return Engine(SIMPY)
    from moesim.sim.compiled.support import (  # noqa: PLC0415 - as above
        ARRIVALS,
        unsupported,
    )

    reason = ARRIVALS if arrivals else unsupported(planner, profile, planner.costs)
    if reason is None:
        if wanted == COMPILED or not _is_soon_done(layer_steps):
            return Engine(COMPILED)
        return Engine(SIMPY, "sooner done than the compiled engine is compiled")
    if wanted == COMPILED:
        raise PolicyError(
            f"--engine compiled: not possible: {reason}; use --engine auto, which"
            " takes SimPy then"
        )
    return Engine(SIMPY, reason)


def _is_soon_done(layer_steps: float) -> bool:
    """Tell whether this is a first short run, and the engine is not on disk."""
    from moesim.machine_code import library, store  # noqa: PLC0415 - as above
    from moesim.sim.compiled.loop import run_steps  # noqa: PLC0415 - as above
    from moesim.sim.compiled.support import COMPILE_S  # noqa: PLC0415 - as above

    if layer_steps * SIMPY_S > COMPILE_S:
        return False

    return bool(library.missing([run_steps])) and not store.noted("short-run")
