"""Fits a synthetic model to a real trace: habits, raised or lowered until they do what
the real tokens did.

First popularity and reuse, with the real past at hand, by iterative scaling; then all
habits at once, with a past that the model itself draws, by comparing counts, ages and
the bits that adjacent layers share.

Source: Darroch and Ratcliff (1972) for iterative scaling. Letters as in
`moesim.traces.synthetic.draw`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.errors import TraceError
from moesim.traces.format.schema import Phase
from moesim.traces.stats.routing_curves import (
    MOST_TOKENS,
    Likeness,
    mean_curves,
    routing_curves,
)
from moesim.traces.stats.statistics import (
    expert_uses,
    joint_counts,
    mutual_information_bits,
)
from moesim.traces.synthetic.draw import (
    AGE_CLASS,
    CLASSES,
    OLDEST,
    UNUSED,
    SynthModel,
    TokenKinds,
    draw,
    inclusion,
)
from moesim.traces.synthetic.marks import ENOUGH_SEQUENCES, FITTED_SEQUENCES, WIDTHS

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

# Tokens of a real trace that are looked at, whole sequences spread over it.
FIT_TOKENS = 8192
_SWEEPS = 8
# Topics kept, spread over the sequences that were looked at.
_TOPICS = 48

# Pseudo-counts of an expert's choices: by all tokens, by one sequence, by one kind.
# Without them an expert that was not seen could never be drawn.
_PRIOR = 0.25
_TOPIC_PRIOR = 32.0
_KIND_PRIOR = 4.0

# Rounds of drawing and comparing, and what is drawn in each.
_FREE_ROUNDS = 13
_FREE_SEQUENCES = 24
_FREE_TOKENS = 512
_FREE_DRAWN = 2304
# Sequences whose curves are compared, and the fewest that are drawn for it.
_COMPARED_SEQUENCES = 32
_LEAST_DRAWN = 8
# From so many sequences on, some are left out of the fit to be compared with: every
# fourth, or those that are not looked at anyway.
_LEAVE_OUT_FROM = 16
# Share of a single text's popularity that is the text's own: in traces of many texts,
# an expert that is popular in one keeps 0.41 (DeepSeek-V2-Lite) to 0.59 (tiny) of it in
# others, the root of the excess repetition between texts over that within them.
_OWN_PART = 0.5
# Added to shares and to bits before their ratio is taken.
_FLOOR = 1e-4
_FLOOR_BITS = 0.02

_KIND_TOKENS = 8
_MOST_KINDS = 128
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
    shape = trace.shape
    sequences, left_out, lengths = _sample(trace, tokens)
    share, topics = _popularity(sequences, shape)
    model = SynthModel(
        shape=shape,
        popularity=np.log(share).astype(np.float32),
        reuse=np.zeros((shape.layers, CLASSES), np.float32),
        topics=topics.astype(np.float32),
        kinds=_cluster_kinds(sequences, shape, share),
        lengths=tuple(lengths),
        provenance={
            **_origin(trace),
            "model": shape.name,
            "fitted_tokens": sum(len(routing) for routing in sequences),
            FITTED_SEQUENCES: len(sequences),
        },
    )

    model = _freed(_scaled(model, sequences), sequences)
    model = _with_topics(model, min(_TOPICS, len(sequences)))
    if len(sequences) < ENOUGH_SEQUENCES:
        model = replace(model, permuted=_OWN_PART / len(sequences))
    return replace(model, likeness=_likeness(model, left_out, sequences))


def _likeness(
    model: SynthModel, left_out: list[np.ndarray], fitted: list[np.ndarray]
) -> Likeness:
    """Curves of sequences that were left out of the fit, or of those that were fitted
    where there are no others, and of as many that are drawn.
    """
    real = (left_out or fitted)[:_COMPARED_SEQUENCES]
    lengths = [min(len(routing), MOST_TOKENS) for routing in real]
    experts = model.shape.experts
    rng = np.random.default_rng(0)

    # One text is one draw of chance, so several are drawn like it.
    drawn = []
    for _ in range(math.ceil(_LEAST_DRAWN / len(lengths))):
        routing = draw(model, max(lengths), len(lengths), rng)
        parts = [part[:length] for part, length in zip(routing, lengths, strict=True)]
        drawn.append(routing_curves(parts, experts))
    return Likeness(
        real=routing_curves(real, experts),
        drawn=mean_curves(drawn),
        left_out=len(left_out),
    )


def _origin(trace: Trace) -> dict[str, Any]:
    """Where the real tokens are from, as far as their header says so."""
    facts = trace.header.provenance
    like = trace.path.name
    # Likeness is not what it was, if the likeness of a likeness is drawn.
    if facts.get("synthetic") is True:
        like = f"{like}, itself synthetic, like {facts.get('like', 'nothing recorded')}"

    origin: dict[str, Any] = {"like": like}
    # Its experts have the sizes of these, so what was said of those holds here too.
    if WIDTHS in facts:
        origin[WIDTHS] = facts[WIDTHS]
    for name in ("source", "licence"):
        if name in facts:
            origin[f"like_{name}"] = str(facts[name])
    return origin


def _with_topics(model: SynthModel, count: int) -> SynthModel:
    """The model with `count` of its topics, spread evenly, and their courses of
    kinds.
    """
    kinds = model.kinds
    assert kinds is not None
    kept = np.linspace(0, len(model.topics) - 1, count).round().astype(int)
    courses = [
        kinds.course[kinds.first[index] : kinds.first[index + 1]] for index in kept
    ]
    kinds = replace(kinds, course=np.concatenate(courses), first=_edges(courses))
    return replace(model, topics=model.topics[kept], kinds=kinds)


def _edges(parts: list[np.ndarray]) -> np.ndarray:
    """int64 [P + 1]: where each part begins when they are joined, and the end."""
    return np.cumsum([0, *(len(part) for part in parts)])


# -- what real tokens did --------------------------------------------------------------


def _sample(
    trace: Trace, tokens: int
) -> tuple[list[np.ndarray], list[np.ndarray], list[tuple[int, int]]]:
    """Routing [T, L, K] of whole sequences that are fitted to and of some that are left
    out, and (prompt, generated) of all.
    """
    layers = trace.shape.layers
    lengths: list[tuple[int, int]] = []
    for rows in trace.sequences():
        prompt = len(np.unique(rows.pos[rows.phase == Phase.PREFILL]))
        generated = int(np.count_nonzero(rows.phase == Phase.DECODE)) // layers
        lengths.append((prompt, generated))

    share = min(1.0, tokens / max(1, sum(map(sum, lengths))))
    count = max(1, round(share * len(lengths)))
    spread = np.linspace(0, len(lengths) - 1, count).round()
    numbers = set(np.unique(spread).astype(int).tolist())
    if len(numbers) == len(lengths) >= _LEAVE_OUT_FROM:
        numbers -= set(range(3, len(lengths), 4))

    sequences: list[np.ndarray] = []
    left_out: list[np.ndarray] = []
    for number, rows in enumerate(trace.sequences()):
        is_fitted = number in numbers
        if not is_fitted and len(left_out) == _COMPARED_SEQUENCES:
            continue
        # A ragged prefill leaves tokens without their last layer.
        _, token, layers_of = np.unique(
            rows.pos, return_inverse=True, return_counts=True
        )
        complete = (layers_of == layers)[token.reshape(-1)]
        if complete.any():
            routing = rows.experts[complete].reshape(-1, layers, trace.shape.top_k)
            kept = sequences if is_fitted else left_out
            kept.append(routing[: max(tokens, 1)])

    if not sequences:
        raise TraceError(
            f"{trace.path}: expected tokens with all {layers} layers to fit to, found"
            " none"
        )
    return sequences, left_out, lengths


def _popularity(
    sequences: list[np.ndarray], shape: ModelShape
) -> tuple[np.ndarray, np.ndarray]:
    """Shares of all choices by expert, float64 [L, E], and the log-weights that single
    sequences add, [Q, L, E].
    """
    layers = np.arange(shape.layers)
    counts = np.stack([expert_uses(layers, routing, shape) for routing in sequences])
    total = counts.sum(axis=0) + _PRIOR
    share = total / total.sum(axis=1, keepdims=True)
    if len(sequences) == 1:
        return share, np.zeros((1, *share.shape))

    # A sequence's own shares, drawn towards those of all by the prior.
    weighted = counts + _TOPIC_PRIOR * share
    of_sequence = weighted / (counts.sum(axis=2, keepdims=True) + _TOPIC_PRIOR)
    return share, np.log(of_sequence / share)


def _past(routing: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Class of age of every expert before each token, uint8 [T, E], and whether the
    token chose it, bool [T, E].
    """
    tokens = len(routing)
    token = np.arange(tokens)[:, None]
    chosen = np.zeros((tokens, experts), bool)
    np.put_along_axis(chosen, routing.astype(np.intp), values=True, axis=1)

    # A token far before the first stands for "never".
    never = -UNUSED * 4
    last = np.maximum.accumulate(np.where(chosen, token, never), axis=0)
    at_first = np.full((1, experts), never)
    before = np.concatenate([at_first, last[:-1]])
    age = np.where(before < 0, UNUSED, np.minimum(token - before, OLDEST))
    return AGE_CLASS[age], chosen


