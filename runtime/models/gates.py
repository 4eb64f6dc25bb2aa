"""Listening at the gates: what every MoE layer chose in one forward pass, and what its
neighbours would have said.

Hooks sit on both sides of the joint that `runtime/models/hf.py` finds. Chosen ids and
weights are the arguments that the `experts` module receives, so they are what the model
used, whatever masks, biases or groups the gate applied. When layer l's gate has run, it
is asked again about the gate inputs of layers l-1, l-2 and l-3: these are those layers'
predictions for layer l (`pred1_raw` …), and at most three hidden states are kept at a
time.

T tokens of the pass, E routed experts, K chosen per token, H hidden, L MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from moesim.runtime.models.hf import GateFacts, MoeBlock, read_gate
from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import nn

AHEAD: Final = 3
"""How many layers ahead predictions are recorded: `pred1_raw`, `pred2_raw`,
`pred3_raw`.
"""


@dataclass(slots=True)
class Heard:
    """One MoE layer in one forward pass.

    Attributes:
        hidden: [T, H] what the gate was asked; emptied once no later gate needs it.
        output: [T, E] what the gate answered about every expert, None where it shows
            only its choice.
        experts: int64 [T, K] as the experts module received them, best first.
        weights: [T, K] as the experts module received them, in the order of `experts`.
        scores: float32 [T, E], when asked for.
        predicted: column name -> float32 [T, E] scores for a coming layer; absent past
            the last layer.
    """

    hidden: torch.Tensor
    output: torch.Tensor | None
    experts: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    predicted: dict[str, torch.Tensor] = field(default_factory=dict)

    def named(self, column: str) -> torch.Tensor | None:
        """Return what belongs into a column of the trace, None where this layer has
        nothing.
        """
        own = {"experts": self.experts, "weights": self.weights, "scores": self.scores}
        return own[column] if column in own else self.predicted.get(column)


class GateTap:
    """Hear all MoE layers of a model while the context is open; `heard` holds the last
    forward pass, by MoE layer.

    Args:
        blocks: the MoE layers, from `find_blocks`.
        facts: how gates score, from `gate_facts`.
        scores: keep full gate scores.
        predictions: ask later gates about earlier states.
        residual: float32 [L, H], added to a layer's gate input for `pred1_res` (DALI's
            correction).
        states_only: keep nothing but gate inputs (calibration).
    """

    def __init__(
        self,
        blocks: list[MoeBlock],
        facts: GateFacts,
        *,
        scores: bool = True,
        predictions: bool = True,
        residual: torch.Tensor | None = None,
        states_only: bool = False,
    ) -> None:
        self.heard: list[Heard] = []
        self._blocks = blocks
        self._facts = facts
        self._scores = scores
        self._predictions = predictions
        self._residual = residual
        self._states_only = states_only
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        """Attach the hooks."""
        for layer, block in enumerate(self._blocks):
            self._hooks.append(
                block.gate.register_forward_hook(self._on_gate(layer), with_kwargs=True)
            )
            if not self._states_only:
                hook = block.experts.register_forward_pre_hook(
                    self._on_experts(layer), with_kwargs=True
                )
                self._hooks.append(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the hooks; what was heard is forgotten."""
        while self._hooks:
            self._hooks.pop().remove()
        self.heard = []

    def check(self) -> None:
        """Refuse a pass that was not heard completely.

        Raises:
            TraceError: a layer's gate did not run, or its experts received no ids.
        """
        missing = [
            block.name
            for block, heard in zip(self._blocks, self.heard, strict=False)
            if heard.experts is None
        ]
        missing += [block.name for block in self._blocks[len(self.heard) :]]
        if missing:
            raise TraceError(
                f"{missing[0]}: expected `experts` to be called with hidden states,"
                " expert ids and weights; it was not, so what the model chose cannot"
                " be seen; this kind of MoE layer is not supported"
            )

    def _on_gate(self, layer: int) -> Callable[..., None]:
        """Return the hook that runs after a layer's gate."""

        def hook(
            gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if layer == 0:
                self.heard = []
            if layer != len(self.heard):
                raise TraceError(
                    f"{self._blocks[layer].name}: expected gates to run once each, in"
                    " the order of their layers, found this one after"
                    f" {len(self.heard)} others; this kind of model is not supported"
                )
            keywords = dict(kwargs)
            state = args[0] if args else keywords.pop(next(iter(keywords)))
            hidden = state.reshape(-1, state.shape[-1])
            if self._states_only:
                self.heard.append(Heard(hidden, None))
                return
            every, _, _ = read_gate(output, self._blocks[layer].count)
            heard = Heard(hidden, every)
            if self._scores and every is not None:
                heard.scores = self._facts.scores(every)
            self.heard.append(heard)
            if self._predictions and every is not None:
                self._predict(
                    layer,
                    lambda asked: gate.forward(
                        asked.to(state).view_as(state), *args[1:], **keywords
                    ),
                )
            self._forget(layer - AHEAD)

        return hook

    def _predict(self, layer: int, ask: Callable[[torch.Tensor], Any]) -> None:
        """Let this layer's gate judge the states that earlier layers showed to theirs;
        hooks stay silent.
        """
        for ahead in range(1, min(AHEAD, layer) + 1):
            earlier = self.heard[layer - ahead]
            earlier.predicted[f"pred{ahead}_raw"] = self._judge(
                layer, ask, earlier.hidden
            )
            if ahead == 1 and self._residual is not None:
                corrected = earlier.hidden + self._residual[layer - 1].to(
                    earlier.hidden
                )
                earlier.predicted["pred1_res"] = self._judge(layer, ask, corrected)

    def _judge(
        self, layer: int, ask: Callable[[torch.Tensor], Any], states: torch.Tensor
    ) -> torch.Tensor:
        """Return a gate's scores [T, E] for states [T, H]."""
        every, _, _ = read_gate(ask(states), self._blocks[layer].count)
        assert every is not None, "a gate answers alike each time"
        return self._facts.scores(every)

    def _forget(self, layer: int) -> None:
        """Let go of a hidden state that no later gate will be asked about."""
        if layer >= 0:
            self.heard[layer].hidden = self.heard[layer].hidden[:0]

    def _on_experts(self, layer: int) -> Callable[..., None]:
        """Return the hook that runs before a layer's experts."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, torch.Tensor)
            ]
            index = next(
                (
                    one
                    for one in tensors
                    if not one.is_floating_point() and one.dim() == 2
                ),
                None,
            )
            if index is None or layer >= len(self.heard):
                return
            floats = [
                one
                for one in tensors[1:]
                if one.is_floating_point() and one.shape == index.shape
            ]
            if floats:
                heard = self.heard[layer]
                heard.experts, heard.weights = best_first(
                    index, floats[0], heard.output
                )

        return hook


def best_first(
    index: torch.Tensor, weights: torch.Tensor, output: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort each token's experts by the gate's own judgement, best first; ties keep the
    model's order.

    The judgement is the gate's output; weights stand in where a gate shows none. Both
    agree for every model but Phi-3.5-MoE, whose second expert may weigh more than its
    first.

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
