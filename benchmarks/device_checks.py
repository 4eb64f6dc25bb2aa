"""Whether an accelerator does what the runtime takes for granted: products single and
grouped, copies of both kinds of memory, and the order between its streams.

Each check works with the runtime's own code (`StreamDevice`, slots, `expert_forward`)
and compares with what the CPU computes. It returns a finding; what it raises is one,
too, for whoever runs all of them.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn import functional

from moesim.base.host import Finding, fails, holds, limited
from moesim.runtime.executor.device import StreamDevice
from moesim.runtime.executor.lanes import Task
from moesim.runtime.executor.live import TOLERANCES
from moesim.runtime.models.expert_layout import (
    dtype_name,
    expert_forward,
    swiglu_layout,
    torch_dtype,
)
from moesim.runtime.store.memory import DeviceSlots, HostSlots
from moesim.traces.timeline.spans import COMPUTE, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.runtime.accelerators import Accelerator
    from moesim.runtime.models.expert_layout import ExpertLayout

FORMATS: Final = ("bfloat16", "float16", "float32")
_HIDDEN: Final = 1024
_INTERMEDIATE: Final = 512
_TOKENS: Final = (1, 7, 64)
_ROUNDS: Final = 16
"""Copies into one slot, each behind a product that still reads it."""
_LONG_TOKENS: Final = 256
"""Tokens of a product that takes longer than the copy behind it, were that to start."""
_COPY_BYTES: Final = (4096, 1 << 16, 12 << 20)
_CLOCKS_S: Final = 1e-3
"""By how much the device's clock and the host's may differ within a second."""


def check_products(accelerator: Accelerator, dtype: torch.dtype) -> Finding:
    """Compare an expert's products with the CPU's in float32."""
    layout = swiglu_layout(_HIDDEN, _INTERMEDIATE, dtype)
    record = _records(layout, 1)[0]
    there = record.to(accelerator.device)
    worst = 0.0
    for tokens in _TOKENS:
        rows = _rows(tokens, dtype)
        expected = _expected(record, rows, layout)
        result = expert_forward(
            layout.views(there), rows.to(accelerator.device), layout
        )
        worst = max(worst, _difference(result.cpu(), expected))
    return _within(worst, dtype, f"experts on {', '.join(map(str, _TOKENS))} tokens")


def check_grouped_products(accelerator: Accelerator) -> Finding:
    """Compare experts in one launch (`torch.nn.functional.grouped_mm`) with one after
    the other.
    """
    dtype = torch.bfloat16
    counts = torch.tensor([3, 1, 8, 20])
    ends = counts.cumsum(0).to(torch.int32)
    rows = _rows(int(ends[-1]), dtype)
    # [E, out, in] as records hold them.
    weights = torch.stack([_rows(_INTERMEDIATE, dtype) for _ in counts])
    expected = torch.cat(
        [
            part.float() @ weight.float().T
            for part, weight in zip(rows.split(counts.tolist()), weights, strict=True)
        ]
    )
    where = accelerator.device
    try:
        result = functional.grouped_mm(
            rows.to(where),
            weights.to(where).transpose(1, 2),
            offs=ends.to(where),
        )
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return limited(
            f"no grouped products here: {reason}",
            "experts are launched one by one; nothing else changes",
        )
    worst = _difference(result.cpu(), expected)
    return _within(worst, dtype, f"{len(counts)} experts in one launch")


def check_copies(accelerator: Accelerator, *, page_locked: bool) -> Finding:
    """Copy bytes to the device and back, launched without waiting."""
    lock = accelerator if page_locked and accelerator.page_locks else None
    size = max(_COPY_BYTES)
    with (
        HostSlots(2, size, page_lock=lock) as host,
        DeviceSlots(1, size, accelerator.device) as device,
    ):
        source, target = host.record(0), host.record(1)
        source.copy_(torch.randint(0, 256, source.shape, dtype=torch.uint8))
        for nbytes in _COPY_BYTES:
            for offset in (0, 64):
                piece = slice(offset, offset + nbytes - 64)
                target.zero_()
                device.record(0)[piece].copy_(source[piece], non_blocking=True)
                target[piece].copy_(device.record(0)[piece], non_blocking=True)
                # Nobody may look at the host's bytes before this.
                accelerator.synchronize()
                if not torch.equal(target[piece], source[piece]):
                    return _wrong(f"{nbytes} bytes came back changed")
    kind = "page-locked" if page_locked else "pageable"
    return holds(f"{len(_COPY_BYTES)} sizes there and back, {kind}")


def check_slot_reuse(accelerator: Accelerator) -> Finding:
    """Overwrite a slot again and again behind products that still read it; a copy has
    to wait for them on the device, and times must be in that order.
    """
    layout = swiglu_layout(_HIDDEN, _INTERMEDIATE, torch.float32)
    rows = _rows(_LONG_TOKENS, torch.float32)
    records = _records(layout, 4)
    expected = [_expected(record, rows, layout) for record in records]
    device = StreamDevice(accelerator)
    lock = accelerator if accelerator.page_locks else None
    lanes = ("gpu0",)
    timeline = Timeline(lanes)
    with (
        HostSlots(len(records), layout.expert_bytes, page_lock=lock) as host,
        device.allocate(1, layout.expert_bytes) as slots,
    ):
        for number, record in enumerate(records):
            host.record(number)[: len(record)].copy_(record)
        there = rows.to(accelerator.device)
        began_s = time.perf_counter()
        device.begin(began_s)
        results = []
        landings = []
        for number in range(_ROUNDS):
            source = host.record(number % len(records))
            landings.append(device.copy(0, source, layout.expert_bytes))
            product = Task(0, COMPUTE, 0, number)
            device.begin_compute(product, 0)
            results.append(expert_forward(slots.weights(0, layout), there, layout))
            device.end_compute(product)
        device.step_done(timeline)
        took_s = time.perf_counter() - began_s
        worst = max(
            _difference(result.cpu(), expected[number % len(records)])
            for number, result in enumerate(results)
        )
    if worst > TOLERANCES["float32"]:
        return _wrong(
            f"products read a slot that was being overwritten (off by {worst:.1e})"
        )
    spans = timeline.frame().sort_values("layer")
    moments = []
    for landing, begin_s, end_s in zip(
        landings, spans["start_s"], spans["end_s"], strict=True
    ):
        assert landing is not None, "the run has begun"
        moments += [*landing, begin_s, end_s]
    steps = np.diff([0.0, *moments, took_s])
    if steps.min() < -_CLOCKS_S:
        return _wrong("the device's times are out of order, or outside the host's")
    return holds(f"{_ROUNDS} copies waited for the products before them")


def check_both_ways(accelerator: Accelerator) -> Finding:
    """Copy to the device and back at once, from two threads, as lanes do."""
    size = 8 << 20
    device = StreamDevice(accelerator)
    lock = accelerator if accelerator.page_locks else None
    with (
        HostSlots(4, size, page_lock=lock) as host,
        device.allocate(2, size) as slots,
    ):
        noise = torch.randint(0, 256, (2, size), dtype=torch.uint8)
        for number, values in enumerate(noise):
            host.record(number).copy_(values)
        device.copy(1, host.record(1), size)
        there: list[bool] = []

        def back() -> None:
            for _ in range(_ROUNDS):
                device.copy_back(host.record(3), 1, size)
                there.append(torch.equal(host.record(3), noise[1]))

        thread = threading.Thread(target=back, name="copies-back", daemon=True)
        thread.start()
        for _ in range(_ROUNDS):
            device.copy(0, host.record(0), size)
        thread.join()
        if there != [True] * _ROUNDS:
            return _wrong("a copy back was not there when it said so")
        if not torch.equal(slots.record(0).cpu(), noise[0]):
            return _wrong("bytes on the device are others than were copied there")
    return holds(f"{_ROUNDS} copies each way, each there when it said so")


def check_hidden_states(accelerator: Accelerator) -> Finding:
    """Bring the result of a long chain of products to the host, and small things to the
    device meanwhile.
    """
    device = StreamDevice(accelerator)
    hidden = torch.ones(_LONG_TOKENS, _HIDDEN, device=accelerator.device)
    identity = torch.eye(_HIDDEN, device=accelerator.device)
    sent = []
    for number in range(_ROUNDS):
        hidden = hidden @ identity + 1.0
        sent.append(device.send(torch.full((4,), number)))
    there, _ = device.to_host(hidden)
    if not bool((there == 1.0 + _ROUNDS).all()):
        return _wrong("hidden states were read before they had come")
    if torch.stack(sent)[:, 0].tolist() != list(range(_ROUNDS)):
        return _wrong("what was sent arrived changed")
    return holds(f"there after {_ROUNDS} products in a row")


def check_page_locks(accelerator: Accelerator) -> Finding:
    """Lock memory, let go of it and lock it again; torch must know it as locked."""
    if not accelerator.page_locks:
        return holds("not needed: no copies to a device's own memory")
    for number in range(_ROUNDS):
        slots = HostSlots(4, 1 << 20, page_lock=accelerator)
        if not slots.memory.is_pinned():
            return _wrong("torch takes locked memory for pageable")
        # Every other row is dropped unclosed.
        if number % 2:
            slots.close()
        del slots
    return holds(f"4 MiB locked and unlocked {_ROUNDS} times")


CHECKS: Final[Mapping[str, Callable[[Accelerator], Finding]]] = {
    **{
        f"products in {name}": partial(check_products, dtype=torch_dtype(name))
        for name in FORMATS
    },
    "grouped products": check_grouped_products,
    "page-locked copies": partial(check_copies, page_locked=True),
    "pageable copies": partial(check_copies, page_locked=False),
    "slots overwritten behind products": check_slot_reuse,
    "copies both ways at once": check_both_ways,
    "hidden states on the host": check_hidden_states,
    "page locks": check_page_locks,
}


def _records(layout: ExpertLayout, count: int) -> list[torch.Tensor]:
    """Draw the records of so many experts, uint8 each."""
    draws = torch.Generator().manual_seed(count)
    records = []
    for _ in range(count):
        record = torch.zeros(layout.expert_bytes, dtype=torch.uint8)
        views = layout.views(record)
        for weights in (views.up, views.down):
            drawn = torch.randn(weights.shape, generator=draws)
            weights.copy_(drawn / weights.shape[1] ** 0.5)
        records.append(record)
    return records


def _rows(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw hidden states [T, H]."""
    draws = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, _HIDDEN, generator=draws).to(dtype)


def _expected(
    record: torch.Tensor, rows: torch.Tensor, layout: ExpertLayout
) -> torch.Tensor:
    """Compute an expert on the CPU in float32, from its weights as they are."""
    views = layout.views(record)
    wide = views._replace(up=views.up.float(), down=views.down.float())
    return expert_forward(wide, rows.float(), layout)


def _difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((result.float() - expected).abs().max() / expected.abs().max())


def _within(worst: float, dtype: torch.dtype, words: str) -> Finding:
    """Judge a difference by what rounding explains."""
    name = dtype_name(dtype)
    outcome = f"{words}, off by {worst:.1e}; rounding explains {TOLERANCES[name]:.0e}"
    if worst <= TOLERANCES[name]:
        return holds(outcome, worst=worst)
    return _wrong(outcome)


def _wrong(words: str) -> Finding:
    return fails(words, "report it with the folder of this run")
