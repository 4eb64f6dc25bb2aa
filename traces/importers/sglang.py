"""SGLang expert-distribution dumps (torch zip) in mode per_token.

They hold physical expert ids of every token, in a width of 8 that is filled with -1.
Which request a token belongs to is not in the file; requests are followed by their
positions through the scheduler's passes, and refused where these leave a doubt. Dumps
in other modes hold sums over tokens, which are no routing.

Source: sglang/srt/eplb/expert_distribution.py.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.format.sorting import BATCH_ROWS
from moesim.traces.importers.readers.arrays import (
    integers,
    is_bare_pickle,
    load_torch,
    pickle_of,
)
from moesim.traces.importers.readers.foreign import (
    Foreign,
    decoding,
    head,
    layout_error,
    one_of,
    whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

# SGLang's ForwardMode.
_EXTEND = 1
_DECODE = 2
_MIXED = 3

# Compared at every token, where looking up a member of an enumeration is slow.
_PROMPT = int(Phase.PREFILL)
_GENERATED = int(Phase.DECODE)

OPTIONS = {
    "cut_at": (
        "tokens at which the server cut prompts, --chunked-prefill-size; 0: never"
    ),
    "equal_positions": (
        "first: of requests at one position, some of which ended, the first go on"
    ),
}

_LARGEST_PAGE = 256
# Servers cut at thousands of tokens.
_LEAST_CHUNK = 1024

_KEYS = ((b"records", b"last_physical_to_logical_map"), (b"logical_count",))
_MAP = "last_physical_to_logical_map"
_TOP_K_IDS = "topk_ids_of_layer"
_TOKEN_COLUMNS = ("seq", "phase", "pos", "token")


def recognises(path: Path) -> bool:
    """Whether this is a torch zip that names the keys of a dump, or a bare pickle,
    which only gets a refusal.
    """
    if is_bare_pickle(path):
        return True
    # The pickle comes first, and the directory behind thousands of tensors is long.
    names = head(path)
    if b"data.pkl" in names and b"records" in names and _TOP_K_IDS.encode() in names:
        return True
    names = pickle_of(path)
    return any(all(key in names for key in keys) for keys in _KEYS)


def read(path: Path, _: ModelShape, **given: str) -> Foreign:
    """The file's passes."""
    takes_first = bool(one_of(path, given, "equal_positions", ("first",)))
    cut_at = None
    if "cut_at" in given:
        cut_at = whole_number(path, "cut_at", given["cut_at"], least=0)
    dump = load_torch(path)
    with decoding(path, "dump"):
        records = dump.get("records", [])
        is_per_token = all(_TOP_K_IDS in record for record in records)
        if "logical_count" in dump or not is_per_token:
            raise layout_error(
                path,
                "mode",
                "per_token",
                "per_pass or stat, which holds sums only",
                "record with --expert-distribution-recorder-mode per_token",
            )
        if not records:
            raise layout_error(
                path,
                "records",
                "at least one pass",
                "none",
                "was recording started before the requests?",
            )
        rank = int(records[0]["rank"])
        logical = integers(path, _MAP, dump[_MAP], 2)
    if logical.size and not 0 <= logical.min() <= logical.max() < 1 << 16:
        actual = f"{logical.min()}..{logical.max()}"
        raise layout_error(path, _MAP, "expert ids", actual)

    def rows() -> Iterator[Block]:
        requests = _RunningRequests(path, records, cut_at, takes_first=takes_first)
        return _rows(path, records, logical, requests)

    notes = ["requests are told apart by position: SGLang does not name them"]
    if takes_first:
        notes.append("of requests at one position the first are taken to go on")
    facts = {"mode": "per_token", "rank": rank, "passes": len(records)}
    return Foreign(rows, notes=notes, facts=facts)


# -- requests --------------------------------------------------------------------------


