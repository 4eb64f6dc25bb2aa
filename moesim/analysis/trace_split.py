"""Cuts a trace into a part to learn from and a held-out part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from moesim.traces.errors import TraceError
from moesim.traces.format.batch import compose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace

NEAR = 0.1
"""A cut moves to the beginning of a sequence that lies within this share of the
trace.
"""


@dataclass(frozen=True, slots=True)
class TracePart:
    """Some forward passes of a trace, numbered anew from 0; may be walked again and
    again.
    """

    trace: Trace
    start: int
    stop: int
    batch: int = 1

    def __len__(self) -> int:
        """Forward passes."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[RoutedStep]:
        """Compose the trace afresh."""
        steps = islice(compose(self.trace, batch=self.batch), self.start, self.stop)
        for number, step in enumerate(steps):
            yield replace(step, step=number)


def split(
    trace: Trace, *, held_out: float = 0.25, batch: int = 1, steps: int | None = None
) -> tuple[TracePart, TracePart]:
    """Cut a trace in two: the first part to learn from, the last one to evaluate on.

    Args:
        trace: an opened trace.
        held_out: share of the last part, between 0 and 1.
        batch: sequences that run together.
        steps: keep the first so many forward passes.

    Returns:
        Two parts without a common step; the cut lies between two sequences if one
        begins nearby.

    Raises:
        TraceError: nothing would be left of one part.
    """
    # A new group of sequences begins where the number of the batch changes.
    groups = [step.batch for step in compose(trace, batch=batch, steps=steps)]
    count = len(groups)
    target = round(count * (1.0 - held_out))
    begins = [step for step in range(1, count) if groups[step] != groups[step - 1]]

    # Within a sequence, what comes next depends on what came before: both parts would
    # know of each other.
    cut = min(begins, key=lambda step: abs(step - target), default=target)
    if abs(cut - target) > NEAR * count:
        cut = target
    if not 0 < cut < count:
        raise TraceError(
            f"{trace.path}: {count} forward passes cannot be cut in two; give a"
            " longer trace"
        )
    return TracePart(trace, 0, cut, batch), TracePart(trace, cut, count, batch)


def all_passes(trace: Trace, *, batch: int = 1, steps: int | None = None) -> TracePart:
    """Take all forward passes of a trace, or the first `steps`."""
    # Counted, not stored: a trace may be larger than memory.
    count = sum(1 for _ in compose(trace, batch=batch, steps=steps))
    return TracePart(trace, 0, count, batch)
