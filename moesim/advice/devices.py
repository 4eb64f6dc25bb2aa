"""Processors, graphics cards and single-chip machines, from tables with sources.

The tables ship as ``advice/data/*.yaml``. Figures that no maker prints are derived
from printed ones (memory bandwidth = bus width x rate); each group of rows says how.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from moesim.advice.tables import table
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Row = Mapping[str, Any]

Entry = TypeVar("Entry")

# One PCIe lane, bytes per second: 8, 16 or 32 GT/s x 128/130 / 8.
# Source: PCI Express base specification (2.0 has 5 GT/s and an 8b/10b code).
LANE_BYTES_PER_S = {2.0: 0.5e9, 3.0: 0.985e9, 4.0: 1.969e9, 5.0: 3.938e9, 6.0: 7.56e9}

_KIND = re.compile(
    r"(?:lp)?ddr(\d)x?"
    r"(?:\s*[- @,]?\s*(?:\w+ ){0,3}?@?\s*(\d{4,5})(?!\s*(?:gb|gib|mib)))?",
    re.IGNORECASE,
)
_TRANSFERS = re.compile(r"(\d{4,5})\s*(?:MT/s|MHz)", re.IGNORECASE)
_CHANNELS = re.compile(r"(\d{1,2})\s*-?\s*(?:ch\b|channel)", re.IGNORECASE)
_WRITTEN_CHANNELS = {"single": 1, "dual": 2, "quad": 4, "octa": 8}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:@\d+t)?\s*GB/s", re.IGNORECASE)
# What stands before or behind a rate that somebody measured.
_MEASURED = re.compile(
    r"meas|likwid|stream|probe|read|load|kernel|effective", re.IGNORECASE
)
_MODULES = re.compile(
    r"(\d{1,2})\s*[x\u00d7]\s*(?:(\d+)\s*(GB|GiB)?[\s,-]*)?(?=(?:lp)?ddr|\s*$|[;,)])",
    re.IGNORECASE,
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(TB|TiB|GB|GiB)(?!/s)", re.IGNORECASE)
_PCIE = re.compile(
    r"(?:pcie\s*)?(?:gen\s*)?([2-6])(?:\.0)?\s*[x\u00d7 ]+\s*(\d{1,2})", re.IGNORECASE
)

_MODULE_WIDTH_BYTES = 8
_UNITS = {"gb": 1024**3, "gib": 1024**3, "tb": 1024**4, "tib": 1024**4}

# Rate in MT/s that a person means who says "DDR4" and no more.
USUAL_RATES = {3: 1600, 4: 3200, 5: 5600}


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """Host memory as somebody described it; None is what the words leave open.

    Attributes:
        size_bytes: of all modules together.
        channels: filled memory channels.
        generation: 4 for DDR4 and LPDDR4.
        rate: mega-transfers per second.
        peak_bytes_per_s: stated directly, or channels x 8 bytes x rate.
        read_bytes_per_s: the fastest read that was measured.
    """

    size_bytes: int | None = None
    channels: int | None = None
    generation: int | None = None
    rate: int | None = None
    peak_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None


def peak_bytes_per_s(kind: str, channels: int) -> float:
    """Return what the wires of so many channels move.

    Args:
        kind: such as ``DDR5-5600``; the number counts mega-transfers per second.
        channels: of 64 bits each.
    """
    match = _KIND.search(kind)
    if match is None or match.group(2) is None:
        raise AdviceError(f"memory {kind!r}: expected a type such as DDR5-5600")
    return int(match.group(2)) * 1e6 * _MODULE_WIDTH_BYTES * channels


def generation_of(kind: str) -> int:
    """Return 5 for ``DDR5-5600``; 0 where nothing of the kind stands there."""
    match = _KIND.search(kind)
    return int(match.group(1)) if match else 0


def parse_memory(text: str, *, channels: int, server: bool = False) -> MemorySpec:
    """Read a description of host memory.

    Args:
        text: free text, possibly with things that say nothing here.
        channels: of the CPU; two modules in one channel add no bandwidth.
        server: a server's channels may stay empty, a desktop's usually do not.
    """
    kind = _KIND.search(text)
    generation = int(kind.group(1)) if kind else None
    transfers = _TRANSFERS.search(text)
    rate = None
    if transfers:
        # "DDR5 actually running 2000 MT/s"
        rate = int(transfers.group(1))
    elif kind and kind.group(2):
        rate = int(kind.group(2))

    modules_match = _MODULES.search(text)
    modules = int(modules_match.group(1)) if modules_match else None
    size_bytes = 0
    if size_match := _SIZE.search(text):
        unit = _UNITS[size_match.group(2).lower()]
        size_bytes = int(float(size_match.group(1)) * unit)
    if modules_match and modules_match.group(2):
        unit = _UNITS[(modules_match.group(3) or "GB").lower()]
        together = int(modules_match.group(1)) * int(modules_match.group(2)) * unit
        size_bytes = max(size_bytes, together)

    filled = _filled_channels(text, modules, channels, server=server)
    peak, read = _rates(text)
    if peak is None and rate and filled:
        peak = rate * 1e6 * _MODULE_WIDTH_BYTES * filled
    return MemorySpec(size_bytes or None, filled, generation, rate, peak, read)


def _filled_channels(
    text: str, modules: int | None, channels: int, *, server: bool
) -> int | None:
    # Words about channels are explicit; modules only hint at them.
    match = _CHANNELS.search(text)
    if match and "on this CPU" not in text:
        return int(match.group(1))
    written = re.search(r"(single|dual|quad|octa)[- ]channel", text, re.IGNORECASE)
    if written:
        return _WRITTEN_CHANNELS[written.group(1).lower()]
    if modules:
        return min(modules, channels)
    # Owners of servers often fill a part; then the count is not known.
    return None if server else channels


def _rates(text: str) -> tuple[float | None, float | None]:
    """Read rates in GB/s: what the wires do at most, and what somebody measured."""
    peak = read = None
    for match in _RATE.finditer(text):
        value = float(match.group(1)) * 1e9
        clause = re.split(r"[;,(]", text[: match.start()])[-1]
        behind = re.split(r"[;,)]", text[match.end() :])[0]
        if "peak" not in behind and _MEASURED.search(clause + behind):
            read = max(read or 0.0, value)
        else:
            peak = value
    return peak, read


def check_memory(text: str) -> None:
    """Refuse a description of host memory that says nothing, such as ``32``.

    Raises:
        AdviceError: neither a size with its unit, nor modules, a type or a rate.
    """
    read = parse_memory(text, channels=2)
    facts = (read.size_bytes, read.peak_bytes_per_s, read.read_bytes_per_s)
    if not any(facts):
        raise AdviceError(
            f"--ram {text!r}: expected a size with its unit, modules or a rate, as in"
            " 32GB, '2x16GB DDR4-3600' or '60 GB/s'"
        )


def pcie_bytes_per_s(generation: float, lanes: int) -> float:
    """Return the rate of a PCIe link in one direction, before protocol losses.

    Raises:
        AdviceError: no such link.
    """
    lane = LANE_BYTES_PER_S.get(generation)
    if lane is None or lanes not in (1, 2, 4, 8, 16, 32):
        raise AdviceError(
            f"PCIe {generation:g}x{lanes}: expected a generation from 2.0 to 6.0 and 1,"
            " 2, 4, 8 or 16 lanes, as in 4.0x8"
        )
    return lane * lanes


def parse_pcie(text: str) -> float | None:
    """Read ``4.0x8``, ``PCIe 5.0 x16`` or ``gen4x16``; None where it says nothing.

    Raises:
        AdviceError: a link that does not exist.
    """
    match = _PCIE.search(text)
    if match is None:
        return None
    return pcie_bytes_per_s(float(match.group(1)), int(match.group(2)))


def measured_rate(text: str) -> float | None:
    """Read ``14.5 GB/s measured`` out of a link's description, in bytes per second."""
    match = _RATE.search(text)
    return float(match.group(1)) * 1e9 if match and "meas" in text.lower() else None


