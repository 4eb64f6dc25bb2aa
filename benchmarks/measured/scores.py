"""Predictions of several predictors for one row, and how well they did.

Intervals of all predictors are stretched by one factor and one addition for each case
that the *other* platforms show, so their widths can be compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from scipy import special

from moesim.advice.times.latents import NINETY
from moesim.advice.times.priors import stretched

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.measured.rows import Row
    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents

OURS = "moesim"
ONE_EFFICIENCY = "roofline, one efficiency"
TWO_CONSTANTS = "roofline, two constants"
STRAIGHT_LINE = "straight line"
NEAREST = "nearest row"
BASELINES = (ONE_EFFICIENCY, TWO_CONSTANTS, STRAIGHT_LINE, NEAREST)

MISSED = 0.10
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
# Scores this near cannot be told apart. Of 0, 2, 5 and 10 %, 5 % predicted left-out
# platforms' intervals best.
AS_GOOD = 1.05


class Measured(Protocol):
    """A measured row of llama.cpp, or of an engine with a cache."""

    @property
    def row(self) -> Row:
        """Where it stands."""

    @property
    def machine_name(self) -> str:
        """Rows of one name share a machine."""

    @property
    def machine(self) -> Machine:
        """Specification and probes."""

    @property
    def model(self) -> ModelContents:
        """Contents of the file."""

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``engine``."""

    @property
    def session(self) -> str:
        """Rows of one session share build, clocks and prompts."""

    @property
    def group(self) -> str:
        """Platform that is left out as a whole."""

    @property
    def words(self) -> str:
        """Flags, or policy."""

    @property
    def tokens_per_s(self) -> float:
        """Measured speed."""

    @property
    def seconds(self) -> float:
        """Measured seconds of a token, or of a prompt."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A predicted time: logarithm of seconds, and its standard deviation."""

    log_s: float
    spread: float


@dataclass(frozen=True)
class Prediction:
    """One measured row with what was predicted for it.

    Attributes:
        run: the row.
        fold: platforms, or the source, that were left out with it.
        given: what the prediction was made from, in words.
        guesses: predictor -> its guess.
    """

    run: Measured
    fold: str
    given: str
    guesses: Mapping[str, Guess]

    def error(self, predictor: str) -> float:
        """Predicted over measured tokens/s, minus one."""
        return self.run.seconds / math.exp(self.guesses[predictor].log_s) - 1

    def distance(self, predictor: str) -> float:
        """Error of the logarithm in spreads."""
        guess = self.guesses[predictor]
        return (math.log(self.run.seconds) - guess.log_s) / guess.spread


@dataclass(frozen=True, slots=True)
class Score:
    """How one predictor did on some rows.

    Attributes:
        rows: predicted, each counted once.
        platforms: that they are about.
        median: of the absolute relative errors of tokens/s.
        p90: their 90 % quantile.
        worst: the largest.
        signed: median of the errors with their signs.
        coverage: share of 90 % intervals that hold the measured speed.
        width: median of upper over lower end of the intervals, minus one.
        interval_score: mean of width + 2 / 10 % x what lies outside, in logarithms
            (Gneiting and Raftery 2007, equation 43); the lower the better.
    """

    rows: int
    platforms: int
    median: float
    p90: float
    worst: float
    signed: float
    coverage: float
    width: float
    interval_score: float


def folds_of(runs: Sequence[Measured], left_out: str) -> dict[str, str]:
    """Name of what is left out together, by machine."""
    if left_out == "platforms":
        return {run.machine_name: run.group for run in runs}
    # A platform that two sources measured joins them.
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for run in runs:
        parent[root(run.group)] = root(run.row.source)
    return {run.machine_name: root(run.group) for run in runs}


