"""One machine as `advise` knows it: by specification, by probes, by measured rows.

Missing figures are assumed, with a wide spread; `Machine.assumed` names them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from moesim.advice.errors import AdviceError
from moesim.advice.machine.devices import (
    Graphics,
    Processor,
    SingleChip,
    graphics_cards,
    processors,
    single_chips,
)
from moesim.advice.machine.memory import (
    MemorySpec,
    measured_rate,
    parse_memory,
    parse_pcie,
    pcie_bytes_per_s,
)
from moesim.advice.machine.names import closest, count_in, find
from moesim.traces.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


class Grade(StrEnum):
    """What is known of a machine, from least to most."""

    SPEC = "spec"
    PROBED = "probed"
    OBSERVED = "observed"


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
    """

    host_read: Mapping[int, float] = field(default_factory=dict)
    link: float | None = None
    pageable: float | None = None
    device_read: float | None = None
    host_beside_link: float | None = None
    link_beside_host: float | None = None


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
        windows: the driver model of Windows is slower to launch and to page-lock.
        probes: what was measured.
        assumed: figures that nobody gave.
    """

    name: str
    processor: Processor
    memory: MemorySpec = field(default_factory=MemorySpec)
    graphics: tuple[Graphics, ...] = ()
    link_bytes_per_s: float = 0.0
    link_measured: bool = False
    unified: bool = False
    gpu_share: float = 1.0
    windows: bool = False
    probes: Probes = field(default_factory=Probes)
    assumed: tuple[str, ...] = ()

    @property
    def grade(self) -> Grade:
        """What its figures rest on before any row of measurements."""
        probed = self.probes.host_read or self.probes.device_read or self.probes.link
        return Grade.PROBED if probed else Grade.SPEC

    @property
    def host_peak_bytes_per_s(self) -> float:
        """Read rate of the filled memory channels, or the official one."""
        if self.memory.peak_bytes_per_s:
            return self.memory.peak_bytes_per_s
        return self.processor.peak_bytes_per_s

    @property
    def memory_stated(self) -> bool:
        """Tell whether somebody gave the rate of host memory."""
        return self.memory.peak_bytes_per_s is not None

    @property
    def gpu_count(self) -> int:
        """Number of cards."""
        return sum(card.count for card in self.graphics)

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
CORES_ASSUMED = f"CPU: {UNKNOWN_PROCESSOR.cores} cores, {CHANNELS_ASSUMED}"
"""What is said where the processor is not known."""

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
        lenient: assume what is unknown instead of refusing it.

    Raises:
        AdviceError: an unknown device or impossible number, unless `lenient`.
    """
    assumed: list[str] = []
    # Asked first: "M4 Max" is CPU and card in one.
    chip = _single_chip(cpu, gpu)
    if chip is not None:
        return _unified(chip, cpu or gpu or "", ram, probes, name)

    processor = _processor(cpu, assumed, lenient=lenient)
    graphics = _graphics(gpu, assumed, lenient=lenient)
    memory = parse_memory(
        ram or "", channels=processor.channels, server=processor.server
    )
    if memory.peak_bytes_per_s is None:
        assumed.append(f"host memory at the fastest official rate, {processor.memory}")

    link, link_measured = _link(pcie, processor, graphics, assumed, lenient=lenient)
    words = f"{cpu or ''} {gpu or ''}".lower()
    return Machine(
        name=name or _title(processor, graphics),
        processor=processor,
        memory=memory,
        graphics=graphics,
        link_bytes_per_s=link,
        link_measured=link_measured,
        windows="win" in words or "wddm" in words,
        probes=probes or Probes(),
        assumed=tuple(assumed),
    )


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
            return chip
    return None


def _unified(
    chip: SingleChip,
    text: str,
    ram: str | None,
    probes: Probes | None,
    name: str | None,
) -> Machine:
    memory = parse_memory(ram or text, channels=1)
    memory = replace(memory, peak_bytes_per_s=chip.bytes_per_s)
    return Machine(
        name=name or chip.processor.name,
        processor=chip.processor,
        memory=memory,
        graphics=(chip.graphics,) if chip.graphics else (),
        link_bytes_per_s=chip.bytes_per_s,
        unified=True,
        gpu_share=chip.gpu_share or 1.0,
        probes=probes or Probes(),
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
        assumed.append(CORES_ASSUMED)
        return UNKNOWN_PROCESSOR

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
    if gpu is None or gpu.strip().lower() in {"none", "no", ""}:
        return ()
    if _WORD_PAIRS.match(gpu.strip().lower()):
        return (_graphics_in_numbers(gpu),)

    cards = []
    for part in re.split(r"\s*\+\s*(?=\D)|,\s*", gpu):
        card = find(part, graphics_cards())
        if card is None and lenient:
            assumed.append(f"GPU {part!r} is not in the table")
            card = UNKNOWN_GRAPHICS
        if card is None:
            raise AdviceError(
                f"--gpu {part!r}: not among the {len(graphics_cards())} cards of the"
                f" table{closest(part, graphics_cards())}; give its numbers instead, as"
                " in --gpu 'vram=16GB,bandwidth=448GB/s,tflops=47'"
            )
        backend = next((name for name in _BACKENDS if name in part.lower()), None)
        cards.append(
            replace(card, count=count_in(part), backend=backend or card.backend)
        )
    return tuple(cards)


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
    slot = pcie_bytes_per_s(processor.pcie, 16)
    rate = min(slot, *(card.link_bytes_per_s for card in graphics))
    assumed.append(f"the card's link at {rate / 1e9:.0f} GB/s")
    return rate, False
