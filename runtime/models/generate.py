"""Generates tokens with a plain decoding loop; an observer sees every forward pass.

Prompts of one batch are aligned at their ends (left padding), so that each decode pass
appends one token to every sequence. Each sequence draws from its own generator, so what
is sampled does not depend on the other sequences.

B sequences, S tokens of a pass per sequence (pads included), V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.runtime.models.local_model import LocalModel


class Pass(NamedTuple):
    """One forward pass. Pads, and sequences that have ended, are not kept.

    Attributes:
        tokens: int64 [B, S] token ids that went in.
        positions: int64 [B, S] absolute position of each in its own sequence.
        keep: bool [B, S].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor


class PassObserver(Protocol):
    """Called after every forward pass."""

    def __call__(self, step: Pass) -> None:
        """Take what the pass has left behind."""


class Sampling(NamedTuple):
    """How the next token is chosen: greedily at temperature 0, else drawn with
    `seed`.
    """

    temperature: float = 0.0
    seed: int = 0


def generate(
    local: LocalModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    observe: PassObserver,
    *,
    first: int = 0,
    sampling: Sampling | None = None,
) -> None:
    """Run prefill and decode with a KV cache.

    Every generated token goes through the model too, the last one included:
    `max_new_tokens` new tokens are that many decode passes. A sequence ends early where
    the model says so (its end-of-sequence token is not fed).

    Args:
        local: the model.
        prompts: token ids of B prompts, none empty.
        max_new_tokens: >= 0.
        observe: called after every pass.
        first: number of the first sequence, for its random draws.
        sampling: greedy when None.
    """
    sampling = sampling or Sampling()
    draws = [
        _generator(sampling.seed, first + number) for number in range(len(prompts))
    ]
    ends = _end_tokens(local.model)
    # Not every model takes positions, or can leave out logits that are not used.
    accepted = inspect.signature(local.model.forward).parameters

    tokens, mask = _padded(prompts, local.device)
    lengths = mask.sum(-1, keepdim=True)
    # Pads get position 0, which every model has; their results are not kept.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    keep = mask.bool()
    cache = None

    for generated in range(max_new_tokens + 1):
        optional = {"position_ids": positions, "logits_to_keep": 1}
        with torch.inference_mode():
            out = local.model(
                input_ids=tokens,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **{name: value for name, value in optional.items() if name in accepted},
            )
        observe(Pass(tokens, positions, keep))
        if generated == max_new_tokens:
            return

        # Ended sequences stay in the batch as rows that are masked and not kept: so the
        # KV cache needs no change.
        alive = keep[:, -1]
        chosen = _choose(out.logits[:, -1], sampling.temperature, draws)
        keep = (alive & ~torch.isin(chosen, ends.to(local.device)))[:, None]
        if not keep.any():
            return

        tokens = chosen[:, None]
        cache = out.past_key_values
        positions = lengths + generated
        mask = torch.cat([mask, keep.to(mask)], dim=1)


def _padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Align prompts at their ends: token ids and attention mask, int64 [B, S] each."""
    width = max(map(len, prompts))
    tokens = [[0] * (width - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _choose(
    logits: torch.Tensor, temperature: float, draws: list[torch.Generator]
) -> torch.Tensor:
    """Choose the next token of every sequence, int64 [B], from logits [B, V]."""
    if temperature <= 0:
        return logits.argmax(-1)

    # Drawn on the CPU, so that every device samples the same tokens.
    chances = (logits.float() / temperature).softmax(-1).cpu()
    tokens = [
        torch.multinomial(row, 1, generator=draw)
        for row, draw in zip(chances, draws, strict=True)
    ]
    return torch.cat(tokens).to(logits.device)


def _generator(seed: int, sequence: int) -> torch.Generator:
    """Give a sequence a source of randomness of its own."""
    digest = hashlib.sha256(f"{seed}:{sequence}".encode()).digest()
    # Seven bytes, because a seed must fit into a signed 64-bit number.
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _end_tokens(model: Any) -> torch.Tensor:
    """List the tokens that end a sequence, int64."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = model.config.get_text_config().eos_token_id

    if ends is None:
        ends = []
    elif not isinstance(ends, list):
        ends = [ends]
    return torch.tensor(ends, dtype=torch.int64)
