"""The schema of a profile: which numbers and curves exist, and what each must state.

A number is a table with ``value``, ``kind`` and ``source``; a measured one adds
``samples``, ``spread`` and ``date``, a calibrated one also ``interval`` and
``quantiles``. A curve is the same with ``seconds`` at several ``tokens`` or ``bytes``.
A number without provenance is refused, since its origin could not be found out later.
`moesim.hwprofiles.schema` checks tables against this schema.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from moesim.base.text import did_you_mean
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


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
`moesim.evidence.validation.drift`.
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
"""Experts of a path: the calibrated one (False), or the smaller of two (True)."""

_CONTROL_COSTS = (paths.FIRST_OPERATION, paths.JOIN, paths.planning(_ANY_POLICY))
_AFTER_READ_PARTS = (CPU.name, H2D.name, DENSE)

IN_PLACE: tuple[str, ...] = (
    paths.ATTENTION_BYTES_PER_S,
    # What the CPU's first product takes longer is measured in isolation as well.
    *(paths.first_s(kind.name) for kind in (GPU, SSD)),
    *(
        paths.after_read(part, small=small)
        for part in _AFTER_READ_PARTS
        for small in _SIZES
    ),
    paths.FIRST_OPERATION.per_expert_s,
    paths.JOIN.per_expert_s,
    paths.SPLIT_S,
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
    *(charge.path for charge in paths.CHARGES),
    paths.planning(_ANY_POLICY).base_s,
    paths.planning(_ANY_POLICY).per_expert_s,
    paths.first_s(CPU.name),
    paths.FURTHER_S,
    paths.FEW_TOKENS,
    paths.MANY_FLOPS_PER_S,
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
"""Fields that a profile keeps of each fit: see
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


class ProfileError(ValueError):
    """A hardware profile is missing, malformed, or lacks a cost that is needed now."""


_PROVENANCE = ("kind", "source", "samples", "spread", "date")
_NUMBER_KEYS = ("value", *_PROVENANCE, "interval", "quantiles")
_NEEDED_IF_MEASURED = ("samples", "spread", "date")


def parse_numbers(
    table: Mapping[str, Any], *, where: str, path: str = ""
) -> Iterator[tuple[str, Quantity | Curve]]:
    """Walk nested tables and yield every number and curve with its dotted path.

    Args:
        table: the tables.
        where: the file, for error messages.
        path: of `table` itself within the file.

    Raises:
        ProfileError: unknown path, missing provenance, or a value that the key cannot
            have.
    """
    for key, entry in table.items():
        inner = f"{path}.{key}" if path else key
        if not isinstance(entry, dict):
            raise ProfileError(
                f"{where}: {inner}: expected a table with value, kind and source, found"
                f" {entry!r}; write [{inner}] and say where the number came from"
            )

        if "value" in entry:
            if not is_number(inner):
                raise ProfileError(
                    f"{where}: {inner}: unknown number"
                    f"{did_you_mean(inner, NUMBERS)}; see docs/reference/hardware.md"
                )
            yield inner, _quantity(entry, inner, where)
            continue

        if "seconds" in entry:
            if inner not in CURVES:
                raise ProfileError(
                    f"{where}: {inner}: unknown curve; known: {', '.join(CURVES)}"
                )
            yield inner, _curve(entry, inner, where)
            continue

        # A table of plain values is a number with a misspelt key, not a folder.
        nested = any(isinstance(value, dict) for value in entry.values())
        if entry and not nested:
            raise ProfileError(
                f"{where}: {inner}: expected value (a number) or seconds (a curve),"
                f" found {', '.join(entry)}{did_you_mean(inner, NUMBERS)}"
            )
        yield from parse_numbers(entry, where=where, path=inner)


def parse_fit(table: Any, *, where: str) -> dict[str, dict[str, float]]:
    """Read the residuals of fitted costs, ``[fit.<cost>]``.

    Raises:
        ProfileError: unknown key or something other than a finite number.
    """
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: fit: expected tables, found {table!r}")
    for name, report in table.items():
        if not isinstance(report, dict):
            raise ProfileError(
                f"{where}: fit.{name}: expected a table, found {report!r}"
            )
        for key, value in report.items():
            if key not in FIT_KEYS or not _is_finite(value):
                raise ProfileError(
                    f"{where}: fit.{name}.{key}: expected a number under one of"
                    f" {', '.join(FIT_KEYS)}, found {value!r}"
                )
    return {name: dict(report) for name, report in table.items()}


