"""Observers see what a planner or a policy is asked and answers, and change neither.

A planner has a list of them, `observed_policy` gives one to a policy. Decision logs,
grades of assignments, records of evictions and stopwatches are observers.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from moesim.policies.base import AssignmentPolicy, PolicyError
from moesim.policies.delegating import DelegatingAssignment, DelegatingCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.engine.plan import Decisions
    from moesim.engine.planner import Planner
    from moesim.policies.base import Policy
    from moesim.traces.format.batch import RoutedStep


Observed = TypeVar("Observed", bound="Policy")


class Observer(Protocol):
    """Is told of every observed call when it has been answered."""

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Note one call.

        Args:
            call: name of the method.
            arguments: as they were given.
            answer: as it was returned.
        """


def observed(planner: Planner, *observers: Observer) -> Planner:
    """Give a planner observers, and return it."""
    planner.observers += observers
    return planner


def observed_policy(
    policy: Observed, observer: Observer, calls: Iterable[str]
) -> Observed:
    """Give a policy an observer of some of its methods.

    Args:
        policy: a cache or an assignment policy; it goes on answering.
        observer: is told of each call, with the arrays that the policy has filled in
            among the arguments.
        calls: names of methods.
    """
    kind: Any = DelegatingCache
    if isinstance(policy, AssignmentPolicy):
        kind = DelegatingAssignment
    methods = {name: _reporting(getattr(kind, name), observer) for name in calls}
    watched = type(f"Observed{kind.__name__}", (kind,), methods)
    return cast("Observed", watched(policy))


def _reporting(method: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    @wraps(method)
    def call(policy: Policy, *arguments: Any) -> Any:
        answer = method(policy, *arguments)
        observer.reported(method.__name__, arguments, answer)
        return answer

    return call


class Entry(NamedTuple):
    """One call to the planner: its name, its arguments, its answer, as plain values."""

    call: str
    arguments: tuple[Any, ...]
    answer: Any


class DecisionLog:
    """Writes down every report to a planner and every answer; one of a planner's
    `observers`.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Write one call down, so that it can be repeated."""
        self.entries.append(Entry(call, arguments, answer))


def repeat(
    entries: Iterable[Entry], planner: Planner, steps: Iterable[RoutedStep]
) -> list[Decisions]:
    """Feed a fresh planner with a log's reports and compare every answer.

    Returns:
        What it has decided about each layer step.

    Raises:
        PolicyError: an answer differs; the message names step and layer.
    """
    passes = {step.step: step for step in steps}
    repeated = DecisionLog()
    planner.observers.append(repeated)
    planned: list[Decisions] = []
    under_way = -1
    where = "before the first plan"
    for entry in entries:
        if entry.call == "plan":
            step, layer, now_s = entry.arguments
            if step != under_way:
                under_way = step
                planner.put(planner.block_of(passes[step]))
            where = f"step {step}, layer {layer}"
            planner.plan(layer, now_s)
        elif entry.call == "complete":
            planner.complete(planner.work, *entry.arguments)
        else:
            getattr(planner, entry.call)(*entry.arguments)
        answered = repeated.entries.pop()
        if entry.call == "plan":
            planned.append(answered.answer)
        if answered != entry:
            raise PolicyError(
                f"decision log: {entry.call} at {where}: expected {entry.answer}, got"
                f" {answered.answer}"
            )
    return planned
