"""Positive unknowns with spreads, and what measured seconds say about them.

A latent's logarithm is normal; measured times are log-normal around what the terms
predict. The posterior is found by Gauss-Newton steps (a handful of unknowns, a handful
of rows) and taken as normal around its peak, which is what makes an answer take
milliseconds. Heavy-tailed row weights keep one bad row from moving everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Predict = Callable[[Mapping[str, float]], float]

# What rows miss by beyond repetitions: rounding, clocks, flags that nobody states.
ROW_SPREAD = 0.03
# Freedom of the rows' t distribution: small enough to set a gross error aside.
FREEDOM = 5.0
# So much freedom makes the t distribution a normal one.
GAUSSIAN = 1e12
STEP = 1e-4
STEP_FACTOR = math.exp(STEP)
MOST_STEPS = 25
# The cost is twice a log likelihood: a hundredth is far below what rows can tell.
CONVERGED = 1e-3
# 95 % quantile of the normal distribution: 90 % of it lie within +-.
NINETY = 1.6449


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of one latent before any row.

    Attributes:
        value: its median.
        spread: standard deviation of its logarithm.
        why: source of both.
        effects: what the median also depends on, learned from other machines by
            `moesim.advice.times.priors`: the kind of card, of processor and so on.
    """

    value: float
    spread: float
    why: str = ""
    effects: tuple[str, ...] = ()


