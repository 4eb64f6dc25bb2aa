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

_KIND = re.compile(r"(lp)?ddr(\d)x?\s*[- @]?\s*(\d{3,5})", re.IGNORECASE)
_CHANNELS = re.compile(r"(\d{1,2})\s*-?\s*ch", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*GB/s", re.IGNORECASE)
_MODULES = re.compile(
    r"(\d{1,2})\s*[x\u00d7]\s*(?:(\d+)\s*(GB|GiB)?[\s,-]*)?(?=(?:lp)?ddr|\s*$)",
    re.IGNORECASE,
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(TB|TiB|GB|GiB)(?!/s)", re.IGNORECASE)
_PCIE = re.compile(
    r"(?:pcie\s*)?(?:gen\s*)?([2-6])(?:\.0)?\s*[x\u00d7 ]+\s*(\d{1,2})", re.IGNORECASE
)

_MODULE_WIDTH_BYTES = 8
_UNITS = {"gb": 1024**3, "gib": 1024**3, "tb": 1024**4, "tib": 1024**4}


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """Host memory as somebody described it; None is what the words leave open.

    Attributes:
        size_bytes: of all modules together.
        channels: filled memory channels.
        kind: type and rate, such as ``DDR5-5600``.
        peak_bytes_per_s: stated directly, or channels x 8 bytes x rate.
    """

    size_bytes: int | None = None
    channels: int | None = None
    kind: str | None = None
    peak_bytes_per_s: float | None = None


def peak_bytes_per_s(kind: str, channels: int) -> float:
    """Return what the wires of so many channels move.

    Args:
        kind: such as ``DDR5-5600``; the number counts mega-transfers per second.
        channels: of 64 bits each.
    """
    match = _KIND.search(kind)
    if match is None:
        raise AdviceError(f"memory {kind!r}: expected a type such as DDR5-5600")
    return float(match.group(3)) * 1e6 * _MODULE_WIDTH_BYTES * channels


def parse_memory(text: str, *, channels: int, server: bool = False) -> MemorySpec:
    """Read a description of host memory.

    Args:
        text: free text, possibly with things that say nothing here.
        channels: of the CPU; two modules in one channel add no bandwidth.
        server: a server's channels may stay empty, a desktop's usually do not.
    """
    kind_match = _KIND.search(text)
    kind = None
    if kind_match:
        # LPDDR and DDR move equally much per transfer and channel.
        kind = f"DDR{kind_match.group(2)}-{kind_match.group(3)}"

    modules_match = _MODULES.search(text)
    modules = int(modules_match.group(1)) if modules_match else None

    size_bytes = None
    if modules_match and modules_match.group(2):
        unit = _UNITS[(modules_match.group(3) or "GB").lower()]
        size_bytes = int(modules_match.group(1)) * int(modules_match.group(2)) * unit
    elif size_match := _SIZE.search(text):
        size_bytes = int(
            float(size_match.group(1)) * _UNITS[size_match.group(2).lower()]
        )

    channels_match = _CHANNELS.search(text)
    if channels_match:
        # Words about channels are explicit; modules only hint at them.
        filled: int | None = int(channels_match.group(1))
    elif modules:
        filled = min(modules, channels)
    else:
        # Owners of servers often fill a part; then the count is not known.
        filled = None if server else channels

    rate_match = _RATE.search(text)
    peak = None
    if rate_match:
        peak = float(rate_match.group(1)) * 1e9
    elif kind and filled:
        peak = peak_bytes_per_s(kind, filled)
    return MemorySpec(size_bytes, filled, kind, peak)


def check_memory(text: str) -> None:
    """Refuse a description of host memory that says nothing, such as ``32``.

    Raises:
        AdviceError: neither a size with its unit, nor modules, a type or a rate.
    """
    read = parse_memory(text, channels=2)
    if read.size_bytes is None and read.peak_bytes_per_s is None:
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
