"""Names of a profile's numbers and curves: every dotted path is spelled here only.

A path is the address of a number in the TOML file, ``costs.h2d.bytes_per_s``. Its last
word ends in the unit. Paths that belong to one formula come as one tuple, so that a
fit, a prediction and the schema name the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

CORES = "cores"
MEMORY = "memory"
CONTENTION = "contention"
POWER = "power"
REFERENCE = "reference"
COSTS = "costs"
PROBES = "probes"
SECTIONS = (CORES, MEMORY, COSTS, CONTENTION, PROBES, REFERENCE, POWER)
"""Top-level keys that hold numbers, in the order in which a file lists them."""

GPU_BYTES = f"{MEMORY}.gpu_bytes"
HOST_BYTES = f"{MEMORY}.host_bytes"
STAGING_EXPERTS = f"{MEMORY}.staging_experts"
UNIFIED = f"{MEMORY}.unified"

FURTHER_S = f"{COSTS}.gpu.further_s"
"""Fixed seconds of each expert of a grouped launch; absent where each is launched."""

FEW_TOKENS = f"{COSTS}.cpu.few_tokens"
MANY_FLOPS_PER_S = f"{COSTS}.cpu.many_flops_per_s"
"""The rate for more tokens than that; absent where one holds for all."""

ATTENTION_BYTES_PER_S = f"{COSTS}.attention.bytes_per_s"
"""Rate at which attention reads keys and values; absent where it was not told apart
from the rest of the dense part.
"""

PLATFORM_IDLE_W = f"{POWER}.platform.idle_w"

LINK_PAGE_LOCKED = f"{PROBES}.link.page_locked_bytes_per_s"
LINK_PAGEABLE = f"{PROBES}.link.pageable_bytes_per_s"
DEVICE_READ = f"{PROBES}.device.read_bytes_per_s"
HOST_BESIDE_LINK = f"{PROBES}.beside.host_bytes_per_s"
LINK_BESIDE_HOST = f"{PROBES}.beside.link_bytes_per_s"

ACTIVATION = "activation"
DENSE = "dense"
HEAD = "head"
"""Parts of a model that have costs but no lane of their own: hidden states that move
between devices, a layer without its routed experts, and what is computed once per step.
"""

DEFAULT_POLICY = "default"
"""Stands in for assignment policies whose planning the profile does not name."""


# Fields of the tuples below are the last words of their paths, so that each is written
# once.


class RooflinePaths(NamedTuple):
    """Constants of ``overhead + max(bytes / bytes_per_s, flops / flops_per_s)``."""

    overhead_s: str
    bytes_per_s: str
    flops_per_s: str


class LinkPaths(NamedTuple):
    """Constants of ``latency + bytes / bytes_per_s``."""

    latency_s: str
    bytes_per_s: str


class ControlPaths(NamedTuple):
    """Constants of ``base + per_expert x active + per_copy x copies``, and what an SSD
    behind host memory adds.
    """

    base_s: str
    per_expert_s: str
    per_copy_s: str
    with_ssd_s: str


# The keys of the next two formulas share the table of dispatch costs.
FIRST_OPERATION = ControlPaths(
    f"{COSTS}.dispatch.first_op_s",
    f"{COSTS}.dispatch.first_op_per_expert_s",
    f"{COSTS}.dispatch.first_op_per_copy_s",
    f"{COSTS}.dispatch.first_op_with_ssd_s",
)
"""From the end of planning to the first operation of a layer step."""

JOIN = ControlPaths(
    f"{COSTS}.dispatch.join_s",
    f"{COSTS}.dispatch.join_per_expert_s",
    f"{COSTS}.dispatch.join_per_copy_s",
    f"{COSTS}.dispatch.join_with_ssd_s",
)
"""Joining the lanes' results at the end of a layer step."""


class Charge(NamedTuple):
    """A machine's cost that is added wherever something happens.

    Attributes:
        path: of its number: seconds, or seconds per byte where a link is named.
        per: what it is charged for: `OPERATION`, `FIRST_OPERATION.base_s`,
            `JOIN.base_s`, `SPLIT`, or the name of a kind of link, which charges each
            byte.
        required: whether every profile states it; 0 otherwise.
    """

    path: str
    per: str
    required: bool = False


OPERATION = "operation"
SPLIT = "split"
"""A layer step whose experts CPU and GPU share: two chains are submitted and awaited,
and their results merged.
"""
CHARGES = (
    Charge(f"{COSTS}.dispatch.per_op_s", OPERATION, required=True),
    Charge(FIRST_OPERATION.base_s, FIRST_OPERATION.base_s, required=True),
    Charge(JOIN.base_s, JOIN.base_s, required=True),
    Charge(f"{COSTS}.dispatch.split_s", SPLIT),
)
"""All that is added to the formulas above and to operations. A new cost of such a kind
is a row here, and a figure in profiles: the schema, both engines, bounds and the
runtime's predictions read this table.
"""
PER_OPERATION_S = CHARGES[0].path
SPLIT_S = CHARGES[-1].path


def roofline(part: str) -> RooflinePaths:
    """Constants of a compute lane or of the dense part."""
    return RooflinePaths(*(f"{COSTS}.{part}.{key}" for key in RooflinePaths._fields))


def link(name: str) -> LinkPaths:
    """Constants of a link, or of moving activations."""
    return LinkPaths(*(f"{COSTS}.{name}.{key}" for key in LinkPaths._fields))


def planning(policy: str) -> ControlPaths:
    """Constants of one assignment policy's planning; ``*`` stands for any policy."""
    return ControlPaths(
        *(f"{COSTS}.planning.{policy}.{key}" for key in ControlPaths._fields)
    )


def points(part: str, *, small: bool = False) -> str:
    """Return the path of a measured curve; `small` is that of the smaller experts."""
    return f"{COSTS}.{part}.points{_size(small=small)}"


def first_s(lane: str) -> str:
    """Return the path of what the first operation of a layer step takes longer."""
    return f"{COSTS}.{lane}.first_s"


def after_read(part: str, *, small: bool = False) -> str:
    """Return the path of the factor on what follows a read from the SSD."""
    return f"{COSTS}.{part}.after_read{_size(small=small)}"


def contention(victim: str, other: str) -> str:
    """Return the path of the slowdown of `victim` while `other` works."""
    return f"{CONTENTION}.{victim}.{other}"


def power(lane: str, state: str) -> str:
    """Return the path of a lane's watts; `state` is ``idle`` or ``busy``."""
    return f"{POWER}.{lane}.{state}_w"


def below(path: str, section: str) -> bool:
    """Tell whether a path lies in a section of the file."""
    # `cores` is a section of one number.
    return path == section or path.startswith(f"{section}.")


def _size(*, small: bool) -> str:
    return "_small" if small else ""


def host_read(threads: int | str) -> str:
    """Rate of reading host memory alone, with so many threads."""
    return f"{PROBES}.host_read.{threads}.bytes_per_s"
