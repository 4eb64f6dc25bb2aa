"""Observes the gates: each MoE layer's choice in one forward pass, and predictions.

Hooks sit on both sides of the structure that `runtime/models/gates.py` finds.
Chosen ids and weights are the arguments that the `experts` module receives, so they are
what the model used, whatever masks, biases or groups the gate applied. When layer l's
gate has run, it is called again on the gate inputs of layers l-1, l-2 and l-3: these
are those layers' predictions for layer l (`pred1_raw` …), and at most three hidden
states are kept at a time.

T tokens of the pass, E routed experts, K chosen per token, H hidden, L MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from moesim.base.errors import TraceError
from moesim.runtime.models.gates import ExpertsCall, GateFacts, best_first, read_gate

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from moesim.runtime.models.gates import MoeBlock

PREDICTION_DEPTH: Final = 3
"""Layers ahead for which predictions are recorded: `pred1_raw`, `pred2_raw`,
`pred3_raw`.
"""


@dataclass(slots=True)
class LayerRecord:
    """One MoE layer in one forward pass.

    Attributes:
        hidden: [T, H] the gate's input; emptied once no later gate needs it.
        output: [T, E] the gate's output for every expert, None where it shows only its
            choice.
        experts: int64 [T, K] as the experts module received them, best first.
        weights: [T, K] as the experts module received them, in the order of `experts`.
        scores: float32 [T, E], where they are kept.
        predicted: column name -> float32 [T, E] scores for a coming layer; absent past
            the last layer.
    """

    hidden: torch.Tensor
    output: torch.Tensor | None
    experts: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    predicted: dict[str, torch.Tensor] = field(default_factory=dict)

    def column(self, name: str) -> torch.Tensor | None:
        """Return the values of a column of the trace, None where this layer has
        none.
        """
        if name == "experts":
            return self.experts
        if name == "weights":
            return self.weights
        if name == "scores":
            return self.scores
        return self.predicted.get(name)


class GateObserver:
    """Observes all MoE layers of a model while the context is open.

    Args:
        blocks: the MoE layers, from `find_blocks`.
        facts: how gates score, from `gate_facts`.
        scores: keep full gate scores.
        predictions: call later gates on earlier states.
        residual: float32 [L, H], added to a layer's gate input for `pred1_res` (DALI's
            correction).
        states_only: keep nothing but gate inputs (calibration).

    Attributes:
        layers: the last forward pass, by MoE layer.
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
        self.layers: list[LayerRecord] = []
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
            gate_hook = block.gate.register_forward_hook(
                self._on_gate(layer), with_kwargs=True
            )
            self._hooks.append(gate_hook)
            if self._states_only:
                continue
            experts_hook = block.experts.register_forward_pre_hook(
                self._on_experts(layer), with_kwargs=True
            )
            self._hooks.append(experts_hook)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks; the last pass is forgotten."""
        while self._hooks:
            self._hooks.pop().remove()
        self.layers = []

    def check(self) -> None:
        """Refuse a pass that was not observed completely.

        Raises:
            TraceError: a layer's gate did not run, or its experts received no ids.
        """
        # A pass that ended early has fewer records than the model has layers.
        missing = [
            block.name
            for block, record in zip(self._blocks, self.layers, strict=False)
            if record.experts is None
        ]
        missing += [block.name for block in self._blocks[len(self.layers) :]]
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
            # The first gate begins a new pass.
            if layer == 0:
                self.layers = []
            self._check_order(layer)

            # Models pass the state by position or by name; the rest goes along.
            keywords = dict(kwargs)
            state = args[0] if args else keywords.pop(next(iter(keywords)))
            hidden = state.reshape(-1, state.shape[-1])
            if self._states_only:
                self.layers.append(LayerRecord(hidden, None))
                return

            scored, _, _ = read_gate(output, self._blocks[layer].count)
            record = LayerRecord(hidden, scored)
            self.layers.append(record)
            if self._scores and scored is not None:
                record.scores = self._facts.scores(scored)

            def call_gate(other: torch.Tensor) -> Any:
                # `forward`, not a call: this hook must not run for it.
                return gate.forward(
                    other.to(state).view_as(state), *args[1:], **keywords
                )

            if self._predictions and scored is not None:
                self._predict(layer, call_gate)
            self._release_state(layer - PREDICTION_DEPTH)

        return hook

    def _on_experts(self, layer: int) -> Callable[..., None]:
        """Return the hook that runs before a layer's experts."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ExpertsCall.find(args, kwargs)
            # What is missing is named by `check`, when the pass is over.
            if call is None or layer >= len(self.layers):
                return
            record = self.layers[layer]
            record.experts, record.weights = best_first(
                call.index, call.weights, record.output
            )

        return hook

    def _check_order(self, layer: int) -> None:
        """Refuse a gate that runs before its turn, or twice."""
        if layer != len(self.layers):
            raise TraceError(
                f"{self._blocks[layer].name}: expected gates to run once each, in"
                " the order of their layers, found this one after"
                f" {len(self.layers)} others; this kind of model is not supported"
            )

    def _predict(self, layer: int, call_gate: Callable[[torch.Tensor], Any]) -> None:
        """Score with this layer's gate the states that were the input of earlier
        ones.
        """
        for depth in range(1, min(PREDICTION_DEPTH, layer) + 1):
            earlier = self.layers[layer - depth]
            earlier.predicted[f"pred{depth}_raw"] = self._score(
                layer, call_gate(earlier.hidden)
            )
            if depth == 1 and self._residual is not None:
                drift = self._residual[layer - 1].to(earlier.hidden)
                earlier.predicted["pred1_res"] = self._score(
                    layer, call_gate(earlier.hidden + drift)
                )

    def _score(self, layer: int, output: Any) -> torch.Tensor:
        """Turn what a gate returned into scores [T, E]."""
        scored, _, _ = read_gate(output, self._blocks[layer].count)
        assert scored is not None, "a gate returns the same kind of output each time"
        return self._facts.scores(scored)

    def _release_state(self, layer: int) -> None:
        """Let go of a hidden state that is no later gate's input."""
        if layer >= 0:
            # An empty slice, so that `hidden` stays a tensor.
            self.layers[layer].hidden = self.layers[layer].hidden[:0]
