"""Which measurements would tell most: the next rows to ask the machine's owner for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesim.advice.plan.commands import bench_command
from moesim.advice.times.latents import Beliefs, learn
from moesim.advice.times.predictor import (
    PREFILL_SPREAD,
    REPEAT_SPREAD,
    Target,
    decode_target,
    prefill_target,
)
from moesim.advice.times.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.advice.plan.candidates import Candidate
    from moesim.advice.plan.ranking import Forecast
    from moesim.advice.times.latents import Observation

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
    "device_read": "how fast graphics memory is read",
    "device_reach": "how good the GPU's kernels are",
    "layer_s": "what each layer's kernels cost at least",
    "recurrent_s": "what a recurrent layer's kernels cost",
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
    decode, prefill = forecast.targets(best)
    latents = sorted(decode.latents | prefill.latents)
    return beliefs.predict(
        lambda rates: forecast.job_seconds(best, rates), latents
    ).spread


def _options(forecast: Forecast, best: Candidate) -> list[tuple[Target, float, str]]:
    """Measurements that could be made: decode at two places, prompts at two sizes."""
    model = forecast.model
    machine = forecast.machine
    setting = replace(best.setting, sequences=1, kv_format="f16")
    if setting.chosen_layers is not None:
        # llama-bench counts layers; about as many of them do.
        setting = Setting(
            cpu_layers=len(setting.chosen_layers), page_locked=setting.page_locked
        )
    last = max(model.moe_layers, default=0) + 1

    options = []
    for count in sorted({setting.cpu_layers, last} if machine.graphics else {0}):
        place = setting.with_cpu_layers(min(count, last))
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
