"""Routing recall: what similar tokens used in the coming layers is streamed in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros
from moesim.policies.base import PrefetchPolicy
from moesim.policies.names import RESIDENT
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import is_present
from moesim.policies.routing_memory import RoutingMemory

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

_AHEAD = 1.5
"""Layer steps within which a copy must be able to start: later ones are chosen anew."""

_WORTH = 0.5
"""Most uses of this token that count in the cache, whose scores are uses of a later
one.
"""

_SHARE_ON_CPU = 0.7
"""Of the CPU's time for all that is absent, what a layer lasts, about: the link takes
some of it, and the GPU computes beside.
"""


def layer_s(work: Work, view: MachineView) -> float:
    """Seconds from now until the next layer's gate has spoken, about."""
    seconds = view.gap_s
    for i in range(work.active):
        if work.state[i] != RESIDENT:
            seconds += _SHARE_ON_CPU * work.cpu_s[i]
    return seconds


class Recall(PrefetchPolicy):
    """Stream what tokens with the same routing so far used in the coming layers.

    Nearest layer first, then what is expected most (see
    `moesim.policies.routing_memory`), as far as it is expected `least` uses and its
    copy could start, and be done in part, before its layer's gate has spoken. A layer
    is taken to last as long as this one does: a share of the CPU's time for what is
    absent, and the dense part. The queue is chosen anew at every layer, and holds no
    more than the link could start before the next one. Nothing is streamed while too
    few of the experts that were expected as much have been used. Where a copy slows the
    CPU, as both read host memory, it must also be expected the uses that this costs.

    What is named is worth more in a cache of the same name until its layer has come.

    Args:
        depth: layers ahead, at most.
        least: expected uses of what is worth a copy; 1 is certain, at batch 1.
        trust: share of such expectations that must have come true, of the way from what
            chance would give, 0, to all, 1.
        advance: share of a copy that must be done when the layer begins.
        history: as in the cache policy.
        planning_us, expert_ns: what this takes in a layer step beside the cache policy:
            microseconds, and nanoseconds more for each expert of a layer.

    Source: ours; see docs/explanation/recall.md.
    """

    late = "drop"
    requeue = True

    def __init__(
        self,
        *,
        depth: int = 4,
        least: float = 0.9,
        trust: float = 0.55,
        advance: float = 0.5,
        history: int = 256,
        planning_us: float = 0.5,
        expert_ns: float = 11.5,
    ) -> None:
        expect(depth >= 1, "depth", "a number >= 1", depth)
        expect(least > 0, "least", "> 0", least)
        expect(0 <= trust <= 1, "trust", "0 <= trust <= 1", trust)
        expect(advance >= 0, "advance", ">= 0", advance)
        expect(history >= 1, "history", "a number >= 1", history)
        expect(planning_us >= 0, "planning_us", ">= 0", planning_us)
        expect(expert_ns >= 0, "expert_ns", ">= 0", expert_ns)
        self.depth = depth
        self.least = least
        self.trust = trust
        self.advance = advance
        self.history = history
        self.taken_s = (1e-6 * planning_us, 1e-9 * expert_ns)

    def start(self, context: RunContext) -> None:
        """Take the run's memory of routing."""
        fixed_s, expert_s = self.taken_s
        self.own_planning_s = fixed_s + expert_s * context.shape.experts
        self.memory = RoutingMemory.of(context, self.history)
        self.price: Floats = zeros(context.shape.layers)
        if context.costs is None:
            return
        link, cpu = context.costs.overlap
        one_token = np.ones(1, np.int32)
        for layer in range(context.shape.layers):
            # What the CPU does not compute while a copy takes its share of the memory.
            lost_s = context.costs.copy_s(layer) * link * (1.0 - 1.0 / cpu)
            use_s = float(context.costs.cpu_s(layer, one_token)[0])
            self.price[layer] = lost_s / max(use_s, 1e-9)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        memory = self.memory
        memory.observe(work)
        if memory.total == 0.0:
            return 0
        each_s = layer_s(work, view)
        begins_s = each_s
        start_s = view.link_wait_s
        is_trusted = self._is_trusted(work, view)
        count = 0
        last = min(view.layers - 1, work.layer + self.depth)
        for layer in range(work.layer + 1, last + 1):
            if start_s > _AHEAD * each_s:
                break
            memory.expect(layer)
            absent = self._candidates(view, layer, named, count)
            if not is_trusted:
                continue
            copy_s = view.copy_s[layer]
            needed_s = self.advance * copy_s
            for _ in range(absent):
                if start_s + needed_s > begins_s:
                    break
                count += 1
                start_s += copy_s
            begins_s += each_s
        return count

    def _is_trusted(self, work: Work, view: MachineView) -> bool:
        """Whether enough promises were kept, of the way from chance to all."""
        by_chance = work.active / view.experts
        kept = (self.memory.kept_promises() - by_chance) / max(1.0 - by_chance, 1e-9)
        return kept >= self.trust

    def _candidates(
        self, view: MachineView, layer: int, named: Ints, count: int
    ) -> int:
        """List behind `count` keys a layer's absent experts that are expected enough,
        those expected most first, ties to the lower key; how many they are.

        Every expert that is expected enough is a promise, and what is expected counts
        in the cache's scores until its layer has come.
        """
        memory = self.memory
        first = layer * view.experts
        least = max(self.least, self.price[layer])
        end = count
        for key in range(first, first + view.experts):
            uses = memory.coming[key]
            memory.score[key] = memory.value[key] + min(_WORTH, uses)
            if uses == 0.0 or uses < least:
                continue
            memory.promises[key] = uses
            if is_present(view, key):
                continue
            place = end
            while place > count and memory.coming[named[place - 1]] < uses:
                named[place] = named[place - 1]
                place -= 1
            named[place] = key
            end += 1
        return end - count
