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
from moesim.policies.kernels import State, Work
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import RunContext

_PREFILL = int(Phase.PREFILL)

# Rows of the scores, by flat key.
SCORE = 0
"""What an expert is worth in a cache: `VALUE`, more until its layer has come."""
VALUE = 1
COMING = 2
"""Expected uses by this token."""
FOLLOWING = 3
"""Expected uses by the next token."""
_SHORT = 4
_LONG = 5
_ROWS = 6

# Places in the integers. E comes first, as in all states.
_EXPERTS = 0
_LAYERS = 1
_HISTORY = 2
_LAST = 3
"""Layer step that was observed last."""
_STEP = 4
_TOKEN = 5
"""Tokens seen, less one; tokens are numbered."""
_SLOT = 6
"""Where this token is remembered: one of H places."""
_NODES = 7
_NEXT = 8
"""Where the next layer's nodes begin."""
_ACTIVE = 9
"""Experts that this token has used so far."""
_SIMILAR = 10
"""How many similar tokens are listed."""
_HEADS = 11
"""Where regions begin: the newest node of every expert,"""
_FIRSTS = 12
"""the first node of every slot and layer,"""
_COUNTS = 13
"""how many it has,"""
_TOKENS = 14
"""the token of every slot,"""
_OVERLAPS = 15
"""experts that it has in common with this one so far,"""
_LIST = 16
"""slots of similar tokens,"""
_CHOSEN = 17
"""the expert of every node,"""
_NODE = 18
"""and its token, the token's slot and the same expert's node before."""
_LAYOUT = 19
_FIELDS = 3

# Places in the numbers.
_SHARPNESS = 0
_RECALL = 1
_DECAY_SHORT = 2
_DECAY_LONG = 3
_SHARE_SHORT = 4
TOTAL = 5
"""Weight of all similar tokens."""
_WEIGHTS = 6
"""Where weights of similar tokens begin."""

_OF_USERS = 5
"""Places at the end for the rules of a prefetcher and, last, a cache's margin."""

_FAINT: Final = 3.0
"""Tokens of a weight below e^-3 of the most similar one are left out."""

_NONE: Final = -1


class RoutingMemory:
    """The last tokens' routing, as arrays that several policies' kernels work on.

    Attributes:
        state: all of it; users bring a state of these arrays and marks of their own.
    """

    def __init__(
        self, layers: int, experts: int, top_k: int, *, history: int, sharpness: float
    ) -> None:
        # Unions of batches may have more experts: then fewer tokens are remembered.
        nodes = max(history * top_k, experts) * layers
        keys = layers * experts
        places = history * layers
        slots = (history,) * 3
        sizes = (keys, places, places, *slots, nodes, _FIELDS * nodes)
        starts = (_LAYOUT + np.cumsum([0, *sizes])).tolist()
        integers = np.full(starts[-1], _NONE, np.int64)
        integers[:_LAYOUT] = (
            *(experts, layers, history, _NONE, _NONE, _NONE, _NONE, nodes, 0, 0, 0),
            *starts[:-1],
        )
        numbers = np.zeros(_WEIGHTS + history + _OF_USERS)
        numbers[_SHARPNESS] = sharpness
        self.state = State(
            scores=np.zeros((_ROWS, keys)),
            marks=np.zeros((0, 0), np.int64),
            numbers=numbers,
            integers=integers,
        )

    @classmethod
    def of(
        cls, context: RunContext, *, history: int, sharpness: float
    ) -> RoutingMemory:
        """The memory of a run, the same for all its policies that ask for it alike."""
        shape = context.shape

        def made() -> RoutingMemory:
            return cls(
                shape.layers,
                shape.experts,
                shape.top_k,
                history=history,
                sharpness=sharpness,
            )

        return context.share((cls, history, sharpness), made)

    def value_by(
        self, *, recall: float, half_lives: tuple[float, float], short: float
    ) -> None:
        """Say how experts are valued.

        Args:
            recall: weight of what followed similar tokens; the rest is use of late.
            half_lives: in tokens, of the two decayed frequencies.
            short: weight of the first of them.
        """
        numbers = self.state.numbers
        numbers[_RECALL] = recall
        numbers[_DECAY_SHORT : _DECAY_LONG + 1] = 0.5 ** (1.0 / np.array(half_lives))
        numbers[_SHARE_SHORT] = short


@compiled
def observe(state: State, work: Work) -> None:
    """Note the experts of a layer step, once, whoever tells first; value its layer."""
    integers = state.integers
    now = work.step * integers[_LAYERS] + work.layer
    if integers[_LAST] == now:
        return
    integers[_LAST] = now
    experts = integers[_EXPERTS]
    first = work.layer * experts
    for key in range(first, first + experts):
        state.scores[COMING, key] = 0.0
        state.scores[FOLLOWING, key] = 0.0
    integers[_SIMILAR] = 0
    state.numbers[TOTAL] = 0.0
    if work.phase != _PREFILL:
        if integers[_STEP] != work.step:
            _begin_token(state, work.step)
        _compare(state, work, first)
        _remember(state, work, first)
        _list_similar(state)
        _recall(state, work.layer, 1, FOLLOWING)
    _value(state, work, first)


