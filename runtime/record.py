"""A model runs; what its gates say becomes a trace.

Imagine a clerk at every MoE layer who notes, for each token that passes, which experts it was sent to, with what
weights, what the gate thought of all the others, and what the gates of the next layers would have answered already now.
Notes are collected per batch and handed over sequence by sequence; the trace appears under its name when it is whole.

Where there is no layer l+1 (l+2, l+3), prediction columns hold zeros.

B sequences of a batch, T positions of a sequence, E routed experts, K chosen per token, L MoE layers, H hidden.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import transformers

from runtime.gates import AHEAD, GateTap
from runtime.generate import Pass, Sampling, generate
from runtime.hf import LocalModel, find_blocks, gate_facts, load_model, model_shape, weights_digest
from traces.errors import TraceError
from traces.schema import ModelShape, Phase, TraceHeader
from traces.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runtime.calibrate_residual import Residual

__all__ = ["LocalModel", "Overhead", "Recording", "load_model", "read_prompts", "record"]

_SAMPLE_TOKENS: Final = 64  # prompt and decode tokens of the overhead sample
_SAMPLE_DECODE: Final = 16
_SAMPLE_RUNS: Final = 5
_SAMPLE_LIMIT_S: Final = 20.0


class Overhead(NamedTuple):
    """What listening costs: medians of the same short generation without and with it, taken in turn."""

    plain_tokens_per_s: float
    recording_tokens_per_s: float
    tokens: int
    runs: int

    @property
    def slowdown(self) -> float:
        """How many times longer recording takes than running."""
        return self.plain_tokens_per_s / self.recording_tokens_per_s


class Recording(NamedTuple):
    """What `record` has done. `seconds_s` and `tokens_per_s` include writing; `overhead` was sampled afterwards."""

    path: Path
    sequences: int
    prompt_tokens: int
    decode_tokens: int
    rows: int
    seconds_s: float
    tokens_per_s: float
    overhead: Overhead | None
    header: TraceHeader


def read_prompts(path: Path | str) -> list[str]:
    """Read prompts from a text file.

    Blank lines separate prompts; in a file without blank lines between texts, every line is a prompt. In a `.jsonl`
    file every line is a JSON string, or an object with `prompt` or `text`: for prompts that hold blank lines.

    Raises:
        TraceError: no such file, not UTF-8, or no prompt in it.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: expected a UTF-8 text file with prompts, found {error}") from None
    lines = text.splitlines()
    if file.suffix == ".jsonl":
        prompts = [_json_prompt(file, at, line) for at, line in enumerate(lines, 1) if line.strip()]
    else:
        blocks: list[list[str]] = [[]]
        for line in lines:
            if line.strip():
                blocks[-1].append(line)
            elif blocks[-1]:
                blocks.append([])
        blocks = [block for block in blocks if block]
        prompts = blocks[0] if len(blocks) == 1 else ["\n".join(block) for block in blocks]
    if not prompts:
        raise TraceError(f"{file}: expected prompts, found an empty file; write one prompt per line")
    return prompts


