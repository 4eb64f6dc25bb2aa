"""Draws synthetic routing: habits, added as log-weights, and K experts by systematic
sampling.

At every layer a token chooses K distinct experts. How likely each is follows from four
habits:

- *popularity*: some experts are chosen more often, by all sequences or by those of one
  topic (`topics`);
- *reuse*: an expert used `age` tokens ago is more (or less) likely than its popularity
  says;
- *kind*: tokens come in kinds, and each kind has favourites at all layers at once,
  which ties all layers together;
- *drift*: popularity wanders while a sequence lasts.

Texts begin alike: tokens of one kind among the first of a sequence choose with the same
chance, in all draws, as a model answers the same words with the same experts.

What belongs to a text and not to the model is told from it by `permuted`: that share of
a layer's experts swap their parts at random in every sequence, so that a sequence is as
it was fitted and a batch of them is not of one topic.

The weights w are turned into inclusion probabilities ``min(1, λ w)`` that add up to K,
and K experts are drawn by systematic sampling in random order, which keeps these
probabilities exactly.

Source: Madow (1949) for systematic sampling.

Letters: B sequences side by side, T tokens, L MoE layers, E experts, K per token, A
classes of age, Q topics, Z kinds, X real tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.stats.routing_curves import Likeness

# First tokens of a sequence, whose kinds are those of a real text at the same place.
ALIKE_TOKENS = 8
# Behind them a run of kinds begins at most so far from the place of its first token in
# the sequence, and is so long, in the mean.
NEAR_TOKENS = 32
RUN_TOKENS = 8

# Lower ends of the classes of age in tokens; one more class holds what a sequence never
# used.
AGE_EDGES = np.array([1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 257, 513])
NEVER = len(AGE_EDGES)
CLASSES = NEVER + 1
# Ages are counted up to here; `UNUSED` stands for "not yet".
OLDEST = 513
UNUSED = OLDEST + 1


def _age_classes() -> np.ndarray:
    """uint8 [UNUSED + 1]: the class of each age, from 0 on."""
    widths = np.diff(np.append(AGE_EDGES, OLDEST + 1))
    by_age = np.repeat(np.arange(NEVER), widths)
    return np.concatenate([[0], by_age, [NEVER]]).astype(np.uint8)


AGE_CLASS = _age_classes()


@dataclass(frozen=True, slots=True)
class TokenKinds:
    """Kinds of tokens, and how they follow each other.

    Attributes:
        weights: float32 [Z, L, E] log-weights added for tokens of a kind.
        character: float32 [L], the factor of `weights`.
        course: int64 [X], the kinds of real tokens in their order, topic after topic.
        first: int64 [Q + 1], where those of each topic begin.
    """

    weights: np.ndarray
    character: np.ndarray
    course: np.ndarray
    first: np.ndarray


@dataclass(frozen=True, slots=True)
class SynthModel:
    """The model that `synthesise` draws from.

    Attributes:
        shape: the model.
        popularity: float32 [L, E] log-weights.
        reuse: float32 [L, A] log-weights by class of age.
        topics: float32 [Q, L, E] log-weights added for a whole sequence; each sequence
            draws one.
        kinds: of tokens; None for no kinds.
        drift: standard deviation that popularity reaches while wandering, in
            log-weight.
        drift_tokens: after so many tokens it has forgotten 63 % of where it was.
        permuted: share of a layer's experts that swap their parts in each sequence.
        lengths: (prompt, generated) tokens of sequences; drawn with equal chance.
        provenance: where the model comes from, for the trace's header.
        likeness: what is drawn against what is real; None where nothing real is known.
    """

    shape: ModelShape
    popularity: np.ndarray
    reuse: np.ndarray
    topics: np.ndarray
    kinds: TokenKinds | None = None
    drift: float = 0.0
    drift_tokens: float = 256.0
    permuted: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ((0, 512),)
    provenance: dict[str, Any] = field(default_factory=dict)
    likeness: Likeness | None = None


def draw(
    model: SynthModel,
    tokens: int,
    sequences: int,
    rng: np.random.Generator,
    topics: np.ndarray | None = None,
) -> np.ndarray:
    """Draw the routing of some sequences, side by side.

    Given a token's kind, layers are independent of each other: all are drawn at once.

    Args:
        model: what to draw from.
        tokens: of each sequence.
        sequences: B.
        rng: where chance comes from.
        topics: int [B], the topic of each sequence; None draws them.

    Returns:
        Experts by descending weight: uint16 [B, T, L, K].
    """
    layers, experts = model.popularity.shape
    top_k = model.shape.top_k

    if topics is None:
        topics = rng.integers(len(model.topics), size=sequences)
    base = model.popularity + model.topics[topics]
    kinds = model.kinds
    kind = None if kinds is None else _draw_kinds(kinds, topics, tokens, rng)
    drift = _drift(model, base.shape, rng)

    age = np.full((sequences, layers, experts), UNUSED, np.int16)
    drawn = np.empty((sequences, tokens, layers, top_k), np.uint16)
    layer = np.arange(layers)[:, None]
    for token in range(tokens):
        # The order of these sums decides the last bit of each weight.
        logits = base + model.reuse[layer, AGE_CLASS[age]]
        if model.drift:
            logits += next(drift)
        chance = rng
        offset = None
        if kinds is not None and kind is not None:
            logits += kinds.character[:, None] * kinds.weights[kind[:, token]]
            if token < ALIKE_TOKENS:
                chance = np.random.default_rng(token)
                of_kind = chance.random((len(kinds.weights), layers), np.float32)
                offset = of_kind[kind[:, token]].reshape(-1, 1)

        odds = inclusion(logits.reshape(-1, experts), top_k)
        chosen = choose(odds, top_k, chance, offset).reshape(sequences, layers, top_k)
        weights = np.take_along_axis(logits, chosen, axis=2)
        by_weight = np.argsort(-weights, axis=2, kind="stable")
        drawn[:, token] = np.take_along_axis(chosen, by_weight, axis=2)

        age += age < OLDEST
        np.put_along_axis(age, chosen, 1, axis=2)

    if model.permuted:
        _permute(drawn, model, rng)
    return drawn


def _permute(drawn: np.ndarray, model: SynthModel, rng: np.random.Generator) -> None:
    """Swap the parts of some experts, others in every sequence and layer, in place."""
    experts = np.arange(model.shape.experts, dtype=drawn.dtype)
    for routing in drawn:
        for layer in range(model.shape.layers):
            moved = np.flatnonzero(rng.random(len(experts)) < model.permuted)
            parts = experts.copy()
            parts[moved] = rng.permutation(moved)
            routing[:, layer] = parts[routing[:, layer]]


def _drift(
    model: SynthModel, shape: tuple[int, ...], rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Popularity's wandering, token by token: an Ornstein-Uhlenbeck walk of every
    weight.
    """
    keep = math.exp(-1 / model.drift_tokens)
    # So large that the walk's variance stays at that of `drift`.
    push = np.float32(model.drift * math.sqrt(1 - keep * keep))
    offset = np.zeros(shape, np.float32)
    while True:
        noise = rng.standard_normal(shape, np.float32)
        offset = np.float32(keep) * offset + push * noise
        yield offset


