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


class UnclearError(Exception):
    """Two passes may be pieces of one prompt or two prompts."""


class ForwardPasses:
    """Deals the tokens of forward passes to sequences.

    A pass of several tokens is a prompt, a pass of one token continues the sequence. A
    layer may hold fewer tokens than its pass, and then they are the last ones: some
    engines compute the last layer only where logits are wanted, so of a prompt in
    several passes only the last one has all layers.

    Args:
        layers: of the model, where prompts come in several passes; 0 where every pass
            of several tokens is a prompt of its own.
        joins: whether passes of a prompt that all have every token at every layer are
            pieces of one; None refuses such passes.
    """

    def __init__(self, *, layers: int = 0, joins: bool | None = None) -> None:
        self._layers = layers
        self._joins = joins
        self._sequence = -1
        self._next_pos = 0
        # Whether the prompt goes on: of the last pass that was read.
        self._is_open = False
        self._is_unclear = False

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

        Raises:
            UnclearError: the passes do not say where a prompt ends.
        """
        new_pass = np.concatenate(([True], np.diff(number) != 0))
        pass_starts = np.flatnonzero(new_pass)
        pass_of_run = np.cumsum(new_pass) - 1

        # The fullest layer says how many tokens a pass has.
        size = np.maximum.reduceat(tokens, pass_starts)
        is_prompt = size > 1
        begins = self._begins(pass_starts, tokens, size)
        # Whatever comes first in the file begins a sequence, a single token too.
        begins[0] |= self._sequence < 0

        sequence = self._sequence + np.cumsum(begins)
        # Tokens since the sequence that was open when this call began; the running
        # maximum is that count where the pass's own sequence began.
        tokens_before = self._next_pos + np.cumsum(size) - size
        sequence_start = np.maximum.accumulate(np.where(begins, tokens_before, 0))
        first_pos = tokens_before - sequence_start

        self._sequence = int(sequence[-1])
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

    def _begins(
        self, pass_starts: np.ndarray, tokens: np.ndarray, size: np.ndarray
    ) -> np.ndarray:
        """Bool [P]: whether each pass begins a sequence."""
        is_prompt = size > 1
        if not self._layers:
            return is_prompt

        runs = np.diff(np.append(pass_starts, len(tokens)))
        last_run = tokens[pass_starts + runs - 1]
        is_whole = runs == self._layers
        is_unclear = is_prompt & is_whole & (last_run == size)
        is_open = is_prompt & (~is_whole | (is_unclear & bool(self._joins)))

        goes_on = np.concatenate(([self._is_open], is_open[:-1]))
        after_unclear = np.concatenate(([self._is_unclear], is_unclear[:-1]))
        if self._joins is None and (after_unclear & is_prompt).any():
            raise UnclearError
        self._is_open = bool(is_open[-1])
        self._is_unclear = bool(is_unclear[-1])
        return is_prompt & ~goes_on
