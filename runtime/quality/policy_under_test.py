"""A composition of policies whose effect on a model is measured: its planner, and
counts of what it did.

T tokens of a pass, E experts, K experts per token, K' columns after rerouting.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import RESIDENT
from moesim.policies.planner.at_once import carry_out
from moesim.runtime.models.expert_math import UNUSED
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork
    from moesim.policies.planner.planner import Planner
    from moesim.traces.format.batch import RoutedLayer


@dataclass(slots=True)
class PolicyUnderTest:
    """One composition of policies, its planner, and what it has done so far.

    Attributes:
        planner: asked at every layer of every pass.
        own_input: whether experts that were started one layer ahead nevertheless get
            their own layer's input.
        phase: of the pass at work.
        started: active experts of the last layer step that the CPU had begun before its
            gate ran.
        expected: bool [T, E], the choice that the last layer step predicted for the
            next layer; None if it predicted none.
        counts: over scored tokens.
    """

    planner: Planner
    own_input: bool = False
    phase: Phase = Phase.PREFILL
    started: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    expected: np.ndarray | None = None
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _step: int = -1
    _batch: int = 0
    _now_s: float = 0.0

    def begin(self, phase: Phase, batch: int) -> None:
        """Note that a forward pass begins."""
        self.phase = phase
        self._batch = batch
        self._step += 1

    def layer(self, routed: RoutedLayer) -> LayerWork:
        """Plan one layer step and carry out all its copies.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        planner = self.planner
        masses = len(planner.gate_mass)
        plan = planner.plan(routed, self._step, self.phase, self._now_s, self._batch)
        self._now_s = carry_out(planner, plan, self._now_s)

        work = plan.work
        if work.precomputed is None:
            self.started = work.experts[:0]
        else:
            self.started = work.experts[work.precomputed]

        self.expected = None
        if plan.precompute is not None and "pred1_raw" in routed.predicted:
            top_k = routed.routing.shape[1]
            self.expected = top_experts(routed.predicted["pred1_raw"], top_k)

        if self.phase == Phase.DECODE:
            # A planner notes a gate mass only where a routing policy was asked.
            noted = len(planner.gate_mass) > masses
            mass = planner.gate_mass[masses] if noted else 1.0
            self._count(routed, work, mass)
        return work

    def share(self, part: str, total: str) -> float:
        """Divide two counts; NaN where nothing was counted."""
        if not self.counts[total]:
            return float("nan")
        return self.counts[part] / self.counts[total]

    def _count(self, routed: RoutedLayer, work: LayerWork, mass: float) -> None:
        """Count one layer step of scored tokens."""
        tokens = len(routed.routing)
        self.counts["tokens"] += tokens
        self.counts["mass"] += tokens * mass
        self.counts["altered"] += _count_altered(routed.routing, work.routing)
        self.counts["pairs"] += int((work.routing != UNUSED).sum())
        self.counts["hits"] += int((work.state == RESIDENT).sum())
        self.counts["active"] += len(work.state)


def top_experts(scores: np.ndarray, count: int) -> np.ndarray:
    """Bool [T, E]: the `count` best of each row of scores [T, E], ties to the lower
    id.
    """
    chosen = np.zeros(scores.shape, np.bool_)
    order = np.argsort(-scores.astype(np.float32), axis=1, kind="stable")
    np.put_along_axis(chosen, order[:, :count], values=True, axis=1)
    return chosen


def widened(values: np.ndarray, width: int, filler: int) -> np.ndarray:
    """Widen [T, K] to at least `width` columns."""
    missing = max(0, width - values.shape[1])
    return np.pad(values, ((0, 0), (0, missing)), constant_values=filler)


def _count_altered(before: np.ndarray, after: np.ndarray) -> int:
    """Count tokens whose experts [T, K] and [T, K'] are not the same ones, in whatever
    order.
    """
    width = max(before.shape[1], after.shape[1])
    sorted_before = np.sort(widened(before, width, UNUSED), axis=1)
    sorted_after = np.sort(widened(after, width, UNUSED), axis=1)
    return int((sorted_before != sorted_after).any(axis=1).sum())
