"""Writes synthetic traces of any length, drawn from a fitted model or from stated
statistics.

`moesim.traces.synthetic.draw` says which habits make up such routing,
`moesim.traces.synthetic.fit` learns them from a real trace; here they are stated, and
traces are written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.models import model_shape
from moesim.traces.synthetic.draw import (
    AGE_EDGES,
    CLASSES,
    SynthModel,
    TokenKinds,
    draw,
)
from moesim.traces.synthetic.saved import model_like, save, shipped_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.stats.routing_curves import Likeness

# What is drawn side by side: sequences, weights at a time, bytes of their routing.
_SIDE_BY_SIDE = 512
_WEIGHTS = 1 << 17
_DRAWN_BYTES = 64 << 20

# Bounds of what can be stated.
_LIMITS = {
    "skew": (0, 5),
    "topic": (0, 1),
    "reuse": (0, 0.99),
    "memory": (0, 10),
    "dependence": (0, 5),
    "drift": (0, 5),
    "drift_tokens": (1, math.inf),
    "prompt_tokens": (0, 1 << 24),
    "new_tokens": (0, 1 << 24),
    "tokens": (1, 10**12),
    "seed": (0, math.inf),
}

# Kinds of tokens of stated statistics, and how often the first is met before the
# second: like words, but less unequal, as a kind is many words.
_KINDS = 32
_KIND_SKEW = 0.5
_COURSES = 16
_COURSE_TOKENS = 1024
# What an expert never used loses, as a share of what one just used gains.
_NEVER_SHARE = 0.5


def stated(
    shape: ModelShape,
    *,
    skew: float = 0.8,
    topic: float = 0.5,
    reuse: float = 0.37,
    memory: float = 1.0,
    dependence: float = 2.0,
    drift: float = 0.9,
    drift_tokens: float = 256.0,
    prompt_tokens: int = 0,
    new_tokens: int = 512,
    seed: int = 0,
) -> SynthModel:
    """A model of stated statistics, for architectures that no trace is known of.

    The defaults lie between what real models need, each of which they miss by some
    points (docs/measurements/synthetic-traces.md).

    Args:
        shape: the model.
        skew: exponent of Zipf's law of popularity; 0 is even. Which expert is popular
            is drawn per layer.
        topic: share of experts whose popularity is a sequence's own: 0 makes the same
            experts popular in all sequences, 1 others in each.
        reuse: share of a token's experts that the token before used too, as
            `moesim.traces.stats.statistics` calls it ``overlap``; at least what the
            other habits give.
        memory: an expert used n tokens ago is preferred by ``n ** -memory`` of what one
            just used is; 0 never forgets within a sequence.
        dependence: exponent of Zipf's law by which each kind of token prefers experts
            at all layers, so that a layer tells of the others; 0 is none.
        drift: standard deviation of popularity's wandering, in log-weight.
        drift_tokens: its memory.
        prompt_tokens: prompt tokens of each sequence.
        new_tokens: generated tokens of each sequence.
        seed: draws who is popular.

    Raises:
        TraceError: a number out of range.
    """
    habits = {
        "skew": skew,
        "topic": topic,
        "reuse": reuse,
        "memory": memory,
        "dependence": dependence,
        "drift": drift,
        "drift_tokens": drift_tokens,
    }
    _check_limits(habits)

    # Which expert is popular is chance; how much more is Zipf's law.
    rng = np.random.default_rng(seed)
    popularity = -skew * _log_ranks(rng, (shape.layers, shape.experts))
    model = SynthModel(
        shape=shape,
        popularity=popularity,
        reuse=np.zeros((shape.layers, CLASSES), np.float32),
        topics=np.zeros((_COURSES, *popularity.shape), np.float32),
        kinds=_stated_kinds(shape, dependence, rng) if dependence else None,
        drift=drift,
        drift_tokens=drift_tokens,
    )
    model = of_lengths(model, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    model = _with_reuse(model, reuse, memory)
    return replace(model, permuted=topic, provenance=habits)


def _log_ranks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Float32: logarithms of 1 to E along the last axis, in random order."""
    ranks = np.argsort(rng.random(shape), axis=-1)
    return np.log1p(ranks).astype(np.float32)


