"""What a trace is like before any machine is involved: how many experts work, how
evenly, how faithfully.

All figures are per layer and about decode, one sequence at a time, unless they say
otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.format.layer_steps import layer_steps
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    import pandas as pd
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

CACHE_RATIOS = (0.125, 0.25, 0.5, 0.75)
WINDOW_STEPS = 32


def info(trace: Trace) -> dict[str, Any]:
    """Read all rows once and say what the file holds.

    Returns:
        path, size_bytes, rows, columns, split, provenance, shape (as words), sequences,
        tokens by phase.

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
        "path": trace.name,
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
        batch: sequences that run together; changes active experts, overlap and all that
            follows.

    Returns:
        ``prefill_tokens``, ``decode_tokens``, ``decode_steps``; ``overlap_chance``, the
        overlap that independent uniform choices would have, K/E; and lists of L
        numbers, null where the trace has no decode:

        - ``active``: mean active experts per decode step; ``active_prefill``: the same
            per prefill step;
        - ``entropy_bits``: of the load over experts, log2 E if even; ``max_share``:
            load of the busiest expert;
        - ``overlap``: mean share of a step's active experts that were active in the
            step before, within one batch;
        - ``working_set``: mean distinct experts in windows of 32 decode steps;
            ``touched``: distinct experts at all;
        - ``lru``: cache ratio -> hit rate of an LRU cache of ``round(ratio * E)``
            slots, looked up before the step.
    """
    shape = trace.shape
    fold = LayerFold(shape.layers, shape.experts, shape.top_k)
    for block in layer_steps(trace, batch=batch):
        fold.add(block)
    return summary(fold, shape, batch)


def summary(fold: LayerFold, shape: ModelShape, batch: int) -> dict[str, Any]:
    """What `stats` returns, of a fold that has seen the whole trace."""
    return {
        "batch": batch,
        "prefill_tokens": fold.tokens[Phase.PREFILL],
        "decode_tokens": fold.tokens[Phase.DECODE],
        "decode_steps": fold.steps[Phase.DECODE],
        "overlap_chance": shape.top_k / shape.experts,
        **fold.figures(),
    }


def stats_frame(trace: Trace, *, batch: int = 1) -> pd.DataFrame:
    """The per-layer lists of `stats` as columns, one row per layer; LRU ratios as
    ``lru_0.25``.
    """
    import pandas as pd  # noqa: PLC0415 - a quarter of a second that only notebooks pay

    figures = stats(trace, batch=batch)
    columns = {
        name: values for name, values in figures.items() if isinstance(values, list)
    }
    columns |= {f"lru_{ratio}": values for ratio, values in figures["lru"].items()}
    return pd.DataFrame(columns).rename_axis("layer")


class LayerFold:
    """Tables over steps, all layers at once; memory is that of the tables."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        from moesim.traces.stats.counting_kernels import WINDOWS, count_decode  # noqa: PLC0415 - compiled: `info` need not wait for it

        self.layers = layers
        self.experts = experts
        self.top_k = top_k
        self._count = count_decode
        self.steps = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self._routed = {phase: np.zeros(layers, np.int64) for phase in Phase}  # choices
        self.active = {Phase.PREFILL: np.zeros(layers), Phase.DECODE: np.zeros(layers)}
        self.load = np.zeros((layers, experts), np.int64)
        self.distances = np.zeros((layers, experts + 1), np.int64)
        self._last_use = np.full((layers, experts), -1, np.int64)
        self._last_batch = np.full(layers, -1, np.int64)
        self._overlap = np.zeros(layers)
        self._pairs = np.zeros(layers, np.int64)
        self._fresh, self._windows = (
            np.zeros((layers, WINDOWS), np.int64) for _ in range(2)
        )

    def add(self, block: LayerSteps) -> None:
        """Fold a block of layer steps."""
        sizes = np.diff(block.edges)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        for phase in Phase:
            mine = block.phase == phase
            self.active[phase] += np.bincount(
                block.layer[mine], sizes[mine], self.layers
            )
            routed = np.bincount(
                block.layer[owner[mine[owner]]], block.tokens[mine[owner]], self.layers
            )
            self._routed[phase] += routed.astype(np.int64)
        decode = block.phase == Phase.DECODE
        if not decode.any():
            self.steps[Phase.PREFILL] += int((block.layer == 0).sum())
            return
        experts = block.experts
        tokens = block.tokens
        edges = block.edges
        if not decode.all():
            kept = np.repeat(decode, sizes)
            experts = experts[kept]
            tokens = tokens[kept]
            edges = np.concatenate(([0], np.cumsum(sizes[decode]))).astype(np.int64)
        layer = block.layer[decode]
        step = self.steps[Phase.DECODE] + np.cumsum(layer == 0) - 1
        self._count(
            step.astype(np.int64),
            block.batch[decode],
            layer,
            edges,
            experts,
            tokens,
            self.load,
            self._last_use,
            self.distances,
            self._last_batch,
            self._overlap,
            self._fresh,
            self._windows,
            self._pairs,
        )
        self.steps[Phase.DECODE] += int((layer == 0).sum())
        self.steps[Phase.PREFILL] += int(((block.layer == 0) & ~decode).sum())

    @property
    def tokens(self) -> dict[Phase, int]:
        """Tokens by phase: those of the fullest layer (a ragged prefill leaves others
        with fewer).
        """
        return {
            phase: int(routed.max()) // self.top_k
            for phase, routed in self._routed.items()
        }

    def figures(self) -> dict[str, Any]:
        """The per-layer lists of `stats`."""
        steps = self.steps[Phase.DECODE]
        prefills = self.steps[Phase.PREFILL]
        decode = steps > 0
        share = self.load / np.maximum(self.load.sum(axis=1, keepdims=True), 1)
        entropy = -(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=1)
        found = np.cumsum(self.distances, axis=1)
        accesses = np.maximum(found[:, -1], 1)
        slots = {ratio: round(ratio * self.experts) for ratio in CACHE_RATIOS}
        hits = {
            ratio: found[:, count - 1] if count else np.zeros(self.layers)
            for ratio, count in slots.items()
        }
        working_set = self.working_sets().get(WINDOW_STEPS)
        return {
            "active": _list(
                self.active[Phase.DECODE] / max(steps, 1) if decode else None
            ),
            "active_prefill": _list(
                self.active[Phase.PREFILL] / prefills if prefills else None
            ),
            "entropy_bits": _list(entropy if decode else None),
            "max_share": _list(share.max(axis=1) if decode else None),
            "overlap": _list(
                self._overlap / self._pairs if self._pairs.all() else None
            ),
            "working_set": _list(working_set),
            "touched": _list((self.load > 0).sum(axis=1) if decode else None),
            "lru": {
                ratio: _list(values / accesses if decode else None)
                for ratio, values in hits.items()
            },
        }

    def working_sets(self) -> dict[int, np.ndarray]:
        """Window in decode steps -> float64 [L], mean distinct experts over the whole
        windows that there were.
        """
        steps = self.steps[Phase.DECODE]
        sizes = [1 << w for w in range(self._windows.shape[1]) if steps >> w]
        return {
            size: self._windows[:, w] / (steps // size) for w, size in enumerate(sizes)
        }


def _list(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else values.tolist()
