"""Statistics of agreement between simulated and measured runs.

The unit of repetition is a run, made anew: steps of one run share the machine's speed
meanwhile and whatever disturbed it, so a hundred of them are not a hundred
measurements. Two means may be proven closer than a margin (TOST, which a lack of data
cannot pass, unlike a test for a difference); two policies have an order only where
their repetitions show one (a paired t-test), and orders are compared by Kendall's tau.
`tests/evidence/test_agreement.py` holds each to its level under drift and correlated
errors.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import special

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEVEL = 0.05
"""Chance of each decision to be wrong where it matters: to prove an equivalence that is
not there, to order equal policies.
"""
_NO_SCATTER = 1e-12


class Equivalence(NamedTuple):
    """Result of two one-sided tests: `p_value` is the larger of the two."""

    ratio: float
    p_value: float
    equivalent: bool


def equivalent(
    predicted: float, repetitions: Sequence[float] | np.ndarray, *, margin: float = 0.05
) -> Equivalence:
    """Test whether a prediction differs by less than a factor of ``1 + margin`` from
    what it predicts, geometric mean.

    Args:
        predicted: by the simulation, which answers the same however often it is asked.
        repetitions: the same, measured in each run.
        margin: relative.

    Raises:
        ValueError: fewer than two repetitions.

    Source: two one-sided t-tests, Schuirmann (1987).
    """
    measured = np.asarray(repetitions, np.float64)
    count = len(measured)
    if count < 2:
        raise ValueError(f"at least two repetitions are needed, found {count}")

    # Logarithms: half as fast is as far away as twice as fast.
    apart = np.log(predicted / measured)
    mean = float(apart.mean())
    ratio = float(np.exp(mean))
    most = float(np.log1p(margin))
    error = float(apart.std(ddof=1)) / np.sqrt(count)
    if error < _NO_SCATTER:
        # Without scatter there is nothing to test; the means are what they are.
        inside = abs(mean) < most
        return Equivalence(ratio, 0.0 if inside else 1.0, inside)

    # Equivalent only if both one-sided tests reject: the larger p-value decides.
    above = special.stdtr(count - 1, -(mean + most) / error)
    below = special.stdtr(count - 1, (mean - most) / error)
    p_value = float(max(above, below))
    return Equivalence(ratio, p_value, p_value < LEVEL)


def measured_order(
    first: Sequence[float], second: Sequence[float], *, level: float = LEVEL
) -> int:
    """Return -1 where the first is certainly smaller, 1 where the second is, 0 where
    repetitions do not tell.

    Args:
        first, second: by repetition. Those of equal number were made in the same pass
            over the grid, so what the machine did to both cancels.
        level: how often equal ones are ordered. A decision that rests on every one of N
            pairs keeps `LEVEL` with the Nth part of it for each (Bonferroni).

    Source: paired t-test of the logarithms.
    """
    if len(first) < 2:
        return 0
    apart = np.log(first) - np.log(second)
    mean = float(apart.mean())
    error = float(apart.std(ddof=1)) / np.sqrt(len(apart))
    least = float(special.stdtrit(len(apart) - 1, 1.0 - 0.5 * level)) * error
    return int(np.sign(mean)) if abs(mean) > least else 0


def ordered_alike(
    predicted: Sequence[float],
    repetitions: Sequence[Sequence[float]],
    *,
    level: float = LEVEL,
) -> list[int]:
    """Compare a predicted order with the measured one, pair by pair.

    A pair that the measurement cannot order is no evidence either way, so it is left
    out.

    Args:
        predicted: one value per policy.
        repetitions: by policy, as `measured_order` compares them.
        level: as there.

    Returns:
        Of each pair 1 where both order it alike, 0 where the prediction ties it, else
        -1.
    """
    policies = zip(predicted, repetitions, strict=True)
    alike = []
    for (first, first_runs), (second, second_runs) in combinations(policies, 2):
        sign = measured_order(first_runs, second_runs, level=level)
        if sign:
            alike.append(sign * int(np.sign(first - second)))
    return alike


def kendall_tau(
    predicted: Sequence[float], repetitions: Sequence[Sequence[float]]
) -> float | None:
    """Rank correlation of a predicted order with the measured one, -1 to 1: the mean of
    `ordered_alike`; None where the measurement orders no pair.
    """
    alike = ordered_alike(predicted, repetitions)
    return float(np.mean(alike)) if alike else None


def repeated_tau(groups: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Tau that a single repetition reaches with all others: what no simulation of them
    can be expected to pass.

    Args:
        groups: by group of policies, by policy: its repetitions.

    Returns:
        The mean, or None where nothing is repeated or no pair is ever ordered.
    """
    taus = []
    for policies in groups:
        count = min(map(len, policies), default=0)
        for left_out in range(count):
            others = [np.delete(run, left_out).tolist() for run in policies]
            tau = kendall_tau([run[left_out] for run in policies], others)
            if tau is not None:
                taus.append(tau)
    return float(np.mean(taus)) if taus else None


def noise_floor(repetitions: Sequence[float]) -> float:
    """Median relative difference between two repetitions of a run, over all pairs; 0
    where it was not repeated.
    """
    apart = [
        # Over their mean: neither of two repetitions is the true one.
        abs(first - second) / (0.5 * (first + second))
        for first, second in combinations(repetitions, 2)
    ]
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
