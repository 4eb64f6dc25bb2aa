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

from collections import defaultdict
from dataclasses import dataclass, field
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

    parts: list[list[list[torch.Tensor]]] = [[] for _ in policies]
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
    results = []
    for policy, part in zip(policies, parts, strict=True):
        # Batches lie below each other.
        nats, reference_nats, kl, agrees = (
            torch.cat(arrays).numpy() for arrays in zip(*part, strict=True)
        )
        results.append(Scores(nats, reference_nats, kl, agrees, policy.shares()))
    return results


def _read_batch(
    override: RoutingOverride,
    policies: Sequence[PolicyUnderTest],
    tokens: torch.Tensor,
    prompt: int,
    number: int,
) -> list[list[torch.Tensor]]:
    """Read one batch of passages in step: the plain reader first, then each policy's;
    the arrays of `Scores`, [B, S] each, per policy.
    """
    # Each with a cache of its own: their pasts differ.
    readers = [_Reader(override, policy, number) for policy in (None, *policies)]
    for reader in readers:
        reader.read(tokens[:, :prompt], Phase.PREFILL)

    steps: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in policies]
    # The last token is predicted, never read.
    for at in range(prompt, tokens.shape[1] - 1):
        plain, *others = (
            reader.read(tokens[:, at : at + 1], Phase.DECODE) for reader in readers
        )
        coming = tokens[:, at + 1]
        for step, modified in zip(steps, others, strict=True):
            step.append(_compare(plain, modified, coming))

    return [
        [torch.stack(arrays, dim=1) for arrays in zip(*step, strict=True)]
        for step in steps
    ]


