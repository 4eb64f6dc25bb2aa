"""Routing that nobody recorded: traces of any length with the statistics of a real one,
or with stated ones.

`moesim.traces.synthetic.draw` says which habits make up such routing,
`moesim.traces.synthetic.fit` learns them from a real trace; here they are stated, and
traces are written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.synthetic.draw import CLASSES, SynthModel, draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_SIDE_BY_SIDE = 512
_WEIGHTS = 1 << 17
_DRAWN_BYTES = 64 << 20
"""Of the sequences drawn side by side: weights at a time, and bytes of their
routing.
"""


def stated(
    shape: ModelShape,
    *,
    skew: float = 0.8,
    reuse: float = 0.3,
    dependence: float = 0.0,
    drift: float = 0.0,
    drift_tokens: float = 256.0,
    prompt: int = 0,
    generated: int = 512,
    seed: int = 0,
) -> SynthModel:
    """A model of stated statistics, for architectures whose traces nobody has.

    Args:
        shape: the model.
        skew: exponent of Zipf's law of popularity; 0 is even. Which expert is popular
            is drawn per layer.
        reuse: share of a token's experts that the token before used too, as
            `moesim.traces.stats.statistics` calls it ``overlap``; at least what skew
            alone gives.
        dependence: 0..1, how strongly an expert's favourites in the next layer are
            preferred.
        drift: standard deviation of popularity's wandering, in log-weight.
        drift_tokens: its memory.
        prompt: prompt tokens of each sequence.
        generated: generated tokens of each sequence.
        seed: draws who is popular.

    Raises:
        TraceError: a number out of range.
    """
    for name, value, least, most in (
        ("skew", skew, 0, 5),
        ("reuse", reuse, 0, 0.99),
        ("dependence", dependence, 0, 1),
        ("drift", drift, 0, 5),
        ("drift_tokens", drift_tokens, 1, math.inf),
        ("prompt", prompt, 0, 1 << 24),
        ("generated", generated, 0, 1 << 24),
    ):
        if not least <= value <= most:
            raise TraceError(
                f"synthetic trace: {name}: expected {least}..{most}, got {value}"
            )
    if prompt + generated < 1:
        raise TraceError(
            "synthetic trace: expected at least one token per sequence, got prompt 0"
            " and generated 0"
        )
    rng = np.random.default_rng(seed)
    ranks = np.argsort(rng.random((shape.layers, shape.experts)), axis=1)
    popularity = (-skew * np.log1p(ranks)).astype(np.float32)
    lift = None
    if dependence:
        favourites = rng.normal(
            size=(shape.layers, shape.experts, shape.experts)
        ).astype(np.float32)
        lift = favourites * np.float32(1 / math.sqrt(shape.top_k))
    model = SynthModel(
        shape,
        popularity,
        np.zeros((shape.layers, CLASSES), np.float32),
        np.zeros((1, *popularity.shape), np.float32),
        lift=lift,
        dependence=(
            np.full(shape.layers, 3 * dependence, np.float32) if dependence else None
        ),
        drift=drift,
        drift_tokens=drift_tokens,
        lengths=((prompt, generated),),
        told={
            "skew": skew,
            "reuse": reuse,
            "dependence": dependence,
            "drift": drift,
            "drift_tokens": drift_tokens,
        },
    )
    return _with_reuse(model, reuse)


def synthesise(
    model: SynthModel,
    out: Path | str,
    *,
    tokens: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write a synthetic trace. Memory stays bounded: sequences are drawn a few at a
    time.

    Args:
        model: from `moesim.traces.synthetic.fit.fit` or `stated`.
        out: the trace to make.
        tokens: how many tokens, at least; the last sequence is cut to the number.
        seed: same model, tokens and seed, same file.
        progress: called with the number of rows written so far.

    Returns:
        Rows written.

    Raises:
        TraceError: fewer than one token.
    """
    if tokens < 1:
        raise TraceError(f"synthetic trace: tokens: expected >= 1, got {tokens}")
    told = {
        "tool": "moesim trace synth",
        "synthetic": True,
        "seed": seed,
        "tokens": tokens,
        **model.told,
    }
    with TraceWriter(out, TraceHeader(model.shape, told)) as writer:
        for number, (prompt, experts) in enumerate(_sequences(model, tokens, seed)):
            count, layers = experts.shape[:2]
            pos = np.repeat(np.arange(count), layers)
            phase = np.where(
                pos < prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE)
            )
            writer.write(
                number,
                pos,
                phase,
                np.tile(np.arange(layers), count),
                experts.reshape(count * layers, -1),
            )
            if progress is not None:
                progress(writer.rows)
    return writer.rows


def _sequences(
    model: SynthModel, tokens: int, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(prompt, uint16 [T, L, K]) of sequence after sequence, until `tokens` tokens."""
    rng = np.random.default_rng(seed)
    longest = max(map(sum, model.lengths))
    row_bytes = 2 * model.shape.layers * model.shape.top_k
    weights = model.shape.layers * model.shape.experts
    side_by_side = max(
        1,
        min(_DRAWN_BYTES // (row_bytes * longest), _WEIGHTS // weights, _SIDE_BY_SIDE),
    )
    left = tokens
    while left > 0:
        group: list[tuple[int, int]] = []
        due = left
        while due > 0 and len(group) < side_by_side:
            prompt, generated = model.lengths[int(rng.integers(len(model.lengths)))]
            length = min(prompt + generated, due)
            group.append((min(prompt, length), length))
            due -= length
        drawn = draw(model, max(length for _, length in group), len(group), rng)
        for index, (prompt, length) in enumerate(group):
            yield prompt, drawn[index, :length]
        left = due


def _with_reuse(model: SynthModel, wanted: float) -> SynthModel:
    """Raise the weight of the experts just used until their share is as wanted."""
    low = 0.0
    high = 12.0
    for _ in range(12):
        middle = (low + high) / 2
        reuse = model.reuse.copy()
        reuse[:, 0] = middle
        tried = replace(model, reuse=reuse)
        if _overlap(tried) < wanted:
            low = middle
        else:
            high = middle
    return tried


def _overlap(model: SynthModel) -> float:
    """Mean share of a token's experts that the token before used, over a short draw of
    some layers.
    """
    few = min(model.shape.layers, 4)
    part = replace(
        model,
        shape=replace(
            model.shape, layers=few, expert_bytes=model.shape.expert_bytes[:few]
        ),
        popularity=model.popularity[:few],
        reuse=model.reuse[:few],
        topics=model.topics[:, :few],
        lift=None if model.lift is None else model.lift[:few],
        dependence=None if model.dependence is None else model.dependence[:few],
    )
    drawn = draw(part, 48, 16, np.random.default_rng(0)).astype(np.int32)
    same = (drawn[:, 1:, :, :, None] == drawn[:, :-1, :, None, :]).any(axis=4)
    return float(same[:, 8:].mean())
