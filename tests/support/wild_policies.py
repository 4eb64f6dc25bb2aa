"""Policies that decide at random, within what their protocols allow."""

import random

import numpy as np

from moesim.policies.base import AssignmentPolicy, CachePolicy, PrefetchPolicy
from moesim.policies.names import ABSENT, RESIDENT


class WildAssignment(AssignmentPolicy):
    """Any lane, any order."""

    def start(self, context):
        self.draw = np.random.default_rng(context.seed)

    def assign(self, work, view, lanes, order):
        drawn = self.draw.integers(0, work.gpus + 1, work.active)
        for i, place in enumerate(self.draw.permutation(work.active)):
            lanes[i] = drawn[i]
            order[i] = place
        return 0


class WildPrefetch(PrefetchPolicy):
    """Anything ahead, present or not, dropped or kept when late, taken back at every
    layer or not.
    """

    def start(self, context):
        self.draw = random.Random(context.seed)
        self.late = ("keep", "drop", "wait")[context.seed % 3]
        self.requeue = context.seed // 3 % 2 == 1

    def prefetch(self, work, view, named):
        count = self.draw.randrange(4)
        for n in range(count):
            named[n] = self.draw.randrange(view.layers * view.experts)
        return count


class WildCache(CachePolicy):
    """Admits, declines, evicts and swaps at random."""

    def start(self, context):
        self.draw = random.Random(context.seed + 1)
        self.experts = context.shape.experts

    def admits(self, work, key):
        return self.draw.random() < 0.8

    def victims(self, incoming, candidates, chosen):
        for n, key in enumerate(self.draw.sample(list(candidates), len(incoming))):
            chosen[n] = key if self.draw.random() < 0.9 else -1

    def replacements(self, work, states, outgoing, incoming):
        layer = range(work.first, work.first + self.experts)
        resident = [key for key in layer if states[key] == RESIDENT]
        absent = [key for key in layer if states[key] == ABSENT]
        if self.draw.random() < 0.5 and resident and absent:
            outgoing[0] = self.draw.choice(resident)
            incoming[0] = self.draw.choice(absent)
            return 1
        return 0
