"""FineMoE's prefetch by the expert map of the most similar iteration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moesim.policies.arrays import filled, zeros
from moesim.policies.base import PrefetchPolicy
from moesim.policies.parameters import expect
from moesim.policies.prefetch._ranked import is_present

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

_SMALLEST = 1e-30
"""Lengths below this count as 0, so that an empty map is like no other."""


def expectations(context: RunContext) -> Floats:
    """What searched maps expect, float64 [L * E], which prefetch policy and cache of
    this name share: all experts are equally likely until a map was searched.
    """
    shape = context.shape
    return context.share(
        "finemoe", lambda: filled(shape.layers * shape.experts, 1.0 / shape.experts)
    )


class FineMoE(PrefetchPolicy):
    """Prefetch what the most similar iteration of the past would use, so many layers
    ahead.

    An iteration's map holds the gate's probabilities of all layers. The cosine between
    the layers so far and the same layers of every map in the store finds one; its
    probabilities say what the layer at the prefetch distance wants: the likeliest
    experts, until they sum up to 1 less the cosine, and at least as many as a token
    has. A map that ends goes into the store, or, where that is full, into the place of
    the one that it resembles most.

    Departures: no trace holds the embeddings of tokens, by which the paper searches for
    the first `distance` layers; nothing is prefetched for them, and a full store
    compares trajectories alone. The paper keeps a map for each sequence of a batch, its
    code for each token of a prompt; here a forward pass has one, the mean of its
    tokens. The released code names all experts of all layers behind the distance. As
    the paper searches beside the inference, searching takes no time.

    Args:
        distance: layers ahead; the paper has 3 for Mixtral-8x7B, 4 for Phi-3.5-MoE and
            6 for Qwen1.5-MoE.
        capacity: maps kept. The store begins empty, as the paper's online serving.

    Source: FineMoE (EuroSys 2026, arXiv 2502.05370), sections 4.1 to 4.5, equations 5
    to 8; `finemoe/runtime/model_offload.py`.
    """

    needs = ("scores",)

    def __init__(self, *, distance: int = 3, capacity: int = 1000) -> None:
        expect(distance >= 1, "distance", "a number >= 1", distance)
        expect(capacity >= 1, "capacity", "a number >= 1", capacity)
        self.distance = distance
        self.capacity = capacity

    def start(self, context: RunContext) -> None:
        """Open an empty store."""
        self.layers = context.shape.layers
        self.experts = context.shape.experts
        self.top_k = context.shape.top_k
        keys = self.layers * self.experts
        self.expected: Floats = expectations(context)
        # Maps have a column each; what is never touched costs no memory.
        self.kept = 0
        self.maps: Floats = zeros((keys, self.capacity))
        self.squares: Floats = zeros((self.layers, self.capacity))
        # Of the iteration under way; and its products with the maps so far, and their
        # squared lengths so far.
        self.running: Floats = zeros(keys)
        self.running_square = 0.0
        self.products: Floats = zeros(self.capacity)
        self.lengths: Floats = zeros(self.capacity)
        self.unlikely: Floats = zeros(self.experts)

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Name the likely experts of the layer at the prefetch distance, by the map
        that looks most like the iteration so far.
        """
        self._observe(work)
        self._search()
        if work.layer == self.layers - 1:
            self._keep()
        layer = work.layer + self.distance
        if layer >= self.layers or not self.kept:
            return 0
        first = layer * self.experts
        for expert in range(self.experts):
            share = self.maps[first + expert, self.best]
            self.expected[first + expert] = share
            self.unlikely[expert] = -share
        least = max(0.0, min(1.0 - self.cosine, 1.0))
        taken = 0.0
        count = 0
        for chosen in range(self.experts):
            if chosen >= self.top_k and taken >= least:
                break
            # Few are taken, so none is sorted.
            expert = self._likeliest()
            taken -= self.unlikely[expert]
            self.unlikely[expert] = 1.0
            if not is_present(view, first + expert):
                named[count] = first + expert
                count += 1
        return count

    def _observe(self, work: Work) -> None:
        """Compare the gate's probabilities with this layer of all maps."""
        if work.layer == 0:
            self.running_square = 0.0
            for key in range(len(self.running)):
                self.running[key] = 0.0
            for n in range(self.kept):
                self.products[n] = self.lengths[n] = 0.0
        total = _SMALLEST
        for expert in range(len(work.scores)):
            total += work.scores[expert]
        for expert in range(len(work.scores)):
            key = work.first + expert
            share = work.scores[expert] / total
            self.running[key] = share
            self.running_square += share * share
            for n in range(self.kept):
                self.products[n] += share * self.maps[key, n]
        for n in range(self.kept):
            self.lengths[n] += self.squares[work.layer, n]

    def _search(self) -> None:
        """Find the map with the highest cosine to the layers so far, ties to the
        older.
        """
        self.best = 0
        self.cosine = -1.0
        for n in range(self.kept):
            length = math.sqrt(self.lengths[n] * self.running_square)
            cosine = self.products[n] / max(length, _SMALLEST)
            if cosine > self.cosine:
                self.best = n
                self.cosine = cosine

    def _keep(self) -> None:
        """Keep the map under way, behind the others or, where the store is full, in
        place of the one that it resembles most.
        """
        place = self.best
        if self.kept < self.capacity:
            place = self.kept
            self.kept += 1
        for layer in range(self.layers):
            square = 0.0
            for key in range(layer * self.experts, (layer + 1) * self.experts):
                share = self.running[key]
                self.maps[key, place] = share
                square += share * share
            self.squares[layer, place] = square

    def _likeliest(self) -> int:
        best = 0
        for expert in range(1, self.experts):
            if self.unlikely[expert] < self.unlikely[best]:
                best = expert
        return best
