"""How routing that nobody recorded is drawn: habits, added as log-weights, and K
experts by systematic sampling.

At every layer a token chooses K distinct experts. How likely each is follows from five
habits:

- *popularity*: some experts are chosen more often, by all sequences or by those of one
  topic (`topics`);
- *reuse*: an expert used `age` tokens ago is more (or less) likely than its popularity
  says;
- *kind*: tokens come in kinds, and each kind has favourites at all layers at once,
  which ties all layers together;
- *dependence*: the experts chosen one layer below speak for some experts here;
- *drift*: popularity wanders while a sequence lasts.

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
    from moesim.traces.format.schema import ModelShape

NEAR_TOKENS = 32
"""A run of kinds begins at most so far from the place of its first token in the
sequence,
"""
RUN_TOKENS = 8
"""and is so long, in the mean."""
AGE_EDGES = np.array([1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 257, 513])
"""Lower ends of the classes of age in tokens; one more class holds what a sequence
never used.
"""
NEVER = len(AGE_EDGES)
CLASSES = NEVER + 1
_AGE_OF = np.concatenate(
    [np.repeat(np.arange(NEVER), np.diff(np.append(AGE_EDGES, 514))), [NEVER]]
).astype(np.uint8)
OLDEST = 513
"""Ages are counted up to here; `UNUSED` stands for "not yet"."""
UNUSED = OLDEST + 1
AGE_CLASS = np.concatenate([[0], _AGE_OF[:OLDEST], [NEVER]]).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of tokens, and how they follow each other.

    Attributes:
        weights: float32 [Z, L, E] log-weights added for tokens of a kind.
        character: float32 [L], the factor of `weights`.
        course: int64 [X], the kinds of real tokens in their order, topic behind topic.
        first: int64 [Q + 1], where those of each topic begin.
    """

    weights: np.ndarray
    character: np.ndarray
    course: np.ndarray
    first: np.ndarray


@dataclass(frozen=True, slots=True)
class SynthModel:
    """What `synthesise` draws from.

    Attributes:
        shape: the model.
        popularity: float32 [L, E] log-weights.
        reuse: float32 [L, A] log-weights by class of age.
        topics: float32 [Q, L, E] log-weights added for a whole sequence; each sequence
            draws one.
        kinds: of tokens; None for no kinds.
        lift: float32 [L, E, E]: what expert i of layer l-1 adds to expert e of layer l;
            None for no dependence.
        dependence: float32 [L], the factor of `lift`.
        drift: standard deviation that popularity reaches while wandering, in
            log-weight.
        drift_tokens: after so many tokens it has forgotten 63 % of where it was.
        lengths: (prompt, generated) tokens of sequences; drawn with equal chance.
        told: where the model comes from, for the trace's provenance.
    """

    shape: ModelShape
    popularity: np.ndarray
    reuse: np.ndarray
    topics: np.ndarray
    kinds: Kinds | None = None
    lift: np.ndarray | None = None
    dependence: np.ndarray | None = None
    drift: float = 0.0
    drift_tokens: float = 256.0
    lengths: tuple[tuple[int, int], ...] = ((0, 512),)
    told: dict[str, Any] = field(default_factory=dict)


def draw(
    model: SynthModel,
    tokens: int,
    sequences: int,
    rng: np.random.Generator,
    topics: np.ndarray | None = None,
) -> np.ndarray:
    """uint16 [B, T, L, K]: this many sequences of this many tokens, experts by
    descending weight.

    `topics` int [B] says which topic each sequence has; None draws them.

    A layer waits for the layer below and for its own last token, so layers work like a
    pipeline: in wave w, layer l is at token w - l, and all layers are drawn at once.
    """
    shape = model.shape
    layers = shape.layers
    experts = shape.experts
    top_k = shape.top_k
    if topics is None:
        topics = rng.integers(len(model.topics), size=sequences)
    base = model.popularity + model.topics[topics]
    kinds = model.kinds
    kind = None if kinds is None else _kinds_of(kinds, topics, tokens, rng)
    age = np.full((sequences, layers, experts), UNUSED, np.int16)
    drawn = np.empty((sequences, tokens, layers, top_k), np.uint16)
    wander = np.zeros_like(base) if model.drift else None
    keep = math.exp(-1 / model.drift_tokens)
    push = model.drift * math.sqrt(1 - keep * keep)
    before = np.zeros((sequences, layers, top_k), np.intp)
    for wave in range(tokens + layers - 1):
        at = np.arange(max(0, wave - tokens + 1), min(layers, wave + 1))
        now = slice(at[0], at[-1] + 1)
        logits = base[:, now] + model.reuse[at[:, None], AGE_CLASS[age[:, now]]]
        if wander is not None:
            wander[:, now] *= np.float32(keep)
            wander[:, now] += np.float32(push) * rng.standard_normal(
                logits.shape, np.float32
            )
            logits += wander[:, now]
        if kinds is not None and kind is not None:
            logits += kinds.character[at, None] * kinds.weights[kind[:, wave - at], at]
        if model.lift is not None and model.dependence is not None:
            # Layer 0 has a factor of zero.
            spoken = model.lift[at, before[:, at - 1, 0]]
            for place in range(1, top_k):
                spoken += model.lift[at, before[:, at - 1, place]]
            logits += model.dependence[at, None] * spoken
        chosen = choose(
            inclusion(logits.reshape(-1, experts), top_k), top_k, rng
        ).reshape(sequences, len(at), top_k)
        best = np.take_along_axis(logits, chosen, axis=2)
        chosen = np.take_along_axis(
            chosen, np.argsort(-best, axis=2, kind="stable"), axis=2
        )
        drawn[:, wave - at, at] = chosen
        before[:, now] = chosen
        grown = age[:, now]
        grown += grown < OLDEST
        np.put_along_axis(grown, chosen, 1, axis=2)
    return drawn


def _kinds_of(
    kinds: Kinds, topics: np.ndarray, tokens: int, rng: np.random.Generator
) -> np.ndarray:
    """Int [B, T]: each token's kind: runs of those that the topic's real tokens had at
    about the same place.
    """
    first = kinds.first[topics][:, None]
    count = kinds.first[topics + 1][:, None] - first
    at = np.arange(tokens) % count
    low = np.maximum(at - NEAR_TOKENS, 0)
    high = np.minimum(at + NEAR_TOKENS, count - 1)
    start = low + (rng.random(at.shape) * (high - low + 1)).astype(np.int64)
    begins = rng.random(at.shape) * RUN_TOKENS < 1
    begins[:, 0] = True
    begun = np.maximum.accumulate(np.where(begins, np.arange(tokens), 0), axis=1)
    along = np.take_along_axis(start, begun, axis=1) + np.arange(tokens) - begun
    return np.asarray(kinds.course[first + along % count])


def inclusion(logits: np.ndarray, top_k: int) -> np.ndarray:
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
        part *= left / np.maximum(
            part.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny
        )
        weight[rows] = np.where(sure, 1, part)
        again = part.max(axis=1) > 1
        rows = rows[again]
        sure = sure[again]
    return weight


def choose(inclusion: np.ndarray, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Int [N, K] distinct experts, each with its probability [N, E]: systematic
    sampling in one random order.
    """
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
    if len(
        short
        # a rounding error let one probability of 1 span two steps: take the most likely
        # ones
    ):
        hit[short] = False
        hit[
            short[:, None],
            np.argsort(-inclusion[short][:, order], axis=1, kind="stable")[:, :top_k],
        ] = True
    chosen: np.ndarray = order[np.nonzero(hit)[1].reshape(count, top_k)]
    return chosen
