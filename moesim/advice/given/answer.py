"""Answers about a line: does it fit, how fast, is a measured speed normal, what to
change first, and what reaches a speed that is wished for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moesim.advice.advise import machine_in_words
from moesim.advice.answer import FlagsAnswer, Verdict
from moesim.advice.given.options import (
    IK,
    LM_STUDIO,
    Finding,
    read_flags,
    spelled,
)
from moesim.advice.given.reading import Reading
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
    placed_as,
    with_split,
)
from moesim.advice.plan.ranking import Forecast
from moesim.advice.plan.what_if import WhatIf, cached_speed, drafted, what_ifs
from moesim.advice.times.latents import Beliefs
from moesim.advice.times.priors import priors_of
from moesim.advice.times.work import DEFAULT_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.latents import Interval
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
    words = {"cpu": cpu, "ram": ram, "gpu": gpu, "pcie": pcie, "system": system}
    machine = machine_in_words(words, hw, ObservedRows())
    reading = Reading(read_flags(flags), contents, machine, job or Job())
    line = _Line(reading)
    changes = [line.change(each) for each in line.trials]
    if reading.bill.fits:
        # Otherwise anything that fits is worth it.
        changes = [each for each in changes if each.factor > 1 + WORTH_A_CHANGE]
    ways: Sequence[WhatIf] = ()
    if target is not None and line.now.decode.value < target:
        ways = list(line.ways(target))
    return FlagsAnswer(
        reading=reading,
        prospect=line.now,
        deep=line.deep(),
        most_context=line.most_context(),
        findings=(*reading.findings, *line.findings()),
        changes=tuple(_distinct(changes)),
        verdict=None if measured is None else line.verdict(measured),
        target=target,
        ways=tuple(ways),
    )


def _distinct(changes: Sequence[WhatIf]) -> list[WhatIf]:
    """Return the best changes; of equally fast ones that with the fewest flags."""
    shortest: dict[str, WhatIf] = {}
    for change in sorted(changes, key=lambda each: len(each.change)):
        prompt = 0.0 if change.prefill is None else change.prefill.value
        speeds = f"{change.decode.value:.3g} {prompt:.3g}"
        shortest.setdefault(speeds, change)
    ranked = sorted(shortest.values(), key=lambda each: -each.factor)
    # What is much slower than the best of them is no way to mend a line.
    return [each for each in ranked if each.factor > 0.8 * ranked[0].factor][
        :MOST_CHANGES
    ]


class _Line:
    """A line that was read, its speed, and other settings beside it."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.setting = reading.setting
        self.model = reading.model
        self.machine = reading.machine
        self.job = reading.job
        self.engine = reading.engine
        self.forecast = self._forecast(self.job)
        self.now = self.forecast.prospect(reading.candidate)
        self.trials = [each for each in self._trials() if each.bill.fits]

    def _forecast(self, job: Job) -> Forecast:
        beliefs = Beliefs(priors_of(self.machine, self.setting.threads))
        fork = IK if self.engine == IK else ""
        return Forecast(self.model, self.machine, job, beliefs, fork=fork)

    def deep(self) -> Interval:
        """Return tokens per second at the end of the context."""
        prompt = max(1, self.job.context - self.job.answer)
        full = self._forecast(replace(self.job, prompt=prompt))
        return full.prospect(self.reading.candidate).decode

    def findings(self) -> Iterator[Finding]:
        """Tell what drafts and an expert cache in the line give."""
        settings = self.reading.settings
        if settings.draft or settings.drafts not in {"", "none"}:
            gain = drafted(self.forecast, self.now)
            words = f"{gain.change}: {gain.factor:.2f} times as fast; {gain.note}"
            yield Finding("note", words)
        if cached := self.job.beside.get("expert cache"):
            ratio = min(1.0, cached / self.model.expert_bytes)
            speed, hits = cached_speed(self.forecast, ratio)
            yield Finding(
                "note",
                f"with an expert cache of {100 * ratio:.0f} % of the experts decode is"
                f" {speed.value:.3g} tokens/s (90 %: {speed.low:.3g} to"
                f" {speed.high:.3g}); {hits.words}",
            )

    def _candidate(self, setting: Setting, job: Job | None = None) -> Candidate:
        bill = bill_of(self.model, self.machine, setting, job or self.job)
        return Candidate(setting, bill)

    def _candidates(self) -> list[Candidate]:
        """Return what fits with the line's micro-batch."""
        job = replace(self.job, micro_batch=self.setting.micro_batch)
        return candidates(self.model, self.machine, job)

    def most_context(self) -> int:
        """Return the largest context per request that the setting holds, in tokens."""
        low = 0
        high = MOST_CONTEXT
        while high - low > 256:
            middle = (low + high) // 2
            job = replace(self.job, context=middle)
            fits = self._candidate(self.setting, job).bill.fits
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _trials(self) -> list[Candidate]:
        """Return the setting with one thing changed each, then the advised one."""
        model, machine, job, now = self.model, self.machine, self.job, self.setting
        trials: list[Setting] = []
        fitting = advisable(self._candidates())
        if fitting:
            best = self.forecast.ranked(fitting, 1)[0].candidate.setting
            trials.append(placed_as(now, best))
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
        tried = [self._candidate(each) for each in trials if each != now]
        everything = advisable(candidates(model, machine, job))
        if everything:
            tried.append(self.forecast.ranked(everything, 1)[0].candidate)
        return tried

    def change(self, trial: Candidate) -> WhatIf:
        """Say what another setting gives, and how it is written."""
        prospect = self.forecast.prospect(trial)
        gain = self.now.job.value / prospect.job.value
        words = self._words(trial.setting)
        return WhatIf(words, prospect.decode, gain, prefill=prospect.prefill)

    def _words(self, after: Setting) -> str:
        """What differs between the line and a setting, in the words of its engine."""
        old, new = (self._flags(setting) for setting in (self.setting, after))
        words = [
            spelled(self.engine, name, value)
            for name, value in new.items()
            if old.get(name) != value
        ]
        gone = [name for name in old if name not in new]
        words += [f"without {spelled(self.engine, name)}" for name in gone]
        between = ", " if self.engine == LM_STUDIO else " "
        return between.join(words) or "the same flags"

    def _flags(self, setting: Setting) -> dict[str, str]:
        """Flags of a setting with their values."""
        if self.engine == IK and setting.chosen_layers is None and setting.cpu_layers:
            # Its --n-cpu-moe means other layers from build to build.
            first = range(min(setting.cpu_layers, len(self.model.layers)))
            setting = replace(setting, cpu_layers=0, chosen_layers=frozenset(first))
        flags: dict[str, str] = {}
        for word in flags_of(setting, self.model, self.machine):
            if word.startswith("-") and not word[1:2].isdigit():
                name = word
                flags[name] = ""
            else:
                flags[name] = word
        return flags

    def verdict(self, measured: float) -> Verdict:
        """Say whether a measured speed is normal, and what would explain it."""
        verdict = Verdict(measured, self.now.decode, ())
        if verdict.word != "slower":
            return verdict
        step, _ = self.forecast.targets(self.reading.candidate)
        causes = explanations(
            step,
            self.setting.sequences,
            measured,
            self.forecast.beliefs,
            states(self.machine, self.setting),
        )
        return replace(verdict, causes=causes)

    def ways(self, target: float) -> Iterator[WhatIf]:
        """Yield what reaches a speed: one flag, then several, then another machine."""
        forecast = self.forecast
        trials = self.trials
        rounded = [
            each for each in self._candidates() if each.setting.kv_format != "f16"
        ]
        if rounded:
            trials = [*trials, forecast.ranked(rounded, 1)[0].candidate]
        changes = [self.change(each) for each in trials]
        changes.sort(
            key=lambda change: (len(change.change.split(" -")), -change.factor)
        )
        for change in changes:
            if change.decode.value >= target:
                yield change
                return
        now = self.now.decode.value
        fastest = max(changes, key=lambda change: change.decode.value, default=None)
        if fastest is not None and fastest.decode.value > now:
            yield fastest
        best = forecast.ranked(trials, 1)[0] if trials else self.now
        others = [each for each in what_ifs(forecast, best) if each.factor]
        others.sort(key=lambda each: each.decode.value)
        enough = [each for each in others if each.decode.value >= target]
        for each in enough[:2] or others[-1:]:
            yield replace(each, factor=each.decode.value / now)
