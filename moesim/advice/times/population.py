"""What machines have in common, as `benchmarks.measured.fit` learned it.

A latent's logarithm is what specification or probe say, plus *effects* that machines
share (of the backend, the kind of card or processor, the weight format), plus what is
particular to one machine. An effect of which nobody has measured anything keeps its
whole spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from moesim.advice.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.advice.times.latents import Prior


# What a kind has of its own of which no machine was measured may be anything.
UNMEASURED_SPREAD = 0.7


@dataclass(frozen=True)
class Population:
    """Effects that machines share, and the scale of what they do not.

    Attributes:
        effects: name -> (mean, standard deviation) of its logarithm.
        scales: latent -> standard deviation over machines, relative to the textbook's.
        widths: grade of knowledge -> factor on spreads and addition to them, such that
            90 % intervals of machines that were left out hold what they say.
        source: rows and machines behind it.
    """

    effects: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    widths: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    source: str = ""

    def applied(self, name: str, prior: Prior) -> Prior:
        """Return a latent's prior with the effects that its machine shares."""
        shift = 0.0
        spread = prior.spread * self.scales.get(kind_of(name), 1.0)
        variance = spread**2
        for effect in prior.effects:
            unmeasured = (0.0, UNMEASURED_SPREAD * prior.spread)
            mean, deviation = self.effects.get(effect, unmeasured)
            shift += mean
            variance += deviation**2
        return replace(
            prior, value=prior.value * math.exp(shift), spread=math.sqrt(variance)
        )


def stretched(spread: float, stretch: tuple[float, float]) -> float:
    """Return a spread that left-out machines agree with.

    Args:
        spread: standard deviation of a logarithm, as beliefs have it.
        stretch: factor, and addition (in squares).
    """
    return math.hypot(stretch[0] * spread, stretch[1])


def kind_of(name: str) -> str:
    """Latents whose machines' particulars have one scale."""
    parts = name.split(":")
    return ":".join(parts[:2]) if parts[0] == "misfit" else parts[0]


@cache
def shipped_population() -> Population:
    """Return the population that `python -m benchmarks.measured` wrote."""
    rows = table("population")
    # YAML knows no tuples.
    pairs = {
        kind: {name: tuple(pair) for name, pair in rows[kind].items()}
        for kind in ("effects", "widths")
    }
    return Population(**{**rows, **pairs})
