"""Buffers one batch's gate outputs; returns trace rows per sequence.

Where there is no layer l+1 (l+2, l+3), prediction columns hold zeros.

B sequences of a batch, T positions of a sequence, E routed experts, K chosen per token,
L MoE layers, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moesim.base.errors import TraceError
from moesim.runtime.models.checkpoint import weights_digest
from moesim.runtime.models.gates import find_blocks, gate_facts
from moesim.runtime.models.local_model import model_shape
from moesim.runtime.record.gate_observer import PREDICTION_DEPTH, GateObserver
from moesim.runtime.record.stored_model import StoredModel
from moesim.traces.format.schema import ModelShape, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.runtime.models.local_model import LocalModel, Pass
    from moesim.runtime.record.calibration import Residual


class GateRecorder:
    """Buffers the gate outputs of one batch: arrays [B, T, L, …], filled pass by pass,
    read sequence by sequence.

    Args:
        model: whose gates are recorded.
        scores: record full gate scores.
        predictions: record `pred1_raw`, `pred2_raw`, `pred3_raw`.
        residual: vectors for `pred1_res`.

    Attributes:
        shape: of the model.
        columns: optional columns of the trace.

    Raises:
        TraceError: the residual vectors are another model's, or there are no MoE
            layers.
    """

    def __init__(
        self,
        model: LocalModel,
        *,
        scores: bool,
        predictions: bool,
        residual: Residual | None,
    ) -> None:
        # A stored model's frame has no experts, so it brings what it knows of them.
        if isinstance(model, StoredModel):
            self._blocks = model.blocks
            facts = model.facts
            self.shape = model.shape
        else:
            self._blocks = find_blocks(model.model)
            facts = gate_facts(model.model, self._blocks)
            self.shape = model_shape(model.model, model.name, self._blocks, facts)

        vectors = None
        if residual is not None:
            _check_residual(residual, self.shape, model)
            vectors = torch.from_numpy(residual.vectors).to(model.device)
        self._observer = GateObserver(
            self._blocks,
            facts,
            scores=scores,
            predictions=predictions or residual is not None,
            residual=vectors,
        )

        # Columns with a value for every expert.
        self._wide: list[str] = ["scores"] if scores else []
        if predictions:
            self._wide += [f"pred{d}_raw" for d in range(1, PREDICTION_DEPTH + 1)]
        if residual is not None:
            self._wide.append("pred1_res")
        self.columns = ("weights", *self._wide, "token")
        self._buffers: dict[str, np.ndarray] = {}
        self._lengths = np.zeros(0, dtype=np.int64)

    def open(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> GateObserver:
        """Allocate buffers for these prompts; hooks are in place while the returned
        context is open.
        """
        shape = self.shape
        positions = max(map(len, prompts)) + new_tokens
        cells = (len(prompts), positions, shape.layers)
        self._lengths = np.zeros(len(prompts), dtype=np.int64)
        self._buffers = {
            "token": np.zeros(cells[:2], dtype=np.int32),
            "experts": np.zeros((*cells, shape.top_k), dtype=np.uint16),
            "weights": np.zeros((*cells, shape.top_k), dtype=np.float16),
        }
        for name in self._wide:
            self._buffers[name] = np.zeros((*cells, shape.experts), dtype=np.float16)
        return self._observer

    def note(self, step: Pass) -> None:
        """Copy what was observed in this pass; pads and ended sequences are left
        out.
        """
        self._observer.check()
        kept = step.keep.flatten().nonzero().flatten()
        sequence = (kept // step.keep.shape[1]).cpu().numpy()
        position = step.positions.flatten()[kept].cpu().numpy()
        tokens = step.tokens.flatten()[kept].cpu().numpy()

        np.maximum.at(self._lengths, sequence, position + 1)
        for name, buffer in self._buffers.items():
            if name == "token":
                buffer[sequence, position] = tokens
                continue
            columns = [layer.column(name) for layer in self._observer.layers]
            values = [column for column in columns if column is not None]
            self._check_widths(name, values)
            self._check_all(name, len(values))
            # The first layers have values: predictions end before the last one.
            if values:
                buffer[sequence, position, : len(values)] = _to_numpy(values, kept)

    def rows(self, sequence: int, prompt_tokens: int) -> dict[str, Any]:
        """Return the rows of one sequence by position and layer, as `TraceWriter.write`
        takes them.
        """
        length = int(self._lengths[sequence])
        layers = self.shape.layers
        position = np.repeat(np.arange(length, dtype=np.int32), layers)
        phase = np.where(position < prompt_tokens, Phase.PREFILL, Phase.DECODE)
        rows: dict[str, Any] = {
            "pos": position,
            "layer": np.tile(np.arange(layers, dtype=np.int16), length),
            "phase": phase.astype(np.int8),
        }
        for name, buffer in self._buffers.items():
            values = buffer[sequence, :length]
            # A token is the same at every layer.
            rows[name] = (
                np.repeat(values, layers)
                if name == "token"
                else values.reshape(length * layers, -1)
            )
        return rows

    def _check_all(self, name: str, layers: int) -> None:
        """Refuse gates that do not say what a column holds."""
        # Predictions look so many layers ahead; past the last one there are none.
        ahead = int(name[len("pred")]) if name.startswith("pred") else 0
        if layers < self.shape.layers - ahead:
            raise TraceError(
                f"{self._blocks[0].name}: its gate shows only its choice, so there is"
                f" nothing to record as {name!r}; leave scores and predictions out"
                " (--no-scores --no-predictions)"
            )

    def _check_widths(self, name: str, values: list[torch.Tensor]) -> None:
        """Refuse a layer that does not have the model's shape."""
        expected = self._buffers[name].shape[-1]
        for block, tensor in zip(self._blocks, values, strict=False):
            if tensor.shape[-1] != expected:
                raise TraceError(
                    f"{block.name}: {name}: expected {expected} per token, got"
                    f" {tensor.shape[-1]}"
                )


def _to_numpy(layers: list[torch.Tensor], kept: torch.Tensor) -> np.ndarray:
    """Bring the kept tokens of all layers to the host in one copy, [N, L, …]; floats
    become 16 bits wide.
    """
    # Layers of a large model may lie on several devices.
    columns = [values.to(kept.device)[kept] for values in layers]
    columns = [
        column.half() if column.is_floating_point() else column for column in columns
    ]
    stacked: np.ndarray = torch.stack(columns, 1).cpu().numpy()
    return stacked


def _check_residual(residual: Residual, shape: ModelShape, model: LocalModel) -> None:
    """Refuse vectors that were calibrated on another model."""
    expected = (shape.layers, shape.hidden)
    way_out = "calibrate this model"
    if residual.vectors.shape != expected:
        raise TraceError(
            f"residual {residual.id}: expected shape {expected}, got"
            f" {residual.vectors.shape}; {way_out}"
        )

    # A stored model's vectors may come from the complete model, whose digest the frame
    # alone does not give.
    if isinstance(model, StoredModel) and residual.facts.get("model") == model.name:
        return
    digest = residual.facts.get("weights")
    if digest is not None and digest != weights_digest(model.model):
        raise TraceError(
            f"residual {residual.id}: calibrated on {residual.facts.get('model')!r}"
            f" with weights {str(digest)[:12]}…, but {model.name!r} has other weights;"
            f" {way_out}"
        )
