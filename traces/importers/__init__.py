"""Importers turn foreign traces into moesim's own: one file per layout, found by
scanning this folder.

An importer is a module with two functions:

- ``recognises(path) -> bool``: is this file of my layout? Never raises.
- ``read(path, shape) -> Foreign``: a table of its rows, and what it says about itself;
  see `moesim.traces.importers.readers.foreign.Foreign`.

It may also have

- ``OPTIONS``: names of options and what they are for; `read` takes them as keywords;
- ``MAPPED``: our columns that the option ``map`` may name; both functions then take
  ``names``, our column -> the file's;
- ``GENERIC = True``: ask it last, because its layout includes others;
- ``KNOWS_SHAPE = True``: `shape` may be None, for the file tells it;
- ``read_layers(paths, shape) -> Foreign``: as `read`, of a file for each MoE layer.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pkgutil
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.format.rows import check_sequence
from moesim.traces.format.schema import (
    OPTIONAL_COLUMNS,
    ModelShape,
    TraceHeader,
)
from moesim.traces.format.sorting import (
    ApartError,
    grouped,
    interleaved,
)
from moesim.traces.format.writer import TraceWriter
from moesim.traces.importers.readers.foreign import (
    decoding,
    mapped,
    spelled,
    whole_lines,
)
from moesim.traces.importers.readers.sequence_rows import (
    finished,
    of_passes,
    phases,
    ranked,
    without_cut_token,
)
from moesim.traces.stats.quality_checks import QualityChecker, alike_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from moesim.traces.importers.readers.foreign import Foreign, Mapped

    Block = dict[str, np.ndarray]
    # Of a sequence, the model's layers, and a list that gets a remark.
    Drop = Callable[[Block, int, list[str]], Block]

_NO_PHASES = (
    "the source does not tell prompt from generated tokens: all are taken as generated;"
    " --prompt-tokens N says more"
)


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
    drops: list[Drop] = []
    if drop_profiling:
        drops.append(_without_profiling)
    if drop_incomplete:
        drops.append(without_cut_token)
    files = _in_order([_file(each) for each in several])
    call = _Import(files, Path(out), shape, options or {}, progress, drops)
    if not drop_incomplete:
        return call.run()
    with whole_lines(files[0], call.out) as (file, remarks):
        call = dataclasses.replace(call, files=[file, *files[1:]], left_out=remarks)
        try:
            return call.run()
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Import:
    """One import.

    Attributes:
        files: to be read, one, or one for each layer.
        out: the trace to make.
        shape: as the user stated it.
        options: as of `import_trace`.
        progress: as of `import_trace`.
        drops: what leaves rows out, one after the other.
        left_out: remarks on what was left out before.
    """

    files: list[Path]
    out: Path
    shape: ModelShape | None
    options: Mapping[str, str]
    progress: Callable[[int], None] | None
    drops: Sequence[Drop]
    left_out: Sequence[str] = ()

    def run(self) -> ImportSummary:
        """Read the files, and write the trace."""
        source = self.files[0]
        given: dict[str, Any] = dict(self.options)
        names = mapped(source, given.pop("map", ""))
        # By content: people rename their dumps.
        importer, module = _importer_of(self.files, self.options, names)
        if self.shape is None and not hasattr(module, "KNOWS_SHAPE"):
            raise TraceError(
                f"{source}: layout {importer} does not tell the sizes of its model:"
                " expected --shape, found none"
            )
        if hasattr(module, "MAPPED"):
            given["names"] = names
        with decoding(source, importer):
            if len(self.files) > 1:
                foreign = module.read_layers(self.files, self.shape, **given)
            else:
                foreign = module.read(source, self.shape, **given)

        stated = foreign.shape or self.shape
        shape: Any = foreign.header.shape if foreign.header else stated
        finish = functools.partial(finished, source, shape, foreign.prompt)

        def rows() -> Iterator[Block]:
            pieces = ranked(foreign.pieces())
            yield from of_passes(source, pieces) if foreign.passes else pieces

        try:
            sequences = grouped(source, rows())
            return self._write(importer, foreign, map(finish, sequences))
        except (ApartError, TraceError):
            # A sequence may go on behind others, and what it lacks may stand there.
            sequences = interleaved(source, rows(), self.out, self.progress)
            return self._write(importer, foreign, map(finish, sequences))

    def _write(
        self, importer: str, foreign: Foreign, sequences: Iterator[Block]
    ) -> ImportSummary:
        """Write sequences, and judge them on the way."""
        source = self.files[0]
        header = foreign.header
        if header is None:
            # Halves of surrogate pairs, which JSON may have, could not be read back.
            text = json.dumps(foreign.facts, ensure_ascii=False)
            facts = json.loads(text.encode("utf-8", "replace"))
            header = TraceHeader(foreign.shape or self.shape, facts)  # type: ignore[arg-type]
        left_out = list(self.left_out)
        kept = self._kept(importer, sequences, header.shape.layers, left_out)
        first = next(kept, None)
        if first is None or not first["experts"].size:
            raise TraceError(
                f"{source}: expected at least one row, found an empty trace"
            )
        notes = _notes(foreign, first)
        shape = _with_top_k(header.shape, first["experts"].shape[1], notes)
        # All blocks have the columns of the first one; the writer refuses others.
        columns = tuple(column for column in OPTIONAL_COLUMNS if column in first)
        about = {
            "notes": notes,
            "importer": importer,
            "file": source.name,
            "tool": "moesim trace import",
        }
        complete = dataclasses.replace(
            header, shape=shape, provenance=header.provenance | about
        )
        by_weight = False
        quality = QualityChecker(shape)
        with TraceWriter(self.out, complete, columns) as writer:
            for number, block in enumerate(chain((first,), kept)):
                name = block["seq"][0]
                if foreign.header is None:
                    block["seq"] = np.full(len(block["pos"]), number, np.int32)
                    by_weight |= _sort_by_weight(block)
                # Without prompts a trace replays as decode, and a note says so.
                block.setdefault("phase", phases(np.zeros(len(block["pos"]), bool)))
                try:
                    writer.write(**block)
                except TraceError as error:
                    # The writer names the file it writes; the fault is in the one that
                    # is read.
                    text = str(error).replace(str(self.out), str(source), 1)
                    raise TraceError(
                        f"{text}; model {shape.name}: is the shape right?"
                    ) from None
                places = block["pos"], block["phase"], block["layer"]
                fault = functools.partial(_fault, f"{source}: sequence {name}")
                check_sequence(*places, shape.layers, fault)
                quality.add(*places, block["experts"].astype(np.uint16, copy=False))
                if self.progress is not None:
                    self.progress(writer.rows)

        if by_weight:
            notes.append(
                "experts were sorted by id, and were put in order of their weights"
            )
        # Only what would mislead is worth a line here; `trace check` tells the rest.
        grave = [finding.text for finding in quality.findings() if finding.grave]
        return ImportSummary(
            path=self.out,
            importer=importer,
            rows=writer.rows,
            sequences=quality.sequences,
            shape=shape,
            columns=columns,
            notes=(*notes, *grave, *left_out),
        )

    def _kept(
        self,
        importer: str,
        sequences: Iterable[Block],
        layers: int,
        left_out: list[str],
    ) -> Iterator[Block]:
        """Sequences without the tokens to be dropped; whatever decoding them raises is
        one line.
        """
        # Importers are generators: what a file lacks may show at any block.
        with decoding(self.files[0], importer):
            for block in sequences:
                for drop in self.drops:
                    block = drop(block, layers, left_out)  # noqa: PLW2901
                if len(block["pos"]):
                    yield block


def _fault(
    place: str, row: int, column: str, expected: str, actual: object, way_out: str
) -> TraceError:
    """The error of a row, counted from the beginning of its sequence."""
    return TraceError(
        f"{place}: row {row}: {column}: expected {expected}, got {actual}; {way_out};"
        " is the shape right?"
    )


def _notes(foreign: Foreign, first: Block) -> list[str]:
    """What deserves a line: of the file, and of what its rows do not have."""
    if foreign.header is not None:
        return list(foreign.header.provenance.get("notes", ()))
    notes = list(foreign.notes)
    if "phase" not in first:
        notes.insert(0, _NO_PHASES)
    if "weights" not in first and foreign.no_weights:
        notes.insert(0, foreign.no_weights)
    return notes


def _without_profiling(block: Block, _: int, left_out: list[str]) -> Block:
    """A sequence without tokens that all have the same experts."""
    alike = alike_rows(block["pos"], block["layer"], block["experts"])
    if not alike.any():
        return block
    pos, token = np.unique(block["pos"], return_inverse=True)
    is_alike = np.zeros(len(pos), bool)
    is_alike[token[alike]] = True
    left_out.append(
        f"sequence {block['seq'][0]}: {is_alike.sum():,} tokens with the same experts"
        " at every layer, a profiling run, were left out"
    )
    pos -= np.cumsum(is_alike).astype(pos.dtype)
    columns = {**block, "pos": pos[token]}
    return {name: column[~alike] for name, column in columns.items()}


def _sort_by_weight(block: Block) -> bool:
    """Put experts that are sorted by id in order of their weights; whether they were
    sorted so.
    """
    experts = block["experts"]
    weights = block.get("weights")
    if weights is None or not (experts[:, 1:] > experts[:, :-1]).all():
        return False
    if not (weights[:, 1:] > weights[:, :-1]).any():
        return False

    order = np.argsort(-weights, axis=1, kind="stable")
    for name in ("experts", "weights"):
        block[name] = np.take_along_axis(block[name], order, axis=1)
    return True


def _with_top_k(shape: ModelShape, top_k: int, notes: list[str]) -> ModelShape:
    """The shape with the trace's top-k; a difference is noted."""
    if top_k == shape.top_k:
        return shape

    notes.append(
        f"top-k is {top_k} in the trace, {shape.top_k} in the model: overridden when it"
        " was recorded"
    )
    return dataclasses.replace(shape, top_k=min(top_k, shape.experts))


