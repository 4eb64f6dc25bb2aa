"""One machine as `advise` knows it: by specification, by probes, by measured rows.

Missing figures are assumed, with a wide spread; `Machine.assumed` names them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from moesim.advice.devices import (
    GIB,
    USUAL_RATES,
    Graphics,
    MemorySpec,
    Processor,
    SingleChip,
    closest,
    count_in,
    find,
    generation_of,
    graphics_cards,
    measured_rate,
    parse_memory,
    parse_pcie,
    pcie_bytes_per_s,
    processors,
    single_chips,
)
from moesim.base.errors import AdviceError
from moesim.base.units import parse_bytes
from moesim.hwprofiles import paths
from moesim.hwprofiles.profile import HardwareProfile, load_profile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Grade(StrEnum):
    """What is known of a machine, from least to most."""

    SPEC = "spec"
    PROBED = "probed"
    OBSERVED = "observed"


LINUX = "linux"
WINDOWS = "windows"
WSL = "wsl"
SYSTEMS = (LINUX, WINDOWS, WSL)

# Share of host memory that a driver locks at most. Source: Windows lends its drivers
# half of it (15 GB refused beside an RTX 5080 in 2026, GGML_CUDA_NO_PINNED=1 goes on
# without); WSL2 has half of it and refused 14.8 GB of 24.
PAGE_LOCKED_SHARE = {LINUX: 1.0, WINDOWS: 0.5, WSL: 0.25}
# Share of the PC's memory that WSL2 takes without a `.wslconfig`.
WSL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Probes:
    """Rates that were measured on the machine, bytes per second.

    Attributes:
        host_read: threads -> what reading host memory alone reaches.
        link: page-locked copies to the GPU.
        pageable: the same from ordinary memory.
        device_read: what reading the GPU's memory reaches.
        host_beside_link: CPU reads while a copy runs.
        link_beside_host: the copy meanwhile.
        both: sum of the two, where only that is known.
    """

    host_read: Mapping[int, float] = field(default_factory=dict)
    link: float | None = None
    pageable: float | None = None
    device_read: float | None = None
    host_beside_link: float | None = None
    link_beside_host: float | None = None
    both: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A PC that shall run a model.

    Attributes:
        name: in answers.
        processor: its CPU.
        memory: its host memory, as described.
        graphics: its cards; empty for a machine that computes on the CPU alone.
        link_bytes_per_s: PCIe in the slot, before protocol losses.
        link_measured: the figure above is what copies really reach.
        unified: CPU and GPU share one memory; nothing crosses a link.
        gpu_share: part of unified memory that the GPU may use.
        system: one of `SYSTEMS`.
        probes: what was measured.
        assumed: figures that nobody gave.
        devices: numbers of the cards in use, where others are left out.
    """

    name: str
    processor: Processor
    memory: MemorySpec = field(default_factory=MemorySpec)
    graphics: tuple[Graphics, ...] = ()
    link_bytes_per_s: float = 0.0
    link_measured: bool = False
    unified: bool = False
    gpu_share: float = 1.0
    system: str = LINUX
    probes: Probes = field(default_factory=Probes)
    assumed: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    @property
    def grade(self) -> Grade:
        """What its figures rest on before any row of measurements."""
        probed = self.probes.host_read or self.probes.device_read or self.probes.link
        return Grade.PROBED if probed else Grade.SPEC

    @property
    def windows(self) -> bool:
        """Tell whether a driver of Windows moves graphics memory to the host behind a
        program's back.
        """
        return self.system != LINUX

    @property
    def most_page_locked_bytes(self) -> float:
        """Host memory that drivers lock for copies at most."""
        return (self.memory.size_bytes or math.inf) * PAGE_LOCKED_SHARE[self.system]

    @property
    def host_peak_bytes_per_s(self) -> float:
        """Read rate of the filled memory channels, or what is usual for them."""
        memory = self.memory
        if memory.peak_bytes_per_s:
            return memory.peak_bytes_per_s
        channels = memory.channels or self.processor.channels
        official = self.processor.peak_bytes_per_s / self.processor.channels * channels
        if memory.rate:
            return memory.rate * 8e6 * channels
        if memory.generation is None:
            return official
        # Owners name the generation alone and mean its usual modules; makers of laptops
        # and servers fit no faster ones than the processor officially takes.
        usual = USUAL_RATES.get(memory.generation, 5600) * 8e6 * channels
        official_generation = generation_of(self.processor.memory)
        same = memory.generation == official_generation and self.processor.known
        built = self.processor.server or self.processor.kind == "laptop"
        return min(official, usual) if same and built else usual

    @property
    def memory_stated(self) -> bool:
        """Tell whether somebody gave the rate of host memory."""
        return self.memory.peak_bytes_per_s is not None

    @property
    def generation_open(self) -> bool:
        """Tell whether nobody said which of two generations the memory is."""
        known = self.memory.generation or self.memory_stated
        return not known and len(self.processor.memory_generations) > 1

    @property
    def gpu_count(self) -> int:
        """Number of cards."""
        return sum(card.count for card in self.graphics)

    @property
    def single_cards(self) -> tuple[Graphics, ...]:
        """Every card on its own, in the order of their names."""
        return tuple(
            replace(card, count=1) if card.count > 1 else card
            for card in self.graphics
            for _ in range(card.count)
        )

    def with_cards(self, devices: tuple[int, ...]) -> Machine:
        """Return the machine with some of its cards only, by number."""
        cards = self.single_cards
        return replace(
            self,
            graphics=tuple(cards[at] for at in devices),
            devices=() if len(devices) == len(cards) else devices,
        )

    @property
    def vram_bytes(self) -> int:
        """Memory of all cards, or the GPU's share of a unified memory."""
        if self.unified:
            return round((self.memory.size_bytes or 0) * self.gpu_share)
        return sum(card.vram_bytes * card.count for card in self.graphics)

    @property
    def backend(self) -> str:
        """What computes on the GPU; ``none`` without one."""
        return self.graphics[0].backend if self.graphics else "none"

    @property
    def device_bytes_per_s(self) -> float:
        """Memory bandwidth of the cards as specified; layers run one after another.

        Cards of different kinds share the layers by their memory.
        """
        total = sum(card.vram_bytes * card.count for card in self.graphics)
        if not total:
            return self.graphics[0].bytes_per_s if self.graphics else 0.0
        seconds = sum(
            card.vram_bytes * card.count / card.bytes_per_s for card in self.graphics
        )
        return total / seconds

    @property
    def device_flops(self) -> float:
        """Half-precision rate of the slowest card, as specified."""
        # Layers run one after another, so the slowest card sets the pace.
        return min((card.flops for card in self.graphics), default=0.0)


