"""Policies that decide at random, within what their protocols allow."""

import random

import numpy as np

from moesim.policies.base import (
    Assignment,
    AssignmentPolicy,
    CachePolicy,
    ExpertKey,
    PrefetchPolicy,
    Swap,
)


class WildAssignment(AssignmentPolicy):
    """Any lane, any order."""

    def start(self, context):
        self.draw = np.random.default_rng(context.seed)

    def assign(self, work, view):
        count = len(work.experts)
        return Assignment(
            self.draw.integers(0, len(work.gpu_s) + 1, count).astype(np.int8),
            self.draw.permutation(count),
        )


class WildPrefetch(PrefetchPolicy):
    """Anything ahead, present or not, dropped or kept when late, taken back at every
    layer or not.
    """

    def start(self, context):
        self.draw = random.Random(context.seed)
        self.late = ("keep", "drop", "active")[context.seed % 3]
        self.requeue = context.seed // 3 % 2 == 1

    def prefetch(self, work, view):
        return [
            ExpertKey(
                self.draw.randrange(view.layers), self.draw.randrange(view.experts)
            )
            for _ in range(self.draw.randrange(4))
        ]


class WildCache(CachePolicy):
    """Admits, declines, evicts and swaps at random."""

    def start(self, context):
        self.draw = random.Random(context.seed + 1)

    def accessed(self, work):
        pass

    def admits(self, work, incoming):
        return np.array([self.draw.random() < 0.8 for _ in incoming])

    def victims(self, incoming, candidates):
        chosen = self.draw.sample(candidates.tolist(), len(incoming))
        return np.array([key if self.draw.random() < 0.9 else -1 for key in chosen])

    def replacements(self, work, view):
        resident = np.flatnonzero(view.resident(work.layer))
        absent = np.flatnonzero(
            ~view.resident(work.layer) & ~view.in_flight(work.layer)
        )
        if self.draw.random() < 0.5 and len(resident) and len(absent):
            out = self.draw.choice(resident.tolist())
            into = self.draw.choice(absent.tolist())
            return [Swap(ExpertKey(work.layer, out), ExpertKey(work.layer, into))]
        return []