def _compare(
    plain: torch.Tensor, modified: torch.Tensor, coming: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Compare log probabilities [B, V] about the tokens that come [B]: the arrays of
    `Scores`, [B] each.
    """
    index = coming[:, None]
    chance = plain.exp()
    # A token ruled out by the plain model adds nothing, instead of 0 times infinity.
    kl = torch.where(chance > 0, chance * (plain - modified), 0.0).sum(-1)
    agrees = plain.argmax(-1) == modified.argmax(-1)
    nats, reference_nats = (-each.gather(1, index)[:, 0] for each in (modified, plain))
    return nats.cpu(), reference_nats.cpu(), kl.cpu(), agrees.cpu()


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


# -- a routing policy at work in a model -----------------------------------------------
# A routing policy at work in a model that is read from memory: what it is asked, and
# its answer in place of the gates'.
#
# Where an assignment starts experts one layer ahead (DAOP), they get what they would
# get: the input of the layer before. Where it lets results join one layer later
# (expert deferral of KTransformers), they do.
#
# T tokens, E experts, K experts per token, H hidden.


@dataclass(slots=True)
class PolicyUnderTest:
    """One composition of policies, its planner, and what it has done so far.

    Attributes:
        planner: asked at every layer of every pass.
        own_input: whether experts that were started one layer ahead nevertheless get
            their own layer's input.
        early: bool [T, E], experts of the last layer step that the CPU had begun for a
            token before its gate ran; None if there are none.
        late: int [D], active experts of the last layer step whose results join in the
            next.
        counts: over scored tokens.
    """

    planner: Planner
    own_input: bool = False
    early: np.ndarray | None = None
    late: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # bool [T, E]: the choice that the last layer step predicted for the next layer.
    _expected: np.ndarray | None = None
    _phase: Phase = Phase.PREFILL
    _step: int = -1
    _batch: int = 0
    _now_s: float = 0.0

    def begin(self, phase: Phase, batch: int) -> None:
        """Note that a forward pass begins."""
        self._phase = phase
        self._batch = batch
        self._step += 1
        self._expected = None

    def layer(self, routed: RoutedLayer) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Plan one layer step and carry out all its copies.

        Returns:
            The experts that serve the tokens, uint16 [T, K'], UNUSED where none takes a
            place, and their weights, float [T, K'], if the policy gives any; None for
            those that the gate chose.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        planner = self.planner
        masses = len(planner.gate_mass)
        step = RoutedStep(
            step=self._step,
            phase=self._phase,
            batch=self._batch,
            tokens=len(routed.routing),
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
        self.early = None
        if self._expected is not None and begun.any() and not self.own_input:
            # Begun for a token only if predicted for it, too.
            chosen = np.zeros(self._expected.shape[1], np.bool_)
            chosen[experts[begun]] = True
            self.early = self._expected & chosen
        self._expected = None
        if plan.begins_ahead and "pred1_raw" in routed.predicted:
            top_k = routed.routing.shape[1]
            self._expected = top_experts(routed.predicted["pred1_raw"], top_k)
        served = planner.used_routing() if planner.alters_now else None
        self._now_s = carry_out(planner, self._now_s)

        # A planner notes a gate mass only where a routing policy was asked.
        noted = len(planner.gate_mass) > masses
        tokens = len(routed.routing)
        after = routed.routing if served is None else served[0]
        self.count(
            tokens=tokens,
            mass=tokens * (planner.gate_mass[masses] if noted else 1.0),
            altered=_count_altered(routed.routing, after),
            pairs=int((after != UNUSED).sum()),
            hits=int((state == RESIDENT).sum()),
            active=len(state),
        )
        return served

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
            name: counts[part] / counts[total] if counts[total] else float("nan")
            for name, (part, total) in parts.items()
        }


def top_experts(scores: np.ndarray, count: int) -> np.ndarray:
    """Bool [T, E]: the `count` best of each row of scores [T, E], ties to the lower
    id.
    """
    chosen = np.zeros(scores.shape, np.bool_)
    order = np.argsort(-scores.astype(np.float32), axis=1, kind="stable")
    np.put_along_axis(chosen, order[:, :count], values=True, axis=1)
    return chosen


def widened(values: np.ndarray, width: int, filler: int) -> np.ndarray:
    """Widen [T, K] to at least `width` columns."""
    missing = max(0, width - values.shape[1])
    return np.pad(values, ((0, 0), (0, missing)), constant_values=filler)


def _count_altered(before: np.ndarray, after: np.ndarray) -> int:
    """Count tokens whose experts [T, K] and [T, K'] are not the same ones, in whatever
    order.
    """
    width = max(before.shape[1], after.shape[1])
    sorted_before = np.sort(widened(before, width, UNUSED), axis=1)
    sorted_after = np.sort(widened(after, width, UNUSED), axis=1)
    return int((sorted_before != sorted_after).any(axis=1).sum())


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
        self._policy: PolicyUnderTest | None = None

        # Of the gate that ran last.
        self._gate_call: Arguments = (), {}
        self._gate_output: torch.Tensor | None = None
        # Of the layer before: [T, H] what its experts were given.
        self._input_before = torch.empty(0)
        # Further calls of experts: whose results are added behind the layer at work,
        # and behind the next one.
        self._added: list[tuple[Any, Arguments]] = []
        self._awaited: list[tuple[Any, Arguments]] = []
        # Layers of the pass at work whose experts were called.
        self._served = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        """Attach the hooks."""
        for layer, block in enumerate(self._blocks):
            gate_hook = block.gate.register_forward_hook(
                self._on_gate, with_kwargs=True
            )
            experts_hook = block.experts.register_forward_pre_hook(
                self._on_experts(layer), with_kwargs=True
            )
            result_hook = block.experts.register_forward_hook(
                self._after_experts, with_kwargs=True
            )
            self._hooks += [gate_hook, experts_hook, result_hook]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, policy: PolicyUnderTest | None) -> None:
        """Let `policy` override the gates from now on; the model decides if None."""
        self._policy = policy
        self._served = 0
        self._awaited = []

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

    def _on_experts(self, layer: int) -> Callable[..., Any]:
        """Return the hook that runs before a layer's experts and may change what they
        are given.
        """

        def hook(
            experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Arguments | None:
            call = ExpertsCall.find(args, kwargs)
            if call is None:
                return None
            self._served += 1
            self._added, self._awaited = self._awaited, []
            if self._policy is None:
                return None
            return self._override(self._policy, layer, experts, call, (args, kwargs))

        return hook

    def _after_experts(
        self, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Add what is computed on the input of the layer before, or was left by it."""
        del experts, args, kwargs
        for module, (given, named) in self._added:
            # `forward`, not a call: hooks must not run for it.
            output = output + module.forward(*given, **named)
        return output

    def _override(
        self,
        policy: PolicyUnderTest,
        layer: int,
        experts: Any,
        call: ExpertsCall,
        arguments: Arguments,
    ) -> Arguments | None:
        """Return changed arguments for a layer's experts; None where they stay."""
        index, weights = self._planned(policy, layer, call)
        stale = torch.zeros_like(index, dtype=torch.bool)
        if policy.early is not None:
            early = torch.from_numpy(policy.early).to(index.device)
            stale = early.gather(1, index.long())
        late = torch.isin(index, torch.from_numpy(policy.late).to(index)) & ~stale
        policy.count(stale=int((stale | late).sum()))

        # Each pair counts in one of the calls, with weight zero in the others.
        on_time = ~(stale | late)
        if policy.early is not None:
            given = self._input_before, index, weights * stale
            self._added.insert(0, (experts, call.changed(*arguments, *given)))
        if len(policy.late):
            given = call.hidden, index, weights * late
            self._awaited = [(experts, call.changed(*arguments, *given))]
        self._input_before = call.hidden
        if index is call.index and bool(on_time.all()):
            return None
        return call.changed(*arguments, call.hidden, index, weights * on_time)

    def _planned(
        self, policy: PolicyUnderTest, layer: int, call: ExpertsCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ask the planner; ids and weights [T, K'] for the experts, the given ones
        themselves where nothing changes.
        """
        routed = self._routed(layer, call)
        served = policy.layer(routed)
        if served is None:
            return call.index, call.weights
        return _rerouted(call, routed, *served)

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
    call: ExpertsCall,
    routed: RoutedLayer,
    chosen: np.ndarray,
    shares: np.ndarray | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a planner's routing into ids and weights [T, K'] for the experts; the call's
    own ones where no token changes.
    """
    if shares is None:
        raise PolicyError(
            "routing policy: expected weights beside the experts that it names, got"
            " none"
        )
    assert routed.weights is not None, "a live gate has weights"
    top_k = routed.routing.shape[1]
    ids = widened(chosen, top_k, UNUSED)
    shares = widened(shares, top_k, 0)
    width = ids.shape[1]
    same = (ids == widened(routed.routing, width, UNUSED)).all(1)
    same &= (shares == widened(routed.weights, width, 0)).all(1)
    if same.all():
        return call.index, call.weights

    # Experts modules know no empty column: it repeats the token's first expert, with
    # weight zero.
    used = ids != UNUSED
    rows = np.arange(len(ids))
    first = np.where(used.any(1), ids[rows, used.argmax(1)], 0)
    filled = np.where(used, ids, first[:, None]).astype(np.int64)
    index = torch.from_numpy(filled).to(call.index)
    weights = torch.from_numpy(np.where(used, shares, 0).astype(np.float32))
    weights = weights.to(call.weights)

    # Tokens that stay keep the model's own order, so that sums are the same to the bit.
    rows = torch.from_numpy(np.flatnonzero(same)).to(index.device)
    index[rows, :top_k] = call.index[rows]
    weights[rows, :top_k] = call.weights[rows]
    return index, weights