_BACKENDS = ("cuda", "rocm", "vulkan", "sycl", "metal")
_WORD_PAIRS = re.compile(r"^[a-z_]+\s*=")
UNKNOWN_PROCESSOR = Processor(
    name="unknown desktop CPU", cores=8, known=False, source="assumed"
)
CHANNELS_ASSUMED = "two memory channels"
CORES_ASSUMED = f"CPU: as many cores as -t says, {CHANNELS_ASSUMED}"
"""What is said where the processor is not known."""

SIZE_ASSUMED = "memory that holds everything: say its size, as in --ram 128GB"

UNKNOWN_GRAPHICS = Graphics(
    name="unknown GPU",
    vram_bytes=24 * 1024**3,
    bytes_per_s=700e9,
    flops=80e12,
    link_bytes_per_s=pcie_bytes_per_s(4.0, 16),
    known=False,
    source="assumed",
)


def describe_machine(
    *,
    cpu: str | None = None,
    ram: str | None = None,
    gpu: str | None = None,
    pcie: str | None = None,
    probes: Probes | None = None,
    name: str | None = None,
    system: str | None = None,
    lenient: bool = False,
) -> Machine:
    """Build a machine from the words of a person or a table.

    Args:
        cpu: name in the table, or numbers as in ``cores=8,ghz=3.6``.
        ram: such as ``2x16GB DDR4-3600``.
        gpu: name in the table, ``2x NAME``, ``none``, or numbers as in
            ``vram=16GB,bandwidth=448GB/s,tflops=47``.
        pcie: such as ``4.0x8``; default: what card and CPU can do.
        probes: measured rates.
        name: in answers.
        system: one of `SYSTEMS`, for WSL with its memory, as in ``wsl 24GB``; default:
            what the other words say.
        lenient: assume what is unknown instead of refusing it.

    Raises:
        AdviceError: an unknown device or impossible number, unless `lenient`.
    """
    assumed: list[str] = []
    # Asked first: "M4 Max" is CPU and card in one.
    words = f"{cpu or ''} {gpu or ''}".lower()
    system_words = system or (WINDOWS if "win" in words or "wddm" in words else LINUX)
    chip = _single_chip(cpu, gpu)
    if chip is not None:
        return _on_system(_unified(chip, words, ram, probes, name), system_words)

    processor = _processor(cpu, assumed, lenient=lenient)
    graphics = _graphics(gpu, assumed, lenient=lenient)
    if not processor.known and processor.source == "assumed":
        processor = _as_old_as(graphics, processor)
    memory = parse_memory(
        ram or "", channels=processor.channels, server=processor.server
    )
    _check_generation(processor, memory, lenient=lenient)
    if memory.peak_bytes_per_s is None and memory.read_bytes_per_s is None:
        assumed.append(_assumed_memory(processor, memory))
    if memory.read_bytes_per_s and probes is None:
        probes = Probes(host_read={processor.cores: memory.read_bytes_per_s})

    link, link_measured = _link(pcie, processor, graphics, assumed, lenient=lenient)
    machine = Machine(
        name=name or _title(processor, graphics),
        processor=processor,
        memory=memory,
        graphics=graphics,
        link_bytes_per_s=link,
        link_measured=link_measured,
        probes=probes or Probes(),
        assumed=tuple(assumed),
    )
    return _on_system(machine, system_words)


