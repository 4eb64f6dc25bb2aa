"""Foreign traces become ours: one file per layout, found by scanning this folder.

An importer is a module with three functions (`header` takes the place of `provenance`):

- ``recognises(path) -> bool``: is this file of my layout? Never raises.
- ``provenance(path) -> dict``: what the file says about itself, JSON values only;
  ``notes`` lists oddities.
- ``read(path, shape) -> Iterator[dict[str, ndarray]]``: blocks of rows as
  `TraceWriter.write` takes them, each block one sequence or a part of it, sorted by pos
  and layer, sequences numbered from 0; or `moesim.traces.format.sorting.Unordered`
  rows.

It may also have

- ``OPTIONS``: names of options and what they are for; `provenance`, `read` and
  `reshape` take them as keywords;
- ``GENERIC = True``: ask it last, because its layout includes others;
- ``reshape(path, shape) -> ModelShape``: what the file knows better about the model
  than the user said;
- ``header(path, shape) -> TraceHeader``: where the file has one; `shape` may then be
  None;
- ``beside(out)``: a context manager for a file next to the trace; it gives a function
  that takes from each block what a trace has no column for.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.errors import TraceError
from moesim.traces.format.checks import check_sequence
from moesim.traces.format.distinct import first_repeat
from moesim.traces.format.schema import OPTIONAL_COLUMNS, ModelShape, TraceHeader
from moesim.traces.format.sorting import ApartError, Unordered, joined
from moesim.traces.format.writer import TraceWriter
from moesim.traces.importers.readers.foreign import decoding
from moesim.traces.stats.quality_checks import Checker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class ImportSummary:
    """What an import made: which importer read how much, and what deserves a remark."""

    path: Path
    importer: str
    rows: int
    sequences: int
    shape: ModelShape
    columns: tuple[str, ...]
    notes: tuple[str, ...]


def importers() -> dict[str, Any]:
    """Name -> module of every importer in this folder, sorted by name."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg
    )
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def import_trace(
    source: Path | str,
    out: Path | str,
    *,
    shape: ModelShape | None = None,
    progress: Callable[[int], None] | None = None,
    options: Mapping[str, str] | None = None,
) -> ImportSummary:
    """Convert a foreign trace.

    Args:
        source: the foreign file.
        out: the trace to make; it appears only when it is whole.
        shape: the model that the trace came from; None where the file has a header.
            Where the trace's top-k differs, the trace is right.
        progress: called with the number of rows read for sorting, then with the number
            of rows written so far.
        options: what the file does not say and its importer asks for, such as ``{"map":
            "pos=position"}``; only importers that know all of them are asked.

    Raises:
        TraceError: no importer knows the layout or the options, the shape does not fit,
            or the file is damaged.
    """
    source = Path(source)
    out = Path(out)
    if not source.is_file():
        found = "a folder" if source.is_dir() else "no such file"
        raise TraceError(
            f"{source}: {found}; expected one file, a foreign trace to import"
        )
    given = dict(options or {})
    name, importer = _importer_of(source, given)
    with decoding(source, name):
        if hasattr(importer, "header"):
            header = importer.header(source, shape)
        elif shape is None:
            raise TraceError(
                f"{source}: layout {name} does not tell the sizes of its model:"
                " expected --shape, found none"
            )
        else:
            provenance = importer.provenance(source, **given)
            if hasattr(importer, "reshape"):
                shape = importer.reshape(source, shape, **given)
            header = TraceHeader(shape, provenance)
        rows = importer.read(source, header.shape, **given)
    blocks = rows.grouped() if isinstance(rows, Unordered) else rows
    while True:  # an importer has few reasons to read again, each once
        try:
            return _write(source, out, (name, importer), header, blocks, progress)
        except ApartError:
            blocks = rows.sorted(out, progress)


def _write(
    source: Path,
    out: Path,
    by: tuple[str, Any],
    header: TraceHeader,
    rows: Iterator[dict[str, np.ndarray]],
    progress: Callable[[int], None] | None,
) -> ImportSummary:
    """Write whole sequences, and judge them on the way."""
    name, importer = by
    shape = header.shape
    notes = list(header.provenance.get("notes", ()))
    blocks = _guarded(source, name, rows)
    first = next(blocks, None)
    if first is None or not first["experts"].size:
        raise TraceError(f"{source}: expected at least one row, found an empty trace")
    width = first["experts"].shape[1]
    if width != shape.top_k:
        notes.append(
            f"top-k is {width} in the trace, {shape.top_k} in the model: overridden"
            " when it was recorded"
        )
        shape = dataclasses.replace(shape, top_k=min(width, shape.experts))
    columns = tuple(column for column in OPTIONAL_COLUMNS if column in first)
    details = {
        **header.provenance,
        "notes": notes,
        "importer": name,
        "file": source.name,
        "tool": "moesim trace import",
    }
    verdict = _Sequences(source, shape)
    beside = (
        importer.beside(out)
        if hasattr(importer, "beside")
        else nullcontext(lambda block: block)
    )
    whole = dataclasses.replace(header, shape=shape, provenance=details)
    with beside as kept, TraceWriter(out, whole, columns) as writer:
        for block in map(kept, chain((first,), blocks)):
            verdict.add(block)
            try:
                writer.write(**block)
            except TraceError as error:
                # what its sequence lacks says more than how its rows stand
                verdict.end()
                # the writer names the file it writes; the fault is in the one that is
                # read
                raise TraceError(str(error).replace(str(out), str(source), 1)) from None
            if progress is not None:
                progress(writer.rows)
        verdict.end()
    notes = notes + [
        finding.text for finding in verdict.checker.findings() if finding.grave
    ]
    return ImportSummary(
        out, name, writer.rows, verdict.checker.sequences, shape, columns, tuple(notes)
    )


