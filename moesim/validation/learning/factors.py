"""By how much longer than predicted the parts of real runs took.

Every run is simulated with the profile, so that its operations have the sizes, the
order and the neighbours that they really had; what then differs on average is the cost.
Steps of which other programs took a part are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.fit_operations import SPAN_KINDS
from moesim.hwprofiles.calibration.gaps import add_gaps
from moesim.hwprofiles.calibration.observations import DesignedRun, Gaps
from moesim.hwprofiles.calibration.points import LEAST_SAMPLES
from moesim.hwprofiles.calibration.robust import clipped_mean
from moesim.hwprofiles.calibration.run_spans import RunSpans
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.lanes import COMPUTE_KINDS
from moesim.sim.replay import Replay
from moesim.traces.timeline.operations import lost_shares
from moesim.traces.timeline.spans import COMPUTE, Timeline
from moesim.validation.paired_runs import step_lengths
from moesim.validation.profile_checks import MOST_LOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moesim.hwprofiles.calibration.observations import LayerStepTimes
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape
    from moesim.validation.finished_runs import FinishedRun

JOIN: Final = "join"
FIRST_OPERATION: Final = "first operation"
PLANNING: Final = "planning of "
"""Parts without a lane of their own; a policy's name follows `PLANNING`."""

_PER_DOUBLING: Final = 4
"""Groups of operations by tokens: so many to a doubling."""


class Part(NamedTuple):
    """Which cost an operation has: that of a lane's kind, ``dense``, ``head``, or one
    of the parts above; and of which model, where its size matters.
    """

    name: str
    shape: ModelShape | None = None


class Factor(NamedTuple):
    """Measured over predicted seconds of about so many tokens; 0 tokens where they do
    not matter.
    """

    tokens: float
    factor: float
    samples: int


class _Samples(NamedTuple):
    """Operations of one part: tokens and seconds, each float64 [N]."""

    tokens: np.ndarray
    seconds: np.ndarray


def simulated(
    run: FinishedRun, profile: HardwareProfile, *, noise_seed: int | None = None
) -> Timeline:
    """Replay a real run as a profile predicts it; decisions are made with the costs
    that the run's own policies saw.

    Args:
        run: the run.
        profile: predicts.
        noise_seed: of drawn operation times; the means when None.
    """
    setup = run.setup
    costs = Costs(profile, setup.shape, pageable=setup.system.pageable)
    timeline = Timeline(profile.lanes)
    replay = Replay(profile, costs, setup.planner(), timeline, noise_seed=noise_seed)
    replay.run(run.steps)
    timeline.close()
    return timeline


def lost_of_steps(run: FinishedRun) -> np.ndarray:
    """Share of each step's time that other programs took, float64 [steps]."""
    lengths_s = step_lengths(run.timeline)
    return lost_shares(run.timeline.operations, lengths_s)


def factors_of(
    runs: Sequence[FinishedRun], profile: HardwareProfile
) -> dict[Part, list[Factor]]:
    """Compare runs with what a profile predicts of them.

    Args:
        runs: of the profile's machine.
        profile: predicts.

    Returns:
        By part, by ascending tokens; what was seen less often than a point of a curve
        needs is left out.
    """
    measured: dict[Part, list[_Samples]] = {}
    predicted: dict[Part, list[_Samples]] = {}
    for run in runs:
        kept = lost_of_steps(run) <= MOST_LOST
        # Where every step was disturbed there is nothing better to be had.
        kept = kept if kept.any() else np.ones_like(kept)
        for timeline, samples_of in (
            (run.timeline, measured),
            (simulated(run, profile), predicted),
        ):
            for part, samples in _parts(run, timeline, kept):
                samples_of.setdefault(part, []).append(samples)

    factors = {}
    for part, of_runs in measured.items():
        joined = _joined(of_runs)
        of_part = list(_factors(joined, _joined(predicted.get(part, []))))
        if of_part:
            factors[part] = of_part
    return factors


def _factors(measured: _Samples, predicted: _Samples) -> Iterator[Factor]:
    groups = _groups(measured.tokens)
    predicted_groups = _groups(predicted.tokens)
    for group in np.unique(groups):
        seconds = measured.seconds[groups == group]
        predicted_s = clipped_mean(predicted.seconds[predicted_groups == group])
        if len(seconds) < LEAST_SAMPLES or not predicted_s:
            continue
        yield Factor(
            tokens=float(measured.tokens[groups == group].mean()),
            factor=clipped_mean(seconds) / predicted_s,
            samples=len(seconds),
        )


def _groups(tokens: np.ndarray) -> np.ndarray:
    """Number groups of about as many tokens, int64 [N]."""
    return np.round(_PER_DOUBLING * np.log2(np.maximum(tokens, 0.5))).astype(np.int64)


def _parts(
    run: FinishedRun, timeline: Timeline, kept: np.ndarray
) -> Iterator[tuple[Part, _Samples]]:
    """Cut a run, or a simulation of it, into its parts."""
    shape = run.setup.shape
    policy = run.setup.system.assignment.partition(":")[0]
    spans = RunSpans(
        DesignedRun(
            timeline,
            shape,
            assignment=policy,
            context_tokens=[step.context_tokens for step in run.steps],
            workers=run.setup.profile.workers,
            kept=kept,
        ),
        shape_number=0,
        number=0,
    )
    for lane_kind in COMPUTE_KINDS:
        products = spans.operations(lane_kind, (COMPUTE,))
        yield Part(lane_kind.name, shape), _samples(products.seconds, products.sizes)
    for lane_kind, span_kinds in SPAN_KINDS.items():
        moves = spans.operations(lane_kind, span_kinds)
        yield Part(lane_kind.name), _samples(moves.seconds)
    yield Part(PLANNING + policy), _samples(spans.planning().seconds)

    dense = spans.dense_parts()
    heads = dense.layer < 0
    for name, chosen, amount in (
        (paths.DENSE, ~heads, "tokens"),
        (paths.HEAD, heads, "sequences"),
    ):
        tokens = spans.of_steps(amount)[dense.step[chosen]]
        yield Part(name, shape), _samples(dense.seconds[chosen], tokens)

    gaps = Gaps()
    add_gaps(spans, gaps)
    yield Part(FIRST_OPERATION), _samples(_seconds(gaps.first))
    yield Part(JOIN), _samples(_seconds(gaps.join))


def _samples(seconds: np.ndarray, tokens: np.ndarray | None = None) -> _Samples:
    if tokens is None:
        tokens = np.zeros(len(seconds))
    return _Samples(tokens.astype(np.float64), seconds)


def _seconds(tables: Sequence[LayerStepTimes]) -> np.ndarray:
    return np.concatenate([table.seconds for table in tables] or [np.zeros(0)])


def _joined(parts: Sequence[_Samples]) -> _Samples:
    if not parts:
        return _Samples(np.zeros(0), np.zeros(0))
    columns = zip(*parts, strict=True)
    return _Samples(*(np.concatenate(column) for column in columns))
