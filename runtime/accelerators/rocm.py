"""AMD graphics.

torch builds for ROCm keep CUDA's names: `torch.cuda` and device type ``cuda``.
"""

from __future__ import annotations

import torch

from moesim.runtime.accelerators.cuda import Cuda


class Rocm(Cuda):
    """A device that ROCm drives."""

    kind = "rocm"

    @classmethod
    def is_here(cls) -> bool:
        """Tell whether torch was built for ROCm and finds a device."""
        return torch.version.hip is not None and bool(torch.cuda.is_available())

    @property
    def driver(self) -> str:
        """ROCm's version."""
        return f"ROCm {torch.version.hip}"
