"""Policies of all four kinds together: every combination that a trace serves, or few
that show every pair.

A combination is written as it is asked for, ``assignment+cache+prefetch+routing``.
Parametrised variants count once.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from typing import TYPE_CHECKING

from moesim.policies.registry import KINDS, describe

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

PARTS = ("assignment", "cache", "prefetch", "routing")
assert set(PARTS) == set(KINDS)


def served(columns: Collection[str]) -> tuple[list[list[str]], list[str]]:
    """Return, by kind, the policies whose columns a trace has, and the names of the
    others.
    """
    every = [info for kind in PARTS for info in describe(kind)]
    kept = [
        [
            one.name
            for one in every
            if one.kind == kind and set(one.needs) <= set(columns)
        ]
        for kind in PARTS
    ]
    return kept, [one.name for one in every if not set(one.needs) <= set(columns)]


def all_of(choices: Sequence[Sequence[str]]) -> list[str]:
    """Every combination, in the order of the names."""
    return ["+".join(one) for one in product(*choices)]


def pairwise(choices: Sequence[Sequence[str]]) -> list[str]:
    """Combinations that show any two policies of different kinds together at least
    once.

    The first two kinds, the largest, are paired in full, which no design avoids; what
    joins a pair is what shows most pairs not seen before, and among equals what joined
    fewest.
    """

    def shown(names: tuple[str, ...]) -> set[frozenset[tuple[int, str]]]:
        return {frozenset(pair) for pair in combinations(enumerate(names), 2)}

    unseen = {
        frozenset(((a, one), (b, other)))
        for a, b in combinations(range(len(choices)), 2)
        for one, other in product(choices[a], choices[b])
    }
    rests = list(product(*choices[2:]))
    joined: Counter[tuple[str, ...]] = Counter()
    found = []
    while unseen:  # once, or twice where the first round leaves some over
        for pair in product(*choices[:2]):
            rest = max(
                rests,
                key=lambda rest: (len(shown(pair + rest) & unseen), -joined[rest]),
            )
            if new := shown(pair + rest) & unseen:
                unseen -= new
                joined[rest] += 1
                found.append("+".join(pair + rest))
    return found
