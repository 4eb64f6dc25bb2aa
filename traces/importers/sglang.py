"""SGLang expert-distribution dumps (torch zip): per_token, and per_pass as far as it
tells.

``per_token`` holds physical expert ids of every token, in a width of 8 that is filled
with -1. Which request a token belongs to is not in the file; requests are told apart by
their positions, in the order of the running batch. ``per_pass`` holds only how many
tokens each expert got in a pass: a pass of one token is exact but for the rank of its
experts, in a pass of several tokens the workloads are exact and the tokens are dealt.

Source: sglang/srt/eplb/expert_distribution.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import BATCH_ROWS, Appearance, Unordered
from moesim.traces.importers.readers import torch_file as torchfile
from moesim.traces.importers.readers.foreign import (
    NO_WEIGHTS,
    Once,
    Passes,
    bad,
    decoding,
    layer_numbers,
)
from moesim.traces.importers.readers.tensors import integers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

_EXTEND = 1
_DECODE = 2
_MIXED = 3
# asked for at every token: an enumeration is slow
_PROMPT = int(Phase.PREFILL)
_GENERATED = int(Phase.DECODE)
_RECORD_WITH = "record with --expert-distribution-recorder-mode per_token"
_KEYS = ({"records", "last_physical_to_logical_map"}, {"logical_count"})


def recognises(path: Path) -> bool:
    """Whether this is a torch zip that names the keys of a dump, or a bare pickle,
    which only gets a refusal.
    """
    if torchfile.is_bare_pickle(path):
        return True
    if not torchfile.is_torch_file(path):
        return False
    words = torchfile.words(path)
    return any(keys <= words for keys in _KEYS)


def provenance(path: Path) -> dict[str, Any]:
    """Mode, rank, number of passes, and remarks."""
    found = _parsed.kept(path)
    records = found["records"]
    per_token = "topk_ids_of_layer" in records[0]
    notes = [NO_WEIGHTS]
    if per_token:
        notes.append("requests are told apart by position: SGLang does not name them")
    else:
        notes.append(
            "per_pass holds workloads, not tokens: experts are ordered by id, several"
            " tokens of a pass are dealt"
        )
    return {
        "mode": "per_token" if per_token else "per_pass",
        "rank": int(records[0]["rank"]),
        "passes": len(records),
        "notes": notes,
    }


def read(path: Path, shape: ModelShape) -> Unordered:
    """The file's passes. Their list is in memory, their ids are read as they are
    needed.
    """
    found = _parsed.taken(path)
    logical = _integers(
        path, "last_physical_to_logical_map", found["last_physical_to_logical_map"], 2
    )
    if logical.size and not 0 <= logical.min() <= logical.max() < 1 << 16:
        raise bad(
            path,
            "last_physical_to_logical_map",
            "expert ids",
            f"{logical.min()}..{logical.max()}",
        )
    records = found["records"]
    if "topk_ids_of_layer" in records[0]:
        return Unordered(lambda: _per_token(path, records, logical, shape))
    return Unordered(lambda: _per_pass(path, records, logical, shape))


def _load(path: Path) -> dict[str, Any]:
    if torchfile.is_bare_pickle(path):
        raise torchfile.refuse_pickle(path)
    found = torchfile.load(path, stored=True)
    if isinstance(found, dict) and "logical_count" in found:
        raise bad(
            path,
            "mode",
            "per_token or per_pass",
            "stat, which holds sums only",
            _RECORD_WITH,
        )
    with decoding(path, "dump"):
        records = found["records"]
        if not isinstance(records, list) or not records:
            raise bad(
                path,
                "records",
                "at least one pass",
                "none",
                "was recording started before the requests?",
            )
        kinds = {
            ("topk_ids_of_layer" in one, "global_physical_count" in one)
            for one in records
        }
        if len(kinds) > 1 or kinds == {(False, False)}:
            raise bad(
                path,
                "records",
                "topk_ids_of_layer or global_physical_count in all",
                "neither, or a mixture",
            )
        return dict(found)


_parsed = Once(_load)


def _integers(path: Path, place: str, value: Any, dimensions: int) -> np.ndarray:
    """A tensor's numbers, out of the file."""
    return integers(
        path,
        place,
        value.array() if isinstance(value, torchfile.Stored) else value,
        dimensions,
    )


def _to_logical(
    path: Path, place: str, physical: np.ndarray, logical: np.ndarray
) -> np.ndarray:
    """Logical ids of physical ids [L, ...]; -1 stays -1."""
    if physical.size and (physical.max() >= logical.shape[1] or physical.min() < -1):
        outside = int(
            physical.max() if physical.max() >= logical.shape[1] else physical.min()
        )
        raise bad(path, place, f"physical ids 0..{logical.shape[1] - 1} or -1", outside)
    # -1 is the last.
    known = np.concatenate((logical, np.full((len(logical), 1), -1)), axis=1).astype(
        np.int32
    )
    return np.stack(
        [np.take(of_layer, ids) for of_layer, ids in zip(known, physical, strict=True)]
    )