def _on_system(machine: Machine, text: str) -> Machine:
    """Take an operating system's limits into account.

    Raises:
        AdviceError: an unknown one, or memory of WSL that is none.
    """
    system, _, stated = text.strip().lower().replace("=", " ").partition(" ")
    if system not in SYSTEMS or (stated and system != WSL):
        raise AdviceError(
            f"--os {text!r}: expected {', '.join(SYSTEMS)}, or WSL with its memory, as"
            " in 'wsl 24GB'"
        )
    machine = replace(machine, system=system)
    if system != WSL:
        return machine
    size = machine.memory.size_bytes
    given = parse_memory(stated, channels=1).size_bytes
    if stated and given is None:
        raise AdviceError(f"--os {text!r}: expected a size, as in 'wsl 24GB'")
    if given is None and size is not None:
        given = round(WSL_SHARE * size)
        words = (
            f"WSL has half of the memory, {given / 1024**3:.0f} GiB: say what"
            " .wslconfig gives it, as in --os 'wsl 24GB'"
        )
        machine = replace(machine, assumed=(*machine.assumed, words))
    return replace(machine, memory=replace(machine.memory, size_bytes=given))


def _check_generation(
    processor: Processor, memory: MemorySpec, *, lenient: bool
) -> None:
    """Refuse memory that does not fit into the processor's socket."""
    takes = processor.memory_generations
    if lenient or not processor.known or memory.generation in {None, *takes}:
        return
    kinds = " or ".join(f"DDR{generation}" for generation in sorted(takes))
    raise AdviceError(
        f"--ram: DDR{memory.generation} does not fit {processor.name}, which takes"
        f" {kinds}; is the processor or the memory another one?"
    )


def _assumed_memory(processor: Processor, memory: MemorySpec) -> str:
    if memory.generation is not None and memory.rate is None:
        usual = USUAL_RATES.get(memory.generation, 5600)
        return f"host memory at the usual rate, DDR{memory.generation}-{usual}"
    if memory.generation is None and processor.memory_also:
        return (
            f"host memory between {processor.memory_also} and {processor.memory}: say"
            " which with --ram, as in '2x16GB DDR4-3200'"
        )
    return f"host memory at the fastest official rate, {processor.memory}"


