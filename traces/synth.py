"""Routing that nobody recorded: traces of any length with the statistics of a real one, or with stated ones.

At every layer a token chooses K distinct experts. How likely each is follows from four habits, added as log-weights:

- *popularity*: some experts are chosen more often, by all sequences or by those of one topic (`topics`);
- *reuse*: an expert used `age` tokens ago is more (or less) likely than its popularity says;
- *dependence*: the experts chosen one layer below speak for some experts here;
- *drift*: popularity wanders while a sequence lasts.

The weights w are turned into inclusion probabilities ``min(1, λ w)`` that add up to K, and K experts are drawn by
systematic sampling in random order, which keeps these probabilities exactly. Fitting is then counting: each weight is
raised or lowered until the probabilities, summed over the real trace, equal what the trace did (iterative scaling).

Source: Madow (1949) for systematic sampling; Darroch and Ratcliff (1972) for iterative scaling.

Letters: B sequences side by side, T tokens, L MoE layers, E experts, K per token, A classes of age, Q topics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import TraceError
from traces.schema import ModelShape, Phase, TraceHeader
from traces.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from traces.reader import Trace

AGE_EDGES = np.array([1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 257, 513])
"""Lower ends of the classes of age in tokens; one more class holds what a sequence never used."""
NEVER = len(AGE_EDGES)
_CLASSES = NEVER + 1
_AGE_OF = np.concatenate([np.repeat(np.arange(NEVER), np.diff(np.append(AGE_EDGES, 514))), [NEVER]]).astype(np.uint8)
_OLDEST = 513
"""Ages are counted up to here; `_UNUSED` stands for "not yet"."""
_UNUSED = _OLDEST + 1
_AGE_CLASS = np.concatenate([[0], _AGE_OF[:_OLDEST], [NEVER]]).astype(np.uint8)

FIT_TOKENS = 8192
"""Tokens of a real trace that are looked at, whole sequences spread over it."""
_SWEEPS = 8
_TOPICS = 48
_PRIOR = 0.25
_TOPIC_PRIOR = 32.0
_LIFT_PRIOR = 8.0
_FREE_ROUNDS, _FREE_SEQUENCES, _FREE_TOKENS = 5, 12, 512
_FLOOR = 1e-4
_SIDE_BY_SIDE = 512
_WEIGHTS = 1 << 17
_DRAWN_BYTES = 64 << 20
"""Of the sequences drawn side by side: weights at a time, and bytes of their routing."""


@dataclass(frozen=True, slots=True)
class SynthModel:
    """What `synthesise` draws from.

    Attributes:
        shape: the model.
        popularity: float32 [L, E] log-weights.
        reuse: float32 [L, A] log-weights by class of age.
        topics: float32 [Q, L, E] log-weights added for a whole sequence; each sequence draws one.
        lift: float32 [L, E, E]: what expert i of layer l-1 adds to expert e of layer l; None for no dependence.
        dependence: float32 [L], the factor of `lift`.
        drift: standard deviation that popularity reaches while wandering, in log-weight.
        drift_tokens: after so many tokens it has forgotten 63 % of where it was.
        lengths: (prompt, generated) tokens of sequences; drawn with equal chance.
        told: where the model comes from, for the trace's provenance.
    """

    shape: ModelShape
    popularity: np.ndarray
    reuse: np.ndarray
    topics: np.ndarray
    lift: np.ndarray | None = None
    dependence: np.ndarray | None = None
    drift: float = 0.0
    drift_tokens: float = 256.0
    lengths: tuple[tuple[int, int], ...] = ((0, 512),)
    told: dict[str, Any] = field(default_factory=dict)


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
        skew: exponent of Zipf's law of popularity; 0 is even. Which expert is popular is drawn per layer.
        reuse: share of a token's experts that the token before used too, as `traces.stats` calls it ``overlap``;
            at least what skew alone gives.
        dependence: 0..1, how strongly an expert's favourites in the next layer are preferred.
        drift: standard deviation of popularity's wandering, in log-weight.
        drift_tokens: its memory.
        prompt: prompt tokens of each sequence.
        generated: generated tokens of each sequence.
        seed: draws who is popular.

    Raises:
        TraceError: a number out of range.
    """
    for name, value, least, most in (
        ("skew", skew, 0, 5), ("reuse", reuse, 0, 0.99), ("dependence", dependence, 0, 1), ("drift", drift, 0, 5),
        ("drift_tokens", drift_tokens, 1, math.inf), ("prompt", prompt, 0, 1 << 24),
        ("generated", generated, 0, 1 << 24),
    ):  # fmt: skip
        if not least <= value <= most:
            raise TraceError(f"synthetic trace: {name}: expected {least}..{most}, got {value}")
    if prompt + generated < 1:
        raise TraceError("synthetic trace: expected at least one token per sequence, got prompt 0 and generated 0")
    rng = np.random.default_rng(seed)
    ranks = np.argsort(rng.random((shape.layers, shape.experts)), axis=1)
    popularity = (-skew * np.log1p(ranks)).astype(np.float32)
    lift = None
    if dependence:
        favourites = rng.normal(size=(shape.layers, shape.experts, shape.experts)).astype(np.float32)
        lift = favourites * np.float32(1 / math.sqrt(shape.top_k))
    model = SynthModel(
        shape, popularity, np.zeros((shape.layers, _CLASSES), np.float32), np.zeros((1, *popularity.shape), np.float32),
        lift, np.full(shape.layers, 3 * dependence, np.float32) if dependence else None, drift, drift_tokens,
        ((prompt, generated),),
        {"skew": skew, "reuse": reuse, "dependence": dependence, "drift": drift, "drift_tokens": drift_tokens},
    )  # fmt: skip
    return _with_reuse(model, reuse)


