"""What other memory, link, quantisation or an expert cache would change.

The first three exchange one figure of machine or model and predict again; the last
takes the hit rate of a replay of this model's routing, made here or before it shipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.advice.model.catalogue import named_contents, shape_named
from moesim.advice.plan.memory import advisable, candidates
from moesim.advice.plan.ranking import Forecast
from moesim.advice.tables import table
from moesim.advice.times.cache_engine import (
    EngineTraits,
    HostRates,
    engine_priors,
    engine_seconds,
    engine_work,
    steps_from_hits,
)
from moesim.advice.times.latents import Interval, Prior
from moesim.advice.times.priors import PriorTable
from moesim.advice.times.step_times import latents_of, misfits_of
from moesim.base.errors import AdviceError
from moesim.traces.format.schema import ModelShape
from moesim.traces.weight_formats import bytes_per_weight, recipe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.ranking import Prospect
    from moesim.advice.times.latents import Beliefs

FASTER_MEMORY = 1.25
# A prompt that changes by less is not worth a word.
SMALLEST_NOTE = 0.02
QUANTS = ("IQ3_XXS", "Q4_K_M", "Q5_K_M", "Q8_0")
CACHE_POLICY = "lfu:decay=0.96"
# Copies into the cache per token, as a share of its misses, under that policy.
ADMITTED_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change of setting or machine, and what it would bring.

    Attributes:
        change: in words, or flags.
        decode: tokens per second then.
        factor: as many times as fast as now.
        note: what the figure rests on.
        prefill: tokens per second of the prompt; None where only decode is known.
    """

    change: str
    decode: Interval
    factor: float
    note: str = ""
    prefill: Interval | None = None


def what_ifs(forecast: Forecast, best: Prospect) -> list[WhatIf]:
    """Exchange one part of machine or model after the other."""
    answers = []
    machine = forecast.machine
    has_link = bool(machine.graphics) and not machine.unified

    # One part at a time, or the gains could not be told apart.
    rates = {"host_read": FASTER_MEMORY}
    percent = round(100 * (FASTER_MEMORY - 1))
    words = f"host memory {percent} % faster"
    if machine.unified:
        rates = {"device_read": FASTER_MEMORY}
        words = f"memory {percent} % faster"
    answers.append(_scaled(forecast, best, words, rates))
    if has_link:
        answers.append(
            _scaled(
                forecast, best, "a link twice as wide (prompts only)", {"upload": 2.0}
            )
        )
    answers += _quantisations(forecast, best)
    answers += _more_memory(forecast, best)
    answers.append(drafted(forecast, best))
    return answers


def _more_memory(forecast: Forecast, best: Prospect) -> list[WhatIf]:
    """Predict twice the host memory where experts are read from the SSD."""
    machine = forecast.machine
    size = machine.memory.size_bytes
    if not best.candidate.bill.pages or size is None:
        return []
    memory = replace(machine.memory, size_bytes=2 * size)
    larger = forecast.on(replace(machine, memory=memory))
    again = larger.prospect(best.candidate)
    words = f"{2 * size / 1024**3:.0f} GiB of host memory"
    factor = again.decode.value / best.decode.value
    return [WhatIf(words, again.decode, factor, "experts stay in memory")]


# Tokens that a draft proposes at once, and the share that is accepted one after the
# other. Source: heads for several tokens, 62 to 85 % accepted (Strata's reports).
DRAFTED = 4
ACCEPTED = 0.7
# A head for several tokens runs one more layer and the output head for each.
DRAFT_SHARE = 0.04
DRAFTS_LOSE = "not worth it: a pass reads the experts of all its tokens"


