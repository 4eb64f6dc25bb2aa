"""Accelerators as the runtime uses them (streams, events, page-locked memory), and the
kinds of devices that torch knows.

`torch.accelerator` answers for every device of torch. A class for each kind says where
it differs: CUDA's own events let a waiting thread sleep, its runtime locks memory where
it lies; ROCm keeps CUDA's names; Intel's graphics copy through the driver's staging;
Apple's share the processor's memory.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from moesim.base.errors import RuntimeFault
from moesim.base.host import available_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Collection
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
    def cache_bytes(self) -> int:
        """Most that its last cache can be; torch does not say how large it is."""
        return 256 << 20

    @property
    def unified(self) -> bool:
        """True if the device computes from the host's own memory."""
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
        """Keep the pages of host memory in place, so that the device copies by itself;
        where torch has no call for that, leave them as they are.

        Raises:
            RuntimeFault: they cannot be locked.
        """

    def page_unlock(self, memory: torch.Tensor) -> None:
        """Let go of pages that `page_lock` keeps."""

    def page_locked_like(self, values: torch.Tensor) -> torch.Tensor:
        """Return unwritten page-locked host memory for values of this shape."""
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=self.page_locks)

    def page_locked(self, values: torch.Tensor) -> torch.Tensor:
        """Return host values in page-locked memory; copies of them wait for nobody."""
        return values.pin_memory() if self.page_locks else values


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
    def cache_bytes(self) -> int:
        """The second-level cache."""
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    @property
    def unified(self) -> bool:
        """True if the graphics are part of the processor, as on a GB10."""
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
        """Let CUDA forget the pages before the kernel hands them to others.

        An interrupt may come between the launch of a copy and the wait for it, and
        torch follows the copies of such pages no more than of any that it has not
        allocated: so what was launched ends first.
        """
        torch.cuda.synchronize(self.device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


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

    @property
    def cache_bytes(self) -> int:
        """The second-level cache, and AMD's Infinity Cache behind it, which torch does
        not know: 256 MiB at most.
        """
        return super().cache_bytes + (256 << 20)


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
        """True if the graphics are part of the processor."""
        properties = torch.xpu.get_device_properties(self.device)
        return bool(getattr(properties, "is_integrated_gpu", False))


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


class HostEvent:
    """A moment on the host's clock: what was launched before is over by then."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self, stream: Any) -> None:
        """Stand for now."""
        del stream
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Tell that it is over."""
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        """Return the milliseconds until a later one."""
        return 1e3 * (later._at_s - self._at_s)


class Host(Accelerator):
    """The host as its own accelerator, on which all is done when it is launched."""

    kind = "host"
    type = "cpu"
    page_locks = False

    @classmethod
    def is_here(cls) -> bool:
        """Always."""
        return True

    @classmethod
    def count(cls) -> int:
        """One."""
        return 1

    @property
    def name(self) -> str:
        """What it is."""
        return "host accelerator"

    @property
    def total_bytes(self) -> int:
        """Free memory of the host."""
        return available_memory_bytes()

    @property
    def cache_bytes(self) -> int:
        """All caches of the cores that this process may use."""
        return caches_bytes()

    def current_stream(self) -> Any:
        """The only stream there is."""
        return torch.cpu.current_stream()

    def new_stream(self) -> Any:
        """The same."""
        return torch.cpu.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Compute as ever."""
        return contextlib.nullcontext(stream)

    def event(self, *, asleep: bool = True) -> HostEvent:
        """A moment on the host's clock."""
        del asleep
        return HostEvent()

    def synchronize(self) -> None:
        """Wait for nothing."""


class Rehearsal(Host):
    """What drives a card runs on the host, and says nothing about one."""

    @property
    def cache_bytes(self) -> int:
        """As little as shows that pools are cycled through."""
        return 8 << 20


HOST: Final = Host()

KNOWN: Final[tuple[type[Accelerator], ...]] = (Cuda, Rocm, Xpu, Mps)
"""In the order in which they are looked for."""


def accelerator_here() -> Accelerator | None:
    """The first device of the first kind that torch finds, None without any."""
    return next((known() for known in KNOWN if known.is_here()), None)


_UNKNOWN_CACHES_BYTES: Final = 128 << 20
"""Taken where the system does not tell: more than most processors that people own
have.
"""
_CPU_FOLDER: Final = Path("/sys/devices/system/cpu")


def all_caches_bytes(cores: Collection[int] | None = None) -> int | None:
    """Add up the data caches of cores; None where the kernel does not say.

    A cache that several of them share counts once; instructions hold no weights.

    Args:
        cores: numbers of cores; None for all.
    """
    sizes: dict[tuple[str, str], int] = {}
    for folder in _CPU_FOLDER.glob("cpu[0-9]*/cache/index*"):
        core = int(folder.parents[1].name.removeprefix("cpu"))
        if cores is not None and core not in cores:
            continue
        try:
            kind, size, level, sharing = (
                (folder / name).read_text(encoding="ascii").strip()
                for name in ("type", "size", "level", "shared_cpu_list")
            )
        # Some kernels, and most containers on ARM, list caches without sizes.
        except OSError:
            continue
        # The kernel writes KiB, such as "32768K".
        if kind != "Instruction" and size[:-1].isdigit() and size.endswith("K"):
            sizes[level, sharing] = int(size[:-1]) << 10
    return sum(sizes.values()) or None


def caches_bytes() -> int:
    """Bytes that the caches of the cores that this process may use hold together."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return all_caches_bytes(cores) or _UNKNOWN_CACHES_BYTES
