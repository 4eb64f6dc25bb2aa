"""Finds the rules of the clairvoyant system that make a run shortest.

To know the whole routing is not to know what a copy is worth: that depends on how busy
the link is. So rules are tried, each in a simulated run. What comes out is a schedule
that can be carried out: a ceiling that is reached, not a bound.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from moesim.policies.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runs.config import RunConfig

CLAIRVOYANT = "clairvoyant"

MARGINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9, 1.4, 3.0)
"""Prices of the link that are tried, in discounted uses."""

DECAYS = (0.3, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Discounts to try: what a use is worth a token later."""

EXACT = "exact:objective=scheduled"
ASSIGNMENTS = (EXACT, "fetch-split")
"""Tried, too, with all that comes close; the exact one has gained up to 8 %."""
CLOSE = 1.1
"""Times the fastest."""

FAR = "foresight:decay=0.9"
"""A cache that counts late uses, too: with drafts, most of what copies on demand and
ahead of the next layer leave.
"""


class Rules(NamedTuple):
    """One candidate of the search: the parts of a system."""

    assignment: str
    cache: str
    prefetch: str

    @classmethod
    def at(cls, margin: int, decay: int) -> Rules:
        """Those of places in `MARGINS` and `DECAYS`."""
        foresight = f"foresight:decay={DECAYS[decay]}"
        copies = f"{foresight},margin={MARGINS[margin]}"
        return cls(SYSTEMS[CLAIRVOYANT].assignment, foresight, copies)

    def others(self) -> list[Rules]:
        """List what large batches and drafts may want: all of the next layer's experts
        however late, and copies on demand alone; then what those do who see the past
        only: to know more is never to do worse.
        """
        parts = (
            *((self.cache, "clairvoyant"), (FAR, "clairvoyant"), ("lru", "none")),
            *(("decayed-frequency", "statistical"), ("recall", "recall")),
        )
        return [Rules(self.assignment, *each) for each in parts]


def is_searched(config: RunConfig) -> bool:
    """Tell whether a run leaves it to the clairvoyant system to choose its rules."""
    parts_of_its_own = config.cache is None and config.prefetch is None
    # Who comes when would depend on the rules.
    return config.policy == CLAIRVOYANT and parts_of_its_own and config.arrivals is None


def searched(config: RunConfig, seconds_of: Callable[[RunConfig], float]) -> RunConfig:
    """Choose the rules: price and discount step by step while that helps, then other
    parts, then the assignment of all that come close.

    Args:
        config: of the run.
        seconds_of: how long a run takes.
    """
    # Drawn times would reward luck.
    quiet = config.replaced(noise_seed=None, engine="auto")

    @cache
    def seconds(rules: Rules) -> float:
        return seconds_of(_put(rules, quiet))

    best = MARGINS.index(0.5), DECAYS.index(0.65)
    before = None
    while best != before:
        before = best
        margin, decay = best
        beside = [(margin + further, decay) for further in (2, 1, -1, -2)]
        beside += [(margin, decay + further) for further in (1, -1)]
        inside = [
            (margin, decay)
            for margin, decay in beside
            if 0 <= margin < len(MARGINS) and 0 <= decay < len(DECAYS)
        ]
        best = min((best, *inside), key=lambda places: seconds(Rules.at(*places)))
    rules = [Rules.at(*best), *Rules.at(*best).others()]
    most_s = CLOSE * min(map(seconds, rules))
    close = [each for each in rules if each is rules[0] or seconds(each) <= most_s]
    rules += [
        each._replace(assignment=other) for each in close for other in ASSIGNMENTS
    ]
    return _put(min(rules, key=seconds), config)


def _put(rules: Rules, config: RunConfig) -> RunConfig:
    return config.replaced(
        policy=rules.assignment, cache=rules.cache, prefetch=rules.prefetch
    )
