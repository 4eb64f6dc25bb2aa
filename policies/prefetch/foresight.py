"""The clairvoyant system's copies: behind the work, for any token to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.arrays import view_of, zeros
from moesim.policies.base import PrefetchPolicy
from moesim.policies.foresight import Foresight
from moesim.policies.names import NONE, RESIDENT
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import is_present
from moesim.policies.prefetch.recall import layer_s

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

_AHEAD = 4.0
"""Layer steps within which a copy must be able to start: later ones are chosen anew."""

_ADVANCE = 0.5
"""Share of a copy that must be done when its layer begins: products may wait for the
rest.
"""

_STAGED = 4
"""Experts of the next layer that are copied besides, whatever they replace."""

_COMES = 1
_LEAVES = 2
_NOBODY = -2


class ForesightPrefetch(PrefetchPolicy):
    """Copy what coming tokens use, soonest first, where it is worth more than whom it
    replaces by the price of the link.

    Layers are looked at in the order in which they come, those of the next tokens
    included. What could not be there in time is left to later uses. The queue is
    chosen anew at every layer, and holds no more than the link could start within four
    layer steps. Where that leaves time, four more experts of the next layer are copied,
    which the cache may turn away: then they run from staging.

    Args:
        decay: as in the cache policy.
        margin: discounted uses that a copy must gain, the price of the link.
        tokens: forward passes looked ahead.

    Source: ours; see docs/explanation/gap.md.
    """

    oracle: ClassVar[bool] = True
    foresees_passes: ClassVar[bool] = True
    late = "drop"
    requeue = True

    def __init__(
        self, *, decay: float = 0.65, margin: float = 0.5, tokens: float = 2.0
    ) -> None:
        expect(0 < decay < 1, "decay", "0 < decay < 1", decay)
        expect(margin >= 0, "margin", ">= 0", margin)
        expect(tokens > 0, "tokens", "> 0", tokens)
        self.decay = decay
        self.margin = margin
        self.tokens = tokens

    def start(self, context: RunContext) -> None:
        """Take the run's foresight.

        Raises:
            PolicyError: the future is not available.
        """
        self.known = self.take(context)
        shape = context.shape
        self.is_global = len(context.capacity_slots) == 1
        slots = context.gpus * np.broadcast_to(context.capacity_slots, shape.layers)
        self.slots: Ints = view_of(slots, np.int64)
        # What this layer step has named to come or to leave.
        self.role: Ints = zeros(shape.layers * shape.experts, np.int8)
        self.leaving: Ints = zeros(shape.layers * shape.experts, np.int64)

    def take(self, context: RunContext) -> Foresight:
        """What the run foresees."""
        return Foresight.of(context, self.decay)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        self.known.foresee(work)
        each_s = layer_s(work, view)
        start_s = view.link_wait_s
        begins_s = 0.0
        layer = work.layer
        step = work.step
        count = 0
        leaving = 0
        for _ in range(int(self.tokens * view.layers)):
            if start_s > _AHEAD * each_s:
                break
            begins_s += each_s
            layer += 1
            if layer == view.layers:
                layer = 0
                step += 1
            copy_s = view.copy_s[layer]
            while (
                start_s <= _AHEAD * each_s and start_s + _ADVANCE * copy_s <= begins_s
            ):
                best = self._wanted(view, layer, step)
                if best < 0:
                    break
                worst = self._least_worth(view, layer)
                if not self._pays(best, worst):
                    break
                named[count] = best
                count += 1
                self.role[best] = _COMES
                if worst >= 0:
                    self.leaving[leaving] = worst
                    leaving += 1
                    self.role[worst] = _LEAVES
                start_s += copy_s
        for n in range(leaving):
            self.role[self.leaving[n]] = 0
        count = self._staged(work, view, named, count, start_s, each_s)
        for n in range(count):
            self.role[named[n]] = 0
        return count

    def _staged(
        self,
        work: Work,
        view: MachineView,
        named: Ints,
        count: int,
        start_s: float,
        each_s: float,
    ) -> int:
        """Name what the next layer wants most beyond that, as far as it can be there in
        time; the cache may turn it away, and then it is staged. How many are named now.
        """
        layer = work.layer + 1
        if layer == view.layers:
            return count
        for _ in range(_STAGED):
            if start_s + _ADVANCE * view.copy_s[layer] > each_s:
                break
            best = self._wanted(view, layer, work.step)
            if best < 0:
                break
            named[count] = best
            count += 1
            self.role[best] = _COMES
            start_s += view.copy_s[layer]
        return count

    def _wanted(self, view: MachineView, layer: int, step: int) -> int:
        """The absent expert of a layer that is used at `step` and worth most; -1 for
        none.
        """
        value = self.known.value
        best = NONE
        first = layer * view.experts
        for key in range(first, first + view.experts):
            if self.known.next_step[key] != step or self.role[key] == _COMES:
                continue
            if best >= 0 and value[key] <= value[best]:
                continue
            if not is_present(view, key):
                best = key
        return best

    def _pays(self, best: int, worst: int) -> bool:
        """Whether a copy gains more than the margin over whom it replaces."""
        if worst < 0:
            return worst != _NOBODY
        return self.known.value[best] - self.known.value[worst] > self.margin

    def _least_worth(self, view: MachineView, layer: int) -> int:
        """The resident that a layer's pool would lose least with; -1 for a free slot,
        -2 if nothing can leave.
        """
        value = self.known.value
        first = layer * view.experts
        end = first + view.experts
        if self.is_global:
            first = 0
            end = view.layers * view.experts
        worst = _NOBODY
        taken = 0
        for key in range(first, end):
            role = self.role[key]
            if role == _COMES or is_present(view, key):
                taken += 1
            if role != 0 or not self._is_resident(view, key):
                continue
            if worst < 0 or value[key] < value[worst]:
                worst = key
        return NONE if taken < self.slots[layer] else worst

    def _is_resident(self, view: MachineView, key: int) -> bool:
        for gpu in range(view.gpus):
            if view.states[gpu, key] == RESIDENT:
                return True
        return False