def _stated_kinds(
    shape: ModelShape, dependence: float, rng: np.random.Generator
) -> TokenKinds:
    """Kinds of tokens that follow each other by chance."""
    chances = np.arange(1, _KINDS + 1) ** -_KIND_SKEW
    chances /= chances.sum()
    return TokenKinds(
        weights=-_log_ranks(rng, (_KINDS, shape.layers, shape.experts)),
        character=np.full(shape.layers, dependence, np.float32),
        course=rng.choice(_KINDS, _COURSES * _COURSE_TOKENS, p=chances),
        first=np.arange(_COURSES + 1) * _COURSE_TOKENS,
    )


def of_lengths(
    model: SynthModel,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
) -> SynthModel:
    """Return a model whose sequences have so many tokens; None keeps those it has.

    Raises:
        TraceError: a number out of range, or sequences without tokens.
    """
    stated = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    changes = {name: value for name, value in stated.items() if value is not None}
    _check_limits(changes)
    lengths = tuple(
        (changes.get("prompt_tokens", prompt), changes.get("new_tokens", generated))
        for prompt, generated in model.lengths
    )
    if min(map(sum, lengths)) < 1:
        raise TraceError(
            "synthetic trace: expected at least one token per sequence, got"
            f" prompt_tokens {lengths[0][0]} and new_tokens {lengths[0][1]}"
        )
    # The header says what is not as in the trace that it is like.
    return replace(model, lengths=lengths, provenance=model.provenance | changes)


def _check_limits(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        least, most = _LIMITS[name]
        if not least <= value <= most:
            raise TraceError(
                f"synthetic trace: {name}: expected {least}..{most}, got {value}"
            )


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
    _check_limits({"tokens": tokens, "seed": seed})
    provenance = {
        "tool": "moesim trace synth",
        "synthetic": True,
        "seed": seed,
        "tokens": tokens,
        **model.provenance,
    }

    with TraceWriter(out, TraceHeader(model.shape, provenance)) as writer:
        for number, (prompt, routing) in enumerate(_sequences(model, tokens, seed)):
            count, layers = routing.shape[:2]
            pos = np.repeat(np.arange(count), layers)
            in_prompt = pos < prompt
            phase = np.where(in_prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE))
            writer.write(
                seq=number,
                pos=pos,
                phase=phase,
                layer=np.tile(np.arange(layers), count),
                experts=routing.reshape(count * layers, -1),
            )
            if progress is not None:
                progress(writer.rows)

    return writer.rows


