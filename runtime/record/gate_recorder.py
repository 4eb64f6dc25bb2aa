"""The clerk: what the gates said in one batch, on sheets of paper that are handed over
sequence by sequence.

Where there is no layer l+1 (l+2, l+3), prediction columns hold zeros.

B sequences of a batch, T positions of a sequence, E routed experts, K chosen per token,
L MoE layers, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from moesim.runtime.models.gates import AHEAD, GateTap
from moesim.runtime.models.hf import (
    LocalModel,
    find_blocks,
    gate_facts,
    model_shape,
    weights_digest,
)
from moesim.runtime.record.offloaded import StoredModel
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import ModelShape, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.runtime.models.generate import Pass
    from moesim.runtime.record.residual import Residual


class Clerk:
    """Takes the notes of one batch: arrays [B, T, L, …], filled pass by pass, read
    sequence by sequence.
    """

    def __init__(
        self,
        model: LocalModel,
        *,
        scores: bool,
        predictions: bool,
        residual: Residual | None,
    ) -> None:
        if isinstance(model, StoredModel):
            self._blocks = model.blocks
            self._facts = model.facts
            self.shape = model.shape
        else:
            self._blocks = find_blocks(model.model)
            self._facts = gate_facts(model.model, self._blocks)
            self.shape = model_shape(model.model, model.name, self._blocks, self._facts)
        if residual is not None:
            _check_residual(residual, self.shape, model)
        vectors = (
            None
            if residual is None
            else torch.from_numpy(residual.vectors).to(model.device)
        )
        self._tap = GateTap(
            self._blocks,
            self._facts,
            scores=scores,
            predictions=predictions or residual is not None,
            residual=vectors,
        )
        predicted = (
            [f"pred{ahead}_raw" for ahead in range(1, AHEAD + 1)] if predictions else []
        )
        self._predicted = (*predicted, *(["pred1_res"] if residual is not None else []))
        self._full = (*(["scores"] if scores else []), *self._predicted)
        self.columns = ("weights", *self._full, "token")
        self._notes: dict[str, np.ndarray] = {}
        self._lengths = np.zeros(0, dtype=np.int64)

    def open(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> GateTap:
        """Take a fresh sheet for these prompts; hooks are in place while the returned
        context is open.
        """
        shape = self.shape
        cells = (len(prompts), max(map(len, prompts)) + max_new_tokens, shape.layers)
        self._lengths = np.zeros(len(prompts), dtype=np.int64)
        self._notes = {"token": np.zeros(cells[:2], dtype=np.int32)}
        self._notes["experts"] = np.zeros((*cells, shape.top_k), dtype=np.uint16)
        self._notes["weights"] = np.zeros((*cells, shape.top_k), dtype=np.float16)
        for name in self._full:
            self._notes[name] = np.zeros((*cells, shape.experts), dtype=np.float16)
        return self._tap

    def note(self, step: Pass) -> None:
        """Copy what the tap heard in this pass; pads and ended sequences are left
        out.
        """
        self._tap.check()
        kept = step.keep.flatten().nonzero().flatten()
        sequence = (kept // step.keep.shape[1]).cpu().numpy()
        position = step.positions.flatten()[kept].cpu().numpy()
        self._notes["token"][sequence, position] = (
            step.tokens.flatten()[kept].cpu().numpy()
        )
        np.maximum.at(self._lengths, sequence, position + 1)
        for name, notes in self._notes.items():
            if name != "token":
                heard = [
                    values
                    for layer in self._tap.heard
                    if (values := layer.named(name)) is not None
                ]
                self._check_widths(name, heard)
                if heard:  # the first layers: predictions end before the last one
                    notes[sequence, position, : len(heard)] = _to_numpy(heard, kept)

    def rows(self, one: int, prompt_tokens: int) -> dict[str, Any]:
        """Return the rows of one sequence by position and layer, as `TraceWriter.write`
        wants them.
        """
        length = int(self._lengths[one])
        layers = self.shape.layers
        position = np.repeat(np.arange(length, dtype=np.int32), layers)
        rows: dict[str, Any] = {
            "pos": position,
            "layer": np.tile(np.arange(layers, dtype=np.int16), length),
            "phase": (
                np.where(position < prompt_tokens, Phase.PREFILL, Phase.DECODE).astype(
                    np.int8
                )
            ),
        }
        for name, notes in self._notes.items():
            cells = notes[one, :length]
            rows[name] = (
                np.repeat(cells, layers)
                if name == "token"
                else cells.reshape(length * layers, -1)
            )
        return rows

    def _check_widths(self, name: str, heard: list[torch.Tensor]) -> None:
        """Refuse a layer that does not have the model's shape."""
        expected = self._notes[name].shape[-1]
        for block, values in zip(self._blocks, heard, strict=False):
            if values.shape[-1] != expected:
                raise TraceError(
                    f"{block.name}: {name}: expected {expected} per token, got"
                    f" {values.shape[-1]}"
                )


def _to_numpy(layers: list[torch.Tensor], kept: torch.Tensor) -> np.ndarray:
    """Bring the kept tokens of all layers to the host in one copy, [N, L, …]; floats
    become 16 bits wide.
    """
    # Layers of a large model may lie on several devices.
    picked = [values.to(kept.device)[kept] for values in layers]
    stacked: np.ndarray = (
        torch.stack(
            [one.half() if one.is_floating_point() else one for one in picked], 1
        )
        .cpu()
        .numpy()
    )
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
    digest = residual.facts.get("weights")
    if isinstance(model, StoredModel) and residual.facts.get("model") == model.name:
        # calibrated on the whole model, whose digest the frame alone does not tell
        return
    if digest is not None and digest != weights_digest(model.model):
        raise TraceError(
            f"residual {residual.id}: calibrated on {residual.facts.get('model')!r}"
            f" with weights {str(digest)[:12]}…, but {model.name!r} has other weights;"
            f" {way_out}"
        )
