"""Intel graphics.

torch can allocate page-locked memory for them but not lock memory that is there, so
experts lie in ordinary memory and their copies are staged by the driver.
"""

from __future__ import annotations

import torch

from moesim.runtime.accelerators.accelerator import Accelerator


class Xpu(Accelerator):
    """A device that SYCL drives."""

    kind = "xpu"
    type = "xpu"

    @property
    def name(self) -> str:
        """The device's name."""
        return str(torch.xpu.get_device_name(self.device))

    @property
    def unified(self) -> bool:
        """Whether the graphics are part of the processor."""
        properties = torch.xpu.get_device_properties(self.device)
        return bool(getattr(properties, "is_integrated_gpu", False))

    def page_lock(self, memory: torch.Tensor) -> None:
        """Leave the memory as it is."""
