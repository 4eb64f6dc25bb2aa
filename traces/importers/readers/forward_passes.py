"""Sequences out of forward passes.

An engine runs forward passes, a trace holds sequences. `ForwardPasses` turns the
former into the latter where a file does not say which request a token belongs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    Block = dict[str, np.ndarray]


class ForwardPasses:
    """Deals the tokens of forward passes to sequences.

    A pass of several tokens is a prompt, a pass of one token continues the sequence. A
    layer may hold fewer tokens than its pass, and then they are the last ones: some
    engines compute the last layer only where logits are wanted.

    Args:
        chunked: whether consecutive passes of several tokens are pieces of one prompt;
            otherwise each begins a sequence.
    """

    def __init__(self, *, chunked: bool) -> None:
        self._chunked = chunked
        self._sequence = -1
        self._next_pos = 0
        self._in_prompt = False

    def rows(
        self,
        number: np.ndarray,
        layer: np.ndarray,
        tokens: np.ndarray,
        experts: np.ndarray,
    ) -> Block:
        """Return the rows of some whole passes. R layer runs, N rows in all.

        Args:
            number: int [R], ascending: pass of each run.
            layer: int [R], layer of each run.
            tokens: int [R], tokens of each run.
            experts: int [N, K], rows of all runs, one run after the other.
        """
        new_pass = np.concatenate(([True], np.diff(number) != 0))
        pass_starts = np.flatnonzero(new_pass)
        pass_of_run = np.cumsum(new_pass) - 1

        # The fullest layer says how many tokens a pass has.
        size = np.maximum.reduceat(tokens, pass_starts)
        is_prompt = size > 1

        begins = is_prompt.copy()
        if self._chunked:
            begins &= ~np.concatenate(([self._in_prompt], is_prompt[:-1]))
        # Whatever comes first in the file begins a sequence, a single token too.
        begins[0] |= self._sequence < 0

        sequence = self._sequence + np.cumsum(begins)
        # Tokens since the sequence that was open when this call began; the running
        # maximum is that count where the pass's own sequence began.
        tokens_before = self._next_pos + np.cumsum(size) - size
        sequence_start = np.maximum.accumulate(np.where(begins, tokens_before, 0))
        first_pos = tokens_before - sequence_start

        self._sequence = int(sequence[-1])
        self._in_prompt = bool(is_prompt[-1])
        self._next_pos = int(first_pos[-1] + size[-1])

        # A run's tokens are the last ones of its pass.
        run_start = np.cumsum(tokens) - tokens
        run_pos = (first_pos + size)[pass_of_run] - tokens
        pos = np.repeat(run_pos - run_start, tokens) + np.arange(len(experts))

        phase = np.where(is_prompt, Phase.PREFILL, Phase.DECODE)[pass_of_run]

        return {
            "seq": np.repeat(sequence[pass_of_run], tokens).astype(np.int32),
            "pos": pos.astype(np.int32),
            "phase": np.repeat(phase, tokens).astype(np.int8),
            "layer": np.repeat(layer, tokens).astype(np.int32),
            "experts": experts,
        }
