"""Lets a model read held-out passages as it is and under policies, and compares what
all expect next.

Two readers go through the same text, token by token: the model as it is, and the model
whose routing a policy alters. At every layer a planner is asked exactly as in a run,
and the experts get what its routing policy makes of the gate's choice. Both readers
then give the probability of the text's next token. Nothing is generated, so one unlucky
token does not lead the two apart; but the KV cache of the altered reader is altered,
too.

Residency follows from the planner alone, without a clock: *every copy that a layer step
asks for has landed before the next layer step begins*. So the same text gives the same
figures on any machine, however fast or busy it is. A profile's constants matter only
where an assignment policy weighs them.

Where an assignment starts experts one layer ahead (DAOP), they get what they would get:
the input of the layer before. Results that join one layer later (KTransformers' expert
deferral) do so here.

N passages, S scored tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moesim.base.errors import TraceError
from moesim.policies.base import PolicyError
from moesim.runtime import text as corpus
from moesim.runtime.quality.routing_override import RoutingOverride
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.quality.routing_override import PolicyUnderTest
    from moesim.runtime.record.calibration import Residual


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


GATE_COLUMNS = ("weights", "scores", *PREDICTION_COLUMNS)
"""Columns that a model's gates can give a policy; others exist in traces only."""


@dataclass(slots=True)
class Scores:
    """What one composition of policies did to the predictions. N passages, S scored
    tokens of each; nats everywhere.

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
            before, or whose results joined one layer later.
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


def measure(
    local: LocalModel,
    passages: Passages,
    policies: Sequence[PolicyUnderTest],
    *,
    columns: Sequence[str] = (),
    residual: Residual | None = None,
    batch: int = 1,
    enough: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] | None = None,
) -> list[Scores]:
    """Read passages as the model is, and once under each composition of policies.

    Args:
        local: a model with its own experts; they are computed one after another, so
            that equal routing gives equal bits.
        passages: what is read.
        policies: fresh ones; what they hold resident carries over from passage to
            passage.
        columns: what they need.
        residual: vectors for ``pred1_res``.
        batch: passages read side by side.
        enough: asked after each batch; no further one is read then.
        progress: called with the number of scored tokens.

    Raises:
        PolicyError: a policy answered something illegal, or needs a column that
            gates do not give.
        TraceError: a model whose gates and experts cannot be told apart.
    """
    unknown = sorted(set(columns) - set(GATE_COLUMNS))
    if unknown:
        raise PolicyError(
            f"policy needs {unknown[0]!r}: a model's gates show"
            f" {', '.join(GATE_COLUMNS)} only; replay a trace that has it"
        )
    # Other implementations sum in another order where routing differs.
    if hasattr(local.model, "set_experts_implementation"):
        local.model.set_experts_implementation("eager")

    parts: list[list[_Comparison]] = [[] for _ in policies]
    with RoutingOverride(local, columns, residual) as override, torch.inference_mode():
        for number, first in enumerate(range(0, len(passages.tokens), batch)):
            tokens = passages.tokens[first : first + batch].to(local.device)
            comparisons = _read_batch(
                override, policies, tokens, passages.prompt, number
            )
            for part, comparison in zip(parts, comparisons, strict=True):
                part.append(comparison)
            if progress is not None:
                progress((first + len(tokens)) * passages.scored)
            if enough():
                break
    return [_scores(policy, part) for policy, part in zip(policies, parts, strict=True)]


class _Comparison(NamedTuple):
    """How two readers fared: [B] for one token of each passage, then [B, S]."""

    nats: torch.Tensor
    reference_nats: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor


def _read_batch(
    override: RoutingOverride,
    policies: Sequence[PolicyUnderTest],
    tokens: torch.Tensor,
    prompt: int,
    number: int,
) -> list[_Comparison]:
    """Read one batch of passages in step: the plain reader first, then each policy's;
    one comparison [B, S] per policy.
    """
    # Each with a cache of its own: their pasts differ.
    readers = [_Reader(override, policy, number) for policy in (None, *policies)]
    for reader in readers:
        reader.read(tokens[:, :prompt], Phase.PREFILL)

    steps: list[list[_Comparison]] = [[] for _ in policies]
    # The last token is predicted, never read.
    for at in range(prompt, tokens.shape[1] - 1):
        plain, *others = (
            reader.read(tokens[:, at : at + 1], Phase.DECODE) for reader in readers
        )
        coming = tokens[:, at + 1]
        for step, modified in zip(steps, others, strict=True):
            step.append(_compare(plain, modified, coming))

    return [
        _Comparison(*(torch.stack(field, dim=1) for field in zip(*step, strict=True)))
        for step in steps
    ]


def _compare(
    plain: torch.Tensor, modified: torch.Tensor, coming: torch.Tensor
) -> _Comparison:
    """Compare log probabilities [B, V] about the tokens that come [B]."""
    index = coming[:, None]
    chance = plain.exp()
    # A token ruled out by the plain model adds nothing, instead of 0 times infinity.
    kl = torch.where(chance > 0, chance * (plain - modified), 0.0).sum(-1)
    return _Comparison(
        nats=-modified.gather(1, index)[:, 0].cpu(),
        reference_nats=-plain.gather(1, index)[:, 0].cpu(),
        kl=kl.cpu(),
        agrees=(plain.argmax(-1) == modified.argmax(-1)).cpu(),
    )


def _scores(policy: PolicyUnderTest, parts: Sequence[_Comparison]) -> Scores:
    """Lay batches below each other, and add what the policy counted."""
    nats, reference_nats, kl, agrees = (
        torch.cat(field).numpy() for field in zip(*parts, strict=True)
    )
    return Scores(
        nats,
        reference_nats,
        kl,
        agrees,
        gate_mass=policy.share("mass", "tokens"),
        altered=policy.share("altered", "tokens"),
        stale=policy.share("stale", "pairs"),
        hit_rate=policy.share("hits", "active"),
        used=policy.share("pairs", "tokens"),
    )


class _Reader:
    """Reads one batch of passages, with a KV cache of its own; None for a policy reads
    as the model is.
    """

    def __init__(
        self, override: RoutingOverride, policy: PolicyUnderTest | None, batch: int
    ) -> None:
        self._override = override
        self._policy = policy
        self._batch = batch
        self._cache: Any = None

    def read(self, tokens: torch.Tensor, phase: Phase) -> torch.Tensor:
        """Read on; log probabilities float64 [B, V] of what comes next."""
        if self._policy is not None:
            self._policy.begin(phase, self._batch)
        self._override.begin(self._policy)
        out = self._override.model(
            input_ids=tokens, past_key_values=self._cache, use_cache=True
        )
        self._override.check()
        self._cache = out.past_key_values
        # Differences of close logits are what is measured: float32 would blur them.
        return torch.log_softmax(out.logits[:, -1].double(), dim=-1)
