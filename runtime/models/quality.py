"""What a policy does to a model's answers, measured on text that both have to predict.

Two readers go through the same text, token by token: the model as it is, and the model
whose gates are overruled. Whenever a layer's gate has spoken, a planner is asked
exactly as in a run; what its routing policy makes of the gate's choice is what the
experts get. Both readers then say how likely the text's next token is. Nothing is
generated, so one unlucky token does not lead the two apart; but the overruled reader's
own past (its KV cache) is overruled too.

What is resident follows from the planner's books, without a clock: *every copy that a
layer step asks for has landed before the next layer step begins*. So the same text
gives the same figures on any machine, however fast or busy it is. A profile's constants
matter only where an assignment policy weighs them.

Where an assignment starts experts one layer ahead (DAOP), they get what they would get:
the input of the layer before.

T tokens of a pass, H hidden, E experts, K experts per token, K' places after rerouting,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from moesim.policies.base import PolicyError
from moesim.runtime.models import corpus
from moesim.runtime.models.routing_override import Joint, Trial
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from moesim.runtime.models.hf import LocalModel
    from moesim.runtime.record.residual import Residual

SHOWN = ("weights", "scores", *PREDICTION_COLUMNS)
"""What a model's gates can tell a policy; other columns exist in traces only."""


@dataclass(slots=True)
class Scores:
    """What one composition of policies did to the answers. N passages, S scored tokens
    of each; nats everywhere.

    Attributes:
        nats: float64 [N, S], minus log probability of the token that comes.
        reference_nats: the same from the unmodified model.
        kl: float64 [N, S], KL(unmodified || modified).
        agrees: bool [N, S], both find the same token most likely.
        gate_mass: share of the gates' scores that the used experts have, mean over
            scored tokens and layers; 1 where routing is not altered.
        altered: share of scored tokens, counted at every layer, whose experts are not
            the gate's.
        stale: share of token-expert pairs that were computed on the input of the layer
            before.
        hit_rate: resident ones of the active experts, over the layer steps of scored
            tokens.
        used: experts that serve a token, mean over scored tokens and layers.
    """

    nats: np.ndarray
    reference_nats: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray
    gate_mass: float
    altered: float
    stale: float
    hit_rate: float
    used: float


class Passages(NamedTuple):
    """Text cut into pieces of equal length: the first `prompt` tokens are only read,
    all further but one are scored.

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
        return int(self.tokens.shape[1]) - self.prompt - 1


def measure(
    local: LocalModel,
    passages: Passages,
    trials: Sequence[Trial],
    *,
    columns: Sequence[str] = (),
    residual: Residual | None = None,
    batch: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Scores]:
    """Read passages as the model is, and once for each trial.

    Args:
        local: a model with its own experts; they are computed one after another, so
            that equal routing gives equal bits.
        passages: what is read.
        trials: fresh ones; what they hold resident carries over from passage to
            passage.
        columns: what their policies need.
        residual: vectors for ``pred1_res``.
        batch: passages read side by side.
        progress: told how many tokens are scored.

    Raises:
        PolicyError: a policy answered something illegal, or needs what gates do not
            tell.
        TraceError: a model whose gates and experts cannot be told apart.
    """
    strange = sorted(set(columns) - set(SHOWN))
    if strange:
        raise PolicyError(
            f"policy needs {strange[0]!r}: a model's gates show {', '.join(SHOWN)}"
            " only; replay a trace that has it"
        )
    if hasattr(local.model, "set_experts_implementation"):
        local.model.set_experts_implementation("eager")
    answers: list[list[_Answer]] = [[] for _ in trials]
    with Joint(local, columns, residual) as joint, torch.inference_mode():
        for number, first in enumerate(range(0, len(passages.tokens), batch)):
            tokens = passages.tokens[first : first + batch].to(local.device)
            readers = [_Reader(joint, trial, number) for trial in (None, *trials)]
            for reader in readers:
                reader.read(tokens[:, : passages.prompt], Phase.PREFILL)
            found: list[list[_Answer]] = [[] for _ in trials]
            for at in range(passages.prompt, tokens.shape[1] - 1):
                plain, *others = (
                    reader.read(tokens[:, at : at + 1], Phase.DECODE)
                    for reader in readers
                )
                for one, said in enumerate(others):
                    found[one].append(_answer(plain, said, tokens[:, at + 1]))
            for every, mine in zip(answers, found, strict=True):
                every.append(
                    _Answer(
                        *(torch.stack(part, dim=1) for part in zip(*mine, strict=True))
                    )
                )
            if progress is not None:
                progress((first + len(tokens)) * passages.scored)
    return [_scores(trial, parts) for trial, parts in zip(trials, answers, strict=True)]


class _Answer(NamedTuple):
    """How two readers fared: [B] for one token of each passage, then [B, S]."""

    nats: torch.Tensor
    reference_nats: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor


def _answer(plain: torch.Tensor, said: torch.Tensor, coming: torch.Tensor) -> _Answer:
    """Compare log probabilities [B, V] about the tokens that come [B]."""
    place = coming[:, None]
    chance = plain.exp()
    # A token ruled out adds nothing.
    kl = torch.where(chance > 0, chance * (plain - said), 0.0).sum(-1)
    return _Answer(
        -said.gather(1, place)[:, 0].cpu(),
        -plain.gather(1, place)[:, 0].cpu(),
        kl.cpu(),
        (plain.argmax(-1) == said.argmax(-1)).cpu(),
    )


def _scores(trial: Trial, parts: Sequence[_Answer]) -> Scores:
    """Lay passages below each other."""
    nats, reference_nats, kl, agrees = (
        torch.cat(part).numpy() for part in zip(*parts, strict=True)
    )
    return Scores(
        nats,
        reference_nats,
        kl,
        agrees,
        gate_mass=trial.share("mass", "tokens"),
        altered=trial.share("altered", "tokens"),
        stale=trial.share("stale", "pairs"),
        hit_rate=trial.share("hits", "asked"),
        used=trial.share("pairs", "tokens"),
    )


class _Reader:
    """One way through a batch of passages, with a KV cache of its own."""

    def __init__(self, joint: Joint, trial: Trial | None, batch: int) -> None:
        self._joint = joint
        self._trial = trial
        self._batch = batch
        self._cache: Any = None

    def read(self, tokens: torch.Tensor, phase: Phase) -> torch.Tensor:
        """Read on; log probabilities float64 [B, V] of what comes next."""
        if self._trial is not None:
            self._trial.begin(phase, self._batch)
        self._joint.begin(self._trial)
        out = self._joint.model(
            input_ids=tokens, past_key_values=self._cache, use_cache=True
        )
        self._joint.check()
        self._cache = out.past_key_values
        return torch.log_softmax(out.logits[:, -1].double(), dim=-1)
