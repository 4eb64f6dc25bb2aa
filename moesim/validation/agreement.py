"""Statistics of agreement between simulated and measured runs.

Two samples may come from one distribution (Kolmogorov-Smirnov); two means may be proven
closer than a margin (TOST, which a lack of data cannot pass, unlike a test for a
difference); two rankings may agree (Kendall's tau, with a tie wherever the measurement
itself cannot tell); and an error may be compared with what repetitions differ by.
"""

from __future__ import annotations

from itertools import combinations
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
    """Result of two one-sided tests: `p_value` is the larger of the two."""

    ratio: float
    p_value: float
    equivalent: bool


def kolmogorov_smirnov(
    left: Sequence[float] | np.ndarray,
    right: Sequence[float] | np.ndarray,
) -> Kolmogorov:
    """Test whether two samples may come from one distribution.

    Raises:
        ValueError: an empty sample.
    """
    if not len(left) or not len(right):
        raise ValueError("two samples are compared, found an empty one")
    # Exact p-values for small samples, asymptotic ones for large.
    result = stats.ks_2samp(
        np.asarray(left),
        np.asarray(right),
        method="auto",
    )
    return Kolmogorov(
        distance=float(result.statistic),
        p_value=float(result.pvalue),
    )


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
    simulated_s = np.asarray(simulated, np.float64)
    measured_s = np.asarray(measured, np.float64)
    count = len(simulated_s)
    if count != len(measured_s) or count < 2:
        raise ValueError(
            f"pairs are compared, at least two: found {count} and {len(measured_s)}"
        )

    mean_s = float(measured_s.mean())
    difference = (simulated_s - measured_s) / mean_s
    ratio = float(simulated_s.mean()) / mean_s
    deviation = float(difference.std(ddof=1))
    error = deviation / np.sqrt(count)
    if error == 0.0:
        # Without scatter there is nothing to test; the means are what they are.
        inside = abs(ratio - 1.0) < margin
        return Equivalence(ratio, 0.0 if inside else 1.0, inside)

    # Equivalent only if both one-sided tests reject: the larger p-value decides.
    freedom = count - 1
    mean_difference = difference.mean()
    above = stats.t.sf((mean_difference + margin) / error, freedom)
    below = stats.t.cdf((mean_difference - margin) / error, freedom)
    p_value = float(max(above, below))
    return Equivalence(ratio, p_value, p_value < alpha)


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
    simulated_s = np.asarray(simulated, np.float64)
    measured_s = np.asarray(measured, np.float64)
    if len(simulated_s) != len(measured_s):
        raise ValueError(
            f"two orders of the same things are compared, found {len(simulated_s)} and"
            f" {len(measured_s)}"
        )

    agreeing = 0
    ordered = 0
    for i, j in combinations(range(len(simulated_s)), 2):
        apart_s = measured_s[i] - measured_s[j]
        if abs(apart_s) <= floor * min(measured_s[i], measured_s[j]):
            continue
        ordered += 1
        # +1 where both order the pair alike, 0 where the simulation ties it.
        simulated_apart_s = simulated_s[i] - simulated_s[j]
        agreeing += int(np.sign(apart_s) * np.sign(simulated_apart_s))
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
    # Seeded, so that the same measurements always give the same figure.
    rng = np.random.default_rng(0)

    def redrawn(policies: Sequence[Sequence[float]]) -> list[float]:
        medians = []
        for values in policies:
            count = len(values)
            median = float(np.median(values))
            # Resampled medians of few values lie too close together.
            widening = np.sqrt(count / (count - 1))
            again = float(np.median(rng.choice(values, count)))
            medians.append(median + widening * (again - median))
        return medians

    taus = []
    for policies, floor in zip(repetitions, floors, strict=True):
        if not all(len(values) > 1 for values in policies):
            continue
        for _ in range(draws):
            tau = kendall_tau(redrawn(policies), redrawn(policies), floor=floor)
            if tau is not None:
                taus.append(tau)
    return float(np.mean(taus)) if taus else None


def noise_floor(repetitions: Sequence[Sequence[float]]) -> float:
    """Median relative difference between two repetitions of the same run, over all
    pairs of all runs.

    Args:
        repetitions: by run, its repeated measurements; runs with one are left out.

    Returns:
        0 where nothing was repeated.
    """
    apart = []
    for values in repetitions:
        for first, second in combinations(values, 2):
            # Over their mean: neither of two repetitions is the true one.
            mean = 0.5 * (first + second)
            apart.append(abs(first - second) / mean)
    return float(np.median(apart)) if apart else 0.0


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
    estimates = []
    for _ in range(2 * draws):
        rows = rng.integers(0, count, count)
        estimates.append(estimate(repetitions[rows]))
    first = np.array(estimates[:draws])
    second = np.array(estimates[draws:])
    mean = 0.5 * (first + second)
    apart = np.abs(first - second) / mean
    widening = np.sqrt(count / (count - 1))
    return float(np.median(apart) * widening)
