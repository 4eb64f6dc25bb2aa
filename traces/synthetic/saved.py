"""Saved statistics: a fitted synthetic model in a small file, and those that ship.

A file is an ``.npz`` archive: arrays, and a JSON header with shape and provenance.
Log-weights of topics and kinds are rounded to steps of 1/8, a factor of 1.06 of a
chance at most, and held in a byte each; the rest is kept as it is. There is no row of
the real trace in it, but the kinds of its tokens are, in their order.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.files import write_bytes
from moesim.base.inputs import parse_json
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape  # noqa: TC001 - of a schema
from moesim.traces.importers.readers.arrays import load_named
from moesim.traces.models import known_models, model_shape
from moesim.traces.shipped import resolve_trace
from moesim.traces.stats.routing_curves import Likeness  # noqa: TC001 - of a schema
from moesim.traces.synthetic.draw import SynthModel, TokenKinds
from moesim.traces.synthetic.fit import fit
from moesim.traces.synthetic.marks import WIDTHS

VERSION = 2
SUFFIX = ".statistics.npz"
# What a zip archive begins with; Parquet begins with PAR1.
_ARCHIVE = b"PK"
_STEP = 0.125


def shipped_statistics() -> tuple[str, ...]:
    """Return the names of the statistics that ship, sorted."""
    files = resources.files("moesim.traces") / "data"
    names = [file.name for file in files.iterdir() if file.name.endswith(SUFFIX)]
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names))


def model_like(like: Path | str, weights: str | None = None) -> SynthModel:
    """Return what a trace like that one is drawn from.

    Args:
        like: a trace, which is fitted now; a file of saved statistics; or the name of
            statistics or of a trace that ship. A file comes before a name.
        weights: weight format that decides the experts' bytes; None keeps those of the
            trace or the statistics.

    Raises:
        TraceError: none of these, damaged, or `weights` for a model that is not known
            by name.
    """
    path = resolve_trace(like)
    name = str(like)
    if not path.is_file() and name in shipped_statistics():
        files = resources.files("moesim.traces") / "data"
        path = Path(str(files / f"{name}{SUFFIX}"))
    if not path.exists():
        raise TraceError(
            f"{like}: no such file, and no statistics of that name ship; known:"
            f" {', '.join(shipped_statistics())}"
        )

    if path.is_file() and _begins_as_archive(path):
        model = load(path)
    else:
        model = fit(open_trace(like))
    return model if weights is None else _with_weights(model, weights)


def _begins_as_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def _with_weights(model: SynthModel, weights: str) -> SynthModel:
    """The same routing of experts of other sizes."""
    shape = model.shape
    sizes = model_shape(shape.name, weights) if shape.name in known_models() else None
    # A name says nothing of a model that was cut to other numbers.
    if sizes is None or (sizes.layers, sizes.experts) != (shape.layers, shape.experts):
        raise TraceError(
            f"--quant {weights}: the sizes of {shape.name!r} are not known by name;"
            " leave it out"
        )
    provenance = {k: v for k, v in model.provenance.items() if k != WIDTHS}
    sizes = replace(sizes, top_k=shape.top_k)
    return replace(model, shape=sizes, provenance=provenance)


_TYPES: dict[str, Any] = {
    "popularity": np.float32,
    "reuse": np.float32,
    "topics": np.int8,
    "kinds": np.int8,
    "character": np.float32,
    "course": np.uint16,
    "first": np.int64,
    "lengths": np.int64,
}
_WAY_OUT = "`moesim trace synth --save-stats` makes such a file"


@dataclass
class _Header:
    """Contents of a file beside its arrays."""

    moesim_statistics: int
    shape: ModelShape
    provenance: dict[str, Any]
    permuted: float
    likeness: Likeness


def save(model: SynthModel, path: Path | str) -> Path:
    """Write a fitted model; the file appears when it is complete.

    Raises:
        TraceError: stated statistics, which need no file.
    """
    kinds = model.kinds
    if model.likeness is None or kinds is None:
        raise TraceError(
            "statistics: expected those of a trace; stated ones are their own few"
            " numbers"
        )
    header = {
        "moesim_statistics": VERSION,
        "shape": model.shape.fields(),
        "provenance": model.provenance,
        "permuted": model.permuted,
        "likeness": asdict(model.likeness),
    }
    text = json.dumps(header, sort_keys=True).encode()
    values: dict[str, Any] = {
        "popularity": model.popularity,
        "reuse": model.reuse,
        "topics": np.clip(np.round(model.topics / _STEP), -127, 127),
        "kinds": np.clip(np.round(kinds.weights / _STEP), -127, 127),
        "character": kinds.character,
        "course": kinds.course,
        "first": kinds.first,
        "lengths": model.lengths,
    }
    arrays = {name: np.asarray(values[name], _TYPES[name]) for name in _TYPES}
    archive = io.BytesIO()
    np.savez_compressed(
        archive, allow_pickle=False, header=np.frombuffer(text, np.uint8), **arrays
    )
    write_bytes(path, archive.getbuffer())
    return Path(path)


def load(path: Path | str) -> SynthModel:
    """Read what `save` wrote.

    Raises:
        TraceError: not such a file, damaged, or of another version.
    """
    path = Path(path)
    where = f"{path}: statistics"
    try:
        arrays = load_named(path)
    except (OSError, TraceError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise TraceError(f"{where}: {reason}; {_WAY_OUT}") from None
    missing = sorted({"header", *_TYPES} - set(arrays))
    if missing:
        raise TraceError(f"{where}: found no array {missing[0]}; {_WAY_OUT}")
    header = parse_json(
        arrays["header"].tobytes(),
        _Header,
        where=where,
        error=TraceError,
        way_out=_WAY_OUT,
    )
    if header.moesim_statistics != VERSION:
        raise TraceError(
            f"{where}: expected version {VERSION}, found {header.moesim_statistics};"
            " save them again"
        )

    step = np.float32(_STEP)
    return SynthModel(
        shape=header.shape,
        popularity=arrays["popularity"],
        reuse=arrays["reuse"],
        topics=arrays["topics"] * step,
        kinds=TokenKinds(
            weights=arrays["kinds"] * step,
            character=arrays["character"],
            course=arrays["course"].astype(np.int64),
            first=arrays["first"],
        ),
        lengths=tuple(map(tuple, arrays["lengths"].tolist())),
        provenance=header.provenance,
        permuted=header.permuted,
        likeness=header.likeness,
    )
