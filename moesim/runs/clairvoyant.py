"""Finds the fastest schedule of one that knows the whole routing.

To know the whole routing is not to know what a copy is worth: that depends on how busy
the link is. So rules are tried, each in a simulated run, and every system that does the
same work: to know more is never to do worse. What comes out is a schedule that can be
carried out: a ceiling that is reached, not a bound.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from moesim.base.errors import TraceError
from moesim.policies.base import PolicyError
from moesim.policies.systems import SYSTEMS, compose

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runs.config import RunConfig

CLAIRVOYANT = "clairvoyant"

MARGINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9, 1.4, 3.0)
"""Prices of the link that are tried, in discounted uses."""

DECAYS = (0.3, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Discounts to try: what a use is worth a token later."""

EXACT = "exact:objective=contended"
ASSIGNMENTS = (EXACT, "fetch-split", "fixed-mapping")
"""Tried, too, with all that comes close; the last one leaves to the CPU what is not on
a GPU.
"""
CLOSE = 1.1
"""Times the fastest."""

FAR = "foresight:decay=0.9"
"""A cache that counts late uses, too: with drafts, most of what copies on demand and
ahead of the next layer leave.
"""


class Rules(NamedTuple):
    """One candidate of the search: the parts of a system.

    Attributes:
        policy: an assignment policy, or a system with parts of its own.
        cache, prefetch: parts; None for the system's.
        warm: whether caches may fill by the uses that come.
    """

    policy: str
    cache: str | None = None
    prefetch: str | None = None
    warm: bool = False

    @classmethod
    def at(cls, margin: int, decay: int) -> Rules:
        """Those of places in `MARGINS` and `DECAYS`."""
        foresight = f"foresight:decay={DECAYS[decay]}"
        copies = f"{foresight},margin={MARGINS[margin]}"
        return cls(SYSTEMS[CLAIRVOYANT].assignment, foresight, copies)

    def others(self) -> list[Rules]:
        """List what large batches and drafts may want: all of the next layer's experts
        however late, and copies on demand alone; what fast links to slow memories may:
        the cache's own copies alone; then what those do who see the past only, and
        keep what they have: host memory need not hold it, too.
        """
        parts = (
            *((self.cache, "clairvoyant"), (FAR, "clairvoyant"), (self.cache, "none")),
            *(("lru", "none"), ("decayed-frequency", "none"), ("static", "none")),
            *(("decayed-frequency", "statistical"), ("recall", "recall")),
            *(("recall", "none"), ("static", "clairvoyant")),
        )
        return [Rules(self.policy, *each) for each in parts]

    def put(self, config: RunConfig) -> RunConfig:
        """The configuration with these parts."""
        chosen = config.replaced(
            policy=self.policy, cache=self.cache, prefetch=self.prefetch
        )
        return chosen.replaced(warm=config.trace) if self.warm else chosen


def is_searched(config: RunConfig) -> bool:
    """Tell whether a run leaves it to the clairvoyant system to choose its rules."""
    parts_of_its_own = config.cache is None and config.prefetch is None
    # Who comes when would depend on the rules.
    return config.policy == CLAIRVOYANT and parts_of_its_own and config.arrivals is None


def searched(config: RunConfig, seconds_of: Callable[[RunConfig], float]) -> RunConfig:
    """Choose the rules: price and discount step by step while that helps, then other
    parts and systems, then the assignment of all that come close.

    Args:
        config: of the run.
        seconds_of: how long a run takes.
    """
    fast = config.replaced(engine="auto")

    @cache
    def seconds(rules: Rules) -> float:
        return seconds_of(rules.put(fast))

    @cache
    def seconds_if_legal(rules: Rules) -> float:
        try:
            return seconds(rules)
        except (PolicyError, TraceError):
            # It needs a column, an artefact or a memory that this run has not.
            return inf

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
    rules = [Rules.at(*best), *Rules.at(*best).others(), *_systems()]
    least_s = min(map(seconds_if_legal, rules))
    close = [each for each in rules if seconds_if_legal(each) <= CLOSE * least_s]
    if rules[0] not in close:
        close.append(rules[0])
    others = [
        each._replace(policy=other)
        for each in close
        if each.cache is not None
        for other in ASSIGNMENTS
    ]
    warm = [each._replace(warm=True) for each in (*close, *others) if _keeps(each)]
    return min((*rules, *others, *warm), key=seconds_if_legal).put(config)


def _systems() -> list[Rules]:
    """Systems that do the same work, oracles or not."""
    names = [name for name in SYSTEMS if name != CLAIRVOYANT]
    return [Rules(name) for name in names if SYSTEMS[name].keeps_work]


def _keeps(rules: Rules) -> bool:
    """Whether a GPU keeps what it begins with, so that it matters what that is."""
    return compose(rules.policy, cache=rules.cache).keeps_residents
