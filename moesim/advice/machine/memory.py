"""Reads memory and PCIe in words: ``2x16GB DDR4-3600``, ``128 GB 8ch``, ``4.0x8``.

Rates are those of the wires. What programs reach of them is a matter of
`moesim.advice.times.priors`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moesim.advice.errors import AdviceError

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
