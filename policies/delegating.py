"""Policies that pass every question on to another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesim.policies.base import AssignmentPolicy, CachePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from moesim.policies.arrays import Ints
    from moesim.policies.base import Gate, MachineView, Work
    from moesim.policies.run_context import RunContext


class DelegatingCache(CachePolicy):
    """A cache policy that passes every question on to `rule`; subclasses change some of
    the answers.
    """

    def __init__(self, rule: CachePolicy) -> None:
        self.rule = rule
        for name in ("needs", "choosing_s", "lands_by_next_visit", "replaces_first"):
            setattr(self, name, getattr(rule, name))
        self.reads_tokens = rule.reads_tokens
        self.own_planning_s = rule.own_planning_s
        self.oracle = rule.oracle  # type: ignore[misc] # the rule's class's

    @property
    def admits_all(self) -> bool:
        """As the rule."""
        return self.rule.admits_all

    @property
    def in_launch_order(self) -> bool:
        """As the rule."""
        return self.rule.in_launch_order

    @property
    def replaces(self) -> bool:
        """As the rule."""
        return self.rule.replaces

    def start(self, context: RunContext) -> None:
        """Start the rule; only an oracle gets the future."""
        self.rule.start(context_for(self.rule, context))

    def remarks(self) -> Sequence[str]:
        """Pass on."""
        return self.rule.remarks()

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Pass on."""
        return self.rule.initial(capacity_slots)

    def accessed(self, work: Work) -> None:
        """Pass on."""
        self.rule.accessed(work)

    def admits(self, work: Work, key: int) -> bool:
        """Pass on."""
        return self.rule.admits(work, key)

    def precedence(self, incoming: Ints) -> None:
        """Pass on."""
        self.rule.precedence(incoming)

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        """Pass on."""
        self.rule.victims(incoming, candidates, chosen)

    def admitted(self, key: int) -> None:
        """Pass on."""
        self.rule.admitted(key)

    def evicted(self, key: int) -> None:
        """Pass on."""
        self.rule.evicted(key)

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        """Pass on."""
        return self.rule.replacements(work, states, outgoing, incoming)


class DelegatingAssignment(AssignmentPolicy):
    """An assignment policy that passes every question on to `rule`."""

    def __init__(self, rule: AssignmentPolicy) -> None:
        self.rule = rule
        for name in ("needs", "reads_tokens", "own_planning_s", "approximates"):
            setattr(self, name, getattr(rule, name))
        self.defers = rule.defers
        self.places_on_gpu = rule.places_on_gpu  # type: ignore[misc] # the rule's class's
        self.oracle = rule.oracle  # type: ignore[misc] # likewise

    @property
    def precomputes(self) -> bool:
        """As the rule."""
        return self.rule.precomputes

    def start(self, context: RunContext) -> None:
        """Start the rule; only an oracle gets the future."""
        self.rule.start(context_for(self.rule, context))

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        """Pass on."""
        return self.rule.assign(work, view, lanes, order)

    def precompute(
        self, gate: Gate, view: MachineView, routing: Ints, tokens: Ints
    ) -> int:
        """Pass on."""
        return self.rule.precompute(gate, view, routing, tokens)


def context_for(policy: Any, context: RunContext) -> RunContext:
    """The context of a run as a policy may see it."""
    return context if policy.oracle else replace(context, future=None)
