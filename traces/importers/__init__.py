"""Importers turn foreign traces into moesim's own: one file per layout, found by
scanning this folder.

An importer is a module with three functions (`header` takes the place of `provenance`):

- ``recognises(path) -> bool``: is this file of my layout? Raises only where it takes
  options, and is given words that its layout does not have.
- ``provenance(path) -> dict``: what the file says about itself, JSON values only;
  ``notes`` lists oddities.
- ``read(path, shape) -> Iterator[dict[str, ndarray]]``: blocks of rows as
  `TraceWriter.write` takes them, each block one sequence or a part of it, sorted by pos
  and layer, sequences numbered from 0; or `moesim.traces.format.sorting.Unordered`
  rows.

It may also have

- ``OPTIONS``: names of options and what they are for; `provenance`, `read`,
  `own_shape` and `reshape` take them as keywords;
- ``ASKED``: those of them that `recognises` takes, too;
- ``GENERIC = True``: ask it last, because its layout includes others;
- ``own_shape(path) -> ModelShape | None``: the model as the file describes it;
- ``reshape(path, shape) -> ModelShape``: what the file knows better about the model
  than the user said;
- ``header(path, shape) -> TraceHeader``: where the file has one; `shape` may then be
  None;
- ``beside(out)``: a context manager for a file next to the trace; it gives a function
  that takes from each block what a trace has no column for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pkgutil
import re
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.format.arrays import first_repeat
from moesim.traces.format.schema import (
    OPTIONAL_COLUMNS,
    ModelShape,
    TraceHeader,
    check_sequence,
)
from moesim.traces.format.sorting import ApartError, Unordered, joined, whole_sequences
from moesim.traces.format.sorting import TooLongError as TooLongError
from moesim.traces.format.writer import TraceWriter
from moesim.traces.importers.readers.foreign import decoding, spelled
from moesim.traces.importers.readers.sequence_rows import without_cut_tokens
from moesim.traces.importers.readers.text import whole_lines
from moesim.traces.stats.quality_checks import QualityChecker, alike_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Block = dict[str, np.ndarray]


class Importer(NamedTuple):
    """A module of this folder."""

    name: str
    module: Any


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


@functools.cache
def importers() -> dict[str, Any]:
    """Return name -> module of every importer in this folder, sorted by name."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg
    )
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def import_trace(
    source: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    shape: ModelShape | None = None,
    progress: Callable[[int], None] | None = None,
    options: Mapping[str, str] | None = None,
    drop_incomplete: bool = False,
    drop_profiling: bool = False,
) -> ImportSummary:
    """Convert a foreign trace.

    Args:
        source: the foreign file; or several, one for each MoE layer in their order,
            whose rows are the same tokens (see `moesim.traces.importers.columns`).
        out: the trace to make; it appears only when it is whole.
        shape: the model that the trace came from; None where the file has a header.
            Where the trace's top-k differs, the trace is right.
        progress: called with the number of rows read for sorting, then with the number
            of rows written so far.
        options: what the file does not say and its importer asks for, such as ``{"map":
            "pos=position"}``; only importers that know all of them are asked.
        drop_incomplete: leave out a last line that was cut off, and the last token of a
            sequence where a layer of it is missing.
        drop_profiling: leave out tokens in a row that all have the same experts: what
            an engine ran to measure its memory.

    Raises:
        TraceError: no importer knows the layout or the options, the shape does not fit,
            or the file is damaged.
    """
    several = [source] if isinstance(source, str | Path) else list(source)
    if not several:
        raise TraceError("import: expected a foreign file, got none")
    files = _in_order([_file(each) for each in several])
    out = Path(out)
    given = dict(options or {})
    if len(files) > 1:
        # Only tables come in a file for each layer.
        given["layer_files"] = json.dumps([str(file) for file in files])
    drops: list[Callable[..., Iterator[Block]]] = []
    if drop_profiling:
        drops.append(_without_profiling)
    if not drop_incomplete:
        return _import(files[0], out, shape, progress, given, (drops, []))
    drops.append(without_cut_tokens)
    with whole_lines(files[0], out) as (file, remarks):
        try:
            return _import(file, out, shape, progress, given, (drops, remarks))
        except TraceError as error:
            # Faults are in the file that the user knows.
            raise TraceError(str(error).replace(str(file), str(files[0]))) from None