def _draw_kinds(
    kinds: TokenKinds, topics: np.ndarray, tokens: int, rng: np.random.Generator
) -> np.ndarray:
    """Int [B, T]: each token's kind: runs of those that the topic's real tokens had at
    about the same place.
    """
    first = kinds.first[topics][:, None]
    count = kinds.first[topics + 1][:, None] - first

    # Where a run that begins at each token would begin among the real ones.
    place = np.arange(tokens) % count
    near = np.clip((place - ALIKE_TOKENS) // 2, 0, NEAR_TOKENS)
    low = place - near
    high = np.minimum(place + near, count - 1)
    further = rng.random(place.shape) * (high - low + 1)
    start = low + further.astype(np.int64)

    begins = rng.random(place.shape) * RUN_TOKENS < 1
    begins[:, 0] = True
    token = np.arange(tokens)
    run_begin = np.maximum.accumulate(np.where(begins, token, 0), axis=1)
    along = np.take_along_axis(start, run_begin, axis=1) + token - run_begin
    return np.asarray(kinds.course[first + along % count])


def inclusion(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Return probabilities ``min(1, λ exp(logits))`` [N, E] that add up to K in each
    row.
    """
    # The largest logit becomes 0, so that no power overflows.
    weight = np.exp(logits - logits.max(axis=1, keepdims=True))
    if top_k >= weight.shape[1]:
        return np.ones_like(weight)

    weight *= top_k / weight.sum(axis=1, keepdims=True)
    tiny = np.finfo(np.float32).tiny

    # Rows with a probability above 1: cut it, share the rest among the others, again.
    rows = np.flatnonzero(weight.max(axis=1) > 1)
    certain = np.zeros((len(rows), weight.shape[1]), bool)
    while len(rows):
        part = weight[rows]
        certain |= part > 1
        part[certain] = 0
        left = top_k - certain.sum(axis=1, keepdims=True)
        part *= left / np.maximum(part.sum(axis=1, keepdims=True), tiny)
        weight[rows] = np.where(certain, 1, part)

        again = part.max(axis=1) > 1
        rows = rows[again]
        certain = certain[again]

    return weight


def choose(
    inclusion: np.ndarray,
    top_k: int,
    rng: np.random.Generator,
    offset: np.ndarray | None = None,
) -> np.ndarray:
    """Draw distinct experts, each with its probability [N, E], by systematic sampling
    in one random order: int [N, K].

    Rows of equal `offset`, float32 [N, 1] below 1, and alike probabilities choose
    alike; None draws one for each.
    """
    count, experts = inclusion.shape
    order = rng.permutation(experts)

    # The probabilities of a row, laid end to end, reach K. Behind one random offset
    # there is a mark at every whole number; an expert is drawn if its part holds one.
    reached = np.cumsum(inclusion[:, order], axis=1)
    reached *= top_k / reached[:, -1:]
    reached += rng.random((count, 1), np.float32) if offset is None else offset
    marks = np.minimum(reached, top_k).astype(np.int16)
    marks[:, -1] = top_k

    drawn = np.empty(marks.shape, bool)
    drawn[:, 0] = marks[:, 0] > 0
    np.not_equal(marks[:, 1:], marks[:, :-1], out=drawn[:, 1:])

    # A rounding error may let a probability of 1 hold two marks: then the most likely
    # experts are taken.
    short = np.flatnonzero(drawn.sum(axis=1) != top_k)
    if len(short):
        by_odds = np.argsort(-inclusion[short][:, order], axis=1, kind="stable")
        drawn[short] = False
        drawn[short[:, None], by_odds[:, :top_k]] = True

    places = np.nonzero(drawn)[1].reshape(count, top_k)
    chosen: np.ndarray = order[places]
    return chosen
