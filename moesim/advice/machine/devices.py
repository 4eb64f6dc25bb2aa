"""Processors, graphics cards and single-chip machines, from tables with sources.

The tables ship as ``advice/data/*.yaml``. Figures that no maker prints are derived
from printed ones (memory bandwidth = bus width x rate); each group of rows says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from moesim.advice.machine.memory import pcie_bytes_per_s, peak_bytes_per_s

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
    sockets: int = 1
    known: bool = True
    source: str = ""

    @property
    def peak_bytes_per_s(self) -> float:
        """Read rate of all channels filled with the fastest official memory."""
        return peak_bytes_per_s(self.memory, self.channels)


@dataclass(frozen=True, slots=True)
class Graphics:
    """One kind of graphics card, `count` of them.

    Attributes:
        name: as in the table, or the user's words.
        vram_bytes: memory of one card.
        bytes_per_s: memory bandwidth of one card, as specified.
        flops: half-precision products of one card, FLOP/s, as specified.
        link_bytes_per_s: PCIe rate of the card's own connector, before protocol losses.
        backend: ``cuda``, ``rocm``, ``vulkan``, ``sycl`` or ``metal``.
        count: cards of this kind.
        known: the table has it.
        source: document of the maker.
    """

    name: str
    vram_bytes: int
    bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    backend: str = "cuda"
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
                source=group["source"],
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
            card = Graphics(
                name=row["name"],
                vram_bytes=row["vram_gib"] * GIB,
                bytes_per_s=row.get("bandwidth_gb_s", derived) * GB,
                flops=row["tflops"] * 1e12,
                link_bytes_per_s=pcie_bytes_per_s(float(generation), int(lanes)),
                backend=group["backend"],
                source=group["source"],
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