def _file(path: Path | str) -> Path:
    file = Path(path)
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "no such file"
        raise TraceError(
            f"{file}: {kind}; expected one file, a foreign trace to import"
        )
    return file


def _in_order(files: list[Path]) -> list[Path]:
    """Files by the last numbers in their names, where each has one of its own: a shell
    puts ``layer10`` before ``layer2``.
    """
    numbers = [re.findall(r"\d+", file.stem) for file in files]
    last = [int(digits[-1]) for digits in numbers if digits]
    if len(set(last)) < len(files):
        return files
    return [file for _, file in sorted(zip(last, files, strict=True))]


def _import(
    source: Path,
    out: Path,
    shape: ModelShape | None,
    progress: Callable[[int], None] | None,
    options: dict[str, str],
    leaving_out: tuple[Sequence[Callable[..., Iterator[Block]]], list[str]],
) -> ImportSummary:
    """Convert one file; `leaving_out`: what leaves rows out, and remarks on what was
    before.
    """
    drops, dropped = leaving_out
    # By content: people rename their dumps.
    importer = _importer_of(source, options)

    with decoding(source, importer.name):
        header = _header(source, importer, shape, options)
        rows = importer.module.read(source, header.shape, **options)

    blocks = rows.grouped() if isinstance(rows, Unordered) else rows
    is_sorted = False
    while True:
        left_out: list[str] = []
        for drop in drops:
            blocks = drop(blocks, header.shape.layers, left_out)
        # An importer has few reasons to have its file read again, each of them once.
        try:
            summary = _write(source, out, importer, header, blocks, progress)
        except ApartError:
            is_sorted = True
            blocks = rows.sorted(out, progress)
        except TraceError:
            # What a sequence lacks may stand behind the others.
            if is_sorted or not _is_apart(source, importer, rows):
                raise
            is_sorted = True
            blocks = rows.sorted(out, progress)
        else:
            notes = (*summary.notes, *dropped, *left_out)
            return dataclasses.replace(summary, notes=notes)


def _without_profiling(
    blocks: Iterable[Block], layers: int, dropped: list[str]
) -> Iterator[Block]:
    """Sequences without tokens that all have the same experts; `dropped` gets a remark
    for each sequence that had some.
    """
    del layers
    left_out = 0
    for block in whole_sequences(blocks):
        alike = alike_rows(block["pos"], block["layer"], block["experts"])
        seq = block["seq"] - left_out
        pos, token = np.unique(block["pos"], return_inverse=True)
        if alike.any():
            is_alike = np.zeros(len(pos), bool)
            is_alike[token[alike]] = True
            dropped.append(
                f"sequence {block['seq'][0]}: {is_alike.sum():,} tokens with the same"
                " experts at every layer, a profiling run, were left out"
            )
            pos -= np.cumsum(is_alike).astype(pos.dtype)
        if alike.all():
            left_out += 1
            continue
        columns = {**block, "seq": seq, "pos": pos[token]}
        yield {name: column[~alike] for name, column in columns.items()}


def _is_apart(source: Path, importer: Importer, rows: Any) -> bool:
    """Whether a sequence goes on behind another one, as far as the file can be read."""
    if not isinstance(rows, Unordered):
        return False
    try:
        for _ in whole_sequences(_guarded(source, importer.name, iter(rows.pieces()))):
            pass
    except ApartError:
        return True
    except TraceError:
        return False
    return False


def _header(
    source: Path, importer: Importer, shape: ModelShape | None, options: dict[str, str]
) -> TraceHeader:
    """The header of the trace to be made: the file's own, or the stated shape."""
    module = importer.module
    if hasattr(module, "header"):
        header: TraceHeader = module.header(source, shape)
        return header

    if shape is None and hasattr(module, "own_shape"):
        shape = module.own_shape(source, **options)
    if shape is None:
        raise TraceError(
            f"{source}: layout {importer.name} does not tell the sizes of its model:"
            " expected --shape, found none"
        )

    provenance = module.provenance(source, **options)
    if hasattr(module, "reshape"):
        shape = module.reshape(source, shape, **options)
    return TraceHeader(shape, provenance)


