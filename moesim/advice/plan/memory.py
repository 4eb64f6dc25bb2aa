"""The bill of memory: what a setting puts into graphics memory and host memory.

Weights and key-value entries are exact; compute buffers follow llama.cpp's graph
allocator as far as its largest tensors go. Beyond the *cliff* a driver moves graphics
memory into host memory behind the engine's back, and speed falls several times.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from moesim.advice.model.contents import F16_BYTES
from moesim.advice.times.work import (
    ALL_LAYERS,
    DEFAULT_BATCH,
    KV_SHARES,
    LAZY,
    Setting,
)
from moesim.runs.memory import ACTIVATION_BYTES, CONTEXT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents


MIB = 1024**2
GIB = 1024**3

TABLES = "look-up tables"
"""Of a bill: what a token reads a few rows of."""

# What a desktop shows on the card that also drives the screen.
SCREEN_BYTES = {"linux": 300 * MIB, "windows": 1200 * MIB}
# Graphics memory that is never free for programs: page tables; on Windows the part
# that its memory manager keeps back before it moves buffers into host memory.
UNUSABLE_SHARE = {"linux": 0.015, "windows": 0.06}
# Program, vocabulary, graphs and threads of the engine in host memory.
PROGRAM_BYTES = 600 * MIB
# An operating system with a desktop and little else.
SYSTEM_BYTES = 3 * GIB


# Tensors of T x H values that are alive at once: before the experts of the first layer,
# in a layer beside what each expert reads and makes of its tokens, and at the outputs.
# Source: as `compute_buffers`.
LIVE_BEFORE_EXPERTS = 10
LIVE_IN_LAYER = 3
LIVE_AT_OUTPUTS = 3
# With less of the experts in the page cache an answer would take minutes.
LEAST_CACHED = 0.25
# Halvings of the headroom while layers are parted among cards: to a few MiB.
SPLIT_STEPS = 14
# How far such a bill may be off: fragments, another build's buffers; and where bytes
# follow from a shape, a share of the weights.
UNCERTAIN_BYTES = 160 * MIB
UNCERTAIN_SHARE = 0.015


@dataclass(frozen=True, slots=True)
class CardBill:
    """Graphics memory of one card.

    Attributes:
        name: of the card.
        layers: that it holds.
        needed: bytes.
        free: bytes that programs may use.
    """

    name: str
    layers: int
    needed: float
    free: float

    @property
    def left(self) -> float:
        """Headroom before it spills to host memory; negative beyond."""
        return self.free - self.needed


@dataclass(frozen=True, slots=True)
class MemoryBill:
    """Bytes that one setting needs, and what there is.

    Attributes:
        gpu: item -> bytes in graphics memory.
        host: item -> bytes in host memory.
        host_free: host memory that programs may use; None unknown.
        cards: of each card, in order; empty without one.
        layers: bytes of each layer on the cards, the output head as the last one:
            llama.cpp counts it as one more when it parts layers among cards.
        shared: both are one memory.
        uncertain: how far the bytes of one card may be off.
        file: item -> bytes that stay in the file, read as they are asked for.
    """

    gpu: dict[str, float]
    host: dict[str, float]
    host_free: float | None
    cards: tuple[CardBill, ...] = ()
    layers: tuple[float, ...] = ()
    shared: bool = False
    uncertain: float = UNCERTAIN_BYTES
    file: dict[str, float] = field(default_factory=dict)

    @property
    def gpu_bytes(self) -> float:
        """All of graphics memory."""
        return sum(self.gpu.values())

    @property
    def gpu_free(self) -> float:
        """Graphics memory that programs may use; 0 without a GPU."""
        return sum(card.free for card in self.cards)

    @property
    def host_bytes(self) -> float:
        """All of host memory."""
        return sum(self.host.values())

    @property
    def gpu_left(self) -> float:
        """Headroom before a card spills to host memory; negative beyond."""
        return min((card.left for card in self.cards), default=-self.gpu_bytes)

    @property
    def host_left(self) -> float | None:
        """Host memory to spare; None where its size is not known."""
        if self.host_free is None:
            return None
        # On one memory the GPU's bytes are taken from the host's.
        needed = self.host_bytes + (self.gpu_bytes if self.shared else 0)
        return self.host_free - needed

    @property
    def fits(self) -> bool:
        """Tell whether both memories hold what they shall."""
        host_left = self.host_left
        return self.gpu_left >= 0 and (host_left is None or host_left >= 0)

    @property
    def pages(self) -> bool:
        """Tell whether experts are read from the SSD, and everything else fits."""
        if self.host_free is None or self.shared or self.gpu_left < 0:
            return False
        experts = self.host["experts"]
        room = self.host_free - (self.host_bytes - experts)
        return LEAST_CACHED * experts < room < experts

    @property
    def safe(self) -> bool:
        """Tell whether it fits even where the bill is off as far as it may be."""
        fits = self.fits or self.pages
        return fits and (not self.cards or self.gpu_left >= self.uncertain)


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
        micro_batch: ``-ub``; None tries the usual ones.
        beside: item -> bytes on the first card of what runs beside the model, such as
            a projector of pictures or a draft model.
    """

    context: int = 8192
    prompt: int = 2048
    answer: int = 512
    keep_vram_bytes: int = 256 * MIB
    keep_ram_bytes: int = 0
    sequences: int = 1
    micro_batch: int | None = None
    beside: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_depth(self) -> float:
        """Mean context while the answer is made."""
        return self.prompt + self.answer / 2


