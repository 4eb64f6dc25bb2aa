"""The clairvoyant system's copies: behind the work, for any token to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from moesim.machine_code.functions import compiled
from moesim.policies.base import RESIDENT
from moesim.policies.compiled import CompiledPrefetch
from moesim.policies.foresight import (
    LAYERS,
    NAMED,
    NEXT_STEP,
    OF_USERS,
    POOLS,
    SLOTS,
    VALUE,
    Foresight,
    foresee,
)
from moesim.policies.kernels import (
    PREFETCH,
    KernelView,
    PrefetchKernels,
    State,
    Work,
)
from moesim.policies.parameters import expect
from moesim.policies.prefetch._kernels import is_present
from moesim.policies.prefetch.recall import layer_s

if TYPE_CHECKING:
    import numpy as np

    from moesim.policies.base import RunContext

# Places in the state's numbers.
_MARGIN: Final = OF_USERS
_TOKENS: Final = OF_USERS + 1

_AHEAD: Final = 4.0
"""Layer steps within which a copy must be able to start: later ones are chosen anew."""

_ADVANCE: Final = 0.5
"""Share of a copy that must be done when its layer begins: products may wait for the
rest.
"""

_STAGED: Final = 4
"""Experts of the next layer that are copied besides, whatever they replace."""

_COMES: Final = 1
_LEAVES: Final = 2


@compiled
def _is_resident(view: KernelView, key: int) -> bool:
    for gpu in range(len(view.states)):
        if view.states[gpu, key] == RESIDENT:
            return True
    return False


@compiled
def _wanted(state: State, view: KernelView, layer: int, step: int) -> int:
    """The absent expert of a layer that is used at `step` and worth most; -1 for
    none.
    """
    values = state.scores[VALUE]
    first = layer * state.integers[0]
    best = -1
    for key in range(first, first + state.integers[0]):
        if state.marks[NEXT_STEP, key] != step or state.marks[NAMED, key] == _COMES:
            continue
        if best >= 0 and values[key] <= values[best]:
            continue
        if not is_present(view.states, key):
            best = key
    return best


@compiled
def _least_worth(state: State, view: KernelView, layer: int) -> int:
    """The resident that a layer's pool would lose least with; -1 for a free slot, -2 if
    nothing can leave.
    """
    values = state.scores[VALUE]
    experts = state.integers[0]
    first = layer * experts
    end = first + experts
    if state.integers[POOLS] == 1:
        first = 0
        end = experts * state.integers[LAYERS]
    worst = -2
    taken = 0
    for key in range(first, end):
        named = state.marks[NAMED, key]
        if named == _COMES or is_present(view.states, key):
            taken += 1
        if named != 0 or not _is_resident(view, key):
            continue
        if worst < 0 or values[key] < values[worst]:
            worst = key
    has_room = taken < state.integers[state.integers[SLOTS] + layer]
    return -1 if has_room else worst


@compiled
def _next_copy(
    state: State, view: KernelView, layer: int, step: int
) -> tuple[int, int]:
    """What a layer wants most at `step`, and whom it replaces, -1 for a free slot; -1
    twice if no copy gains more than the margin.
    """
    values = state.scores[VALUE]
    best = _wanted(state, view, layer, step)
    if best < 0:
        return -1, -1
    worst = _least_worth(state, view, layer)
    if worst == -1:
        return best, -1
    if worst < 0 or values[best] - values[worst] <= state.numbers[_MARGIN]:
        return -1, -1
    return best, worst


@compiled
def _staged(
    state: State,
    work: Work,
    view: KernelView,
    named: np.ndarray,
    count: int,
    start_s: float,
    each_s: float,
) -> int:
    """Name what the next layer wants most beyond that, as far as it can be there in
    time; the cache may turn it away, and then it is staged. How many are named now.
    """
    layer = work.layer + 1
    if layer == state.integers[LAYERS]:
        return count
    for _ in range(_STAGED):
        if start_s + _ADVANCE * view.copy_s[layer] > each_s:
            break
        best = _wanted(state, view, layer, work.step)
        if best < 0:
            break
        named[count] = best
        count += 1
        state.marks[NAMED, best] = _COMES
        start_s += view.copy_s[layer]
    return count


@compiled(PREFETCH)
def _copies(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    foresee(state, work)
    layers = state.integers[LAYERS]
    each_s = layer_s(work, view)
    start_s = view.link_wait_s
    begins_s = 0.0
    layer = work.layer
    step = work.step
    count = 0
    leaving = 0
    for _ in range(int(state.numbers[_TOKENS] * layers)):
        if start_s > _AHEAD * each_s:
            break
        begins_s += each_s
        layer += 1
        if layer == layers:
            layer = 0
            step += 1
        copy_s = view.copy_s[layer]
        while start_s <= _AHEAD * each_s and start_s + _ADVANCE * copy_s <= begins_s:
            best, worst = _next_copy(state, view, layer, step)
            if best < 0:
                break
            named[count] = best
            count += 1
            state.marks[NAMED, best] = _COMES
            if worst >= 0:
                # From the end on: there are fewer copies than keys.
                leaving += 1
                named[len(named) - leaving] = worst
                state.marks[NAMED, worst] = _LEAVES
            start_s += copy_s
    for n in range(leaving):
        state.marks[NAMED, named[len(named) - 1 - n]] = 0
    count = _staged(
        state, work, view, named, count=count, start_s=start_s, each_s=each_s
    )
    for n in range(count):
        state.marks[NAMED, named[n]] = 0
    return count


class ForesightPrefetch(CompiledPrefetch):
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
    weighs_costs: ClassVar[bool] = True
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
        super().start(context)
        known = Foresight.of(context, self.decay).state
        known.numbers[_MARGIN] = self.margin
        known.numbers[_TOKENS] = self.tokens
        self.brought = PrefetchKernels(_copies, known)
