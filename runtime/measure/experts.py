"""Expert compute and copies, on the CPU, the host accelerator or a GPU.

Experts lie in a pool several times larger than the last-level cache, written once, and
each run takes the next one: decode reads every weight from memory, so a benchmark that
does not is a different benchmark.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import psutil
import torch
from moesim.hwprofiles.calibration.fit_curves import fit_line, fit_roofline
from moesim.hwprofiles.schema import ReferenceExpert
from moesim.runtime.measure.timing import Findings, once_s, sample
from moesim.runtime.models.expert_math import (
    ExpertLayout,
    dtype_name,
    expert_forward,
    swiglu_layout,
)
from moesim.runtime.store.memory import DeviceSlots, HostTier, Slots
from moesim.runtime.store.streaming import streamed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB: Final = 1 << 20
COPY_BYTES: Final = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB)
_ACTIVATION_BYTES: Final = (4 << 10, 64 << 10, MIB)
_MOST_PIECES: Final = 4096
_DEFAULT_CACHE_BYTES: Final = 64 * MIB
_SMALL_WEIGHTS: Final = 1 << 18  # H F below which overhead hides everything else


class Size(NamedTuple):
    """An expert's hidden H and intermediate F."""

    hidden: int
    intermediate: int

    def companion(self) -> Size:
        """Another expert, a quarter of the bytes (or sixteen times, if small): it tells
        overhead from bandwidth.
        """
        if self.hidden * self.intermediate >= _SMALL_WEIGHTS:
            return Size(self.hidden // 2, self.intermediate // 2)
        return Size(self.hidden * 4, self.intermediate * 4)


def last_level_cache_bytes() -> int:
    """Ask the kernel for the largest cache of core 0; 64 MiB where it does not say."""
    sizes = [_DEFAULT_CACHE_BYTES // 1024]
    found = [
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    sizes = [
        int(text.removesuffix("K"))
        for text in found
        if text.endswith("K") and text[:-1].isdigit()
    ] or sizes
    return max(sizes) * 1024


def pool_bytes(experts_bytes: int = 0) -> int:
    """Bytes that a measurement cycles through: four caches, two experts at least, an
    eighth of free memory at most.
    """
    return max(
        min(4 * last_level_cache_bytes(), int(psutil.virtual_memory().available) // 8),
        2 * experts_bytes,
    )


class ExpertPool:
    """Many experts of one size in written memory.

    Args:
        size: H and F.
        dtype: of the weights.
        device: ``cpu`` or a CUDA device.
        total_bytes: to cycle through.
    """

    def __init__(
        self,
        size: Size,
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        total_bytes: int | None = None,
    ) -> None:
        self.size = size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layout: ExpertLayout = swiglu_layout(size.hidden, size.intermediate, dtype)
        expert_bytes = self.layout.expert_bytes
        count = max(2, (total_bytes or pool_bytes(expert_bytes)) // expert_bytes)
        self.slots: Slots = (
            HostTier(count, expert_bytes)
            if self.device.type == "cpu"
            else DeviceSlots(count, expert_bytes, device)
        )
        values = (
            torch.randn(expert_bytes // dtype.itemsize, device=self.device)
            .mul_(0.02)
            .to(dtype)
            .view(torch.uint8)
        )
        for slot in range(count):
            self.slots.record(slot)[: len(values)].copy_(values)
        self._weights = [self.slots.weights(slot, self.layout) for slot in range(count)]

    @property
    def reference(self) -> ReferenceExpert:
        """What a profile says about the expert."""
        return ReferenceExpert(
            self.size.hidden,
            self.size.intermediate,
            self.layout.expert_bytes,
            dtype_name(self.dtype),
        )

    def work(self, tokens: int) -> Callable[[int], torch.Tensor]:
        """Return operation number i: expert ``i`` of the pool for `tokens` tokens."""
        hidden = torch.randn(tokens, self.size.hidden, device=self.device).to(
            self.dtype
        )
        weights = self._weights
        layout = self.layout
        count = len(self._weights)
        return lambda index: expert_forward(weights[index % count], hidden, layout)

    def close(self) -> None:
        """Give the memory back."""
        self._weights.clear()
        self.slots.close()


def choose_dtype(size: Size, *, seconds: float) -> torch.dtype:
    """Choose the weights' type that this CPU does well: bfloat16 if faster at 1 and at
    16 tokens, else float32.

    A CPU without bfloat16 products reads half the bytes and then converts them, which
    loses with more tokens.
    """
    medians = {}
    for dtype in (torch.float32, torch.bfloat16):
        pool = ExpertPool(size, dtype)
        medians[dtype] = [
            float(np.median(sample(pool.work(tokens), seconds / 4)))
            for tokens in (1, 16)
        ]
        pool.close()
    faster = all(
        b < f
        for b, f in zip(medians[torch.bfloat16], medians[torch.float32], strict=True)
    )
    return torch.bfloat16 if faster else torch.float32


def measure_experts(
    findings: Findings,
    lane: str,
    size: Size,
    dtype: torch.dtype,
    *,
    tokens: Sequence[int],
    seconds: float,
    device: str = "cpu",
    once: Callable[[Callable[[int], object], int], float] = once_s,
    source: str,
) -> None:
    """Measure an expert by tokens, and a second one of another size, for the roofline
    between them.
    """
    few = tokens[:: max(1, len(tokens) // 4)]
    share_s = seconds / (len(tokens) + len(few))
    moved: list[float] = []
    flops: list[float] = []
    times: list[np.ndarray] = []
    for expert, counts in ((size, tokens), (size.companion(), few)):
        pool = ExpertPool(expert, dtype, device=device)
        by_tokens = {
            count: sample(pool.work(count), share_s, once=once) for count in counts
        }
        for count, samples in by_tokens.items():
            moved.append(pool.layout.expert_bytes)
            flops.append(6.0 * expert.hidden * expert.intermediate * count)
            times.append(samples)
        if expert == size:
            findings.points(
                lane,
                by_tokens,
                pool.reference,
                f"one {dtype_name(dtype)} SwiGLU expert, {source}",
            )
        pool.close()
    other = size.companion()
    findings.roofline(
        lane,
        fit_roofline(moved, flops, times),
        f"roofline through {dtype_name(dtype)} experts of {size.hidden} x"
        f" {size.intermediate} and {other.hidden} x {other.intermediate}, {source}",
    )


def measure_first_expert(
    findings: Findings, size: Size, dtype: torch.dtype, *, seconds: float, source: str
) -> None:
    """Measure by how much the first CPU expert of a layer is slower than the next
    three.

    Between layers the core does other things: here, a pass over as many bytes as its
    caches hold.
    """
    pool = ExpertPool(size, dtype)
    work = pool.work(1)
    other = torch.zeros(last_level_cache_bytes() // 8, dtype=torch.int64)

    def extra_s(_: Callable[[int], object], index: int) -> float:
        other.add_(1)
        first, *later = (once_s(work, 4 * index + place) for place in range(4))
        return max(0.0, first - float(np.mean(later)))

    samples = sample(lambda _: None, seconds, fewest=15, once=extra_s)
    pool.close()
    findings.number(
        "costs.cpu.first_s",
        samples,
        f"first of four experts minus the mean of the others, {source}",
    )


class CopyPool:
    """Two written memories, and copies between them: what the host accelerator's links
    do.

    Args:
        total_bytes: of each.
    """

    def __init__(self, total_bytes: int) -> None:
        self.source = torch.full((total_bytes,), 1, dtype=torch.uint8)
        self.target = torch.full((total_bytes,), 2, dtype=torch.uint8)

    def work(self, size: int) -> Callable[[int], torch.Tensor]:
        """Return operation number i: copy piece ``i`` of `size` bytes to its other
        place.
        """
        pieces = len(self.source) // size
        pairs = [
            (self.target[at : at + size], self.source[at : at + size])
            for at in range(0, min(pieces, _MOST_PIECES) * size, size)
        ]
        return lambda index: pairs[index % len(pairs)][0].copy_(
            pairs[index % len(pairs)][1]
        )

    def streaming(self, size: int) -> Callable[[int], None]:
        """Return the same as `work`, done as the host accelerator does it."""
        places = range(0, min(len(self.source) // size, _MOST_PIECES) * size, size)
        pairs = [(self.target[at:], self.source[at:]) for at in places]
        return lambda index: streamed(*pairs[index % len(pairs)], size)


def measure_host_copies(findings: Findings, *, seconds: float) -> None:
    """Measure copies between two host memories, and hidden states on their way to the
    CPU lane and back.
    """
    pool = CopyPool(max(pool_bytes(), 4 * COPY_BYTES[-1]))
    share_s = seconds / (len(COPY_BYTES) + len(_ACTIVATION_BYTES))
    by_size = {size: sample(pool.streaming(size), share_s) for size in COPY_BYTES}
    source = "copies by one thread between written host memories, each piece in turn"
    line = fit_line(by_size)
    findings.link("h2d", by_size, line, source)
    findings.link("d2h", by_size, line, f"{source}; both directions are the same copy")

    def there_and_back(size: int) -> Callable[[int], object]:
        there = pool.work(size)
        return lambda index: (there(index), there(index + 1))

    moved = {
        2 * size: sample(there_and_back(size), share_s) for size in _ACTIVATION_BYTES
    }
    findings.line(
        "costs.activation",
        ("latency_s", "bytes_per_s"),
        fit_line(moved),
        "line through two host copies, hidden states to the CPU lane and its result"
        " back, by bytes",
    )
