"""Which engine simulates a run: the fast one, or SimPy.

Both give the same results to the last bit. SimPy's is the model to read; it also runs
what the fast one does not know.
"""

from __future__ import annotations

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
FAST = "fast"

OBSERVED = "a planner that somebody observes"
OTHER_COSTS = "costs that are not a hardware profile's"
ARRIVALS = "requests that arrive over time"
SIMPY_ALONE = (ARRIVALS, OBSERVED, OTHER_COSTS)
"""What SimPy's engine runs, and the fast one does not."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A choice of engine.

    Attributes:
        name: ``simpy`` or ``fast``.
        reason: why it is not the fast one; empty if it is, or if SimPy was asked for.
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
        # Engines are imported when they run: SimPy's brings a library of its own.
        if self.name == SIMPY:
            from moesim.sim.replay import Replay  # noqa: PLC0415 - see above

            walk = compose(trace, batch=batch, steps=steps, columns=columns)
            return Replay(
                profile, planner.costs, planner, timeline, noise_seed=noise_seed
            ).run(walk, progress)

        from moesim.sim.fast.replay import Replay as FastReplay  # noqa: PLC0415 - as above

        blocks = _blocks(trace, planner, columns, batch=batch, steps=steps)
        return FastReplay(
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
    """What the fast engine reads of a trace, for the policies of a run."""
    policies = planner.policies
    prefetch = policies.prefetch
    predictors = tuple(name for name in prefetch.needs if name in PREDICTION_COLUMNS)
    # Altered routing is weighed by the gates of single tokens.
    tokens = policies.routing.alters
    tokens |= any(policy.reads_tokens for policy in policies.all())
    routing = tokens or prefetch.foretells or prefetch.reads_routing
    routing |= policies.assignment.defers
    blocks = layer_steps(
        trace,
        batch=batch,
        steps=steps,
        columns=columns,
        predictors=predictors,
        routing=routing,
        tokens=tokens,
    )
    if columns or routing or trace.rows > MOST_KEPT_ROWS:
        return blocks
    # Runs of a sweep differ in policies and machines far more often than in this.
    cut = (trace.passes, batch, steps)
    if cut not in trace.last_cut:
        kept = list(blocks)
        trace.last_cut.clear()
        trace.last_cut[cut] = kept
    return trace.last_cut[cut]


def choose_engine(
    wanted: str,
    planner: Planner,
    *,
    arrivals: bool = False,
) -> Engine:
    """Choose the engine of a run.

    Args:
        wanted: ``simpy``, ``fast``, or ``auto`` for the fast one where it knows
            everything that is involved.
        planner: of the run.
        arrivals: whether requests arrive over time: what runs then depends on the time.

    Raises:
        PolicyError: the fast engine is wanted and does not know something.
    """
    if wanted == SIMPY:
        return Engine(SIMPY)
    reason = ARRIVALS if arrivals else _unknown(planner)
    if reason is None:
        return Engine(FAST)
    if wanted == FAST:
        raise PolicyError(
            f"--engine fast: not possible: {reason}; use --engine auto, which takes"
            " SimPy then"
        )
    return Engine(SIMPY, reason)


def _unknown(planner: Any) -> str | None:
    """What the fast engine cannot run of this; None if it can."""
    from moesim.hwprofiles.costs import Costs  # noqa: PLC0415 - names need not wait for it
    from moesim.policies.planner.planner import Planner  # noqa: PLC0415 - likewise

    if type(planner) is not Planner:
        return OBSERVED
    if type(planner.costs) is not Costs:
        return OTHER_COSTS
    return None