def _sequences(
    model: SynthModel, tokens: int, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(prompt, uint16 [T, L, K]) of sequence after sequence, until `tokens` tokens."""
    rng = np.random.default_rng(seed)
    side_by_side = _side_by_side(model)

    left = tokens
    while left > 0:
        group: list[tuple[int, int]] = []
        # What is left once the group is drawn.
        after = left
        while after > 0 and len(group) < side_by_side:
            prompt, generated = model.lengths[int(rng.integers(len(model.lengths)))]
            length = min(prompt + generated, after)
            group.append((min(prompt, length), length))
            after -= length

        # All are drawn as long as the longest; the rest is cut off.
        longest = max(length for _, length in group)
        drawn = draw(model, longest, len(group), rng)
        for index, (prompt, length) in enumerate(group):
            yield prompt, drawn[index, :length]
        left = after


def _side_by_side(model: SynthModel) -> int:
    """Return how many sequences are drawn side by side, so that memory is bounded."""
    shape = model.shape
    longest = max(map(sum, model.lengths))
    sequence_bytes = 2 * shape.layers * shape.top_k * longest
    weights = shape.layers * shape.experts
    fitting = min(_DRAWN_BYTES // sequence_bytes, _WEIGHTS // weights, _SIDE_BY_SIDE)
    return max(1, fitting)


def _with_reuse(model: SynthModel, reuse: float, memory: float) -> SynthModel:
    """Raise the weight of the experts used before until the share of the last token's
    is `reuse`.
    """
    by_age = np.append(AGE_EDGES.astype(float) ** -memory, -_NEVER_SHARE)
    low = 0.0
    high = 12.0

    # Bisection: the share grows with the weight, and has no closed form.
    for _ in range(12):
        middle = (low + high) / 2
        weights = np.tile(middle * by_age, (model.shape.layers, 1))
        tried = replace(model, reuse=weights.astype(np.float32))
        if _overlap(tried) < reuse:
            low = middle
        else:
            high = middle

    return tried


def _overlap(model: SynthModel) -> float:
    """Mean share of a token's experts that the token before used, over a short draw of
    some layers.
    """
    layers = slice(4)
    kinds = model.kinds
    if kinds is not None:
        weights = kinds.weights[:, layers]
        kinds = replace(kinds, weights=weights, character=kinds.character[layers])
    part = replace(
        model,
        popularity=model.popularity[layers],
        reuse=model.reuse[layers],
        topics=model.topics[:, layers],
        kinds=kinds,
    )

    drawn = draw(part, 256, 8, np.random.default_rng(0)).astype(np.int32)
    now = drawn[:, 1:, :, :, None]
    before = drawn[:, :-1, :, None, :]
    again = (now == before).any(axis=4)
    # The first tokens have hardly any past.
    return float(again[:, 8:].mean())


# -- in one call -----------------------------------------------------------------------


LENGTHS = ("prompt_tokens", "new_tokens")
"""Fields that may be stated beside `like`: a trace of decode tokens only may be drawn
with prompts.
"""


def synth(
    target: Path | str,
    *,
    tokens: float,
    like: Path | str | None = None,
    save_stats: Path | str | None = None,
    shape: str | None = None,
    quant: str | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    comparison: Callable[[Likeness | None], None] | None = None,
    **statistics: Any,
) -> Trace:
    """Draw a trace with the statistics of a real one, or with stated ones.

    Args:
        target: the trace to write; it appears when it is complete.
        tokens: how many, such as 1e6.
        like: a trace to resemble, saved statistics of one, or the name of those that
            ship.
        save_stats: where the statistics of `like` are saved, which `like` takes.
        shape: a model instead of `like`, by name or in words. Where statistics of a
            model of that name ship and none is stated, they are drawn from.
        quant: weight format; None takes ``bf16``, or with `like` that of the trace.
        seed: same arguments, same file.
        progress: called with the number of rows written so far.
        comparison: called with what is drawn against what is real; None where nothing
            real is known of the model.
        statistics: ``skew``, ``topic``, ``reuse``, ``memory``, ``dependence``,
            ``drift`` with `shape`; ``prompt_tokens`` and ``new_tokens`` with either
            (see `moesim.traces.synthetic.generate.stated`).

    Raises:
        TraceError: both `like` and `shape` or neither, a statistic that `like`
            measures, or a number out of range.
    """
    _check_limits({"tokens": tokens})
    if (like is None) == (shape is None):
        raise TraceError("expected either --like TRACE or --shape MODEL")
    if like is None:
        if save_stats is not None:
            raise TraceError(
                "--save-stats: expected --like beside it: stated statistics need no"
                " file"
            )
        described = model_shape(str(shape), quant)
        model = _model_of(described, seed, statistics)
    else:
        doubled = [name for name in statistics if name not in LENGTHS]
        if doubled:
            raise TraceError(
                f"--{doubled[0]} states what --like measures; drop one of them"
            )
        # It reads the whole trace; stated statistics need none.
        model = model_like(like, quant)
        if save_stats is not None:
            save(model, save_stats)
        model = of_lengths(model, **statistics)
    if comparison is not None:
        comparison(model.likeness)

    # Traces may be larger than memory, so they are written while they are drawn.
    synthesise(model, target, tokens=int(tokens), seed=seed, progress=progress)
    return open_trace(target)


def _model_of(shape: ModelShape, seed: int, statistics: dict[str, Any]) -> SynthModel:
    """The statistics that ship of a model, unless others are stated, at the numbers of
    experts and layers that it has.
    """
    habits = [name for name in statistics if name not in LENGTHS]
    if habits or shape.name not in shipped_statistics():
        return stated(shape, seed=seed, **statistics)
    model = model_like(shape.name)
    lengths = {"prompt_tokens": 0, "new_tokens": 512} | statistics
    return of_lengths(replace(model, shape=shape), **lengths)
