"""Priors for a strict test: never informed by the machine, or the model, under test."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from moesim.advice.measured.population import Member, Population, learn_population
from moesim.advice.measured.targets import (
    machine_of,
    named_gpu,
    observation_of,
    spills,
)
from moesim.advice.times.latents import Beliefs
from moesim.advice.times.priors import PriorTable, priors_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.advice.machine.machine import Machine
    from moesim.advice.measured.rows import Run

# What lay on the table when the shipped priors were written: machine -> models. Other
# machines, and other models on these, are predicted with the shipped priors as they
# are, because nobody had seen their rows.
GPT = "gpt-oss"
QWEN = "qwen3-30b-a3b"
DEVELOPED_ON = {
    "a10": (GPT, QWEN),
    "5090_270K": (GPT,),
    "5090_7352": (GPT,),
    "5090_7900": (GPT,),
    "5090_7950X": (GPT,),
    "5090_homepc_059": (GPT,),
    "5090_hostS_9950X": (GPT, QWEN),
    "5090_9950X3D_A": (GPT,),
    "5090_9950X3D_A4": (GPT, QWEN),
    "5090_O1_9950X": (GPT, QWEN),
    "5090_O3_9950X": (GPT, QWEN),
    "5090_099e_9950X": (GPT,),
    "5090_099h_7950X": (GPT,),
}
# The same for rows that name devices: (card, processor) -> models.
DEVELOPED_ON_DEVICES = {
    ("Arc B580", "Core Ultra 7 265K"): (
        GPT,
        QWEN,
        "qwen3.6-35b-a3b",
        "llama-4-scout",
        "olmoe",
    ),
    ("Radeon AI PRO R9700", "unknown desktop CPU"): ("qwen3.6-35b-a3b",),
    ("RX 7900 XTX", "unknown desktop CPU"): ("qwen3.6-35b-a3b",),
    ("RTX 5090", "Core Ultra 9 285K"): (GPT,),
    ("RTX 3090", "unknown desktop CPU"): ("deepseek-v3",),
    ("RTX 4080", "Ryzen 9 7950X"): ("deepseek-v2-lite",),
}


def developed_on(machine_name: str, machine: Machine, model_name: str) -> bool:
    """Tell whether the shipped priors may have been shaped by such rows."""
    devices = [(card.name, machine.processor.name) for card in machine.graphics]
    models = DEVELOPED_ON.get(machine_name, ())
    for pair in devices:
        models += DEVELOPED_ON_DEVICES.get(pair, ())
    return model_name.lower().startswith(models) if models else False


class StrictPriors:
    """Priors of every machine, learned without it where the shipped ones knew it."""

    def __init__(self, runs: Iterable[Run], *, probed: bool) -> None:
        self.probed = probed
        self.machines: dict[str, list[Run]] = defaultdict(list)
        for run in runs:
            if run.kind == "decode" and named_gpu(run) and not spills(run):
                self.machines[run.machine_name].append(run)
        self.known: dict[tuple[str, str], Population] = {}

    def machine(self, run: Run) -> Machine:
        """Return the run's machine at this test's grade."""
        return machine_of(run, probed=self.probed)

    def without_machine(self, run: Run) -> Beliefs:
        """Return beliefs about a run's machine that no row of it has shaped."""
        shipped = priors_of(self.machine(run), run.setting.threads)
        if not developed_on(run.machine_name, run.machine, run.model_name):
            return Beliefs(shipped)
        population = self._population("machine", run.machine_name)
        return Beliefs(population.table(shipped, run.machine.backend))

    def without_model(self, run: Run) -> Beliefs:
        """Return beliefs about a run's machine that no row of its model has shaped."""
        shipped = priors_of(self.machine(run), run.setting.threads)
        population = self._population("model", run.model_name.split()[0])
        return Beliefs(population.table(shipped, run.machine.backend))

    def _population(self, kind: str, name: str) -> Population:
        # Learning a population takes a second and serves many rows.
        if (kind, name) not in self.known:
            self.known[kind, name] = learn_population(self._members(kind, name))
        return self.known[kind, name]

    def _members(self, kind: str, name: str) -> list[Member]:
        members = []
        for machine_name, rows in self.machines.items():
            # The machine under test must not shape its own priors.
            if kind == "machine" and machine_name == name:
                continue
            usable = [
                run
                for run in rows
                if kind != "model" or not run.model_name.startswith(name)
            ]
            if usable:
                members.append(self._member(usable))
        return members

    def _member(self, rows: list[Run]) -> Member:
        machine = self.machine(rows[0])
        priors = priors_of(machine, rows[0].setting.threads)
        assert isinstance(priors, PriorTable)
        observations = [observation_of(run, machine) for run in rows]
        return Member(priors, machine.backend, observations)