def drafted(
    forecast: Forecast,
    best: Prospect,
    tokens: int = DRAFTED,
    accepted: float = ACCEPTED,
) -> WhatIf:
    """Predict drafts: several tokens verified in one pass.

    A pass reads every expert that any of its tokens uses. On the processor that eats
    what accepted tokens give, because batches below 32 tokens are computed there.

    Args:
        forecast: of the machine.
        best: the advised setting.
        tokens: drafted per round.
        accepted: chance that a drafted token is right, if those before it are.
    """
    setting = best.candidate.setting
    width = setting.sequences * (tokens + 1)
    verifying = replace(best.candidate, setting=replace(setting, sequences=width))
    step, _ = forecast.targets(verifying)
    plain, _ = forecast.targets(best.candidate)
    # Rounds end at the first wrong token, whose right value comes for free.
    per_round = (1 - accepted ** (tokens + 1)) / (1 - accepted)
    rates = forecast.medians()
    drafting_s = tokens * DRAFT_SHARE * plain.seconds(rates)
    factor = per_round * plain.seconds(rates) / (step.seconds(rates) + drafting_s)
    speed = Interval(best.decode.value * factor, math.hypot(best.decode.spread, 0.25))
    words = f"drafts of {tokens} tokens, {100 * accepted:.0f} % accepted"
    note = "worth it" if factor > 1.05 else DRAFTS_LOSE
    return WhatIf(words, speed, factor, note)


def _scaled(
    forecast: Forecast, best: Prospect, words: str, factors: dict[str, float]
) -> WhatIf:
    """Predict the advised setting with some latents multiplied."""
    beliefs = scaled_beliefs(forecast.beliefs, factors)
    decode, prefill = forecast.targets(best.candidate)
    prompt = prefill.predicted(beliefs)
    speed = decode.predicted(beliefs).per(best.candidate.setting.sequences)
    now = forecast.job.prompt / best.prefill.value
    note = ""
    if abs(prompt.value / now - 1) > SMALLEST_NOTE:
        note = f"prompt {prompt.value:.3g} s instead of {now:.3g} s"
    return WhatIf(words, speed, speed.value / best.decode.value, note)


def scaled_beliefs(beliefs: Beliefs, factors: dict[str, float]) -> Beliefs:
    """Return beliefs about a machine some of whose rates are multiplied."""
    priors = {
        name: replace(prior, value=prior.value * factors.get(name, 1.0))
        for name, prior in beliefs.priors.items()
    }
    # Logarithms add where rates multiply.
    shift = [math.log(factors.get(name, 1.0)) for name in beliefs.names]
    return replace(beliefs, priors=PriorTable(priors), mean=beliefs.mean + shift)


def _quantisations(forecast: Forecast, best: Prospect) -> list[WhatIf]:
    """Predict other quantisations, with the experts' bytes scaled by their recipes."""
    model = forecast.model
    answers = []
    # The same micro-batch: others would take four times as long to try.
    job = replace(forecast.job, micro_batch=best.candidate.setting.micro_batch)
    for label in QUANTS:
        other = requantised(model, label)
        if other is None or label == model.quant:
            continue
        # Some models keep their experts as trained, whatever the label says.
        if other.expert_bytes == model.expert_bytes:
            continue
        words = f"quantisation {label}"
        fitting = candidates(other, forecast.machine, job)
        # Said, because a missing line looks like an oversight.
        if not fitting:
            nothing = Interval(1e-9, 0.0)
            answers.append(WhatIf(words, nothing, 0.0, "does not fit"))
            continue
        again = Forecast(other, forecast.machine, forecast.job, forecast.beliefs)
        speed = again.ranked(advisable(fitting), 1)[0].decode
        now, then = (f"{each.file_bytes / 1e9:.1f}" for each in (model, other))
        factor = speed.value / best.decode.value
        answers.append(WhatIf(words, speed, factor, f"{then} GB instead of {now}"))
    return answers


