"""Gates: what they return, and how they choose (scoring, top-k, renormalisation).

A gate's tensors are read by what they are: integers are ids, a float for every expert
is the gate's output. How a gate turns that output into scores (softmax, sigmoid,
already done) is not declared anywhere uniform. So it is measured: the gate is called on
random states, and the scoring is the function of its output to which the weights it
returns are proportional.

T tokens, E routed experts, K chosen per token, H hidden.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from moesim.base.errors import StoreError, TraceError
from moesim.policies.base import PolicyError
from moesim.runtime.models.checkpoint import (
    first_setting,
    tensor_bytes,
    text_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCORINGS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: functional.softplus(logits).sqrt(),  # DeepSeek-V4
}
"""Gate output [T, E] -> scores [T, E]; every gate of Transformers 5.23 uses one of
them.
"""

_PROBE_TOKENS: Final = 64

# bfloat16 weights scatter by 0.4 %; a wrong scoring by tens of per cent.
_MAX_SPREAD: Final = 0.02

# Against division by a score or a mean of zero.
_TINY: Final = 1e-12


class GateFacts(NamedTuple):
    """The rule by which the gates of a model choose.

    Attributes:
        top_k: experts per token.
        scoring: a name in `SCORINGS`.
        already_scored: the gate's output is scores, not logits.
        norm_topk: the chosen experts' weights are scaled to a constant sum.
        assumed: fields that could not be measured.
    """

    top_k: int
    scoring: str
    already_scored: bool
    norm_topk: bool
    assumed: tuple[str, ...] = ()

    def scores(self, output: torch.Tensor) -> torch.Tensor:
        """Turn a gate's output [T, E] into float32 scores [T, E]."""
        logits = output.float()
        return logits if self.already_scored else SCORINGS[self.scoring](logits)