# -- which importer --------------------------------------------------------------------


def _importer_of(
    files: list[Path], options: Mapping[str, str], names: Mapped
) -> tuple[str, Any]:
    """Name and module of the first importer that recognises the file.

    Raises:
        TraceError: none does, or the one that does lacks an option.
    """
    source = files[0]
    known = importers()
    if len(files) > 1:
        known = {
            name: module
            for name, module in known.items()
            if hasattr(module, "read_layers")
        }

    # Those that know the options come first, generic layouts, which include others,
    # last.
    def rank(name: str) -> tuple[bool, bool]:
        is_able = options.keys() <= set(_options(known[name]))
        return not is_able, hasattr(known[name], "GENERIC")

    for name in sorted(known, key=rank):
        module = known[name]
        columns = getattr(module, "MAPPED", ())
        theirs = {ours: names[ours] for ours in columns if ours in names}
        words = (theirs,) if columns else ()
        if not module.recognises(source, *words):
            continue
        offered = _options(module)
        if not options.keys() <= set(offered):
            raise TraceError(
                f"{source}: layout {name}: expected options that it knows,"
                f" {_spelled(offered) or 'none'}, found {_spelled(options)}"
            )
        if not names.keys() <= set(columns):
            raise TraceError(
                f"{source}: layout {name}: --map: expected names of"
                f" {', '.join(columns)}, found {', '.join(names)}"
            )
        return name, module
    layouts = "; ".join(
        f"{name}: {str(module.__doc__).strip().splitlines()[0]}"
        for name, module in known.items()
    )
    raise TraceError(
        f"{source}: no importer knows this layout (or the file is cut off); known:"
        f" {layouts}"
    )


def _options(module: Any) -> list[str]:
    """Names of a layout's options."""
    return [*["map"] * hasattr(module, "MAPPED"), *getattr(module, "OPTIONS", ())]


def _spelled(options: Iterable[str]) -> str:
    return ", ".join(map(spelled, options))