def fit(trace: Trace, *, tokens: int = FIT_TOKENS) -> SynthModel:
    """Learn popularity, reuse, topics and dependence from a real trace.

    Args:
        trace: an opened trace.
        tokens: how many of its tokens to look at; whole sequences, spread evenly.

    Raises:
        TraceError: the trace is damaged, or no sequence has every layer for every token of its decode.
    """
    chosen, lengths = _sample(trace, tokens)
    shape = trace.shape
    seen = np.stack([np.bincount(_flat(one, shape), minlength=shape.layers * shape.experts) for one in chosen])
    seen = seen.reshape(len(chosen), shape.layers, shape.experts)
    count = seen.sum(axis=0)
    share = (count + _PRIOR) / (count + _PRIOR).sum(axis=1, keepdims=True)
    own = (seen + _TOPIC_PRIOR * share) / (seen.sum(axis=2, keepdims=True) + _TOPIC_PRIOR)
    topics = np.log(own / share) if len(chosen) > 1 else np.zeros((1, *share.shape))
    model = SynthModel(
        shape,
        np.log(share).astype(np.float32),
        np.zeros((shape.layers, _CLASSES), np.float32),
        topics.astype(np.float32),
        lengths=tuple(lengths),
        told={"like": trace.path.name, "model": shape.name, "fitted_tokens": sum(len(one) for one in chosen)},
    )
    model = _freed(_scaled(model, chosen), chosen)
    keep = np.linspace(0, len(model.topics) - 1, min(_TOPICS, len(model.topics))).round().astype(int)
    return replace(model, topics=model.topics[keep])


