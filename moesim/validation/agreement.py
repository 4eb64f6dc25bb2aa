"""When are a simulated and a measured run the same? Four ways to ask.

Two samples may come from one distribution (Kolmogorov-Smirnov); two means may be proven
closer than a margin (TOST, which a lack of data cannot pass, unlike a test for a
difference); two rankings may agree (Kendall's tau, with a tie wherever the measurement
itself cannot tell); and an error may be compared with what repetitions differ by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Kolmogorov(NamedTuple):
    """Largest distance between two empirical distribution functions, and its
    p-value.
    """

    distance: float
    p_value: float


class Equivalence(NamedTuple):
    """Verdict of two one-sided tests: `p_value` is the larger of the two."""

    ratio: float
    p_value: float
    equivalent: bool


def kolmogorov_smirnov(
    left: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray
) -> Kolmogorov:
    """Ask whether two samples may come from one distribution.

    Raises:
        ValueError: an empty sample.
    """
    if not len(left) or not len(right):
        raise ValueError("two samples are compared, found an empty one")
    found = stats.ks_2samp(np.asarray(left), np.asarray(right), method="auto")
    return Kolmogorov(float(found.statistic), float(found.pvalue))


def equivalent(
    simulated: Sequence[float] | np.ndarray,
    measured: Sequence[float] | np.ndarray,
    *,
    margin: float = 0.05,
    alpha: float = 0.05,
) -> Equivalence:
    """Test whether the means of paired observations differ by less than `margin`,
    relative to the measured mean.

    The same step is simulated and measured, so observations come in pairs and only
    their differences scatter.

    Args:
        simulated: seconds per step.
        measured: the same steps.
        margin: relative.
        alpha: chance of calling different means equivalent.

    Raises:
        ValueError: samples of different lengths, or fewer than two pairs.

    Source: two one-sided t-tests, Schuirmann (1987).
    """
    ours = np.asarray(simulated, np.float64)
    theirs = np.asarray(measured, np.float64)
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(
            f"pairs are compared, at least two: found {len(ours)} and {len(theirs)}"
        )
    mean = float(theirs.mean())
    difference = (ours - theirs) / mean
    ratio = float(ours.mean()) / mean
    error = float(difference.std(ddof=1)) / np.sqrt(len(difference))
    if error == 0.0:
        inside = abs(ratio - 1.0) < margin
        return Equivalence(ratio, 0.0 if inside else 1.0, inside)
    above = stats.t.sf((difference.mean() + margin) / error, len(difference) - 1)
    below = stats.t.cdf((difference.mean() - margin) / error, len(difference) - 1)
    worst = float(max(above, below))
    return Equivalence(ratio, worst, worst < alpha)


def kendall_tau(
    simulated: Sequence[float] | np.ndarray,
    measured: Sequence[float] | np.ndarray,
    *,
    floor: float = 0.0,
) -> float | None:
    """Rank correlation of two orders; measured values closer than `floor`, relatively,
    are tied.

    A pair that the measurement cannot order is no evidence either way, so it is left
    out of numerator and denominator; a pair that only the simulation ties counts as
    half wrong.

    Args:
        simulated: one value per policy.
        measured: the same policies.
        floor: relative difference that repetitions of one run reach.

    Returns:
        -1 to 1, or None where the measurement orders no pair.

    Raises:
        ValueError: different lengths.
    """
    ours = np.asarray(simulated, np.float64)
    theirs = np.asarray(measured, np.float64)
    if len(ours) != len(theirs):
        raise ValueError(
            f"two orders of the same things are compared, found {len(ours)} and"
            f" {len(theirs)}"
        )
    agreeing = ordered = 0
    for i in range(len(ours)):
        for j in range(i + 1, len(ours)):
            if abs(theirs[i] - theirs[j]) <= floor * min(theirs[i], theirs[j]):
                continue
            ordered += 1
            agreeing += int(np.sign(theirs[i] - theirs[j]) * np.sign(ours[i] - ours[j]))
    return agreeing / ordered if ordered else None


def repeated_tau(
    repetitions: Sequence[Sequence[Sequence[float]]],
    floors: Sequence[float],
    *,
    draws: int = 40,
) -> float | None:
    """Tau that measurements reach among themselves: what no simulation of theirs can be
    expected to pass.

    Each group is measured anew twice, by resampling its repetitions as `estimate_noise`
    does, and the two orders are compared as `kendall_tau` compares.

    Args:
        repetitions: by group of policies, by policy: its repeated measurements, equally
            many.
        floors: of each group, as in `kendall_tau`.
        draws: pairs of measurements of each group.

    Returns:
        The mean, or None where nothing is repeated or no pair is ever ordered.
    """
    rng = np.random.default_rng(0)

    def anew(policies: Sequence[Sequence[float]]) -> list[float]:
        found = []
        for values in policies:
            middle = float(np.median(values))
            more = np.sqrt(len(values) / (len(values) - 1))
            found.append(
                middle
                + more * (float(np.median(rng.choice(values, len(values)))) - middle)
            )
        return found

    taus = [
        kendall_tau(anew(policies), anew(policies), floor=floor)
        for policies, floor in zip(repetitions, floors, strict=True)
        if all(len(values) > 1 for values in policies)
        for _ in range(draws)
    ]
    known = [tau for tau in taus if tau is not None]
    return float(np.mean(known)) if known else None


def noise_floor(repetitions: Sequence[Sequence[float]]) -> float:
    """Median relative difference between two repetitions of the same run, over all
    pairs of all runs.

    Args:
        repetitions: by run, its repeated measurements; runs with one are left out.

    Returns:
        0 where nothing was repeated.
    """
    pairs = [
        abs(row[i] - row[j]) / (0.5 * (row[i] + row[j]))
        for row in repetitions
        for i in range(len(row))
        for j in range(i + 1, len(row))
    ]
    return float(np.median(pairs)) if pairs else 0.0


def estimate_noise(
    repetitions: np.ndarray,
    estimate: Callable[[np.ndarray], float],
    *,
    draws: int = 400,
) -> float:
    """Relative difference between two estimates from as many repetitions each, median.

    Whole repetitions are resampled (bootstrap); what few of them hide is made up for by
    ``sqrt(R / (R - 1))``.

    Args:
        repetitions: float64 [R, n], R identical runs.
        estimate: of such an array.
        draws: pairs of estimates.

    Returns:
        0.0 for a single repetition.
    """
    count = len(repetitions)
    if count < 2:
        return 0.0
    rng = np.random.default_rng(0)
    found = np.array(
        [estimate(repetitions[rng.integers(0, count, count)]) for _ in range(2 * draws)]
    )
    one = found[:draws]
    other = found[draws:]
    return float(
        np.median(np.abs(one - other) / (0.5 * (one + other)))
        * np.sqrt(count / (count - 1))
    )