def _write(
    source: Path,
    out: Path,
    importer: Importer,
    header: TraceHeader,
    rows: Iterator[Block],
    progress: Callable[[int], None] | None,
) -> ImportSummary:
    """Write whole sequences, and judge them on the way."""
    module = importer.module
    notes = list(header.provenance.get("notes", ()))

    # Importers are generators: what a file lacks may show at any block.
    blocks = _guarded(source, importer.name, rows)
    first = next(blocks, None)
    if first is None or not first["experts"].size:
        raise TraceError(f"{source}: expected at least one row, found an empty trace")

    shape = _with_top_k(header.shape, first["experts"].shape[1], notes)
    # All blocks have the columns of the first one; the writer refuses others.
    columns = tuple(column for column in OPTIONAL_COLUMNS if column in first)
    provenance = {
        **header.provenance,
        "notes": notes,
        "importer": importer.name,
        "file": source.name,
        "tool": "moesim trace import",
    }
    complete = dataclasses.replace(header, shape=shape, provenance=provenance)

    by_weight = False
    sequences = _SequenceChecks(source, shape)
    beside = module.beside(out) if hasattr(module, "beside") else _nothing_beside()
    with beside as without_extras, TraceWriter(out, complete, columns) as writer:
        for block in map(without_extras, chain((first,), blocks)):
            if not hasattr(module, "header"):
                block, was_sorted = _best_first(block)  # noqa: PLW2901 - in order
                by_weight |= was_sorted
            sequences.add(block)
            try:
                writer.write(**block)
            except TraceError as error:
                # What its sequence lacks says more than how its rows stand.
                sequences.end()
                # The writer names the file it writes; the fault is in the one that is
                # read.
                raise TraceError(str(error).replace(str(out), str(source), 1)) from None
            if progress is not None:
                progress(writer.rows)
        sequences.end()

    if by_weight:
        notes.append(
            "experts were sorted by id, and were put in order of their weights"
        )
    # Only what would mislead is worth a line here; `trace check` tells the rest.
    grave = [finding.text for finding in sequences.quality.findings() if finding.grave]
    return ImportSummary(
        path=out,
        importer=importer.name,
        rows=writer.rows,
        sequences=sequences.quality.sequences,
        shape=shape,
        columns=columns,
        notes=(*notes, *grave),
    )


def _best_first(block: Block) -> tuple[Block, bool]:
    """Rows whose experts go by their weights, where they were sorted by id; and whether
    they were.
    """
    experts = block["experts"]
    weights = block.get("weights")
    if weights is None or not (experts[:, 1:] > experts[:, :-1]).all():
        return block, False
    if not (weights[:, 1:] > weights[:, :-1]).any():
        return block, False

    order = np.argsort(-weights, axis=1, kind="stable")
    ordered = {
        name: np.take_along_axis(block[name], order, axis=1)
        for name in ("experts", "weights")
    }
    return {**block, **ordered}, True


def _with_top_k(shape: ModelShape, top_k: int, notes: list[str]) -> ModelShape:
    """The shape with the trace's top-k; a difference is noted."""
    if top_k == shape.top_k:
        return shape

    notes.append(
        f"top-k is {top_k} in the trace, {shape.top_k} in the model: overridden when it"
        " was recorded"
    )
    return dataclasses.replace(shape, top_k=min(top_k, shape.experts))


def _nothing_beside() -> Any:
    return nullcontext(lambda block: block)


def _guarded(source: Path, name: str, blocks: Iterator[Block]) -> Iterator[Block]:
    """The blocks, with whatever decoding them raises turned into one line."""
    while True:
        try:
            with decoding(source, name):
                block = next(blocks, None)
        except TooLongError as error:
            raise TraceError(f"{source}: {error}") from None
        if block is None:
            return
        yield block