Priors = Mapping[str, Prior]


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured time.

    Attributes:
        seconds: as measured.
        predict: value of each latent -> seconds.
        latents: those that `predict` reads.
        spread: standard deviation of the logarithm of repeated measurements.
        label: for messages.
    """

    seconds: float
    predict: Predict
    latents: frozenset[str]
    spread: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """A prediction with its uncertainty, in the unit of `value`.

    Attributes:
        value: median.
        spread: standard deviation of the logarithm.
    """

    value: float
    spread: float

    @property
    def low(self) -> float:
        """Lower end of the 90 % interval."""
        return self.value * math.exp(-NINETY * self.spread)

    @property
    def high(self) -> float:
        """Upper end of the 90 % interval."""
        return self.value * math.exp(NINETY * self.spread)

    def per(self, tokens: int) -> Interval:
        """Return tokens per second of an interval of seconds for so many tokens."""
        return Interval(tokens / self.value, self.spread)


@dataclass(frozen=True)
class Beliefs:
    """A normal distribution over the logarithms of latents.

    Latents outside `names` keep their priors and are independent of all others.
    """

    priors: Priors
    names: tuple[str, ...] = ()
    mean: np.ndarray = field(default_factory=lambda: np.zeros(0))
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def median(self, name: str) -> float:
        """Return the median of one latent."""
        if name in self.names:
            return math.exp(self.mean[self.names.index(name)])
        return self.priors[name].value

    def spread(self, name: str) -> float:
        """Return the standard deviation of one latent's logarithm."""
        if name in self.names:
            at = self.names.index(name)
            return math.sqrt(self.covariance[at, at])
        return self.priors[name].spread

    def predict(
        self, predict: Predict, latents: Sequence[str], spread: float = 0.0
    ) -> Interval:
        """Predict a positive quantity with its uncertainty.

        Args:
            predict: value of each latent -> quantity.
            latents: those that it reads.
            spread: of a measurement of it, on top of what is not known.
        """
        names = tuple(sorted(latents))
        mean, covariance = self._part(names)
        value, slope = linearised(predict, names, mean)
        # First order is enough: spreads are a few tenths at most.
        variance = float(slope @ covariance @ slope) + spread**2
        return Interval(math.exp(value), math.sqrt(variance))

    def _part(self, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of some latents' logarithms."""
        mean = np.array([math.log(self.median(name)) for name in names])
        covariance = np.diag([self.spread(name) ** 2 for name in names])
        fitted = [(at, name) for at, name in enumerate(names) if name in self.names]

        for at, name in fitted:
            # Rows tie latents together: one may be fast only if another is slow.
            for other_at, other in fitted:
                covariance[at, other_at] = self.covariance[
                    self.names.index(name), self.names.index(other)
                ]
        return mean, covariance


def learn(
    priors: Priors, rows: Sequence[Observation], *, robust: bool = False
) -> Beliefs:
    """Narrow the latents by measured rows.

    Args:
        priors: of every latent that a row depends on.
        rows: may be empty.
        robust: rows far from what the others and the priors say weigh less, as under a
            t distribution. Otherwise a row is as certain as its spread says, however
            unexpected it is.
    """
    names = tuple(sorted({name for row in rows for name in row.latents}))
    if not rows:
        return Beliefs(priors)

    # Logarithms: rates are positive, and errors of times are shares.
    problem = _Problem(priors, rows, names, robust=robust)
    mean = problem.prior_mean
    fit = problem.at(mean)

    for _ in range(MOST_STEPS):
        step = np.linalg.solve(fit.curvature, fit.pull)
        following = problem.at(fit.mean + step)
        # Where the straight-line picture fails, a part of the step still helps.
        while following.cost > fit.cost + CONVERGED and np.abs(step).max() > STEP:
            step = step / 2
            following = problem.at(fit.mean + step)
        gained = fit.cost - following.cost
        if gained >= 0:
            fit = following
        if gained < CONVERGED:
            break
    return Beliefs(priors, names, fit.mean, np.linalg.inv(fit.curvature))


@dataclass(frozen=True)
class _Fit:
    """The problem around one point: cost, curvature and direction of descent."""

    mean: np.ndarray
    cost: float
    curvature: np.ndarray
    pull: np.ndarray


class _Problem:
    """Rows and priors as functions of the latents' logarithms."""

    def __init__(
        self,
        priors: Priors,
        rows: Sequence[Observation],
        names: tuple[str, ...],
        *,
        robust: bool,
    ) -> None:
        self.freedom = FREEDOM if robust else GAUSSIAN
        self.rows = rows
        self.names = names
        self.prior_mean = np.array([math.log(priors[name].value) for name in names])
        self.precision = np.diag([priors[name].spread ** -2.0 for name in names])
        self.measured = np.array([math.log(row.seconds) for row in rows])
        self.spreads = np.array([math.hypot(row.spread, ROW_SPREAD) for row in rows])

    def at(self, mean: np.ndarray) -> _Fit:
        """Linearise every row at a point."""
        predicted = np.empty(len(self.rows))
        slopes = np.empty((len(self.rows), len(self.names)))
        for at, row in enumerate(self.rows):
            predicted[at], slopes[at] = linearised(
                row.predict, self.names, mean, row.latents
            )

        misses = self.measured - predicted
        distances = (misses / self.spreads) ** 2
        # The weight of a row falls with its distance, as under a t distribution.
        freedom = self.freedom
        weights = (freedom + 1) / (freedom + distances) / self.spreads**2
        shift = mean - self.prior_mean
        cost = (freedom + 1) * np.log1p(distances / freedom).sum()
        cost += shift @ self.precision @ shift

        curvature = self.precision + slopes.T @ (weights[:, None] * slopes)
        pull = slopes.T @ (weights * misses) - self.precision @ shift
        return _Fit(mean, float(cost), curvature, pull)


def linearised(
    predict: Predict,
    names: Sequence[str],
    mean: np.ndarray,
    latents: Collection[str] | None = None,
) -> tuple[float, np.ndarray]:
    """Logarithm of a prediction and its slope along each latent's logarithm."""
    values = dict(zip(names, np.exp(mean).tolist(), strict=True))
    base = math.log(predict(values))
    slope = np.zeros(len(names))

    for at, name in enumerate(names):
        if latents is not None and name not in latents:
            continue
        # Put back afterwards, which is cheaper than a copy for each.
        value = values[name]
        values[name] = value * STEP_FACTOR
        slope[at] = (math.log(predict(values)) - base) / STEP
        values[name] = value
    return base, slope


def standardised(beliefs: Beliefs, row: Observation) -> float:
    """Return by how many spreads a row misses its prediction."""
    noise = math.hypot(row.spread, ROW_SPREAD)
    expected = beliefs.predict(row.predict, sorted(row.latents), noise)
    return math.log(row.seconds / expected.value) / expected.spread
