"""Curves by which drawn routing is compared with real routing: hit rates over cache
size, working set over window, overlap over lag, union over batch, what a layer tells of
the next.

All are computed from the routing of single sequences, at each layer apart, and averaged
over layers and sequences. Letters: T tokens, L MoE layers, E experts, K per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Curves = dict[str, dict[str, float]]
"""Name of a curve -> place on its axis -> value, a share between 0 and 1."""

SIZES = (0.1, 0.25, 0.5)
"""Cache sizes, as shares of a layer's experts."""
WINDOWS_TOKENS = (2, 4, 8, 16, 32, 64, 128)
LAGS_TOKENS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (2, 4, 8, 16, 32, 64)
MOST_TOKENS = 256
MOST_SEQUENCES = 64
# A cache is empty at first: hits are counted from this token on.
_WARM_TOKENS = 8
_BATCHES_DRAWN = 32


_NAMES = {
    "lru": "hit rate of LRU, cache of … of the experts",
    "lfu": "hit rate of LFU, cache of … of the experts",
    "belady": "hit rate of Belady, cache of … of the experts",
    "working_set": "experts used within … tokens",
    "overlap": "experts used again after … tokens",
    "union": "experts used by one token of … sequences",
    "next_layer": "experts of the next layer that this one tells",
}


@dataclass(frozen=True, slots=True)
class Likeness:
    """Curves of real routing, and of routing that was drawn to be like it.

    Attributes:
        real: of recorded sequences.
        drawn: of as many that were drawn, of the same lengths.
        left_out: recorded sequences that the fit had not seen; 0 where these are the
            fitted ones.
    """

    real: Curves
    drawn: Curves
    left_out: int

    def differences(self) -> dict[tuple[str, str], float]:
        """Return drawn less real, by curve and place, where both are known."""
        return {
            (curve, place): self.drawn[curve][place] - value
            for curve, values in self.real.items()
            for place, value in values.items()
            if place in self.drawn.get(curve, {})
        }

    def lines(self) -> list[str]:
        """Return the comparison as text, a line for each curve."""
        source = "the sequences fitted to"
        if self.left_out:
            source = f"{self.left_out} sequences left out of the fit"
        lines = [f"routing as drawn, in % (real: {source})"]

        differences = self.differences()
        for curve, name in _NAMES.items():
            places = sorted((p for c, p in differences if c == curve), key=float)
            pairs = ", ".join(
                f"{_axis(curve, place)}{100 * self.drawn[curve][place]:.0f}"
                f" ({100 * self.real[curve][place]:.0f})"
                for place in places
            )
            if places:
                lines.append(f"  {name}: {pairs}")

        worst = max(differences, key=lambda place: abs(differences[place]))
        points = 100 * abs(differences[worst])
        at = _axis(*worst).rstrip(": ")
        name = _NAMES[worst[0]] + (f" at {at}" if at else "")
        lines.append(f"  largest difference: {points:.1f} points, {name}")
        return lines


def _axis(curve: str, place: str) -> str:
    if curve == "next_layer":
        return ""
    if curve in ("lru", "lfu", "belady"):
        return f"{100 * float(place):.0f} %: "
    return f"{place}: "


def routing_curves(
    routing: Sequence[np.ndarray], experts: int, seed: int = 0
) -> Curves:
    """Compute all curves.

    Args:
        routing: [T, L, K] of each sequence; the first `MOST_TOKENS` tokens count, and
            the first `MOST_SEQUENCES` sequences.
        experts: E.
        seed: of the choice of sequences that are put into a batch.

    Returns:
        Curves ``lru``, ``lfu`` and ``belady`` (hit rate by cache size), ``working_set``
        (share of experts used within a window), ``overlap`` (share of a token's experts
        that the token `lag` before used), ``union`` (share of experts that one token of
        every sequence of a batch uses, without those of which there are too few
        sequences), ``next_layer``.
    """
    cut = [part[:MOST_TOKENS] for part in routing[:MOST_SEQUENCES]]
    used = [_used(part, experts) for part in cut]
    return {
        "lru": _online_hits(cut, experts, by_count=False),
        "lfu": _online_hits(cut, experts, by_count=True),
        "belady": _belady_hits(used),
        "working_set": _working_set(used),
        "overlap": _overlap(used),
        "union": _union(used, np.random.default_rng(seed)),
        "next_layer": {"1": _next_layer(used)},
    }


def mean_curves(several: Sequence[Curves]) -> Curves:
    """Return the mean of curves that have the same places."""
    return {
        curve: {
            place: float(np.mean([curves[curve][place] for curves in several]))
            for place in places
        }
        for curve, places in several[0].items()
    }


def _used(routing: np.ndarray, experts: int) -> np.ndarray:
    """Bool [L, T, E]: which experts each token uses."""
    tokens, layers, _ = routing.shape
    used = np.zeros((layers, tokens, experts), bool)
    np.put_along_axis(
        used, routing.transpose(1, 0, 2).astype(np.intp), values=True, axis=2
    )
    return used


def _slots(experts: int) -> list[int]:
    return [max(1, round(size * experts)) for size in SIZES]


