"""Predicts every candidate and ranks by the seconds of the job.

All candidates share one set of beliefs, so what is not known of the machine moves them
together: two settings can be told apart although neither speed is known well. Those
whose difference is within its own noise are ties, and the answer says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesim.advice.plan.commands import bench_command
from moesim.advice.times.latents import NINETY, Beliefs, Interval, learn
from moesim.advice.times.priors import priors_of, shipped_population, stretched
from moesim.advice.times.step_times import (
    PREFILL_SPREAD,
    REPEAT_SPREAD,
    Target,
    decode_target,
    prefill_target,
)
from moesim.advice.times.work import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.memory import Candidate, Job
    from moesim.advice.times.latents import Observation


# Differences below what two runs of one command show are ties in any case.
SMALLEST_DIFFERENCE = REPEAT_SPREAD


@dataclass(frozen=True)
class Prospect:
    """One candidate with its predicted speeds.

    Attributes:
        candidate: setting and bill of memory.
        decode: tokens per second of all sequences together.
        prefill: tokens per second.
        job: seconds of the whole job.
        decode_terms: seconds of one step by term.
        prefill_terms: seconds of the prompt by term.
        tied: its job cannot be told from the best one's.
    """

    candidate: Candidate
    decode: Interval
    prefill: Interval
    job: Interval
    decode_terms: Mapping[str, float]
    prefill_terms: Mapping[str, float]
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Grades:
    """What predictions rest on, and how wide such intervals have to be.

    Attributes:
        decode: ``specification``, ``probes``, ``one row``, ``two rows`` or ``another
            model``.
        prompt: ``prompt specification`` or ``prompt one row``.
    """

    decode: str
    prompt: str = "prompt specification"


def _widened(interval: Interval, grade: str) -> Interval:
    """Widen an interval as left-out machines demand."""
    stretch = shipped_population().widths.get(grade, (1.0, 0.0))
    return Interval(interval.value, stretched(interval.spread, stretch))


class Forecast:
    """Predicts settings of one model on one machine for one job."""

    def __init__(
        self,
        model: ModelContents,
        machine: Machine,
        job: Job,
        beliefs: Beliefs,
        grades: Grades | None = None,
        fork: str = "",
    ) -> None:
        self.model = model
        self.machine = machine
        self.job = job
        self.beliefs = beliefs
        self.fork = fork
        probed = bool(machine.probes.host_read)
        self.grades = grades or Grades("probes" if probed else "specification")
        self._targets: dict[Setting, tuple[Target, Target]] = {}
        self._decode: dict[Setting, Target] = {}
        self._prefill: dict[Setting, Target] = {}

    def on(self, machine: Machine) -> Forecast:
        """Return the forecast for the machine with some of its cards."""
        beliefs = self.beliefs
        if machine.graphics != self.machine.graphics:
            # Rates of other cards have priors of their own; what rows said stays with
            # the latents that both share.
            beliefs = replace(beliefs, priors=priors_of(machine))
        return Forecast(self.model, machine, self.job, beliefs, self.grades)

    def targets(self, candidate: Candidate) -> tuple[Target, Target]:
        """Return what to predict: one decode step, and the prompt."""
        setting = candidate.setting
        if setting not in self._targets:
            self._targets[setting] = self._described(setting)
        return self._targets[setting]

    def _described(self, setting: Setting) -> tuple[Target, Target]:
        # Sorting a model's bytes takes most of an answer's time, and candidates differ
        # in micro-batches, which decode does not see, or in key-value formats, which
        # prompts do not.
        both = replace(setting, split=(), mapped=False)
        step = replace(both, micro_batch=0, batch=0)
        if step not in self._decode:
            self._decode[step] = decode_target(
                self.machine, self.model, step, self.job.mean_depth, fork=self.fork
            )
        prompt = replace(both, kv_format="f16")
        if prompt not in self._prefill:
            self._prefill[prompt] = prefill_target(
                self.machine, self.model, prompt, self.job.prompt, fork=self.fork
            )
        return self._decode[step], self._prefill[prompt]

    def job_seconds(self, candidate: Candidate, rates: Mapping[str, float]) -> float:
        """Seconds to read the prompt and make the answer."""
        decode, prefill = self.targets(candidate)
        # Every request brings a prompt; their answers are made together.
        prompts_s = self.job.sequences * prefill.seconds(rates)
        return prompts_s + self.job.answer * decode.seconds(rates)

    def medians(self) -> Mapping[str, float]:
        """Return every latent at its median."""
        return _Medians(self.beliefs)

    def latents(self, *candidates: Candidate) -> list[str]:
        """Name every latent that the jobs of some candidates depend on."""
        targets = (target for each in candidates for target in self.targets(each))
        return sorted(set().union(*(target.latents for target in targets)))

    def prospect(self, candidate: Candidate) -> Prospect:
        """Predict a candidate with intervals."""
        decode, prefill = self.targets(candidate)
        rates = self.medians()
        step = decode.predicted(self.beliefs, REPEAT_SPREAD)
        prompt = prefill.predicted(self.beliefs, REPEAT_SPREAD)
        job = self.beliefs.predict(
            lambda values: self.job_seconds(candidate, values),
            self.latents(candidate),
            REPEAT_SPREAD,
        )
        grades = self.grades
        return Prospect(
            candidate=candidate,
            decode=_widened(step, grades.decode).per(candidate.setting.sequences),
            prefill=_widened(prompt, grades.prompt).per(self.job.prompt),
            job=_widened(job, grades.decode),
            decode_terms=decode.terms(rates),
            prefill_terms=prefill.terms(rates),
        )

    def difference(self, first: Candidate, second: Candidate) -> Interval:
        """Ratio of two candidates' job seconds; spreads that they share cancel."""
        return self.beliefs.predict(
            lambda rates: (
                self.job_seconds(second, rates) / self.job_seconds(first, rates)
            ),
            self.latents(first, second),
        )

    def ranked(self, candidates: Sequence[Candidate], count: int) -> list[Prospect]:
        """Return the fastest candidates, best first, ties marked.

        Args:
            candidates: all that fit.
            count: how many to return.
        """
        medians = self.medians()
        # Medians are enough to order; intervals cost far more and are for few.
        ordered = sorted(
            candidates,
            key=lambda each: self._order(each, self.job_seconds(each, medians)),
        )
        shown = _varied(ordered, count)
        best = shown[0]
        return [
            replace(
                self.prospect(each), tied=each is not best and self._tied(best, each)
            )
            for each in shown
        ]

    def _order(self, candidate: Candidate, seconds: float) -> tuple[float, float, int]:
        # Equal speeds: the smaller need of graphics memory, then the plainer format.
        rounded = round(math.log(seconds) / SMALLEST_DIFFERENCE * 10)
        plain = candidate.setting.kv_format != "f16"
        return rounded, candidate.bill.gpu_bytes, plain

    def _tied(self, best: Candidate, other: Candidate) -> bool:
        ratio = self.difference(best, other)
        # A difference may be certain and still too small to matter.
        noise = max(SMALLEST_DIFFERENCE, NINETY * ratio.spread)
        return math.log(ratio.value) < noise


