"""Shapley's value: shares out what several players achieve together.

Each player's gain depends on who is there already, so it is averaged over all orders in
which players can join. Those shares alone depend on no order, treat players alike, give
nothing to a player who changes nothing, and sum exactly to the whole.
"""

from __future__ import annotations

from itertools import combinations
from math import factorial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def shapley(
    value: Mapping[frozenset[str], float], players: Sequence[str]
) -> dict[str, float]:
    """Share out the drop of `value` from no player to all, averaged over all orders of
    joining.

    Args:
        value: seconds of every subset of `players`.
        players: at least one.

    Returns:
        Player -> seconds; they sum to ``value[{}] - value[all]``.

    Source: Shapley 1953, applied to the time saved.
    """
    count = len(players)
    shares = dict.fromkeys(players, 0.0)
    for player in players:
        others = [other for other in players if other != player]
        for size in range(count):
            # Share of all orders in which just so many players come before this one.
            orders = factorial(size) * factorial(count - 1 - size)
            weight = orders / factorial(count)
            for before in map(frozenset, combinations(others, size)):
                saved = value[before] - value[before | {player}]
                shares[player] += weight * saved
    return shares
