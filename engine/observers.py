"""Observers see what a planner or a policy is asked and answers, and change neither.

A planner has a list of them, `observed_policy` gives one to a policy. Decision logs,
grades of assignments, records of evictions and stopwatches are observers.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from moesim.engine.block import block_of
from moesim.policies.base import AssignmentPolicy, PolicyError
from moesim.policies.delegating import DelegatingAssignment, DelegatingCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.engine.planner import Copies, Plan, Planner
    from moesim.policies.base import Policy, Work
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


class Decisions(NamedTuple):
    """What a plan decides about a layer step, as plain comparable values.

    Copies are (kind, GPU, flat key, whether it is read first or who goes), active
    experts in ascending order.

    Attributes:
        step, layer: which one.
        experts, state: active experts, and how they were found.
        lanes, order: where they are computed, and in which order they are launched.
        flags: of the assignment.
        copies, promoted, swaps: as in `Plan`.
        precomputed, deferred: of each active expert; empty where there are none.
        ahead_tokens: by expert of the next layer; empty where nothing begins ahead.
    """

    step: int
    layer: int
    experts: tuple[int, ...]
    state: tuple[int, ...]
    lanes: tuple[int, ...]
    order: tuple[int, ...]
    flags: int
    copies: tuple[tuple[int, ...], ...]
    promoted: tuple[tuple[int, ...], ...]
    swaps: tuple[tuple[int, ...], ...]
    precomputed: tuple[int, ...]
    deferred: tuple[int, ...]
    ahead_tokens: tuple[int, ...]


def decisions(work: Work, plan: Plan) -> Decisions:
    """Write down what was decided last; plans live until the next one."""
    active = work.active

    def listed(copies: Copies) -> tuple[tuple[int, ...], ...]:
        columns = (copies.kind, copies.gpu, copies.key, copies.other)
        return tuple(
            zip(*(list(column[: copies.count]) for column in columns), strict=True)
        )

    def first(column: Any, *, known: bool = True) -> tuple[int, ...]:
        return tuple(column[:active]) if known else ()

    return Decisions(
        step=work.step,
        layer=work.layer,
        experts=tuple(work.experts),
        state=first(work.state),
        lanes=first(plan.lanes),
        order=first(plan.order),
        flags=plan.flags,
        copies=listed(plan.copies),
        promoted=listed(plan.promoted),
        swaps=listed(plan.swaps),
        precomputed=first(plan.precomputed, known=plan.has_precomputed),
        deferred=first(plan.deferred, known=plan.defers),
        ahead_tokens=tuple(plan.ahead_tokens) if plan.begins_ahead else (),
    )


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
    own = DecisionLog()
    planner.observers.append(own)
    planned: list[Decisions] = []
    under_way = -1
    where = "before the first plan"
    for entry in entries:
        if entry.call == "plan":
            step, layer, now_s = entry.arguments
            if step != under_way:
                under_way = step
                planner.put(block_of(passes[step], planner))
            where = f"step {step}, layer {layer}"
            planner.plan(layer, now_s)
        elif entry.call == "complete":
            planner.complete(planner.work, *entry.arguments)
        else:
            getattr(planner, entry.call)(*entry.arguments)
        found = own.entries.pop()
        if entry.call == "plan":
            planned.append(found.answer)
        if found != entry:
            raise PolicyError(
                f"decision log: {entry.call} at {where}: expected {entry.answer}, got"
                f" {found.answer}"
            )
    return planned
