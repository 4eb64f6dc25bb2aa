"""The theorem with bytes over bandwidth: what a routing allows on a specification.

Times of single operations are bytes over a rate, so only sizes, rates and the least
reads count. Proof: `docs/explanation/bound.md`, "Bytes over bandwidth".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

HOST = "host memory"
LINK = "link"
DEVICE = "graphics memory"


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Highest rates of a machine, bytes per second.

    Attributes:
        host: reads of host memory, by CPU and link together.
        link: copies to the cards.
        device: reads of graphics memory, all cards together.
    """

    host: float
    link: float
    device: float


@dataclass(frozen=True, slots=True)
class RoutingBound:
    """The least seconds of some steps, wherever experts are kept and computed.

    Attributes:
        seconds: of all steps together.
        resource: what sets it.
        steps: how many.
        reads: experts that must be read from host memory.
        accesses: experts used.
    """

    seconds: float
    resource: str
    steps: int
    reads: int
    accesses: int

    @property
    def steps_per_s(self) -> float:
        """Speed that nothing can beat."""
        return self.steps / self.seconds


def routing_bound(
    sizes: Sequence[int],
    reads: int,
    steps: int,
    other_bytes: float,
    rates: Bandwidths,
) -> RoutingBound:
    """Bound the seconds of some decode steps by the best split of their accesses.

    Args:
        sizes: bytes of every expert used, one entry per access.
        reads: the least reads from host memory.
        steps: number of decode steps.
        other_bytes: read from graphics memory in each step.
        rates: of the machine.
    """
    # The smallest ones first, wherever they are served: no split has fewer bytes.
    least_bytes = np.concatenate([[0], np.cumsum(np.sort(np.asarray(sizes)))])
    on_cpu = np.arange(len(sizes) + 1)
    copies = np.maximum(0, reads - on_cpu)

    # Whoever reads it, what no cache holds crosses the memory's wires.
    from_host = np.maximum(least_bytes, least_bytes[reads])
    on_device = steps * other_bytes + least_bytes[::-1]
    lanes = {
        HOST: from_host / rates.host,
        LINK: least_bytes[copies] / rates.link,
        DEVICE: on_device / rates.device,
    }
    latest = np.maximum.reduce(list(lanes.values()))
    split = int(latest.argmin())
    resource = max(lanes, key=lambda name: float(lanes[name][split]))
    return RoutingBound(
        seconds=float(latest[split]),
        resource=resource,
        steps=steps,
        reads=reads,
        accesses=len(sizes),
    )
