"""Apple's graphics, which share the processor's memory.

Metal has no page-locked memory, and torch gives one stream. What torch puts on the
device is memory of its own all the same, so experts are still copied there, within one
memory.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from moesim.runtime.accelerators.accelerator import Accelerator


class Mps(Accelerator):
    """Graphics of an Apple chip."""

    kind = "mps"
    type = "mps"
    page_locks = False

    @property
    def name(self) -> str:
        """The chip."""
        return f"{platform.processor() or 'Apple'} graphics"

    @property
    def driver(self) -> str:
        """The system, of which Metal is a part."""
        return f"macOS {platform.mac_ver()[0]}"

    @property
    def total_bytes(self) -> int:
        """Memory that Metal advises a process to take at most."""
        return int(torch.mps.recommended_max_memory())

    @property
    def unified(self) -> bool:
        """Always."""
        return True

    def new_stream(self) -> Any:
        """The only stream there is."""
        return self.current_stream()

    def page_lock(self, memory: torch.Tensor) -> None:
        """Leave the memory as it is."""
