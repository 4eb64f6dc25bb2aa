"""Learns what machines have in common from all of them at once.

Effects that machines share and what is particular to one are normal with zero means, so
their joint distribution given all measured times is found in closed form after
linearising: no machine counts more than it can tell. The scale of the particulars is
estimated too (EM). Leaving machines out is leaving out their rows: `Fit.without`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from moesim.advice.times.latents import ROW_SPREAD, linearised
from moesim.advice.times.priors import Population, kind_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from moesim.advice.times.latents import Observation, Prior

# Standard deviation of an effect's logarithm before anything is measured, relative to
# that of its latent. Small: what a handful of machines seem to share is mostly theirs
# alone. Of 0.7, 0.4, 0.3 and 0.2, the last two predicted left-out machines best.
EFFECT_SPREAD = 0.3
# The textbook's spread counts as much as so many machines.
TEXTBOOK_MACHINES = 4.0
# Freedom of the rows' t distribution.
FREEDOM = 4.0
# Freedom of the particulars' t distribution: what is wrong with a few machines (one
# memory channel, a laptop's power limit) shall not shift what all have in common.
PARTICULAR_FREEDOM = 3.0
# A normal distribution with this spread has 90 % of its mass where that of a t
# distribution with the spread 1 has them.
TAIL_WIDTH = 2.3534 / 1.6449
ROUNDS = 8
FOLD_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One machine with what was measured on it.

    Attributes:
        name: of the machine.
        priors: textbook's, by its specification or probes.
        rows: measured times.
    """

    name: str
    priors: Mapping[str, Prior]
    rows: Sequence[Observation]


