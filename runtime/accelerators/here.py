"""Which accelerator this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moesim.runtime.accelerators.cuda import Cuda
from moesim.runtime.accelerators.mps import Mps
from moesim.runtime.accelerators.rocm import Rocm
from moesim.runtime.accelerators.xpu import Xpu

if TYPE_CHECKING:
    from moesim.runtime.accelerators.accelerator import Accelerator

KNOWN: Final[tuple[type[Accelerator], ...]] = (Cuda, Rocm, Xpu, Mps)
"""In the order in which they are looked for."""


def accelerator_here() -> Accelerator | None:
    """The first device of the first kind that torch finds, None without any."""
    return next((known() for known in KNOWN if known.is_here()), None)