def _guarded(
    source: Path, name: str, blocks: Iterator[dict[str, np.ndarray]]
) -> Iterator[dict[str, np.ndarray]]:
    """The blocks, with whatever decoding them raises turned into one line."""
    while True:
        with decoding(source, name):
            block = next(blocks, None)
        if block is None:
            return
        yield block


class _Sequences:
    """Checks sequences against the model, and judges them. Of a sequence in parts its
    ids are kept until it ends.
    """

    def __init__(self, source: Path, shape: ModelShape) -> None:
        self.checker = Checker(shape)
        self._source = source
        self._shape = shape
        self._held: list[dict[str, np.ndarray]] = []

    def add(self, block: dict[str, np.ndarray]) -> None:
        """One block: layers and ids in range, ids distinct."""
        if (
            self._held
            and len(block["seq"])
            and block["seq"][0] != self._held[0]["seq"][0]
        ):
            self.end()
        layer = block["layer"]
        experts = block["experts"]
        shape = self._shape
        if not experts.size:
            raise TraceError(
                f"{self._source}: expected at least one row in every sequence, found"
                " none"
            )
        if not 0 <= layer.min() <= layer.max() < shape.layers:
            row = int(((layer < 0) | (layer >= shape.layers)).argmax())
            raise self._bad(
                block,
                row,
                "layer",
                f"0..{shape.layers - 1}",
                layer[row],
                f"model {shape.name}",
            )
        if not 0 <= experts.min() <= experts.max() < shape.experts:
            row = int(((experts < 0) | (experts >= shape.experts)).any(axis=1).argmax())
            raise self._bad(
                block,
                row,
                "experts",
                f"0..{shape.experts - 1}",
                experts[row].max(),
                f"model {shape.name}",
            )
        experts = np.ascontiguousarray(experts, np.uint16)
        if (row := first_repeat(experts)) >= 0:
            raise self._bad(
                block,
                row,
                "experts",
                "distinct ids",
                experts[row].tolist(),
                "is top-k right",
            )
        kept = {"seq": block["seq"][:1], "pos": block["pos"], "phase": block["phase"]}
        self._held.append(
            {**kept, "layer": layer.astype(np.int16, copy=False), "experts": experts}
        )

    def end(self) -> None:
        """The sequence is whole: its tokens must be."""
        if not self._held:
            return
        whole = joined(self._held)
        self._held = []

        def bad(row: int, *words: Any) -> TraceError:
            return self._bad(whole, row, *words)

        check_sequence(
            whole["pos"], whole["phase"], whole["layer"], self._shape.layers, bad
        )
        self.checker.add(whole["pos"], whole["phase"], whole["layer"], whole["experts"])

    def _bad(
        self,
        block: dict[str, np.ndarray],
        row: int,
        column: str,
        expected: str,
        got: object,
        way_out: str,
    ) -> TraceError:
        row += sum(len(part["pos"]) for part in self._held)
        place = f"{self._source}: sequence {block['seq'][0]}: row {row}: {column}"
        return TraceError(
            f"{place}: expected {expected}, got {got}; {way_out}; is the shape right?"
        )


def _importer_of(source: Path, options: Mapping[str, str]) -> tuple[str, Any]:
    known = sorted(
        importers().items(),
        key=lambda item: (getattr(item[1], "GENERIC", False), item[0]),
    )
    able = {
        name: module
        for name, module in known
        if set(options) <= set(getattr(module, "OPTIONS", {}))
    }
    if not able:
        offered = sorted(
            {option for _, module in known for option in getattr(module, "OPTIONS", {})}
        )
        raise TraceError(
            f"option {'+'.join(options)}: no importer knows it; known:"
            f" {', '.join(offered)}"
        )
    for name, module in able.items():
        if module.recognises(source):
            return name, module
    refused = next(
        (
            name
            for name, module in known
            if name not in able and module.recognises(source)
        ),
        None,
    )
    if refused is not None:
        takes = ", ".join(getattr(dict(known)[refused], "OPTIONS", {})) or "none"
        raise TraceError(
            f"{source}: layout {refused}: option {'+'.join(options)} is unknown; known:"
            f" {takes}"
        )
    layouts = "; ".join(
        f"{name}: {str(module.__doc__).strip().splitlines()[0]}"
        for name, module in known
    )
    raise TraceError(
        f"{source}: no importer knows this layout (or the file is cut off); known:"
        f" {layouts}"
    )
