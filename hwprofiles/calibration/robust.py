"""Statistics that a hiccup of the operating system does not spoil: clipped means, Huber
regression, drawn quantiles.
"""

from __future__ import annotations

import numpy as np
from moesim.hwprofiles.calibration.fit_curves import Estimate
from scipy import optimize

CLIP = 0.1
"""Share at both ends that a mean pulls in to the rest: what other programs do is not
the machine's.
"""
_DRAWS = 40
_SWEEPS = 12
_PLANE_SWEEPS = 8
_HUBER = 1.5
"""Standard deviations beyond which a residual counts by its size, not its square."""
_PROBABILITIES = np.linspace(0.0, 1.0, 21)


def quantiles_around_one(ratios: np.ndarray) -> tuple[float, ...]:
    """Summarise a distribution at 21 equally spaced probabilities, so that drawing from
    it has mean 1.

    The ends are the 2 % and 98 % points: one hiccup in a thousand would otherwise be
    drawn once in forty.
    """
    at = np.quantile(ratios, np.clip(_PROBABILITIES, 0.02, 0.98))
    return tuple(
        round(float(value), 4) for value in at / np.trapezoid(at, _PROBABILITIES)
    )


def slowdown_shares(
    logs: np.ndarray,
    shares: np.ndarray,
    groups: np.ndarray,
    *,
    sweeps: int = _SWEEPS,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """Find g >= 0 in ``log t = a[group] - log(1 - shares @ g)``: the share of its speed
    that each other class takes.

    A slowdown factor s makes work w take ``t = w + t * share * (1 - 1/s)``, so ``g = 1
    - 1/s``. Huber's loss, by reweighted Gauss-Newton steps, since single operations
    have tails.

    Args:
        logs: float64 [N], log seconds.
        shares: float64 [N, C].
        groups: int [N], operations of equal work.
        sweeps: steps.
        start: float64 [C] to start from.

    Returns:
        float64 [C] in [0, 0.8].
    """
    _, groups = np.unique(groups, return_inverse=True)
    lost = np.zeros(shares.shape[1]) if start is None else start.copy()
    weights = np.ones(len(logs))
    for _ in range(sweeps):
        left = np.maximum(1.0 - shares @ lost, 0.2)
        rest = logs + np.log(left)
        slopes = shares / left[:, None]
        total = np.bincount(groups, weights)
        rest = rest - (np.bincount(groups, weights * rest) / total)[groups]
        centred = np.column_stack(
            [
                column - (np.bincount(groups, weights * column) / total)[groups]
                for column in slopes.T
            ]
        )
        gram = centred.T @ (weights[:, None] * centred) + 1e-9 * np.eye(len(lost))
        lost = np.clip(
            lost + np.linalg.solve(gram, centred.T @ (weights * rest)), 0.0, 0.8
        )
        spread = 1.4826 * np.median(np.abs(rest)) + 1e-9
        weights = 1.0 / np.maximum(1.0, np.abs(rest) / (_HUBER * spread))
    return lost


def comparable(marked: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Rows of groups that have both marked and unmarked ones, bool [N]."""
    _, group = np.unique(groups, return_inverse=True)
    count = np.bincount(group)
    of_them = np.bincount(group, marked)
    return np.asarray(((of_them > 0) & (of_them < count))[group])


def contrast(logs: np.ndarray, marked: np.ndarray, groups: np.ndarray) -> float:
    """By what factor marked operations take longer than unmarked ones of the same
    group, median.

    Args:
        logs: float64 [N], log seconds.
        marked: bool [N].
        groups: int [N], operations of equal work under equal circumstances; those of
            one kind only say nothing.

    Returns:
        1.0 where nothing can be compared.
    """
    kept = comparable(marked, groups)
    if not kept.any():
        return 1.0
    logs = logs[kept]
    marked = marked[kept]
    names, group = np.unique(groups[kept], return_inverse=True)
    usual = np.array(
        [np.median(logs[(group == number) & ~marked]) for number in range(len(names))]
    )
    return float(np.exp(np.median((logs - usual[group])[marked])))


def plane(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Find x >= 0 in ``seconds ~ columns @ x``, residuals clipped at both ends by
    `CLIP` as `clipped_mean` does.

    Args:
        columns: float64 [N, F], none negative.
        seconds: float64 [N].

    Returns:
        float64 [F].
    """
    found = optimize.nnls(columns, seconds)[0]
    for _ in range(_PLANE_SWEEPS):
        rest = seconds - columns @ found
        found = optimize.nnls(
            columns,
            columns @ found + np.clip(rest, *np.quantile(rest, (CLIP, 1 - CLIP))),
        )[0]
    return np.asarray(found)


def clipped_mean(seconds: np.ndarray) -> float:
    """Mean with both ends clipped by `CLIP`."""
    if not len(seconds):
        return 0.0
    return float(np.clip(seconds, *np.quantile(seconds, (CLIP, 1 - CLIP))).mean())


def around_mean(seconds: np.ndarray) -> np.ndarray:
    """Samples moved so that their median, which
    `moesim.hwprofiles.calibration.fit_curves` takes, is their clipped mean.
    """
    return np.asarray(
        np.maximum(seconds + (clipped_mean(seconds) - float(np.median(seconds))), 1e-9)
    )


def resampled(seconds: np.ndarray, rng: np.random.Generator) -> Estimate:
    """Clipped mean with its 95 % interval over resampled measurements."""
    value = clipped_mean(seconds)
    draws = [
        clipped_mean(seconds[rng.integers(0, len(seconds), len(seconds))])
        for _ in range(_DRAWS)
    ]
    low, high = np.quantile(draws, (0.025, 0.975))
    return Estimate(
        value,
        (min(value, float(low)), max(value, float(high))),
        float(np.subtract(*np.quantile(seconds, (0.75, 0.25)))),
    )
