"""The whole routing of a replay, laid open for oracles.

An oracle mostly asks about *now*: "when is each resident used next?" So one row of next
uses per layer is kept for the step last asked about, and moving one step ahead touches
only the experts that were active in it. A question about any other step is answered by
binary search.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Self

import numpy as np
from moesim.traces.format.layer_steps import layer_steps, of_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace

_FAR_STEPS = 32
"""Beyond so many steps, searching afresh is cheaper than moving along."""


class RecordedFuture:
    """Answers the oracle's questions about steps that were composed beforehand.

    Memory: 18 bytes per active expert of a layer step, nothing else that grows.

    Args:
        steps: the steps of the replay, in order, from step 0.
    """

    def __init__(self, steps: Iterable[RoutedStep]) -> None:
        self._read(of_steps(steps))

    @classmethod
    def of(cls, trace: Trace, *, batch: int = 1, steps: int | None = None) -> Self:
        """The future of replaying `trace` in batches of `batch`, cut after `steps`
        forward passes.
        """
        future = cls(())
        future._read(layer_steps(trace, batch=batch, steps=steps))
        return future

    def _read(self, blocks: Iterable[LayerSteps]) -> None:
        sizes = [np.empty(0, np.int64)]
        experts = [np.empty(0, np.int32)]
        tokens = [np.empty(0, np.int32)]
        self.layers = 1
        for block in blocks:
            self.layers = max(self.layers, int(block.layer.max()) + 1)
            sizes.append(np.diff(block.edges))
            experts.append(block.experts)
            tokens.append(block.tokens)
        self._experts = np.concatenate(experts)
        self._tokens = np.concatenate(tokens)
        edges = np.concatenate(([0], np.cumsum(np.concatenate(sizes)))).astype(np.int64)
        self.steps = (len(edges) - 1) // self.layers
        # Plain integers out, at half the price of numpy's.
        self._edges = memoryview(edges.data)
        self.width = int(self._experts.max(initial=0)) + 1
        self._index(np.diff(edges))

    @property
    def never(self) -> int:
        """The number of steps: past the end, so larger than any use."""
        return self.steps

    def next_use(self, step: int, layer: int, expert: int) -> int:
        """First step strictly after `step` in which this expert is active; `never` if
        there is none.
        """
        if expert >= self.width:
            return self.steps
        return int(self._row(step, layer)[expert])

    def next_uses(self, step: int, layer: int, experts: np.ndarray) -> np.ndarray:
        """int64, same shape as `experts`: `next_use` of each."""
        row = self._row(step, layer)
        uses: np.ndarray
        try:
            # Numpy is several times faster with its own index type.
            uses = row[experts.astype(np.intp)]
        # an expert that is never active may lie beyond the row: onto the spare last
        # entry
        except IndexError:
            uses = row[np.minimum(experts, self.width)]
        return uses

    @property
    def following(self) -> np.ndarray:
        """int32, one entry per access in replay order: the step of that expert's next
        use; `never` if there is none.
        """
        return self._following

    def active(self, step: int, layer: int) -> np.ndarray:
        """int32 [A], ascending: the experts that layer step uses; empty past the
        end.
        """
        return self._experts[self._span(step, layer)]

    def tokens(self, step: int, layer: int) -> np.ndarray:
        """int32 [A]: the tokens routed to each of `active`."""
        return self._tokens[self._span(step, layer)]

    def _span(self, step: int, layer: int) -> slice:
        """Where the experts of a layer step lie; nowhere past the end."""
        if not 0 <= step < self.steps:
            return slice(0)
        place = step * self.layers + layer
        return slice(self._edges[place], self._edges[place + 1])

    def _index(self, sizes: np.ndarray) -> None:
        """Sort the uses by (layer, expert), and link each use to the following one."""
        place = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        key = place % self.layers * np.int32(self.width) + self._experts
        step = place // self.layers
        order = np.argsort(key, kind="stable")
        ranked = key[order]
        uses = step[order].astype(np.int32)
        self._uses = memoryview(uses.data)
        following = np.append(uses[1:], np.int32(self.steps))
        following[np.flatnonzero(np.diff(ranked))] = self.steps
        if len(ranked):
            following[-1] = self.steps
        self._following = np.empty(len(order), dtype=np.int32)
        self._following[order] = following[: len(order)]
        self._starts = np.searchsorted(
            ranked, np.arange(self.layers * self.width + 1)
        ).tolist()
        self._now = [-1] * self.layers
        self._rows = [self._searched(-1, layer) for layer in range(self.layers)]

    def _searched(self, step: int, layer: int) -> np.ndarray:
        """int64 [width + 1]: next uses after `step` at `layer`, found from nothing."""
        row = np.full(self.width + 1, self.steps, dtype=np.int64)
        base = layer * self.width
        for expert in range(self.width):
            start = self._starts[base + expert]
            stop = self._starts[base + expert + 1]
            place = bisect_right(self._uses, step, start, stop)
            if place < stop:
                row[expert] = self._uses[place]
        return row

    def _row(self, step: int, layer: int) -> np.ndarray:
        """int64 [width + 1]: next uses strictly after `step` at `layer`."""
        now = self._now[layer]
        if step == now:
            return self._rows[layer]
        if step < now:  # a look back must not undo the way already gone
            return self._searched(step, layer)
        if step >= self.steps:
            return np.full(self.width + 1, self.steps, dtype=np.int64)
        if step - now > _FAR_STEPS:
            self._rows[layer] = self._searched(step, layer)
        else:
            row = self._rows[layer]
            for passed in range(now + 1, step + 1):
                start = self._edges[place := passed * self.layers + layer]
                stop = self._edges[place + 1]
                row[self._experts[start:stop].astype(np.intp)] = self._following[
                    start:stop
                ].astype(np.int64)
        self._now[layer] = step
        return self._rows[layer]
