"""The schema of a profile: which numbers and curves exist, and what each must state.

A number is a table with ``value``, ``kind`` and ``source``; a measured one adds
``samples``, ``spread`` and ``date``, a calibrated one also ``interval`` and
``quantiles``. A curve is the same with ``seconds`` at several ``tokens`` or ``bytes``.
A number without provenance is refused, since its origin could not be found out later.
`moesim.hwprofiles.parsing` checks tables against this schema.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import (
    CPU,
    GPU,
    H2D,
    LANE_KINDS,
    LINK_KINDS,
    SSD,
    Accelerator,
)
from moesim.hwprofiles.paths import ACTIVATION, DENSE, HEAD

PROFILE_KINDS = ("measured", "published", "datasheet")
NUMBER_KINDS = (*PROFILE_KINDS, "assumed")
"""``assumed``: neither published nor measured; `source` gives the reason."""

ACCELERATORS: tuple[str, ...] = get_args(Accelerator)
"""Devices that torch knows, and a core of the host."""

REFERENCE_RUNS = ("memory", "memory_small", "ssd", "ssd_small")
"""Short runs that tell how fast a machine was while it was calibrated: with or without
SSD, large or small experts.
"""
REFERENCE_TERMS = ("dense", "planning", "lanes", "between")
"""Terms that their time is split into; defined by
`moesim.validation.time_breakdown`.
"""

# Paths are matched as shell patterns, so a star stands for any name or number.
_ANY_POLICY = "*"
_ANY_GPU = "*"


def _all_lanes() -> tuple[str, ...]:
    """Names of lanes as patterns, such as ``h2d*``."""
    patterns = []
    for kind in LANE_KINDS:
        number = _ANY_GPU if kind.per_gpu else ""
        patterns.append(kind.name + number)
    return tuple(patterns)


_SIZES = (False, True)
"""Whether a path is that of the smaller of two experts that were calibrated."""

_CONTROL_COSTS = (paths.FIRST_OPERATION, paths.JOIN, paths.planning(_ANY_POLICY))
_AFTER_READ_PARTS = (CPU.name, H2D.name, DENSE)

IN_PLACE: tuple[str, ...] = (
    # What the CPU's first product takes longer is measured in isolation as well.
    *(paths.first_s(kind.name) for kind in (GPU, SSD)),
    *(
        paths.after_read(part, small=small)
        for part in _AFTER_READ_PARTS
        for small in _SIZES
    ),
    paths.FIRST_OPERATION.per_expert_s,
    paths.JOIN.per_expert_s,
    *(cost.per_copy_s for cost in _CONTROL_COSTS),
    *(cost.with_ssd_s for cost in _CONTROL_COSTS),
    *(
        paths.contention(victim.name, other.name)
        for victim in LANE_KINDS
        for other in LANE_KINDS
    ),
    *(paths.reference(run, term) for run in REFERENCE_RUNS for term in REFERENCE_TERMS),
)
"""Paths of numbers that state what runs take beyond operations in isolation; a profile
may lack them.
"""

PROBES: tuple[str, ...] = (
    paths.host_read("*"),
    paths.LINK_PAGE_LOCKED,
    paths.LINK_PAGEABLE,
    paths.DEVICE_READ,
    paths.HOST_BESIDE_LINK,
    paths.LINK_BESIDE_HOST,
)
"""Dotted paths of what memories and links reach alone, ``*`` a number of threads; for
`moesim advise`, and a profile may lack them.
"""

NUMBERS: tuple[str, ...] = (
    *PROBES,
    paths.CORES,
    paths.GPU_BYTES,
    paths.HOST_BYTES,
    paths.STAGING_EXPERTS,
    paths.UNIFIED,
    *(path for part in (CPU.name, GPU.name, DENSE) for path in paths.roofline(part)),
    *(
        path
        for link in (*(kind.name for kind in LINK_KINDS), ACTIVATION)
        for path in paths.link(link)
    ),
    paths.PER_OPERATION_S,
    paths.FIRST_OPERATION.base_s,
    paths.JOIN.base_s,
    paths.planning(_ANY_POLICY).base_s,
    paths.planning(_ANY_POLICY).per_expert_s,
    paths.first_s(CPU.name),
    *IN_PLACE,
    paths.PLATFORM_IDLE_W,
    *(paths.power(lane, state) for lane in _all_lanes() for state in ("idle", "busy")),
)
"""Paths of all numbers; ``*`` stands for a policy's name or a GPU's number."""

CURVES: dict[str, str] = {
    **{
        paths.points(part, small=small): "tokens"
        for part in (CPU.name, GPU.name, DENSE, HEAD)
        for small in _SIZES
    },
    **{paths.points(kind.name): kind.unit for kind in LINK_KINDS},
}
"""Paths of all curves -> what they are functions of."""

FIT_KEYS = ("samples", "held_out", "residual_median", "residual_worst")
"""What a profile keeps of each fit: see
`moesim.hwprofiles.calibration.estimates.FitReport`.
"""


class LowerBound(NamedTuple):
    """The smallest legal value of a number, and whether it is itself legal."""

    value: float
    included: bool


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number and where it came from.

    Attributes:
        value: in the unit that the key's name ends with.
        kind: one of `NUMBER_KINDS`.
        source: the arithmetic, the publication or the procedure, in words.
        samples: how many measurements, when measured.
        spread: their interquartile range, in the unit of `value`.
        date: day of the measurement, ISO 8601.
        interval: 95 % confidence interval of `value`.
        quantiles: of single operations relative to `value`, at equally spaced
            probabilities from 0 to 1.
    """

    value: float
    kind: str
    source: str
    samples: int | None = None
    spread: float | None = None
    date: str | None = None
    interval: tuple[float, float] | None = None
    quantiles: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ReferenceExpert:
    """The expert that a curve was measured with.

    Attributes:
        hidden: hidden size H of the model.
        intermediate: intermediate size F of the expert.
        bytes: of its weights.
        dtype: of its weights.
    """

    hidden: int
    intermediate: int
    bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at several sizes. `unit` is ``tokens`` or ``bytes``; `at`, `seconds` and
    `spread` are parallel.

    `reference` is the expert measured, for curves over tokens. Other fields as in
    `Quantity`.
    """

    unit: str
    at: tuple[float, ...]
    seconds: tuple[float, ...]
    kind: str
    source: str
    samples: int | None = None
    spread: tuple[float, ...] = ()
    date: str | None = None
    quantiles: tuple[float, ...] = ()
    reference: ReferenceExpert | None = None


def is_number(path: str) -> bool:
    """Tell whether a profile may have a number of this path."""
    return any(fnmatchcase(path, pattern) for pattern in NUMBERS)


def is_in_place(path: str) -> bool:
    """Tell whether a number states what runs take beyond operations in isolation."""
    return any(fnmatchcase(path, pattern) for pattern in IN_PLACE)


WHOLE_NUMBERS = frozenset(
    {paths.CORES, paths.STAGING_EXPERTS, paths.GPU_BYTES, paths.HOST_BYTES}
)
"""Counts and sizes, of which there are no halves."""


def lower_bound(path: str) -> LowerBound:
    """Return the smallest legal value of a number."""
    # A GPU may have no memory of its own, a machine may not.
    needed = WHOLE_NUMBERS - {paths.GPU_BYTES}
    if paths.below(path, paths.CONTENTION) or path in needed:
        return LowerBound(1.0, included=True)

    # A rate of zero would make every operation last forever.
    return LowerBound(0.0, included=not path.endswith("_per_s"))


def as_table(entry: Quantity | Curve) -> dict[str, Any]:
    """Return the TOML table of a number or curve, without empty fields."""
    table = {name: getattr(entry, name) for name in entry.__slots__}
    if table.get("reference") is not None:
        table["reference"] = asdict(table["reference"])
    # A curve's sizes stand under the name of their unit, before its seconds.
    if isinstance(entry, Curve):
        sizes = list(table.pop("at"))
        table = {table.pop("unit"): sizes, **table}
    # TOML knows neither tuples nor an empty value.
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in table.items()
        if value is not None and value != ()
    }
