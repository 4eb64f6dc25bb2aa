"""What a world reported to the planner and what it was told: the proof that two worlds
decide alike.

A plan depends only on what the planner was told, in which order. So a run may be
checked by anybody, on any machine: feed a fresh planner with the journal's reports, and
compare every plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.policies.planner.plan import Copies, Plan
    from moesim.policies.planner.planner import Planner
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.schema import Phase


class Entry(NamedTuple):
    """One call to the planner: its name, its arguments, its answer (plans as
    `fingerprint`).
    """

    call: str
    arguments: tuple[Any, ...]
    answer: Any


def fingerprint(plan: Plan) -> tuple[Any, ...]:
    """Everything a plan decides, as plain comparable values."""
    return (
        plan.work.step,
        plan.work.layer,
        tuple(plan.work.experts.tolist()),
        tuple(plan.work.state.tolist()),
        tuple(plan.lanes.tolist()),
        tuple(plan.order),
        tuple(
            (
                c.kind,
                c.gpu,
                c.layer,
                tuple(c.experts),
                tuple(c.staged),
                tuple(c.read),
                tuple(c.host_staged),
            )
            for c in plan.copies
        ),
        tuple(plan.staging_slots),
        tuple((gpu, *swap.outgoing, *swap.incoming) for gpu, swap in plan.swaps),
        plan.serial,
        None if plan.precompute is None else tuple(plan.precompute.experts.tolist()),
    )


class Journal:
    """A planner that writes down every report and answer; give it to a world in the
    planner's place.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.entries: list[Entry] = []

    def __getattr__(self, name: str) -> Any:
        """Everything else is the planner's."""
        return getattr(self._planner, name)

    def plan(
        self, routed: RoutedLayer, step: int, phase: Phase, now_s: float, batch: int = 0
    ) -> Plan:
        """As `Planner.plan`."""
        plan = self._planner.plan(routed, step, phase, now_s, batch)
        self.entries.append(
            Entry(
                "plan",
                (step, routed.layer, int(phase), now_s, batch),
                fingerprint(plan),
            )
        )
        return plan

    def complete(self, plan: Plan, now_s: float) -> list[Copies]:
        """As `Planner.complete`."""
        copies = self._planner.complete(plan, now_s)
        self.entries.append(Entry("complete", (now_s,), len(copies)))
        return copies

    def landed(self, gpu: int, layer: int, expert: int) -> None:
        """As `Planner.landed`."""
        self._planner.landed(gpu, layer, expert)
        self.entries.append(Entry("landed", (gpu, layer, expert), None))

    def read_done(self, layer: int, expert: int) -> None:
        """As `Planner.read_done`."""
        self._planner.read_done(layer, expert)
        self.entries.append(Entry("read_done", (layer, expert), None))

    def late(
        self, waiting: Sequence[tuple[int, int, int]], layer: int, active: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """As `Planner.late`."""
        dropped = self._planner.late(waiting, layer, active)
        self.entries.append(
            Entry("late", (list(waiting), layer, list(active)), dropped)
        )
        return dropped


def repeat(
    entries: Iterable[Entry], planner: Planner, steps: Iterable[RoutedStep]
) -> list[Plan]:
    """Feed a fresh planner with a journal's reports and compare every answer.

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
        if entry.call == "plan":
            step, layer, _, now_s, batch = entry.arguments
            rows, phase = routed[step, layer]
            plans.append(planner.plan(rows, step, phase, now_s, batch))
            answer: Any = fingerprint(plans[-1])
        elif entry.call == "complete":
            answer = len(planner.complete(plans[-1], *entry.arguments))
        else:
            answer = getattr(planner, entry.call)(*entry.arguments)
        if (
            not np.array_equal(answer, entry.answer)
            if isinstance(answer, list)
            else answer != entry.answer
        ):
            where = (
                f"step {plans[-1].work.step}, layer {plans[-1].work.layer}"
                if plans
                else "before the first plan"
            )
            raise PolicyError(
                f"journal: {entry.call} at {where}: expected {entry.answer}, got"
                f" {answer}"
            )
    return plans
