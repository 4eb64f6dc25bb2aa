"""A validation in a file: what of it is read again, with its types, and its seal."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from moesim.base.inputs import load_json, read_json, read_text
from moesim.evidence.validation.time_breakdown import TERMS
from moesim.hwprofiles.schema import ProfileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SEAL_KEY = "digest"
"""Under this key stands the digest of everything else."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


def _all_terms(terms: dict[str, float]) -> dict[str, float]:
    if missing := set(TERMS) - terms.keys():
        raise ValueError(f"expected {min(missing)!r}, found none")
    return terms


@dataclass
class SavedPrediction:
    """Figures of a simulation, or of one repetition of a run."""

    tpot_s: Seconds | None
    ttft_s: Seconds | None = None


@dataclass
class SavedTest:
    """The test of equivalence."""

    equivalent: bool


@dataclass
class SavedCell:
    """A cell, as `results.Cell.to_json` makes it; figures that came
    with later versions may be missing.
    """

    trace: str
    shape: str
    policy: str
    cache_ratio: Share
    host_ratio: Number
    batch: Annotated[int, Field(ge=1)]
    timing_free: bool
    extrapolated: bool
    measured: list[SavedPrediction]
    tpot_measured_s: Seconds | None
    predicted: SavedPrediction
    tpot_error: Number | None
    tpot_p95_error: Number | None
    ttft_error: Number | None
    step_errors: list[Number]
    noise_floor: Seconds
    repetitions_differ: Seconds
    hits_equal: bool
    tost: SavedTest | None
    terms: Annotated[dict[str, Number], AfterValidator(_all_terms)]
    drift: dict[str, Number] | None = None
    tpot_error_at_speed: Number | None = None
    ttft_error_at_speed: Number | None = None


@dataclass
class SavedConfig:
    """How it was measured."""

    hw: str
    hw_digest: str
    seconds: Seconds


@dataclass
class SavedValidation:
    """The whole file, but for the summary, which is made again."""

    cells: list[SavedCell]
    config: SavedConfig
    warnings: list[str]


def sealed(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with its digest."""
    body = {key: result[key] for key in result if key != SEAL_KEY}
    return body | {SEAL_KEY: _digest(body)}


def read_result(path: Path) -> dict[str, Any]:
    """Read a ``validation.json``.

    Raises:
        ProfileError: it is no such file, or was altered.
    """
    way_out = "give a validation.json that `moesim validate --out` wrote"
    read_json(
        path,
        SavedValidation,
        error=ProfileError,
        expected="a validation.json",
        way_out=way_out,
    )

    result: dict[str, Any] = load_json(read_text(path))
    # Files of earlier versions have none.
    digest = result.pop(SEAL_KEY, None)
    if digest is not None and digest != _digest(result):
        raise ProfileError(
            f"{path}: digest: it does not match: the file was altered; {way_out}"
        )
    return result


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
