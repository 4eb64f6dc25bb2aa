"""The whole routing of a replay, for policies that may know the future."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Self

import numpy as np

from moesim.traces.format.layer_steps import layer_steps, of_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.traces.format.batch import LayerSteps, RoutedStep
    from moesim.traces.format.reader import Trace


class RecordedFuture:
    """Answers the oracle's questions about steps that were composed beforehand.

    Memory: 18 bytes per active expert of a layer step, nothing else that grows.

    Args:
        steps: the steps of the replay, in order, from step 0.

    Attributes:
        layers: of the model.
        steps: of the replay.
        never: past the end, so larger than any use.
        width: one more than the largest expert that is active.
        experts: int32, one entry per access in replay order.
        edges: int64 [layer steps + 1]; layer step i, ``step * layers + layer``, owns
            the accesses ``edges[i]:edges[i + 1]``.
        following: int32, one entry per access: the step of that expert's next use;
            `never` if there is none.
    """

    def __init__(self, steps: Iterable[RoutedStep]) -> None:
        self._read(of_steps(steps))

    @classmethod
    def of(cls, trace: Trace, *, batch: int = 1, steps: int | None = None) -> Self:
        """Return the future of replaying `trace` in batches of `batch`, cut after
        `steps` forward passes.
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

        self.experts = np.concatenate(experts)
        self._tokens = np.concatenate(tokens)
        ends = np.cumsum(np.concatenate(sizes))
        self.edges = np.concatenate(([0], ends)).astype(np.int64)

        self.steps = (len(self.edges) - 1) // self.layers
        self.never = self.steps
        self.width = int(self.experts.max(initial=0)) + 1
        # A memoryview gives plain integers, at half the price of numpy's.
        self._edges = memoryview(self.edges.data)
        self._index(np.diff(self.edges))

    def next_use(self, step: int, layer: int, expert: int) -> int:
        """Return the first step strictly after `step` in which this expert is active;
        `never` if there is none.
        """
        if expert >= self.width:
            return self.never
        key = layer * self.width + expert
        start, stop = self._starts[key], self._starts[key + 1]
        place = bisect_right(self._uses, step, start, stop)
        return self._uses[place] if place < stop else self.never

    def next_uses(self, step: int, layer: int, experts: np.ndarray) -> np.ndarray:
        """Return `next_use` of each expert: int64 [N], as `experts`."""
        uses = [self.next_use(step, layer, expert) for expert in experts.tolist()]
        return np.array(uses, np.int64)

    def active(self, step: int, layer: int) -> np.ndarray:
        """Return the experts that a layer step uses, int32 [A], ascending; none past
        the end.
        """
        return self.experts[self._span(step, layer)]

    def tokens(self, step: int, layer: int) -> np.ndarray:
        """Return the tokens routed to each of `active`: int32 [A]."""
        return self._tokens[self._span(step, layer)]

    def _span(self, step: int, layer: int) -> slice:
        """Where the experts of a layer step lie; nowhere past the end."""
        if not 0 <= step < self.steps:
            return slice(0)

        place = step * self.layers + layer
        return slice(self._edges[place], self._edges[place + 1])

    def _index(self, sizes: np.ndarray) -> None:
        """Sort the uses by (layer, expert), and link each use to the following one."""
        # 32-bit numbers: this is the peak of memory of a long replay.
        place = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        key = place % self.layers * np.int32(self.width) + self.experts
        step = place // self.layers

        by_key = np.argsort(key, kind="stable")
        sorted_keys = key[by_key]
        uses = step[by_key].astype(np.int32)
        self._uses = memoryview(uses.data)

        # The use behind each, unless it is another key's.
        following = np.append(uses[1:], np.int32(self.steps))
        following[np.flatnonzero(np.diff(sorted_keys))] = self.steps
        if len(sorted_keys):
            following[-1] = self.steps
        self.following = np.empty(len(by_key), dtype=np.int32)
        self.following[by_key] = following[: len(by_key)]

        keys = np.arange(self.layers * self.width + 1)
        self._starts = np.searchsorted(sorted_keys, keys).tolist()