class Ideal(dict[str, float]):
    """Every rate as specified, and nothing that costs time besides."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(
            host_read=machine.host_peak_bytes_per_s,
            device_read=machine.device_bytes_per_s,
            upload=machine.link_bytes_per_s,
            core_flops=100e9,
            skew=2.4,
            text_skew=1.0,
            tile=0.0,
        )

    def __missing__(self, name: str) -> float:
        """Return what costs nothing: 0 seconds, or a factor of 1."""
        if name.endswith("_s"):
            return 0.0
        # Unpacking is no part of a roofline of bytes.
        return 1e3 if name.startswith("core:") else 1.0


def stretch(predictions: Iterable[Prediction], predictor: str) -> tuple[float, float]:
    """Find factor and addition on spreads such that 90 % of the rows lie inside.

    Of all pairs that reach it, those with the least interval score, and of these the
    largest factor: a spread that tells rows apart is kept, so what lies far off stays
    wide, and one that says little is replaced by a common one. Rows of
    one platform weigh by the root of their number. The row to be predicted counts as
    one more, infinitely far out, so that few platforms give wider intervals.

    Source: split conformal prediction with weights (Tibshirani, Barber, Candes and
    Ramdas 2019, "Conformal prediction under covariate shift", section 2).
    """
    platforms: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in predictions:
        guess = each.guesses[predictor]
        miss = abs(math.log(each.run.seconds) - guess.log_s)
        platforms[each.run.group].append((miss, guess.spread))
    if not platforms:
        return 1.0, 0.0
    rows = np.array([row for pairs in platforms.values() for row in pairs])
    weights = np.array(
        [len(pairs) ** -0.5 for pairs in platforms.values() for _ in pairs]
    )
    total = float(weights.sum())
    share = min(1.0, (1 - MISSED) * (total + 1.0) / total)
    options = []
    for factor in FACTORS:
        # What has to be added (in squares) for a row to lie just inside.
        needed = (rows[:, 0] / NINETY) ** 2 - (factor * rows[:, 1]) ** 2
        added = max(0.0, _weighted_quantile(needed, weights, share))
        spreads = np.sqrt((factor * rows[:, 1]) ** 2 + added)
        outside = np.maximum(0.0, rows[:, 0] - NINETY * spreads)
        losses = 2 * NINETY * spreads + 2 / MISSED * outside
        loss = float(np.average(losses, weights=weights))
        options.append((loss, factor, math.sqrt(added)))
    most = AS_GOOD * min(options)[0]
    return max((factor, added) for loss, factor, added in options if loss <= most)


def widened(predictions: list[Prediction]) -> list[Prediction]:
    """Stretch every predictor's spreads by what the other folds show."""
    stretches: dict[tuple[str, str], tuple[float, float]] = {}
    for fold in {each.fold for each in predictions}:
        for name in (OURS, *BASELINES):
            others = [
                each
                for each in predictions
                if each.fold != fold and name in each.guesses
            ]
            stretches[fold, name] = stretch(others, name)
    return [
        replace(
            each,
            guesses={
                name: Guess(
                    guess.log_s, stretched(guess.spread, stretches[each.fold, name])
                )
                for name, guess in each.guesses.items()
            },
        )
        for each in predictions
    ]


def score(predictions: Sequence[Prediction], predictor: str = OURS) -> Score | None:
    """Summarise predictions; None where there are none.

    A row that is predicted several times counts once in sum.
    """
    known = [each for each in predictions if predictor in each.guesses]
    if not known:
        return None
    times: dict[str, int] = defaultdict(int)
    for each in known:
        times[each.run.row.place + each.run.kind] += 1
    counts = [times[each.run.row.place + each.run.kind] for each in known]
    weights = 1 / np.array(counts)
    signed = np.array([each.error(predictor) for each in known])
    halves = np.array([NINETY * each.guesses[predictor].spread for each in known])
    outside = np.array([abs(each.distance(predictor)) for each in known]) - NINETY
    spreads = halves / NINETY
    missed = np.maximum(0.0, outside) * spreads
    return Score(
        rows=len(times),
        platforms=len({each.run.group for each in known}),
        median=_weighted_quantile(abs(signed), weights, 0.5),
        p90=_weighted_quantile(abs(signed), weights, 0.9),
        worst=float(abs(signed).max()),
        signed=_weighted_quantile(signed, weights, 0.5),
        coverage=float(np.average(outside <= 0, weights=weights)),
        width=math.exp(2 * _weighted_quantile(halves, weights, 0.5)) - 1,
        interval_score=float(
            np.average(2 * halves + 2 / MISSED * missed, weights=weights)
        ),
    )


def _weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order]) / weights.sum()
    at = min(len(values) - 1, int(np.searchsorted(total, share)))
    return float(values[order][at])


def compared(predictions: Sequence[Prediction]) -> tuple[str, float, float] | None:
    """Compare the interval score with the best baseline's, over platforms.

    Returns:
        The baseline, and the 90 % interval of its score minus ours: above 0 we are
        better, around 0 nothing is shown; NaN for a single platform. None where no
        baseline answers.

    Source: Student's t over the means of platforms.
    """
    shared = [each for each in predictions if len(each.guesses) > 1]
    scores = {name: score(shared, name) for name in BASELINES}
    known = {name: result for name, result in scores.items() if result is not None}
    everywhere = {
        name: result
        for name, result in known.items()
        if all(name in each.guesses for each in shared)
    }
    if not everywhere:
        return None
    best = min(everywhere, key=lambda name: everywhere[name].interval_score)
    platforms: dict[str, list[float]] = defaultdict(list)
    for each in shared:
        gain = _loss(each, best) - _loss(each, OURS)
        platforms[each.run.group].append(gain)
    means = np.array([np.mean(rows) for rows in platforms.values()])
    count = len(means)
    if count < 2:
        return best, math.nan, math.nan
    error = float(means.std(ddof=1)) / math.sqrt(count)
    half_width = float(special.stdtrit(count - 1, 1.0 - MISSED / 2)) * error
    mean = float(means.mean())
    return best, mean - half_width, mean + half_width


def _loss(prediction: Prediction, predictor: str) -> float:
    """Interval score of one row."""
    spread = prediction.guesses[predictor].spread
    outside = max(0.0, abs(prediction.distance(predictor)) - NINETY)
    return 2 * NINETY * spread + 2 / MISSED * outside * spread