def bill_of(
    model: ModelContents, machine: Machine, setting: Setting, job: Job
) -> MemoryBill:
    """Add up what a setting needs for a job."""
    count = len(model.layers)
    on_card = np.arange(count) >= setting.first_gpu_layer(model)
    experts_on_card = np.ones(count, np.bool_)
    experts_on_card[list(setting.on_host(model))] = False
    # Keys and values lie where their layer runs.
    kept_on_card = on_card & (not setting.kv_on_host)
    items = ("dense weights", "experts", "keys and values")
    is_on_card = np.array([on_card, experts_on_card, kept_on_card])
    micro_batch = min(setting.micro_batch, setting.batch)
    stored = _stored(model, setting.kv_format, job.context, micro_batch)
    stored = stored * [[1], [1], [job.sequences]]
    on_cards = np.where(is_on_card, stored, 0.0)
    gpu = dict(zip(items, on_cards.sum(axis=1).tolist(), strict=True))
    others = (stored - on_cards).sum(axis=1).tolist()
    host = {"embeddings": float(model.embed_bytes)}
    host |= zip(items, others, strict=True)
    layers = on_cards.sum(axis=0)[on_card].tolist()
    (gpu if setting.head_on_gpu else host)["dense weights"] += model.head_bytes
    if setting.head_on_gpu:
        layers.append(float(model.head_bytes))
    host["program"] = PROGRAM_BYTES
    file: dict[str, float] = {}
    if model.table_bytes:
        (file if setting.tables == LAZY else host)[TABLES] = model.table_bytes

    cards: list[CardBill] = []
    if machine.graphics:
        free = cards_free(machine, job)
        own_bytes = card_bytes(model, setting, job)
        # Each card has buffers of its own.
        gpu["compute buffers"] = (own_bytes - CONTEXT_BYTES) * len(free)
        gpu["driver"] = CONTEXT_BYTES * len(free)
        gpu |= job.beside
        counts = setting.split or even_split(len(layers), free)
        beside = sum(job.beside.values())
        start = 0
        for card, room, count in zip(machine.single_cards, free, counts, strict=True):
            needed = sum(layers[start : start + count]) + own_bytes + beside
            cards.append(CardBill(card.name, count, needed, room + beside))
            start += count
            beside = 0.0

    size = machine.memory.size_bytes
    computed = UNCERTAIN_SHARE if model.source == "shapes" else 0.0
    largest = max((card.needed for card in cards), default=0.0)
    return MemoryBill(
        gpu=gpu,
        host=host,
        host_free=None
        if size is None
        else size - max(job.keep_ram_bytes, SYSTEM_BYTES),
        cards=tuple(cards),
        layers=tuple(layers),
        shared=machine.unified,
        uncertain=UNCERTAIN_BYTES + computed * largest,
        file=file,
    )


def cards_free(machine: Machine, job: Job) -> list[float]:
    """Return the bytes that the model may use by card; the first has the screen, and
    what runs beside the model.
    """
    taken = job.keep_vram_bytes + sum(job.beside.values())
    if machine.unified:
        return [(float(machine.vram_bytes) or math.inf) - taken]
    system = "windows" if machine.windows else "linux"
    taken += SCREEN_BYTES[system]
    free = []
    for card in machine.single_cards:
        free.append(card.vram_bytes * (1 - UNUSABLE_SHARE[system]) - taken)
        taken = 0
    return free


def card_bytes(model: ModelContents, setting: Setting, job: Job) -> float:
    """Return what every card holds besides layers: buffers, and the driver's own."""
    return CONTEXT_BYTES + compute_buffers(model, setting, job.context)


