"""The schema of a profile: which numbers and curves exist, and what each must state.

A number is a table with ``value``, ``kind`` and ``source``; a measured one adds
``samples``, ``spread`` and ``date``, a calibrated one also ``interval`` and
``quantiles``. A curve is the same with ``seconds`` at several ``tokens`` or ``bytes``.
A number without provenance is refused, since its origin could not be found out later.
`moesim.hwprofiles.schema` checks tables against this schema.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, get_args

from moesim.base.inputs import Checked, parse_json
from moesim.base.text import did_you_mean
from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import (
    CPU,
    GPU,
    H2D,
    LANE_KINDS,
    LINK_KINDS,
    SSD,
)
from moesim.hwprofiles.paths import ACTIVATION, DENSE, HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import ConfigDict

ProfileKind = Literal["measured", "published", "datasheet"]
NumberKind = Literal["measured", "published", "datasheet", "assumed"]

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
    # What earlier versions wrote, and nothing uses.
    f"{paths.REFERENCE}.*",
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

FitKey = Literal["samples", "held_out", "residual_median", "residual_worst"]
FIT_KEYS: tuple[FitKey, ...] = get_args(FitKey)
"""Fields that a profile keeps of each fit: see
`moesim.hwprofiles.calibration.estimates.FitReport`.
"""


Number = float | int
"""Read back as it was written: a whole number stays one."""

_STRICT: Final[ConfigDict] = {"extra": "forbid", "allow_inf_nan": False}


class LowerBound(NamedTuple):
    """The smallest legal value of a number, and whether it is itself legal."""

    value: float
    included: bool


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number and where it came from.

    Attributes:
        value: in the unit that the key's name ends with.
        kind: ``assumed`` is neither published nor measured; `source` gives the reason.
        source: the arithmetic, the publication or the procedure, in words.
        samples: how many measurements, when measured.
        spread: their interquartile range, in the unit of `value`.
        date: day of the measurement, ISO 8601.
        interval: 95 % confidence interval of `value`.
        quantiles: of single operations relative to `value`, at equally spaced
            probabilities from 0 to 1.
    """

    value: Number
    kind: NumberKind
    source: str
    samples: int | None = None
    spread: Number | None = None
    date: str | None = None
    interval: tuple[Number, Number] | None = None
    quantiles: tuple[Number, ...] = ()

    __pydantic_config__: ClassVar = _STRICT


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

    __pydantic_config__: ClassVar = _STRICT


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at several sizes. `unit` is ``tokens`` or ``bytes``; `at`, `seconds` and
    `spread` are parallel.

    `reference` is the expert measured, for curves over tokens. Other fields as in
    `Quantity`.
    """

    unit: str
    at: tuple[Number, ...]
    seconds: tuple[Number, ...]
    kind: NumberKind
    source: str
    samples: int | None = None
    spread: tuple[Number, ...] = ()
    date: str | None = None
    quantiles: tuple[Number, ...] = ()
    reference: ReferenceExpert | None = None

    __pydantic_config__: ClassVar = _STRICT


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


def parse_numbers(
    sections: Mapping[str, Any], *, where: str
) -> tuple[dict[str, Quantity], dict[str, Curve]]:
    """Return every number and every curve of nested tables by its dotted path.

    Args:
        sections: the tables.
        where: the file, for error messages.

    Raises:
        ProfileError: unknown path, missing provenance, or a value that the key cannot
            have.
    """
    numbers = {}
    curves = {}
    for path, entry in _entries(sections, where):
        if "value" in entry:
            numbers[path] = entry
        else:
            unit = CURVES[path]
            # A curve's sizes stand under the name of their unit.
            sizes = {"unit": unit, "at": entry.get(unit, [])}
            others = {key: value for key, value in entry.items() if key != unit}
            curves[path] = sizes | others
    quantities = parse_table(numbers, dict[str, Quantity], where=where)
    for path, quantity in quantities.items():
        _check_provenance(quantity, f"{where}: {path}")
        _check_quantity(quantity, path, f"{where}: {path}")
    checked = parse_table(curves, dict[str, Curve], where=where)
    for path, curve in checked.items():
        _check_provenance(curve, f"{where}: {path}")
        _check_curve(curve, f"{where}: {path}")
    return quantities, checked


def parse_table(
    table: Mapping[str, Any], schema: type[Checked], *, where: str
) -> Checked:
    """Turn a table of TOML into an object of a schema.

    Raises:
        ProfileError: something is missing, unknown or of another type.
    """
    return parse_json(
        # TOML's dates are texts to us.
        json.dumps(table, default=str),
        schema,
        where=where,
        error=ProfileError,
        way_out="see docs/reference/hardware.md",
    )


def _entries(
    table: Mapping[str, Any], where: str, path: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk nested tables; yield each that states a number or a curve, with its path."""
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
            yield inner, entry
        elif "seconds" in entry:
            if inner not in CURVES:
                raise ProfileError(
                    f"{where}: {inner}: unknown curve; known: {', '.join(CURVES)}"
                )
            yield inner, entry
        # A table of plain values is a number with a misspelt key, not a folder.
        elif entry and not any(isinstance(value, dict) for value in entry.values()):
            raise ProfileError(
                f"{where}: {inner}: expected value (a number) or seconds (a curve),"
                f" found {', '.join(entry)}{did_you_mean(inner, NUMBERS)}"
            )
        else:
            yield from _entries(entry, where, inner)