def requantised(model: ModelContents, label: str) -> ModelContents | None:
    """Return the model with its experts in another format; None if nothing is known.

    Attention and head stay as they are: recipes hardly change their share.
    """
    formats = recipe(label)
    if formats is None or model.main_format == formats.up:
        return None
    try:
        named = named_contents(model.name, label).layers
    except AdviceError:
        named = ()
    stored = [(layer.expert_bytes, layer.expert_formats) for layer in named]
    if len(named) != len(model.layers):
        # By bits per weight; some layers' down projections have more.
        down = bytes_per_weight(formats.down) + bytes_per_weight(formats.down_more)
        mean = (2 * bytes_per_weight(formats.up) + down / 2) / 3
        sizes = [round(layer.expert_weights * mean) for layer in model.layers]
        stored = [(size, {formats.up: size} if size else {}) for size in sizes]
    layers = tuple(
        replace(layer, expert_bytes=size, expert_formats=by_format)
        for layer, (size, by_format) in zip(model.layers, stored, strict=True)
    )
    return replace(model, layers=layers, quant=label)


@dataclass(frozen=True, slots=True)
class CacheHits:
    """How often a cache of experts hits, as odds, and where that is known from.

    Attributes:
        odds: hits over misses, with their spread.
        note: source, in words.
    """

    odds: Interval
    note: str

    @property
    def words(self) -> str:
        """The hit rate with its interval, and its source."""
        rates = [odds / (1 + odds) for odds in (self.odds.low, self.odds.high)]
        median = self.odds.value / (1 + self.odds.value)
        low, high = (f"{100 * rate:.0f}" for rate in rates)
        return f"hit rate {100 * median:.0f} % (90 %: {low} to {high}), {self.note}"


def expert_cache(
    forecast: Forecast, best: Prospect, trace: Path | None = None
) -> WhatIf:
    """Predict an expert cache in the graphics memory that the advised setting fills.

    Args:
        forecast: of the machine.
        best: the advised setting.
        trace: routing to replay; None takes statistics of this model's routing that
            ship, or what is common to models.

    Raises:
        AdviceError: a machine without a card, or a trace of another model.
    """
    model = forecast.model
    machine = forecast.machine
    if not machine.graphics or machine.unified:
        raise AdviceError(
            "an expert cache needs a graphics card with memory of its own"
        )

    # What the setting gives to experts, and what it leaves unused.
    kept = best.candidate.bill.gpu["experts"] + best.candidate.bill.gpu_left
    ratio = min(1.0, max(0.0, kept / model.expert_bytes))
    speed, hits = cached_speed(forecast, ratio, trace)
    words = f"an expert cache of {100 * ratio:.0f} % of the experts ({CACHE_POLICY})"
    # The engine is predicted for one sequence, so it is held against one.
    single = replace(best.candidate.setting, sequences=1)
    alone = forecast.prospect(replace(best.candidate, setting=single))
    return WhatIf(words, speed, speed.value / alone.decode.value, hits.words)


def cached_speed(
    forecast: Forecast, ratio: float, trace: Path | None = None
) -> tuple[Interval, CacheHits]:
    """Predict tokens per second with a share of every layer's experts in slots."""
    model = forecast.model
    machine = forecast.machine
    hits = _hits(model, ratio, trace)
    learned = forecast.beliefs
    odds = Prior(hits.odds.value, hits.odds.spread, hits.note)
    priors = {**learned.priors, **engine_priors(machine), ODDS: odds}
    beliefs = replace(learned, priors=PriorTable(priors))

    reach = learned.median("host_read") * learned.median("host_reach")
    host = HostRates.of(reach, learned.median("upload"), None)
    (misfit,) = misfits_of(model)
    # Forks of llama.cpp cut the graph at every cached layer and merge two chains.
    traits = EngineTraits(split=ratio < 1, merge=ratio < 1)
    asked = model.layers[model.moe_layers[0]].top_k * len(model.moe_layers)

    def seconds(rates: Mapping[str, float]) -> float:
        missed = 1 / (1 + rates[ODDS]) if ratio < 1 else 0.0
        steps = steps_from_hits(model, 1 - missed)
        work = engine_work(model, steps, ADMITTED_SHARE * missed * asked, traits)
        return engine_seconds(work, machine, host, rates) * rates[misfit]

    return beliefs.predict(seconds, sorted(latents_of(seconds))).per(1), hits


