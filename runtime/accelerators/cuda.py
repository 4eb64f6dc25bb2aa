"""NVIDIA cards.

CUDA's own events let a waiting thread sleep, which those of `torch.accelerator` do not.
Its runtime locks memory where it lies; torch's allocator of page-locked memory would
round every size up to a power of two.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from moesim.runtime.accelerators.accelerator import Accelerator
from moesim.runtime.errors import RuntimeFault

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked in the eyes of every GPU."""


class Cuda(Accelerator):
    """A card that CUDA drives."""

    kind = "cuda"
    type = "cuda"

    @classmethod
    def is_here(cls) -> bool:
        """Tell whether torch was built for CUDA and finds a card."""
        return torch.version.hip is None and bool(torch.cuda.is_available())

    @property
    def name(self) -> str:
        """The card's name."""
        return str(torch.cuda.get_device_name(self.device))

    @property
    def driver(self) -> str:
        """CUDA's version."""
        return f"CUDA {torch.version.cuda}"

    @property
    def total_bytes(self) -> int:
        """Memory of the card."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def unified(self) -> bool:
        """Whether the graphics are part of the processor, as on a GB10."""
        properties = torch.cuda.get_device_properties(self.device)
        return bool(getattr(properties, "is_integrated", False))

    def current_stream(self) -> Any:
        """The stream on which torch launches what this thread computes."""
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> Any:
        """Another stream, which waits for no other by itself."""
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on a stream within the block."""
        return torch.cuda.stream(stream)

    def event(self, *, asleep: bool = True) -> Any:
        """An event that is timed, waited for asleep or awake."""
        return torch.cuda.Event(enable_timing=True, blocking=asleep)

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        torch.cuda.synchronize(self.device)

    def page_lock(self, memory: torch.Tensor) -> None:
        """Lock exactly as much as there is.

        Raises:
            RuntimeFault: there is no card to lock it for, or the system refuses.
        """
        gib = memory.numel() / 2**30
        if not torch.cuda.is_available():
            raise RuntimeFault(
                f"cannot page-lock {gib:.2f} GiB of host memory: there is no CUDA"
                " device to lock it for"
            )
        code = torch.cuda.cudart().cudaHostRegister(
            memory.data_ptr(), memory.numel(), _PORTABLE
        )
        if int(code) != 0:
            with contextlib.suppress(RuntimeError, AssertionError):
                # CUDA reports this failure again at the next launch: let that be this
                # one.
                torch.zeros(1, device=self.type)
            raise RuntimeFault(
                f"cannot page-lock {gib:.2f} GiB of host memory: CUDA error"
                f" {int(code)}; ask for less host memory, or raise the limit"
                " (`ulimit -l`)"
            )

    def page_unlock(self, memory: torch.Tensor) -> None:
        """Let CUDA forget the pages before the kernel hands them to others."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
