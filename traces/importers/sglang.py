"""SGLang expert-distribution dumps (torch zip) in mode per_token.

They hold physical expert ids of every token, in a width of 8 that is filled with -1.
Which request a token belongs to is not in the file; requests are followed by their
positions through the scheduler's passes, and refused where these leave a doubt. Dumps
in other modes hold sums over tokens, which are no routing.

Source: sglang/srt/eplb/expert_distribution.py.
"""

from __future__ import annotations

from itertools import accumulate, chain
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
        requests = _RunningRequests(path, cut_at, takes_first=takes_first)
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
        cut_at: tokens at which the server cuts prompts; 0 where it never does, None
            where nobody knows.
        takes_first: of requests at one position, some of which ended, the first go on;
            otherwise they are refused.
    """

    def __init__(self, path: Path, cut_at: int | None, *, takes_first: bool) -> None:
        self._path = path
        self._cut_at = cut_at
        self._takes_first = takes_first
        # The position at which each request goes on.
        self._due: list[int] = []
        # Those that wait for their next token, in the order of the scheduler.
        self._waiting: list[int] = []
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
            if part[0] < 0 or part != list(range(part[0], part[0] + length)):
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
        if decoded:
            self._waiting = []
        numbers = self._extend(where, begins[:prompts], lengths, len(positions))
        self._waiting += earlier
        phases = [_PROMPT] * prompts + [_GENERATED] * decoded
        return _repeated(numbers + earlier, lengths), _repeated(phases, lengths)

    def _extend(
        self, where: str, begins: list[int], lengths: list[int], size: int
    ) -> list[int]:
        numbers = []
        for place, (begin, length) in enumerate(zip(begins, lengths, strict=False)):
            if place == 0 and self._goes_on(where, begin):
                number = self._open
                self._waiting = [other for other in self._waiting if other != number]
            else:
                number = len(self._due)
                self._due.append(0)
            self._due[number] = begin + length
            self._waiting.append(number)
            numbers.append(number)

        if numbers:
            self._open = numbers[-1]
            self._open_size = size
        return numbers

    def _goes_on(self, where: str, begin: int) -> bool:
        """Whether the first prompt of a pass continues the last one of the pass before,
        which it does where that pass was full.
        """
        if self._open < 0 or begin != self._due[self._open]:
            return False
        if self._cut_at is None:
            raise layout_error(
                self._path,
                where,
                "a prompt that was cut or one that reuses a prefix",
                f"one at position {begin} that may be either",
                "say --option cut_at=N with the server's --chunked-prefill-size, or =0"
                " if it cuts none",
            )
        # A cut prompt fills whole pages.
        room = self._cut_at - self._open_size
        return self._cut_at > 0 and room < max(1, self._cut_at // 32)

    def _decoded_of_mixed(
        self, where: str, begins: list[int], lengths: list[int]
    ) -> int:
        """How many requests at the end of a mixed pass are decoded ones."""
        single = 0
        while single < len(lengths) and lengths[-1 - single] == 1:
            single += 1
        most = min(single, len(self._waiting))
        decoded = next(
            count
            for count in range(most, -1, -1)
            if self._matches(begins[len(begins) - count :], self._waiting) is not None
        )
        # A prompt of one token, or what is left of one that was cut, looks like a
        # decoded token.
        is_rest = decoded == len(begins) and begins[0] == self._due[self._open]
        if decoded < most or (is_rest and self._open >= 0):
            raise layout_error(
                self._path,
                where,
                "prompts and decoded tokens that can be told apart",
                f"{single} requests of one token, {len(self._waiting)} were running",
                "record without --enable-mixed-chunk, from before the first request on",
            )
        return decoded

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
        numbers = self._matches(begins, self._waiting)
        if numbers is None:
            due = [self._due[number] for number in self._waiting]
            raise layout_error(
                self._path,
                where,
                "tokens of requests that were running",
                f"positions {_some(begins)} where {_some(due)} were due",
                "record from before the first request on, in one server that does"
                " prefill and decode",
            )
        # Where all of them go on there is nothing to choose.
        if len(numbers) < len(self._waiting) and not self._takes_first:
            self._check_only(where, begins, numbers)
        for number, begin in zip(numbers, begins, strict=True):
            self._due[number] = begin + 1
        if self._open in numbers:
            self._open = -1
        return numbers

    def _check_only(self, where: str, begins: list[int], first: list[int]) -> None:
        """Refuse positions at which other requests may go on than the first ones."""
        last = self._matches(begins[::-1], self._waiting[::-1]) or first[::-1]
        pairs = zip(first, reversed(last), strict=True)
        number = next((early for early, late in pairs if early != late), None)
        if number is not None:
            raise layout_error(
                self._path,
                where,
                "one request at each position",
                f"several at {self._due[number]}, one of which ended",
                "the dump does not say which: --option equal_positions=first lets"
                " the earliest go on; --max-running-requests 1 records without doubt",
            )


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
    # Of each pass not yet written: request, phase, position and id of its tokens, and
    # their experts.
    passes: list[tuple[Any, ...]] = []
    tokens = top_k = 0
    for number, record in enumerate(records):
        where = f"record {number}"
        physical = _physical_ids(path, where, record, len(logical))
        request, phase = requests.add(where, record)
        ids = record["positions"], record["input_ids"]
        passes.append((request, phase, *ids, physical))
        tokens += len(request)

        # A pass of one token is far too small a piece to be checked by itself.
        is_last = number + 1 == len(records)
        if tokens * len(logical) >= BATCH_ROWS or is_last:
            first = number + 1 - len(passes)
            place = f"records {first}..{number}" if first < number else where
            *columns, parts = zip(*passes, strict=True)
            joined = np.concatenate(parts, axis=1)  # [layers, tokens, 8]
            chosen = _to_logical(path, place, joined, logical)
            counts = (chosen >= 0).sum(axis=2)
            top_k = top_k or int(counts.max(initial=0))
            given = {
                name: np.array(list(chain.from_iterable(column)), np.int32)
                for name, column in zip(_TOKEN_COLUMNS, columns, strict=True)
            }
            yield _routed(path, place, chosen, counts, top_k, given)
            passes = []
            tokens = 0

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

    token, layer = np.nonzero(counts.T)
    experts = ids[layer, token, :top_k]
    if experts.size and experts.min() < 0:
        expected = "-1 only behind the ids"
        raise layout_error(path, _TOP_K_IDS, expected, "-1 between them")
    block = {name: column[token] for name, column in tokens.items()}
    block["layer"] = layer.astype(np.int32)
    block["experts"] = experts.astype(np.uint16)
    return block