def record(
    model: LocalModel,
    prompts: Sequence[str | bytes],
    out: Path | str,
    *,
    max_new_tokens: int,
    batch: int = 1,
    device: str | None = None,
    scores: bool = True,
    predictions: bool = True,
    residual: Residual | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    split: str = "evaluation",
    progress: Callable[[int, int], None] | None = None,
    provenance: Mapping[str, Any] | None = None,
    measure_overhead: bool = True,
) -> Recording:
    """Run a model on prompts and write its routing trace.

    Every generated token is fed back and recorded, the last one included: a sequence has `max_new_tokens` decode
    steps unless the model ends it. Equal arguments give equal bytes as long as the date is fixed (`provenance`).
    Memory holds one batch: about ``2 (P + 1) L E`` bytes per token for P prediction columns.

    Args:
        model: from `load_model`, or any model with MoE layers.
        prompts: what to read; one sequence each, numbered in order.
        out: the Parquet file to make. An existing one is replaced at the end.
        max_new_tokens: decode steps per sequence, >= 0.
        batch: sequences run together. Routing does not depend on it, except where rounding breaks a tie.
        device: move the model there first; None leaves it where it is.
        scores: record full gate scores.
        predictions: record `pred1_raw`, `pred2_raw`, `pred3_raw`.
        residual: vectors of `residual_vectors`, for `pred1_res`.
        temperature: 0 decodes greedily.
        seed: of the draws when `temperature` > 0; a sequence's draws depend on nothing but this and its number.
        split: ``calibration`` or ``evaluation``: which split the prompts belong to.
        progress: called with tokens done and tokens expected at most.
        provenance: further facts for the header; `date` (ISO) replaces today's.
        measure_overhead: sample the speed with and without listening afterwards.

    Raises:
        TraceError: no MoE layers or none that can be heard, an empty prompt, a residual of another model, a number
            out of range, scores that are not finite.
    """
    if max_new_tokens < 0 or batch < 1 or temperature < 0:
        raise TraceError(
            "record: expected max_new_tokens >= 0, batch >= 1 and temperature >= 0,"
            f" got {max_new_tokens}, {batch} and {temperature}"
        )
    if split not in ("calibration", "evaluation"):
        raise TraceError(f"record: split: expected 'calibration' or 'evaluation', got {split!r}")
    if device is not None:
        model.model.to(device)
    texts = [model.encode(prompt) for prompt in prompts]
    if not texts or not all(texts):
        where = "prompts" if not texts else f"prompt {[bool(ids) for ids in texts].index(False)}"
        raise TraceError(f"record: {where}: expected at least one token, found none; drop it or write something")
    clerk = _Clerk(model, scores=scores, predictions=predictions, residual=residual)
    sampling = Sampling(temperature, seed)
    settings = {"batch": batch, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    header = TraceHeader(
        shape=clerk.shape,
        provenance=_provenance(model, texts) | settings | dict(provenance or {}),
        calibration={} if residual is None else {"residual": {"id": residual.id, **residual.facts}},
        split=split,
    )
    begin, expected, done = time.perf_counter(), sum(map(len, texts)) + max_new_tokens * len(texts), 0
    prompt_tokens = decode_tokens = 0

    def listen(step: Pass) -> None:
        nonlocal done
        clerk.note(step)
        done += int(step.keep.sum())
        if progress is not None:
            progress(done, expected)

    with TraceWriter(out, header, clerk.columns) as writer:
        for first in range(0, len(texts), batch):
            ids = texts[first : first + batch]
            with clerk.open(ids, max_new_tokens):
                generate(model, ids, max_new_tokens, listen, first=first, sampling=sampling)
            for one, prompt in enumerate(ids):
                rows = clerk.rows(one, len(prompt))
                writer.write(seq=first + one, **rows)
                prompt_tokens += len(prompt)
                decode_tokens += len(rows["experts"]) // clerk.shape.layers - len(prompt)
        rows_written = writer.rows
    seconds_s = time.perf_counter() - begin
    overhead = _overhead(model, texts[0], clerk) if measure_overhead else None
    tokens_per_s = (prompt_tokens + decode_tokens) / seconds_s
    return Recording(
        Path(out), len(texts), prompt_tokens, decode_tokens, rows_written, seconds_s, tokens_per_s, overhead, header
    )


class _Clerk:
    """Takes the notes of one batch: arrays [B, T, L, …], filled pass by pass, read sequence by sequence."""

    def __init__(self, model: LocalModel, *, scores: bool, predictions: bool, residual: Residual | None) -> None:
        self._blocks = find_blocks(model.model)
        self._facts = gate_facts(model.model, self._blocks)
        self.shape = model_shape(model.model, model.name, self._blocks, self._facts)
        if residual is not None:
            _check_residual(residual, self.shape, model)
        vectors = None if residual is None else torch.from_numpy(residual.vectors).to(model.device)
        self._tap = GateTap(
            self._blocks, self._facts, scores=scores, predictions=predictions or residual is not None, residual=vectors
        )
        predicted = [f"pred{ahead}_raw" for ahead in range(1, AHEAD + 1)] if predictions else []
        self._predicted = (*predicted, *(["pred1_res"] if residual is not None else []))
        self._full = (*(["scores"] if scores else []), *self._predicted)
        self.columns = ("weights", *self._full, "token")
        self._notes: dict[str, np.ndarray] = {}
        self._lengths = np.zeros(0, dtype=np.int64)

    def open(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> GateTap:
        """Take a fresh sheet for these prompts; hooks are in place while the returned context is open."""
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
        """Copy what the tap heard in this pass; pads and ended sequences are left out."""
        self._tap.check()
        kept = step.keep.flatten().nonzero().flatten()
        sequence = (kept // step.keep.shape[1]).cpu().numpy()
        position = step.positions.flatten()[kept].cpu().numpy()
        self._notes["token"][sequence, position] = step.tokens.flatten()[kept].cpu().numpy()
        np.maximum.at(self._lengths, sequence, position + 1)
        for name, notes in self._notes.items():
            if name != "token":
                heard = [values for layer in self._tap.heard if (values := layer.named(name)) is not None]
                self._check_widths(name, heard)
                if heard:  # the first layers: predictions end before the last one
                    notes[sequence, position, : len(heard)] = _to_numpy(heard, kept)

    def rows(self, one: int, prompt_tokens: int) -> dict[str, Any]:
        """Return the rows of one sequence by position and layer, as `TraceWriter.write` wants them."""
        length, layers = int(self._lengths[one]), self.shape.layers
        position = np.repeat(np.arange(length, dtype=np.int32), layers)
        rows: dict[str, Any] = {
            "pos": position,
            "layer": np.tile(np.arange(layers, dtype=np.int16), length),
            "phase": np.where(position < prompt_tokens, Phase.PREFILL, Phase.DECODE).astype(np.int8),
        }
        for name, notes in self._notes.items():
            cells = notes[one, :length]
            rows[name] = np.repeat(cells, layers) if name == "token" else cells.reshape(length * layers, -1)
        return rows

    def _check_widths(self, name: str, heard: list[torch.Tensor]) -> None:
        """Refuse a layer that does not have the model's shape."""
        expected = self._notes[name].shape[-1]
        for block, values in zip(self._blocks, heard, strict=False):
            if values.shape[-1] != expected:
                raise TraceError(f"{block.name}: {name}: expected {expected} per token, got {values.shape[-1]}")


def _to_numpy(layers: list[torch.Tensor], kept: torch.Tensor) -> np.ndarray:
    """Bring the kept tokens of all layers to the host in one copy, [N, L, …]; floats become 16 bits wide."""
    picked = [values.to(kept.device)[kept] for values in layers]  # layers of a large model may lie on several devices
    stacked: np.ndarray = (
        torch.stack([one.half() if one.is_floating_point() else one for one in picked], 1).cpu().numpy()
    )
    return stacked


def _check_residual(residual: Residual, shape: ModelShape, model: LocalModel) -> None:
    """Refuse vectors that were calibrated on another model."""
    expected, way_out = (shape.layers, shape.hidden), "calibrate this model"
    if residual.vectors.shape != expected:
        raise TraceError(f"residual {residual.id}: expected shape {expected}, got {residual.vectors.shape}; {way_out}")
    digest = residual.facts.get("weights")
    if digest is not None and digest != weights_digest(model.model):
        raise TraceError(
            f"residual {residual.id}: calibrated on {residual.facts.get('model')!r} with weights {str(digest)[:12]}…,"
            f" but {model.name!r} has other weights; {way_out}"
        )


def _provenance(model: LocalModel, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Say where a trace comes from."""
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(np.asarray([len(ids), *ids], dtype="<i4").tobytes())
    return {
        "model": model.name,
        "revision": getattr(model.model.config, "_commit_hash", None) or "",
        "weights": weights_digest(model.model),
        "prompts": digest.hexdigest(),
        "sequences": len(texts),
        "tool": f"moesim record {_version()}",
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "device": model.device.type,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _version() -> str:
    """Return the installed version of moesim."""
    try:
        return importlib.metadata.version("moesim")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return "(not installed)"


def _overhead(model: LocalModel, prompt: Sequence[int], clerk: _Clerk) -> Overhead:
    """Time a short generation without and with the clerk, in turn, after one round that does not count."""
    ids = [list(prompt[: _SAMPLE_TOKENS - _SAMPLE_DECODE])]
    tokens = 0

    def count(step: Pass) -> None:
        nonlocal tokens
        tokens += int(step.keep.sum())

    def timed(run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def recorded() -> None:
        with clerk.open(ids, _SAMPLE_DECODE):
            generate(model, ids, _SAMPLE_DECODE, clerk.note)

    begin = time.perf_counter()
    generate(model, ids, _SAMPLE_DECODE, count)
    plain_s: list[float] = []
    recording_s: list[float] = []
    while len(plain_s) < _SAMPLE_RUNS and (not plain_s or time.perf_counter() - begin < _SAMPLE_LIMIT_S):
        plain_s.append(timed(lambda: generate(model, ids, _SAMPLE_DECODE, lambda _: None)))
        recording_s.append(timed(recorded))
    return Overhead(tokens / statistics.median(plain_s), tokens / statistics.median(recording_s), tokens, len(plain_s))


def _json_prompt(file: Path, at: int, line: str) -> str:
    """Read one line of a `.jsonl` file."""
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict):
        value = value.get("prompt", value.get("text"))
    if not isinstance(value, str) or not value:
        raise TraceError(f"{file}: line {at}: expected a JSON string, or an object with 'prompt' or 'text'")
    return value
