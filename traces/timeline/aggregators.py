"""Sums over a run's tables in one pass: busy time and bytes of lanes, states of
accesses, times of forward passes.

Each takes chunks of a table in order and keeps a few numbers. Memory is bounded by the
size of the model and of one chunk, never by the length of the run; only
`StepAggregator` keeps one number per decode step, for exact percentiles.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import PLAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

# Machine code knows no enumerations.
_PREFILL = int(Phase.PREFILL)
_DECODE = int(Phase.DECODE)
_STEP_COLUMNS = ("phase", "batch", "tokens", "sequences", "start_s", "end_s")


class LaneAggregator:
    """Busy time and bytes of each lane, planning time, first start and last end."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self.busy_s = np.zeros(len(lanes))
        self.bytes = np.zeros(len(lanes), dtype=np.int64)
        self.planning_s = 0.0
        self.start_s = np.inf
        self.end_s = -np.inf
        self.spans = 0

    def add(self, spans: Chunk) -> None:
        """Take one chunk of spans."""
        lane = spans["lane"]
        lanes = len(self.busy_s)
        duration_s = spans["end_s"] - spans["start_s"]

        self.busy_s += np.bincount(lane, duration_s, lanes)
        self.bytes += np.bincount(lane, spans["bytes"], lanes).astype(np.int64)
        self.planning_s += float(duration_s[spans["kind"] == PLAN].sum())
        self.start_s = min(self.start_s, float(spans["start_s"].min()))
        self.end_s = max(self.end_s, float(spans["end_s"].max()))
        self.spans += len(duration_s)


class AccessAggregator:
    """Hits, delayed hits and misses; over all active experts, over GPU-assigned ones,
    and by tokens: int64 [3] each, by state.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._is_gpu = np.array([lane.startswith("gpu") for lane in lanes])
        self.states = np.zeros(3, dtype=np.int64)
        self.gpu_states = np.zeros(3, dtype=np.int64)
        self.token_states = np.zeros(3, dtype=np.int64)

    def add(self, accesses: Chunk) -> None:
        """Take one chunk of accesses."""
        state = accesses["state"]
        on_gpu = self._is_gpu[accesses["lane"]]

        self.states += np.bincount(state, minlength=3)
        self.gpu_states += np.bincount(state[on_gpu], minlength=3)
        # Weighted counts come as floats; tokens are exact in them.
        by_tokens = np.bincount(state, accesses["tokens"], 3)
        self.token_states += by_tokens.astype(np.int64)


class StepAggregator:
    """Token counts and times of forward passes, per phase and per sequence.

    Attributes:
        gaps_s: seconds of each decoded token.
        ttft_s: seconds of each batch's prefill.
    """

    def __init__(self) -> None:
        self.gaps_s = array("d")
        self.ttft_s = array("d")
        self._books = np.zeros(1, _BOOKS).view(np.recarray)
        self._books["batch"] = -1
        self._books["start_s"] = np.inf
        self._books["end_s"] = -np.inf

    @property
    def steps(self) -> int:
        """Forward passes so far."""
        return int(self._books["steps"][0])

    @property
    def batches(self) -> int:
        """Groups of sequences so far."""
        return int(self._books["batches"][0])

    @property
    def start_s(self) -> float:
        """First start; infinite before any pass has come."""
        return float(self._books["start_s"][0])

    @property
    def end_s(self) -> float:
        """Last end; minus infinity before any pass has come."""
        return float(self._books["end_s"][0])

    @property
    def tokens(self) -> dict[int, int]:
        """Tokens by phase."""
        return dict(enumerate(self._books["tokens"][0].tolist()))

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds by phase."""
        return dict(enumerate(self._books["seconds"][0].tolist()))

    def add(self, steps: Chunk) -> None:
        """Take one chunk of forward passes."""
        self._follow(steps, is_last=False)

    def forget_prompt(self) -> None:
        """Leave the last prompts out of times to first tokens and of sequences' speeds:
        the run was cut before their end.
        """
        self._books["prompts"] = 0

    def per_sequence(self, phase: Phase) -> float | None:
        """Return the mean over sequences of own tokens per second.

        Source: DALI, decode and prefill speed.
        """
        self._follow({name: np.empty(0) for name in _STEP_COLUMNS}, is_last=True)
        books = self._books[0]
        count = int(books["counted"][phase])
        return float(books["speeds"][phase]) / count if count else None

    def _follow(self, steps: Chunk, *, is_last: bool) -> None:
        passes = Passes(
            *(steps[name].astype(np.int64) for name in _STEP_COLUMNS[:4]),
            *(steps[name].astype(np.float64) for name in _STEP_COLUMNS[4:]),
        )
        decodes = passes.phase == Phase.DECODE
        each = passes.tokens[decodes] / passes.sequences[decodes]
        gaps_s = np.empty(int(np.rint(each).sum()))
        # Each pass may end the prefill of the batch before it.
        ttft_s = np.empty(len(decodes) + 1)
        prefills = follow_passes(passes, self._books, gaps_s, ttft_s, is_last)
        self.gaps_s.frombytes(gaps_s.tobytes())
        self.ttft_s.frombytes(ttft_s[:prefills].tobytes())


