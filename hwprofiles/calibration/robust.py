"""Robust statistics: clipped means, Huber regression, quantiles to draw from.

A run is a sum of operations, so means are wanted. A delay that the operating system
causes once in a thousand operations must not move them.
"""

from __future__ import annotations

import numpy as np
from scipy import optimize

from moesim.hwprofiles.calibration.estimates import (
    DrawSummary,
    Estimate,
    interquartile_range,
    interval_around,
)

CLIP = 0.1
"""Share at both ends that a mean pulls in to the rest: what other programs do is no
property of the machine.
"""
DRAWS = 40
"""Resamplings behind each interval of a calibration."""

_ITERATIONS = 12
_PLANE_ITERATIONS = 8
_HUBER = 1.5
"""Standard deviations beyond which a residual counts by its size, not its square."""
_MAD_TO_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
_LEAST_SPEED_LEFT = 0.2
_MOST_LOST = 0.8
"""Shares of speed between which the regression stays: a machine on which others take
all of it would never finish anything.
"""
_TINY_S = 1e-9
_PROBABILITIES = np.linspace(0.0, 1.0, 21)


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


def slowdown_shares(
    logs: np.ndarray,
    shares: np.ndarray,
    groups: np.ndarray,
    *,
    iterations: int = _ITERATIONS,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """Find g >= 0 in ``log t = a[group] - log(1 - shares @ g)``: the share of its speed
    that each other kind of lane takes.

    A slowdown factor s makes work w take ``t = w + t * share * (1 - 1/s)``, so ``g = 1
    - 1/s``. Huber's loss, by reweighted Gauss-Newton steps, since single operations
    have tails.

    Args:
        logs: float64 [N], log seconds.
        shares: float64 [N, C].
        groups: int [N], operations of equal work.
        iterations: steps.
        start: float64 [C] to start from.

    Returns:
        float64 [C] in [0, 0.8].
    """
    groups = renumbered(groups)
    lost = np.zeros(shares.shape[1])
    if start is not None:
        lost = start.copy()
    weights = np.ones(len(logs))

    for _ in range(iterations):
        speed_left = np.maximum(1.0 - shares @ lost, _LEAST_SPEED_LEFT)
        rest = logs + np.log(speed_left)
        slopes = shares / speed_left[:, None]

        # The constants a[group] drop out where every group is centred.
        rest = _centred(rest, groups, weights)
        columns = [_centred(column, groups, weights) for column in slopes.T]
        centred = np.column_stack(columns)

        # A little on the diagonal: columns that never vary would make it singular.
        ridge = 1e-9 * np.eye(len(lost))
        gram = centred.T @ (weights[:, None] * centred) + ridge
        gradient = centred.T @ (weights * rest)
        step = np.linalg.solve(gram, gradient)
        lost = np.clip(lost + step, 0.0, _MOST_LOST)

        # Huber: full weight near, weight by distance beyond the threshold.
        distance = np.abs(rest)
        deviation = _MAD_TO_DEVIATION * np.median(distance) + 1e-9
        threshold = _HUBER * deviation
        weights = 1.0 / np.maximum(1.0, distance / threshold)
    return lost


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
    group = renumbered(groups)
    count = np.bincount(group)
    marked_count = np.bincount(group, marked)
    has_marked = marked_count > 0
    has_unmarked = marked_count < count
    return np.asarray((has_marked & has_unmarked)[group])


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
    kept = comparable(marked, groups)
    if not kept.any():
        return 1.0

    logs = logs[kept]
    marked = marked[kept]
    group = renumbered(groups[kept])
    unmarked_medians = []
    for number in range(group.max() + 1):
        unmarked = (group == number) & ~marked
        unmarked_medians.append(np.median(logs[unmarked]))

    # Logarithms: the factor of a median is the median of factors.
    expected = np.array(unmarked_medians)[group]
    differences = (logs - expected)[marked]
    return float(np.exp(np.median(differences)))


def fit_plane(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Find x >= 0 in ``seconds ~ columns @ x``, residuals clipped at both ends by
    `CLIP` as `clipped_mean` does.

    Args:
        columns: float64 [N, F], none negative.
        seconds: float64 [N].

    Returns:
        float64 [F].
    """
    constants = optimize.nnls(columns, seconds)[0]
    for _ in range(_PLANE_ITERATIONS):
        fitted_s = columns @ constants
        rest_s = seconds - fitted_s
        # Outliers are pulled in to the plane, then it is fitted anew.
        constants = optimize.nnls(columns, fitted_s + _clipped(rest_s))[0]
    return np.asarray(constants)


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


def around_mean(seconds: np.ndarray) -> np.ndarray:
    """Move samples so that their median, which
    `moesim.hwprofiles.calibration.fit_curves` takes, is their clipped mean.
    """
    shift_s = clipped_mean(seconds) - float(np.median(seconds))
    return np.asarray(np.maximum(seconds + shift_s, _TINY_S))


def resampled(seconds: np.ndarray, rng: np.random.Generator) -> Estimate:
    """Return the clipped mean with its 95 % interval over resampled measurements."""
    value = clipped_mean(seconds)
    count = len(seconds)
    draws = []
    for _ in range(DRAWS):
        rows = rng.integers(0, count, count)
        draws.append(clipped_mean(seconds[rows]))
    drawn = DrawSummary.of(draws)
    return Estimate(
        value=value,
        interval=interval_around(value, float(drawn.low), float(drawn.high)),
        spread=interquartile_range(seconds),
    )
