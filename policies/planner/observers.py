"""Observers see what a planner or a policy is asked and answers, and change neither.

`observed` gives observers to a planner, `observed_policy` to one policy. Decision logs,
grades of assignments, records of evictions and stopwatches are observers.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, cast

from moesim.policies.base import AssignmentPolicy, PolicyError
from moesim.policies.delegating import DelegatingAssignment, DelegatingCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.policies.base import Policy
    from moesim.policies.planner.plan import Plan
    from moesim.policies.planner.planner import Planner
    from moesim.traces.format.batch import RoutedStep


OBSERVED: Final = frozenset(
    {
        "plan",
        "complete",
        "drop_late",
        "start_copy",
        "cancel_copy",
        "landed",
        "start_read",
        "cancel_read",
        "read_done",
        "computed",
        "unawaited_ended",
    }
)
"""Calls that change what a planner knows, or that it decides."""


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


class _Observed:
    """A planner whose calls are reported to observers; all else is the planner's."""

    def __init__(self, planner: Planner, observers: tuple[Observer, ...]) -> None:
        self._planner = planner
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        """Wrap an observed call once; hand everything else on."""
        value = getattr(self._planner, name)
        if name not in OBSERVED:
            return value

        # Not this object: it keeps the function, and each would keep the other.
        observers = self._observers

        def call(*arguments: Any) -> Any:
            answer = value(*arguments)
            for observer in observers:
                observer.reported(name, arguments, answer)
            return answer

        self.__dict__[name] = call
        return call


def observed(planner: Planner, *observers: Observer) -> Planner:
    """Give a planner observers; use what is returned in its place."""
    return cast("Planner", _Observed(planner, observers))


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


def fingerprint(plan: Plan) -> tuple[Any, ...]:
    """Everything a plan decides, as plain comparable values."""
    copies = tuple(
        (part.kind, part.gpu, part.layer, tuple(part.experts), tuple(part.read))
        for part in plan.copies
    )
    swaps = tuple((gpu, *swap.outgoing, *swap.incoming) for gpu, swap in plan.swaps)
    precompute = None
    if plan.precompute is not None:
        precompute = tuple(plan.precompute.experts.tolist())
    return (
        plan.work.step,
        plan.work.layer,
        tuple(plan.work.experts.tolist()),
        tuple(plan.work.state.tolist()),
        tuple(plan.lanes.tolist()),
        tuple(plan.order),
        copies,
        tuple(plan.promoted),
        swaps,
        plan.serial,
        tuple(plan.deferred),
        precompute,
    )


class DecisionLog:
    """Writes down every report to a planner and every answer.

    A planner observer (`moesim.policies.planner.observers`).
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Write one call down, so that it can be repeated."""
        if call == "plan":
            routed, step, phase, now_s, *batch = arguments
            plain = (step, routed.layer, int(phase), now_s, *batch)
            self.entries.append(Entry(call, plain, fingerprint(answer)))
        elif call == "complete":
            _, now_s = arguments
            self.entries.append(Entry(call, (now_s,), len(answer)))
        else:
            plain = tuple(_plain(argument) for argument in arguments)
            self.entries.append(Entry(call, plain, _plain(answer)))


def repeat(
    entries: Iterable[Entry], planner: Planner, steps: Iterable[RoutedStep]
) -> list[Plan]:
    """Feed a fresh planner with a log's reports and compare every answer.

    Returns:
        The plans.

    Raises:
        PolicyError: an answer differs; the message names step and layer.
    """
    routed = {
        (step.step, layer.layer): (layer, step.phase)
        for step in steps
        for layer in step.layers
    }
    plans: list[Plan] = []
    for entry in entries:
        answer: Any
        if entry.call == "plan":
            step, layer, _, now_s, *batch = entry.arguments
            rows, phase = routed[step, layer]
            plans.append(planner.plan(rows, step, phase, now_s, *batch))
            answer = fingerprint(plans[-1])
        elif entry.call == "complete":
            answer = len(planner.complete(plans[-1], *entry.arguments))
        else:
            answer = _plain(getattr(planner, entry.call)(*entry.arguments))
        if answer != entry.answer:
            where = "before the first plan"
            if plans:
                work = plans[-1].work
                where = f"step {work.step}, layer {work.layer}"
            raise PolicyError(
                f"decision log: {entry.call} at {where}: expected {entry.answer}, got"
                f" {answer}"
            )
    return plans


def _plain(value: Any) -> Any:
    """Lists and named tuples as plain tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(part) for part in value)
    return value
