"""Repeated measurements as entries of a profile: a value, its spread, its interval.

A machine answers the same question a little differently each time, and now and then
much later. So medians instead of means.

Samples are passed as arrays of seconds, one per size: `Mapping[size, float64 [n]]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pandas as pd
import scipy

from moesim.hwprofiles.schema import Curve, Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moesim.hwprofiles.schema import ReferenceExpert

_PROBABILITIES = np.linspace(0.0, 1.0, 21)
"""Of the quantiles that a profile keeps."""

_LEAST_RANKED = 6
"""Samples from which on the least and the largest hold the median in 95 %."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, of a normal distribution."""
_LEAST = 1e-24
"""Below it a slope counts as zero, so that its inverse stays finite."""


class FitReport(NamedTuple):
    """Errors of a fit at points that it had not seen, each left out in turn; residuals
    are relative.

    `samples` measurements went in; `held_out` points were left out, one at a time.
    """

    samples: int
    held_out: int
    residual_median: float
    residual_worst: float

    @classmethod
    def of(cls, residuals: Sequence[float] | np.ndarray, samples: int) -> FitReport:
        """Of the errors at the points that were left out, if any."""
        return cls(
            samples,
            len(residuals),
            float(np.median(residuals)) if len(residuals) else 0.0,
            float(np.max(residuals, initial=0.0)),
        )

    def as_table(self) -> dict[str, float]:
        """Return the TOML table of a profile's ``[fit.<cost>]``."""
        return {key: float(value) for key, value in self._asdict().items()}


class Estimate(NamedTuple):
    """A fitted constant: its value, 95 % interval, and interquartile range, over
    resampled measurements.
    """

    value: float
    interval: tuple[float, float]
    spread: float


DRAWS = 40
"""Resamplings behind an interval, at least."""
LEAST_UNITS = 8
"""Units of repetition below which runs are divided into blocks of steps."""


