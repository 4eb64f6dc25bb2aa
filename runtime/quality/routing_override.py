"""A routing policy at work in a model that is read from memory: what it is asked, and
its answer in place of the gates'.

Where an assignment starts experts one layer ahead (DAOP), they get what they would get:
the input of the layer before. Where it lets results join one layer later (expert
deferral of KTransformers), they do.

T tokens, E experts, K experts per token, H hidden.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from moesim.base.errors import TraceError
from moesim.policies.base import RESIDENT, PolicyError
from moesim.policies.planner.at_once import carry_out
from moesim.runtime.executor.live import Foresight, routed_layer
from moesim.runtime.models.expert_layout import UNUSED
from moesim.runtime.models.gates import (
    Arguments,
    ExpertsCall,
    best_first,
    find_blocks,
    gate_facts,
    read_gate,
)
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.base import LayerWork
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.record.calibration import Residual
    from moesim.traces.format.batch import RoutedLayer


@dataclass(slots=True)
class PolicyUnderTest:
    """One composition of policies, its planner, and what it has done so far.

    Attributes:
        planner: asked at every layer of every pass.
        own_input: whether experts that were started one layer ahead nevertheless get
            their own layer's input.
        phase: of the pass at work.
        started: active experts of the last layer step that the CPU had begun before its
            gate ran.
        deferred: active experts of the last layer step whose results join in the next.
        expected: bool [T, E], the choice that the last layer step predicted for the
            next layer; None if it predicted none.
        counts: over scored tokens.
    """

    planner: Planner
    own_input: bool = False
    phase: Phase = Phase.PREFILL
    started: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    deferred: list[int] = field(default_factory=list)
    expected: np.ndarray | None = None
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _step: int = -1
    _batch: int = 0
    _now_s: float = 0.0

    def begin(self, phase: Phase, batch: int) -> None:
        """Note that a forward pass begins."""
        self.phase = phase
        self._batch = batch
        self._step += 1

    def layer(self, routed: RoutedLayer) -> LayerWork:
        """Plan one layer step and carry out all its copies.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        planner = self.planner
        masses = len(planner.gate_mass)
        plan = planner.plan(routed, self._step, self.phase, self._now_s, self._batch)
        self._now_s = carry_out(planner, plan, self._now_s)

        work = plan.work
        if work.precomputed is None:
            self.started = work.experts[:0]
        else:
            self.started = work.experts[work.precomputed]

        self.deferred = plan.deferred
        self.expected = None
        if plan.precompute is not None and "pred1_raw" in routed.predicted:
            top_k = routed.routing.shape[1]
            self.expected = top_experts(routed.predicted["pred1_raw"], top_k)

        if self.phase == Phase.DECODE:
            # A planner notes a gate mass only where a routing policy was asked.
            noted = len(planner.gate_mass) > masses
            mass = planner.gate_mass[masses] if noted else 1.0
            self._count(routed, work, mass)
        return work

    def share(self, part: str, total: str) -> float:
        """Divide two counts; NaN where nothing was counted."""
        if not self.counts[total]:
            return float("nan")
        return self.counts[part] / self.counts[total]

    def _count(self, routed: RoutedLayer, work: LayerWork, mass: float) -> None:
        """Count one layer step of scored tokens."""
        tokens = len(routed.routing)
        self.counts["tokens"] += tokens
        self.counts["mass"] += tokens * mass
        self.counts["altered"] += _count_altered(routed.routing, work.routing)
        self.counts["pairs"] += int((work.routing != UNUSED).sum())
        self.counts["hits"] += int((work.state == RESIDENT).sum())
        self.counts["active"] += len(work.state)


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
        columns: what policies need of `moesim.runtime.quality.measure.GATE_COLUMNS`.
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
        self._gate_input = torch.empty(0)
        self._gate_output: torch.Tensor | None = None
        # Of the layer before: [T, H] what its experts were given, and bool [T, E] the
        # experts that it expected of this layer.
        self._input_before = torch.empty(0)
        self._expected: np.ndarray | None = None
        # A second call of the experts at work, on the input of the layer before.
        self._stale_call: Arguments | None = None
        # Calls of experts whose results join one layer later: of the layer at work, and
        # of the one before.
        self._late_call: Arguments | None = None
        self._awaited: tuple[Any, Arguments] | None = None
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
        self._expected = None
        self._awaited = None

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
        self._gate_input = args[0] if args else next(iter(kwargs.values()))
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
            _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Arguments | None:
            call = ExpertsCall.find(args, kwargs)
            if call is None:
                return None
            self._served += 1
            self._stale_call = None
            self._late_call = None
            if self._policy is None:
                return None
            return self._override(self._policy, layer, call, (args, kwargs))

        return hook

    def _after_experts(
        self, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Add what is computed on the input of the layer before, or was left by it."""
        del args, kwargs
        calls = []
        if self._stale_call is not None:
            calls.append((experts, self._stale_call))
        if self._awaited is not None:
            calls.append(self._awaited)
        self._awaited = None
        if self._late_call is not None:
            self._awaited = experts, self._late_call
        for module, (given, named) in calls:
            # `forward`, not a call: hooks must not run for it.
            output = output + module.forward(*given, **named)
        return output

    def _override(
        self,
        policy: PolicyUnderTest,
        layer: int,
        call: ExpertsCall,
        arguments: Arguments,
    ) -> Arguments | None:
        """Return changed arguments for a layer's experts; None where they stay."""
        index, weights = self._planned(policy, layer, call)
        stale = self._stale_pairs(policy, index)
        if stale is not None:
            # Each pair counts in one of the two calls, with weight zero in the other.
            self._stale_call = call.changed(
                *arguments, self._input_before, index, weights * stale
            )
            weights = weights * ~stale
        self._input_before = call.hidden
        late = _late_pairs(policy, index)
        if late is not None:
            self._late_call = call.changed(
                *arguments, call.hidden, index, weights * late
            )
            weights = weights * ~late
        if index is call.index and stale is None and late is None:
            return None
        return call.changed(*arguments, call.hidden, index, weights)

    def _planned(
        self, policy: PolicyUnderTest, layer: int, call: ExpertsCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ask the planner; ids and weights [T, K'] for the experts, the given ones
        themselves where nothing changes.
        """
        routed = self._routed(layer, call)
        work = policy.layer(routed)
        if work.routing is routed.routing:
            return call.index, call.weights
        return _rerouted(call, routed, work)

    def _routed(self, layer: int, call: ExpertsCall) -> RoutedLayer:
        """Describe the gate's choice, best expert first, as a trace would."""
        output = self._gate_output
        index, weights = best_first(call.index, call.weights, output)
        routed, _ = routed_layer(layer, index, weights)
        if self._needs_scores and output is not None:
            routed.scores = self._facts.scores(output).cpu().numpy()
        predicted = self._foresight.predict(layer, self._gate_input)
        routed.predicted = {
            name: values.cpu().numpy() for name, values in predicted.items()
        }
        return routed

    def _stale_pairs(
        self, policy: PolicyUnderTest, index: torch.Tensor
    ) -> torch.Tensor | None:
        """Bool [T, K'], on the device of `index`: pairs that were computed on the input
        of the layer before, or None.
        """
        expected = self._expected
        self._expected = policy.expected
        if policy.own_input or expected is None or not len(policy.started):
            return None

        begun = torch.zeros(expected.shape[1], dtype=torch.bool)
        begun[torch.from_numpy(policy.started.astype(np.int64))] = True
        # Begun for a token only if predicted for it, too.
        early = (torch.from_numpy(expected) & begun).to(index.device)
        stale = early.gather(1, index.long())
        if policy.phase == Phase.DECODE:
            policy.counts["stale"] += int(stale.sum())
        return stale


def _late_pairs(policy: PolicyUnderTest, index: torch.Tensor) -> torch.Tensor | None:
    """Bool [T, K'], on the device of `index`: pairs whose results join one layer later,
    or None.
    """
    if not policy.deferred:
        return None
    deferred = torch.tensor(policy.deferred, dtype=index.dtype, device=index.device)
    late = torch.isin(index, deferred)
    policy.counts["stale"] += int(late.sum())
    return late


def _rerouted(
    call: ExpertsCall, routed: RoutedLayer, work: LayerWork
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a planner's routing into ids and weights [T, K'] for the experts; the call's
    own ones where no token changes.
    """
    if work.weights is None:
        raise PolicyError(
            "routing policy: expected weights beside the experts that it names, got"
            " none"
        )
    assert routed.weights is not None, "a live gate has weights"
    top_k = routed.routing.shape[1]
    ids = widened(work.routing, top_k, UNUSED)
    shares = widened(work.weights, top_k, 0)
    width = ids.shape[1]
    same = (ids == widened(routed.routing, width, UNUSED)).all(1)
    same &= (shares == widened(routed.weights, width, 0)).all(1)
    if same.all():
        return call.index, call.weights

    # Experts modules know no empty column: it repeats the token's first expert, with
    # weight zero.
    used = ids != UNUSED
    first = np.where(used.any(1), ids[np.arange(len(ids)), used.argmax(1)], 0)
    filled = np.where(used, ids, first[:, None]).astype(np.int64)
    index = torch.from_numpy(filled).to(call.index)
    weights = torch.from_numpy(np.where(used, shares, 0).astype(np.float32))
    weights = weights.to(call.weights)

    # Tokens that stay keep the model's own order, so that sums are the same to the bit.
    rows = torch.from_numpy(np.flatnonzero(same)).to(index.device)
    index[rows, :top_k] = call.index[rows]
    weights[rows, :top_k] = call.weights[rows]
    return index, weights
