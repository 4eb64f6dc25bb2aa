"""What an experiment is, and the part of a trace that it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.traces.errors import TraceError
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

    Setting = Mapping[str, Any]
    # Row -> its value, or what the trace lacks in one line that begins with "lacks".
    Figures = dict[str, float | str]


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The first forward passes of a trace, which is what an experiment sees.

    Attributes:
        trace: opened.
        most_steps: forward passes seen; None for all.
        seed: for policies that draw.
    """

    trace: Trace
    most_steps: int | None = None
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.trace.shape

    def sequences(self) -> int:
        """Sequences of the whole trace."""
        return sum(1 for _ in self.trace.sequences())

    def has(self, *columns: str) -> bool:
        """Whether the trace has all of these optional columns."""
        return set(columns) <= self.trace.columns

    def lacking(self, *columns: str) -> str:
        """One line that names the columns that are missing."""
        missing = [name for name in columns if name not in self.trace.columns]
        return f"lacks column {', '.join(missing)}"

    def passes(self, *columns: str, batch: int = 1) -> Iterator[RoutedStep]:
        """Forward passes with these optional columns."""
        return compose(self.trace, batch=batch, steps=self.most_steps, columns=columns)

    def decode(self, *columns: str, batch: int = 1) -> Iterator[RoutedStep]:
        """Decode steps in which all `batch` sequences take part."""
        for step in self.passes(*columns, batch=batch):
            # Sequences end one after another; a step of fewer is another batch size.
            if step.phase == Phase.DECODE and step.sequences == batch:
                yield step

    def future(self, batch: int = 1) -> RecordedFuture:
        """What oracles see of the same forward passes."""
        return RecordedFuture.of(self.trace, batch=batch, steps=self.most_steps)

    def batches(self, sizes: Iterable[int]) -> tuple[list[int], dict[int, str]]:
        """Which batch sizes the trace has sequences for; for the others, what it lacks
        in one line.

        Where none fits, the whole trace is one batch, if that is two sequences at
        least.
        """
        # A trace is recorded per sequence; batches are composed when it is replayed.
        available = self.sequences()
        published = list(sizes)
        fitting = [size for size in published if size <= available]
        if not fitting and available > 1:
            fitting = [available]
        lacks = {
            size: f"lacks sequences: {size} wanted, {available} there"
            for size in published
            if size > available
        }
        return fitting, lacks

    def batch_near(self, size: int) -> int:
        """That batch size, or the largest that the trace has sequences for."""
        fitting, _ = self.batches([size])
        return fitting[0] if fitting else 1


@dataclass(frozen=True, slots=True)
class Experiment:
    """Published figures, and the function that computes the same on a trace.

    Attributes:
        name: on the command line.
        summary: one line.
        published: (source, ref, metric) of the records it stands beside.
        unit: of every figure, as in those records.
        needs: what a trace must have, in words.
        computes: what the function does, in one or two sentences.
        caveats: where it departs from its source, and what is not known about the
            source.
        row: names the row of a record's setting; None leaves the record out.
        run: computes row -> figure, or row -> what the trace lacks in one line.
        column: names the column of a record's setting.
    """

    name: str
    summary: str
    published: tuple[tuple[str, str, str], ...]
    unit: str
    needs: str
    computes: str
    caveats: tuple[str, ...]
    row: Callable[[str, Setting], str | None]
    run: Callable[[Excerpt], Figures]
    # Most sources state a model with every figure.
    column: Callable[[Setting], str] = lambda setting: str(
        setting.get("model", "as stated")
    )


def percent(part: float, total: float) -> float:
    """Part of total in %.

    Raises:
        TraceError: total is 0: the trace holds nothing of what is counted.
    """
    if not total:
        raise TraceError(
            "nothing to count in the forward passes looked at; look at more with"
            " --steps"
        )
    return 100.0 * part / total
