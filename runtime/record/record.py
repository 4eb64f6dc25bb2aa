"""A model runs; what its gates say becomes a trace.

Imagine a clerk at every MoE layer who notes, for each token that passes, which experts
it was sent to, with what weights, what the gate thought of all the others, and what the
gates of the next layers would have answered already now. Notes are collected per batch
(`runtime/record/gate_recorder.py`) and filed when a batch is done
(`runtime/record/segments.py`), so a recording can be stopped at any moment; the trace
appears under its name when it is whole.

E routed experts, L MoE layers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import statistics
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from moesim.runtime.models.datasets import read_prompts
from moesim.runtime.models.generate import Pass, Sampling, generate
from moesim.runtime.models.hf import LocalModel, load_model, weights_digest
from moesim.runtime.record.gate_recorder import Clerk
from moesim.runtime.record.offloaded import StoredModel
from moesim.runtime.record.segments import Segments
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import TraceHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from moesim.runtime.record.residual import Residual

__all__ = [
    "LocalModel",
    "Overhead",
    "Recording",
    "load_model",
    "read_prompts",
    "record",
]

_SAMPLE_TOKENS: Final = 64  # prompt and decode tokens of the overhead sample
_SAMPLE_DECODE: Final = 16
_SAMPLE_RUNS: Final = 5
_SAMPLE_LIMIT_S: Final = 20.0


class Overhead(NamedTuple):
    """What listening costs: medians of the same short generation without and with it,
    taken in turn.
    """

    plain_tokens_per_s: float
    recording_tokens_per_s: float
    tokens: int
    runs: int

    @property
    def slowdown(self) -> float:
        """How many times longer recording takes than running."""
        return self.plain_tokens_per_s / self.recording_tokens_per_s


class Recording(NamedTuple):
    """What `record` has done.

    `seconds_s` and `tokens_per_s` are of this session and include writing; `overhead`
    was sampled afterwards; `resumed` sequences were there already.
    """

    path: Path
    sequences: int
    prompt_tokens: int
    decode_tokens: int
    rows: int
    seconds_s: float
    tokens_per_s: float
    overhead: Overhead | None
    header: TraceHeader
    resumed: int = 0


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
    resume: bool = False,
) -> Recording:
    """Run a model on prompts and write its routing trace.

    Every generated token is fed back and recorded, the last one included: a sequence
    has `max_new_tokens` decode steps unless the model ends it. Equal arguments give
    equal bytes as long as the date is fixed (`provenance`). Memory holds one batch:
    about ``2 (P + 1) L E`` bytes per token for P prediction columns.

    Args:
        model: from `load_model`, or any model with MoE layers.
        prompts: what to read; one sequence each, numbered in order.
        out: the Parquet file to make. An existing one is replaced at the end.
        max_new_tokens: decode steps per sequence, >= 0.
        batch: sequences run together. Routing does not depend on it, except where
            rounding breaks a tie.
        device: move the model there first; None leaves it where it is.
        scores: record full gate scores.
        predictions: record `pred1_raw`, `pred2_raw`, `pred3_raw`.
        residual: vectors of `residual_vectors`, for `pred1_res`.
        temperature: 0 decodes greedily.
        seed: of the draws when `temperature` > 0; a sequence's draws depend on nothing
            but this and its number.
        split: ``calibration`` or ``evaluation``: which split the prompts belong to.
        progress: called with tokens done and tokens expected at most.
        provenance: further facts for the header; `date` (ISO) replaces today's.
        measure_overhead: sample the speed with and without listening afterwards.
        resume: go on with a recording of the same that was stopped
            (`moesim.runtime.record.segments`), where there is one; the trace has the
            bytes that it would have had without the stop. Else an unfinished one is
            replaced.

    Raises:
        TraceError: no MoE layers or none that can be heard, an empty prompt, a residual
            of another model, a number out of range, scores that are not finite, or,
            with `resume`, an unfinished recording of something else.
    """
    if max_new_tokens < 0 or batch < 1 or temperature < 0:
        raise TraceError(
            "record: expected max_new_tokens >= 0, batch >= 1 and temperature >= 0,"
            f" got {max_new_tokens}, {batch} and {temperature}"
        )
    if split not in ("calibration", "evaluation"):
        raise TraceError(
            f"record: split: expected 'calibration' or 'evaluation', got {split!r}"
        )
    if device is not None:
        model.model.to(device)
    texts = [model.encode(prompt) for prompt in prompts]
    if not texts or not all(texts):
        where = (
            "prompts"
            if not texts
            else f"prompt {[bool(ids) for ids in texts].index(False)}"
        )
        raise TraceError(
            f"record: {where}: expected at least one token, found none; drop it or"
            " write something"
        )
    clerk = Clerk(model, scores=scores, predictions=predictions, residual=residual)
    sampling = Sampling(temperature, seed)
    settings = {
        "batch": batch,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    header = TraceHeader(
        shape=clerk.shape,
        provenance=_provenance(model, texts) | settings | dict(provenance or {}),
        calibration=(
            {}
            if residual is None
            else {"residual": {"id": residual.id, **residual.facts}}
        ),
        split=split,
    )
    begin = time.perf_counter()
    expected = sum(map(len, texts)) + max_new_tokens * len(texts)
    done = heard = 0

    def listen(step: Pass) -> None:
        nonlocal done, heard
        clerk.note(step)
        tokens = int(step.keep.sum())
        done = done + tokens
        heard = heard + tokens
        if progress is not None:
            progress(done, expected)

    with Segments(out, header, clerk.columns, batch, resume=resume) as segments:
        done = sum(map(len, texts[: segments.done])) + max_new_tokens * segments.done
        kept = segments.done
        for first in range(kept, len(texts), batch):
            ids = texts[first : first + batch]
            with clerk.open(ids, max_new_tokens):
                generate(
                    model, ids, max_new_tokens, listen, first=first, sampling=sampling
                )
            segments.write(
                [clerk.rows(one, len(prompt)) for one, prompt in enumerate(ids)]
            )
        made = segments.merge()
    seconds_s = time.perf_counter() - begin
    overhead = _overhead(model, texts[0], clerk) if measure_overhead else None
    return Recording(
        made.path,
        made.sequences,
        made.prompt_tokens,
        made.decode_tokens,
        made.rows,
        seconds_s,
        heard / seconds_s,
        overhead,
        made.header,
        kept,
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
    } | ({"checkpoint": model.checkpoint} if isinstance(model, StoredModel) else {})


def _version() -> str:
    """Return the installed version of moesim."""
    try:
        return importlib.metadata.version("moesim")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return "(not installed)"


def _overhead(model: LocalModel, prompt: Sequence[int], clerk: Clerk) -> Overhead:
    """Time a short generation without and with the clerk, in turn, after one round that
    does not count.
    """
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
    while len(plain_s) < _SAMPLE_RUNS and (
        not plain_s or time.perf_counter() - begin < _SAMPLE_LIMIT_S
    ):
        plain_s.append(
            timed(lambda: generate(model, ids, _SAMPLE_DECODE, lambda _: None))
        )
        recording_s.append(timed(recorded))
    return Overhead(
        tokens / statistics.median(plain_s),
        tokens / statistics.median(recording_s),
        tokens,
        len(plain_s),
    )
