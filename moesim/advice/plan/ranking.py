"""Predicts every candidate and ranks by the seconds of the job.

All candidates share one set of beliefs, so what is not known of the machine moves them
together: two settings can be told apart although neither speed is known well. Those
whose difference is within its own noise are ties, and the answer says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesim.advice.times.latents import NINETY, Beliefs, Interval
from moesim.advice.times.predictor import (
    REPEAT_SPREAD,
    Target,
    decode_target,
    prefill_target,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.advice.machine.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.candidates import Candidate, Job

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


class Forecast:
    """Predicts settings of one model on one machine for one job."""

    def __init__(
        self, model: ModelContents, machine: Machine, job: Job, beliefs: Beliefs
    ) -> None:
        self.model = model
        self.machine = machine
        self.job = job
        self.beliefs = beliefs

    def targets(self, candidate: Candidate) -> tuple[Target, Target]:
        """Return what to predict: one decode step, and the prompt."""
        decode = decode_target(
            self.machine, self.model, candidate.setting, self.job.mean_depth
        )
        prefill = prefill_target(
            self.machine, self.model, candidate.setting, self.job.prompt
        )
        return decode, prefill

    def job_seconds(self, candidate: Candidate, rates: Mapping[str, float]) -> float:
        """Seconds to read the prompt and make the answer."""
        decode, prefill = self.targets(candidate)
        return prefill.seconds(rates) + self.job.answer * decode.seconds(rates)

    def medians(self) -> Mapping[str, float]:
        """Return every latent at its median."""
        return _Medians(self.beliefs)

    def prospect(self, candidate: Candidate) -> Prospect:
        """Predict a candidate with intervals."""
        decode, prefill = self.targets(candidate)
        latents = decode.latents | prefill.latents
        rates = {name: self.beliefs.median(name) for name in latents}
        job = self.beliefs.predict(
            lambda values: (
                prefill.seconds(values) + self.job.answer * decode.seconds(values)
            ),
            sorted(latents),
            REPEAT_SPREAD,
        )
        step = decode.predicted(self.beliefs, REPEAT_SPREAD)
        prompt = prefill.predicted(self.beliefs, REPEAT_SPREAD)
        return Prospect(
            candidate=candidate,
            decode=_per_second(step, candidate.setting.sequences),
            prefill=_per_second(prompt, self.job.prompt),
            job=job,
            decode_terms=decode.terms(rates),
            prefill_terms=prefill.terms(rates),
        )

    def difference(self, first: Candidate, second: Candidate) -> Interval:
        """Ratio of two candidates' job seconds; spreads that they share cancel."""
        targets = (*self.targets(first), *self.targets(second))
        latents = sorted(set().union(*(target.latents for target in targets)))
        return self.beliefs.predict(
            lambda rates: (
                self.job_seconds(second, rates) / self.job_seconds(first, rates)
            ),
            latents,
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


def _per_second(seconds: Interval, tokens: int) -> Interval:
    return Interval(tokens / seconds.value, seconds.spread)


def _varied(ordered: Sequence[Candidate], count: int) -> list[Candidate]:
    """Take the best of each place and format before a second micro-batch of it.

    A list of five neighbours with the same flags but one would tell a user nothing.
    """
    chosen: list[Candidate] = []
    seen: set[tuple[object, ...]] = set()
    for candidate in ordered:
        setting = candidate.setting
        key = (setting.cpu_layers, setting.gpu_layers, setting.chosen_layers)
        if key not in seen:
            seen.add(key)
            chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen
