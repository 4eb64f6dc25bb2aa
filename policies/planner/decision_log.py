"""What a world reported to the planner and what it was told: the proof that two worlds
decide alike.

A plan depends only on what the planner was told, in which order. So a run may be
checked by anybody, on any machine: feed a fresh planner with the log's reports, and
compare every answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.policies.planner.plan import Plan
    from moesim.policies.planner.planner import Planner
    from moesim.traces.format.batch import RoutedStep


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