class _Medians(dict[str, float]):
    """Latents at their medians, looked up when first asked for."""

    def __init__(self, beliefs: Beliefs) -> None:
        super().__init__()
        self.beliefs = beliefs

    def __missing__(self, name: str) -> float:
        value = self.beliefs.median(name)
        self[name] = value
        return value


def _varied(ordered: Sequence[Candidate], count: int) -> list[Candidate]:
    """Take the best of each place and format before a second micro-batch of it.

    A list of five neighbours with the same flags but one would tell a user nothing.
    """
    chosen: dict[tuple[object, ...], Candidate] = {}
    for candidate in ordered:
        setting = candidate.setting
        place = (setting.cpu_layers, setting.gpu_layers, setting.chosen_layers)
        chosen.setdefault(place, candidate)
    return list(chosen.values())[:count]


MOST_QUESTIONS = 4
# A row that narrows the answer by less than this share of its spread is not worth it.
WORTH_ASKING = 0.08
ANSWER_TOKENS = 128
PROMPT_TOKENS = 2048

# What latents are called where people read.
WORDS = {
    "host_read": "how fast host memory is read",
    "host_reach": "how fast the CPU gets through weights",
    "floor_s": "what each layer on the CPU costs at least",
    "device_read": "how fast GPU memory is read",
    "device_reach": "how good the GPU's kernels are",
    "layer_s": "what each layer's kernels cost at least",
    "recurrent_ratio": "what a recurrent layer's kernels cost",
    "latent_ratio": "what latent attention's kernels cost",
    "upload": "how fast weights are uploaded",
    "pageable": "what ordinary memory costs in uploads",
    "flops_reach": "how fast the GPU multiplies",
    "tile": "how well small batches fill the GPU",
    "core_flops": "how fast the CPU multiplies",
    "step_s": "what every step costs",
    "kv_reach": "how fast keys and values are read",
    "skew": "how many experts a batch uses",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A measurement to make.

    Attributes:
        command: of llama-bench.
        reason: what it tells.
        spread_before: of the job's seconds, logarithmic.
        spread_after: with this row and those before it.
    """

    command: str
    reason: str
    spread_before: float
    spread_after: float


def next_questions(
    forecast: Forecast, best: Candidate, known: Sequence[Observation] = ()
) -> list[Question]:
    """Choose measurements one by one, each the most telling beside those before.

    What a row says does not depend on its outcome to first order, so each is taken at
    its expected value.

    Args:
        forecast: with what is believed now.
        best: the advised setting, whose job seconds shall be known better.
        known: rows that the forecast has learned from.
    """
    options = _options(forecast, best)
    beliefs = forecast.beliefs
    rows = list(known)
    questions: list[Question] = []

    for _ in range(MOST_QUESTIONS):
        before = _job_spread(forecast, best, beliefs)
        trials = []
        for target, spread, command in options:
            expected = target.predicted(forecast.beliefs).value
            row = target.observed(expected, spread)
            learned = learn(forecast.beliefs.priors, [*rows, row])
            trials.append((_job_spread(forecast, best, learned), command, row, learned))
        after, command, row, learned = min(trials, key=lambda trial: trial[0])
        # The first is asked for in any case, unless rows are there already.
        if (questions or known) and before - after < WORTH_ASKING * before:
            break
        reason = _told(target_latents=row.latents, before=beliefs, after=learned)
        questions.append(Question(command, reason, before, after))
        rows.append(row)
        beliefs = learned
        options = [option for option in options if option[2] != command]
        # Every measurement was asked for.
        if not options:
            break
    return questions


def _job_spread(forecast: Forecast, best: Candidate, beliefs: Beliefs) -> float:
    return beliefs.predict(
        lambda rates: forecast.job_seconds(best, rates), forecast.latents(best)
    ).spread


def _options(forecast: Forecast, best: Candidate) -> list[tuple[Target, float, str]]:
    """Measurements that could be made: decode at two places, prompts at two sizes."""
    model = forecast.model
    machine = forecast.machine
    setting = replace(best.setting, sequences=1, kv_format="f16")
    if setting.chosen_layers is not None:
        # llama-bench counts layers; about as many of them do.
        setting = Setting(
            cpu_layers=len(setting.chosen_layers),
            page_locked=setting.page_locked,
            mapped=setting.mapped,
        )
    last = max(model.moe_layers, default=0) + 1

    options = []
    for count in sorted({setting.cpu_layers, last} if machine.graphics else {0}):
        place = replace(setting, cpu_layers=min(count, last))
        target = decode_target(machine, model, place, ANSWER_TOKENS / 2)
        command = bench_command(place, model, machine, answer_tokens=ANSWER_TOKENS)
        options.append((target, REPEAT_SPREAD, command))
    for micro_batch in (512, 2048):
        place = replace(setting, micro_batch=micro_batch, batch=2048)
        target = prefill_target(machine, model, place, PROMPT_TOKENS)
        command = bench_command(place, model, machine, prompt_tokens=PROMPT_TOKENS)
        options.append((target, PREFILL_SPREAD, command))
    return options


def _told(*, target_latents: frozenset[str], before: Beliefs, after: Beliefs) -> str:
    """Put in words which two latents a row narrows most."""
    # A prior's name is jargon; only those with words are named.
    gains = {
        name: 1 - after.spread(name) / before.spread(name)
        for name in target_latents
        if name in WORDS
    }
    best = sorted(gains, key=lambda name: -gains[name])[:2]
    return "tells " + " and ".join(WORDS[name] for name in best)
