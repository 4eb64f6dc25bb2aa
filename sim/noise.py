"""Operation times as they really scatter: draws from the distributions that calibration
measured.

A mean hides that the latest of several noisy lanes comes later than the latest of their
means. With draws, every operation takes its expected time times a factor from its
lane's measured distribution.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles.lanes import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.hwprofiles.lanes import LaneKind
    from moesim.hwprofiles.profile import HardwareProfile

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
            quantiles = _quantiles(profile, kind_of(lane))
            self._streams.append(
                _factors(quantiles, seed, index) if len(quantiles) else None
            )

    def factors(self, lane: int, count: int) -> np.ndarray:
        """The next so many factors of a lane, float64; 1 where nothing scatters."""
        stream = self._streams[lane]
        if stream is None:
            return np.ones(count)
        return np.fromiter(islice(stream, count), np.float64, count)


def _quantiles(profile: HardwareProfile, kind: LaneKind) -> tuple[float, ...]:
    # The first entry that has quantiles counts.
    for path in kind.noise_paths:
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
