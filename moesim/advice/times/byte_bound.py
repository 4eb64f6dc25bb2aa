"""What bytes over bandwidth allow at best: no schedule makes a token in less time.

The host memory has to deliver what lies in it, at the highest rate that its wires or a
probe show; graphics memory likewise. Both may work at the same time, so the larger of
the two quotients is a bound for every engine that leaves the weights where they lie.
Source: `docs/explanation/bound.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.advice.times.work import DecodeWork, decode_work

if TYPE_CHECKING:
    from moesim.advice.machine.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.setting import Setting

HOST = "host memory"
DEVICE = "graphics memory"


@dataclass(frozen=True, slots=True)
class ByteBound:
    """The least seconds of one decode step.

    Attributes:
        seconds: the bound.
        resource: memory that sets it.
        host_bytes: read from host memory.
        device_bytes: read from graphics memory.
    """

    seconds: float
    resource: str
    host_bytes: float
    device_bytes: float

    @property
    def tokens_per_s(self) -> float:
        """Speed of one sequence that nothing can beat."""
        return 1 / self.seconds


def placement_bound(
    machine: Machine,
    model: ModelContents,
    setting: Setting,
    context_tokens: float = 0.0,
) -> ByteBound:
    """Bound one decode step with the weights where a setting puts them."""
    work = decode_work(model, setting, context_tokens)
    return work_bound(machine, work)


def work_bound(machine: Machine, work: DecodeWork) -> ByteBound:
    """Bound a step by the bytes that it reads from either memory."""
    host_s = work.host_bytes / most_host_bytes_per_s(machine)
    # A machine without a card has no rate to divide by.
    device_s = 0.0
    if work.device_bytes:
        device_s = work.device_bytes / most_device_bytes_per_s(machine)

    if machine.unified:
        # One memory serves both processors, so their times add.
        total = host_s + device_s
        return ByteBound(total, HOST, work.host_bytes, work.device_bytes)
    resource = HOST if host_s >= device_s else DEVICE
    return ByteBound(
        max(host_s, device_s), resource, work.host_bytes, work.device_bytes
    )


def most_host_bytes_per_s(machine: Machine) -> float:
    """Return the highest rate at which host memory can be read."""
    # A probe above the wires' rate means that the wires are better than stated.
    probed = max(machine.probes.host_read.values(), default=0.0)
    return max(machine.host_peak_bytes_per_s, probed)


def most_device_bytes_per_s(machine: Machine) -> float:
    """Return the highest rate at which all cards together can read their memories."""
    # Schedules may cut layers across cards, so rates add.
    stated = sum(card.bytes_per_s * card.count for card in machine.graphics)
    return max(stated, machine.probes.device_read or 0.0)


def most_link_bytes_per_s(machine: Machine) -> float:
    """Return the highest rate at which all cards together get copies."""
    # Each card has a link of its own.
    stated = machine.link_bytes_per_s * machine.gpu_count
    return max(stated, machine.probes.link or 0.0)
