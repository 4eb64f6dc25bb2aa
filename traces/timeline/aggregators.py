"""Sums over a run's tables in one pass: busy time and bytes of lanes, states of
accesses, times of forward passes.

Each takes chunks of a table in order and keeps a few numbers. Memory is bounded by the
size of the model and of one chunk, never by the length of the run; only
`StepAggregator` keeps one number per decode step, for exact percentiles.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.schema import Phase
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
    """Token counts and times of forward passes, per phase and per sequence."""

    def __init__(self) -> None:
        self.gaps_s = array("d")
        self.ttft_s = array("d")
        self.steps = 0
        self.batches = 0
        self.sequences = 0
        # By code, which equals the phase as a key.
        self.tokens: dict[int, int] = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self.seconds: dict[int, float] = {Phase.PREFILL: 0.0, Phase.DECODE: 0.0}
        self.start_s = np.inf
        self.end_s = -np.inf

        # Sum of the sequences' own tokens per second, and how many sequences.
        self._speeds = {Phase.PREFILL: (0.0, 0), Phase.DECODE: (0.0, 0)}
        self._batch = -1
        self._last_s = 0.0
        # Tokens, sequences and seconds of this batch's prompts, in one pass or several.
        self._prefilled = (0, 0, 0.0)
        # Of each decode step of this batch: sequences alive, tokens that each of them
        # has made by then, and its end.
        self._decoded: list[tuple[int, float, float]] = []
        self._decode_start_s = 0.0

    def add(self, steps: Chunk) -> None:
        """Take one chunk of forward passes."""
        # Plain numbers: what depends on the step before is no array operation.
        columns = [steps[name].tolist() for name in _STEP_COLUMNS]
        for step in zip(*columns, strict=True):
            self._add(*step)

    def _add(
        self,
        phase: int,
        batch: int,
        tokens: int,
        sequences: int,
        start_s: float,
        end_s: float,
    ) -> None:
        if batch != self._batch:
            self._end_batch()
            self._batch = batch
            self._last_s = start_s
            self.batches += 1

        # From the end of the step before: what lies between belongs to the gap.
        duration_s = end_s - self._last_s
        if phase == Phase.PREFILL:
            before = self._prefilled
            self._prefilled = (
                before[0] + tokens,
                max(before[1], sequences),
                before[2] + duration_s,
            )
        else:
            self._end_prefill()
            made = self._decoded[-1][1] if self._decoded else 0.0
            if not self._decoded:
                self._decode_start_s = self._last_s
            # A pass that verifies a draft makes several tokens of one sequence.
            each = tokens / sequences
            self.gaps_s.extend([duration_s / each] * round(each))
            self._decoded.append((sequences, made + each, end_s))

        self.tokens[phase] += tokens
        self.seconds[phase] += duration_s
        self.start_s = min(self.start_s, start_s)
        self.end_s = max(self.end_s, end_s)
        self._last_s = end_s
        self.steps += 1

    def per_sequence(self, phase: Phase) -> float | None:
        """Return the mean over sequences of own tokens per second.

        Source: DALI, decode and prefill speed.
        """
        self._end_batch()
        total, count = self._speeds[phase]
        return total / count if count else None

    def _end_prefill(self) -> None:
        """Add a batch's prefill: the speeds of its sequences add up to the batch's."""
        tokens, sequences, duration_s = self._prefilled
        if not sequences:
            return
        self.ttft_s.append(duration_s)
        speed = tokens / duration_s if duration_s else 0.0
        total, count = self._speeds[Phase.PREFILL]
        self._speeds[Phase.PREFILL] = (total + speed, count + sequences)
        self._prefilled = (0, 0, 0.0)

    def _end_batch(self) -> None:
        """Add the decode speeds of a batch.

        The speed of a sequence that ends after a decode step follows from the tokens
        that were made by then, and from how many are alive in each step.
        """
        self._end_prefill()
        alive = [sequences for sequences, _, _ in self._decoded] + [0]
        total, count = self._speeds[Phase.DECODE]

        for n, (sequences, made, end_s) in enumerate(self._decoded):
            ended = sequences - alive[n + 1]
            if ended > 0 and end_s > self._decode_start_s:
                total += ended * made / (end_s - self._decode_start_s)
                count += ended

        self._speeds[Phase.DECODE] = (total, count)
        self.sequences += max(alive)
        self._decoded = []
