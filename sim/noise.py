"""Operation times as they really scatter: draws from the distributions that calibration
measured.

A mean hides that the latest of several noisy lanes comes later than the latest of their
means. With draws, every operation takes its expected time times a factor from its
lane's measured distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.sim.contention import Operation

SOURCES = {
    "cpu": ("costs.cpu.points", "costs.cpu.overhead_s"),
    "gpu": ("costs.gpu.points", "costs.gpu.overhead_s"),
    "h2d": ("costs.h2d.points", "costs.h2d.bytes_per_s"),
    "d2h": ("costs.d2h.points", "costs.d2h.bytes_per_s"),
    "ssd": ("costs.ssd.points", "costs.ssd.bytes_per_s"),
    "control": ("costs.planning.default.base_s",),
}
"""Where each class of lane finds its quantiles: the first of these entries that has
some.
"""

BLOCK = 4096


class Noise:
    """Factors on operation times, one stream per lane, seeded: the same seed gives the
    same run.

    Args:
        profile: the machine; lanes without measured quantiles are not scattered.
        seed: of all streams.
    """

    def __init__(self, profile: HardwareProfile, seed: int) -> None:
        self._streams: list[Iterator[float] | None] = []
        for index, lane in enumerate(profile.lanes):
            quantiles = _quantiles(profile, lane.rstrip("0123456789"))
            self._streams.append(
                _factors(quantiles, seed, index) if len(quantiles) else None
            )

    def scatter(self, operation: Operation) -> None:
        """Multiply the operation's work by the next factor of its lane."""
        stream = self._streams[operation.lane]
        if stream is not None:
            operation.work_s *= next(stream)


def _quantiles(profile: HardwareProfile, lane_class: str) -> tuple[float, ...]:
    for path in SOURCES[lane_class]:
        entry = profile.curves.get(path) or profile.numbers.get(path)
        if entry is not None and entry.quantiles:
            return entry.quantiles
    return ()


def _factors(quantiles: tuple[float, ...], seed: int, lane: int) -> Iterator[float]:
    """Draw without end by inverting the quantile function, linear between its
    points.
    """
    draw = np.random.default_rng((seed, lane))
    at = np.linspace(0.0, 1.0, len(quantiles))
    while True:
        yield from np.interp(draw.random(BLOCK), at, quantiles).tolist()