def _title(processor: Processor, graphics: tuple[Graphics, ...]) -> str:
    cards = [
        f"{card.count}x {card.name}" if card.count > 1 else card.name
        for card in graphics
    ]
    return " + ".join([processor.name, *cards])


def _single_chip(cpu: str | None, gpu: str | None) -> SingleChip | None:
    """Find a chip with unified memory, unless a separate card is named beside it."""
    table = single_chips()
    for text in (cpu, gpu):
        chip = find(text, table) if text else None
        # A laptop chip beside a card of its own is used as a CPU only.
        separate = gpu and find(gpu, graphics_cards())
        if chip and not separate:
            return replace(chip, graphics=None) if _says_none(gpu) else chip
    return None


def _says_none(gpu: str | None) -> bool:
    return (gpu or "").strip().lower() in {"none", "no", "cpu", "cpu only"}


def _unified(
    chip: SingleChip,
    text: str,
    ram: str | None,
    probes: Probes | None,
    name: str | None,
) -> Machine:
    memory = parse_memory(ram or text, channels=1)
    # Soldered memory is as wide as the chip; modules, which some take, are slower.
    words = "" if "lpddr" in (ram or "").lower() else ram or ""
    slower = parse_memory(words, channels=chip.processor.channels).peak_bytes_per_s
    rate = min(chip.bytes_per_s, slower or chip.bytes_per_s)
    memory = replace(memory, peak_bytes_per_s=rate, channels=None)
    graphics = chip.graphics
    if graphics is not None:
        backend = next((each for each in _BACKENDS if each in text.lower()), None)
        graphics = replace(
            graphics, bytes_per_s=rate, backend=backend or graphics.backend
        )
    return Machine(
        name=name or chip.processor.name,
        processor=chip.processor,
        memory=memory,
        graphics=(graphics,) if graphics else (),
        link_bytes_per_s=rate,
        unified=True,
        gpu_share=chip.gpu_share or 1.0,
        probes=probes or Probes(),
        assumed=() if memory.size_bytes else (SIZE_ASSUMED,),
    )


