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

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from moesim.base.errors import TraceError
from moesim.engine.at_once import carry_out
from moesim.policies.base import PolicyError
from moesim.policies.names import RESIDENT
from moesim.runtime import text as corpus
from moesim.runtime.executor.live import routed_layer
from moesim.runtime.models.expert_layout import UNUSED
from moesim.runtime.models.gates import (
    Arguments,
    ExpertsCall,
    Foresight,
    best_first,
    find_blocks,
    gate_facts,
    read_gate,
)
from moesim.traces.format.batch import RoutedStep
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.engine.planner import Planner
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.record.calibration import Residual
    from moesim.traces.format.batch import RoutedLayer


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
    """Effects of one composition of policies on the predictions. N passages, S scored
    tokens of each; nats everywhere.

    Attributes:
        nats: float64 [N, S], minus log probability of the token that comes.
        reference_nats: the same from the unmodified model.
        kl: float64 [N, S], KL(unmodified || modified).
        agrees: bool [N, S], both find the same token most likely.
        shares: ``gate_mass_kept``, share of the gates' scores that the used experts
            have, mean over scored tokens and layers (1 where routing is not altered);
            ``altered``, share of scored tokens, counted at every layer, whose experts
            are not the gate's; ``stale``, share of token-expert pairs that were
            computed on the input of the layer before, or whose results joined one layer
            later; ``hit_rate_active``, resident ones of the active experts, over the
            layer steps of scored tokens; ``experts_used``, experts that serve a token,
            mean over scored tokens and layers.
    """

    nats: np.ndarray
    reference_nats: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray
    shares: dict[str, float]


