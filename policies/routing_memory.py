"""What the routing of earlier tokens says about this one: shared by parts of a policy.

The routing of the token under way is compared, after every layer, with that of the last
tokens. Those that chose the same experts so far foretell what it uses in its deeper
layers (`expect_coming`), and what the next token uses in this one (`observe`). No gate
is evaluated and nothing is trained.

A token is a forward pass in the decode phase; of a batch, the union of its sequences.
Prompts have too many tokens in a pass to be compared, and count as uses only.

L layers, E experts, H tokens remembered, N nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.kernels import ACCESSED, State, Work
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

_PREFILL = int(Phase.PREFILL)

# Rows of the scores, by flat key.
_COPY = 0
"""What an expert is worth to a copy of its own: `VALUE`, as far as that is believed."""
SCORE = 1
"""What an expert is worth in a cache: `VALUE`, and until its layer has come what a
prefetcher adds.
"""
VALUE = 2
COMING = 3
"""Expected uses by this token."""
FOLLOWING = 4
"""Expected uses by the next token."""
_SHORT = 5
_LONG = 6
_SEEN = 7
"""By layer: the weights of the tokens that either frequency has seen, of all tokens."""
PROMISES = 8
"""Expected uses by this token when they were first high enough to be promised; 0 where
none was.
"""
_LATELY = 9
_ROWS = 10

# Places in the integers. E comes first, as in all states.
_EXPERTS = 0
_LAYERS = 1
_HISTORY = 2
_LAST = 3
"""Layer step that was observed last."""
_STEP = 4
_TOKENS = 5
"""Tokens that are remembered, this one included."""
_SLOT = 6
"""Where this token is remembered: one of H places."""
_WIDTH = 7
"""Experts of a token that are remembered in a layer, at most."""
_ACTIVE = 8
"""Experts that this token has used so far."""
_SIMILAR = 9
"""How many similar tokens are listed."""
_OVERLAPS = 10
"""Where regions begin: experts that every token has in common with this one so far, in
`_LANES`,
"""
_LIST = 11
"""slots of similar tokens,"""
_COUNTS = 12
"""by layer and slot, how many experts the token has used,"""
_CHOSEN = 13
"""which ones,"""
_USES = 14
"""and by flat key, which tokens have used an expert, in `_LANES`."""
_LAYOUT = 15

_LANES: Final = 4
"""Counts of so many tokens are added up at once, as parts of one integer."""

_LANE_BITS: Final = 16
_LANE: Final = (1 << _LANE_BITS) - 1

_UNION: Final = 8
"""Tokens' worth of experts that are remembered of a forward pass in a layer: of larger
unions of a batch, those of the lowest ids.
"""

# Places in the numbers.
_RECALL = 0
_SHARE_SHORT = 1
_MARGIN = 2
_DECAYS = 3
TOTAL = 5
"""Weight of all similar tokens."""
_PROMISED = 6
"""Uses that were promised, and how many of them came."""
_KEPT = 7
_BETTER = 8
_DIFFERENT = 9
_WEIGHTS = 10
"""Where weights of similar tokens begin."""

_OF_USERS = 5
"""Places at the end for the rules of a prefetcher and, last, this layer step's margin.
"""

_SHARPNESS: Final = 20.0
"""A token that shares all experts with this one so far weighs e to this power more than
one that shares none.
"""

_FAINT: Final = 3.0
"""Tokens of a weight below e^-3 of the most similar one are left out."""

_BELIEVED: Final = 8.0
"""Promises taken to have been kept before the first one."""

_GRADED: Final = 5
"""Every so many layer steps what was expected is compared with what is used."""

_HALF_BELIEVED: Final = 10.0
"""Squared difference for which the regression's slope counts as one half beforehand."""

_PRIOR: Final = 2.0
"""Tokens without uses that frequencies begin with."""

_NONE: Final = -1