class Fit:
    """The joint distribution of effects and particulars, given all members' rows."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.rows = [(member, row) for member in members for row in member.rows]
        self.columns: dict[tuple[str, str], int] = {}
        self.kinds: list[str] = []
        self.textbook: list[float] = []
        for member, row in self.rows:
            for name in row.latents:
                prior = member.priors[name]
                for effect in prior.effects:
                    self._column("", effect, EFFECT_SPREAD * prior.spread, "")
                self._column(member.name, name, prior.spread, kind_of(name))
        self.measured = np.array([math.log(row.seconds) for _, row in self.rows])
        self.noise = np.array([row.spread**2 + ROW_SPREAD**2 for _, row in self.rows])
        self.weights = np.ones(len(self.rows))
        self.scales: dict[str, float] = {}
        self.tails = np.ones(len(self.columns))
        self.point = np.zeros(len(self.columns))
        self.slopes = np.zeros((len(self.rows), len(self.columns)))
        self.offsets = np.zeros(len(self.rows))
        for _ in range(ROUNDS):
            self._linearise()
            everything = np.ones(len(self.rows), dtype=bool)
            self.point, variance = self._solved(everything, self.scales, self.tails)
            self.scales = self._rescaled(self.point, variance, self.tails)
            self.tails = self._tails(self.point, variance, self.scales)
            self._reweigh()

    def _column(self, owner: str, name: str, spread: float, kind: str) -> None:
        if (owner, name) not in self.columns:
            self.columns[owner, name] = len(self.columns)
            self.textbook.append(spread)
            self.kinds.append(kind)

    @cached_property
    def particulars(self) -> dict[str, np.ndarray]:
        """Kind of latent -> columns of the machines' particulars."""
        columns: dict[str, list[int]] = defaultdict(list)
        for at, kind in enumerate(self.kinds):
            if kind:
                columns[kind].append(at)
        return {kind: np.array(at) for kind, at in columns.items()}

    def _linearise(self) -> None:
        """Predict every row, and how it moves with each column."""
        self.slopes[:] = 0.0
        for at, (member, row) in enumerate(self.rows):
            names = sorted(row.latents)
            places = [self._places(member, name) for name in names]
            mean = np.array(
                [
                    math.log(member.priors[name].value) + self.point[columns].sum()
                    for name, columns in zip(names, places, strict=True)
                ]
            )
            value, slope = linearised(row.predict, names, mean)
            for columns, along in zip(places, slope, strict=True):
                self.slopes[at, columns] += along
            self.offsets[at] = value
        self.offsets -= self.slopes @ self.point

    def _places(self, member: Member, name: str) -> list[int]:
        effects = [self.columns["", each] for each in member.priors[name].effects]
        return [*effects, self.columns[member.name, name]]

    def _variances(self, scales: Mapping[str, float], tails: np.ndarray) -> np.ndarray:
        spreads = np.array(self.textbook)
        for kind, scale in scales.items():
            spreads[self.particulars[kind]] *= scale
        return spreads**2 * tails

    def _tails(
        self, mean: np.ndarray, variance: np.ndarray, scales: Mapping[str, float]
    ) -> np.ndarray:
        """Widen the particulars that lie far out, as under a t distribution."""
        far = (mean**2 + variance) / self._variances(scales, np.ones(len(mean)))
        freedom = PARTICULAR_FREEDOM
        particular = np.array([bool(kind) for kind in self.kinds])
        return np.where(particular, (freedom + far) / (freedom + 1), 1.0)

    def _solved(
        self, used: np.ndarray, scales: Mapping[str, float], tails: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of every column given the rows in use."""
        prior = self._variances(scales, tails)
        slopes = self.slopes[used]
        spread = slopes * prior
        covariance = spread @ slopes.T
        covariance[np.diag_indices_from(covariance)] += (
            self.noise[used] / self.weights[used]
        )
        misses = self.measured[used] - self.offsets[used]
        solved = np.linalg.solve(covariance, np.column_stack([misses, spread]))
        mean = spread.T @ solved[:, 0]
        variance = prior - np.einsum("rc,rc->c", spread, solved[:, 1:])
        return mean, variance

    def _rescaled(
        self,
        mean: np.ndarray,
        variance: np.ndarray,
        tails: np.ndarray,
        left_out: Collection[str] = (),
    ) -> dict[str, float]:
        """One step of EM for the scale of each kind of particulars."""
        squares = (mean**2 + variance) / np.array(self.textbook) ** 2 / tails
        owners = [owner for owner, _ in self.columns]
        # The textbook's spread is that of a normal distribution.
        textbook = TEXTBOOK_MACHINES / TAIL_WIDTH**2
        scales = {}
        for kind, columns in self.particulars.items():
            at = [column for column in columns if owners[column] not in left_out]
            total = squares[at].sum() + textbook
            scales[kind] = math.sqrt(total / (len(at) + TEXTBOOK_MACHINES))
        return scales

    def _reweigh(self) -> None:
        """Weigh rows down that nothing explains, as under a t distribution."""
        misses = self.measured - self.offsets - self.slopes @ self.point
        self.weights = (FREEDOM + 1) / (FREEDOM + misses**2 / self.noise)

    def population(self, source: str = "") -> Population:
        """Return what all members have in common."""
        return self.without((), source)

    def without(self, names: Collection[str], source: str = "") -> Population:
        """Return what the other members have in common.

        Args:
            names: of the members left out.
            source: in words.
        """
        left_out = set(names)
        used = np.array([member.name not in left_out for member, _ in self.rows])
        scales, tails = self.scales, self.tails
        for _ in range(FOLD_ROUNDS if left_out else 1):
            mean, variance = self._solved(used, scales, tails)
            scales = self._rescaled(mean, variance, tails, left_out)
            tails = self._tails(mean, variance, scales)
        effects = {
            name: (float(mean[at]), math.sqrt(max(0.0, float(variance[at]))))
            for (owner, name), at in self.columns.items()
            if not owner
        }
        normal = {kind: TAIL_WIDTH * scale for kind, scale in scales.items()}
        return Population(effects, normal, {}, source)