def measure(
    local: LocalModel,
    passages: Passages,
    policies: Sequence[PolicyUnderTest],
    *,
    columns: Sequence[str] = (),
    residual: Residual | None = None,
    batch: int = 1,
    enough: Callable[[], bool] = lambda: False,
    progress: Callable[[float], None] | None = None,
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
        progress: called with the share of the passages that were read.

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

    batches = []
    with RoutingOverride(local, columns, residual) as override, torch.inference_mode():
        for number, first in enumerate(range(0, len(passages.tokens), batch)):
            tokens = passages.tokens[first : first + batch].to(local.device)
            batches.append(
                _read_batch(override, policies, tokens, passages.prompt, number)
            )
            if progress is not None:
                progress((first + len(tokens)) / len(passages.tokens))
            if enough():
                break
    return [
        Scores(nats, reference_nats, kl, agrees > 0, policy.shares())
        for policy, (nats, reference_nats, kl, agrees) in zip(
            policies, torch.cat(batches, dim=2).numpy(), strict=True
        )
    ]


def _read_batch(
    override: RoutingOverride,
    policies: Sequence[PolicyUnderTest],
    tokens: torch.Tensor,
    prompt: int,
    number: int,
) -> torch.Tensor:
    """Read one batch of passages in step, as the model is and under each policy; the
    arrays of `Scores` per policy, float64 [P, 4, B, S].
    """
    readers = (None, *policies)
    # Each with a KV cache of its own: their pasts differ.
    caches: list[Any] = [None for _ in readers]

    def read(piece: torch.Tensor, phase: Phase) -> list[torch.Tensor]:
        """Read on; log probabilities float64 [B, V] of what comes next."""
        coming = []
        for place, policy in enumerate(readers):
            if policy is not None:
                policy.begin(phase, number)
            override.begin(policy)
            out = override.model(
                input_ids=piece, past_key_values=caches[place], use_cache=True
            )
            override.check()
            caches[place] = out.past_key_values
            # Differences of close logits are measured: float32 would blur them.
            coming.append(torch.log_softmax(out.logits[:, -1].double(), dim=-1))
        return coming

    read(tokens[:, :prompt], Phase.PREFILL)
    steps = []
    # The last token is predicted, never read.
    for at in range(prompt, tokens.shape[1] - 1):
        plain, *others = read(tokens[:, at : at + 1], Phase.DECODE)
        compared = [_compare(plain, each, tokens[:, at + 1]) for each in others]
        steps.append(torch.stack(compared))
    return torch.stack(steps, dim=-1).cpu()


def _compare(
    plain: torch.Tensor, modified: torch.Tensor, coming: torch.Tensor
) -> torch.Tensor:
    """Compare log probabilities [B, V] about the tokens that come [B]: the arrays of
    `Scores`, float64 [4, B].
    """
    index = coming[:, None]
    chance = plain.exp()
    # A token ruled out by the plain model adds nothing, instead of 0 times infinity.
    kl = torch.where(chance > 0, chance * (plain - modified), 0.0).sum(-1)
    agrees = plain.argmax(-1) == modified.argmax(-1)
    nats, reference_nats = (-each.gather(1, index)[:, 0] for each in (modified, plain))
    return torch.stack([nats, reference_nats, kl, agrees.double()])


# -- a routing policy at work in a model -----------------------------------------------
# What it is asked, and its answer in place of the gates'.
#
# T tokens, E experts, K experts per token, H hidden.

NOBODY = np.empty((1, 0), np.int64)


@dataclass(slots=True)
class PolicyUnderTest:
    """One composition of policies, its planner, and what it has done so far.

    Attributes:
        planner: asked at every layer of every pass.
        own_input: whether experts that were started one layer ahead nevertheless get
            their own layer's input.
        begun: int, experts of the last layer step that the CPU had begun before its
            gate ran, for the tokens of which the layer before expected them.
        foreseen: int [T, K], those expected.
        late: int, experts of the last layer step whose results join in the next.
        counts: over scored tokens.
    """

    planner: Planner
    own_input: bool = False
    begun: np.ndarray = field(default_factory=lambda: NOBODY)
    foreseen: np.ndarray = field(default_factory=lambda: NOBODY)
    late: np.ndarray = field(default_factory=lambda: NOBODY)
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # int [T, K]: the choice that the last layer step predicted for the next layer.
    _expected: np.ndarray = field(default_factory=lambda: NOBODY)
    _phase: Phase = Phase.PREFILL
    _step: int = -1
    _batch: int = 0
    _now_s: float = 0.0

    def begin(self, phase: Phase, batch: int) -> None:
        """Note that a forward pass begins."""
        self._phase = phase
        self._batch = batch
        self._step += 1
        self._expected = NOBODY

    def layer(self, routed: RoutedLayer) -> tuple[np.ndarray, np.ndarray]:
        """Plan one layer step and carry out all its copies.

        Returns:
            Weights float64 [T, E] of the experts that serve the tokens, -1 of others;
            and bool [T], tokens whose experts and weights are the gate's.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        planner = self.planner
        masses = len(planner.gate_mass)
        tokens, top_k = routed.routing.shape
        step = RoutedStep(
            step=self._step,
            phase=self._phase,
            batch=self._batch,
            tokens=tokens,
            context_tokens=0,
            sequences=0,
            layers=[routed],
        )
        planner.put(planner.block_of(step))
        plan = planner.plan(0, self._now_s)
        active = planner.work.active
        experts = np.array(planner.work.experts).astype(np.int64)
        state = np.array(planner.work.state[:active])

        self.late = experts[np.array(plan.deferred[:active], np.bool_) & plan.defers]
        begun = np.array(plan.precomputed[:active], np.bool_) & plan.has_precomputed
        self.begun = experts[begun]
        self.foreseen = NOBODY if self.own_input else self._expected
        self._expected = NOBODY
        if plan.begins_ahead and "pred1_raw" in routed.predicted:
            scores = routed.predicted["pred1_raw"].astype(np.float32)
            # Ties go to the lower id.
            best_first = np.argsort(-scores, axis=1, kind="stable")
            self._expected = best_first[:, :top_k]
        assert routed.weights is not None, "a live gate has weights"
        chosen = used = by_expert(routed.routing, routed.weights, planner.experts)
        if planner.alters_now:
            ids, weights = planner.used_routing()
            if weights is None:
                raise PolicyError(
                    "routing policy: expected weights beside the experts that it names,"
                    " got none"
                )
            used = by_expert(ids, weights, planner.experts)
        self._now_s = carry_out(planner, self._now_s)

        # A planner notes a gate mass only where a routing policy was asked.
        noted = len(planner.gate_mass) > masses
        self.count(
            tokens=tokens,
            mass=tokens * (planner.gate_mass[masses] if noted else 1.0),
            altered=int(((chosen < 0) != (used < 0)).any(axis=1).sum()),
            pairs=int((used >= 0).sum()),
            hits=int((state == RESIDENT).sum()),
            active=active,
        )
        return used, (chosen == used).all(axis=1)

    def count(self, **numbers: float) -> None:
        """Count what happened to scored tokens."""
        if self._phase == Phase.DECODE:
            for name, number in numbers.items():
                self.counts[name] += number

    def shares(self) -> dict[str, float]:
        """Divide what was counted, as `Scores.shares`; NaN where nothing was."""
        parts = {
            "gate_mass_kept": ("mass", "tokens"),
            "altered": ("altered", "tokens"),
            "stale": ("stale", "pairs"),
            "hit_rate_active": ("hits", "active"),
            "experts_used": ("pairs", "tokens"),
        }
        counts = self.counts
        return {
            name: counts[part] / (counts[total] or math.nan)
            for name, (part, total) in parts.items()
        }


def by_expert(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """The weights [T, K] of each token's experts [T, K] as [T, E]; -1 of others."""
    table = np.full((len(ids), experts), -1.0)
    tokens, places = np.nonzero(ids != UNUSED)
    table[tokens, ids[tokens, places]] = weights[tokens, places]
    return table


class RoutingOverride:
    """Stands between the gates and the experts of a model while the context is open.

    Args:
        local: the model.
        columns: what policies need of `moesim.runtime.quality.GATE_COLUMNS`.
        residual: vectors for ``pred1_res``.
    """

    def __init__(
        self, local: LocalModel, columns: Sequence[str], residual: Residual | None
    ) -> None:
        self.model: Any = local.model
        self._blocks = find_blocks(local.model)
        self._facts = gate_facts(local.model, self._blocks)
        vectors = None
        if residual is not None:
            vectors = torch.from_numpy(residual.vectors).to(local.device)
        predicted = [name for name in columns if name in PREDICTION_COLUMNS]
        self._foresight = Foresight(self._blocks, self._facts, predicted, vectors)
        self._needs_scores = "scores" in columns
        self._hooks: list[Any] = []
        self.begin(None)

    def begin(self, policy: PolicyUnderTest | None) -> None:
        """Let `policy` override the gates of the next pass; the model decides if
        None.
        """
        self._policy = policy
        # Layers of the pass at work whose experts were called.
        self._served = 0
        # Of the gate that ran last.
        self._gate_call: Arguments = (), {}
        self._gate_output: torch.Tensor | None = None
        # Of the layer before: [T, H] what its experts were given, and what computes
        # those of its results that join in this layer.
        self._input_before = torch.empty(0)
        self._awaited: Callable[[], torch.Tensor] | None = None

    def __enter__(self) -> Self:
        """Attach it to gates and experts."""
        for layer, block in enumerate(self._blocks):
            self._hooks.append(
                block.gate.register_forward_hook(self._on_gate, with_kwargs=True)
            )
            experts: Any = block.experts
            experts.forward = partial(self._serve, layer, experts.forward)
        return self

    def __exit__(self, *_: object) -> None:
        """Detach it."""
        for hook, block in zip(self._hooks, self._blocks, strict=True):
            hook.remove()
            del block.experts.forward

    def check(self) -> None:
        """Make sure that every layer's experts were called as we know it.

        Raises:
            TraceError: they were not.
        """
        if self._served != len(self._blocks):
            raise TraceError(
                f"{self._blocks[0].name}: expected the experts of {len(self._blocks)}"
                " layers to be called with hidden states, ids and weights, found"
                f" {self._served}; this kind of MoE layer is not supported"
            )

    def _on_gate(
        self, gate: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a gate's input and output."""
        del gate
        block = self._blocks[self._served]
        self._gate_call = args, kwargs
        self._gate_output, _, _ = read_gate(output, block.count)
        if self._gate_output is None and self._needs_scores:
            raise PolicyError(
                f"{block.name}: its gate shows only its choice, and a policy needs its"
                " scores"
            )

    def _serve(
        self, layer: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute a layer's experts as the policy at work wants it."""
        call = ExpertsCall.find(args, kwargs)
        if call is not None:
            self._served += 1
        policy = self._policy
        if call is None or policy is None:
            return forward(*args, **kwargs)
        index, weights = _rerouted(call, *policy.layer(self._routed(layer, call)))
        begun, foreseen, late_experts = (
            torch.from_numpy(ids).to(index)
            for ids in (policy.begun, policy.foreseen, policy.late)
        )
        early = torch.isin(index, begun)
        early &= (index[:, :, None] == foreseen[:, None]).any(-1)
        late = torch.isin(index, late_experts) & ~early
        on_time = ~(early | late)
        policy.count(stale=int((~on_time).sum()))

        def part(hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            given, named = call.changed(args, kwargs, hidden, index, weights * counts)
            result: torch.Tensor = forward(*given, **named)
            return result

        # Each pair counts in one of the calls, with weight zero in the others.
        result = part(call.hidden, on_time)
        if early.any():
            result = result + part(self._input_before, early)
        if self._awaited is not None:
            result = result + self._awaited()
        self._awaited = partial(part, call.hidden, late) if late.any() else None
        self._input_before = call.hidden
        return result

    def _routed(self, layer: int, call: ExpertsCall) -> RoutedLayer:
        """Describe the gate's choice, best expert first, as a trace would."""
        output = self._gate_output
        index, weights = best_first(call.index, call.weights, output)
        routed, _ = routed_layer(layer, index, weights)
        if self._needs_scores and output is not None:
            routed.scores = self._facts.scores(output).cpu().numpy()
        predicted = self._foresight.predict(layer, *self._gate_call)
        routed.predicted = {
            name: values.cpu().numpy() for name, values in predicted.items()
        }
        return routed


def _rerouted(
    call: ExpertsCall, used: np.ndarray, same: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a policy's answer into ids and weights [T, K'] for the experts."""
    if same.all():
        return call.index, call.weights
    top_k = call.index.shape[1]
    width = max(top_k, int((used >= 0).sum(axis=1).max()))
    ids = np.argsort(-used, axis=1, kind="stable")[:, :width]
    shares = np.take_along_axis(used, ids, axis=1)
    # Experts modules know no empty column: it repeats the token's first expert, with
    # weight zero.
    ids = np.where(shares < 0, ids[:, :1], ids)
    index = torch.from_numpy(ids).to(call.index)
    weights = torch.from_numpy(shares.clip(min=0)).to(call.weights)

    # Tokens that stay keep the model's own order, so that sums are the same to the bit.
    rows = torch.from_numpy(np.flatnonzero(same)).to(index.device)
    index[rows, :top_k] = call.index[rows]
    weights[rows, :top_k] = call.weights[rows]
    return index, weights