def _processor(cpu: str | None, assumed: list[str], *, lenient: bool) -> Processor:
    if cpu and _WORD_PAIRS.match(cpu.strip().lower()):
        return _processor_in_numbers(cpu)

    processor = find(cpu, processors()) if cpu else None
    if processor is None:
        if cpu and not lenient:
            raise AdviceError(
                f"--cpu {cpu!r}: not among the {len(processors())} CPUs of the table"
                f"{closest(cpu, processors())}; give its numbers instead, as in --cpu"
                " 'cores=8,ghz=3.6' --ram '2x16GB DDR4-3200'"
            )
        return _unknown_processor(cpu or "", assumed)

    # A virtual machine says how many of the host's hyperthreads it got.
    virtual = re.search(r"(\d+)\s*vcpu", cpu or "", re.IGNORECASE)
    if virtual:
        return replace(processor, cores=max(1, int(virtual.group(1)) // 2))

    sockets = count_in(cpu or "")
    if sockets > 1:
        return replace(
            processor,
            name=f"{sockets}x {processor.name}",
            cores=processor.cores * sockets,
            channels=processor.channels * sockets,
            sockets=sockets,
            dies_bytes_per_s=processor.dies_bytes_per_s * sockets,
        )
    return processor


def _unknown_processor(text: str, assumed: list[str]) -> Processor:
    """Take cores and kind out of words that name no processor of the table."""
    processor = UNKNOWN_PROCESSOR
    if re.search(r"epyc|xeon|server|cloud", text, re.IGNORECASE):
        processor = replace(
            processor, name="unknown server CPU", server=True, kind="server", channels=8
        )
    elif re.search(r"laptop|mobile", text, re.IGNORECASE):
        processor = replace(processor, name="unknown laptop CPU", kind="laptop")
    cores = re.search(r"(\d+)\s*(?:P-)?(?:cores?\b|C\b)", text, re.IGNORECASE)
    threads = re.search(r"(\d+)\s*threads", text, re.IGNORECASE)
    if cores:
        processor = replace(processor, cores=int(cores.group(1)))
    elif threads:
        processor = replace(processor, cores=max(1, int(threads.group(1)) // 2))
    else:
        assumed.append(CORES_ASSUMED)
    return processor


def _as_old_as(graphics: tuple[Graphics, ...], processor: Processor) -> Processor:
    """Take an unknown desktop for as old as its card."""
    if not graphics or processor.server:
        return processor
    pcie = max(card.pcie for card in graphics)
    if pcie <= 3.0:
        # Core i7-6700 of 2015, i7-8700 of 2017: each a year before the cards of GTX 10
        # and RTX 20 (Intel ARK).
        old = all(card.card_class == "old" for card in graphics)
        memory = "DDR4-2133" if old else "DDR4-2667"
        return replace(processor, memory=memory, cores=min(6, processor.cores))
    if pcie <= 4.0:
        return replace(processor, memory="DDR5-4000")
    return processor


def _processor_in_numbers(text: str) -> Processor:
    words = _words(text, "--cpu", ("cores", "small", "ghz", "channels", "vector"))
    cores = int(_positive(words.get("cores", "8"), "--cpu cores"))
    return Processor(
        name=f"{cores}-core CPU",
        cores=cores,
        small_cores=int(float(words.get("small", "0"))),
        base_hz=_positive(words.get("ghz", "3.5"), "--cpu ghz") * 1e9,
        vector=words.get("vector", "avx2"),
        channels=int(_positive(words.get("channels", "2"), "--cpu channels")),
        known=False,
        source="given",
    )


def _graphics(
    gpu: str | None, assumed: list[str], *, lenient: bool
) -> tuple[Graphics, ...]:
    if not (gpu or "").strip() or _says_none(gpu):
        return ()
    assert gpu is not None
    if _WORD_PAIRS.match(gpu.strip().lower()):
        return (_graphics_in_numbers(gpu),)

    cards: list[Graphics] = []
    unknown: list[Graphics] = []
    # A comma may stand before the memory of the same card.
    for part in re.split(r"\s*\+\s*(?=\D)|,(?!\s*\d+ ?Gi?B?\b)\s*", gpu):
        card = find(part, graphics_cards())
        if card is None and lenient:
            unknown.append(replace(UNKNOWN_GRAPHICS, count=count_in(part)))
            continue
        if card is None:
            raise AdviceError(
                f"--gpu {part!r}: not among the {len(graphics_cards())} cards of the"
                f" table{closest(part, graphics_cards())}; give its numbers instead, as"
                " in --gpu 'vram=16GB,bandwidth=448GB/s,tflops=47'"
            )
        backend = next((name for name in _BACKENDS if name in part.lower()), None)
        if not lenient:
            card = _with_stated_memory(card, part, assumed)
        cards.append(
            replace(card, count=count_in(part), backend=backend or card.backend)
        )
    if not cards:
        assumed.append(f"GPU {gpu!r} is not in the table")
    # Free text goes on after a card's name: "RTX 5070, 175 W cap".
    return tuple(cards or unknown[:1])


_CARD_SIZE = re.compile(r"(?<![\d.])(\d+)\s*(MiB|GiB|GB|G)\b(?!/s)", re.IGNORECASE)
# Workshops put chips of twice or four times the size on a board.
CHANGED_MEMORY = (2, 4)


def _with_stated_memory(card: Graphics, text: str, assumed: list[str]) -> Graphics:
    """Return the card with the memory that the user states for it.

    Raises:
        AdviceError: a size that such a card cannot have.
    """
    match = _CARD_SIZE.search(text)
    if match is None:
        return card
    stated = int(match.group(1)) * (1024**2 if match.group(2).lower() == "mib" else GIB)
    # Tools print what the driver leaves of it.
    stated = GIB * round(stated / GIB)
    variants = _variants(card)
    for variant in variants:
        if variant.vram_bytes == stated:
            return variant
    if stated == count_in(text) * card.vram_bytes:
        assumed.append(f"{stated // GIB} GB are those of all {count_in(text)} cards")
        return card
    if stated not in {factor * card.vram_bytes for factor in CHANGED_MEMORY}:
        sizes = sorted({variant.vram_bytes // GIB for variant in variants})
        raise AdviceError(
            f"--gpu {text!r}: {_MEMORY_SUFFIX.sub('', card.name)} has"
            f" {' or '.join(map(str, sizes))} GB, changed ones {2 * sizes[-1]} or"
            f" {4 * sizes[-1]}; give another card's numbers instead, as in --gpu"
            f" 'vram={stated // GIB}GB,bandwidth=448GB/s,tflops=47'"
        )
    name = f"{_MEMORY_SUFFIX.sub('', card.name)} {stated // GIB}GB"
    assumed.append(f"{name}: as fast as the {card.vram_bytes // GIB} GB card")
    return replace(card, name=name, vram_bytes=stated)


def _variants(card: Graphics) -> list[Graphics]:
    """Cards of the same name with any memory."""
    base = _MEMORY_SUFFIX.sub("", card.name)
    return [
        other
        for other in graphics_cards().values()
        if _MEMORY_SUFFIX.sub("", other.name) == base
    ]


def _graphics_in_numbers(text: str) -> Graphics:
    words = _words(text, "--gpu", ("vram", "bandwidth", "tflops", "pcie", "backend"))
    # Without these two nothing can be said; all else has a fair default.
    for needed in ("vram", "bandwidth"):
        if needed not in words:
            raise AdviceError(
                f"--gpu {text!r}: expected {needed}=…, as in"
                " vram=16GB,bandwidth=448GB/s,tflops=47"
            )
    rate = words["bandwidth"].lower().removesuffix("/s").removesuffix("gb")
    bandwidth = _positive(rate, "--gpu bandwidth") * 1e9
    try:
        # People say GB of graphics memory and mean GiB.
        vram = parse_bytes(
            words["vram"].upper().replace("GB", "GIB"), where="--gpu vram"
        )
    except ValueError as error:
        raise AdviceError(str(error)) from None
    if vram <= 0:
        raise AdviceError(
            f"--gpu vram: expected more than 0 bytes, got {words['vram']}"
        )

    # Without a stated rate: cards of the last years do about 80 FLOP per byte read.
    flops = bandwidth * 80
    if "tflops" in words:
        flops = _positive(words["tflops"], "--gpu tflops") * 1e12
    # No lanes are kept: what the user states is the rate in the slot.
    link = parse_pcie(words.get("pcie", "")) or pcie_bytes_per_s(4.0, 16)
    return Graphics(
        name=f"GPU with {words['vram']}",
        vram_bytes=vram,
        bytes_per_s=bandwidth,
        flops=flops,
        link_bytes_per_s=link,
        backend=words.get("backend", "cuda"),
        known=False,
        source="given",
    )


def _words(text: str, option: str, known: tuple[str, ...]) -> dict[str, str]:
    words = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key.lower() not in known:
            raise AdviceError(
                f"{option} {text!r}: unknown word {part.strip()!r}; known:"
                f" {', '.join(f'{word}=…' for word in known)}"
            )
        words[key.lower()] = value
    return words


def _positive(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise AdviceError(f"{where}: expected a number, got {text!r}") from None
    # Also refuses "nan", which compares as false.
    if not 0 < value < 1e6:
        raise AdviceError(f"{where}: expected a number above 0, got {text}")
    return value


def _link(
    pcie: str | None,
    processor: Processor,
    graphics: tuple[Graphics, ...],
    assumed: list[str],
    *,
    lenient: bool,
) -> tuple[float, bool]:
    """Return the link's rate, and whether it is what copies really reach."""
    if not graphics:
        return 0.0, False
    if pcie and (measured := measured_rate(pcie)):
        return measured, True
    if pcie and (stated := parse_pcie(pcie)):
        return stated, False

    if pcie and not lenient:
        raise AdviceError(
            f"--pcie {pcie!r}: expected generation and lanes, as in 4.0x8, or a rate"
            " that was measured, as in '13.5 GB/s measured'"
        )

    # A card in a slot of an older generation runs at the slot's rate.
    rate = min(_slot_rate(card, processor) for card in graphics)
    assumed.append(f"the card's link at {rate / 1e9:.0f} GB/s")
    return rate, False


def _slot_rate(card: Graphics, processor: Processor) -> float:
    """Rate of a card's lanes at the generation that card and slot both have.

    A card with eight lanes keeps eight in a slot of sixteen: half of an older
    generation's rate for sixteen.
    """
    if not card.lanes:
        return card.link_bytes_per_s
    return pcie_bytes_per_s(min(card.pcie, processor.pcie), card.lanes)


_MEMORY_SUFFIX = re.compile(r" \d+GB$")
_READ = re.compile(r"probes\.host_read\.(\d+)\.bytes_per_s")


def machine_of_profile(
    path: Path,
    *,
    cpu: str | None = None,
    ram: str | None = None,
    gpu: str | None = None,
    pcie: str | None = None,
    system: str | None = None,
) -> Machine:
    """Describe a machine by its profile; words of the user add what it does not say.

    Args:
        path: a TOML file, or the name of a profile that ships.
        cpu: as in `describe_machine`; default: read from the profile's description.
        ram: as in `describe_machine`.
        gpu: as in `describe_machine`; default: read from the description.
        pcie: as in `describe_machine`.

    Raises:
        ProfileError: no such profile.
        AdviceError: words that name no device.
    """
    profile = load_profile(str(path))
    text = profile.description
    # A description is a sentence; only the devices that it names are taken from it.
    card = _card_in(profile) if profile.accelerator == "cuda" else None
    named = find(text, processors())
    machine = describe_machine(
        cpu=cpu or (named.name if named else text),
        ram=ram,
        gpu=gpu or (card.name if card else None),
        pcie=pcie,
        probes=probes_of(profile),
        name=profile.name,
        system=system,
        lenient=True,
    )
    if cpu is None and not machine.processor.known:
        processor = replace(machine.processor, cores=profile.cores)
        # A measured rate needs no guess about modules and channels.
        assumed = () if machine.probes.host_read else machine.assumed
        # The profile states its cores.
        assumed = tuple(
            f"CPU: {CHANNELS_ASSUMED}" if words == CORES_ASSUMED else words
            for words in assumed
        )
        machine = replace(machine, processor=processor, assumed=assumed)
    return machine


def _card_in(profile: HardwareProfile) -> Graphics | None:
    """Find the card that a description names, in the variant with enough memory.

    Descriptions leave out "16GB"; what the profile grants to experts must fit.
    """
    card = find(profile.description, graphics_cards())
    if card is None:
        return None
    needed = profile.number(paths.GPU_BYTES)
    variants = [other for other in _variants(card) if other.vram_bytes >= needed]
    return min(variants, key=lambda each: each.vram_bytes, default=card)


def probes_of(profile: HardwareProfile) -> Probes:
    """Return the measured rates of a profile; empty where it is not measured.

    Profiles from before the probes existed still hold what experts and copies reached,
    which is close to it.
    """
    if profile.kind != "measured":
        return Probes()

    reads = {}
    for name, quantity in profile.numbers.items():
        match = _READ.fullmatch(name)
        if match:
            reads[int(match.group(1))] = quantity.value
    if not reads:
        # Experts read their weights once: nearly a probe, if a slow one.
        reads[profile.cpu_threads] = profile.number("costs.cpu.bytes_per_s")

    # The host accelerator's copies do not cross a link.
    cuda = profile.accelerator == "cuda"
    return Probes(
        host_read=reads,
        link=_first(profile, paths.LINK_PAGE_LOCKED, "costs.h2d.bytes_per_s")
        if cuda
        else None,
        pageable=_first(profile, paths.LINK_PAGEABLE),
        device_read=_first(profile, paths.DEVICE_READ),
        host_beside_link=_first(profile, paths.HOST_BESIDE_LINK),
        link_beside_host=_first(profile, paths.LINK_BESIDE_HOST),
    )


def _first(profile: HardwareProfile, *names: str) -> float | None:
    # The first one is the better source.
    for name in names:
        if name in profile.numbers:
            return profile.numbers[name].value
    return None
