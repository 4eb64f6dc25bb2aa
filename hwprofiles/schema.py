"""The grammar of a profile: which numbers exist, and what each must say about itself.

A number is a table with ``value``, ``kind`` and ``source``; a measured one adds
``samples``, ``spread`` and ``date``, a calibrated one also ``interval`` and
``quantiles``. A curve is the same with ``seconds`` at several ``tokens`` or ``bytes``.
A bare number is refused: nobody could tell later where it came from.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from moesim.hwprofiles.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PROFILE_KINDS = ("measured", "published", "datasheet")
NUMBER_KINDS = (*PROFILE_KINDS, "assumed")
"""``assumed``: nobody published or measured it; `source` gives the reason."""

ACCELERATORS = ("cuda", "host")
LANE_CLASSES = ("cpu", "gpu", "h2d", "d2h", "ssd", "control")

_LANES = ("control", "cpu", "gpu*", "h2d*", "d2h*", "ssd")
_PARTS = ("cpu", "gpu", "dense", "head")
_ROOFLINE = ("overhead_s", "bytes_per_s", "flops_per_s")
_LINK = ("latency_s", "bytes_per_s")
_REFERENCES = ("memory", "memory_small", "ssd", "ssd_small")
_CONTROL = ("dispatch.first_op_", "dispatch.join_", "planning.*.")

IN_PLACE: tuple[str, ...] = (
    *(f"costs.{lane}.first_s" for lane in ("gpu", "ssd")),
    *(
        f"costs.{part}.after_read{size}"
        for part, size in product(("cpu", "h2d", "dense"), ("", "_small"))
    ),
    *(f"costs.dispatch.{what}_per_expert_s" for what in ("first_op", "join")),
    *(
        f"costs.{what}{term}_s"
        for what, term in product(_CONTROL, ("per_copy", "with_ssd"))
    ),
    *(
        f"contention.{victim}.{other}"
        for victim, other in product(LANE_CLASSES, LANE_CLASSES)
    ),
    *(
        f"reference.{run}.{term}_s"
        for run, term in product(_REFERENCES, ("dense", "planning", "lanes", "between"))
    ),
)
"""Dotted paths of numbers that say what runs take beyond operations in isolation; a
profile may lack them.
"""

NUMBERS: tuple[str, ...] = (
    "cores",
    *(f"memory.{key}" for key in ("gpu_bytes", "host_bytes", "staging_experts")),
    *(
        f"costs.{lane}.{key}"
        for lane, key in product(("cpu", "gpu", "dense"), _ROOFLINE)
    ),
    *(
        f"costs.{link}.{key}"
        for link, key in product(("h2d", "d2h", "ssd", "activation"), _LINK)
    ),
    *(f"costs.dispatch.{key}_s" for key in ("per_op", "first_op", "join")),
    *(f"costs.planning.*.{key}_s" for key in ("base", "per_expert")),
    "costs.cpu.first_s",
    *IN_PLACE,
    "power.platform.idle_w",
    *(f"power.{lane}.idle_w" for lane in _LANES),
    *(f"power.{lane}.busy_w" for lane in _LANES),
)
"""Dotted paths of all numbers; ``*`` stands for a policy's name or a device's
number.
"""

CURVES: dict[str, str] = {
    **{
        f"costs.{part}.{key}": "tokens"
        for part, key in product(_PARTS, ("points", "points_small"))
    },
    **{f"costs.{link}.points": "bytes" for link in ("h2d", "d2h", "ssd")},
}
"""Dotted paths of all curves -> what they are functions of."""

FIT_KEYS = ("samples", "held_out", "residual_median", "residual_worst")
_PROVENANCE = ("kind", "source", "samples", "spread", "date")


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
    """The expert that a curve was taken from: hidden H, intermediate F, bytes of its
    weights, their type.
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


