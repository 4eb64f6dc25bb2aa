"""What the runtime asks of an accelerator: streams, events, page-locked memory.

`torch.accelerator` answers for every device of torch. A file beside this one says where
one of them differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from moesim.runtime.errors import RuntimeFault

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Accelerator:
    """One device of torch.

    Args:
        index: which, where there are several of its type.

    Attributes:
        kind: the accelerator that a hardware profile names.
        type: torch's name of such devices.
        device: this one.
        page_locks: whether copies run beside other work only from page-locked host
            memory.
    """

    kind: ClassVar[str]
    type: ClassVar[str]
    page_locks: ClassVar[bool] = True

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device(self.type, index)

    @classmethod
    def is_here(cls) -> bool:
        """Tell whether torch can use such a device on this machine."""
        if not torch.accelerator.is_available():
            return False
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == cls.type

    @classmethod
    def count(cls) -> int:
        """Count the devices of this kind."""
        return int(torch.accelerator.device_count()) if cls.is_here() else 0

    @property
    def name(self) -> str:
        """The device as its driver names it."""
        return self.type

    @property
    def driver(self) -> str:
        """Version of what torch was built for, as far as it says."""
        return torch.__version__

    @property
    def total_bytes(self) -> int:
        """Memory that the device has."""
        _, total = torch.accelerator.get_memory_info(self.device)
        return int(total)

    @property
    def unified(self) -> bool:
        """Whether the device computes from the host's own memory."""
        return False

    # -- streams and events -----------------------------------------------------------

    def current_stream(self) -> Any:
        """The stream on which torch launches what this thread computes."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> Any:
        """Another stream."""
        return torch.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on a stream within the block."""
        return stream

    def event(self, *, asleep: bool = True) -> Any:
        """An event that is timed.

        Args:
            asleep: whoever waits for it leaves the core to others, where the device
                can tell.
        """
        del asleep
        return torch.Event(self.device, enable_timing=True)

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        torch.accelerator.synchronize(self.device)

    # -- page-locked memory -----------------------------------------------------------

    def page_lock(self, memory: torch.Tensor) -> None:
        """Keep the pages of host memory in place, so that the device copies by itself.

        Raises:
            RuntimeFault: they cannot be locked.
        """
        gib = memory.numel() / 2**30
        raise RuntimeFault(
            f"cannot page-lock {gib:.2f} GiB of host memory: torch has no call for"
            f" {self.type} that locks memory in place"
        )

    def page_unlock(self, memory: torch.Tensor) -> None:
        """Let go of pages that `page_lock` keeps."""

    def page_locked_like(self, values: torch.Tensor) -> torch.Tensor:
        """Return unwritten page-locked host memory for values of this shape."""
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=self.page_locks)

    def page_locked(self, values: torch.Tensor) -> torch.Tensor:
        """Return host values in page-locked memory; copies of them wait for nobody."""
        return values.pin_memory() if self.page_locks else values