class Units:
    """Measurements that are resampled as a whole, since they share what the machine did
    meanwhile.

    The unit of repetition is a run; where there are fewer than `LEAST_UNITS`, a block
    of consecutive forward passes of one. Operations of a unit are not independent: they
    share its drift, so intervals count units and not operations.

    Args:
        runs: int64 [N], number of each sample's run.
        steps: int64 [N], its forward pass.
        blocks: of each run at least; more than one where runs differ in design, and
            what they share is accounted for otherwise.

    Attributes:
        count: of the units.
        of_rows: int64 [N], number of each sample's unit.
    """

    def __init__(self, runs: np.ndarray, steps: np.ndarray, blocks: int = 1) -> None:
        distinct, run = np.unique(runs, return_inverse=True)
        blocks = max(blocks, -(-LEAST_UNITS // max(1, len(distinct))))
        # Steps differ in number by run, and a run may begin with a prefill of its own.
        last = np.zeros(len(distinct), np.int64)
        np.maximum.at(last, run, steps)
        block = steps * blocks // (last[run] + 1)
        _, unit = np.unique(run * blocks + block, return_inverse=True)
        self.of_rows = unit
        self.count = int(unit.max(initial=-1)) + 1
        self._order = np.argsort(unit, kind="stable")
        self._ends = np.cumsum(np.bincount(unit, minlength=self.count))

    def redrawn(self, rng: np.random.Generator) -> np.ndarray:
        """Draw as many units with replacement: the rows of their samples, int64 [M]."""
        begins = self._ends - np.diff(self._ends, prepend=0)
        drawn = rng.integers(0, self.count, self.count)
        parts = [self._order[begins[unit] : self._ends[unit]] for unit in drawn]
        return np.concatenate(parts)


class Singles:
    """Independent measurements, resampled within each point.

    Args:
        point: int64 [N], ascending.

    Attributes:
        count: of the fewest measurements at one point.
        of_rows: int64 [N], number of each.
    """

    def __init__(self, point: np.ndarray) -> None:
        counts = np.bincount(point)
        self.count = int(counts.min())
        self.of_rows = np.arange(len(point))
        self._counts = counts[point]
        self._begins = (np.cumsum(counts) - counts)[point]

    def redrawn(self, rng: np.random.Generator) -> np.ndarray:
        """Draw as many of each point with replacement: their rows, int64 [N]."""
        return self._begins + rng.integers(0, self._counts)


def interval_of(
    value: float, draws: np.ndarray | Sequence[float], units: int
) -> tuple[float, float]:
    """95 % interval of an estimate from what it became of redrawn units.

    Student's t for so many units, times their spread: few of them show less of a
    distribution than there is, and 40 draws do not have a 2.5 % quantile.
    """
    if units < 2:
        return value, value
    deviation = float(np.std(draws, ddof=1)) * np.sqrt(units / (units - 1))
    half_width = float(scipy.special.stdtrit(units - 1, 0.975) * deviation)
    return value - half_width, value + half_width


class Resampled(NamedTuple):
    """Constants, and what they become where measurements are redrawn: the one
    bootstrap behind all intervals of a calibration.

    Attributes:
        value: float64 [C].
        draws: float64 [D, C].
        units: of repetition.
    """

    value: np.ndarray
    draws: np.ndarray
    units: int

    @classmethod
    def of(
        cls,
        statistic: Callable[[np.ndarray], float | np.ndarray],
        units: Units | Singles,
        rng: np.random.Generator,
        count: int = DRAWS,
    ) -> Resampled:
        """Apply a statistic to all samples, and to those of redrawn units.

        Args:
            statistic: of the rows of samples, int64 [M], one constant or several.
            units: of the samples.
            rng: draws.
            count: of the draws.
        """
        every = np.arange(len(units.of_rows))
        draws = [statistic(units.redrawn(rng)) for _ in range(count)]
        return cls(
            np.atleast_1d(statistic(every)),
            np.array(draws).reshape(count, -1),
            units.count,
        )

    def mapped(self, change: Callable[[np.ndarray], np.ndarray]) -> Resampled:
        """What follows from the constants."""
        draws = np.array([change(draw) for draw in self.draws])
        return Resampled(change(self.value), draws, self.units)

    def estimates(self, least: float = 0.0) -> list[Estimate]:
        """Each constant with its interval, which ends at the least that it can be."""
        estimates = []
        for value, drawn in zip(self.value.tolist(), self.draws.T, strict=True):
            low, high = interval_of(value, drawn, self.units)
            interval = (max(least, low), max(least, high))
            estimates.append(Estimate(value, interval, interquartile_range(drawn)))
        return estimates


def measured(samples: np.ndarray, *, source: str, date: str) -> Quantity:
    """Summarise repeated measurements of one number: median, interquartile range,
    interval of the median.

    Args:
        samples: [n], in the number's unit.
        source: the procedure, in words.
        date: of the measurement, ISO 8601.

    Source: the interval is between order statistics, ``n/2 ± 0.98 sqrt(n)`` (binomial,
    normal approximation); below six samples, Student's t.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(ordered)
    half_width = 0.98 * np.sqrt(count)
    low_rank = max(0, int(count / 2 - half_width))
    high_rank = min(count - 1, int(np.ceil(count / 2 + half_width)))
    interval = (float(ordered[low_rank]), float(ordered[high_rank]))
    if 1 < count < _LEAST_RANKED:
        # All of three samples hold the median in 75 %.
        error = _MEDIAN_ERROR * float(np.std(ordered, ddof=1)) / np.sqrt(count)
        half_width = float(scipy.special.stdtrit(count - 1, 0.975) * error)
        median = float(np.median(ordered))
        interval = (median - half_width, median + half_width)
    return Quantity(
        value=float(np.median(ordered)),
        kind="measured",
        source=source,
        samples=count,
        spread=interquartile_range(ordered),
        date=date,
        interval=interval,
    )


def measured_curve(
    samples: Mapping[int, np.ndarray],
    unit: str,
    *,
    source: str,
    date: str,
    reference: ReferenceExpert | None = None,
) -> Curve:
    """Summarise measurements at several sizes: median and interquartile range of each.

    `samples` of the curve is the fewest at one size. `quantiles` pools all sizes:
    single operations relative to the median of their size, scaled as
    `quantiles_around_one` does, so that noise drawn from them adds no time.

    Args:
        samples: size -> seconds [n].
        unit: of the sizes, ``tokens`` or ``bytes``.
        source: the procedure, in words.
        date: of the measurement, ISO 8601.
        reference: the expert measured, for curves over tokens.
    """
    sizes = sorted(samples)
    medians = [float(np.median(samples[size])) for size in sizes]
    # Relative to their medians, operations of all sizes scatter alike.
    ratios = np.concatenate(
        [
            np.asarray(samples[size]) / median
            for size, median in zip(sizes, medians, strict=True)
        ]
    )
    return Curve(
        unit=unit,
        at=tuple(sizes),
        seconds=tuple(medians),
        kind="measured",
        source=source,
        samples=min(len(samples[size]) for size in sizes),
        spread=tuple(interquartile_range(samples[size]) for size in sizes),
        date=date,
        quantiles=quantiles_around_one(ratios),
        reference=reference,
    )


def quantiles_around_one(ratios: np.ndarray) -> tuple[float, ...]:
    """Summarise a distribution at 21 equally spaced probabilities, so that drawing from
    it has mean 1.

    The ends are the 2 % and 98 % points: one delay in a thousand would otherwise be
    drawn once in forty.

    Args:
        ratios: float64 [n], single operations over their expected time.
    """
    inner = np.clip(_PROBABILITIES, 0.02, 0.98)
    values = np.quantile(ratios, inner)
    # Draws interpolate linearly, so their mean is the trapezoid rule's.
    mean = np.trapezoid(values, _PROBABILITIES)
    # Four digits, so that files stay readable.
    return tuple(round(float(value), 4) for value in values / mean)


def inverse(estimate: Estimate) -> Estimate:
    """Turn seconds per unit into units per second; the spread is carried over
    relatively.
    """
    low, high = estimate.interval
    value = 1 / max(estimate.value, _LEAST)
    # The slowest rate belongs to the highest slope.
    slowest = 1 / max(high, _LEAST)
    fastest = 1 / max(low, _LEAST)
    return Estimate(
        value=value,
        interval=interval_around(value, slowest, fastest),
        spread=estimate.spread * value * value,
    )


def interval_around(value: float, low: float, high: float) -> tuple[float, float]:
    """Return an interval, widened to hold a value.

    Resampled estimates of a skewed distribution may all lie on one side of it.
    """
    return float(min(value, low)), float(max(value, high))


def interquartile_range(values: np.ndarray) -> float:
    """Distance between the quartiles of [n] values."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)


CLIP = 0.1
"""Share at both ends that a mean pulls in to the rest: what other programs do is no
property of the machine.
"""

_ITERATIONS = 16
_RIDGE = 1e-9
_TOLD = 1.5
"""Standard errors from which on runs differ by more than their operations explain."""
_REDRAWN = 400
"""Resamplings of slowdowns, each of which is one step."""
_PLANE_ITERATIONS = 8
_HUBER = 1.5
"""Standard deviations beyond which a residual counts by its size, not its square."""
_TUKEY = 4.685
"""Standard deviations beyond which it does not count: what had to wait is no slowdown.
Source: Tukey's biweight, 95 % efficient for a normal distribution.
"""
_MAD_TO_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
_LATE = 5.0
"""Standard deviations above the median from which a sample may be what another program
did: one in millions would be there by chance.
"""
_MOST_LOG_FACTOR = np.log(5.0)
"""A machine on which others take more of the speed would hardly finish anything."""


class Slowdowns(NamedTuple):
    """Factors by which C others slow N operations, and what moves them.

    Attributes:
        factors: float64 [C] in [1, 5].
        rest: float64 [N], what is left of each logarithm.
        weights: float64 [N].
        slopes: float64 [N, C], by what a logarithm changes with those of the factors.
        expected: float64 [N, C], the same of what was expected, the instruments.
        groups: int64 [N], from 0, whose means were left out.
    """

    factors: np.ndarray
    rest: np.ndarray
    weights: np.ndarray
    slopes: np.ndarray
    expected: np.ndarray
    groups: np.ndarray

    def redrawn(
        self, units: Units, runs: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Return what the factors become of redrawn runs, float64 [draws, C], by one
        step from the answer.

        What a whole run is slower by is drawn as often as there are runs, from what
        they differ by, and what its operations differ by from its mean is redrawn by
        unit: with whole runs, terms that two of a dozen tell would come and go.

        Args:
            units: blocks of runs.
            runs: int64 [N], from 0.
            rng: draws.

        Source: DerSimonian and Laird 1986 for the variance between runs.
        """
        count = len(self.factors)
        ridge = _RIDGE * np.eye(count)
        instruments = self.weights[:, None] * self.expected
        size = np.bincount(runs, self.weights)
        means = np.bincount(runs, self.weights * self.rest) / size
        deviation = self.rest - means[runs]
        single = self.weights**2 @ deviation**2 / max(size.sum() - len(size), 1.0)
        # A run that is slower shows less of it than there is: means of groups and
        # factors take up the rest.
        marks = (runs == np.arange(len(size))[:, None]).astype(np.float64)
        shown = np.array([_centred(mark, self.groups, self.weights) for mark in marks])
        gram = instruments.T @ self.slopes + ridge
        shown -= (self.slopes @ np.linalg.solve(gram, instruments.T @ shown.T)).T
        share = _summed(self.weights[:, None] * shown.T, runs) / size[:, None]
        free = max(np.trace(share), 3.0)
        beyond = size @ means**2 - free * single
        # One run alone shows none.
        has_drift = len(size) > 1 and beyond > _TOLD * single * np.sqrt(2 * free)
        # So few runs hardly tell a variance; Student's t is wider by as much.
        student = free / (free - 2.0)
        room = size @ (share**2).sum(axis=1)
        shared = student * beyond / room if has_drift else 0.0

        of_run = _summed(instruments, runs) / size[:, None]
        within = instruments - self.weights[:, None] * of_run[runs]
        # Weights fall where rests grow: what is far off moves less than they say.
        near = np.minimum(_distance(self.rest) / _TUKEY, 1.0) ** 2
        left = 1 - near
        yields = (left * (1 - 5 * near)).sum() / (left**2).sum()
        unit = units.of_rows
        terms = instruments[:, :, None] * self.slopes[:, None, :]
        grams = _summed(terms, unit)
        scores = _summed(within * (deviation / yields)[:, None], unit)
        reaches = _summed(instruments, unit)
        run = np.zeros(units.count, np.int64)
        run[unit] = runs

        evenly = np.full(units.count, 1 / units.count)
        counts = rng.multinomial(units.count, evenly, _REDRAWN)
        scatter = np.sqrt(shared + single / size / yields**2)
        slower = scatter * rng.standard_normal((_REDRAWN, len(size)))
        gram = np.tensordot(counts, grams, 1) + ridge
        moved = counts @ scores + (counts * slower[:, run]) @ reaches
        steps = np.linalg.solve(gram, moved[:, :, None])[:, :, 0]
        logs = np.clip(np.log(self.factors) + steps, 0.0, _MOST_LOG_FACTOR)
        return np.asarray(np.exp(logs))


def fit_slowdowns(
    logs: np.ndarray,
    states: np.ndarray,
    expected: np.ndarray,
    busy: np.ndarray,
    groups: np.ndarray,
) -> Slowdowns:
    """Find the factors by which others slow operations, as the simulator applies them:
    those of all that run at once multiply.

    An operation with work w takes t, of which it spends the share p[k] in state k (who
    else is busy), where it proceeds at ``1 / prod of factors``. So ``log t = a[group] -
    log(sum of p[k] / factors of k)``.

    An operation that took long by chance saw less of what ran beside it at its start,
    so its own shares correlate with its noise, and least squares would find too small
    factors. What is running at its start, for the usual length, is the instrument.
    Reweighted Gauss-Newton steps, since single operations have tails: by Huber's
    weights from afar, then by Tukey's, which leave out what has nothing to do with the
    rest.

    Args:
        logs: float64 [N], log seconds.
        states: float64 [N, K], share of each operation's time by state.
        expected: float64 [N, K], the same of a window as long as such operations
            usually take, by what runs when it begins.
        busy: bool [K, C], which others are busy in a state.
        groups: int [N], operations of equal work.
    """
    groups = renumbered(groups)
    log_factors = np.zeros(busy.shape[1])
    weights = np.ones(len(logs))

    def slopes_at(rates: np.ndarray, shares: np.ndarray) -> np.ndarray:
        slopes = (shares * rates) @ busy / (shares @ rates)[:, None]
        # The constants a[group] drop out where every group is centred.
        columns = [_centred(column, groups, weights) for column in slopes.T]
        return np.column_stack(columns)

    # A little on the diagonal: columns that never vary would make it singular.
    ridge = _RIDGE * np.eye(len(log_factors))
    for iteration in range(_ITERATIONS):
        rates = np.exp(-busy @ log_factors)
        rest = _centred(logs + np.log(states @ rates), groups, weights)
        slopes = slopes_at(rates, states)
        expected_slopes = slopes_at(rates, expected)
        instruments = weights[:, None] * expected_slopes
        gram = instruments.T @ slopes + ridge
        step = _bounded_step(gram, instruments.T @ rest, log_factors)
        log_factors = np.clip(log_factors + step, 0.0, _MOST_LOG_FACTOR)

        # Huber: full weight near, weight by distance beyond the threshold; then Tukey:
        # as good as none there.
        distance = _distance(rest)
        weights = 1.0 / np.maximum(1.0, distance / _HUBER)
        if iteration >= _ITERATIONS // 2:
            near = np.maximum(1.0 - (distance / _TUKEY) ** 2, 0.0)
            weights = np.maximum(near**2, 1e-12)
    return Slowdowns(
        np.exp(log_factors), rest, weights, slopes, expected_slopes, groups
    )


def _summed(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Sum rows by number, [numbers, ...]."""
    total = np.zeros((int(numbers.max()) + 1, *values.shape[1:]))
    np.add.at(total, numbers, values)
    return total


def _distance(rest: np.ndarray) -> np.ndarray:
    """In standard deviations, which are read off the median."""
    distance = np.abs(rest)
    return np.asarray(distance / (_MAD_TO_DEVIATION * np.median(distance) + 1e-9))


def _bounded_step(
    gram: np.ndarray, gradient: np.ndarray, log_factors: np.ndarray
) -> np.ndarray:
    """Solve for a step in which no factor that is 1 already would fall below it: such
    ones are held, and the others take up what they explain.
    """
    free = np.ones(len(gradient), np.bool_)
    step = np.zeros(len(gradient))
    while free.any():
        step[:] = 0.0
        step[free] = np.linalg.solve(gram[np.ix_(free, free)], gradient[free])
        leaves = free & (log_factors <= 0.0) & (step < 0.0)
        if not leaves.any():
            break
        free &= ~leaves
        step[leaves] = 0.0
    return step


def _centred(
    values: np.ndarray,
    groups: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    """Subtract from each value the weighted mean of its group, float64 [N]."""
    total = np.bincount(groups, weights)
    means = np.bincount(groups, weights * values) / total
    return np.asarray(values - means[groups])


def comparable(marked: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Find the rows of groups that have both marked and unmarked ones, bool [N].

    Args:
        marked: bool [N].
        groups: int [N].
    """
    by_group = pd.Series(marked).groupby(groups)
    return np.asarray(by_group.transform("any") & ~by_group.transform("all"))


def contrast(
    logs: np.ndarray,
    marked: np.ndarray,
    groups: np.ndarray,
) -> float:
    """Return by what factor marked operations take longer than unmarked ones of the
    same group, median.

    Args:
        logs: float64 [N], log seconds.
        marked: bool [N].
        groups: int [N], operations of equal work under equal circumstances; those of
            one kind only do not count.

    Returns:
        1.0 where nothing can be compared.
    """
    unmarked = pd.Series(logs).where(~marked).groupby(groups).transform("median")
    # Logarithms: the factor of a median is the median of factors.
    differences = (logs - unmarked)[marked].dropna()
    return float(np.exp(differences.median())) if len(differences) else 1.0


def nonnegative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Find x >= 0 in ``seconds ~ columns @ x``: the one least squares behind all
    constants that are sums.

    Args:
        columns: float64 [N, F], none negative.
        seconds: float64 [N].

    Returns:
        float64 [F].
    """
    # Of equally long columns, the first of those that explain as much is taken.
    length = np.maximum(np.linalg.norm(columns, axis=0), _LEAST)
    return np.asarray(scipy.optimize.nnls(columns / length, seconds)[0] / length)


def fit_plane(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Do the same with residuals clipped at both ends by `CLIP`, as `clipped_mean`
    does.
    """
    constants = nonnegative(columns, seconds)
    for _ in range(_PLANE_ITERATIONS):
        fitted_s = columns @ constants
        # Outliers are pulled in to the plane, then it is fitted anew.
        constants = nonnegative(columns, fitted_s + _clipped(seconds - fitted_s))
    return constants


def clipped_mean(seconds: np.ndarray) -> float:
    """Mean with both ends clipped by `CLIP`; 0 without any."""
    if not len(seconds):
        return 0.0
    return float(_clipped(seconds).mean())


def _clipped(values: np.ndarray) -> np.ndarray:
    """Pull both ends in to the rest, float64 [n]."""
    bounds = np.quantile(values, (CLIP, 1 - CLIP))
    return np.asarray(np.clip(values, *bounds))


def renumbered(groups: np.ndarray) -> np.ndarray:
    """Number groups from 0, in ascending order of what they are called: int64 [N]."""
    return np.asarray(np.unique(groups, return_inverse=True)[1])


def resampled(seconds: np.ndarray, units: Units, rng: np.random.Generator) -> Estimate:
    """Return the clipped mean with its 95 % interval over redrawn units.

    The interval also holds what the mean would be without late samples: clipped or not,
    they all lie on one side of the rest.
    """
    (mean,) = Resampled.of(
        lambda rows: clipped_mean(seconds[rows]), units, rng
    ).estimates(-np.inf)
    low, high = mean.interval
    median = np.median(seconds)
    deviation = _MAD_TO_DEVIATION * np.median(np.abs(seconds - median))
    on_time = seconds[seconds <= median + _LATE * deviation]
    low -= mean.value - clipped_mean(on_time)
    return Estimate(mean.value, (low, high), interquartile_range(seconds))


TOLERATED: Final = 0.01
"""Share of a step's time that may be lost beyond that of the best repetition."""


def undisturbed_medians(lengths_s: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Choose a repetition of every step: of those that lost least, the median one.

    Other tenants of a machine slow memory and clocks without a trace in any counter,
    in bursts of half a second; they are why the median counts. Of two the shorter does.

    Args:
        lengths_s: float64 [R, S], seconds by repetition and step.
        lost: float64 [R, S], shares as
            `moesim.traces.timeline.operations.lost_shares` counts them.

    Returns:
        int64 [S], repetition by step.
    """
    disturbed = lost > lost.min(axis=0) + TOLERATED
    # Disturbed ones sort last, so that the first rows are the others by length.
    order = np.argsort(np.where(disturbed, np.inf, lengths_s), axis=0, kind="stable")
    middle = ((~disturbed).sum(axis=0) - 1) // 2
    return np.asarray(order[middle, np.arange(lengths_s.shape[1])])