ODDS = "hit_odds"

# Odds of a hit over those of a slot, and their spread: least recently used, from a
# quarter to half of the experts in slots, on routing of eight models (Mixtral the
# lowest, Qwen3-30B-A3B the highest).
SLOT_ODDS = 4.0
SLOT_ODDS_SPREAD = 0.85
# Texts of one model differ by so much, and few tokens of one text flatter every cache:
# Qwen3.8-Flash-Next hits 80 % of 67 tokens with half of the slots, 70 % of 1,300.
TEXT_ODDS_SPREAD = 0.3
FEW_TOKENS_SPREAD = 10.0


def _hits(model: ModelContents, ratio: float, trace: Path | None) -> CacheHits:
    """Odds of a hit on routing of the user, of this model, or of models in general."""
    if ratio >= 1 or ratio <= 0:
        return CacheHits(Interval(1e6 if ratio else 1e-6, 0.0), "no cache needed")
    if trace is not None:
        rate = replayed_hits(trace, ratio)
        odds = Interval(rate / (1 - rate), TEXT_ODDS_SPREAD)
        return CacheHits(odds, f"replayed on {trace.name}")
    odds = Interval(SLOT_ODDS * ratio / (1 - ratio), SLOT_ODDS_SPREAD)
    known = table("cache_hits")
    name = routing_known(model)
    if name:
        rows = known["models"][name]
        rate = float(np.interp(ratio, known["ratios"], rows["hits"]))
        tokens = rows["tokens"]
        few = FEW_TOKENS_SPREAD / math.sqrt(tokens)
        text = Interval(rate / (1 - rate), TEXT_ODDS_SPREAD + few)
        note = f"on routing with the statistics of {name}, {tokens:,} tokens"
        return CacheHits(combined(odds, text), note)
    note = "as of models in general: no routing of this one is known, --trace takes it"
    return CacheHits(odds, note)


def combined(first: Interval, second: Interval) -> Interval:
    """Weigh two estimates of one quantity by what each is sure of."""
    weights = [first.spread**-2, second.spread**-2]
    logs = [math.log(first.value), math.log(second.value)]
    total = sum(weights)
    mean = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / total
    return Interval(math.exp(mean), total**-0.5)


def routing_known(model: ModelContents) -> str:
    """Return the shipped statistics of a model's routing; empty without any."""
    shape = shape_named(model.name)
    names = {name.lower() for name in (model.name, shape["name"] if shape else "")}
    return next((name for name in table("cache_hits")["models"] if name in names), "")


def replayed_hits(trace: Path, ratio: float) -> float:
    """Replay routing through the cache, and count its hits."""
    from moesim.runs.replay import replay_cache  # noqa: PLC0415 # replays load much

    counts = replay_cache(trace, CACHE_POLICY, cache_ratio=ratio, cache_scope="layer")
    return min(1 - 1e-6, max(1e-6, float(counts["hit_rate_active"])))


def shape_of(model: ModelContents) -> ModelShape:
    """Return what traces and replays know of a model."""
    layer = model.layers[model.moe_layers[0]]
    weights = layer.expert_weights // layer.experts
    hidden = model.hidden or 2048
    return ModelShape(
        name=model.name.split()[0],
        layers=len(model.moe_layers),
        experts=layer.experts,
        top_k=layer.top_k,
        hidden=hidden,
        expert_intermediate=max(1, weights // (3 * hidden)),
        expert_bytes=tuple(
            model.layers[at].expert_bytes // model.layers[at].experts
            for at in model.moe_layers
        ),
        # Embeddings stay in host memory, where a token reads one row.
        other_bytes=model.dense_bytes + model.head_bytes,
        dense_layers=tuple(
            at for at in range(len(model.layers)) if at not in model.moe_layers
        ),
    )