def _is_finite(value: Any) -> bool:
    # In Python a bool is an int, and TOML knows `inf` and `nan`.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _provenance(
    entry: Mapping[str, Any], known: tuple[str, ...], path: str, where: str
) -> dict[str, Any]:
    """Check what an entry states about itself; return it as keyword arguments."""
    # A misspelt key would otherwise be dropped in silence.
    for key in entry:
        if key not in known:
            raise ProfileError(
                f"{where}: {path}.{key}: unknown key; known:"
                f" {', '.join(known)}{did_you_mean(key, known)}"
            )

    kind = entry.get("kind")
    if kind not in NUMBER_KINDS:
        raise ProfileError(
            f"{where}: {path}.kind: expected one of {', '.join(NUMBER_KINDS)}, found"
            f" {kind!r}"
        )

    source = entry.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ProfileError(
            f"{where}: {path}.source: expected where the number came from, found"
            f" {source!r}"
        )

    # What was not measured here has no samples of ours.
    needed = _NEEDED_IF_MEASURED if kind == "measured" else ()
    for key in needed:
        if key not in entry:
            raise ProfileError(
                f"{where}: {path}.{key}: a measured number needs samples, spread and"
                " date; found none"
            )

    samples = entry.get("samples")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ProfileError(
            f"{where}: {path}.samples: expected a count >= 1, found {samples!r}"
        )

    date = entry.get("date")
    if date is not None and not isinstance(date, str):
        raise ProfileError(
            f"{where}: {path}.date: expected an ISO 8601 text, found {date!r}"
        )

    quantiles = _finite_list(entry.get("quantiles", []), f"{path}.quantiles", where)
    return {
        "kind": kind,
        "source": source,
        "samples": samples,
        "date": date,
        "quantiles": quantiles,
    }


def _finite_list(values: Any, path: str, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(_is_finite(value) for value in values):
        raise ProfileError(
            f"{where}: {path}: expected a list of finite numbers, found {values!r}"
        )
    return tuple(values)


def _quantity(entry: Mapping[str, Any], path: str, where: str) -> Quantity:
    provenance = _provenance(entry, _NUMBER_KEYS, path, where)

    value = entry["value"]
    least = lower_bound(path)
    legal = _is_finite(value) and (
        value > least.value or (value == least.value and least.included)
    )
    if not legal:
        relation = ">=" if least.included else ">"
        raise ProfileError(
            f"{where}: {path}: expected a number {relation} {least.value:g}, found"
            f" {value!r}"
        )
    # 16e9 is as whole as 16000000000.
    if path in WHOLE_NUMBERS and value != int(value):
        raise ProfileError(f"{where}: {path}: expected a whole number, found {value!r}")

    spread = entry.get("spread")
    if spread is not None and not (_is_finite(spread) and spread >= 0):
        raise ProfileError(
            f"{where}: {path}.spread: expected a number >= 0, found {spread!r}"
        )
    return Quantity(
        value=value,
        spread=spread,
        interval=_interval(entry, path, where),
        **provenance,
    )


def _interval(
    entry: Mapping[str, Any], path: str, where: str
) -> tuple[float, float] | None:
    if "interval" not in entry:
        return None
    bounds = _finite_list(entry["interval"], f"{path}.interval", where)
    if len(bounds) != 2 or not bounds[0] <= bounds[1]:
        raise ProfileError(
            f"{where}: {path}.interval: expected [low, high], found {list(bounds)!r}"
        )
    return bounds[0], bounds[1]


def _curve(entry: Mapping[str, Any], path: str, where: str) -> Curve:
    unit = CURVES[path]
    known = (unit, "seconds", *_PROVENANCE, "quantiles", "reference")
    provenance = _provenance(entry, known, path, where)

    at = _finite_list(entry.get(unit), f"{path}.{unit}", where)
    seconds = _finite_list(entry["seconds"], f"{path}.seconds", where)
    spread = _finite_list(entry.get("spread", []), f"{path}.spread", where)
    # Spread may be left out altogether: published tables rarely state it.
    if not at or len(at) != len(seconds) or (spread and len(spread) != len(at)):
        raise ProfileError(
            f"{where}: {path}: expected as many seconds and spread as {unit},"
            f" found {len(at)} {unit}, {len(seconds)} seconds, {len(spread)} spread"
        )

    # Interpolation needs ascending sizes, and extrapolation divides by the last one.
    if at[0] <= 0 or any(left >= right for left, right in pairwise(at)):
        raise ProfileError(
            f"{where}: {path}.{unit}: expected ascending numbers > 0, found"
            f" {list(at)!r}"
        )
    if min(seconds) <= 0:
        raise ProfileError(
            f"{where}: {path}.seconds: expected numbers > 0, found {min(seconds)!r}"
        )

    # Bytes are bytes whatever they belong to; tokens mean little without the expert.
    reference = None
    if unit == "tokens":
        reference = _reference(entry.get("reference"), path, where)
    return Curve(
        unit=unit,
        at=at,
        seconds=seconds,
        spread=spread,
        reference=reference,
        **provenance,
    )


def _reference(entry: Any, path: str, where: str) -> ReferenceExpert:
    sizes = ("hidden", "intermediate", "bytes")
    # All four: a curve is carried to other experts by bytes and FLOPs.
    if (
        not isinstance(entry, dict)
        or set(entry) != {*sizes, "dtype"}
        or not all(isinstance(entry[key], int) and entry[key] > 0 for key in sizes)
        or not isinstance(entry["dtype"], str)
    ):
        raise ProfileError(
            f"{where}: {path}.reference: expected hidden, intermediate, bytes and dtype"
            f" of the expert measured, found {entry!r}"
        )
    return ReferenceExpert(**entry)
