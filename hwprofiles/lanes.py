"""Kinds of lanes: everything of a machine that can be busy, listed once.

A *lane* does one kind of work at a time: it computes experts, moves their weights, or
plans. A lane is called like its kind, followed by the number of the GPU where each GPU
has such a lane: ``cpu``, ``h2d0``.

The table below is the only list of kinds. Profile, simulator, runtime and calibration
take from it what they need to know of a kind. A new kind is one more entry here, the
operation that uses it, and a cost in `moesim.hwprofiles.costs` if it has one of its
own (docs/how-to/extending.md shows one).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from moesim.hwprofiles import paths

_DIGITS = "0123456789"

Accelerator = Literal["cuda", "rocm", "xpu", "mps", "host"]
WorkUnit = Literal["tokens", "bytes", "experts"]


class LaneKind(NamedTuple):
    """Properties that all lanes of one kind share.

    Attributes:
        name: of the kind, and the beginning of its lanes' names.
        unit: what the size of one operation is counted in.
        per_gpu: each GPU has a lane of this kind; otherwise the machine has one.
        fills_memory: its operations bring experts into a memory, so they need a place
            there.
        end_rank: order of operations that end at the same instant, lowest first: reads
            and copies land, then results of GPU and CPU, then control, so that a
            decision sees everything that has landed.
        core_busy_with: accelerators beside which the lane keeps a host core busy.
        noise_paths: entries of a profile whose quantiles single operations are drawn
            from; the first one that has quantiles counts.
        shares_worker_of: kind whose worker serves such a lane where a profile names no
            worker for it; None if every profile has to.
    """

    name: str
    unit: WorkUnit
    per_gpu: bool
    end_rank: int
    core_busy_with: frozenset[Accelerator]
    noise_paths: tuple[str, ...]
    fills_memory: bool = False
    shares_worker_of: LaneKind | None = None

    def lane(self, gpu: int = 0) -> str:
        """Name one lane of this kind; `gpu` is ignored where the machine has one."""
        return f"{self.name}{gpu}" if self.per_gpu else self.name

    def lanes(self, gpus: int) -> tuple[str, ...]:
        """Names of all lanes of this kind on a machine with so many GPUs."""
        count = gpus if self.per_gpu else 1
        return tuple(self.lane(gpu) for gpu in range(count))

    def includes(self, lane: str) -> bool:
        """Tell whether a lane is of this kind."""
        return lane.rstrip(_DIGITS) == self.name

    def keeps_core_busy(self, accelerator: str) -> bool:
        """Tell whether such a lane at work occupies a host core."""
        return accelerator in self.core_busy_with


# Workers that keep a core busy may not outnumber cores; see
# `moesim.hwprofiles.profile.HardwareProfile`.
_ALWAYS: frozenset[Accelerator] = frozenset(get_args(Accelerator))
_ON_THE_HOST: frozenset[Accelerator] = frozenset({"host"})
_NEVER: frozenset[Accelerator] = frozenset()

CONTROL = LaneKind(
    "control",
    unit="experts",
    per_gpu=False,
    end_rank=5,
    core_busy_with=_ALWAYS,
    # One distribution for all policies, that of all plannings together.
    noise_paths=(paths.planning(paths.DEFAULT_POLICY).base_s,),
)
"""Gates, plans and hands out work: the host's main thread."""
CPU = LaneKind(
    "cpu",
    unit="tokens",
    per_gpu=False,
    end_rank=4,
    core_busy_with=_ALWAYS,
    noise_paths=(paths.points("cpu"), paths.roofline("cpu").overhead_s),
)
"""Computes experts from host memory."""
GPU = LaneKind(
    "gpu",
    unit="tokens",
    per_gpu=True,
    end_rank=3,
    # The host accelerator computes and copies by itself; a device's own engines do not
    # need the host meanwhile.
    core_busy_with=_ON_THE_HOST,
    noise_paths=(paths.points("gpu"), paths.roofline("gpu").overhead_s),
)
"""Computes dense parts, and experts from GPU memory."""
H2D = LaneKind(
    "h2d",
    unit="bytes",
    per_gpu=True,
    end_rank=1,
    core_busy_with=_ON_THE_HOST,
    noise_paths=(paths.points("h2d"), paths.link("h2d").bytes_per_s),
    fills_memory=True,
)
"""Copies experts from host memory to a GPU."""
D2H = LaneKind(
    "d2h",
    unit="bytes",
    per_gpu=True,
    end_rank=2,
    core_busy_with=_ON_THE_HOST,
    noise_paths=(paths.points("d2h"), paths.link("d2h").bytes_per_s),
)
"""Copies experts and activations from a GPU to host memory."""
SSD = LaneKind(
    "ssd",
    unit="bytes",
    per_gpu=False,
    end_rank=0,
    # A direct read sleeps until the disk is done.
    core_busy_with=_NEVER,
    noise_paths=(paths.points("ssd"), paths.link("ssd").bytes_per_s),
    fills_memory=True,
)
"""Reads experts from the SSD into host memory."""

LANE_KINDS = (CONTROL, CPU, GPU, H2D, D2H, SSD)
"""All kinds, in the order in which a machine lists its lanes. Timelines store lanes by
their number in that list, so the order is part of the file format.
"""

COMPUTE_KINDS = tuple(kind for kind in LANE_KINDS if kind.unit == "tokens")
"""Kinds that compute experts."""

LINK_KINDS = tuple(kind for kind in LANE_KINDS if kind.unit == "bytes")
"""Kinds that move weights."""

_BY_NAME = {kind.name: kind for kind in LANE_KINDS}


def kind_of(lane: str) -> LaneKind:
    """Look up the kind of a lane: ``h2d0`` is of kind `H2D`.

    Raises:
        ValueError: no kind of that name.
    """
    kind = _BY_NAME.get(lane.rstrip(_DIGITS))
    if kind is None:
        known = ", ".join(_BY_NAME)
        raise ValueError(f"lane {lane!r}: expected one of the kinds {known}")
    return kind


def gpu_of(lane: str) -> int:
    """Return the number of a lane's GPU: ``h2d1`` -> 1; 0 where a machine has one."""
    number = lane[len(lane.rstrip(_DIGITS)) :]
    return int(number or 0)


def lane_names(gpus: int) -> tuple[str, ...]:
    """Names of all lanes of a machine, in their one order."""
    return tuple(lane for kind in LANE_KINDS for lane in kind.lanes(gpus))
