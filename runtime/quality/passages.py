"""Passages: text cut into pieces of equal length, on which predictions are scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moesim.runtime.text import corpus
from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Passages(NamedTuple):
    """N pieces of text: the first `prompt` tokens are only read, all further but one
    are scored.

    `tokens` int64 [N, prompt + S + 1]: the last one is only predicted.
    """

    tokens: torch.Tensor
    prompt: int

    @classmethod
    def cut(
        cls, ids: Sequence[int], *, prompt: int, scored: int, most: int
    ) -> Passages:
        """Cut a text into consecutive passages, at most `most` of them.

        Raises:
            TraceError: the text is too short for one.
        """
        length = prompt + scored + 1
        count = min(most, len(ids) // length)
        if not count:
            raise TraceError(
                f"text: expected at least {length} tokens ({prompt} of prompt, {scored}"
                f" to score, one to predict), found {len(ids)}; give a longer text or"
                " shorter passages"
            )
        return cls(torch.tensor(ids[: count * length]).view(count, length), prompt)

    @classmethod
    def of_corpus(
        cls, count: int, *, prompt: int, scored: int, seed: int = 0
    ) -> Passages:
        """Draw passages of the corpus's evaluation part, as bytes: text that the
        shipped model was not trained on.
        """
        texts = corpus.prompts("evaluation", count, prompt + scored + 1, seed)
        return cls(torch.tensor([list(text) for text in texts]), prompt)

    @property
    def scored(self) -> int:
        """S, tokens of each passage whose successor is predicted after the prompt."""
        # The token behind the last scored one is predicted, never read.
        return int(self.tokens.shape[1]) - self.prompt - 1
