"""Answers about a line: does it fit, how fast, is a measured speed normal, what to
change first, and what reaches a speed that is wished for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moesim.advice.advise import machine_in_words
from moesim.advice.answer import Change, FlagsAnswer, Verdict
from moesim.advice.given.options import (
    IK,
    LM_STUDIO,
    Finding,
    read_flags,
    spelled,
)
from moesim.advice.given.reading import Reading, reading_of
from moesim.advice.model.catalogue import model_contents
from moesim.advice.observed import ObservedRows, explanations, states
from moesim.advice.plan.commands import flags_of
from moesim.advice.plan.memory import (
    MICRO_BATCHES,
    Candidate,
    Job,
    advisable,
    bill_of,
    candidates,
    loaded,
    with_split,
)
from moesim.advice.plan.ranking import Forecast
from moesim.advice.plan.what_if import cached_speed, drafted, what_ifs
from moesim.advice.times.latents import Beliefs
from moesim.advice.times.priors import priors_of
from moesim.advice.times.work import DEFAULT_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.ranking import Prospect
    from moesim.advice.times.work import Setting

MOST_CHANGES = 3
# A change that saves less of the job is not worth a restart.
WORTH_A_CHANGE = 0.03
# Contexts beyond this length belong to no model of today.
MOST_CONTEXT = 1 << 20


def advise_flags(
    model: str | ModelContents,
    flags: str,
    *,
    cpu: str | None = None,
    ram: str | None = None,
    gpu: str | None = None,
    pcie: str | None = None,
    system: str | None = None,
    hw: str | None = None,
    quant: str = "",
    job: Job | None = None,
    measured: float | None = None,
    target: float | None = None,
) -> FlagsAnswer:
    """Say what a command line does on a machine, and what to change in it first.

    Args:
        model: as in `moesim.advise`.
        flags: a line of llama-server or ik_llama.cpp, variables, or settings of ollama
            or LM Studio, as pasted.
        cpu: as in `moesim.advise`, like `ram`, `gpu`, `pcie`, `system` and `hw`.
        ram: see `cpu`.
        gpu: see `cpu`.
        pcie: see `cpu`.
        system: see `cpu`.
        hw: see `cpu`.
        quant: weight formats of a model that is given by name.
        job: prompt, answer and requests at the same time.
        measured: tokens per second that the line gives.
        target: tokens per second that it should give.

    Raises:
        AdviceError: bad input, in one line.
    """
    contents = model_contents(model, quant) if isinstance(model, str) else model
    given = read_flags(flags)
    words = {"cpu": cpu, "ram": ram, "gpu": gpu, "pcie": pcie, "system": system}
    machine = machine_in_words(words, hw, ObservedRows())
    reading = reading_of(given, contents, machine, job or Job())
    return answer_of(reading, contents, measured=measured, target=target)


def answer_of(
    reading: Reading,
    model: ModelContents,
    *,
    measured: float | None = None,
    target: float | None = None,
) -> FlagsAnswer:
    """Predict a line that was read, and what could be changed."""
    machine = reading.machine
    beliefs = Beliefs(priors_of(machine, reading.setting.threads))
    fork = IK if reading.given.engine == IK else ""
    forecast = Forecast(model, machine, reading.job, beliefs, fork=fork)
    now = forecast.prospect(reading.candidate)
    full = replace(reading.job, prompt=max(1, reading.job.context - reading.job.answer))
    further = Forecast(model, machine, full, beliefs, fork=fork)
    deep = further.prospect(reading.candidate).decode
    findings = reading.findings
    settings = reading.given.settings
    if settings.draft or settings.drafts not in {"", "none"}:
        gain = drafted(forecast, now)
        words = f"{gain.change}: {gain.factor:.2f} times as fast; {gain.note}"
        findings = (*findings, Finding("note", words))

    if cached := reading.job.beside.get("expert cache"):
        ratio = min(1.0, cached / model.expert_bytes)
        speed, hits = cached_speed(forecast, ratio)
        words = (
            f"with an expert cache of {100 * ratio:.0f} % of the experts decode is"
            f" {speed.value:.3g} tokens/s (90 %: {speed.low:.3g} to {speed.high:.3g});"
            f" {hits.words}"
        )
        findings = (*findings, Finding("note", words))

    trials = [each for each in _trials(forecast, reading) if each.bill.fits]
    changes = [_change(forecast, reading, now, each) for each in trials]
    if reading.bill.fits:
        # Otherwise anything that fits is worth it.
        changes = [each for each in changes if each.gain > 1 + WORTH_A_CHANGE]
    verdict = None
    if measured is not None:
        verdict = _verdict(forecast, reading, now, measured)
    ways: Sequence[Change] = ()
    if target is not None and now.decode.value < target:
        ways = list(_ways(forecast, reading, now, trials, target))
    return FlagsAnswer(
        model=model,
        reading=reading,
        prospect=now,
        deep=deep,
        most_context=most_context(forecast, reading),
        findings=findings,
        changes=tuple(_distinct(changes)),
        verdict=verdict,
        target=target,
        ways=tuple(ways),
    )


def _distinct(changes: Sequence[Change]) -> list[Change]:
    """Return the best changes; of equally fast ones that with the fewest flags."""
    shortest: dict[str, Change] = {}
    for change in sorted(changes, key=lambda each: len(each.words)):
        prompt = 0.0 if change.prefill is None else change.prefill.value
        speeds = f"{change.decode.value:.3g} {prompt:.3g}"
        shortest.setdefault(speeds, change)
    ranked = sorted(shortest.values(), key=lambda each: -each.gain)
    # What is much slower than the best of them is no way to mend a line.
    return [each for each in ranked if each.gain > 0.8 * ranked[0].gain][:MOST_CHANGES]


def most_context(forecast: Forecast, reading: Reading) -> int:
    """Return the largest context per request that the setting holds, in tokens."""
    low = 0
    high = MOST_CONTEXT
    while high - low > 256:
        middle = (low + high) // 2
        job = replace(reading.job, context=middle)
        bill = bill_of(forecast.model, forecast.machine, reading.setting, job)
        low, high = (middle, high) if bill.fits else (low, middle)
    return low


def _trials(forecast: Forecast, reading: Reading) -> list[Candidate]:
    """Return the setting with one thing changed each, then the advised one."""
    model = forecast.model
    machine = forecast.machine
    job = reading.job
    now = reading.setting
    trials: list[Setting] = []
    fitting = advisable(candidates(model, machine, _with_batch(job, now)))
    if fitting:
        best = forecast.ranked(fitting, 1)[0].candidate.setting
        places = ("cpu_layers", "chosen_layers", "gpu_layers", "split")
        trials.append(replace(now, **{name: getattr(best, name) for name in places}))
    if machine.gpu_count > 1:
        trials.append(with_split(model, machine, now, job))
    trials += [
        replace(now, micro_batch=micro, batch=max(DEFAULT_BATCH, micro))
        for micro in MICRO_BATCHES
    ]
    if now.mapped and now.on_host(model):
        trials.append(loaded(model, machine, now, job).setting)
    if now.threads:
        trials.append(replace(now, threads=machine.processor.cores))
    tried = [
        Candidate(each, bill_of(model, machine, each, job))
        for each in trials
        if each != now
    ]
    everything = advisable(candidates(model, machine, job))
    if everything:
        tried.append(forecast.ranked(everything, 1)[0].candidate)
    return tried


def _with_batch(job: Job, setting: Setting) -> Job:
    return replace(job, micro_batch=setting.micro_batch)


def _change(
    forecast: Forecast, reading: Reading, now: Prospect, trial: Candidate
) -> Change:
    prospect = forecast.prospect(trial)
    words = changed_words(forecast, reading, trial.setting)
    gain = now.job.value / prospect.job.value
    return Change(words, prospect.decode, prospect.prefill, gain)


def changed_words(forecast: Forecast, reading: Reading, after: Setting) -> str:
    """Write what differs between a line and a setting, in the words of its engine."""
    engine = reading.given.engine
    model = forecast.model
    both = []
    for setting in (reading.setting, after):
        spread = engine == IK and setting.chosen_layers is None and setting.cpu_layers
        if spread:
            # Its --n-cpu-moe means other layers from build to build.
            first = range(min(setting.cpu_layers, len(model.layers)))
            named = replace(setting, cpu_layers=0, chosen_layers=frozenset(first))
            both.append(_pairs(flags_of(named, model, forecast.machine)))
        else:
            both.append(_pairs(flags_of(setting, model, forecast.machine)))
    old, new = both
    words = [spelled(engine, *pair) for pair in new if pair not in old]
    names = {name for name, _ in new}
    gone = [name for name, _ in old if name not in names]
    words += [f"without {spelled(engine, name)}" for name in gone]
    return (", " if engine == LM_STUDIO else " ").join(words) or "the same flags"


def _pairs(flags: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for word in flags:
        if word.startswith("-") and not word[1:2].isdigit():
            pairs.append((word, ""))
        else:
            pairs[-1] = (pairs[-1][0], word)
    return pairs


def _verdict(
    forecast: Forecast, reading: Reading, now: Prospect, measured: float
) -> Verdict:
    verdict = Verdict(measured, now.decode, ())
    if verdict.word != "slower":
        return verdict
    target, _ = forecast.targets(reading.candidate)
    sequences = reading.setting.sequences
    slowed = states(forecast.machine, reading.setting)
    causes = explanations(target, sequences, measured, forecast.beliefs, slowed)
    return replace(verdict, causes=causes)


def _ways(
    forecast: Forecast,
    reading: Reading,
    now: Prospect,
    trials: Sequence[Candidate],
    target: float,
) -> Iterator[Change]:
    """Yield what reaches a speed: one flag, then several, then another machine."""
    reached = False
    job = _with_batch(reading.job, reading.setting)
    rounded = [
        each
        for each in candidates(forecast.model, forecast.machine, job)
        if each.setting.kv_format != "f16"
    ]
    if rounded:
        trials = [*trials, forecast.ranked(rounded, 1)[0].candidate]
    changes = [_change(forecast, reading, now, each) for each in trials]
    changes.sort(key=lambda change: (len(change.words.split(" -")), -change.gain))
    for change in changes:
        if change.decode.value >= target:
            reached = True
            yield change
            break
    if reached:
        return
    fastest = max(changes, key=lambda change: change.decode.value, default=None)
    if fastest is not None and fastest.decode.value > now.decode.value:
        yield fastest
    best = now
    if trials:
        best = forecast.ranked(trials, 1)[0]
    others = [each for each in what_ifs(forecast, best) if each.factor]
    others.sort(key=lambda each: each.decode.value)
    enough = [each for each in others if each.decode.value >= target]
    for each in enough[:2] or others[-1:]:
        words = f"{each.change}{f' ({each.note})' if each.note else ''}"
        gain = each.decode.value / now.decode.value
        yield Change(words, each.decode, None, gain)
