"""How much memory a measurement must cycle through, so that caches do not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

_DEFAULT_CACHE_BYTES: Final = 64 << 20
_CPU_FOLDER: Final = Path("/sys/devices/system/cpu")
_CACHE_FOLDER: Final = _CPU_FOLDER / "cpu0" / "cache"


def last_level_cache_bytes() -> int:
    """Ask the kernel for the largest cache of core 0; 64 MiB where it does not say."""
    texts = [path.read_text().strip() for path in _CACHE_FOLDER.glob("index*/size")]
    # The kernel writes KiB, such as "32768K".
    sizes = [
        int(text[:-1]) << 10
        for text in texts
        if text.endswith("K") and text[:-1].isdigit()
    ]
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def all_caches_bytes() -> int | None:
    """Add up the data caches of all cores; None where the kernel does not say.

    A cache that cores share counts once; instructions hold no weights.
    """
    sizes: dict[tuple[str, str], int] = {}
    for folder in _CPU_FOLDER.glob("cpu[0-9]*/cache/index*"):
        kind = (folder / "type").read_text().strip()
        text = (folder / "size").read_text().strip()
        if kind == "Instruction" or not text.endswith("K"):
            continue
        level = (folder / "level").read_text().strip()
        sharing = (folder / "shared_cpu_list").read_text().strip()
        sizes[level, sharing] = int(text[:-1]) << 10
    return sum(sizes.values()) or None


def pool_bytes(experts_bytes: int = 0) -> int:
    """Bytes that a measurement cycles through: four caches, two experts at least, an
    eighth of free memory at most.
    """
    caches_bytes = 4 * last_level_cache_bytes()
    limit_bytes = int(psutil.virtual_memory().available) // 8
    return max(min(caches_bytes, limit_bytes), 2 * experts_bytes)
