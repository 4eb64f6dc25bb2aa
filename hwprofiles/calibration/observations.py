"""Tables of what is learned from a run: its operations, and the gaps between them.

A timeline is a list of spans. To learn costs from it, each operation must be seen with
the tokens or bytes it had and with the share of its time during which other workers
were busy; and the time that belongs to no operation (waking a thread, handing out work,
joining) must be cut out of the gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.timeline.spans import Timeline


@dataclass(frozen=True, slots=True)
class DesignedRun:
    """One run that was made to be learned from.

    Attributes:
        timeline: what happened.
        shape: sizes of the experts and of the rest of the model.
        assignment: name of the assignment policy that planned.
        context_tokens: by step, key/value entries of each sequence.
        workers: worker -> its lanes.
        kept: bool [steps], which forward passes count; all when None.
        pace: factor by which the machine took longer than usual meanwhile.
    """

    timeline: Timeline
    shape: ModelShape
    assignment: str
    context_tokens: Sequence[int]
    workers: Mapping[str, tuple[str, ...]]
    kept: np.ndarray | None = None
    pace: float = 1.0


class Operations(NamedTuple):
    """Operations of one kind of lane. N operations, C kinds of lanes.

    Attributes:
        seconds: float64 [N].
        sizes: int64 [N], tokens of a product, bytes of a copy.
        shares: float64 [N, C], share of the operation's time during which lanes of each
            kind (in the order of `LANE_KINDS`) worked elsewhere.
        first: bool [N], first product of its lane in a layer step.
        fresh: bool [N], the expert was read from the SSD in the same layer step.
        active: float64 [N], active experts of its layer step.
        copies: float64 [N], experts brought from one memory to another in its layer
            step.
        odd: bool [N], belongs to a step with an odd number.
        shapes: int64 [N], number of the run's shape.
        runs: int64 [N], twice the number of the run, and one more in its first step
            (which may be a prefill).
    """

    seconds: np.ndarray
    sizes: np.ndarray
    shares: np.ndarray
    first: np.ndarray
    fresh: np.ndarray
    active: np.ndarray
    copies: np.ndarray
    odd: np.ndarray
    shapes: np.ndarray
    runs: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[Operations]) -> Operations:
        """Concatenate the operations of several runs."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def where(self, keep: np.ndarray) -> Operations:
        """Choose rows, by bool [N] or their numbers."""
        return Operations(*(column[keep] for column in self))


class Amounts(NamedTuple):
    """How much there was to do in each layer step: N layer steps.

    Attributes:
        active: float64 [N], active experts.
        copies: float64 [N], experts brought from one memory to another.
    """

    active: np.ndarray
    copies: np.ndarray

    def where(self, keep: np.ndarray) -> Amounts:
        """Choose rows, by bool [N] or their numbers."""
        return Amounts(self.active[keep], self.copies[keep])


class LayerStepTimes(NamedTuple):
    """Seconds that pass once per layer step, beside how much there was to do: N layer
    steps.

    Attributes:
        seconds: float64 [N].
        active: float64 [N], active experts.
        copies: float64 [N], experts brought from one memory to another.
        tiered: float64 [N], 1 where an SSD lies behind host memory.
        lane_kind: int64 [N], number of the kind of lane that it concerns, an index into
            `LANE_KINDS`.
    """

    seconds: np.ndarray
    active: np.ndarray
    copies: np.ndarray
    tiered: np.ndarray
    lane_kind: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[LayerStepTimes]) -> LayerStepTimes:
        """Concatenate several tables."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def where(self, keep: np.ndarray) -> LayerStepTimes:
        """Choose rows, by bool [N] or their numbers."""
        return LayerStepTimes(*(column[keep] for column in self))


class DenseParts(NamedTuple):
    """Dense parts and heads of a run: N of them.

    Attributes:
        seconds: float64 [N].
        step: int64 [N].
        layer: int64 [N]; -1 for the head.
        after_read: bool [N], the layer step before it read from the SSD.
    """

    seconds: np.ndarray
    step: np.ndarray
    layer: np.ndarray
    after_read: np.ndarray


@dataclass(slots=True)
class Gaps:
    """Seconds between operations.

    Attributes:
        follow: kind of lane -> from the end of an operation to the start of the next on
            the same worker, as float64 [n].
        first: from the end of planning to the first operation of the ``cpu`` or ``gpu``
            lane's worker.
        read: from the end of planning to the first read, as float64 [n].
        join: what passes between two dense parts beside planning and lanes: the
            request, from the end of the last operation to the join, the join, to the
            next dense part; by the lane whose operation was the last.
    """

    follow: dict[str, list[np.ndarray]] = field(default_factory=dict)
    first: list[LayerStepTimes] = field(default_factory=list)
    read: list[np.ndarray] = field(default_factory=list)
    join: list[LayerStepTimes] = field(default_factory=list)