@compiled
def _begin_token(state: State, step: int) -> None:
    integers = state.integers
    integers[_STEP] = step
    integers[_TOKEN] += 1
    integers[_ACTIVE] = 0
    slot = integers[_SLOT] + 1
    if slot == integers[_HISTORY]:
        slot = 0
    integers[_SLOT] = slot
    integers[integers[_TOKENS] + slot] = integers[_TOKEN]
    overlaps = integers[_OVERLAPS]
    for other in range(integers[_HISTORY]):
        integers[overlaps + other] = 0


@compiled
def _compare(state: State, work: Work, first: int) -> None:
    """Count for every token which of this layer's experts it has used here, too."""
    integers = state.integers
    heads = integers[_HEADS] + first
    overlaps = integers[_OVERLAPS]
    nodes = integers[_NODE]
    oldest = integers[_TOKEN] - integers[_HISTORY]
    for expert in work.experts:
        newer = integers[_TOKEN]
        node = integers[heads + expert]
        while node >= 0:
            place = nodes + _FIELDS * node
            token = integers[place]
            # Where another layer's node has taken the place, the rest is older still.
            if token <= oldest or token >= newer:
                break
            newer = token
            integers[overlaps + integers[place + 1]] += 1
            node = integers[place + 2]
    integers[_ACTIVE] += len(work.experts)


@compiled
def _remember(state: State, work: Work, first: int) -> None:
    """Write a node for every active expert of a layer, behind the others."""
    integers = state.integers
    count = len(work.experts)
    node = integers[_NEXT]
    # A layer's nodes lie side by side.
    if node + count > integers[_NODES]:
        node = 0
    slot = integers[_SLOT]
    place = slot * integers[_LAYERS] + work.layer
    integers[integers[_FIRSTS] + place] = node
    integers[integers[_COUNTS] + place] = count
    for expert in work.experts:
        head = integers[_HEADS] + first + expert
        place = integers[_NODE] + _FIELDS * node
        integers[integers[_CHOSEN] + node] = expert
        integers[place] = integers[_TOKEN]
        integers[place + 1] = slot
        integers[place + 2] = integers[head]
        integers[head] = node
        node += 1
    integers[_NEXT] = node


@compiled
def _list_similar(state: State) -> None:
    """List the tokens most like this one so far, with their weights."""
    integers = state.integers
    numbers = state.numbers
    slots = min(integers[_HISTORY], integers[_TOKEN] + 1)
    this = integers[_SLOT]
    overlaps = integers[_OVERLAPS]
    most = 0
    for slot in range(slots):
        most = max(most, integers[overlaps + slot])
    # Shares of experts in common, times the sharpness.
    slope = numbers[_SHARPNESS] / max(1, integers[_ACTIVE])
    faintest = most - int(_FAINT / slope)
    by_overlap = np.empty(most - faintest + 1)
    for behind in range(len(by_overlap)):
        by_overlap[behind] = np.exp(-slope * behind)
    listed = integers[_LIST]
    count = 0
    total = 0.0
    for slot in range(slots):
        overlap = integers[overlaps + slot]
        if overlap < faintest or slot == this:
            continue
        weight = by_overlap[most - overlap]
        integers[listed + count] = slot
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
    layers = integers[_LAYERS]
    first = layer * integers[_EXPERTS]
    listed = integers[_LIST]
    tokens = integers[_TOKENS]
    firsts = integers[_FIRSTS]
    counts = integers[_COUNTS]
    nodes = integers[_NODE]
    scores = state.scores[row]
    share = 1.0 / max(state.numbers[TOTAL], 1e-300)
    for n in range(integers[_SIMILAR]):
        slot = integers[listed + n] + later
        if slot >= history:
            slot -= history
        place = slot * layers + layer
        node = integers[firsts + place]
        # Its place may have been taken, where batches use more experts than planned.
        if node < 0 or integers[nodes + _FIELDS * node] != integers[tokens + slot]:
            continue
        weight = state.numbers[_WEIGHTS + n] * share
        begin = integers[_CHOSEN] + node
        for expert in integers[begin : begin + integers[counts + place]]:
            scores[first + expert] += weight


@compiled
def expect_coming(state: State, layer: int, most: float) -> None:
    """Expect what similar tokens have used in a coming layer, `most` uses at most.

    Until it has come, this adds to the scores of its experts.
    """
    scores = state.scores
    first = layer * state.integers[_EXPERTS]
    end = first + state.integers[_EXPERTS]
    for key in range(first, end):
        scores[COMING, key] = 0.0
    _recall(state, layer, 0, COMING)
    for key in range(first, end):
        scores[SCORE, key] = scores[VALUE, key] + min(most, scores[COMING, key])


@compiled
def _value(state: State, work: Work, first: int) -> None:
    """Value a layer's experts by use of late and by what followed similar tokens."""
    scores = state.scores
    numbers = state.numbers
    short = numbers[_DECAY_SHORT]
    long = numbers[_DECAY_LONG]
    end = first + state.integers[_EXPERTS]
    for key in range(first, end):
        scores[_SHORT, key] *= short
        scores[_LONG, key] *= long
    for expert in work.experts:
        scores[_SHORT, first + expert] += 1.0 - short
        scores[_LONG, first + expert] += 1.0 - long
    share = numbers[_SHARE_SHORT]
    recall = numbers[_RECALL] if numbers[TOTAL] > 0.0 else 0.0
    for key in range(first, end):
        lately = share * scores[_SHORT, key] + (1.0 - share) * scores[_LONG, key]
        value = (1.0 - recall) * lately + recall * scores[FOLLOWING, key]
        scores[VALUE, key] = value
        scores[SCORE, key] = value
