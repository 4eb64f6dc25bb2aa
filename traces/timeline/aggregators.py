"""Sums over a run's tables in one pass: busy time and bytes of lanes, states of
accesses, times of forward passes.

Each takes chunks of a table in order and keeps a few numbers. Memory is bounded by the
size of the model and of one chunk, never by the length of the run; only
`StepAggregator` keeps its table, some tens of bytes for each forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import PLAN, TABLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

_STEPS = TABLES["steps"]


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
    """The table of forward passes, and what follows from it at the end."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def add(self, steps: Chunk) -> None:
        """Take one chunk of forward passes."""
        self._chunks.append(steps)

    def column(self, name: str) -> np.ndarray:
        """Return a column of all passes, [N]."""
        none = np.empty(0, _STEPS[name])
        return np.concatenate([none, *(chunk[name] for chunk in self._chunks)])

    def figures(self, *, ends_in_prompt: bool) -> dict[str, Any]:
        """Return steps, batches, tokens, speeds and times between tokens; without the
        last prompt's time where the run `ends_in_prompt`.
        """
        phase = self.column("phase")
        tokens = self.column("tokens")
        sequences = self.column("sequences")
        end_s = self.column("end_s")
        batch = self.column("batch")
        begins = np.diff(batch, prepend=-1) != 0
        # From the end of the step before: what lies between belongs to the gap.
        start_s = np.where(begins, self.column("start_s"), np.roll(end_s, 1))
        duration_s = end_s - start_s
        seconds = np.bincount(phase, duration_s, 2)
        counts = np.bincount(phase, tokens, 2).astype(np.int64)

        # A prompt may be computed in several passes.
        prefills = phase == Phase.PREFILL
        follows = np.roll(prefills, 1) & ~begins
        prompt = np.cumsum(prefills & ~follows)[prefills] - 1
        ttft_s = np.bincount(prompt, duration_s[prefills])
        prompt_tokens = np.bincount(prompt, tokens[prefills])
        prompts = np.zeros(len(ttft_s), np.int64)
        np.maximum.at(prompts, prompt, sequences[prefills])
        if ends_in_prompt and prefills[-1:].any():
            ttft_s = ttft_s[:-1]
        ended = np.arange(len(prompts)) < len(ttft_s)
        timed = ttft_s > 0
        prompt_speeds = prompt_tokens[ended][timed] / ttft_s[timed]

        # A pass that verifies a draft makes several tokens of one sequence.
        decodes = ~prefills
        each = tokens[decodes] / sequences[decodes]
        gaps_s = np.repeat(duration_s[decodes] / each, np.rint(each).astype(np.int64))
        speeds = {
            Phase.PREFILL: _ratio(prompt_speeds.sum(), prompts[ended].sum()),
            Phase.DECODE: _decode_speed(
                batch[decodes],
                each,
                sequences[decodes],
                start_s[decodes],
                end_s[decodes],
            ),
        }
        figures: dict[str, Any] = {"steps": len(phase), "batches": int(begins.sum())}
        for each_phase in Phase:
            name = f"{each_phase.label}_tokens"
            figures[name] = int(counts[each_phase])
            figures[f"{name}_per_s"] = _ratio(counts[each_phase], seconds[each_phase])
            figures[f"{name}_per_s_seq"] = speeds[each_phase]
        figures["ttft_s"] = _ratio(ttft_s.sum(), len(ttft_s))
        figures["tpot_s"] = _ratio(gaps_s.sum(), len(gaps_s))
        for percent in (50, 95):
            percentile = float(np.percentile(gaps_s, percent)) if len(gaps_s) else None
            figures[f"tpot_p{percent}_s"] = percentile
        return figures


def _decode_speed(
    batch: np.ndarray,
    each: np.ndarray,
    sequences: np.ndarray,
    start_s: np.ndarray,
    end_s: np.ndarray,
) -> float | None:
    """Own tokens per second, mean over the sequences of decode steps [N], which make
    `each` so many tokens of every sequence.

    Source: DALI, decode speed.
    """
    first = np.flatnonzero(np.diff(batch, prepend=-1))
    of_batch = np.repeat(first, np.diff(np.append(first, len(batch))))
    total = np.cumsum(each)
    made = total - (total - each)[of_batch]
    # Sequences that have ended with a step: the next one of their batch has fewer.
    following = np.append(sequences[1:], 0)
    following[np.append(first[1:], len(batch)) - 1] = 0
    seconds = end_s - start_s[of_batch]
    ended = np.where(seconds > 0, np.maximum(sequences - following, 0), 0)
    some = ended > 0
    return _ratio((ended[some] * made[some] / seconds[some]).sum(), ended.sum())


def _ratio(part: float, total: float) -> float | None:
    return float(part / total) if total else None