GB = 1e9
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Processor:
    """A CPU by its specification.

    Attributes:
        name: as in the table, or the user's words.
        cores: performance cores.
        small_cores: efficiency cores.
        base_hz: base clock of the performance cores.
        vector: ``avx2``, ``avx512`` or ``neon``.
        channels: memory channels of one socket.
        memory: fastest official memory, such as ``DDR5-5600``.
        dies_bytes_per_s: what all compute dies can read through their links; 0 where
            no such limit is known.
        server: registered memory in many channels, of which owners fill some.
        pcie: generation of the slot for a graphics card.
        kind: ``desktop``, ``laptop``, ``workstation`` or ``server``.
        memory_also: an older generation that the same socket takes.
        sockets: processors of this kind; cores and channels are those of all.
        known: the table has it; otherwise the figures are assumed.
        source: document of the maker.
    """

    name: str
    cores: int
    small_cores: int = 0
    base_hz: float = 3.5e9
    vector: str = "avx2"
    channels: int = 2
    memory: str = "DDR5-5600"
    dies_bytes_per_s: float = 0.0
    server: bool = False
    pcie: float = 4.0
    kind: str = "desktop"
    memory_also: str = ""
    sockets: int = 1
    known: bool = True
    source: str = ""

    @property
    def peak_bytes_per_s(self) -> float:
        """Read rate of all channels filled with the fastest official memory."""
        return peak_bytes_per_s(self.memory, self.channels)

    @property
    def memory_generations(self) -> frozenset[int]:
        """DDR generations that its socket takes."""
        kinds = filter(None, (self.memory, self.memory_also))
        return frozenset(generation_of(kind) for kind in kinds)


