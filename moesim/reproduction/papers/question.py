"""What answers a published record: runs and a figure of their outcomes, a figure of the
model's shape, an anchor that cannot be compared, or a reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.reproduction.papers.runs import Outcome

if TYPE_CHECKING:
    from moesim.reproduction.papers.runs import RunSpec
    from moesim.reproduction.records import Record

Figure = Callable[[Sequence[Outcome]], float]

SIMULATED = "simulated"
COMPUTED = "computed"
ANCHORED = "anchored"
INPUT = "input"
UNANSWERED = "unanswered"


@dataclass(frozen=True, slots=True)
class Question:
    """How one published record is answered.

    Attributes:
        record: what was published.
        status: `SIMULATED`; `COMPUTED` from the model's shape; `ANCHORED`, if a machine
            or workload was made from it, so that it is never compared; `INPUT`, a
            setting of ours; `UNANSWERED`.
        runs: what must be run.
        figure: of their outcomes, in the order of `runs` and in the record's unit; None
            where there is nothing to compute.
        note: where it departs from the paper, or why there is no answer.
        sides: for a comparison, the runs of the two sides: the system that the paper
            finds better, and the other; for an absolute figure the system's own runs
            alone.
    """

    record: Record
    status: str
    runs: tuple[RunSpec, ...] = ()
    figure: Figure | None = None
    note: str = ""
    sides: tuple[tuple[RunSpec, ...], ...] = ()


Answer = Callable[["Record"], Question]
"""Answers one record."""
Answers = dict[tuple[str, str], Answer]
"""(place, metric) of a paper's records -> what answers them."""


def simulated(
    record: Record, runs: Sequence[RunSpec], figure: Figure, note: str = ""
) -> Question:
    """An absolute figure of one system's runs."""
    system = tuple(runs)
    return Question(record, SIMULATED, system, figure, note, sides=(system,))


def ratio(
    record: Record,
    pairs: Sequence[tuple[RunSpec, RunSpec]],
    of: Callable[[Outcome, Outcome], float],
    note: str = "",
) -> Question:
    """The mean over pairs of runs of what `of` says of (this system, the other)."""
    runs = tuple(run for pair in pairs for run in pair)

    def figure(outcomes: Sequence[Outcome]) -> float:
        figures = [
            of(outcomes[2 * index], outcomes[2 * index + 1])
            for index in range(len(pairs))
        ]
        return sum(figures) / len(figures)

    sides = (tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    return Question(record, SIMULATED, runs, figure, note, sides=sides)


def largest_over(
    record: Record,
    system: RunSpec,
    others: Sequence[RunSpec],
    of: Callable[[Outcome], float],
    note: str = "",
) -> Question:
    """The largest ratio of a system's figure to those of others."""

    def figure(outcomes: Sequence[Outcome]) -> float:
        figure_of_system, *compared = map(of, outcomes)
        return max(figure_of_system / other for other in compared)

    sides = ((system,), tuple(others))
    return Question(record, SIMULATED, (system, *others), figure, note, sides=sides)


def computed(record: Record, value: float, note: str = "") -> Question:
    """A figure that needs no run."""
    return Question(record, COMPUTED, figure=lambda _outcomes: value, note=note)


def anchored(
    note: str, answer: Callable[[Record], Question] | None = None
) -> Callable[[Record], Question]:
    """Records that a machine or a workload was made from; with `answer` ours is shown
    all the same.
    """

    def question(record: Record) -> Question:
        shown = answer(record) if answer else Question(record, ANCHORED)
        return Question(
            record, ANCHORED, shown.runs, shown.figure, note, sides=shown.sides
        )

    return question


def input_(note: str) -> Callable[[Record], Question]:
    """Records that are settings of our experiments."""
    return lambda record: Question(record, INPUT, note=note)


def unanswered(reason: str) -> Callable[[Record], Question]:
    """Records that a simulator cannot answer."""
    return lambda record: Question(record, UNANSWERED, note=reason)