class _RunningRequests:
    """The requests of a server, followed from pass to pass.

    What SGLang's scheduler does makes them known although no pass names them. A decode
    pass holds one token of every running request, in the order in which they joined:
    who is missing has ended. An extend pass adds requests to the end; only the last of
    a pass may have had its prompt cut, and it goes on first in the next extend pass. A
    mixed pass holds new prompts first, then the decoded tokens, and the new requests
    come first from then on. A request that begins behind position 0 reuses a prefix.

    Args:
        path: of the dump, for errors.
        records: all passes.
        cut_at: tokens at which the server cuts prompts; 0 where it never does, None
            where that is to be seen from the passes.
        takes_first: of requests at one position, some of which ended, the first go on;
            otherwise they are refused.
    """

    def __init__(
        self, path: Path, records: list[Any], cut_at: int | None, *, takes_first: bool
    ) -> None:
        self._path = path
        self._cut_at = cut_at
        self._takes_first = takes_first
        sizes = [
            len(record["positions"])
            for record in records
            if record["forward_mode"] in (_EXTEND, _MIXED)
        ]
        self._largest = max(sizes, default=0)
        self._is_limited = sizes.count(self._largest) > 1

        # The position at which each request goes on.
        self._due: list[int] = []
        # Requests of the last decode pass, and of extend passes since.
        self._running: list[int] = []
        self._joined: list[int] = []
        # Requests before the recording are met in the first pass that decodes.
        self._has_decoded = False
        # Whether a prompt was taken as cut because its pass was full.
        self._has_guessed = False
        # The last request of the last extend pass, and the tokens of that pass.
        self._open = -1
        self._open_size = 0

    def add(self, where: str, record: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Give the tokens of one pass to requests: number of the request and phase of
        each token.
        """
        positions: list[int] = record["positions"]
        lengths = _request_lengths(self._path, where, record)
        firsts = list(accumulate(lengths, initial=0))[:-1]
        for first, length in zip(firsts, lengths, strict=True):
            part = positions[first : first + length]
            consecutive = list(range(part[0], part[0] + length))
            if part[0] < 0 or part != consecutive:
                expected = "consecutive positions of a request"
                raise layout_error(self._path, where, expected, part[:8])

        begins = [positions[first] for first in firsts]
        mode = record["forward_mode"]
        decoded = len(lengths) if mode == _DECODE else 0
        if mode == _MIXED:
            decoded = self._decoded_of_mixed(where, begins, lengths)

        prompts = len(lengths) - decoded
        # The scheduler merges the running requests behind those of a mixed pass.
        earlier = self._decode(where, begins[prompts:]) if decoded else []
        numbers = self._extend(where, begins[:prompts], lengths, len(positions))
        if decoded:
            self._running = earlier
        if prompts and decoded:
            self._running, self._joined = [], [*self._joined, *earlier]

        numbers += earlier
        phases = [_PROMPT] * prompts + [_GENERATED] * decoded
        return _repeated(numbers, lengths), _repeated(phases, lengths)

    def _extend(
        self, where: str, begins: list[int], lengths: list[int], size: int
    ) -> list[int]:
        numbers = []
        for place, (begin, length) in enumerate(zip(begins, lengths, strict=False)):
            if place == 0 and self._goes_on(where, begin):
                number = self._open
                self._joined = [other for other in self._joined if other != number]
            else:
                number = self._new()
            self._due[number] = begin + length
            self._joined.append(number)
            numbers.append(number)

        if numbers:
            self._open = numbers[-1]
            self._open_size = size
        return numbers

    def _goes_on(self, where: str, begin: int) -> bool:
        """Whether the first prompt of a pass continues the last one of the pass before.

        It does where that pass was full, which shows in its size.
        """
        if self._open < 0 or begin != self._due[self._open]:
            return False
        if self._cut_at is not None:
            room = self._cut_at - self._open_size
            return self._cut_at > 0 and room < max(1, self._cut_at // 32)

        room = self._largest - self._open_size
        # Pages are up to 64 tokens, and a cut prompt fills whole ones.
        is_full = self._largest >= _LEAST_CHUNK and room < _LARGEST_PAGE
        if is_full or (room == 0 and self._is_limited):
            self._has_guessed = True
            return True
        raise layout_error(
            self._path,
            where,
            "a prompt that was cut or one that reuses a prefix",
            f"one at position {begin} that may be either",
            "say --option cut_at=N with the server's --chunked-prefill-size, or =0"
            " if it cuts none",
        )

    def _decoded_of_mixed(
        self, where: str, begins: list[int], lengths: list[int]
    ) -> int:
        """How many requests at the end of a mixed pass are decoded ones."""
        single = 0
        while single < len(lengths) and lengths[-1 - single] == 1:
            single += 1

        waiting = self._waiting()
        fitting = [
            decoded
            for decoded in range(min(single, len(waiting)) + 1)
            if self._matches(begins[len(begins) - decoded :], waiting) is not None
        ]
        decoded = fitting[-1]
        # A prompt of one token, or what is left of one, looks like a decoded token.
        others = begins[len(begins) - single : len(begins) - decoded]
        is_unknown = not self._has_decoded and any(others)
        is_unclear = decoded < single and len(waiting) > decoded > 0
        if decoded == len(begins) and self._open >= 0:
            # The rest of a prompt that was cut would come first.
            is_unclear = begins[0] == self._due[self._open]
        if is_unknown or is_unclear or (single and not decoded and waiting):
            raise layout_error(
                self._path,
                where,
                "prompts and decoded tokens that can be told apart",
                f"{single} requests of one token, {len(waiting)} were running",
                "record without --enable-mixed-chunk, from before the first request on",
            )
        return decoded

    def _waiting(self) -> list[int]:
        return [*self._running, *self._joined]

    def _matches(self, begins: list[int], waiting: list[int]) -> list[int] | None:
        """The first requests in their order that wait for these positions; None where
        there are none.
        """
        matches = []
        rest = iter(waiting)
        for begin in begins:
            number = next((n for n in rest if self._due[n] == begin), None)
            if number is None:
                return None
            matches.append(number)
        return matches

    def _decode(self, where: str, begins: list[int]) -> list[int]:
        """Requests of the tokens of a decode pass; all others have ended."""
        waiting = self._waiting()
        if [self._due[number] for number in waiting] == begins:
            numbers = waiting
        else:
            numbers = self._decoded_by_some(where, begins, waiting)

        for number, begin in zip(numbers, begins, strict=True):
            self._due[number] = begin + 1
        self._running = numbers
        self._joined = []
        self._has_decoded = True
        if self._open in numbers:
            self._open = -1
        return numbers

    def _decoded_by_some(
        self, where: str, begins: list[int], waiting: list[int]
    ) -> list[int]:
        unknown = 0
        first = self._matches(begins, waiting)
        while first is None and not self._has_decoded and unknown < len(begins):
            # They ran before the recording began, so they come first.
            unknown += 1
            first = self._matches(begins[unknown:], waiting)
        if first is None or (unknown and self._has_guessed):
            due = [self._due[number] for number in waiting]
            raise layout_error(
                self._path,
                where,
                "tokens of requests that were running",
                f"positions {_some(begins)} where {_some(due)} were due",
                "record from before the first request on, in one server that does"
                " prefill and decode",
            )

        last = self._matches(begins[unknown:][::-1], waiting[::-1])
        if not self._takes_first and last is not None and last[::-1] != first:
            pairs = zip(first, last[::-1], strict=True)
            number = next(early for early, late in pairs if early != late)
            raise layout_error(
                self._path,
                where,
                "one request at each position",
                f"several at {self._due[number]}, one of which ended",
                "the dump does not say which: --option equal_positions=first lets"
                " the earliest go on; --max-running-requests 1 records without doubt",
            )
        return [*(self._new() for _ in range(unknown)), *first]

    def _new(self) -> int:
        self._due.append(0)
        return len(self._due) - 1


def _repeated(numbers: list[int], lengths: list[int]) -> list[int]:
    pairs = zip(numbers, lengths, strict=True)
    return [number for number, length in pairs for _ in range(length)]


def _some(numbers: list[int]) -> str:
    """The first of many numbers."""
    text = ", ".join(map(str, numbers[:5])) or "none"
    return text + (", ..." if len(numbers) > 5 else "")


def _request_lengths(path: Path, where: str, record: dict[str, Any]) -> list[int]:
    """How many tokens each request has in a pass."""
    tokens = len(record["positions"])
    mode = record["forward_mode"]

    if mode == _DECODE:
        return [1] * tokens
    if mode not in (_EXTEND, _MIXED):
        raise layout_error(
            path,
            where,
            "forward_mode 1 (extend), 2 (decode) or 3 (mixed)",
            mode,
            "record without speculation",
        )

    lengths: list[int] = record["extend_seq_lens"]
    if sum(lengths) != tokens or min(lengths, default=1) < 1:
        expected = f"extend_seq_lens that add up to {tokens}"
        raise layout_error(path, where, expected, lengths)
    return lengths


# -- rows ------------------------------------------------------------------------------


def _rows(
    path: Path, records: list[Any], logical: np.ndarray, requests: _RunningRequests
) -> Iterator[Block]:
    """Rows of some passes at a time, in the order of the file."""
    # Of each token not yet written: request, phase, position, token id; and the ids.
    columns: tuple[list[int], ...] = ([], [], [], [])
    ids: list[np.ndarray] = []
    top_k = 0
    for number, record in enumerate(records):
        where = f"record {number}"
        physical = _physical_ids(path, where, record, len(logical))
        request, phase = requests.add(where, record)
        added = (request, phase, record["positions"], record["input_ids"])
        for column, values in zip(columns, added, strict=True):
            column.extend(values)
        ids.append(physical)

        # A pass of one token is far too small a piece to be checked by itself.
        is_last = number + 1 == len(records)
        if len(columns[0]) * len(logical) >= BATCH_ROWS or is_last:
            first = number + 1 - len(ids)
            place = f"records {first}..{number}" if first < number else where
            joined = np.concatenate(ids, axis=1)  # [layers, tokens, 8]
            chosen = _to_logical(path, place, joined, logical)
            counts = (chosen >= 0).sum(axis=2)
            top_k = top_k or int(counts.max(initial=0))
            tokens = dict(zip(_TOKEN_COLUMNS, map(np.array, columns), strict=True))
            yield _routed(path, place, chosen, counts, top_k, tokens)
            columns = ([], [], [], [])
            ids = []

    if not top_k:
        way_out = "were requests sent while recording?"
        raise layout_error(path, _TOP_K_IDS, "ids", "-1 everywhere", way_out)


def _physical_ids(
    path: Path, where: str, record: dict[str, Any], layers: int
) -> np.ndarray:
    """Int [layers, T, 8] of a pass of T tokens."""
    ids = integers(path, f"{where}: {_TOP_K_IDS}", record[_TOP_K_IDS], 3)
    counts = [len(record["positions"]), len(record["input_ids"]), ids.shape[1]]
    if len(set(counts)) > 1:
        expected = "as many positions and input_ids as tokens"
        raise layout_error(path, where, expected, f"{counts} with those of ids")
    if len(ids) != layers:
        raise layout_error(path, where, f"{layers} layers as in the map", len(ids))
    return ids


def _to_logical(
    path: Path, place: str, physical: np.ndarray, logical: np.ndarray
) -> np.ndarray:
    """Logical ids of physical ids [L, ...]; -1 stays -1."""
    copies = logical.shape[1]
    if physical.size and (physical.max() >= copies or physical.min() < -1):
        outside = physical.max() if physical.max() >= copies else physical.min()
        expected = f"physical ids 0..{copies - 1} or -1"
        raise layout_error(path, place, expected, int(outside))

    # An index of -1 takes the last entry, which therefore is -1.
    padding = np.full((len(logical), 1), -1)
    table = np.concatenate((logical, padding), axis=1).astype(np.int32)
    by_layer = zip(table, physical, strict=True)
    return np.stack([np.take(of_layer, ids) for of_layer, ids in by_layer])


def _routed(
    path: Path,
    place: str,
    ids: np.ndarray,
    counts: np.ndarray,
    top_k: int,
    tokens: Block,
) -> Block:
    """Rows by token and layer: dense layers choose none, and of padding no layer does.

    Args:
        path: of the dump, for errors.
        place: of these tokens, likewise.
        ids: int [L, T, 8], logical.
        counts: int [L, T], experts of each.
        top_k: K.
        tokens: columns [T].
    """
    wrong = (counts != 0) & (counts != top_k)
    if wrong.any():
        layer, token = np.argwhere(wrong)[0]
        where = f"{place}: token {token}, layer {layer}"
        raise layout_error(path, where, f"{top_k} experts", int(counts[layer, token]))
    for name, column in tokens.items():
        if column.size and not 0 <= column.min() <= column.max() < 1 << 31:
            actual = f"{column.min()}..{column.max()}"
            raise layout_error(path, f"{place}: {name}", "numbers from 0", actual)

    token, layer = np.nonzero(counts.T)
    experts = ids[layer, token, :top_k]
    if experts.size and experts.min() < 0:
        expected = "-1 only behind the ids"
        raise layout_error(path, _TOP_K_IDS, expected, "-1 between them")
    block = {name: column.astype(np.int32)[token] for name, column in tokens.items()}
    block["layer"] = layer.astype(np.int32)
    block["experts"] = experts.astype(np.uint16)
    return block