@dataclass(frozen=True, slots=True)
class Graphics:
    """One kind of graphics card, `count` of them.

    Attributes:
        name: as in the table, or the user's words.
        vram_bytes: memory of one card.
        bytes_per_s: memory bandwidth of one card, as specified.
        flops: half-precision products of one card, FLOP/s, as specified.
        link_bytes_per_s: rate of the card's own connector, before protocol losses.
        pcie: generation of the connector.
        lanes: of the connector; 0 where the link is not PCIe.
        backend: ``cuda``, ``rocm``, ``vulkan``, ``sycl`` or ``metal``.
        card_class: ``consumer``, ``mobile``, ``server``, ``hbm`` or ``old``.
        count: cards of this kind.
        known: the table has it.
        source: document of the maker.
    """

    name: str
    vram_bytes: int
    bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    pcie: float = 4.0
    lanes: int = 0
    backend: str = "cuda"
    card_class: str = "consumer"
    count: int = 1
    known: bool = True
    source: str = ""


@dataclass(frozen=True, slots=True)
class SingleChip:
    """CPU and GPU in one chip with one memory."""

    processor: Processor
    graphics: Graphics | None
    bytes_per_s: float
    gpu_share: float


@cache
def processors() -> dict[str, Processor]:
    """Return every CPU of the table under each of its names."""
    return _by_name("cpus", _processor)


@cache
def graphics_cards() -> dict[str, Graphics]:
    """Return every graphics card of the table under each of its names."""
    return _by_name("gpus", _card)


@cache
def single_chips() -> dict[str, SingleChip]:
    """Return every machine whose CPU and GPU share one memory, under each name."""
    return _by_name("socs", _chip)


def _by_name(name: str, build: Callable[[Row], Entry]) -> dict[str, Entry]:
    """Build a table's rows, which may differ from their group in a figure or two."""
    entries: dict[str, Entry] = {}
    for group in table(name):
        for row in group[name]:
            entry = build({**group, **row})
            entries |= dict.fromkeys((row["name"], *row.get("also", ())), entry)
    return entries


def _processor(row: Row) -> Processor:
    return Processor(
        name=row["name"],
        cores=row["cores"],
        small_cores=row.get("small", 0),
        base_hz=row["base_ghz"] * 1e9,
        vector=row["vector"],
        channels=row["channels"],
        memory=row["memory"],
        dies_bytes_per_s=row.get("die_gb_s", 0) * row.get("dies", 0) * GB,
        server=row.get("server", False),
        pcie=row["pcie"],
        kind=row["kind"],
        memory_also=row.get("memory_also", ""),
        source=f"{row['source']}, {row['date']}",
    )


def _card(row: Row) -> Graphics:
    # A bus of B bits moves B / 8 bytes per transfer.
    derived = row.get("bus_bits", 0) * row.get("rate_gbps", 0) / 8
    generation, _, lanes = row["pcie"].partition("x")
    link = pcie_bytes_per_s(float(generation), int(lanes))
    return Graphics(
        name=row["name"],
        vram_bytes=row["vram_gib"] * GIB,
        bytes_per_s=row.get("bandwidth_gb_s", derived) * GB,
        flops=row["tflops"] * 1e12,
        link_bytes_per_s=row.get("link_gb_s", link / GB) * GB,
        pcie=float(generation),
        lanes=0 if "link_gb_s" in row else int(lanes),
        backend=row["backend"],
        card_class=row.get("class", "consumer"),
        source=f"{row['source']}, {row['date']}",
    )


