"""Measures copies between host memories: what the host accelerator's links do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from moesim.hwprofiles.calibration.fit_curves import fit_line
from moesim.runtime.measure.pool_size import pool_bytes
from moesim.runtime.measure.timing import sample
from moesim.runtime.store.streaming import streamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runtime.measure.measurements import Measurements

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20

COPY_BYTES: Final = (64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB)
ACTIVATION_BYTES: Final = (4 * _KIB, 64 * _KIB, _MIB)

# Small pieces of a large pool would make a list of millions.
_MOST_PIECES: Final = 4096


class CopyPool:
    """Two written memories, and copies between them.

    Args:
        total_bytes: of each.
    """

    def __init__(self, total_bytes: int) -> None:
        self.source = torch.full((total_bytes,), 1, dtype=torch.uint8)
        self.target = torch.full((total_bytes,), 2, dtype=torch.uint8)

    def work(self, size: int) -> Callable[[int], torch.Tensor]:
        """Return operation number i: copy piece ``i`` of `size` bytes."""
        pairs = [
            (self.target[offset : offset + size], self.source[offset : offset + size])
            for offset in self._offsets(size)
        ]
        return lambda index: pairs[index % len(pairs)][0].copy_(
            pairs[index % len(pairs)][1]
        )

    def streaming(self, size: int) -> Callable[[int], None]:
        """Return the same as `work`, copied as the host accelerator does."""
        pairs = [
            (self.target[offset:], self.source[offset:])
            for offset in self._offsets(size)
        ]
        return lambda index: streamed(*pairs[index % len(pairs)], size)

    def _offsets(self, size: int) -> range:
        pieces = min(len(self.source) // size, _MOST_PIECES)
        return range(0, pieces * size, size)


def measure_host_copies(measurements: Measurements, *, seconds: float) -> None:
    """Measure copies between two host memories, and hidden states on their way to the
    CPU lane and back.
    """
    pool = CopyPool(max(pool_bytes(), 4 * COPY_BYTES[-1]))
    share_s = seconds / (len(COPY_BYTES) + len(ACTIVATION_BYTES))

    by_size = {size: sample(pool.streaming(size), share_s) for size in COPY_BYTES}
    line = fit_line(by_size)
    source = "copies by one thread between written host memories, each piece in turn"
    measurements.link("h2d", by_size, line, source)
    # Both memories are of the same kind, so the way back costs the same.
    both_ways = f"{source}; both directions are the same copy"
    measurements.link("d2h", by_size, line, both_ways)

    def there_and_back(size: int) -> Callable[[int], object]:
        copy = pool.work(size)
        return lambda index: (copy(index), copy(index + 1))

    round_trips = {
        2 * size: sample(there_and_back(size), share_s) for size in ACTIVATION_BYTES
    }
    measurements.line(
        "costs.activation",
        ("latency_s", "bytes_per_s"),
        fit_line(round_trips),
        "line through two host copies, hidden states to the CPU lane and its result"
        " back, by bytes",
    )
