"""What a card does that a hardware profile has no place for yet: products in several
formats, alone and in one grouped launch; copies by direction, size and kind of memory;
both directions at once; launches; its own energy counter.

Each function returns rows of plain values, times in seconds, medians of repeated
measurements by the device's clock.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn import functional

from moesim.runtime.measure.copies import copying, link_memories, link_samples
from moesim.runtime.measure.experts import ExpertPool, Size
from moesim.runtime.measure.sampling import (
    event_timer,
    once_s,
    sample,
)
from moesim.runtime.models.expert_layout import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.runtime.accelerators import Accelerator

GROUPED: Final = 8
"""Experts of a grouped launch."""
LINK_BYTES: Final = tuple(1 << power for power in (16, 18, 20, 22, 24, 26))
_PIECES: Final = 4
_LAUNCHES: Final = 200
_WATCHED_S: Final = 1.0
"""How long the energy counter is watched, idle and busy."""

Row = dict[str, Any]


def products(
    accelerator: Accelerator,
    size: Size,
    dtype: torch.dtype,
    tokens: Sequence[int],
    *,
    seconds: float,
) -> list[Row]:
    """Time an expert by tokens, and `GROUPED` of them in one launch where the device
    has grouped products of this format (bfloat16).

    Args:
        accelerator: that computes.
        size: of the expert.
        dtype: of its weights.
        tokens: of each expert.
        seconds: to spend, roughly.
    """
    once = event_timer(accelerator)
    share_s = seconds / (2 * len(tokens))
    pool = ExpertPool(size, dtype, accelerator=accelerator)
    rows = []
    try:
        for count in tokens:
            alone_s = sample(pool.work(count), share_s, once=once)
            row = {
                "hidden": size.hidden,
                "intermediate": size.intermediate,
                "dtype": dtype_name(dtype),
                "tokens": count,
                "expert_bytes": pool.layout.expert_bytes,
                "alone_s": float(np.median(alone_s)),
                "grouped_s": None,
                "grouped_experts": GROUPED,
            }
            if dtype == torch.bfloat16:
                row["grouped_s"] = _grouped_s(accelerator, size, count, share_s)
            rows.append(row)
    finally:
        pool.close()
    return rows


def _grouped_s(
    accelerator: Accelerator, size: Size, tokens: int, seconds: float
) -> float | None:
    """Time `GROUPED` experts in two grouped launches and the gating between them; None
    where the device has none.
    """
    where = accelerator.device
    kind = torch.bfloat16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=where).mul_(0.02).to(kind)

    # [E, out, in], as records hold them; two layers, so that no cache holds the next.
    layers = [
        (
            draw(GROUPED, 2 * size.intermediate, size.hidden).transpose(1, 2),
            draw(GROUPED, size.hidden, size.intermediate).transpose(1, 2),
        )
        for _ in range(2)
    ]
    rows = draw(GROUPED * tokens, size.hidden)
    ends = torch.arange(1, GROUPED + 1, device=where, dtype=torch.int32) * tokens

    def layer(index: int) -> torch.Tensor:
        up, down = layers[index % len(layers)]
        gate, lifted = functional.grouped_mm(rows, up, offs=ends).chunk(2, dim=-1)
        features = (functional.silu(gate) * lifted).contiguous()
        return functional.grouped_mm(features, down, offs=ends)

    try:
        times = sample(layer, seconds, once=event_timer(accelerator))
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return float(np.median(times))


def links(accelerator: Accelerator, *, seconds: float) -> list[Row]:
    """Time copies to the device (``h2d``) and back, from page-locked and from pageable
    memory, by size.
    """
    share_s = seconds / (4 * len(LINK_BYTES))
    rows = []
    for page_locked in (True, False):
        by_direction = link_samples(
            accelerator, LINK_BYTES, share_s, page_locked=page_locked
        )
        for direction, by_size in by_direction.items():
            for nbytes, times in by_size.items():
                median_s = float(np.median(times))
                rows.append(
                    {
                        "direction": direction,
                        "page_locked": page_locked,
                        "bytes": nbytes,
                        "median_s": median_s,
                        "bytes_per_s": nbytes / median_s,
                    }
                )
    return rows


def both_ways(accelerator: Accelerator, *, seconds: float) -> Row:
    """Measure each direction of the link alone and both at once, page-locked."""
    nbytes = 16 << 20
    copies = []
    for back in (False, True):
        host, there = link_memories(accelerator, _PIECES * nbytes, page_locked=True)
        ends = (host, there) if back else (there, host)
        launch = copying(*ends, nbytes, wait=False)
        copies.append((accelerator.new_stream(), launch))

    def launching(*ways: int) -> Callable[[int], None]:
        def launched(index: int) -> None:
            for way in ways:
                stream, launch = copies[way]
                with accelerator.on(stream):
                    launch(index)

        return launched

    medians = {
        name: many_s(accelerator, launching(*ways), seconds / 3)
        for name, ways in (("h2d", (0,)), ("d2h", (1,)), ("both", (0, 1)))
    }
    return {f"{name}_s": seconds_each for name, seconds_each in medians.items()} | {
        "bytes": nbytes,
        # 1 where the directions hide each other, 2 where they take turns.
        "both_over_slower": medians["both"] / max(medians["h2d"], medians["d2h"]),
    }


def launches(accelerator: Accelerator, *, seconds: float) -> Row:
    """Measure what a launch costs the host, and the device when nothing else is to do:
    additions of one number.
    """
    number = torch.ones(1, device=accelerator.device)

    def add(_: int) -> torch.Tensor:
        return number.add_(1.0)

    def launched(_: int) -> None:
        for launch in range(_LAUNCHES):
            add(launch)

    host_s: list[float] = []
    end_s = time.perf_counter() + seconds / 2
    while not host_s or time.perf_counter() < end_s:
        accelerator.synchronize()
        host_s.append(once_s(launched, 0) / _LAUNCHES)
    accelerator.synchronize()
    device_s = sample(add, seconds / 4, once=event_timer(accelerator))
    return {
        "host_s": float(np.median(host_s)),
        "device_s": float(np.median(device_s)),
        "back_to_back_s": many_s(accelerator, add, seconds / 4),
    }


def many_s(
    accelerator: Accelerator, work: Callable[[int], object], seconds: float
) -> float:
    """Seconds of one of many that are launched before the host waits."""
    count = 16

    def many(index: int) -> None:
        for number in range(count):
            work(count * index + number)
        accelerator.synchronize()

    return float(np.median(sample(many, seconds))) / count


class EnergyCounter:
    """Joules that a card has used since its driver was loaded, by NVIDIA's management
    library; Volta and later count.

    Raises:
        OSError: there is no such library, or the card does not count.
    """

    def __init__(self, index: int = 0, library: Any = None) -> None:
        self._nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        self._card = ctypes.c_void_p()
        self._check("nvmlInit_v2")
        self._check("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(self._card))
        self.joules()

    def joules(self) -> float:
        """Read it."""
        millijoules = ctypes.c_ulonglong()
        self._check(
            "nvmlDeviceGetTotalEnergyConsumption",
            self._card,
            ctypes.byref(millijoules),
        )
        return millijoules.value * 1e-3

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code != 0:
            raise OSError(f"{name}: NVML error {code}")


def energy(
    accelerator: Accelerator, size: Size, counter: EnergyCounter | None = None
) -> Row:
    """Watts of the card idle and while it computes experts, by its own counter; None
    where it has none.
    """
    row: Row = {"idle_watts": None, "busy_watts": None, "joules_per_expert": None}
    if counter is None:
        try:
            counter = EnergyCounter(accelerator.device.index or 0)
        except OSError as error:
            return row | {"reason": str(error)}

    def watched(work: Callable[[int], object]) -> tuple[float, float, int]:
        begin_joules = counter.joules()
        begin_s = time.perf_counter()
        done = 0
        while time.perf_counter() - begin_s < _WATCHED_S:
            work(done)
            done += 1
        accelerator.synchronize()
        took_s = time.perf_counter() - begin_s
        return counter.joules() - begin_joules, took_s, done

    pool = ExpertPool(size, torch.bfloat16, accelerator=accelerator)
    product = pool.work(1)

    def some(_: int) -> None:
        for number in range(16):
            product(number)
        accelerator.synchronize()

    try:
        idle_joules, idle_s, _ = watched(lambda _: time.sleep(0.05))
        busy_joules, busy_s, rounds = watched(some)
    finally:
        pool.close()
    return row | {
        "idle_watts": idle_joules / idle_s,
        "busy_watts": busy_joules / busy_s,
        "joules_per_expert": busy_joules / (16 * rounds),
    }
