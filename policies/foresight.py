"""What experts are worth to one that knows the whole routing.

An expert is worth its coming uses, each discounted by the tokens until it: with the
next one after ``d`` tokens, ``value = decay ** d * (saved + value after it)``. So one
number per use of the trace says it all, and between uses a value only grows, by ``1 /
decay`` per token. Parts of the clairvoyant system share these numbers.

L layers, E experts, U uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.machine_code.functions import compiled
from moesim.policies.base import PolicyError
from moesim.policies.kernels import State, Work

if TYPE_CHECKING:
    from moesim.policies.base import Future, RunContext

# Rows of the scores and marks, by flat key.
VALUE: Final = 0
NEXT_STEP: Final = 0
"""Forward pass of the next use."""
NAMED: Final = 1
EDGES: Final = 2
"""By layer step: where its uses begin in the integers and numbers."""
_ROWS: Final = 3

# Places in the integers: E comes first, as in all states.
_EXPERTS: Final = 0
LAYERS: Final = 1
_LAST: Final = 2
"""Layer step that was observed last."""
POOLS: Final = 3
"""1 where all layers share one pool of slots, else L."""
SLOTS: Final = 4
"""Where the slots of every layer begin."""
_USES: Final = 5
"""Where uses begin: the expert and the forward pass of its next use."""
_LAYOUT: Final = 6
_FIELDS: Final = 2

# Places in the numbers.
_GROWTH: Final = 0
OF_USERS: Final = 1
"""Two places for the rules of a prefetcher."""
_VALUES: Final = 3
"""Where values after every use begin."""


class Foresight:
    """Values of all experts, as arrays that several policies' kernels work on.

    Attributes:
        state: all of it.
    """

    def __init__(self, future: Future, context: RunContext, decay: float) -> None:
        shape = context.shape
        layers = shape.layers
        edges = np.asarray(future.edges)
        chosen = np.asarray(future.experts)
        following = np.asarray(future.following)
        steps_of_uses = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        keys = steps_of_uses % layers * shape.experts + chosen
        passes = steps_of_uses // layers

        first_use = np.full(layers * shape.experts, future.never, np.int64)
        np.minimum.at(first_use, keys, passes)
        saved = _saved(future, context, len(edges) - 1)
        values = _values(keys, passes, following, saved, decay)
        scores = np.zeros((1, layers * shape.experts))
        _, first_places = np.unique(keys, return_index=True)
        # Values are those after the last token: nobody has seen any yet.
        used = keys[first_places]
        distances = passes[first_places] + 1
        scores[VALUE, used] = decay**distances * (saved + values)[first_places]

        marks = np.zeros((_ROWS, max(len(edges), len(first_use))), np.int64)
        marks[NEXT_STEP, : len(first_use)] = first_use
        marks[EDGES, : len(edges)] = edges
        pools = len(context.capacity_slots)
        slots = context.gpus * np.broadcast_to(context.capacity_slots, layers)
        uses = np.stack((chosen, following), axis=1).ravel()
        rules = np.zeros(_VALUES - OF_USERS)
        header = (shape.experts, layers, -1, pools, _LAYOUT, _LAYOUT + layers)
        self.state = State(
            scores=scores,
            marks=marks,
            numbers=np.concatenate(([1.0 / decay], rules, values)),
            integers=np.concatenate((header, slots, uses)).astype(np.int64),
        )

    @classmethod
    def of(cls, context: RunContext, decay: float) -> Foresight:
        """The foresight of a run, the same for all its policies that ask for it alike.

        Raises:
            PolicyError: the future is not available.
        """
        future = context.future
        if future is None:
            raise PolicyError(
                "policy 'foresight' must see the future; only a replay of a whole"
                " trace has one"
            )
        return context.share((cls, decay), lambda: cls(future, context, decay))


def _saved(future: Future, context: RunContext, layer_steps: int) -> np.ndarray:
    """What each use saves if its expert is on a GPU, of what one token saves: float64
    [U].
    """
    layers = context.shape.layers
    tokens = [future.tokens(*divmod(n, layers)) for n in range(layer_steps)]
    costs = context.costs
    if costs is None:
        return np.ones(sum(map(len, tokens)))
    one_token = np.ones(1, np.int32)

    def saved_s(layer: int, tokens: np.ndarray) -> np.ndarray:
        return np.maximum(costs.cpu_s(layer, tokens) - costs.gpu_s(layer, tokens), 0.0)

    least_s = [
        max(float(saved_s(layer, one_token)[0]), 1e-9) for layer in range(layers)
    ]
    saved = [
        saved_s(n % layers, each) / least_s[n % layers] for n, each in enumerate(tokens)
    ]
    return np.concatenate([np.zeros(0), *saved])


def _values(
    keys: np.ndarray,
    passes: np.ndarray,
    following: np.ndarray,
    saved: np.ndarray,
    decay: float,
) -> np.ndarray:
    """What an expert is worth right after each of its uses: float64 [U]."""
    values = np.zeros(len(keys))
    after = np.zeros(int(keys.max(initial=0)) + 1)
    # What is not used again is worth nothing, however near the end is.
    discounts = decay ** (following - passes).astype(np.float64)
    for use in range(len(keys) - 1, -1, -1):
        key = keys[use]
        values[use] = discounts[use] * after[key]
        after[key] = saved[use] + values[use]
    return values


@compiled
def foresee(state: State, work: Work) -> None:
    """Let a token pass in a layer, once, whoever tells first: values of its experts
    grow, and those that it uses are worth what comes after.
    """
    integers = state.integers
    now = work.step * integers[LAYERS] + work.layer
    if integers[_LAST] == now:
        return
    integers[_LAST] = now
    experts = integers[_EXPERTS]
    first = work.layer * experts
    values = state.scores[VALUE]
    for key in range(first, first + experts):
        values[key] *= state.numbers[_GROWTH]
    for use in range(state.marks[EDGES, now], state.marks[EDGES, now + 1]):
        place = integers[_USES] + _FIELDS * use
        key = first + integers[place]
        values[key] = state.numbers[_VALUES + use]
        state.marks[NEXT_STEP, key] = integers[place + 1]