def _online_hits(
    routing: list[np.ndarray], experts: int, *, by_count: bool
) -> dict[str, float]:
    """Hit rates of LRU, or of the experts used most often so far (LFU, ties to the more
    recent one); a token's experts are asked for one after the other, lowest id first.

    Source: Mattson, Gecsei, Slutz and Traiger (1970): a cache of C slots holds the C
    first of an order that does not depend on C.
    """
    hits = np.zeros(len(SIZES))
    slots = _slots(experts)
    asked = 0
    for part in routing:
        tokens, layers, top_k = part.shape
        order = np.sort(part, axis=2)
        row = np.arange(layers)
        # The key by which experts are ranked: time of the last use, and before it the
        # number of uses.
        last = np.full((layers, experts), -1, np.int64)
        count = np.zeros((layers, experts), np.int64)
        scale = tokens * top_k + 1
        for access in range(tokens * top_k):
            token, place = divmod(access, top_k)
            chosen = order[token, :, place].astype(np.intp)
            key = count * scale + last if by_count else last
            mine = key[row, chosen]
            rank = (key > mine[:, None]).sum(axis=1)
            if token >= _WARM_TOKENS:
                known = last[row, chosen] >= 0
                asked += layers
                for index, size in enumerate(slots):
                    hits[index] += np.count_nonzero(known & (rank < size))
            last[row, chosen] = access
            count[row, chosen] += 1

    return _by_size(hits, asked)


def _by_size(hits: np.ndarray, asked: int) -> dict[str, float]:
    rates = hits / max(asked, 1)
    return {f"{size:g}": float(rate) for size, rate in zip(SIZES, rates, strict=True)}


def _belady_hits(used: list[np.ndarray]) -> dict[str, float]:
    """Hit rates when those stay that are used again soonest, whole tokens at a time.

    Source: Belady (1966), with bypass.
    """
    hits = np.zeros(len(SIZES))
    asked = 0
    for part in used:
        layers, tokens, experts = part.shape
        again = _next_use(part)
        for index, size in enumerate(_slots(experts)):
            resident = np.zeros((layers, experts), bool)
            for token in range(tokens):
                now = part[:, token]
                if token >= _WARM_TOKENS:
                    hits[index] += np.count_nonzero(resident & now)
                    asked += int(now.sum()) if index == 0 else 0
                candidates = resident | now
                soon = np.where(candidates, again[:, token], 2 * tokens)
                # Ties, of experts that are never used again, do not matter.
                kept = np.argpartition(soon, size - 1, axis=1)[:, :size]
                resident = np.zeros((layers, experts), bool)
                np.put_along_axis(resident, kept, values=True, axis=1)
                resident &= candidates

    return _by_size(hits, asked)


def _next_use(used: np.ndarray) -> np.ndarray:
    """Int [L, T, E]: the token after T at which each expert is used next, T at the
    soonest plus one, or the number of tokens for never.
    """
    layers, tokens, experts = used.shape
    again = np.empty((layers, tokens, experts), np.int32)
    following = np.full((layers, experts), tokens, np.int32)
    for token in range(tokens - 1, -1, -1):
        again[:, token] = following
        following = np.where(used[:, token], token, following)

    return again


def _working_set(used: list[np.ndarray]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for window in WINDOWS_TOKENS:
        touched = []
        for part in used:
            layers, tokens, experts = part.shape
            windows = tokens // window
            parts = part[:, : windows * window]
            parts = parts.reshape(layers, windows, window, experts)
            touched.append(parts.any(axis=2).mean(axis=2).ravel())
        values = np.concatenate(touched)
        if len(values):
            shares[str(window)] = float(values.mean())
    return shares


def _overlap(used: list[np.ndarray]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for lag in LAGS_TOKENS:
        common = [part[:, lag:] & part[:, :-lag] for part in used]
        both = sum(map(np.count_nonzero, common))
        asked = sum(np.count_nonzero(part[:, lag:]) for part in used)
        if asked:
            shares[str(lag)] = float(both / asked)
    return shares


def _union(used: list[np.ndarray], rng: np.random.Generator) -> dict[str, float]:
    """Tokens at one place of different sequences, sequences without repetition."""
    shares: dict[str, float] = {}
    for batch in BATCHES:
        if batch > len(used):
            break
        values = []
        for _ in range(_BATCHES_DRAWN):
            picked = rng.choice(len(used), batch, replace=False)
            shortest = min(used[index].shape[1] for index in picked)
            places = rng.integers(shortest, size=4)
            together = np.zeros_like(used[0][:, :4])
            for index in picked:
                together |= used[index][:, places]
            values.append(together.mean())
        shares[str(batch)] = float(np.mean(values))
    return shares


def _next_layer(used: list[np.ndarray]) -> float:
    """Share of a layer's experts among the K that the layer below speaks for most.

    How often expert e of layer l + 1 followed expert i of layer l is counted in the
    even tokens of all sequences and asked in the odd ones: nothing is told by chance.
    """
    layers, _, experts = used[0].shape
    even = np.concatenate([part[:, 0::2] for part in used], axis=1)
    odd = np.concatenate([part[:, 1::2] for part in used], axis=1)
    top_k = int(used[0][0, 0].sum())
    right = 0
    asked = 0
    for layer in range(layers - 1):
        below = even[layer].astype(np.float32)
        counts = below.T @ even[layer + 1].astype(np.float32)
        share = (counts + 1 / experts) / (below.sum(axis=0)[:, None] + 1)
        votes = odd[layer].astype(np.float32) @ np.log(share)
        best = np.argpartition(-votes, top_k - 1, axis=1)[:, :top_k]
        right += int(np.take_along_axis(odd[layer + 1], best, axis=1).sum())
        asked += int(odd[layer + 1].sum())
    return float(right / max(asked, 1))
