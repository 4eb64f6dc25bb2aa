"""Processors, graphics cards and single-chip machines, from tables with sources.

The tables ship as ``advice/data/*.yaml``. Figures that no maker prints are derived
from printed ones (memory bandwidth = bus width x rate); each group of rows says how.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from moesim.advice.machine.memory import (
    generation_of,
    pcie_bytes_per_s,
    peak_bytes_per_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
    table: dict[str, Processor] = {}

    for group in _groups("cpus"):
        for row in group["cpus"]:
            # A row may differ from its series in a figure or two.
            both = {**group, **row}
            die_rate = both.get("die_gb_s", 0) * both.get("dies", 0) * GB
            processor = Processor(
                name=row["name"],
                cores=row["cores"],
                small_cores=row.get("small", 0),
                base_hz=row["base_ghz"] * 1e9,
                vector=both["vector"],
                channels=both["channels"],
                memory=both["memory"],
                dies_bytes_per_s=die_rate,
                server=both.get("server", False),
                pcie=both["pcie"],
                kind=both["kind"],
                memory_also=both.get("memory_also", ""),
                source=f"{group['source']}, {group['date']}",
            )
            for name in (row["name"], *row.get("also", ())):
                table[name] = processor
    return table


@cache
def graphics_cards() -> dict[str, Graphics]:
    """Return every graphics card of the table under each of its names."""
    table: dict[str, Graphics] = {}

    for group in _groups("gpus"):
        for row in group["gpus"]:
            # A bus of B bits moves B / 8 bytes per transfer.
            derived = row.get("bus_bits", 0) * row.get("rate_gbps", 0) / 8
            generation, _, lanes = row["pcie"].partition("x")
            both = {**group, **row}
            link = pcie_bytes_per_s(float(generation), int(lanes))
            card = Graphics(
                name=row["name"],
                vram_bytes=row["vram_gib"] * GIB,
                bytes_per_s=row.get("bandwidth_gb_s", derived) * GB,
                flops=row["tflops"] * 1e12,
                link_bytes_per_s=row.get("link_gb_s", link / GB) * GB,
                pcie=float(generation),
                lanes=0 if "link_gb_s" in row else int(lanes),
                backend=group["backend"],
                card_class=both.get("class", "consumer"),
                source=f"{group['source']}, {group['date']}",
            )
            for name in (row["name"], *row.get("also", ())):
                table[name] = card
    return table


@cache
def single_chips() -> dict[str, SingleChip]:
    """Return every machine whose CPU and GPU share one memory, under each name."""
    table: dict[str, SingleChip] = {}

    for group in _groups("socs"):
        for row in group["socs"]:
            rate = row["bandwidth_gb_s"] * GB
            processor = Processor(
                name=row["name"],
                cores=row["cores"],
                small_cores=row.get("small", 0),
                vector=group["vector"],
                source=group["source"],
            )
            # Some chips have no GPU that an engine supports.
            graphics = None
            if group["gpu_share"]:
                graphics = Graphics(
                    name=row["name"],
                    # The memory is the machine's; buyers choose its size.
                    vram_bytes=0,
                    bytes_per_s=rate,
                    flops=row["tflops"] * 1e12,
                    link_bytes_per_s=rate,
                    backend=group["backend"],
                    source=group["source"],
                )
            chip = SingleChip(processor, graphics, rate, group["gpu_share"])
            for name in (row["name"], *row.get("also", ())):
                table[name] = chip
    return table


def _groups(name: str) -> list[dict[str, Any]]:
    folder = resources.files("moesim.advice").joinpath("data")
    text = folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    groups: list[dict[str, Any]] = yaml.load(text, Loader=_LOADER)  # noqa: S506 # safe, in C or in Python
    return groups


# The loader in C reads the tables ten times as fast, where libyaml is there.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


Entry = TypeVar("Entry")

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
    present = words_of(text)
    best: Entry | None = None
    best_length = (0, 0)

    for name, entry in table.items():
        words = words_of(name)
        length = (len(words), len(name))
        if words and length > best_length and _stands_in(words, present):
            best = entry
            best_length = length
    return best


def _stands_in(words: tuple[str, ...], present: tuple[str, ...]) -> bool:
    # Words must follow each other, or "5060" and a stray "Ti" would match.
    starts = range(len(present) - len(words) + 1)
    return any(present[start : start + len(words)] == words for start in starts)


def closest(text: str, names: Iterable[str]) -> str:
    """Return ``(did you mean 'X'?)`` for the most similar name, or nothing."""
    by_words = {" ".join(words_of(name)): name for name in names}
    similar = difflib.get_close_matches(" ".join(words_of(text)), by_words, n=1)
    return f" (did you mean {by_words[similar[0]]!r}?)" if similar else ""
