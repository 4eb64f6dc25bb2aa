"""Observers see what a planner is told and what it answers, without changing either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
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


class PlannerObserver(Protocol):
    """Is told of every observed call when it has been answered."""

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Note one call.

        Args:
            call: one of `OBSERVED`.
            arguments: as they were given.
            answer: as it was returned.
        """


class _Observed:
    """A planner whose calls are reported to observers; all else is the planner's."""

    def __init__(
        self, planner: Planner, observers: tuple[PlannerObserver, ...]
    ) -> None:
        self._planner = planner
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        """Wrap an observed call once; hand everything else on."""
        value = getattr(self._planner, name)
        if name not in OBSERVED:
            return value

        def call(*arguments: Any) -> Any:
            answer = value(*arguments)
            for observer in self._observers:
                observer.reported(name, arguments, answer)
            return answer

        self.__dict__[name] = call
        return call


def observed(planner: Planner, *observers: PlannerObserver) -> Planner:
    """Give a planner observers; use what is returned in its place."""
    return cast("Planner", _Observed(planner, observers))