# -- kinds of tokens -------------------------------------------------------------------


def _cluster_kinds(
    sequences: list[np.ndarray], shape: ModelShape, share: np.ndarray
) -> TokenKinds:
    """Kinds of tokens, by log-lifts over `share`: those of a kind use similar experts
    at all layers.

    K-means, on random projections of what each token uses.

    Source: Lloyd (1957); Johnson and Lindenstrauss (1984) for projections that keep
    distances.
    """
    # Drawing from saved statistics needs no fit, and SciPy takes a fifth of a second.
    from scipy.cluster.vq import kmeans2  # noqa: PLC0415

    # Fixed, so that a fit depends on the trace alone.
    rng = np.random.default_rng(0)
    width = shape.layers * shape.experts
    offsets = np.arange(shape.layers)[:, None] * shape.experts
    choices = np.concatenate(sequences).astype(np.intp) + offsets

    projected = np.zeros((len(choices), _PROJECTED), np.float32)
    directions = rng.standard_normal((width, _PROJECTED)).astype(np.float32)
    for layer in range(shape.layers):
        for place in range(shape.top_k):
            projected += directions[choices[:, layer, place]]

    count = int(np.clip(len(choices) // _KIND_TOKENS, 1, _MOST_KINDS))
    centres = projected[rng.choice(len(projected), count, replace=False)]
    with warnings.catch_warnings():
        # A cluster without a member stays where it is.
        warnings.simplefilter("ignore")
        _, kind = kmeans2(projected, centres, _SWEEPS, minit="matrix")

    key = kind[:, None, None] * width + choices
    used = np.bincount(key.reshape(-1), minlength=count * width)
    used = used.reshape(count, shape.layers, shape.experts)
    weighted = used + _KIND_PRIOR * share
    of_kind = weighted / (used.sum(axis=2, keepdims=True) + _KIND_PRIOR)
    return TokenKinds(
        weights=np.log(of_kind / share).astype(np.float32),
        character=np.ones(shape.layers, np.float32),
        course=kind.astype(np.int64),
        first=_edges(sequences),
    )


# -- habits ----------------------------------------------------------------------------


def _scaled(model: SynthModel, sequences: list[np.ndarray]) -> SynthModel:
    """Move popularity and reuse until the real tokens' probabilities add up to what
    they did.

    The past is the real one here, so layers are independent of each other; no token has
    a kind.
    """
    shape = model.shape
    popularity = model.popularity.copy()
    reuse = model.reuse.copy()
    lengths = [len(routing) for routing in sequences]
    topic = np.repeat(np.arange(len(sequences)), lengths)

    for layer in range(shape.layers):
        past = [_past(routing[:, layer], shape.experts) for routing in sequences]
        classes, chosen = (np.concatenate(parts) for parts in zip(*past, strict=True))
        of_topic = model.topics[topic, layer]
        real = chosen.sum(axis=0)
        real_age = np.bincount(classes[chosen], minlength=CLASSES)

        for _ in range(_SWEEPS):
            logits = popularity[layer] + of_topic + reuse[layer][classes]
            odds = inclusion(logits, shape.top_k)
            expected = odds.sum(axis=0)
            expected_age = np.bincount(classes.reshape(-1), odds.reshape(-1), CLASSES)

            # Less than the whole step: the two habits explain the same choices.
            ratio = (real + _PRIOR) / (expected + _PRIOR)
            popularity[layer] += 0.5 * np.log(ratio)
            ratio = (real_age + _PRIOR) / (expected_age + _PRIOR)
            reuse[layer] += 0.8 * np.log(ratio)

    return replace(model, popularity=popularity, reuse=reuse)


class _Habits(NamedTuple):
    """Habits of tokens: shares by expert [L, E] and by age [L, A], the bits that
    adjacent layers share [L - 1], and how often two tokens of one sequence choose the
    same expert, [L].
    """

    share: np.ndarray
    age: np.ndarray
    bits: np.ndarray
    repeated: np.ndarray


def _freed(model: SynthModel, sequences: list[np.ndarray]) -> SynthModel:
    """Correct what changes when the past is the model's own: draw, compare with the
    real tokens, move, again.

    Popularity and reuse follow counts, character follows the bits that a layer shares
    with its neighbours. Both sides estimate those bits from sequences of the same
    topics and lengths, so the bias of the estimate is the same.
    """
    shape = model.shape
    spread = np.linspace(0, len(sequences) - 1, _FREE_SEQUENCES).astype(int)
    chosen = np.unique(spread)
    tokens = min(_FREE_TOKENS, max(len(routing) for routing in sequences))
    real = [sequences[index][:tokens] for index in chosen]
    lengths = [len(routing) for routing in real]

    target = _measured(real, len(real), shape)
    # Short sequences are drawn several times, so that the estimates are as sure.
    copies = max(1, round(_FREE_DRAWN / sum(lengths)))
    topics = np.tile(chosen, copies)

    best = model
    least = np.inf
    for round_ in range(_FREE_ROUNDS + 1):
        rng = np.random.default_rng(round_)
        drawn = draw(model, tokens, len(topics), rng, topics)
        made = [drawn[n, : lengths[n % len(lengths)]] for n in range(len(topics))]
        current = _measured(made, len(lengths), shape)

        error = _distance(current, target)
        if error < least:
            best = model
            least = error

        # Smaller and smaller steps: what is drawn is uncertain.
        model = _moved(model, current, target, pull=0.7 / (1 + 0.25 * round_))

    return best


def _measured(made: list[np.ndarray], group: int, shape: ModelShape) -> _Habits:
    """Measure the habits of drawn sequences; bits are means over groups of so many."""
    bits = []
    for start in range(0, len(made), group):
        routing = np.concatenate(made[start : start + group])
        joint = joint_counts(routing, shape.experts)
        bits.append([mutual_information_bits(table) for table in joint])

    layers = np.arange(shape.layers)
    uses = np.stack([expert_uses(layers, routing, shape) for routing in made]).astype(
        np.float64
    )
    ages = np.zeros((shape.layers, CLASSES))
    for layer in range(shape.layers):
        for routing in made:
            classes, chosen = _past(routing[:, layer], shape.experts)
            ages[layer] += np.bincount(classes[chosen], minlength=CLASSES)

    # Simpson (1949): an estimate without bias, of sequences of several tokens.
    choices = uses.sum(axis=2)
    pairs = choices * (choices - shape.top_k)
    several = pairs[:, 0] > 0
    repeated = np.full(shape.layers, 1 / shape.experts)
    if several.any():
        squares = (uses[several] ** 2).sum(axis=2)
        repeated = ((squares - choices[several]) / pairs[several]).mean(axis=0)
    return _Habits(
        _shares(uses.sum(axis=0)), _shares(ages), np.mean(bits, axis=0), repeated
    )


def _shares(counts: np.ndarray) -> np.ndarray:
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def _missing_bits(current: _Habits, target: _Habits) -> np.ndarray:
    """Float64 [L - 1]: logarithm of the bits wanted over those there are."""
    return np.log((target.bits + _FLOOR_BITS) / (current.bits + _FLOOR_BITS))


def _distance(current: _Habits, target: _Habits) -> float:
    missing = _missing_bits(current, target)
    of_age = float(np.abs(current.age - target.age).sum(axis=1).mean())
    repeated = np.abs(np.log(current.repeated / target.repeated)).mean()
    of_bits = np.abs(missing).sum() / max(len(missing), 1)
    return of_age + float(repeated) + float(of_bits)


def _moved(
    model: SynthModel, current: _Habits, target: _Habits, pull: float
) -> SynthModel:
    """The model with all habits nearer to the target."""
    by_expert = np.log((target.share + _FLOOR) / (current.share + _FLOOR))
    by_age = np.log((target.age + _FLOOR) / (current.age + _FLOOR))
    popularity = model.popularity + 0.5 * pull * by_expert
    reuse = model.reuse + pull * by_age

    # Repetition within sequences beyond that of even choices comes from their topics.
    even = 1 / model.shape.experts
    excess = np.maximum(target.repeated - even, _FLOOR)
    excess /= np.maximum(current.repeated - even, _FLOOR)
    topics = model.topics * (excess ** (1.5 * pull))[:, None]

    # A layer shares bits with the one below and with the one above; a single one with
    # none.
    kinds = model.kinds
    assert kinds is not None
    missing = _missing_bits(current, target)
    if len(missing):
        below = np.concatenate((missing[:1], missing))
        above = np.concatenate((missing, missing[-1:]))
        character = kinds.character + pull * (below + above)
        character = np.clip(character, 0, _MOST_CHARACTER).astype(np.float32)
        kinds = replace(kinds, character=character)
    return replace(
        model,
        popularity=popularity.astype(np.float32),
        reuse=reuse.astype(np.float32),
        topics=topics.astype(np.float32),
        kinds=kinds,
    )