class _SequenceChecks:
    """Checks sequences against the model, and judges them.

    Of a sequence that comes in parts, positions and ids are kept until it ends.
    """

    def __init__(self, source: Path, shape: ModelShape) -> None:
        self.quality = QualityChecker(shape)
        self._source = source
        self._shape = shape
        self._parts: list[Block] = []

    def add(self, block: Block) -> None:
        """Check one block: layers and ids in range, ids distinct."""
        experts = block["experts"]
        if not experts.size:
            raise TraceError(
                f"{self._source}: expected at least one row in every sequence, found"
                " none"
            )
        if self._parts and block["seq"][0] != self._parts[0]["seq"][0]:
            self.end()

        layer = block["layer"]
        self._check_range(block, "layer", layer.reshape(-1, 1), self._shape.layers)
        self._check_range(block, "experts", experts, self._shape.experts)

        # In range by now, so nothing is cut off by the narrow type.
        experts = np.ascontiguousarray(experts, np.uint16)
        row = first_repeat(experts)
        if row >= 0:
            ids = experts[row].tolist()
            way_out = "is top-k right"
            raise self._error(block, row, "experts", "distinct ids", ids, way_out)

        part = {"seq": block["seq"][:1], "pos": block["pos"], "phase": block["phase"]}
        part["layer"] = layer.astype(np.int16, copy=False)
        part["experts"] = experts
        self._parts.append(part)

    def end(self) -> None:
        """Check the sequence that is complete now: its tokens must be, too."""
        if not self._parts:
            return
        sequence = joined(self._parts)
        self._parts = []

        def error(row: int, *parts: Any) -> TraceError:
            return self._error(sequence, row, *parts)

        pos = sequence["pos"]
        phase = sequence["phase"]
        layer = sequence["layer"]
        check_sequence(pos, phase, layer, self._shape.layers, error)
        self.quality.add(pos, phase, layer, sequence["experts"])

    def _check_range(
        self, block: Block, name: str, table: np.ndarray, limit: int
    ) -> None:
        """Whether all of `table` [N, M] is from 0 to below `limit`."""
        if 0 <= table.min() <= table.max() < limit:
            return

        outside = (table < 0) | (table >= limit)
        row = int(outside.any(axis=1).argmax())
        expected = f"0..{limit - 1}"
        way_out = f"model {self._shape.name}"
        raise self._error(block, row, name, expected, table[row].max(), way_out)

    def _error(
        self,
        block: Block,
        row: int,
        column: str,
        expected: str,
        actual: object,
        way_out: str,
    ) -> TraceError:
        # Rows are counted from the beginning of the sequence.
        row += sum(len(part["pos"]) for part in self._parts)
        place = f"{self._source}: sequence {block['seq'][0]}: row {row}: {column}"
        return TraceError(
            f"{place}: expected {expected}, got {actual}; {way_out}; is the shape"
            " right?"
        )


# -- which importer --------------------------------------------------------------------


def _importer_of(source: Path, options: Mapping[str, str]) -> Importer:
    """The first importer that recognises the file.

    Raises:
        TraceError: none does, or the one that does lacks an option.
    """
    # Generic layouts include others, so they are asked last.
    known = sorted(
        importers().items(),
        key=lambda item: (getattr(item[1], "GENERIC", False), item[0]),
    )
    able = {
        name: module
        for name, module in known
        if set(options) <= {*_options(module), *getattr(module, "PARTS", ())}
    }
    if not able:
        offered = sorted({option for _, module in known for option in _options(module)})
        raise TraceError(
            f"{_spelled(options)}: no importer knows them; known:"
            f" {', '.join(map(spelled, offered))}"
        )

    # A mapping may say what a file's columns are, and so what file it is.
    judges = 0
    wrong_words = []
    for name, module in able.items():
        asked = getattr(module, "ASKED", ())
        relevant = {key: text for key, text in options.items() if key in asked}
        judges += bool(relevant)
        try:
            if module.recognises(source, **relevant):
                return Importer(name, module)
        except TraceError as error:
            wrong_words.append(error)

    # They may be words for another layout, but not for none.
    if wrong_words and len(wrong_words) == judges:
        raise wrong_words[0]

    for name, module in known:
        if name not in able and module.recognises(source):
            raise TraceError(
                f"{source}: layout {name}: expected options that it knows,"
                f" {_spelled(_options(module)) or 'none'}, found {_spelled(options)}"
            )

    layouts = "; ".join(
        f"{name}: {str(module.__doc__).strip().splitlines()[0]}"
        for name, module in known
    )
    raise TraceError(
        f"{source}: no importer knows this layout (or the file is cut off); known:"
        f" {layouts}"
    )


def _spelled(options: Iterable[str]) -> str:
    return ", ".join(map(spelled, options))


def _options(importer: Any) -> dict[str, str]:
    options: dict[str, str] = getattr(importer, "OPTIONS", {})
    return options
