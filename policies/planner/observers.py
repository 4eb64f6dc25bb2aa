"""Observers see what a planner or a policy is asked and answers, and change neither.

`observed` gives observers to a planner, `observed_policy` to one policy. Decision logs,
grades of assignments, records of evictions and stopwatches are observers.
"""

from __future__ import annotations

from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.policies.base import Policy
    from moesim.policies.planner.planner import Planner

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
        "precompute_ended",
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
        policy: is not changed; the answer shares its state until it is started.
        observer: is told.
        calls: names of methods.

    Returns:
        A copy of the policy, of a class of its own: whoever looks at its properties,
        or at what it overrides, sees those of the policy.
    """
    kind = type(policy)
    methods = {name: _reporting(getattr(kind, name), observer) for name in calls}
    # No slots of its own: only then may an object change its class.
    body = {"__slots__": (), "__module__": kind.__module__, **methods}
    watched = copy(policy)
    watched.__class__ = type(kind.__name__, (kind,), body)
    return watched


def _reporting(method: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    @wraps(method)
    def call(policy: Policy, *arguments: Any) -> Any:
        answer = method(policy, *arguments)
        observer.reported(method.__name__, arguments, answer)
        return answer

    return call