def even_split(layers: int, free: Sequence[float]) -> tuple[int, ...]:
    """Return how many layers each card gets without ``-ts``: by its free memory.

    Source: llama.cpp places layer i of n on the first card whose cumulated share of
    free memory exceeds i / n (`llama_model::load_tensors`, upper_bound).
    """
    total = sum(free)
    counts = [0] * len(free)
    for at in range(layers):
        summed = 0.0
        for card, each in enumerate(free):
            summed += each / total
            if at / layers < summed or card == len(free) - 1:
                counts[card] += 1
                break
    return tuple(counts)


def best_split(
    needs: Sequence[float], free: Sequence[float], own_bytes: float
) -> tuple[int, ...] | None:
    """Part layers among cards such that the fullest card keeps most headroom.

    Args:
        needs: bytes of each layer, in order; cards take layers one after another.
        free: bytes of each card.
        own_bytes: buffers and driver on every card.

    Returns:
        Layers of each card; None where nothing fits.
    """
    low = 0.0
    high = max(free)
    best = _filled(needs, free, own_bytes)
    if best is None:
        return None
    for _ in range(SPLIT_STEPS):
        margin = (low + high) / 2
        counts = _filled(needs, [each - margin for each in free], own_bytes)
        if counts is None:
            high = margin
        else:
            low = margin
            best = counts
    return best


def _filled(
    needs: Sequence[float], free: Sequence[float], own_bytes: float
) -> tuple[int, ...] | None:
    """Fill one card after the other; None where layers are left over."""
    counts = []
    at = 0
    for each in free:
        room = each - own_bytes
        count = 0
        while at < len(needs) and needs[at] <= room:
            room -= needs[at]
            at += 1
            count += 1
        counts.append(count)
    return tuple(counts) if at == len(needs) else None


# Candidates differ in where the same bytes lie.
@lru_cache(maxsize=64)
def _stored(
    model: ModelContents, kv_format: str, context_tokens: int, micro_batch: int
) -> np.ndarray:
    """Bytes of weights, experts, and what is kept of one sequence, float64 [3, L]."""
    columns = model.columns
    kept = model.kv_cache_bytes(context_tokens, micro_batch)
    kept = KV_SHARES.get(kv_format, 1.0) * kept
    kept = kept + columns["state_bytes"] + columns["waiting_bytes"]
    return np.array([columns["dense_bytes"], columns["expert_bytes"], kept])


def compute_buffers(
    model: ModelContents, setting: Setting, context_tokens: int
) -> float:
    """Largest live tensors of one micro-batch on one card, with flash attention.

    llama.cpp reserves a worst-case graph. It is largest in one of three places: where
    the mask of attention was just made, in single and in half precision; in a layer,
    with the mask, the one expert tensor that is being uploaded, and what each expert
    reads and makes of its tokens, or what latent attention makes of its queries
    (DeepSeek-V3: 394 MiB for 336 of these); or at the outputs of a whole micro-batch.
    These take the place of the last upload, unless layers follow whose experts are on
    the card (gpt-oss-120b: 933 MiB for 393 of outputs and 538 of one tensor).

    Since June 2026 llama-server makes the mask in half precision and reserves outputs
    of one token per request, so it needs less than this at large micro-batches.

    Source: buffers that llama.cpp logged, in ``tests/advice/logged_memory.yaml``.
    """
    tokens = min(setting.micro_batch, setting.batch)
    hidden_bytes = max(model.hidden, 2048) * tokens * ACTIVATION_BYTES
    outputs = 0.0
    if model.hidden:
        vocabulary = model.head_weights / model.hidden
        outputs = vocabulary * tokens * ACTIVATION_BYTES
    on_host = setting.on_host(model)
    experts = max((model.layers[at].expert_bytes for at in on_host), default=0)
    upload = experts / 3  # up, gate and down one after another
    top_k = int(model.columns["top_k"].max())
    queries = int(model.columns["latent_values"].max())
    cells = context_tokens * tokens

    with_masks = cells * (ACTIVATION_BYTES + F16_BYTES)
    with_masks += LIVE_BEFORE_EXPERTS * hidden_bytes
    at_experts = upload + 2 * top_k * hidden_bytes
    in_layer = max(at_experts, queries * tokens * ACTIVATION_BYTES)
    in_layer += cells * F16_BYTES + LIVE_IN_LAYER * hidden_bytes
    at_outputs = outputs + LIVE_AT_OUTPUTS * hidden_bytes
    if upload > outputs and model.moe_layers[-1] not in on_host:
        at_outputs += upload
    return max(with_masks, in_layer, at_outputs)


