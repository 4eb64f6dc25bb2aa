"""What experts are worth to one that knows the whole routing.

An expert is worth its coming uses, each discounted by the tokens until it: with the
next one after ``d`` tokens, ``value = decay ** d * (saved + value after it)``. So one
number per use of the trace says it all, and between uses a value only grows, by ``1 /
decay`` per token. Parts of the clairvoyant system share these numbers.

L layers, E experts, U uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import view_of
from moesim.policies.base import PolicyError
from moesim.policies.names import NONE

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import Future, RunContext


class Foresight:
    """Values of all experts, for the policies that share them.

    Attributes:
        layers, experts: of the model.
        value: float64 [L * E], by flat key.
        next_step: int64 [L * E], forward pass of the next use.
        edges, used, following: the future's, int64 and int32 [U].
    """

    def __init__(self, future: Future, context: RunContext, decay: float) -> None:
        shape = context.shape
        self.layers = shape.layers
        self.experts = shape.experts
        self.last = NONE
        self.growth = 1.0 / decay
        edges = np.asarray(future.edges)
        chosen = np.asarray(future.experts)
        following = np.asarray(future.following)
        steps_of_uses = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        keys = steps_of_uses % shape.layers * shape.experts + chosen
        passes = steps_of_uses // shape.layers

        next_step = np.full(shape.layers * shape.experts, future.never, np.int64)
        np.minimum.at(next_step, keys, passes)
        saved = _saved(future, context, len(edges) - 1)
        # What is not used again is worth nothing, however near the end is.
        discounts = decay ** (following - passes).astype(np.float64)
        values = np.zeros(len(keys))
        value = np.zeros(shape.layers * shape.experts)
        _value_uses(keys, saved, discounts, value.copy(), values)
        _, first_places = np.unique(keys, return_index=True)
        # Values are those after the last token: nobody has seen any yet.
        used = keys[first_places]
        distances = passes[first_places] + 1
        value[used] = decay**distances * (saved + values)[first_places]

        self.value: Floats = value.data
        self.next_step: Ints = next_step.data
        self.edges: Ints = view_of(edges, np.int64)
        self.used: Ints = view_of(chosen, np.int32)
        self.following: Ints = view_of(following, np.int32)
        self.values_after: Floats = values.data

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

    def foresee(self, work: Work) -> None:
        """Let a token pass in a layer, once, whoever tells first: values of its experts
        grow, and those that it uses are worth what comes after.
        """
        now = work.step * self.layers + work.layer
        if self.last == now:
            return
        self.last = now
        first = work.layer * self.experts
        for key in range(first, first + self.experts):
            self.value[key] *= self.growth
        for use in range(self.edges[now], self.edges[now + 1]):
            key = first + self.used[use]
            self.value[key] = self.values_after[use]
            self.next_step[key] = self.following[use]


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


def _value_uses(
    keys: Ints, saved: Floats, discounts: Floats, after: Floats, values: Floats
) -> None:
    """Fill in what an expert is worth right after each of its uses, float64 [U].

    Args:
        keys: int64 [U].
        saved: float64 [U].
        discounts: float64 [U], of the next use.
        after: float64 [L * E], zeros to work in.
        values: to be filled in.
    """
    for use in range(len(keys) - 1, -1, -1):
        key = keys[use]
        values[use] = discounts[use] * after[key]
        after[key] = saved[use] + values[use]
