"""Sums over a run's tables in one pass: busy time and bytes of lanes, states of
accesses, times of forward passes.

Each takes chunks of a table in order and keeps a few numbers. Memory is bounded by the
size of the model and of one chunk, never by the length of the run; only
`StepAggregator` keeps one number per decode step, for exact percentiles.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.timeline.loops import Books
from moesim.traces.timeline.spans import PLAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

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
        self._books = Books()

    @property
    def steps(self) -> int:
        """Forward passes so far."""
        return self._books.steps

    @property
    def batches(self) -> int:
        """Groups of sequences so far."""
        return self._books.batches

    @property
    def start_s(self) -> float:
        """First start; infinite before any pass has come."""
        return self._books.start_s

    @property
    def end_s(self) -> float:
        """Last end; minus infinity before any pass has come."""
        return self._books.end_s

    @property
    def tokens(self) -> dict[int, int]:
        """Tokens by phase."""
        return dict(enumerate(self._books.tokens))

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds by phase."""
        return dict(enumerate(self._books.seconds))

    def add(self, steps: Chunk) -> None:
        """Take one chunk of forward passes."""
        self._follow(steps, is_last=False)

    def forget_prompt(self) -> None:
        """Leave the last prompts out of times to first tokens and of sequences' speeds:
        the run was cut before their end.
        """
        self._books.prompts = 0

    def per_sequence(self, phase: Phase) -> float | None:
        """Return the mean over sequences of own tokens per second.

        Source: DALI, decode and prefill speed.
        """
        self._follow({name: np.empty(0) for name in _STEP_COLUMNS}, is_last=True)
        count = self._books.counted[phase]
        return self._books.speeds[phase] / count if count else None

    def _follow(self, steps: Chunk, *, is_last: bool) -> None:
        counts = [steps[name].astype(np.int64) for name in _STEP_COLUMNS[:4]]
        times_s = [steps[name].astype(np.float64) for name in _STEP_COLUMNS[4:]]
        phase, _, tokens, sequences = counts
        decodes = phase == Phase.DECODE
        each = tokens[decodes] / sequences[decodes]
        gaps_s = np.empty(int(np.rint(each).sum()))
        # Each pass may end the prefill of the batch before it.
        ttft_s = np.empty(len(decodes) + 1)
        columns: Any = (*counts, *times_s, gaps_s, ttft_s, is_last)
        prefills = self._books.follow(*columns)
        self.gaps_s.frombytes(gaps_s.tobytes())
        self.ttft_s.frombytes(ttft_s[:prefills].tobytes())
