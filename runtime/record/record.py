"""Records a routing trace: a model runs on prompts, and its gates' outputs are kept.

For each token and each MoE layer the trace holds the chosen experts with their weights,
the gate's scores of all others, and what the gates of the next layers would have
answered already now. Outputs are buffered per batch (`GateRecorder`) and written when a
batch is done (`runtime/record/segments.py`), so a recording can be stopped at any
moment; the trace appears under its name when it is complete. What recording costs is
sampled afterwards, with and without it in turns.

B sequences of a batch, T positions of a sequence, E routed experts, K chosen per token,
L MoE layers, H hidden.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from moesim.base.errors import TraceError
from moesim.base.version import __version__
from moesim.runtime.models.checkpoint import weights_digest
from moesim.runtime.models.gates import find_blocks, gate_facts
from moesim.runtime.models.local_model import (
    LocalModel,
    Pass,
    generate,
    load_model,
    model_shape,
)
from moesim.runtime.models.offloaded import StoredModel
from moesim.runtime.record import EVALUATION, RecordOptions
from moesim.runtime.record.gate_observer import GateObserver
from moesim.runtime.record.segments import Recording, Segments
from moesim.runtime.text import read_prompts
from moesim.traces.format.schema import (
    PREDICTION_COLUMNS,
    ModelShape,
    Phase,
    TraceHeader,
    prediction_distance,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from moesim.runtime.models.local_model import Pass
    from moesim.runtime.record.calibration import Residual

__all__ = [
    "LocalModel",
    "Recording",
    "load_model",
    "read_prompts",
    "record",
]


def record(
    model: LocalModel,
    prompts: Sequence[str | bytes],
    out: Path | str,
    options: RecordOptions | None = None,
    *,
    residual: Residual | None = None,
    progress: Callable[[int, int], None] | None = None,
    provenance: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Recording:
    """Run a model on prompts and write its routing trace.

    Every generated token is fed back and recorded, the last one included: a sequence
    has `new_tokens` decode steps unless the model ends it. Equal arguments give
    equal bytes as long as the date is fixed (`provenance`). Memory holds one batch:
    about ``2 (P + 1) L E`` bytes per token for P prediction columns. Routing does not
    depend on `batch`, except where rounding breaks a tie; a sequence's draws depend on
    nothing but `seed` and its number. A recording of the same that was stopped goes on
    (`moesim.runtime.record.segments`), to the bytes that it would have had without the
    stop.

    Args:
        model: from `load_model`, or any model with MoE layers.
        prompts: what to read; one sequence each, numbered in order.
        out: the Parquet file to make. An existing one is replaced at the end.
        options: how; the defaults when None.
        residual: vectors of `residual_vectors`, for `pred1_res`.
        progress: called with tokens done and tokens expected at most.
        provenance: further facts for the header; `date` (ISO) replaces today's.
        changes: fields of `RecordOptions`, instead of those in `options`.

    Raises:
        ConfigError: an option out of range.
        TraceError: no MoE layers or none that can be observed, an empty prompt, a
            residual of another model, scores that are not finite, or an unfinished
            recording of something else.
    """
    how = replace(options or RecordOptions(), **changes)
    sequences = _encode(model, prompts)

    recorder = GateRecorder(
        model,
        scores=how.scores,
        predictions=how.predictions,
        residual=residual,
    )
    facts = _provenance(model, sequences) | {
        "batch": how.batch,
        "new_tokens": how.new_tokens,
        "temperature": how.temperature,
        "seed": how.seed,
    }
    header = TraceHeader(
        shape=recorder.shape,
        # The caller's facts come last: they may replace ours.
        provenance=facts | dict(provenance or {}),
        calibration=_calibration(residual),
        split=how.split or EVALUATION,
    )

    begin_s = time.perf_counter()
    with Segments(out, header, recorder.columns) as segments:
        resumed = segments.done
        recorded_tokens = _record_sequences(
            model, sequences, recorder, segments, how, progress
        )
        merged = segments.merge()
    seconds_s = time.perf_counter() - begin_s
    return replace(
        merged,
        seconds_s=seconds_s,
        tokens_per_s=recorded_tokens / seconds_s,
        resumed=resumed,
    )


def _record_sequences(
    model: LocalModel,
    sequences: Sequence[list[int]],
    recorder: GateRecorder,
    segments: Segments,
    how: RecordOptions,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Run the sequences that are not recorded yet; the tokens recorded now."""
    resumed = segments.done
    resumed_tokens = sum(map(len, sequences[:resumed])) + how.new_tokens * resumed
    # At most: a sequence may end before `new_tokens`.
    expected_tokens = sum(map(len, sequences)) + how.new_tokens * len(sequences)
    recorded_tokens = 0

    def observe(step: Pass) -> None:
        nonlocal recorded_tokens
        recorder.note(step)
        recorded_tokens += int(step.keep.sum())
        if progress is not None:
            progress(resumed_tokens + recorded_tokens, expected_tokens)

    for first in range(resumed, len(sequences), how.batch):
        group = sequences[first : first + how.batch]
        # Hooks come and go with each group, so an error leaves the model as it was.
        with recorder.open(group, how.new_tokens):
            generate(
                model,
                group,
                how.new_tokens,
                observe,
                first=first,
                temperature=how.temperature,
                seed=how.seed,
            )
        segments.write(
            [recorder.rows(row, len(prompt)) for row, prompt in enumerate(group)]
        )
    return recorded_tokens


def _encode(model: LocalModel, prompts: Sequence[str | bytes]) -> list[list[int]]:
    """Turn prompts into token ids.

    Raises:
        TraceError: there are none, or one is empty.
    """
    sequences = [model.encode(prompt) for prompt in prompts]
    empty = [number for number, ids in enumerate(sequences) if not ids]
    if not sequences or empty:
        where = f"prompt {empty[0]}" if empty else "prompts"
        raise TraceError(
            f"record: {where}: expected at least one token, found none; drop it or"
            " write something"
        )
    return sequences


def _calibration(residual: Residual | None) -> dict[str, Any]:
    """Name in the header what the recording was calibrated with."""
    if residual is None:
        return {}
    return {"residual": {"id": residual.id, **residual.facts}}


def _provenance(
    model: LocalModel, sequences: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Describe where a trace comes from."""
    digest = hashlib.sha256()
    for ids in sequences:
        # With its length, so that tokens cannot move from one prompt to the next.
        digest.update(np.asarray([len(ids), *ids], dtype="<i4").tobytes())
    facts = {
        "model": model.name,
        # Known only of a model that came from a hub.
        "revision": getattr(model.model.config, "_commit_hash", None) or "",
        "weights": weights_digest(model.model),
        "prompts": digest.hexdigest(),
        "sequences": len(sequences),
        "tool": f"moesim record {__version__}",
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "device": model.device.type,
        "date": datetime.now(UTC).date().isoformat(),
    }
    if isinstance(model, StoredModel):
        facts["checkpoint"] = model.checkpoint
    return facts


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
        # Columns with a value for every expert.
        self._wide: list[str] = ["scores"] if scores else []
        if predictions:
            self._wide += [name for name in PREDICTION_COLUMNS if name.endswith("_raw")]
        if residual is not None:
            self._wide.append("pred1_res")
        self._observer = GateObserver(self._blocks, facts, self._wide, residual=vectors)
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
            layers = self._observer.layers
            values = [layer[name] for layer in layers if name in layer]
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
        ahead = prediction_distance(name) if name in PREDICTION_COLUMNS else 0
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