MICRO_BATCHES = (512, 1024, 2048, 4096)
KV_FORMATS = ("f16", "q8_0")

# Bytes per cell when layers are chosen to fill graphics memory.
CELL_BYTES = 16 * MIB


# Neighbours of the fastest setting that are worth showing, and their micro-batches.
MOST_FITTING = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting with its bill of memory."""

    setting: Setting
    bill: MemoryBill


def candidates(model: ModelContents, machine: Machine, job: Job) -> list[Candidate]:
    """Return every setting that fits.

    Layers go from none on the CPU to all; where even that is too much for the cards,
    whole layers leave them. A machine without a card has one setting.
    """
    base = Setting(sequences=job.sequences, random_tokens=False)
    fitting = []
    paging = []
    sizes = (job.micro_batch,) if job.micro_batch else MICRO_BATCHES
    places = _places(model, machine, job, base)
    # Larger micro-batches read faster but take memory from experts.
    for micro_batch, kv_format in itertools.product(sizes, KV_FORMATS):
        fitting_count = 0
        for setting in places:
            # Each layer that leaves a card costs alike: only the ends can be best.
            if fitting_count >= MOST_FITTING and setting is not places[-1]:
                continue
            wider = replace(
                setting,
                micro_batch=micro_batch,
                batch=max(DEFAULT_BATCH, micro_batch),
                kv_format=kv_format,
            )
            if machine.gpu_count > 1:
                wider = with_split(model, machine, wider, job)
            candidate = loaded(model, machine, wider, job)
            if candidate.bill.fits:
                fitting_count += 1
                fitting.append(candidate)
            elif candidate.bill.pages:
                paging.append(candidate)
    # Experts may stay in the file and be read through the page cache.
    return fitting or paging


def loaded(
    model: ModelContents, machine: Machine, setting: Setting, job: Job
) -> Candidate:
    """Load what a setting leaves to the host as memory allows.

    Host weights are read into buffers (``--load-mode none``) if they fit, whatever the
    file holds besides; look-up tables are read with them, as only a mapped file is read
    row by row. Buffers are page-locked as far as the system lets them.
    """
    bill = bill_of(model, machine, setting, job)
    buffers = bill.host_bytes - PROGRAM_BYTES
    locked = bill.fits and buffers <= machine.most_page_locked_bytes
    setting = replace(setting, mapped=not bill.fits, page_locked=locked)
    if bill.fits or not model.table_bytes:
        return Candidate(setting, bill)
    setting = replace(setting, tables=LAZY)
    return Candidate(setting, bill_of(model, machine, setting, job))


def advisable(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Return what may stand first: far enough from spilling, answers unchanged.

    Rounded keys and values change answers, so the choice is the user's.
    """
    safe = [each for each in fitting if each.bill.safe] or list(fitting)
    return [each for each in safe if each.setting.kv_format == "f16"] or safe


def placed_as(setting: Setting, other: Setting) -> Setting:
    """Return a setting whose layers lie where another one's do."""
    return replace(
        setting,
        cpu_layers=other.cpu_layers,
        chosen_layers=other.chosen_layers,
        gpu_layers=other.gpu_layers,
        split=other.split,
    )


def with_split(
    model: ModelContents, machine: Machine, setting: Setting, job: Job
) -> Setting:
    """Return a setting with the layers of each card (``-ts``) that fill them evenly.

    Without it llama.cpp parts layers by number, and those whose experts are on the
    processor leave one card empty and another too full.
    """
    layers = bill_of(model, machine, setting, job).layers
    own_bytes = card_bytes(model, setting, job)
    counts = best_split(layers, cards_free(machine, job), own_bytes)
    return setting if counts is None else replace(setting, split=counts)


def _places(
    model: ModelContents, machine: Machine, job: Job, base: Setting
) -> list[Setting]:
    """Settings over where layers lie."""
    if not machine.graphics:
        return [replace(base, gpu_layers=0)]

    if machine.unified:
        # Both processors read one memory: a split gains no bandwidth and pays for the
        # hand-over in every layer.
        return [base, replace(base, gpu_layers=0)]

    last = max(model.moe_layers, default=-1) + 1
    counts = range(last + 1)
    places = [replace(base, cpu_layers=count) for count in counts]

    packed = packed_layers(model, machine, job, base)
    if packed is not None:
        places.insert(0, replace(base, chosen_layers=packed, cpu_layers=0))

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
    if len(set(sizes.values())) < 2:
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
