"""CSV of how many experts of each layer to keep on which card, for
``--moe-cache-slots`` of llama.cpp's expert-cache forks, and what that should give.

These caches are filled once, with the experts that a profile used most; so what a count
gives is the share of uses that these experts have. It is counted on the half of the
generated tokens that the experts were not chosen by, because those that chose them
flatter.

Source: github.com/thecodacus/llama.cpp, branch perf (one count for all layers), and its
forks with a count for each card.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import csv

from moesim.base.errors import TraceError
from moesim.base.files import written_beside
from moesim.base.units import parse_bytes, percent
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.reader import Trace

_NAMES = ("layer", "card", "slots", "covered", "slots_by_layer", "covered_by_layer")


def export_slots(
    trace: Trace,
    out: Path,
    progress: Callable[[int], None],
    *,
    tell: Callable[[str], None],
    cache_size: str = "",
    tensor_split: str = "",
    n_cpu_moe: int | None = None,
) -> int:
    """Write one line per cached layer: its card, and how many experts to keep of it if
    every layer of a card keeps as many, and if each has a count of its own.

    Args:
        trace: what was routed.
        out: the file.
        progress: called with the lines written.
        tell: called with the flags and what they should give.
        cache_size: memory of each card for cached experts, such as ``9GiB,4GiB``.
        tensor_split: shares of layers of each card, as llama.cpp's ``-ts``; one card
            has all, and several share in proportion to `cache_size`.
        n_cpu_moe: layers whose experts are in host memory, from the first; all unless
            stated.

    Raises:
        TraceError: sizes, shares or layers that are none, or no room for one expert.
    """
    shape = trace.shape
    budgets = _each(trace, "--cache-size", cache_size, parse_bytes)
    shares = budgets
    if tensor_split:
        shares = _each(trace, "--tensor-split", tensor_split, float)
    if len(shares) != len(budgets) or min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise TraceError(
            f"{trace.path}: --tensor-split: expected {len(budgets)} numbers, as many as"
            f" sizes, found {tensor_split or cache_size!r}"
        )
    layers = np.array(shape.layer_numbers)
    # llama.cpp shares layers and the output, which counts as one, out in proportion.
    edges = np.cumsum(np.array(shares) / sum(shares))[:-1]
    card_of = np.searchsorted(edges, layers / (shape.all_layers + 1), side="right")
    cached = layers < (shape.all_layers if n_cpu_moe is None else n_cpu_moe)
    if not cached.any():
        raise TraceError(f"{trace.path}: --n-cpu-moe: expected MoE layers, found none")

    uses = _uses(trace)
    sizes = np.array(shape.sizes_by_expert(), np.int64)
    equal = np.zeros(shape.layers, np.int64)
    free = np.zeros(shape.layers, np.int64)
    for card, budget in enumerate(budgets):
        mine = np.flatnonzero(cached & (card_of == card))
        if not len(mine):
            continue
        most = min(shape.experts, int(budget // sizes[mine].max(axis=1).sum()))
        if not most:
            raise TraceError(
                f"{trace.path}: --cache-size of card {card}: expected at least"
                f" {sizes[mine].max(axis=1).sum():,} bytes, an expert of each of its"
                f" {len(mine)} layers, found {budget:,.0f}; give it fewer layers"
            )
        equal[mine] = most
        free[mine] = _by_layer(uses.sum(axis=0)[mine], sizes[mine], budget)

    rows = {
        "layer": layers[cached],
        "card": card_of[cached],
        "slots": equal[cached],
        "covered": _covered(uses, equal)[cached],
        "slots_by_layer": free[cached],
        "covered_by_layer": _covered(uses, free)[cached],
    }
    table = pa.table({name: pa.array(rows[name]) for name in _NAMES})
    with written_beside(out) as part:
        csv.write_csv(table, part)
    progress(table.num_rows)

    used_cards = sorted(set(card_of[cached].tolist()))
    counts = [str(equal[cached & (card_of == card)][0]) for card in used_cards]
    tell(
        f"--moe-cache-slots {','.join(counts)}: {percent(rows['covered'].mean())} of"
        f" uses should hit, {(equal * sizes.max(axis=1))[cached].sum() / 2**30:.1f} GiB"
    )
    tell(
        "counts by layer, where a fork takes them:"
        f" {','.join(map(str, free[cached]))}:"
        f" {percent(rows['covered_by_layer'].mean())},"
        f" {(free * sizes.max(axis=1))[cached].sum() / 2**30:.1f} GiB"
    )
    return int(table.num_rows)


def _each(
    trace: Trace, name: str, text: str, parse: Callable[[str], float]
) -> list[float]:
    """The numbers of an option, one for each card."""
    try:
        return [parse(word) for word in text.split(",")]
    except ValueError:
        raise TraceError(
            f"{trace.path}: moe-cache-slots: expected {name} with a number for each"
            f" card, such as 9GiB,4GiB, got {text!r}"
        ) from None


def _uses(trace: Trace) -> np.ndarray:
    """Uses of each expert [2, L, E] in the first and the second half of the generated
    tokens of each sequence; of all tokens where none was generated.
    """
    shape = trace.shape
    uses = np.zeros((2, 2, shape.layers, shape.experts), np.int64)
    for rows in trace.sequences():
        for phase in Phase:
            mine = np.flatnonzero(rows.phase == phase)
            half = (np.arange(len(mine)) * 2 >= len(mine)).astype(np.int64)
            place = half[:, None], rows.layer[mine, None], rows.experts[mine]
            np.add.at(uses[phase], place, 1)
    generated = uses[Phase.DECODE]
    return generated if generated.any() else uses[Phase.PREFILL]


def _by_layer(uses: np.ndarray, sizes: np.ndarray, budget: float) -> np.ndarray:
    """Experts to keep of each layer [L], those that are used most for their bytes."""
    density = (uses / sizes).reshape(-1)
    best_first = np.argsort(-density, kind="stable")
    fits = np.cumsum(sizes.reshape(-1)[best_first]) <= budget
    kept = best_first[fits & (density[best_first] > 0)]
    return np.bincount(kept // uses.shape[1], minlength=len(uses))


def _covered(uses: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Share of uses [L] that the experts used most in the other half have."""
    shares = []
    for chosen_by, judged_by in (uses, uses[::-1]):
        best_first = np.argsort(-chosen_by, axis=1, kind="stable")
        ordered = np.take_along_axis(judged_by, best_first, axis=1)
        below = np.arange(uses.shape[2]) < slots[:, None]
        with np.errstate(invalid="ignore"):
            shares.append((ordered * below).sum(axis=1) / ordered.sum(axis=1))
    return np.asarray(np.nan_to_num(np.mean(shares, axis=0)))
