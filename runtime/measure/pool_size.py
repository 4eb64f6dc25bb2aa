"""How much memory a measurement must cycle through, so that caches do not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

_DEFAULT_CACHE_BYTES: Final = 64 << 20
_CACHE_FOLDER: Final = Path("/sys/devices/system/cpu/cpu0/cache")


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


def pool_bytes(experts_bytes: int = 0) -> int:
    """Bytes that a measurement cycles through: four caches, two experts at least, an
    eighth of free memory at most.
    """
    caches_bytes = 4 * last_level_cache_bytes()
    limit_bytes = int(psutil.virtual_memory().available) // 8
    return max(min(caches_bytes, limit_bytes), 2 * experts_bytes)