# -- per_token -------------------------------------------------------------------------


class _Running:
    """All requests so far, found by the position that would continue them.

    A decode pass keeps the order of the running batch, so of several candidates the
    first behind the previous match is taken. Only prompts are continued by an extend
    pass (chunked prefill): one that begins elsewhere reuses a prefix.
    """

    def __init__(self) -> None:
        self._phases: list[int] = []  # of the last token of each request
        self._due: dict[
            int, list[int]
        ] = {}  # next position -> ascending request numbers

    def add(
        self, path: Path, where: str, record: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        """Give the tokens of one pass to requests: number of the request and phase of
        each token.
        """
        positions = record["positions"]
        mode = record["forward_mode"]
        if mode == _DECODE:
            lengths = [1] * len(positions)
        elif mode in (_EXTEND, _MIXED):
            lengths = record["extend_seq_lens"]
            if sum(lengths) != len(positions) or min(lengths, default=1) < 1:
                raise bad(
                    path,
                    where,
                    f"extend_seq_lens that add up to {len(positions)}",
                    lengths,
                )
        else:
            raise bad(
                path,
                where,
                "forward_mode 1 (extend), 2 (decode) or 3 (mixed)",
                mode,
                "record without speculation",
            )
        start = taken = 0
        numbers: list[int] = []
        phases: list[int] = []
        for length in lengths:
            part = positions[start : start + length]
            if (length > 1 and part != list(range(part[0], part[0] + length))) or part[
                0
            ] < 0:
                raise bad(path, where, "consecutive positions of a request", part[:8])
            generated = mode == _DECODE or (mode == _MIXED and length == 1)
            number = self._continued(part[0], taken, any_phase=generated)
            if number < 0:
                number = len(self._phases)
                self._phases.append(_PROMPT)
                generated = mode == _DECODE
            taken = max(taken, number + 1)
            self._phases[number] = _GENERATED if generated else _PROMPT
            numbers += [number] * length
            phases += [self._phases[number]] * length
            insort(self._due.setdefault(part[-1] + 1, []), number)
            start += length
        return numbers, phases

    def _continued(self, position: int, taken: int, *, any_phase: bool) -> int:
        """The request that waits for `position`, -1 if none; it waits no longer."""
        due = self._due.get(position, [])
        behind = bisect_left(due, taken)
        for index in chain(range(behind, len(due)), range(behind)):
            if any_phase or self._phases[due[index]] == _PROMPT:
                if len(due) == 1:
                    del self._due[position]
                return due.pop(index)
        return -1


def _per_token(
    path: Path, records: list[Any], logical: np.ndarray, shape: ModelShape
) -> Iterator[Block]:
    """Rows of some passes at a time, in the order of the file."""
    running = _Running()
    sequences = Appearance()
    widths = _Widths(path, shape)
    held: tuple[list[int], ...] = [], [], [], []  # request, phase, position, token id
    ids: list[np.ndarray] = []
    for number, record in enumerate(records):
        where = f"record {number}"
        physical = _integers(
            path, f"{where}: topk_ids_of_layer", record["topk_ids_of_layer"], 3
        )
        positions = record["positions"]
        inputs = record["input_ids"]
        if not len(positions) == len(inputs) == physical.shape[1]:
            found = (
                f"{len(positions)} positions, {len(inputs)} input_ids,"
                f" {physical.shape[1]} columns of ids"
            )
            raise bad(path, where, "as many positions and input_ids as tokens", found)
        if len(physical) != len(logical):
            raise bad(
                path, where, f"{len(logical)} layers as in the map", len(physical)
            )
        for column, more in zip(
            held, (*running.add(path, where, record), positions, inputs), strict=True
        ):
            column.extend(more)
        ids.append(physical)
        if len(held[0]) * len(logical) >= BATCH_ROWS or number + 1 == len(records):
            whole = np.concatenate(ids, axis=1)  # [layers, tokens, 8]
            place = (
                f"records {number + 1 - len(ids)}..{number}" if len(ids) > 1 else where
            )
            columns = [np.array(column, np.int64) for column in held]
            block = widths.rows(_to_logical(path, place, whole, logical), *columns)
            if block is not None:
                yield block | {"seq": sequences.of_numbers(block["seq"])}
            held = ([], [], [], [])
            ids = []
    if not widths.top_k:
        raise bad(
            path,
            "topk_ids_of_layer",
            "ids",
            "-1 everywhere",
            "were requests sent while recording?",
        )


class _Widths:
    """Which layers route, and how many experts each: as in the first tokens that any
    layer routed.
    """

    def __init__(self, path: Path, shape: ModelShape) -> None:
        self._path = path
        self._shape = shape
        self._sparse = np.empty(0, np.int64)
        self._order = np.empty(0, np.int16)
        self._tokens = 0
        self.top_k = 0

    def rows(
        self,
        whole: np.ndarray,
        number: np.ndarray,
        phase: np.ndarray,
        pos: np.ndarray,
        token: np.ndarray,
    ) -> Block | None:
        """Rows of T tokens with ids [layers, T, 8], by token and layer; None where all
        are padding.
        """
        path = self._path
        used = whole >= 0
        counts = used.sum(axis=2)
        routed = counts.any(axis=0)  # a token that no layer routed is padding
        if not routed.any():
            return None
        if not self.top_k:
            self._sparse = np.flatnonzero(counts.any(axis=1))
            number_of = layer_numbers(path, self._sparse.tolist(), self._shape)
            self._order = np.array(
                [number_of[layer] for layer in self._sparse.tolist()], np.int16
            )
            self.top_k = int(counts.max())
        top_k = self.top_k
        due = np.zeros(len(whole), np.int64)
        due[self._sparse] = top_k
        if (odd := (counts != due[:, None]) & routed).any():
            layer, at = np.argwhere(odd)[0]
            place = f"token {self._tokens + at}, layer {layer}"
            raise bad(path, place, f"{due[layer]} experts", int(counts[layer, at]))
        self._tokens += len(routed)
        experts = whole if len(self._sparse) == len(whole) else whole[self._sparse]
        experts = experts if routed.all() else experts[:, routed]
        if (experts[:, :, :top_k] < 0).any():
            raise bad(
                path, "topk_ids_of_layer", "-1 only behind the ids", "-1 between them"
            )
        for name, column in (("input_ids: token ids", token), ("positions", pos)):
            if not 0 <= column.min() <= column.max() < 1 << 31:
                raise bad(
                    path, name, "numbers from 0", f"{column.min()}..{column.max()}"
                )
        layers = len(self._order)
        rows = {"seq": number, "pos": pos, "phase": phase, "token": token}
        block: Block = {
            name: np.repeat(column[routed].astype(np.int32), layers)
            for name, column in rows.items()
        }
        block["layer"] = np.tile(self._order, int(routed.sum()))
        block["experts"] = (
            experts[:, :, :top_k]
            .transpose(1, 0, 2)
            .reshape(-1, top_k)
            .astype(np.uint16)
        )
        return block | {"phase": block["phase"].astype(np.int8)}


# -- per_pass --------------------------------------------------------------------------


def _per_pass(
    path: Path, records: list[Any], logical: np.ndarray, shape: ModelShape
) -> Iterator[Block]:
    experts = int(logical.max()) + 1
    busy = np.zeros(len(logical), bool)
    counts = []
    for number, record in enumerate(records):
        physical = _integers(
            path,
            f"record {number}: global_physical_count",
            record["global_physical_count"],
            2,
        )
        if physical.shape != logical.shape or physical.min() < 0:
            raise bad(
                path,
                f"record {number}",
                f"counts of shape {list(logical.shape)}",
                list(physical.shape),
            )
        flat = np.arange(len(logical))[:, None] * experts + logical
        load = np.bincount(
            flat.reshape(-1), physical.reshape(-1), len(logical) * experts
        ).astype(np.int64)
        counts.append(load.reshape(-1, experts))
        busy |= counts[-1].any(axis=1)
    sparse = np.flatnonzero(busy)
    number_of = layer_numbers(path, sparse.tolist(), shape)
    runs: list[tuple[int, int]] = []
    dealt = []
    for number, load in enumerate(counts):
        if load.any():  # a rank may idle
            for layer in sparse.tolist():
                dealt.append(
                    deal(
                        path,
                        f"record {number}, layer {layer}",
                        load[layer],
                        shape.top_k,
                    )
                )
                runs.append((number, number_of[layer]))
    if not runs:
        raise bad(
            path,
            "global_physical_count",
            "counts",
            "0 everywhere",
            "were requests sent while recording?",
        )
    tokens = np.array([len(one) for one in dealt])
    numbers, layers = np.array(runs).T
    yield Passes(chunked=False).rows(numbers, layers, tokens, np.concatenate(dealt))


def deal(path: Path, place: str, load: np.ndarray, top_k: int) -> np.ndarray:
    """Tokens [T, K] with exactly these workloads: copies of each expert lie behind each
    other and are dealt in turn.

    An expert has at most T copies, so no token gets it twice.
    """
    tokens, rest = divmod(int(load.sum()), top_k)
    if rest or int(load.max(initial=0)) > tokens:
        found = (
            f"{int(load.sum())} choices, at most {int(load.max(initial=0))} of one"
            " expert"
        )
        raise bad(
            path,
            place,
            f"whole tokens of {top_k} experts",
            found,
            "is the shape's top-k right?",
        )
    copies = np.repeat(np.arange(len(load)), load)
    return np.sort(copies.reshape(top_k, tokens).T, axis=1)