class Passes(NamedTuple):
    """Forward passes in order, N.

    Attributes:
        phase, batch, tokens, sequences: int64 [N].
        start_s, end_s: float64 [N].
    """

    phase: np.ndarray
    batch: np.ndarray
    tokens: np.ndarray
    sequences: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray


_PASSES = structure(Passes, (*[nb.int64[::1]] * 4, *[nb.float64[::1]] * 2))

_BOOKS = np.dtype(
    [
        ("steps", np.int64),
        ("batches", np.int64),
        ("start_s", np.float64),
        ("end_s", np.float64),
        # By phase, whose codes are places.
        ("tokens", np.int64, (2,)),
        ("seconds", np.float64, (2,)),
        # Sum of the sequences' own tokens per second, and how many sequences.
        ("speeds", np.float64, (2,)),
        ("counted", np.int64, (2,)),
        ("batch", np.int64),
        ("last_s", np.float64),
        # Tokens, sequences and seconds of this batch's prompts, in one pass or several.
        ("prompt_tokens", np.int64),
        ("prompts", np.int64),
        ("prompt_s", np.float64),
        # Where this batch's decoding began, and of its last step: sequences, tokens
        # that each of them has made by then, and its end.
        ("decode_start_s", np.float64),
        ("alive", np.int64),
        ("made", np.float64),
        ("decoded_s", np.float64),
    ],
    align=True,
)


def _end_prefill(book: Any, ttft_s: np.ndarray, prefills: int) -> int:
    """Add a batch's prefill: the speeds of its sequences add up to the batch's."""
    if not book.prompts:
        return prefills
    ttft_s[prefills] = book.prompt_s
    if book.prompt_s:
        book.speeds[_PREFILL] += book.prompt_tokens / book.prompt_s
    book.counted[_PREFILL] += book.prompts
    book.prompt_tokens = 0
    book.prompts = 0
    book.prompt_s = 0.0
    return prefills + 1


def _end_sequences(book: Any, alive: int) -> None:
    """Add the decode speeds of sequences that have ended with the last decode step:
    they follow from the tokens that were made by then.
    """
    ended = book.alive - alive
    if ended > 0 and book.decoded_s > book.decode_start_s:
        seconds = book.decoded_s - book.decode_start_s
        book.speeds[_DECODE] += ended * book.made / seconds
        book.counted[_DECODE] += ended
    book.alive = alive


def follow_passes(
    passes: Passes,
    books: np.ndarray,
    gaps_s: np.ndarray,
    ttft_s: np.ndarray,
    is_last: bool,
) -> int:
    """Add forward passes to the books; fill in the seconds of each decoded token, and
    of each prefill that has ended.

    Returns:
        How many prefills have ended.
    """
    book = books[0]
    prefills = 0
    gaps = 0
    for n in range(len(passes.phase)):
        phase = passes.phase[n]
        tokens = passes.tokens[n]
        sequences = passes.sequences[n]
        if passes.batch[n] != book.batch:
            prefills = _end_prefill(book, ttft_s, prefills)
            _end_sequences(book, 0)
            book.made = 0.0
            book.batch = passes.batch[n]
            book.last_s = passes.start_s[n]
            book.batches += 1

        # From the end of the step before: what lies between belongs to the gap.
        duration_s = passes.end_s[n] - book.last_s
        if phase == _PREFILL:
            book.prompt_tokens += tokens
            book.prompts = max(book.prompts, sequences)
            book.prompt_s += duration_s
        else:
            prefills = _end_prefill(book, ttft_s, prefills)
            if book.made == 0.0:
                book.decode_start_s = book.last_s
            # A pass that verifies a draft makes several tokens of one sequence.
            each = tokens / sequences
            count = round(each)
            for _ in range(count):
                gaps_s[gaps] = duration_s / each
                gaps += 1
            _end_sequences(book, sequences)
            book.made += each
            book.decoded_s = passes.end_s[n]

        book.tokens[phase] += tokens
        book.seconds[phase] += duration_s
        book.start_s = min(book.start_s, passes.start_s[n])
        book.end_s = max(book.end_s, passes.end_s[n])
        book.last_s = passes.end_s[n]
        book.steps += 1
    if is_last:
        prefills = _end_prefill(book, ttft_s, prefills)
        _end_sequences(book, 0)
        book.made = 0.0
    return prefills
