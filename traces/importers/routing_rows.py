"""Parquet rows of seq_id, step, phase, layer, token, expert_ids, scores.

Sequences are kept in the order of their first row. ``token`` is the absolute position;
``scores`` with one value per selected expert are the combine weights; ``tok_hash`` is
no token id and is left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from moesim.base.errors import TraceError
from moesim.traces.format.parquet import codes, flat, open_parquet, read_schema, values
from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import BATCH_ROWS, Unordered
from moesim.traces.importers.readers.foreign import NO_WEIGHTS, ParseCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

COLUMNS = ("seq_id", "phase", "layer", "token", "expert_ids")
_PHASES = [phase.label for phase in Phase]
_METADATA = ("source", "licence", "license", "model", "note")


class _Overview(NamedTuple):
    """Sequence names by first appearance, and whether all rows have scores."""

    names: list[str]
    has_scores: bool


def recognises(path: Path) -> bool:
    """Whether this is Parquet with the columns of the layout."""
    try:
        names = read_schema(path).names
    except (pa.ArrowException, OSError, ValueError):
        return False

    return set(COLUMNS) <= set(names)


def provenance(path: Path) -> dict[str, Any]:
    """Source, licence and model from the file's own metadata, sequence names, and
    remarks on oddities.
    """
    metadata = {
        key.decode(): value.decode()
        for key, value in (read_schema(path).metadata or {}).items()
    }
    overview: _Overview = _overview.get(path)

    names = overview.names
    notes = [] if overview.has_scores else [NO_WEIGHTS]
    if "ascending" in metadata.get("note", ""):
        notes.append("experts are ordered by id, their rank is lost")

    degenerate = _degenerate(metadata)
    if degenerate:
        notes.append(
            f"{len(degenerate)} of {len(names)} sequences are degenerate repetition,"
            " kept"
        )

    return {
        **{key: metadata[key] for key in _METADATA if key in metadata},
        "sequences": names,
        "degenerate": [
            number for number, name in enumerate(names) if name in set(degenerate)
        ],
        "notes": notes,
    }


def _degenerate(metadata: dict[str, str]) -> list[str]:
    """Names of the sequences that the file's metadata calls repetition."""
    try:
        sequences = json.loads(metadata.get("sequences", "[]"))
        return [entry["seq_id"] for entry in sequences if entry.get("repetition")]
    except (ValueError, TypeError, KeyError, AttributeError):
        # Metadata of another shape says nothing about repetition.
        return []


def read(path: Path, shape: ModelShape) -> Unordered:
    """The file's rows; runtimes write them step by step and layer by layer."""
    del shape

    def pieces() -> Iterator[Block]:
        overview: _Overview = _overview.get(path)
        # Numbered by first appearance, which the overview has found out.
        number_of = {name: index for index, name in enumerate(overview.names)}
        return _blocks(path, number_of, overview.has_scores)

    return Unordered(pieces)


def _batches(path: Path, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """Record batches with the number of their first row."""
    first_row = 0

    # Equal texts take no space in a file, and all of it in memory unless encoded.
    with open_parquet(path, encoded=("seq_id", "phase")) as file:
        batches = file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                reason = (str(error).splitlines() or ["unreadable"])[0]
                raise TraceError(
                    f"{path}: after row {first_row}: {reason}; was it cut off while"
                    " copying?"
                ) from None

            if batch is None:
                return
            yield first_row, batch
            first_row += batch.num_rows


def _read_overview(path: Path) -> _Overview:
    names: dict[str, None] = {}
    has_scores = "scores" in read_schema(path).names

    for first_row, batch in _batches(path, _with_scores("seq_id", has_scores)):
        column = _dictionary(batch.column("seq_id"))
        if column.null_count:
            raise TraceError(
                f"{path}: after row {first_row}: seq_id: expected a name, got null"
            )

        labels = [str(label) for label in column.dictionary.to_pylist()]
        index = values(column.indices)
        # Rows of a sequence stand together: only where the name changes is it looked
        # up.
        change = np.concatenate(([True], np.diff(index) != 0))[: len(index)]
        for label in index[change].tolist():
            names.setdefault(labels[label])

        has_scores = has_scores and not batch.column("scores").null_count

    return _Overview(list(names), has_scores)


_overview = ParseCache(_read_overview)


def _with_scores(name: str, has_scores: bool) -> list[str]:
    return [name, "scores"] if has_scores else [name]


def _dictionary(column: Any) -> Any:
    is_encoded = isinstance(column, pa.DictionaryArray)
    return column if is_encoded else column.dictionary_encode()


def _blocks(path: Path, number_of: dict[str, int], has_scores: bool) -> Iterator[Block]:
    """The file's rows as arrays, in file order; sequences by `number_of` their name."""
    width = 0
    names = [*COLUMNS, "scores"] if has_scores else list(COLUMNS)

    for first_row, batch in _batches(path, names):
        for name in batch.schema.names:
            if batch.column(name).null_count:
                raise TraceError(
                    f"{path}: after row {first_row}: {name}: expected a value in every"
                    " row, got null"
                )

        phase = codes(batch.column("phase"), _PHASES)
        if (phase < 0).any():
            raise TraceError(
                f"{path}: row {first_row + int(np.argmin(phase))}: phase: expected"
                " prefill or decode"
            )

        experts = _matrix(path, first_row, "expert_ids", batch.column("expert_ids"))
        # Arrow knows no lists of one length, so each batch is compared.
        width = width or experts.shape[1]
        if experts.shape[1] != width:
            actual = sorted((width, experts.shape[1]))
            raise TraceError(
                f"{path}: expert_ids: expected the same top-k in all rows, got {actual}"
            )

        block = {
            "seq": _sequences(batch.column("seq_id"), number_of),
            "pos": values(batch.column("token")),
            "phase": phase,
            "layer": values(batch.column("layer")),
            "experts": experts,
        }
        if has_scores:
            scores = _matrix(path, first_row, "scores", batch.column("scores"))
            # One value per chosen expert, or one for each of the model.
            per_choice = scores.shape[1] == width
            block["weights" if per_choice else "scores"] = scores
        yield block


def _sequences(column: Any, number_of: dict[str, int]) -> np.ndarray:
    """int32 [N]: the number of each row's sequence."""
    encoded = _dictionary(column)
    labels = encoded.dictionary.to_pylist()
    # A dictionary may have labels that no row uses, as pandas writes categories.
    numbers = np.array([number_of.get(str(label), -1) for label in labels], np.int32)
    sequences: np.ndarray = numbers[values(encoded.indices)]
    return sequences


def _matrix(path: Path, first_row: int, name: str, array: Any) -> np.ndarray:
    """[N, K] of a list column with equally long, complete rows."""
    lengths = np.diff(values(array.offsets))
    if len(lengths) and (lengths != lengths[0]).any():
        row = int(np.argmax(lengths != lengths[0]))
        raise TraceError(
            f"{path}: row {first_row + row}: {name}: expected {lengths[0]} values, got"
            f" {lengths[row]}"
        )

    inner = flat(array)
    if inner.null_count:
        is_null = inner.is_null().to_numpy(zero_copy_only=False)
        row = int(np.argmax(is_null)) // int(lengths[0])
        raise TraceError(
            f"{path}: row {first_row + row}: {name}: expected numbers, got null"
        )

    return values(inner).reshape(len(lengths), -1)