def _chip(row: Row) -> SingleChip:
    rate = row["bandwidth_gb_s"] * GB
    processor = Processor(
        name=row["name"],
        cores=row["cores"],
        small_cores=row.get("small", 0),
        vector=row["vector"],
        source=row["source"],
    )
    # Some chips have no GPU that an engine supports.
    graphics = None
    if row["gpu_share"]:
        graphics = Graphics(
            name=row["name"],
            # The memory is the machine's; buyers choose its size.
            vram_bytes=0,
            bytes_per_s=rate,
            flops=row["tflops"] * 1e12,
            link_bytes_per_s=rate,
            backend=row["backend"],
            source=row["source"],
        )
    return SingleChip(processor, graphics, rate, row["gpu_share"])


# Makers and decorations, which people write or leave out as they like.
FILLERS = {
    "amd",
    "apple",
    "core",
    "cpu",
    "desktop",
    "founders",
    "edition",
    "geforce",
    "gpu",
    "graphics",
    "intel",
    "nvidia",
    "processor",
    "radeon",
    "r",
    "rtx",
    "rx",
    "gtx",
    "tm",
}

# Units that belong to the number before them: "16 GB" and "16GB" are the same word.
_GLUED = re.compile(r"(\d+)\s*(gb|gib|g)\b")
_COUNT = re.compile(
    # Four digits are a card's number: "2x3090".
    r"(?:^|\s)(\d{1,2})\s*[x\u00d7*]\s*(?=\D|\d{4}\b)",
    re.IGNORECASE,
)

# People and profiles write a card's maker and number as one word: "rtx4060ti".
_JOINED = re.compile(r"\b(rtx|gtx|rx)(?=\d)|(?<=\d)(?=(?:ti|super|xtx?|gre)\b)")
_COUNT_BEHIND = re.compile(r"\s[x\u00d7]\s?(\d)\b(?!\s*G)", re.IGNORECASE)


def words_of(text: str) -> tuple[str, ...]:
    """Cut a device name into lower-case words without maker names."""
    # "AI Max+" and "AI Max" are two chips, so the sign is a word.
    lowered = _GLUED.sub(r"\1gb", text.lower().replace("+", " plus "))
    lowered = _JOINED.sub(r"\1 ", _COUNT.sub(" ", lowered))
    # "E5-2650v4" is written with and without a space.
    lowered = re.sub(r"(?<=\d)(?=v\d\b)", " ", lowered)
    words = re.findall(r"[a-z0-9]+", lowered)
    return tuple(word for word in words if word not in FILLERS)


def count_in(text: str) -> int:
    """Read how many devices a text names: 2 in ``2x RTX 3090``; 1 by default."""
    if re.match(r"\s*dual\b", text, re.IGNORECASE):
        # Written-out numbers are rare; this one is common.
        return 2

    match = _COUNT.search(text) or _COUNT_BEHIND.search(text)
    return int(match.group(1)) if match else 1


def find(text: str, table: Mapping[str, Entry]) -> Entry | None:
    """Return the entry whose name stands in `text`; the longest name of several.

    Args:
        text: as a person or a tool wrote it.
        table: name -> entry; several names may lead to one entry.
    """
    # Words must follow each other, or "5060" and a stray "Ti" would match.
    present = f" {' '.join(words_of(text))} "
    best: Entry | None = None
    best_length = (0, 0)

    for name, entry in table.items():
        words = words_of(name)
        length = (len(words), len(name))
        if words and length > best_length and f" {' '.join(words)} " in present:
            best = entry
            best_length = length
    return best


def closest(text: str, names: Iterable[str]) -> str:
    """Return ``(did you mean 'X'?)`` for the most similar name, or nothing."""
    by_words = {" ".join(words_of(name)): name for name in names}
    similar = difflib.get_close_matches(" ".join(words_of(text)), by_words, n=1)
    return f" (did you mean {by_words[similar[0]]!r}?)" if similar else ""