def read_gate(
    output: Any, count: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Read what a gate returned by what it is, whatever its order.

    Args:
        output: a tensor or a tuple with tensors.
        count: routed experts E.

    Returns:
        Output for every expert [T, E] (logits, or scores), combine weights [T, K] and
        ids [T, K]; None where absent.
    """
    parts = output if isinstance(output, tuple) else (output,)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]

    index = next((part for part in tensors if not part.is_floating_point()), None)
    scored = next((part for part in floats if part.shape[-1] == count), None)
    weights = None
    if index is not None:
        # Where K = E both floats have the same shape: the first one is the output.
        candidates = (part for part in floats if part is not scored)
        weights = next((part for part in candidates if part.shape == index.shape), None)
    return None if scored is None else scored.reshape(-1, count), weights, index


def best_first(
    index: torch.Tensor, weights: torch.Tensor, output: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort each token's experts by the gate's own output, best first; ties keep the
    model's order.

    Weights stand in where a gate shows no output. Both agree for every model but
    Phi-3.5-MoE, whose second expert may weigh more than its first.

    Args:
        index: ids [T, K].
        weights: [T, K].
        output: gate output [T, E], logits or scores, or None.

    Returns:
        Ids and weights, [T, K] each.
    """
    key = weights if output is None else output.gather(1, index)
    order = key.sort(dim=-1, descending=True, stable=True).indices
    return index.gather(1, order), weights.gather(1, order)


def gate_facts(model: nn.Module, blocks: list[MoeBlock]) -> GateFacts:
    """Measure how the gates score and whether top-k weights are renormalised.

    The last gate is called on random hidden states; no expert is computed. Where
    weights are proportional to no known function of the output (Phi-3.5-MoE's
    sparsemixer), or the gate cannot be called alone, the configuration answers and the
    field is listed in `assumed`.
    """
    config = text_config(model)
    declared = _declared_scoring(config)
    probe = _probe(blocks[-1], int(config.hidden_size))
    if probe is None:
        return _declared_facts(config, declared)

    spreads = _spreads(probe, declared)
    best = min(spreads, key=lambda name: spreads[name])
    certain = spreads[best] < _MAX_SPREAD
    best = best if certain else declared
    facts = GateFacts(
        top_k=probe.index.shape[1],
        scoring="softmax" if best == "given" else best,
        already_scored=best == "given",
        norm_topk=True,
        assumed=() if certain else ("scoring",),
    )

    totals = probe.weights.sum(-1)
    if not certain:
        # Without a scoring to compare with, only sums of one show renormalisation.
        return facts._replace(norm_topk=bool(((totals - 1).abs() < _MAX_SPREAD).all()))

    # Renormalised weights have equal sums; others are an equal share of the scores.
    # A model's constant factor on its weights changes neither test.
    chosen_scores = facts.scores(probe.output).gather(1, probe.index)
    share = totals / chosen_scores.sum(-1)
    return facts._replace(norm_topk=_variation(totals) <= _variation(share))


class _Probe(NamedTuple):
    """A gate's answer to random states: output [T, E] and weights [T, K] in float32,
    ids int64 [T, K].
    """

    output: torch.Tensor
    weights: torch.Tensor
    index: torch.Tensor


def _declared_scoring(config: Any) -> str:
    """Return the scoring that a configuration names, softmax where it names none."""
    names = ("scoring_func", "score_function", "moe_router_activation_func")
    declared = str(first_setting(config, names, "softmax"))
    return declared if declared in SCORINGS else "softmax"


def _declared_facts(config: Any, scoring: str) -> GateFacts:
    """Take a configuration's word for what cannot be measured."""
    widths = ("num_experts_per_tok", "moe_topk", "top_k_experts")
    return GateFacts(
        top_k=int(first_setting(config, widths, 1)),
        scoring=scoring,
        already_scored=False,
        norm_topk=bool(first_setting(config, ("norm_topk_prob",), default=True)),
        assumed=("scoring", "norm_topk"),
    )


def _probe(block: MoeBlock, hidden: int) -> _Probe | None:
    """Call a gate on random states; None where it cannot be called alone."""
    weight = next(iter(block.gate.parameters()), None)
    if weight is None or weight.is_meta:
        return None

    draws = torch.Generator().manual_seed(0)
    states = torch.randn(_PROBE_TOKENS, hidden, generator=draws).to(weight)

    answer = _asked(block.gate, states, further_arguments(block))
    output, weights, index = read_gate(answer, block.count)
    if output is None or weights is None or index is None:
        return None
    top_k = index.shape[-1]
    return _Probe(
        output.float(),
        weights.float().reshape(-1, top_k),
        index.long().reshape(-1, top_k),
    )


def further_arguments(block: MoeBlock) -> dict[str, Any]:
    """Arguments of a gate beside the state, such as a correction bias: attributes of
    its owner with the same name, as the library passes them.
    """
    _, *further = inspect.signature(block.gate.forward).parameters.values()
    return {
        parameter.name: value
        for parameter in further
        if (value := getattr(block.owner, parameter.name, None)) is not None
    }


def _asked(gate: nn.Module, states: torch.Tensor, extra: dict[str, Any]) -> Any:
    """Call a gate on states [T, H] alone; None where it needs more than them.

    Models hand tokens to their gates as [T, H] or by sequence, [B, S, H].
    """
    for shaped in (states, states[None]):
        unfit = contextlib.suppress(ValueError, IndexError, RuntimeError, TypeError)
        with unfit, torch.inference_mode():
            return gate.forward(shaped, **extra)
    return None


def _spreads(probe: _Probe, declared: str) -> dict[str, float]:
    """Compare weights with each scoring of the output; the declared one stands before
    the others, so that it wins a tie with them.
    """
    output = probe.output
    spreads: dict[str, float] = {}
    totals = output.sum(-1)
    is_distribution = bool((output >= 0).all()) and torch.allclose(
        totals, torch.ones(()).to(output), atol=1e-2
    )
    # Scores that the gate itself returned, which `scores` must not score again.
    if is_distribution:
        spreads["given"] = _spread(probe.weights, output.gather(1, probe.index))

    for name in sorted(SCORINGS, key=lambda name: name != declared):
        scores = SCORINGS[name](output).gather(1, probe.index)
        spreads[name] = _spread(probe.weights, scores)
    return spreads


def _spread(weights: torch.Tensor, scores: torch.Tensor) -> float:
    """Measure how far weights [T, K] are from proportional to scores [T, K], per token
    or over all of them.
    """
    ratio = weights / scores.clamp(min=_TINY)
    over_all = _variation(ratio)
    # One expert per token is proportional to anything within its token.
    if ratio.shape[1] == 1:
        return over_all

    means = ratio.mean(-1).abs().clamp(min=_TINY)
    within = float((ratio.std(-1) / means).mean())
    return min(over_all, within)


def _variation(values: torch.Tensor) -> float:
    """Return standard deviation over mean."""
    if values.numel() <= 1:
        return 0.0
    return float(values.std() / values.mean().abs().clamp(min=_TINY))


# -- moe blocks ------------------------------------------------------------------------
# Finds the MoE layers of a Hugging Face model, and reads the calls of their experts.
#
# Every MoE model of Transformers 5 has the same structure in each MoE layer: a module
# called `gate` or `router` reads a token's hidden state and names experts, and a
# sibling called `experts` receives the hidden states with the chosen ids and weights,
# in this or another order, by position or by name. Modules are found by name and
# arguments by what they are, so no model needs code of its own.
#
# T tokens, E routed experts, K experts per token, H hidden.

GATE_NAMES: Final = ("gate", "router")

_LAYER_NUMBER: Final = re.compile(r"\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """One MoE layer.

    Attributes:
        layer: the decoder layer it sits in, dense layers counted.
        name: its owner's name in the model, e.g. ``model.layers.3.mlp``.
        owner: the module that holds gate and experts.
        gate: the router.
        experts: the module of all routed experts.
        count: routed experts E.
    """

    layer: int
    name: str
    owner: nn.Module
    gate: nn.Module
    experts: nn.Module
    count: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as loaded."""
        return tensor_bytes(self.experts) // self.count


def find_blocks(model: nn.Module) -> list[MoeBlock]:
    """List the MoE layers of a model in the order of its layers.

    Raises:
        TraceError: there are none, or they differ in their number of experts.
    """
    blocks = [
        block
        for name, owner in model.named_modules()
        if (block := _block(name, owner)) is not None
    ]
    if not blocks:
        raise TraceError(
            f"{type(model).__name__}: expected MoE layers (a module named 'experts'"
            " beside a 'gate' or 'router'), found none; this needs a"
            " Mixture-of-Experts model of transformers >= 5"
        )

    counts = sorted({block.count for block in blocks})
    if len(counts) > 1:
        raise TraceError(
            f"{type(model).__name__}: expected equally many experts in every layer,"
            f" found {counts}"
        )
    return blocks


def offloadable_blocks(model: nn.Module) -> list[MoeBlock]:
    """List the MoE layers of a model, which the library's experts interface must serve.

    Raises:
        StoreError: there are none, or their experts bypass that interface.
    """
    try:
        blocks = find_blocks(model)
    except TraceError as error:
        raise StoreError(str(error)) from None

    for block in blocks:
        # The interface's decorator adds this method; it leaves no public mark.
        if not hasattr(block.experts, "_apply_gate"):
            raise StoreError(
                f"{block.name}.experts ({type(block.experts).__name__}): expected"
                " experts served by the library's experts interface, found a module of"
                " its own kind; this model cannot be offloaded"
            )
    return blocks


def _block(name: str, owner: nn.Module) -> MoeBlock | None:
    """Recognise an MoE layer by its children."""
    children = dict(owner.named_children())
    gate = next((children[key] for key in GATE_NAMES if key in children), None)
    experts = children.get("experts")
    # A list of experts means one module each, as before Transformers 5.
    if gate is None or experts is None or isinstance(experts, nn.ModuleList):
        return None

    declared = getattr(experts, "num_experts", None)
    stacked = next(
        (len(tensor) for tensor in experts.parameters() if tensor.dim() == 3), None
    )
    # Offloaded modules have no parameters left; then the declaration counts.
    count = declared if isinstance(declared, int) else stacked
    layer = _LAYER_NUMBER.search(name)
    if count is None or layer is None:
        return None
    if stacked not in (None, count):
        raise TraceError(
            f"{name}.experts: expected weights of {count} experts, found {stacked};"
            " zero-computation experts and other models whose experts differ in kind"
            " are not supported"
        )
    return MoeBlock(int(layer.group(1)), name, owner, gate, experts, count)


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


class ExpertsCall(NamedTuple):
    """Arguments of a call of an experts module.

    Attributes:
        hidden: [T, H] hidden states.
        index: [T, K] expert ids.
        weights: [T, K] combine weights.
        positions: where these three stand among the arguments: a number, or a name.
    """

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    positions: tuple[int | str, ...]

    @classmethod
    def find(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsCall | None:
        """Read arguments by what they are; None where they are no such call.

        Hidden states come first, integers are ids, floats of their shape the weights.
        """
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = [
            (position, value)
            for position, value in arguments
            if isinstance(value, torch.Tensor)
        ]
        ids = [
            (position, tensor)
            for position, tensor in tensors
            if not tensor.is_floating_point() and tensor.dim() == 2
        ]
        if not ids:
            return None

        index_position, index = ids[0]
        # Without the first tensor: hidden states can have the shape of the ids.
        weights = [
            (position, tensor)
            for position, tensor in tensors[1:]
            if tensor.is_floating_point() and tensor.shape == index.shape
        ]
        if not weights:
            return None

        hidden_position, hidden = tensors[0]
        weights_position, weight = weights[0]
        return cls(
            hidden, index, weight, (hidden_position, index_position, weights_position)
        )

    def changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *values: torch.Tensor
    ) -> Arguments:
        """Put other hidden states, ids and weights into the arguments."""
        changes = dict(zip(self.positions, values, strict=True))
        new_args = tuple(changes.get(at, value) for at, value in enumerate(args))
        new_kwargs = {name: changes.get(name, value) for name, value in kwargs.items()}
        return new_args, new_kwargs


class Foresight:
    """Asks the gates of coming layers about a layer's input.

    Args:
        blocks: the model's MoE layers.
        facts: how its gates score.
        columns: predictions wanted, of
            `moesim.traces.format.schema.PREDICTION_COLUMNS`.
        residual: float32 [L, H] for ``pred1_res``.

    Raises:
        PolicyError: a prediction needs residual vectors and there are none.
    """

    def __init__(
        self,
        blocks: list[MoeBlock],
        facts: GateFacts,
        columns: Sequence[str],
        residual: torch.Tensor | None,
    ) -> None:
        if "pred1_res" in columns and residual is None:
            raise PolicyError(
                "prefetch by 'pred1_res' needs residual vectors of this model, found"
                " none; calibrate with `moesim record --model DIR --prompts FILE"
                " --residual FILE`, then pass --residual FILE"
            )
        self._blocks = blocks
        self._facts = facts
        self._columns = list(columns)
        self._residual = residual
        self._extras = [further_arguments(block) for block in blocks]

    def predict(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return column -> scores [T, E] for a coming layer, none past the last one,
        from the arguments of a layer's own gate.
        """
        called = inspect.signature(self._blocks[layer].gate.forward)
        (_, state), *further = called.bind(*args, **kwargs).arguments.items()
        predicted = {}
        for column in self._columns:
            # Columns are named after their distance: pred1, pred2, pred3.
            coming = layer + int(column[len("pred")])
            if coming >= len(self._blocks):
                continue
            asked = state
            if column.endswith("_res"):
                assert self._residual is not None
                asked = state + self._residual[layer].to(state)
            block = self._blocks[coming]
            # A gate that looks up tokens gets their ids, as this one got them.
            known = inspect.signature(block.gate.forward).parameters
            named = {name: value for name, value in further if name in known}
            named |= self._extras[coming]
            every, _, _ = read_gate(block.gate.forward(asked, **named), block.count)
            if every is None:
                raise PolicyError(
                    f"{block.name}: its gate shows only its choice; {column!r} cannot"
                    " be predicted"
                )
            predicted[column] = self._facts.scores(every)
        return predicted