def plain(entry: Quantity | Curve) -> dict[str, Any]:
    """Return the TOML table of a number or curve, without empty fields."""
    table = asdict(entry)
    if isinstance(entry, Curve):
        table = {table.pop("unit"): list(table.pop("at")), **table}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in table.items()
        if value is not None and value != ()
    }


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` where one known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_numbers(
    table: Mapping[str, Any], *, where: str, path: str = ""
) -> Iterator[tuple[str, Quantity | Curve]]:
    """Walk nested tables and yield every number and curve with its dotted path.

    Raises:
        ProfileError: unknown path, missing provenance, or a value that the key cannot
            have.
    """
    for key, entry in table.items():
        here = f"{path}.{key}" if path else key
        if not isinstance(entry, dict):
            raise ProfileError(
                f"{where}: {here}: expected a table with value, kind and source, found"
                f" {entry!r}; write [{here}] and say where the number came from"
            )
        if "value" in entry:
            if not any(fnmatchcase(here, pattern) for pattern in NUMBERS):
                raise ProfileError(
                    f"{where}: {here}: unknown number{suggestion(here, NUMBERS)}; see"
                    " docs/reference/hardware.md"
                )
            yield here, _quantity(entry, here, where)
        elif "seconds" in entry:
            if here not in CURVES:
                raise ProfileError(
                    f"{where}: {here}: unknown curve; known: {', '.join(CURVES)}"
                )
            yield here, _curve(entry, here, where)
        elif entry and not any(isinstance(value, dict) for value in entry.values()):
            raise ProfileError(
                f"{where}: {here}: expected value (a number) or seconds (a curve),"
                f" found {', '.join(entry)}{suggestion(here, NUMBERS)}"
            )
        else:
            yield from parse_numbers(entry, where=where, path=here)


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
            if key not in FIT_KEYS or not _is_number(value):
                raise ProfileError(
                    f"{where}: fit.{name}.{key}: expected a number under one of"
                    f" {', '.join(FIT_KEYS)}, found {value!r}"
                )
    return {name: dict(report) for name, report in table.items()}


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _provenance(
    entry: Mapping[str, Any], known: tuple[str, ...], here: str, where: str
) -> dict[str, Any]:
    """Check what a number says about itself and return it as keyword arguments."""
    for key in entry:
        if key not in known:
            raise ProfileError(
                f"{where}: {here}.{key}: unknown key; known:"
                f" {', '.join(known)}{suggestion(key, known)}"
            )
    kind = entry.get("kind")
    if kind not in NUMBER_KINDS:
        raise ProfileError(
            f"{where}: {here}.kind: expected one of {', '.join(NUMBER_KINDS)}, found"
            f" {kind!r}"
        )
    source = entry.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ProfileError(
            f"{where}: {here}.source: expected where the number came from, found"
            f" {source!r}"
        )
    needed = ("samples", "spread", "date") if kind == "measured" else ()
    for key in needed:
        if key not in entry:
            raise ProfileError(
                f"{where}: {here}.{key}: a measured number needs samples, spread and"
                " date; found none"
            )
    samples = entry.get("samples")
    date = entry.get("date")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ProfileError(
            f"{where}: {here}.samples: expected a count >= 1, found {samples!r}"
        )
    if date is not None and not isinstance(date, str):
        raise ProfileError(
            f"{where}: {here}.date: expected an ISO 8601 text, found {date!r}"
        )
    quantiles = _numbers(entry.get("quantiles", []), f"{here}.quantiles", where)
    return {
        "kind": kind,
        "source": source,
        "samples": samples,
        "date": date,
        "quantiles": quantiles,
    }


def _numbers(values: Any, here: str, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(_is_number(value) for value in values):
        raise ProfileError(
            f"{where}: {here}: expected a list of finite numbers, found {values!r}"
        )
    return tuple(values)


def _lowest(path: str) -> tuple[float, bool]:
    """Smallest legal value of a number, and whether it is itself legal."""
    if path.startswith("contention.") or path in {"cores", "memory.staging_experts"}:
        return 1.0, True
    return 0.0, not path.endswith("_per_s")


def _quantity(entry: Mapping[str, Any], here: str, where: str) -> Quantity:
    provenance = _provenance(
        entry, ("value", *_PROVENANCE, "interval", "quantiles"), here, where
    )
    value = entry["value"]
    spread = entry.get("spread")
    lowest, included = _lowest(here)
    if not _is_number(value) or value < lowest or (value == lowest and not included):
        relation = ">=" if included else ">"
        raise ProfileError(
            f"{where}: {here}: expected a number {relation} {lowest:g}, found {value!r}"
        )
    if spread is not None and not (_is_number(spread) and spread >= 0):
        raise ProfileError(
            f"{where}: {here}.spread: expected a number >= 0, found {spread!r}"
        )
    interval = None
    if "interval" in entry:
        bounds = _numbers(entry["interval"], f"{here}.interval", where)
        if len(bounds) != 2 or not bounds[0] <= bounds[1]:
            raise ProfileError(
                f"{where}: {here}.interval: expected [low, high], found"
                f" {list(bounds)!r}"
            )
        interval = (bounds[0], bounds[1])
    return Quantity(value=value, spread=spread, interval=interval, **provenance)


def _curve(entry: Mapping[str, Any], here: str, where: str) -> Curve:
    unit = CURVES[here]
    provenance = _provenance(
        entry, (unit, "seconds", *_PROVENANCE, "quantiles", "reference"), here, where
    )
    at = _numbers(entry.get(unit), f"{here}.{unit}", where)
    seconds = _numbers(entry["seconds"], f"{here}.seconds", where)
    spread = _numbers(entry.get("spread", []), f"{here}.spread", where)
    if not at or len(at) != len(seconds) or (spread and len(spread) != len(at)):
        raise ProfileError(
            f"{where}: {here}: expected as many seconds and spread as {unit},"
            f" found {len(at)} {unit}, {len(seconds)} seconds, {len(spread)} spread"
        )
    if at[0] <= 0 or any(left >= right for left, right in pairwise(at)):
        raise ProfileError(
            f"{where}: {here}.{unit}: expected ascending numbers > 0, found"
            f" {list(at)!r}"
        )
    if min(seconds) <= 0:
        raise ProfileError(
            f"{where}: {here}.seconds: expected numbers > 0, found {min(seconds)!r}"
        )
    reference = (
        _reference(entry.get("reference"), here, where) if unit == "tokens" else None
    )
    return Curve(
        unit=unit,
        at=at,
        seconds=seconds,
        spread=spread,
        reference=reference,
        **provenance,
    )


def _reference(entry: Any, here: str, where: str) -> ReferenceExpert:
    sizes = ("hidden", "intermediate", "bytes")
    if (
        not isinstance(entry, dict)
        or set(entry) != {*sizes, "dtype"}
        or not all(isinstance(entry[key], int) and entry[key] > 0 for key in sizes)
        or not isinstance(entry["dtype"], str)
    ):
        raise ProfileError(
            f"{where}: {here}.reference: expected hidden, intermediate, bytes and dtype"
            f" of the expert measured, found {entry!r}"
        )
    return ReferenceExpert(**entry)
