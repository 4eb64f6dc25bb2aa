"""Checks the nested tables of a profile's file and turns them into numbers and curves.

Every refusal names the file, the key, what was expected and what was found.
"""

from __future__ import annotations

import difflib
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from moesim.hwprofiles.errors import ProfileError
from moesim.hwprofiles.schema import (
    CURVES,
    FIT_KEYS,
    NUMBER_KINDS,
    NUMBERS,
    WHOLE_NUMBERS,
    Curve,
    Quantity,
    ReferenceExpert,
    is_number,
    lower_bound,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PROVENANCE = ("kind", "source", "samples", "spread", "date")
_NUMBER_KEYS = ("value", *_PROVENANCE, "interval", "quantiles")
_NEEDED_IF_MEASURED = ("samples", "spread", "date")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` where a known word is close, else nothing."""
    closest = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {closest[0]!r}?)" if closest else ""


def several(text: str, noun: str) -> str:
    """Return where to go with ``a,b`` where one thing is expected, else nothing."""
    if "," not in text:
        return ""
    return f"; one {noun} is expected here, `moesim compare` and `sweep` take several"


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
                    f"{where}: {inner}: unknown number{suggestion(inner, NUMBERS)}; see"
                    " docs/reference/hardware.md"
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
                f" found {', '.join(entry)}{suggestion(inner, NUMBERS)}"
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
                f" {', '.join(known)}{suggestion(key, known)}"
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
