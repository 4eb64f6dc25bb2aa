"""What a trace is like before any machine is involved: how many experts work, how evenly, how faithfully.

All figures are per layer and about decode, one sequence at a time, unless they say otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from traces.batch import compose
from traces.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from traces.reader import Trace

CACHE_RATIOS = (0.125, 0.25, 0.5, 0.75)
WINDOW_STEPS = 32


def info(trace: Trace) -> dict[str, Any]:
    """Read all rows once and say what the file holds.

    Returns:
        path, size_bytes, rows, columns, split, provenance, shape (as words), sequences, tokens by phase.

    Raises:
        TraceError: the trace is damaged.
    """
    shape = trace.shape
    tokens = {phase.label: 0 for phase in Phase}
    sequences = 0
    for rows in trace.sequences():
        sequences += 1
        starts = np.concatenate(([True], np.diff(rows.pos) != 0))
        for phase in Phase:
            tokens[phase.label] += int(np.count_nonzero(starts & (rows.phase == phase)))
    return {
        "path": str(trace.path),
        "size_bytes": trace.size_bytes,
        "rows": trace.rows,
        "columns": sorted(trace.columns),
        "split": trace.header.split,
        "provenance": trace.header.provenance,
        "model": shape.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": sorted(set(shape.expert_bytes)),
        "assumed": list(shape.assumed),
        "sequences": sequences,
        "prefill_tokens": tokens["prefill"],
        "decode_tokens": tokens["decode"],
    }


def stats(trace: Trace, *, batch: int = 1) -> dict[str, Any]:
    """Characterise the routing. L layers, E experts, K experts per token.

    Args:
        trace: an opened trace.
        batch: sequences that run together; changes active experts, overlap and all that follows.

    Returns:
        ``prefill_tokens``, ``decode_tokens``, ``decode_steps``; ``overlap_chance``, the overlap that independent
        uniform choices would have, K/E; and lists of L numbers, null where the trace has no decode:

        - ``active``: mean active experts per decode step; ``active_prefill``: the same per prefill step;
        - ``entropy_bits``: of the load over experts, log2 E if even; ``max_share``: load of the busiest expert;
        - ``overlap``: mean share of a step's active experts that were active in the step before, within one batch;
        - ``working_set``: mean distinct experts in windows of 32 decode steps; ``touched``: distinct experts at all;
        - ``lru``: cache ratio -> hit rate of an LRU cache of ``round(ratio * E)`` slots, looked up before the step.
    """
    shape = trace.shape
    fold = _LayerFold(shape.layers, shape.experts)
    tokens = {Phase.PREFILL: 0, Phase.DECODE: 0}
    for step in compose(trace, batch=batch):
        tokens[step.phase] += step.tokens
        experts, workloads = zip(*((layer.experts, layer.tokens) for layer in step.layers), strict=True)
        fold.add(step.phase, step.batch, experts, workloads)
    return {
        "batch": batch,
        "prefill_tokens": tokens[Phase.PREFILL],
        "decode_tokens": tokens[Phase.DECODE],
        "decode_steps": fold.steps[Phase.DECODE],
        "overlap_chance": shape.top_k / shape.experts,
        **fold.figures(),
    }


def stats_frame(trace: Trace, *, batch: int = 1) -> pd.DataFrame:
    """The per-layer lists of `stats` as columns, one row per layer; LRU ratios as ``lru_0.25``."""
    import pandas as pd  # noqa: PLC0415 - a quarter of a second that only notebooks pay

    figures = stats(trace, batch=batch)
    columns = {name: values for name, values in figures.items() if isinstance(values, list)}
    columns |= {f"lru_{ratio}": values for ratio, values in figures["lru"].items()}
    return pd.DataFrame(columns).rename_axis("layer")


class _LayerFold:
    """Counts over steps, all layers at once."""

    def __init__(self, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self.steps = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self.active = {Phase.PREFILL: np.zeros(layers), Phase.DECODE: np.zeros(layers)}
        self.load = np.zeros((layers, experts))
        self.overlap, self.pairs = np.zeros(layers), 0
        self.window = np.zeros((layers, experts), dtype=bool)
        self.windows: list[np.ndarray] = []
        self.last_use = np.full((layers, experts), -1, dtype=np.int64)  # step * E + expert: ties in a step by id
        self.distances = np.zeros((layers, experts + 1), dtype=np.int64)
        self._before: np.ndarray | None = None
        self._batch = -1

    def add(self, phase: Phase, batch: int, experts: Sequence[np.ndarray], tokens: Sequence[np.ndarray]) -> None:
        """Fold one step: active experts and their workloads, per layer."""
        sizes = np.array([len(active) for active in experts])
        self.steps[phase] += 1
        self.active[phase] += sizes
        if phase is Phase.PREFILL:
            return
        layer, expert = np.repeat(np.arange(self.layers), sizes), np.concatenate(experts)
        self.load[layer, expert] += np.concatenate(tokens)
        now = np.zeros((self.layers, self.experts), dtype=bool)
        now[layer, expert] = True
        if batch == self._batch and self._before is not None:
            self.overlap += (now & self._before).sum(axis=1) / sizes
            self.pairs += 1
        self._before, self._batch = now, batch
        self.window |= now
        if self.steps[phase] % WINDOW_STEPS == 0:
            self.windows.append(self.window.sum(axis=1))
            self.window[:] = False
        # LRU: an expert is found in a cache of C slots if fewer than C others were used after its own last use
        mine = self.last_use[layer, expert]
        later = (self.last_use[layer] > mine[:, None]).sum(axis=1)
        np.add.at(self.distances, (layer, np.where(mine < 0, self.experts, later)), 1)
        self.last_use[layer, expert] = self.steps[phase] * self.experts + expert

    def figures(self) -> dict[str, Any]:
        """The per-layer lists of `stats`."""
        decode = self.steps[Phase.DECODE] > 0
        total = self.load.sum(axis=1, keepdims=True)
        share = self.load / np.maximum(total, 1)
        entropy = -(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=1)
        found = np.cumsum(self.distances, axis=1)
        accesses = np.maximum(found[:, -1], 1)
        slots = {ratio: round(ratio * self.experts) for ratio in CACHE_RATIOS}
        hits = {ratio: found[:, count - 1] if count else np.zeros(self.layers) for ratio, count in slots.items()}
        windows = np.mean(self.windows, axis=0) if self.windows else None
        return {
            "active": _list(self.active[Phase.DECODE] / max(self.steps[Phase.DECODE], 1) if decode else None),
            "active_prefill": _list(
                self.active[Phase.PREFILL] / self.steps[Phase.PREFILL] if self.steps[Phase.PREFILL] else None
            ),
            "entropy_bits": _list(entropy if decode else None),
            "max_share": _list(share.max(axis=1) if decode else None),
            "overlap": _list(self.overlap / self.pairs if self.pairs else None),
            "working_set": _list(windows),
            "touched": _list((self.load > 0).sum(axis=1) if decode else None),
            "lru": {ratio: _list(values / accesses if decode else None) for ratio, values in hits.items()},
        }


def _list(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else values.tolist()
