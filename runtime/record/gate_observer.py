"""Observes the gates: each MoE layer's choice in one forward pass, and predictions.

Hooks sit on both sides of the structure that `runtime/models/gates.py` finds.
Chosen ids and weights are the arguments that the `experts` module receives, so they are
what the model used, whatever masks, biases or groups the gate applied. When layer l's
gate has run, those of layers l+1, l+2 and l+3 are called on the same input: these are
layer l's predictions (`pred1_raw` …).

T tokens of the pass, E routed experts, K chosen per token, H hidden, L MoE layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

from moesim.base.errors import TraceError
from moesim.runtime.models.gates import (
    ExpertsCall,
    Foresight,
    GateFacts,
    best_first,
    read_gate,
)
from moesim.traces.format.schema import PREDICTION_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from moesim.runtime.models.gates import MoeBlock


class GateObserver:
    """Observes all MoE layers of a model while the context is open.

    Args:
        blocks: the MoE layers, from `find_blocks`.
        facts: how gates score, from `gate_facts`.
        columns: what is kept of every expert: ``scores``, and predictions.
        residual: float32 [L, H] for `pred1_res` (DALI's correction).
        states_only: keep nothing but gate inputs (calibration).

    Attributes:
        layers: the last forward pass, by MoE layer: ``output`` [T, E] of the gate,
            where it shows more than its choice, and columns of the trace: ``experts``
            int64 [T, K] and ``weights`` [T, K] as the experts module received them,
            best first; float32 [T, E] ``scores``, and predictions for a coming layer,
            absent past the last one. Where nothing else is kept ``hidden`` [T, H].
    """

    def __init__(
        self,
        blocks: list[MoeBlock],
        facts: GateFacts,
        columns: Sequence[str] = (),
        *,
        residual: torch.Tensor | None = None,
        states_only: bool = False,
    ) -> None:
        self.layers: list[dict[str, torch.Tensor]] = []
        self._blocks = blocks
        self._facts = facts
        self._scores = "scores" in columns
        predicted = [name for name in columns if name in PREDICTION_COLUMNS]
        self._foresight = Foresight(blocks, facts, predicted, residual)
        self._states_only = states_only
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        """Attach the hooks."""
        for layer, block in enumerate(self._blocks):
            gate_hook = block.gate.register_forward_hook(
                partial(self._on_gate, layer), with_kwargs=True
            )
            self._hooks.append(gate_hook)
            if self._states_only:
                continue
            experts_hook = block.experts.register_forward_pre_hook(
                partial(self._on_experts, layer), with_kwargs=True
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
            if "experts" not in record
        ]
        missing += [block.name for block in self._blocks[len(self.layers) :]]
        if missing:
            raise TraceError(
                f"{missing[0]}: expected `experts` to be called with hidden states,"
                " expert ids and weights; it was not, so what the model chose cannot"
                " be seen; this kind of MoE layer is not supported"
            )

    def _on_gate(
        self,
        layer: int,
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Note what a layer's gate saw and said, after it has run."""
        # The first gate begins a new pass.
        if layer == 0:
            self.layers = []
        self._check_order(layer)

        if self._states_only:
            # Models pass the state by position or by name.
            state = args[0] if args else next(iter(kwargs.values()))
            hidden = state.reshape(-1, state.shape[-1])
            self.layers.append({"hidden": hidden})
            return

        scored, _, _ = read_gate(output, self._blocks[layer].count)
        record = {} if scored is None else {"output": scored}
        self.layers.append(record)
        if scored is None:
            return
        if self._scores:
            record["scores"] = self._facts.scores(scored)
        record |= self._foresight.predict(layer, args, kwargs)

    def _on_experts(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note what a layer's experts are given, before they run."""
        call = ExpertsCall.find(args, kwargs)
        # What is missing is named by `check`, when the pass is over.
        if call is None or layer >= len(self.layers):
            return
        record = self.layers[layer]
        experts, weights = best_first(call.index, call.weights, record.get("output"))
        record |= {"experts": experts, "weights": weights}

    def _check_order(self, layer: int) -> None:
        """Refuse a gate that runs before its turn, or twice."""
        if layer != len(self.layers):
            raise TraceError(
                f"{self._blocks[layer].name}: expected gates to run once each, in"
                " the order of their layers, found this one after"
                f" {len(self.layers)} others; this kind of model is not supported"
            )
