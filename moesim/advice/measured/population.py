"""What machines have in common, learned from all machines but one.

The shipped priors were written by people who had seen the development rows. For a
strict test their medians and spreads are thrown away: textbook values with wide spreads
take their place, and the rows of the *other* machines (or other models) narrow them.
Each machine contributes its own posterior, so a machine with many rows counts once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.advice.times.latents import Beliefs, Prior, learn_once
from moesim.advice.times.priors import PriorTable
from moesim.advice.times.step_times import CORE_BYTES_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.advice.times.latents import Observation

CORE_SPREAD = 0.6

# Latents that are alike on all machines, with what a textbook would say of them.
TEXTBOOK = {
    "layer_s": Prior(50e-6, 0.6, "ten launches of 5 us"),
    "floor_s": Prior(50e-6, 0.8, "two small copies and a few barriers"),
    "host_layer_s": Prior(100e-6, 0.8, "fifteen barriers"),
    "step_s": Prior(200e-6, 1.0, "sampling on the host"),
    "device_reach": Prior(0.75, 0.25, "three quarters of a bare read"),
    "host_reach": Prior(0.90, 0.20, "nine tenths of a bare read"),
    "engine_layer_s": Prior(20e-6, 0.8, "a few hand-offs of 5 us"),
    "engine_floor_s": Prior(20e-6, 0.8, "a few hand-offs of 5 us"),
    "fetch_s": Prior(20e-6, 0.8, "a few hand-offs of 5 us"),
    "split_s": Prior(60e-6, 0.8, "as a floor of llama.cpp"),
    "polled_s": Prior(40e-6, 0.8, "two synchronisations of 20 us"),
    "host_factor": Prior(0.95, 0.10, "a probe is a little optimistic"),
    "beside_factor": Prior(1.0, 0.10, "as probed"),
    **{
        f"core:{group}": Prior(1.0, CORE_SPREAD, "instruction counts")
        for group in CORE_BYTES_PER_S
    },
}

# Other backends than CUDA keep their own medians of what their GPUs do.
GPU_LATENTS = {"layer_s", "device_reach", "floor_s"}

FREEDOM = 3.0
# The textbook counts as much as one machine.
TEXTBOOK_MACHINES = 1.0
ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Member:
    """One machine with what was measured on it.

    Attributes:
        priors: shipped, by its specification or probes.
        backend: of its GPU.
        rows: measured times.
    """

    priors: PriorTable
    backend: str
    rows: Sequence[Observation]


@dataclass(frozen=True, slots=True)
class Population:
    """Medians and spreads of latents over machines."""

    priors: Mapping[str, Prior]

    def table(self, base: PriorTable, backend: str) -> PriorTable:
        """Return a machine's priors with the population's in place of the shipped ones.

        Args:
            base: shipped priors of the machine; its probes and specification stay.
            backend: of its GPU.
        """
        priors = dict(base.priors)
        for name, prior in self.priors.items():
            if name in priors and (backend == "cuda" or name not in GPU_LATENTS):
                priors[name] = prior
        return PriorTable(priors)


def learn_population(members: Sequence[Member]) -> Population:
    """Estimate the population from several machines.

    Args:
        members: those that may be used; none leaves the textbook.
    """
    # Machines and their population explain each other, so both in turns.
    current: Mapping[str, Prior] = TEXTBOOK

    posteriors: Sequence[Beliefs | None] = [None] * len(members)

    for _ in range(ROUNDS):
        beliefs = [
            _posterior(member, Population(current), before)
            for member, before in zip(members, posteriors, strict=True)
        ]
        posteriors = beliefs
        learned = _by_latent(members, beliefs)
        current = {
            name: _combined(start, current[name], learned.get(name, []))
            for name, start in TEXTBOOK.items()
        }
    return Population(current)


def _posterior(
    member: Member, population: Population, before: Beliefs | None
) -> Beliefs:
    table = population.table(member.priors, member.backend)
    return learn_once(table, member.rows, before)


def _by_latent(
    members: Sequence[Member], posteriors: Sequence[Beliefs]
) -> dict[str, list[tuple[float, float]]]:
    """Mean and variance of each latent's logarithm on each machine."""
    learned: dict[str, list[tuple[float, float]]] = defaultdict(list)

    for member, beliefs in zip(members, posteriors, strict=True):
        for at, name in enumerate(beliefs.names):
            # Another backend's kernels are no sample of CUDA's.
            if name in GPU_LATENTS and member.backend != "cuda":
                continue
            value = (float(beliefs.mean[at]), float(beliefs.covariance[at, at]))
            learned[name].append(value)
    return learned


def _combined(start: Prior, now: Prior, learned: list[tuple[float, float]]) -> Prior:
    """One round of estimating a latent's median and spread over machines.

    Machines far from the others weigh less, as under a t distribution: a rented host
    with a quarter of its memory channels must not redefine the rest.
    """
    if not learned:
        return start

    median = math.log(now.value)
    variance = now.spread**2
    weights = [
        (FREEDOM + 1) / (FREEDOM + (mean - median) ** 2 / variance)
        for mean, _ in learned
    ]
    # The textbook keeps a say, or one machine would set the spread to zero.
    total = sum(weights) + TEXTBOOK_MACHINES
    pulled = sum(
        weight * mean for weight, (mean, _) in zip(weights, learned, strict=True)
    )
    median = (pulled + TEXTBOOK_MACHINES * math.log(start.value)) / total

    squares = sum(
        weight * (mean - median) ** 2 + spread
        for weight, (mean, spread) in zip(weights, learned, strict=True)
    )
    squares += TEXTBOOK_MACHINES * start.spread**2
    count = len(learned) + TEXTBOOK_MACHINES
    return Prior(math.exp(median), math.sqrt(squares / count), "other machines")
