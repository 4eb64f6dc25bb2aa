"""What a real trace teaches a synthetic one: habits, raised or lowered until they do
what the real tokens did.

First popularity and reuse, with the real past at hand, by iterative scaling; then all
habits at once, with a past that the model itself draws, by comparing counts, ages and
the bits that adjacent layers share.

Source: Darroch and Ratcliff (1972) for iterative scaling. Letters as in
`moesim.traces.synthetic.draw`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import Phase
from moesim.traces.stats.counting_kernels import count_pairs
from moesim.traces.stats.similarity import mutual_information_bits
from moesim.traces.synthetic.draw import (
    AGE_CLASS,
    CLASSES,
    OLDEST,
    UNUSED,
    Kinds,
    SynthModel,
    draw,
    inclusion,
)

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

FIT_TOKENS = 8192
"""Tokens of a real trace that are looked at, whole sequences spread over it."""
_SWEEPS = 8
_TOPICS = 48
_PRIOR = 0.25
_TOPIC_PRIOR = 32.0
_FREE_ROUNDS = 11
_FREE_SEQUENCES = 12
_FREE_TOKENS = 512
_FREE_DRAWN = 1536
_FLOOR = 1e-4
_FLOOR_BITS = 0.02
_KIND_TOKENS = 8
_MOST_KINDS = 128
_KIND_PRIOR = 4.0
_PROJECTED = 256
_MOST_CHARACTER = 6.0


def fit(trace: Trace, *, tokens: int = FIT_TOKENS) -> SynthModel:
    """Learn popularity, reuse, topics and kinds of tokens from a real trace.

    Args:
        trace: an opened trace.
        tokens: how many of its tokens to look at; whole sequences, spread evenly.

    Raises:
        TraceError: the trace is damaged, or no sequence has every layer for every token
            of its decode.
    """
    chosen, lengths = _sample(trace, tokens)
    shape = trace.shape
    seen = np.stack(
        [
            np.bincount(_flat(one, shape), minlength=shape.layers * shape.experts)
            for one in chosen
        ]
    )
    seen = seen.reshape(len(chosen), shape.layers, shape.experts)
    count = seen.sum(axis=0)
    share = (count + _PRIOR) / (count + _PRIOR).sum(axis=1, keepdims=True)
    own = (seen + _TOPIC_PRIOR * share) / (
        seen.sum(axis=2, keepdims=True) + _TOPIC_PRIOR
    )
    topics = np.log(own / share) if len(chosen) > 1 else np.zeros((1, *share.shape))
    model = SynthModel(
        shape,
        np.log(share).astype(np.float32),
        np.zeros((shape.layers, CLASSES), np.float32),
        topics.astype(np.float32),
        lengths=tuple(lengths),
        told={
            "like": trace.path.name,
            "model": shape.name,
            "fitted_tokens": sum(len(one) for one in chosen),
        },
    )
    kinds = _kinds(chosen, shape, share)
    model, kinds = _freed(_scaled(model, chosen), kinds, chosen)
    keep = (
        np.linspace(0, len(model.topics) - 1, min(_TOPICS, len(model.topics)))
        .round()
        .astype(int)
    )
    courses = [
        kinds.course[kinds.first[index] : kinds.first[index + 1]] for index in keep
    ]
    return replace(
        model,
        topics=model.topics[keep],
        kinds=replace(kinds, course=np.concatenate(courses), first=_begins(courses)),
    )


def _begins(parts: list[np.ndarray]) -> np.ndarray:
    """int64 [P + 1]: where each part begins when they lie behind each other, and the
    end.
    """
    return np.cumsum([0, *(len(part) for part in parts)])


def _kinds(chosen: list[np.ndarray], shape: ModelShape, share: np.ndarray) -> Kinds:
    """Kinds of tokens, by log-lifts over `share`: those of a kind use similar experts
    at all layers.

    K-means, on random projections of what each token uses.

    Source: Lloyd (1957); Johnson and Lindenstrauss (1984) for projections that keep
    distances.
    """
    rng = np.random.default_rng(0)
    whole = (
        np.concatenate(chosen).astype(np.intp)
        + np.arange(shape.layers)[:, None] * shape.experts
    )
    places = np.zeros((len(whole), _PROJECTED), np.float32)
    directions = rng.standard_normal((shape.layers * shape.experts, _PROJECTED)).astype(
        np.float32
    )
    for layer in range(shape.layers):
        for place in range(shape.top_k):
            places += directions[whole[:, layer, place]]
    count = int(np.clip(len(whole) // _KIND_TOKENS, 1, _MOST_KINDS))
    centres = places[rng.choice(len(whole), count, replace=False)]
    for _ in range(_SWEEPS):
        kind = np.argmax(places @ centres.T - (centres**2).sum(axis=1) / 2, axis=1)
        sizes = np.bincount(kind, minlength=count)
        sums = (kind == np.arange(count)[:, None]).astype(np.float32) @ places
        centres = np.where(
            sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres
        )
    width = shape.layers * shape.experts
    used = np.bincount(
        (kind[:, None, None] * width + whole).reshape(-1), minlength=count * width
    )
    used = used.reshape(count, shape.layers, shape.experts)
    own = (used + _KIND_PRIOR * share) / (used.sum(axis=2, keepdims=True) + _KIND_PRIOR)
    return Kinds(
        np.log(own / share).astype(np.float32),
        np.ones(shape.layers, np.float32),
        kind,
        _begins(chosen),
    )


def _sample(
    trace: Trace, tokens: int
) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Routing [T, L, K] of some whole sequences, and (prompt, generated) of all."""
    layers = trace.shape.layers
    lengths: list[tuple[int, int]] = []
    rows_of: list[int] = []
    for rows in trace.sequences():
        prompt = len(np.unique(rows.pos[rows.phase == Phase.PREFILL]))
        lengths.append(
            (prompt, int(np.count_nonzero(rows.phase == Phase.DECODE)) // layers)
        )
        rows_of.append(sum(lengths[-1]))
    share = min(1.0, tokens / max(1, sum(rows_of)))
    wanted = set(
        np.unique(
            np.linspace(
                0, len(lengths) - 1, max(1, round(share * len(lengths)))
            ).round()
        )
        .astype(int)
        .tolist()
    )
    chosen = []
    for number, rows in enumerate(trace.sequences()):
        if number in wanted:
            _, token, held = np.unique(
                rows.pos, return_inverse=True, return_counts=True
            )
            kept = (held == layers)[token.reshape(-1)]
            if kept.any():
                chosen.append(
                    rows.experts[kept].reshape(-1, layers, trace.shape.top_k)[
                        : max(tokens, 1)
                    ]
                )
    if not chosen:
        raise TraceError(
            f"{trace.path}: expected tokens with all {layers} layers to fit to, found"
            " none"
        )
    return chosen, lengths


def _flat(routing: np.ndarray, shape: ModelShape) -> np.ndarray:
    return (routing + np.arange(shape.layers)[:, None] * shape.experts).reshape(-1)


def _scaled(model: SynthModel, chosen: list[np.ndarray]) -> SynthModel:
    """Move popularity and reuse until the real tokens' probabilities add up to what
    they did.

    The past is the real one here, so layers are independent of each other; no token has
    a kind.
    """
    shape = model.shape
    popularity = model.popularity.copy()
    reuse = model.reuse.copy()
    topic = np.repeat(np.arange(len(chosen)), [len(one) for one in chosen])
    for layer in range(shape.layers):
        past = [_past(one[:, layer], shape.experts) for one in chosen]
        classes, made = (np.concatenate(parts) for parts in zip(*past, strict=True))
        own = model.topics[topic, layer]
        real = made.sum(axis=0)
        real_age = np.bincount(classes[made], minlength=CLASSES)
        for _ in range(_SWEEPS):
            odds = inclusion(
                popularity[layer] + own + reuse[layer][classes], shape.top_k
            )
            due_age = np.bincount(classes.reshape(-1), odds.reshape(-1), CLASSES)
            popularity[layer] += 0.5 * np.log(
                (real + _PRIOR) / (odds.sum(axis=0) + _PRIOR)
            )
            reuse[layer] += 0.8 * np.log((real_age + _PRIOR) / (due_age + _PRIOR))
    return replace(model, popularity=popularity, reuse=reuse)


def _freed(
    model: SynthModel, kinds: Kinds, chosen: list[np.ndarray]
) -> tuple[SynthModel, Kinds]:
    """Correct what changes when the past is the model's own: draw, compare with the
    real tokens, move, again.

    Popularity and reuse follow counts, character follows the bits that a layer shares
    with its neighbours. Both sides estimate those bits from sequences of the same
    topics and lengths, so the bias of the estimate is the same.
    """
    shape = model.shape
    some = np.unique(np.linspace(0, len(chosen) - 1, _FREE_SEQUENCES).astype(int))
    tokens = min(_FREE_TOKENS, max(len(one) for one in chosen))
    real, real_age = _counts([one[:tokens] for one in chosen], shape)
    parts = [chosen[index][:tokens] for index in some]
    real_bits = shared_bits(parts, shape)
    copies = max(1, round(_FREE_DRAWN / sum(len(one) for one in parts)))
    topics = np.tile(some, copies)
    best = (model, kinds)
    least = np.inf
    for round_ in range(_FREE_ROUNDS + 1):
        drawn = draw(
            replace(model, kinds=kinds),
            tokens,
            len(topics),
            np.random.default_rng(round_),
            topics,
        )
        made = [drawn[n, : len(parts[n % len(parts)])] for n in range(len(topics))]
        bits = np.mean(
            [
                shared_bits(made[n * len(some) :][: len(some)], shape)
                for n in range(copies)
            ],
            axis=0,
        )
        share, age = _counts(made, shape)
        off = np.log((real_bits + _FLOOR_BITS) / (bits + _FLOOR_BITS))
        error = float(np.abs(age - real_age).sum(axis=1).mean()) + float(
            np.abs(off).sum()
        ) / max(len(off), 1)
        if error < least:
            best = (model, kinds)
            least = error
        pull = 0.7 / (1 + 0.25 * round_)
        popularity = model.popularity + 0.5 * pull * np.log(
            (real + _FLOOR) / (share + _FLOOR)
        )
        reuse = model.reuse + pull * np.log((real_age + _FLOOR) / (age + _FLOOR))
        model = replace(
            model,
            popularity=popularity.astype(np.float32),
            reuse=reuse.astype(np.float32),
        )
        if len(off):
            # Of the pairs below and above.
            around = np.concatenate((off[:1], off)) + np.concatenate((off, off[-1:]))
            character = np.clip(kinds.character + pull * around, 0, _MOST_CHARACTER)
            kinds = replace(kinds, character=character.astype(np.float32))
    return best


def shared_bits(routing: list[np.ndarray], shape: ModelShape) -> np.ndarray:
    """float64 [L - 1]: plug-in mutual information of adjacent layers, from the routing
    [T, L, K] of sequences.
    """
    joint = np.zeros((shape.layers - 1, shape.experts, shape.experts), np.int64)
    for one in routing:
        count_pairs(np.ascontiguousarray(one), joint)
    return np.array([mutual_information_bits(table) for table in joint])


def _counts(
    routing: list[np.ndarray], shape: ModelShape
) -> tuple[np.ndarray, np.ndarray]:
    """Shares of all choices by expert [L, E] and by class of age [L, A]."""
    by_expert = np.zeros((shape.layers, shape.experts))
    by_age = np.zeros((shape.layers, CLASSES))
    for layer in range(shape.layers):
        for one in routing:
            classes, made = _past(one[:, layer], shape.experts)
            by_expert[layer] += made.sum(axis=0)
            by_age[layer] += np.bincount(classes[made], minlength=CLASSES)
    return by_expert / by_expert.sum(axis=1, keepdims=True), by_age / by_age.sum(
        axis=1, keepdims=True
    )


def _past(routing: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Class of age of every expert before each token, uint8 [T, E], and whether the
    token chose it, bool [T, E].
    """
    tokens = len(routing)
    made = np.zeros((tokens, experts), bool)
    np.put_along_axis(made, routing.astype(np.intp), values=True, axis=1)
    stamp = np.where(made, np.arange(tokens)[:, None], -UNUSED * 4)
    last = np.maximum.accumulate(stamp, axis=0)
    before = np.concatenate([np.full((1, experts), -UNUSED * 4), last[:-1]])
    age = np.arange(tokens)[:, None] - before
    age = np.where(before < 0, UNUSED, np.minimum(age, OLDEST))
    return AGE_CLASS[age], made