def synthesise(
    model: SynthModel,
    out: Path | str,
    *,
    tokens: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write a synthetic trace. Memory stays bounded: sequences are drawn a few at a time.

    Args:
        model: from `fit` or `stated`.
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
    told = {"tool": "moesim trace synth", "synthetic": True, "seed": seed, "tokens": tokens, **model.told}
    with TraceWriter(out, TraceHeader(model.shape, told)) as writer:
        for number, (prompt, experts) in enumerate(_sequences(model, tokens, seed)):
            count, layers = experts.shape[:2]
            pos = np.repeat(np.arange(count), layers)
            phase = np.where(pos < prompt, np.int8(Phase.PREFILL), np.int8(Phase.DECODE))
            writer.write(number, pos, phase, np.tile(np.arange(layers), count), experts.reshape(count * layers, -1))
            if progress is not None:
                progress(writer.rows)
    return writer.rows


# -- generating ------------------------------------------------------------------------------------------


def _sequences(model: SynthModel, tokens: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """(prompt, uint16 [T, L, K]) of sequence after sequence, until `tokens` tokens."""
    rng = np.random.default_rng(seed)
    longest = max(map(sum, model.lengths))
    row_bytes = 2 * model.shape.layers * model.shape.top_k
    weights = model.shape.layers * model.shape.experts
    side_by_side = max(1, min(_DRAWN_BYTES // (row_bytes * longest), _WEIGHTS // weights, _SIDE_BY_SIDE))
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


def draw(model: SynthModel, tokens: int, sequences: int, rng: np.random.Generator) -> np.ndarray:
    """uint16 [B, T, L, K]: this many sequences of this many tokens, experts by descending weight.

    A layer waits for the layer below and for its own last token, so layers work like a pipeline: in wave w, layer l
    is at token w - l, and all layers are drawn at once.
    """
    shape = model.shape
    layers, experts, top_k = shape.layers, shape.experts, shape.top_k
    base = model.popularity + model.topics[rng.integers(len(model.topics), size=sequences)]
    age = np.full((sequences, layers, experts), _UNUSED, np.int16)
    drawn = np.empty((sequences, tokens, layers, top_k), np.uint16)
    wander = np.zeros_like(base) if model.drift else None
    keep = math.exp(-1 / model.drift_tokens)
    push = model.drift * math.sqrt(1 - keep * keep)
    before = np.zeros((sequences, layers, top_k), np.intp)
    for wave in range(tokens + layers - 1):
        at = np.arange(max(0, wave - tokens + 1), min(layers, wave + 1))
        now = slice(at[0], at[-1] + 1)
        logits = base[:, now] + model.reuse[at[:, None], _AGE_CLASS[age[:, now]]]
        if wander is not None:
            wander[:, now] *= np.float32(keep)
            wander[:, now] += np.float32(push) * rng.standard_normal(logits.shape, np.float32)
            logits += wander[:, now]
        if model.lift is not None and model.dependence is not None:
            spoken = model.lift[at, before[:, at - 1, 0]]  # layer 0 has a factor of zero
            for place in range(1, top_k):
                spoken += model.lift[at, before[:, at - 1, place]]
            logits += model.dependence[at, None] * spoken
        chosen = _choose(_inclusion(logits.reshape(-1, experts), top_k), top_k, rng).reshape(sequences, len(at), top_k)
        best = np.take_along_axis(logits, chosen, axis=2)
        chosen = np.take_along_axis(chosen, np.argsort(-best, axis=2, kind="stable"), axis=2)
        drawn[:, wave - at, at] = chosen
        before[:, now] = chosen
        grown = age[:, now]
        grown += grown < _OLDEST
        np.put_along_axis(grown, chosen, 1, axis=2)
    return drawn


def _inclusion(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Probabilities ``min(1, λ exp(logits))`` [N, E] that add up to K in each row."""
    weight = np.exp(logits - logits.max(axis=1, keepdims=True))
    if top_k >= weight.shape[1]:
        return np.ones_like(weight)
    weight *= top_k / weight.sum(axis=1, keepdims=True)
    rows = np.flatnonzero(weight.max(axis=1) > 1)
    sure = np.zeros((len(rows), weight.shape[1]), bool)
    while len(rows):
        part = weight[rows]
        sure |= part > 1
        part[sure] = 0
        left = top_k - sure.sum(axis=1, keepdims=True)
        part *= left / np.maximum(part.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        weight[rows] = np.where(sure, 1, part)
        again = part.max(axis=1) > 1
        rows, sure = rows[again], sure[again]
    return weight


def _choose(inclusion: np.ndarray, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Int [N, K] distinct experts, each with its probability [N, E]: systematic sampling in one random order."""
    count, experts = inclusion.shape
    order = rng.permutation(experts)
    reached = np.cumsum(inclusion[:, order], axis=1)
    reached *= top_k / reached[:, -1:]
    reached += rng.random((count, 1), np.float32)
    steps = np.minimum(reached, top_k).astype(np.int16)
    steps[:, -1] = top_k
    hit = np.empty(steps.shape, bool)
    hit[:, 0] = steps[:, 0] > 0
    np.not_equal(steps[:, 1:], steps[:, :-1], out=hit[:, 1:])
    short = np.flatnonzero(hit.sum(axis=1) != top_k)
    if len(short):  # a rounding error let one probability of 1 span two steps: take the most likely ones
        hit[short] = False
        hit[short[:, None], np.argsort(-inclusion[short][:, order], axis=1, kind="stable")[:, :top_k]] = True
    chosen: np.ndarray = order[np.nonzero(hit)[1].reshape(count, top_k)]
    return chosen


# -- fitting ---------------------------------------------------------------------------------------------


def _sample(trace: Trace, tokens: int) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Routing [T, L, K] of some whole sequences, and (prompt, generated) of all."""
    layers = trace.shape.layers
    lengths: list[tuple[int, int]] = []
    rows_of: list[int] = []
    for rows in trace.sequences():
        prompt = len(np.unique(rows.pos[rows.phase == Phase.PREFILL]))
        lengths.append((prompt, int(np.count_nonzero(rows.phase == Phase.DECODE)) // layers))
        rows_of.append(sum(lengths[-1]))
    share = min(1.0, tokens / max(1, sum(rows_of)))
    wanted = set(
        np.unique(np.linspace(0, len(lengths) - 1, max(1, round(share * len(lengths)))).round()).astype(int).tolist()
    )
    chosen = []
    for number, rows in enumerate(trace.sequences()):
        if number in wanted:
            _, token, held = np.unique(rows.pos, return_inverse=True, return_counts=True)
            kept = (held == layers)[token.reshape(-1)]
            if kept.any():
                chosen.append(rows.experts[kept].reshape(-1, layers, trace.shape.top_k)[: max(tokens, 1)])
    if not chosen:
        raise TraceError(f"{trace.path}: expected tokens with all {layers} layers to fit to, found none")
    return chosen, lengths


def _flat(routing: np.ndarray, shape: ModelShape) -> np.ndarray:
    return (routing + np.arange(shape.layers)[:, None] * shape.experts).reshape(-1)


def _scaled(model: SynthModel, chosen: list[np.ndarray]) -> SynthModel:
    """Move popularity, reuse and dependence until the real tokens' probabilities add up to what they did.

    The past is the real one here, so layers are independent of each other.
    """
    shape = model.shape
    popularity, reuse = model.popularity.copy(), model.reuse.copy()
    dependence = np.zeros(shape.layers, np.float32)
    lift = np.zeros((shape.layers, shape.experts, shape.experts), np.float32)
    topic = np.minimum(np.repeat(np.arange(len(chosen)), [len(one) for one in chosen]), len(model.topics) - 1)
    whole = np.concatenate(chosen)
    for layer in range(shape.layers):
        past = [_past(one[:, layer], shape.experts) for one in chosen]
        classes, made = (np.concatenate(parts) for parts in zip(*past, strict=True))
        spoken = np.zeros(classes.shape, np.float32)
        if layer:
            lift[layer] = _lift(whole[:, layer - 1], whole[:, layer], np.exp(model.popularity[layer]))
            for place in range(shape.top_k):
                spoken += lift[layer][whole[:, layer - 1, place]]
        own = model.topics[topic, layer]
        real = made.sum(axis=0)
        real_age = np.bincount(classes[made], minlength=_CLASSES)
        for _ in range(_SWEEPS):
            logits = popularity[layer] + own + reuse[layer][classes] + dependence[layer] * spoken
            odds = _inclusion(logits, shape.top_k)
            due_age = np.bincount(classes.reshape(-1), odds.reshape(-1), _CLASSES)
            popularity[layer] += 0.5 * np.log((real + _PRIOR) / (odds.sum(axis=0) + _PRIOR))
            reuse[layer] += 0.8 * np.log((real_age + _PRIOR) / (due_age + _PRIOR))
            curve = float((odds * (1 - odds) * spoken**2).sum())
            if curve > 0:
                step = 0.7 * float(((made - odds) * spoken).sum()) / curve
                dependence[layer] = np.clip(dependence[layer] + step, 0, 1)
    return replace(model, popularity=popularity, reuse=reuse, dependence=dependence, lift=lift)


def _lift(below: np.ndarray, here: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Shrunken log-lifts float32 [E, E] of pairs in adjacent layers, from their routing [N, K] each."""
    experts = len(share)
    pairs = below[:, :, None].astype(np.int64) * experts + here[:, None, :]
    both = np.bincount(pairs.reshape(-1), minlength=experts**2).reshape(experts, -1)
    alone = both.sum(axis=1, keepdims=True) * share
    return np.log((both + _LIFT_PRIOR) / (alone + _LIFT_PRIOR)).astype(np.float32)


def _freed(model: SynthModel, chosen: list[np.ndarray]) -> SynthModel:
    """Correct what changes when the past is the model's own: draw, compare counts with the real ones, move, again."""
    shape = model.shape
    some = [chosen[index] for index in np.unique(np.linspace(0, len(chosen) - 1, _FREE_SEQUENCES).astype(int))]
    tokens = min(_FREE_TOKENS, max(len(one) for one in some))
    real, real_age = _counts([one[:tokens] for one in chosen], shape)
    sequences = max(4, _FREE_SEQUENCES * 64 // max(tokens, 64))
    best, least = model, np.inf
    for round_ in range(_FREE_ROUNDS + 1):
        drawn = draw(model, tokens, sequences, np.random.default_rng(round_))
        made, made_age = _counts(list(drawn), shape)
        error = float(np.abs(made_age - real_age).sum())
        if error < least:
            best, least = model, error
        pull = 0.7 / (1 + 0.25 * round_)
        popularity = model.popularity + 0.5 * pull * np.log((real + _FLOOR) / (made + _FLOOR))
        reuse = model.reuse + pull * np.log((real_age + _FLOOR) / (made_age + _FLOOR))
        model = replace(model, popularity=popularity.astype(np.float32), reuse=reuse.astype(np.float32))
    return best


def _counts(routing: list[np.ndarray], shape: ModelShape) -> tuple[np.ndarray, np.ndarray]:
    """Shares of all choices by expert [L, E] and by class of age [L, A]."""
    by_expert, by_age = np.zeros((shape.layers, shape.experts)), np.zeros((shape.layers, _CLASSES))
    for layer in range(shape.layers):
        for one in routing:
            classes, made = _past(one[:, layer], shape.experts)
            by_expert[layer] += made.sum(axis=0)
            by_age[layer] += np.bincount(classes[made], minlength=_CLASSES)
    return by_expert / by_expert.sum(axis=1, keepdims=True), by_age / by_age.sum(axis=1, keepdims=True)


def _past(routing: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Class of age of every expert before each token, uint8 [T, E], and whether the token chose it, bool [T, E]."""
    tokens = len(routing)
    made = np.zeros((tokens, experts), bool)
    np.put_along_axis(made, routing.astype(np.intp), values=True, axis=1)
    stamp = np.where(made, np.arange(tokens)[:, None], -_UNUSED * 4)
    last = np.maximum.accumulate(stamp, axis=0)
    before = np.concatenate([np.full((1, experts), -_UNUSED * 4), last[:-1]])
    age = np.arange(tokens)[:, None] - before
    age = np.where(before < 0, _UNUSED, np.minimum(age, _OLDEST))
    return _AGE_CLASS[age], made


def _with_reuse(model: SynthModel, wanted: float) -> SynthModel:
    """Raise the weight of the experts just used until their share is as wanted."""
    low, high = 0.0, 12.0
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
    """Mean share of a token's experts that the token before used, over a short draw of some layers."""
    few = min(model.shape.layers, 4)
    part = replace(
        model, shape=replace(model.shape, layers=few, expert_bytes=model.shape.expert_bytes[:few]),
        popularity=model.popularity[:few], reuse=model.reuse[:few], topics=model.topics[:, :few],
        lift=None if model.lift is None else model.lift[:few],
        dependence=None if model.dependence is None else model.dependence[:few],
    )  # fmt: skip
    drawn = draw(part, 48, 16, np.random.default_rng(0)).astype(np.int32)
    same = (drawn[:, 1:, :, :, None] == drawn[:, :-1, :, None, :]).any(axis=4)
    return float(same[:, 8:].mean())