class RoutingMemory:
    """The last tokens' routing, as arrays that several policies' kernels work on.

    Attributes:
        state: all of it; users bring a state of these arrays and marks of their own.
    """

    def __init__(self, layers: int, experts: int, top_k: int, history: int) -> None:
        keys = layers * experts
        words = -(-history // _LANES)
        width = min(experts, _UNION * top_k)
        places = history * layers
        sizes = (words, history, places, places * width, keys * words)
        starts = (_LAYOUT + np.cumsum([0, *sizes])).tolist()
        integers = np.zeros(starts[-1], np.int64)
        integers[:_LAYOUT] = (
            *(experts, layers, history, _NONE, _NONE, 0, _NONE, width, 0, 0),
            *starts[:-1],
        )
        numbers = np.zeros(_WEIGHTS + history + _OF_USERS)
        self.state = State(
            scores=np.zeros((_ROWS, keys)),
            marks=np.zeros((0, 0), np.int64),
            numbers=numbers,
            integers=integers,
        )

    @classmethod
    def of(cls, context: RunContext, history: int) -> RoutingMemory:
        """The memory of a run, the same for all its policies that ask for it alike."""
        shape = context.shape
        sizes = (shape.layers, shape.experts, shape.top_k, history)
        return context.share((cls, history), lambda: cls(*sizes))

    def value_by(self, half_lives: tuple[float, float], *rules: float) -> None:
        """Say how experts are valued.

        Args:
            half_lives: of the two decayed frequencies, in tokens and in passes.
            rules: how far what followed similar tokens is believed where a copy is to
                be bought by it; weight of the first frequency; margin of such a copy,
                for each token of a pass.
        """
        numbers = self.state.numbers
        numbers[:_DECAYS] = rules
        lengths = np.array(half_lives)
        numbers[_DECAYS:TOTAL] = 0.5 ** (1.0 / lengths)


@compiled(ACCESSED)
def observe(state: State, work: Work) -> None:
    """Note the experts of a layer step, once, whoever tells first; value its layer."""
    integers = state.integers
    now = work.step * integers[_LAYERS] + work.layer
    if integers[_LAST] == now:
        return
    integers[_LAST] = now
    experts = integers[_EXPERTS]
    first = work.layer * experts
    _hold_to_promises(state, work, first)
    if now % _GRADED == 0:
        _grade(state, work, first)
    for key in range(first, first + experts):
        state.scores[FOLLOWING, key] = 0.0
    integers[_SIMILAR] = 0
    state.numbers[TOTAL] = 0.0
    if work.phase != _PREFILL:
        if integers[_STEP] != work.step:
            _begin_token(state, work.step)
        _remember(state, work, first)
        _list_similar(state)
        _recall(state, work.layer, 1, FOLLOWING)
    _value(state, work, first)


@compiled
def _hold_to_promises(state: State, work: Work, first: int) -> None:
    """Compare what was promised of a layer with what it uses."""
    numbers = state.numbers
    promises = state.scores[PROMISES]
    for expert in work.experts:
        if promises[first + expert] > 0.0:
            numbers[_KEPT] += 1.0
    for key in range(first, first + state.integers[_EXPERTS]):
        if promises[key] > 0.0:
            numbers[_PROMISED] += 1.0
            promises[key] = 0.0


@compiled
def _grade(state: State, work: Work, first: int) -> None:
    """Regress what is used on what followed similar tokens and on use of late."""
    lately = state.scores[_LATELY]
    following = state.scores[FOLLOWING]
    better = 0.0
    different = 0.0
    for key in range(first, first + state.integers[_EXPERTS]):
        more = following[key] - lately[key]
        better -= more * lately[key]
        different += more * more
    for expert in work.experts:
        key = first + expert
        better += following[key] - lately[key]
    state.numbers[_BETTER] += better
    state.numbers[_DIFFERENT] += different


@compiled
def kept_promises(state: State) -> float:
    """Share of the promised uses that came; nearly all until some have been checked."""
    numbers = state.numbers
    return (numbers[_KEPT] + _BELIEVED) / (numbers[_PROMISED] + _BELIEVED)


@compiled
def _begin_token(state: State, step: int) -> None:
    integers = state.integers
    history = integers[_HISTORY]
    integers[_STEP] = step
    integers[_TOKENS] = min(integers[_TOKENS] + 1, history)
    integers[_ACTIVE] = 0
    integers[_SLOT] = (integers[_SLOT] + 1) % history
    for word in range(integers[_OVERLAPS], integers[_LIST]):
        integers[word] = 0


@compiled
def _remember(state: State, work: Work, first: int) -> None:
    """Count for every token which of this layer's experts it has used here, too; then
    let this token take the place of the oldest.
    """
    integers = state.integers
    slot = integers[_SLOT]
    overlaps = integers[_OVERLAPS]
    words = integers[_LIST] - overlaps
    uses = integers[_USES] + first * words
    bit = 1 << (slot % _LANES * _LANE_BITS)
    of_slot = slot // _LANES
    place = work.layer * integers[_HISTORY] + slot
    begin = integers[_CHOSEN] + place * integers[_WIDTH]
    for n in range(begin, begin + integers[integers[_COUNTS] + place]):
        integers[uses + integers[n] * words + of_slot] -= bit

    for expert in work.experts:
        of_expert = uses + expert * words
        for word in range(words):
            integers[overlaps + word] += integers[of_expert + word]
    integers[_ACTIVE] += len(work.experts)

    count = min(len(work.experts), integers[_WIDTH])
    integers[integers[_COUNTS] + place] = count
    for n in range(count):
        expert = work.experts[n]
        integers[begin + n] = expert
        integers[uses + expert * words + of_slot] += bit


@compiled
def _overlap(state: State, slot: int) -> int:
    """Experts that a token has in common with this one so far."""
    word = state.integers[state.integers[_OVERLAPS] + slot // _LANES]
    return (word >> (slot % _LANES * _LANE_BITS)) & _LANE


@compiled
def _list_similar(state: State) -> None:
    """List the tokens most like this one so far, with their weights."""
    integers = state.integers
    numbers = state.numbers
    slots = integers[_TOKENS]
    most = 0
    for slot in range(slots):
        most = max(most, _overlap(state, slot))
    # Shares of experts in common, times the sharpness.
    slope = _SHARPNESS / max(1, integers[_ACTIVE])
    faintest = most - int(_FAINT / slope)
    by_overlap = np.empty(most - faintest + 1)
    step = np.exp(-slope)
    weight = 1.0
    for behind in range(len(by_overlap)):
        by_overlap[behind] = weight
        weight *= step
    count = 0
    total = 0.0
    for slot in range(slots):
        overlap = _overlap(state, slot)
        if overlap < faintest or slot == integers[_SLOT]:
            continue
        weight = by_overlap[most - overlap]
        integers[integers[_LIST] + count] = slot
        numbers[_WEIGHTS + count] = weight
        total += weight
        count += 1
    integers[_SIMILAR] = count
    numbers[TOTAL] = total


@compiled
def _recall(state: State, layer: int, later: int, row: int) -> None:
    """Add up, by weight, the experts of a layer that similar tokens, or those so much
    `later`, have used: expected uses.
    """
    integers = state.integers
    history = integers[_HISTORY]
    width = integers[_WIDTH]
    first = layer * integers[_EXPERTS]
    listed = integers[_LIST]
    counts = integers[_COUNTS] + layer * history
    chosen = integers[_CHOSEN] + layer * history * width
    scores = state.scores[row]
    share = 1.0 / max(state.numbers[TOTAL], 1e-300)
    for n in range(integers[_SIMILAR]):
        slot = integers[listed + n] + later
        if slot >= history:
            slot -= history
        weight = state.numbers[_WEIGHTS + n] * share
        begin = chosen + slot * width
        for place in range(begin, begin + integers[counts + slot]):
            scores[first + integers[place]] += weight


@compiled
def expect_coming(state: State, layer: int) -> None:
    """Expect what similar tokens have used in a coming layer."""
    coming = state.scores[COMING]
    first = layer * state.integers[_EXPERTS]
    for key in range(first, first + state.integers[_EXPERTS]):
        coming[key] = 0.0
    _recall(state, layer, 0, COMING)


@compiled
def _value(state: State, work: Work, first: int) -> None:
    """Value a layer's experts by use of late and by what followed similar tokens."""
    scores = state.scores
    numbers = state.numbers
    end = first + state.integers[_EXPERTS]
    share = numbers[_SHARE_SHORT]
    passed = work.rows if work.phase == _PREFILL else 1
    tokens = work.rows // passed
    numbers[-1] = numbers[_MARGIN] * tokens
    of_short = share * _count(state, work, first, _SHORT, work.rows)
    of_long = (1.0 - share) * _count(state, work, first, _LONG, passed)
    recall = 0.0
    if numbers[TOTAL] > 0.0:
        better = numbers[_BETTER] + 0.5 * _HALF_BELIEVED
        recall = better / (numbers[_DIFFERENT] + _HALF_BELIEVED)
        recall = min(1.0, max(0.0, recall))
    for key in range(first, end):
        of_late = of_short * scores[_SHORT, key] + of_long * scores[_LONG, key]
        scores[_LATELY, key] = of_late
        more = recall * (scores[FOLLOWING, key] - of_late)
        scores[VALUE, key] = of_late + more
        scores[SCORE, key] = of_late + more
        scores[_COPY, key] = of_late + numbers[_RECALL] * more


@compiled
def _count(state: State, work: Work, first: int, row: int, passed: int) -> float:
    """Count a layer step's uses in a frequency that has decayed so many times, those of
    a prompt by its tokens; what its numbers must be multiplied by to be uses per pass.
    """
    uses = state.scores[row]
    is_prompt = work.phase == _PREFILL
    decay = state.numbers[_DECAYS + row - _SHORT]
    kept = decay**passed
    for key in range(first, first + state.integers[_EXPERTS]):
        uses[key] *= kept
    for i in range(len(work.experts)):
        share = work.tokens[i] / work.rows if is_prompt else 1.0
        uses[first + work.experts[i]] += share * (1.0 - kept)
    place = 2 * work.layer + row - _SHORT
    seen = state.scores[_SEEN, place] * kept + 1.0 - kept
    state.scores[_SEEN, place] = seen
    before = _PRIOR * (1.0 - decay)
    return 1.0 / (seen + before)