def _check_provenance(entry: Quantity | Curve, where: str) -> None:
    """Refuse a number or curve that does not say where it came from."""
    if not entry.source.strip():
        raise ProfileError(
            f"{where}.source: expected where the number came from, found none"
        )
    # What was not measured here has no samples of ours.
    stated = (entry.samples, entry.date, entry.spread)
    if entry.kind == "measured" and (None in stated or () in stated):
        raise ProfileError(f"{where}: a measured number needs samples, spread and date")
    if entry.samples is not None and entry.samples < 1:
        raise ProfileError(
            f"{where}.samples: expected a count >= 1, found {entry.samples}"
        )


def _check_quantity(quantity: Quantity, path: str, where: str) -> None:
    """Refuse a value that the number of this path cannot have."""
    value = quantity.value
    least = lower_bound(path)
    if value < least.value or (value == least.value and not least.included):
        relation = ">=" if least.included else ">"
        raise ProfileError(
            f"{where}: expected a number {relation} {least.value:g}, found {value!r}"
        )
    # 16e9 is as whole as 16000000000.
    if path in WHOLE_NUMBERS and value != int(value):
        raise ProfileError(f"{where}: expected a whole number, found {value!r}")
    if quantity.spread is not None and quantity.spread < 0:
        raise ProfileError(
            f"{where}.spread: expected a number >= 0, found {quantity.spread!r}"
        )
    if quantity.interval is not None and quantity.interval[0] > quantity.interval[1]:
        raise ProfileError(
            f"{where}.interval: expected [low, high], found {list(quantity.interval)!r}"
        )


def _check_curve(curve: Curve, where: str) -> None:
    """Refuse a curve that cannot be interpolated."""
    at = curve.at
    lengths = len(at), len(curve.seconds), len(curve.spread)
    # Spread may be left out altogether: published tables rarely state it.
    if not at or lengths[1] != len(at) or lengths[2] not in (0, len(at)):
        raise ProfileError(
            f"{where}: expected as many seconds and spread as {curve.unit}, found"
            f" {lengths[0]} {curve.unit}, {lengths[1]} seconds, {lengths[2]} spread"
        )
    # Interpolation needs ascending sizes, and extrapolation divides by the last one.
    if at[0] <= 0 or any(left >= right for left, right in pairwise(at)):
        raise ProfileError(
            f"{where}.{curve.unit}: expected ascending numbers > 0, found {list(at)!r}"
        )
    if min(curve.seconds) <= 0:
        raise ProfileError(
            f"{where}.seconds: expected numbers > 0, found {min(curve.seconds)!r}"
        )
    # Bytes are bytes whatever they belong to; a curve over tokens is carried to other
    # experts by bytes and FLOPs.
    sizes = curve.reference or ReferenceExpert(0, 0, 0, "")
    if (
        curve.unit == "tokens"
        and min(sizes.hidden, sizes.intermediate, sizes.bytes) < 1
    ):
        raise ProfileError(
            f"{where}.reference: expected hidden, intermediate, bytes and dtype of the"
            f" expert measured, found {curve.reference}"
        )
