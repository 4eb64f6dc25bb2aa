"""Measures what recording costs: a short generation without and with its hooks."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from moesim.runtime.models.generate import Pass, generate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.record.gate_recorder import GateRecorder

# Prompt and decode tokens of the sample.
_SAMPLE_TOKENS: Final = 64
_SAMPLE_DECODE: Final = 16
_SAMPLE_RUNS: Final = 5
_SAMPLE_LIMIT_S: Final = 20.0


class Overhead(NamedTuple):
    """Speed without and with recording: medians of the same short generation, taken in
    turn.
    """

    plain_tokens_per_s: float
    recording_tokens_per_s: float
    tokens: int
    runs: int

    @property
    def slowdown(self) -> float:
        """How many times longer recording takes than running."""
        return self.plain_tokens_per_s / self.recording_tokens_per_s


def sample_overhead(
    model: LocalModel, prompt: Sequence[int], recorder: GateRecorder
) -> Overhead:
    """Time a short generation without and with the recorder, in turn, after one round
    that does not count.
    """
    prompts = [list(prompt[: _SAMPLE_TOKENS - _SAMPLE_DECODE])]
    tokens = 0

    def count(step: Pass) -> None:
        nonlocal tokens
        tokens += int(step.keep.sum())

    def plain() -> None:
        generate(model, prompts, _SAMPLE_DECODE, lambda _: None)

    def recorded() -> None:
        with recorder.open(prompts, _SAMPLE_DECODE):
            generate(model, prompts, _SAMPLE_DECODE, recorder.note)

    # The first round initialises libraries, and counts the tokens of every other one.
    begin_s = time.perf_counter()
    generate(model, prompts, _SAMPLE_DECODE, count)

    plain_s: list[float] = []
    recording_s: list[float] = []
    while len(plain_s) < _SAMPLE_RUNS:
        # A slow model gets fewer rounds, but at least one.
        if plain_s and time.perf_counter() - begin_s >= _SAMPLE_LIMIT_S:
            break
        plain_s.append(_timed_s(plain))
        recording_s.append(_timed_s(recorded))
    return Overhead(
        plain_tokens_per_s=tokens / statistics.median(plain_s),
        recording_tokens_per_s=tokens / statistics.median(recording_s),
        tokens=tokens,
        runs=len(plain_s),
    )


def _timed_s(run: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s
