"""Predicts decode and prefill of one machine, and learns from rows measured on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.advice.times.latents import Beliefs, Interval, Observation
from moesim.advice.times.step_times import (
    decode_latents,
    decode_terms,
    prefill_latents,
    prefill_terms,
)
from moesim.advice.times.work import DecodeWork, PrefillWork, decode_work, prefill_work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.advice.machine.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.setting import Setting

# What two runs of one command differ by, as a share. Source: repetitions of decode
# sweeps (0.1 to 3 % standard deviation, median about 1 %).
REPEAT_SPREAD = 0.012
# Prompts are shorter measurements and depend on which tokens were drawn.
PREFILL_SPREAD = 0.03


@dataclass(frozen=True)
class Target:
    """One thing to predict: the seconds of a decode step or of a prompt.

    Attributes:
        machine: that runs it.
        setting: flags.
        work: bytes and FLOPs.
        misfits: latents that multiply the whole time.
    """

    machine: Machine
    setting: Setting
    work: DecodeWork | PrefillWork
    misfits: tuple[str, ...] = ()

    @property
    def latents(self) -> frozenset[str]:
        """Every latent that the seconds depend on."""
        if isinstance(self.work, DecodeWork):
            names = decode_latents(self.work)
        else:
            names = prefill_latents(self.work, self.machine, self.setting)
        return frozenset(names) | frozenset(self.misfits)

    def terms(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return seconds by term."""
        if isinstance(self.work, DecodeWork):
            return decode_terms(self.work, self.machine, self.setting, rates)
        return prefill_terms(self.work, self.machine, self.setting, rates)

    def seconds(self, rates: Mapping[str, float]) -> float:
        """Return the seconds of all terms, misfits included."""
        # What no term explains of this file or session scales all of them.
        factor = math.prod(rates[name] for name in self.misfits)
        return factor * sum(self.terms(rates).values())

    def observed(self, seconds: float, spread: float, label: str = "") -> Observation:
        """Return a measured time of this target."""
        return Observation(seconds, self.seconds, self.latents, spread, label)

    def predicted(self, beliefs: Beliefs, spread: float = 0.0) -> Interval:
        """Return the expected seconds with their interval."""
        return beliefs.predict(self.seconds, sorted(self.latents), spread)


def misfits_of(model: ModelContents, session: str = "") -> tuple[str, ...]:
    """Name the latents that all times of one model, and of one session, share."""
    names = [f"misfit:model:{model.name}"]
    if session:
        names.append(f"misfit:session:{session}")
    return tuple(names)


def decode_target(
    machine: Machine,
    model: ModelContents,
    setting: Setting,
    context_tokens: float,
    session: str = "",
) -> Target:
    """Describe one decode step at a mean depth of the context."""
    work = decode_work(model, setting, context_tokens)
    return Target(machine, setting, work, misfits_of(model, session))


def prefill_target(
    machine: Machine,
    model: ModelContents,
    setting: Setting,
    prompt_tokens: int,
    depth_tokens: int = 0,
    session: str = "",
) -> Target:
    """Describe reading a prompt."""
    work = prefill_work(model, setting, prompt_tokens, depth_tokens)
    return Target(machine, setting, work, misfits_of(model, session))
