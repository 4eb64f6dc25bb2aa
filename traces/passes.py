"""Cuts the tokens of a sequence into forward passes, where that is not one pass for the
prompt and one for each generated token.

A *micro-batch* is a part of a prompt that runs through all layers before the next one
begins. A *draft* proposes some tokens, and one pass of the model verifies them all:
those up to the first wrong one are kept, and one more, which the pass itself makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.base.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Passes:
    """Sizes of forward passes: prompt tokens and drafted tokens.

    Attributes:
        micro_batch_tokens: most prompt tokens of a pass; None for whole prompts.
        draft_tokens: tokens that are drafted for each decode pass; 0 for none.
        acceptance: probability that a drafted token is right, given that all before it
            are.
        seed: of the draws of acceptance.
    """

    micro_batch_tokens: int | None = None
    draft_tokens: int = 0
    acceptance: float = 1.0
    seed: int = 0

    def verified(
        self, generated: int, sequence: int = 0
    ) -> Iterator[tuple[int, int, int]]:
        """Cut generated tokens into passes that verify drafts.

        A trace holds the tokens that were kept, so a rejected token has the routing of
        the one that took its place.

        Args:
            generated: tokens of the sequence.
            sequence: its number; each has draws of its own.

        Yields:
            The first token of each pass, how many it computes, and how many are kept.
        """
        draws = np.random.default_rng([self.seed, sequence])
        place = 0
        while place < generated:
            # The last token that was kept comes first: its successor is not known yet.
            computed = min(1 + self.draft_tokens, generated - place)
            # As many numbers in every pass, whatever becomes of them.
            right = draws.random(self.draft_tokens) < self.acceptance
            wrong = np.flatnonzero(~right[: computed - 1])
            kept = int(wrong[0]) + 1 if len(wrong) else computed
            yield place, computed, kept
            place += kept


def micro_batches(tokens: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Cut the prompts of a batch into micro-batches.

    Each takes equally many tokens of every prompt that is not at its end, at least one.

    Args:
        tokens: of each prompt.
        most: tokens of a micro-batch, >= 1.

    Yields:
        Of each prompt, the first token of its part and the one behind its last.
    """
    done = [0] * len(tokens)
    while True:
        open_prompts = [n for n, count in enumerate(tokens) if done[n] < count]
        if not open_prompts:
            return
        share = max(1, most // len(open_prompts))
        part = [(first, first) for first in done]
        for n in open_prompts[:most]:
            part[n] = done[n], min(tokens[n], done[n] + share)
            done[n] = part[n][1]
        yield part


def check_passes(passes: Passes, batch: int) -> None:
    """Refuse drafts for several sequences, which would advance at different paces.

    Raises:
        TraceError: naming the way out.
    """
    if passes.draft_tokens and batch > 1:
        raise TraceError(
            f"draft_tokens: expected one sequence at a time, got batch {batch}; use"
            " batch 1, or draft_tokens 0"
        )
