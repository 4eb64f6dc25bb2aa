"""What is stated before anything is measured: cells, repetitions, aims, what counts.

`docs/measurements/protocol.md` says the same in words, and `tests/test_protocol.py`
holds the two together. A change here is another protocol, and needs a new result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Plan:
    """A protocol.

    Attributes:
        sittings: calibrations, each followed by all cells.
        calibrated: whose sizes the experts of calibration have, the larger first.
        trace: routing of the cells.
        shapes: whose sizes the experts of cells have; the last one is held out.
        policies, cache_ratios, batches: all combinations are cells.
        steps: forward passes of a run.
        repetitions: of every run within a sitting.
        median, worst: largest errors beyond the interval of the measurement.
        widest: half the width of an interval above which a cell shows nothing.
        most_lost: share of a run's time that other programs may take.
    """

    sittings: int = 3
    calibrated: tuple[str, ...] = ("olmoe-1b-7b/4", "olmoe-1b-7b/8")
    trace: str = "tiny"
    shapes: tuple[str, ...] = ("olmoe-1b-7b/4", "qwen3-30b-a3b/8")
    policies: tuple[str, ...] = ("all-cpu+none", "on-demand+lru", "greedy+lru")
    cache_ratios: tuple[float, ...] = (0.4,)
    batches: tuple[int, ...] = (1, 4)
    steps: int = 8
    repetitions: int = 5
    median: float = 0.03
    worst: float = 0.08
    widest: float = 0.08
    most_lost: float = 0.03

    @property
    def cells(self) -> int:
        """Cells of one sitting."""
        settings = len(self.shapes) * len(self.cache_ratios) * len(self.batches)
        return settings * len(self.policies)


PLAN: Final = Plan()
"""The one that results in `docs/measurements/` follow."""
