"""Settings worth predicting: those that fit, over layers, micro-batches and formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesim.advice.plan.memory import MemoryBill, memory_bill
from moesim.advice.times.setting import ALL_LAYERS, DEFAULT_BATCH, Setting

if TYPE_CHECKING:
    from moesim.advice.machine.machine import Machine
    from moesim.advice.model.contents import ModelContents

MICRO_BATCHES = (512, 1024, 2048, 4096)
KV_FORMATS = ("f16", "q8_0")

# Bytes per cell when layers are chosen to fill graphics memory.
CELL_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Job:
    """What shall be done with the model.

    Attributes:
        context: tokens that the key-value cache holds.
        prompt: tokens read.
        answer: tokens made.
        keep_vram_bytes: graphics memory to leave to others.
        keep_ram_bytes: host memory to leave to others.
        sequences: requests at the same time.
    """

    context: int = 8192
    prompt: int = 2048
    answer: int = 512
    keep_vram_bytes: int = 256 * 1024**2
    keep_ram_bytes: int = 0
    sequences: int = 1

    @property
    def mean_depth(self) -> float:
        """Mean context while the answer is made."""
        return self.prompt + self.answer / 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting with its bill of memory."""

    setting: Setting
    bill: MemoryBill


def bill_of(
    model: ModelContents, machine: Machine, setting: Setting, job: Job
) -> MemoryBill:
    """Return the bill of a setting for a job."""
    return memory_bill(
        model,
        machine,
        setting,
        job.context,
        keep_vram_bytes=job.keep_vram_bytes,
        keep_ram_bytes=job.keep_ram_bytes,
        sequences=job.sequences,
    )


def candidates(model: ModelContents, machine: Machine, job: Job) -> list[Candidate]:
    """Return every setting that fits.

    Layers go from none on the CPU to all; where even that is too much for the cards,
    whole layers leave them. A machine without a card has one setting.
    """
    base = Setting(
        sequences=job.sequences,
        page_locked=page_locks(model, machine, job),
        random_tokens=False,
    )
    fitting = []
    for setting in _places(model, machine, job, base):
        # Larger ones read faster but take memory from experts.
        for micro_batch in MICRO_BATCHES:
            for kv_format in KV_FORMATS:
                wider = replace(
                    setting,
                    micro_batch=micro_batch,
                    batch=max(DEFAULT_BATCH, micro_batch),
                    kv_format=kv_format,
                )
                bill = bill_of(model, machine, wider, job)
                if bill.fits:
                    fitting.append(Candidate(wider, bill))
    return fitting


def page_locks(model: ModelContents, machine: Machine, job: Job) -> bool:
    """Tell whether weights are loaded into page-locked memory (``--no-mmap``).

    That needs room for all host weights at once; a mapped file does not.
    """
    free = machine.memory.size_bytes
    if free is None:
        return True
    return model.file_bytes < free - max(job.keep_ram_bytes, 3 * 1024**3)


def _places(
    model: ModelContents, machine: Machine, job: Job, base: Setting
) -> list[Setting]:
    """Settings over where layers lie."""
    if not machine.graphics:
        return [replace(base, gpu_layers=0)]

    last = max(model.moe_layers, default=-1) + 1
    counts = range(last + 1)
    if machine.unified:
        # Both processors read the same memory; the GPU is never slower at it.
        counts = range(1)
    places = [replace(base, cpu_layers=count) for count in counts]

    packed = packed_layers(model, machine, job, base)
    if packed is not None:
        places.append(replace(base, chosen_layers=packed, cpu_layers=0))

    # Only then do whole layers leave the card: attention there is dear.
    everything = replace(base, cpu_layers=ALL_LAYERS)
    if not bill_of(model, machine, everything, job).fits:
        total = len(model.layers)
        places += [
            replace(everything, gpu_layers=count) for count in range(total, -1, -1)
        ]
    return places


def packed_layers(
    model: ModelContents, machine: Machine, job: Job, base: Setting
) -> frozenset[int] | None:
    """Choose the layers on the CPU such that graphics memory is filled best.

    Layers of one file differ where quantisation recipes give some more bits; taking the
    first N then wastes up to a layer. None where no choice moves more bytes than that.
    """
    sizes = {at: model.layers[at].expert_bytes for at in model.moe_layers}
    # Equal layers: which N is all the same.
    if len(set(sizes.values())) < 2 or machine.unified:
        return None

    nothing = bill_of(model, machine, replace(base, cpu_layers=ALL_LAYERS), job)
    room = nothing.gpu_left
    if room <= 0 or room >= sum(sizes.values()):
        return None

    kept = _fullest(sizes, int(room // CELL_BYTES))
    first_n = _bytes_with_first_layers_away(sizes, room)
    smallest = min(sizes.values())
    if sum(sizes[at] for at in kept) - first_n < smallest / 4:
        return None
    return frozenset(sizes) - kept


def _fullest(sizes: dict[int, int], cells: int) -> frozenset[int]:
    """Return the subset with the most bytes that fits (subset sum by cells)."""
    best: list[frozenset[int] | None] = [None] * (cells + 1)
    best[0] = frozenset()
    for at, size in sizes.items():
        # Rounded up, so that the choice fits in bytes too.
        width = -(-size // CELL_BYTES)
        for place in range(cells - width, -1, -1):
            before = best[place]
            if before is not None and best[place + width] is None:
                best[place + width] = before | {at}
    return next(choice for choice in reversed(best) if choice is not None)


def _bytes_with_first_layers_away(sizes: dict[int, int], room: float) -> int:
    """Bytes that stay on the GPU when the first N layers leave, for the least N."""
    total = sum(sizes.values())
    for at in sorted(sizes):
        if total <= room:
            break
        total -= sizes[at]
    return total
