"""Times of an engine that caches experts on the GPU and computes misses on the CPU.

One layer step has some misses on the CPU, some experts copied over the link, and hits
on the GPU; the three run side by side and the slowest counts. Copies that refill the
cache run in the background and take bandwidth from the CPU while they last. So all that
is needed is how often a layer step had how many misses and copies, drawn from a hit
rate with the spread that gates show.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.advice.machine import WSL
from moesim.advice.tables import table
from moesim.advice.times.latents import Prior
from moesim.advice.times.priors import SERVER_CLOCK, shared_priors
from moesim.advice.times.step_times import (
    CORE_BYTES_PER_S,
    SHARPNESS,
    busy_cores,
    device_seconds,
    family,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents

# Misses of one layer step scatter more than independent draws would: beta-binomial.
# Source: counts by layer step of a decayed-frequency cache on three machines.
MISS_CORRELATION = 0.12

MOST_ROUNDS = 30
SETTLED_S = 1e-9
# Where only the sum of reads and copies at the same time is known: the memory
# controller shares about evenly between the two.
EVEN_SHARE = 0.53


@dataclass(frozen=True, slots=True)
class HostRates:
    """Rates of one machine's host memory, bytes per second.

    Attributes:
        cpu: reads alone.
        link: copies alone.
        cpu_beside: reads while a copy runs.
        link_beside: copies while the CPU reads.
    """

    cpu: float
    link: float
    cpu_beside: float
    link_beside: float

    @classmethod
    def of(
        cls, cpu: float, link: float, both: float | None, beside: float | None = None
    ) -> HostRates:
        """Fill in what no probe says.

        Args:
            cpu: reads alone.
            link: copies alone.
            both: sum while both run.
            beside: reads while a copy runs.
        """
        if both is None:
            # Memory serves both until it is full; a link takes about half its rate.
            both = max(cpu, link) + 0.25 * min(cpu, link)
        if beside is None:
            beside = min(cpu, EVEN_SHARE * both)
        return cls(cpu, link, min(cpu, beside), max(0.1 * link, both - beside))


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What the name of a policy says about how an engine works.

    Attributes:
        split: the graph is cut at every layer that may miss (no waiting helpers).
        ahead: copies start before their layer.
        merge: a layer with misses runs two chains, gathers and merges them.
    """

    split: bool = False
    ahead: bool = False
    merge: bool = False


@dataclass(frozen=True)
class EngineWork:
    """What one token asks of such an engine.

    Attributes:
        steps: (CPU misses, copies awaited) -> layer steps per token.
        expert_bytes: of one expert.
        expert_format: its weight format.
        top_k: experts per layer step.
        layers: of the model.
        dense: weight format -> bytes of everything else, per token.
        background_bytes: copied per token without being awaited.
        traits: of the engine.
    """

    steps: Mapping[tuple[int, int], float]
    expert_bytes: float
    expert_format: str
    top_k: int
    layers: int
    dense: Mapping[str, float] = field(default_factory=dict)
    background_bytes: float = 0.0
    traits: EngineTraits = EngineTraits()


def engine_work(
    model: ModelContents,
    steps: Mapping[tuple[int, int], float],
    background: float,
    traits: EngineTraits,
) -> EngineWork:
    """Return what one token asks of an engine that caches a model's experts.

    Args:
        model: its contents; the first MoE layer stands for all.
        steps: (CPU misses, copies awaited) -> layer steps per token.
        background: experts copied per token without being awaited.
        traits: of the engine.
    """
    layer = model.layers[model.moe_layers[0]]
    size = layer.expert_bytes / layer.experts
    dense: Counter[str] = Counter({model.head_format: model.head_bytes})
    for each in model.layers:
        dense.update(each.dense_formats)
    return EngineWork(
        steps=steps,
        expert_bytes=size,
        expert_format=model.main_format,
        top_k=layer.top_k,
        layers=len(model.layers),
        dense=dict(dense),
        background_bytes=background * size,
        traits=traits,
    )


def steps_from_hits(
    model: ModelContents, hit_rate: float
) -> dict[tuple[int, int], float]:
    """Spread misses over layer steps, all of them computed on the CPU.

    Args:
        model: for its layers and experts per token.
        hit_rate: hits over experts asked for.
    """
    layer = model.layers[model.moe_layers[0]]
    chances = miss_chances(layer.top_k, 1 - hit_rate)
    layers = len(model.moe_layers)
    return {(misses, 0): chance * layers for misses, chance in enumerate(chances)}


def miss_chances(top_k: int, miss_rate: float) -> list[float]:
    """Chance of 0, 1, … misses among the experts of one layer step."""
    if miss_rate <= 0:
        return [1.0] + [0.0] * top_k
    if miss_rate >= 1:
        return [0.0] * top_k + [1.0]

    size = (1 - MISS_CORRELATION) / MISS_CORRELATION
    alpha = miss_rate * size
    beta = (1 - miss_rate) * size
    return [
        math.comb(top_k, misses)
        * math.exp(
            _log_beta(misses + alpha, top_k - misses + beta) - _log_beta(alpha, beta)
        )
        for misses in range(top_k + 1)
    ]


def _log_beta(first: float, second: float) -> float:
    return math.lgamma(first) + math.lgamma(second) - math.lgamma(first + second)


def engine_priors(machine: Machine) -> dict[str, Prior]:
    """Return the priors of what such engines add to the machine's own latents."""
    rows = table("priors")
    clock = SERVER_CLOCK if machine.processor.server else 1.0
    clocked = {
        name: (clock * value, *others)
        for name, (value, *others) in rows["clocked"].items()
    }
    added = {**rows["engine"], **clocked}
    if machine.system == WSL:
        added |= rows["wsl engine"]
    # Without a probe the rates themselves are guesses from the specification.
    reads = Prior(0.98, 0.22, "helpers' reads against the specification")
    if machine.probes.host_read:
        why = "helpers' reads against the probe"
        reads = Prior(0.98, 0.05, why, ("host_factor",))
    return {**shared_priors(added), "host_factor": reads}


def engine_seconds(
    work: EngineWork, machine: Machine, host: HostRates, rates: Mapping[str, float]
) -> float:
    """Return the seconds of one token.

    Args:
        work: misses, copies and bytes.
        machine: for its cores.
        host: probed rates of host memory.
        rates: value of every latent.
    """
    base = device_seconds(work.dense, rates)
    base += work.layers * (rates["layer_s"] + rates["engine_layer_s"])
    if work.traits.split:
        base += work.layers * rates["split_s"]
    if work.traits.merge:
        base += work.layers * rates["merge_s"]

    # How much the background copies take from the CPU depends on how long a token takes
    # and the other way round: a few rounds settle it.
    seconds = 2 * base
    cpu_share = 0.5
    for _ in range(MOST_ROUNDS):
        cpu_rate = _cpu_rate(work, machine, host, rates, seconds, cpu_share)
        waits, cpu_s = _layer_waits(work, host, rates, cpu_rate)
        settled = base + waits
        if work.traits.ahead:
            # Copies ahead of their layer run beside everything else, but memory still
            # has to deliver every byte.
            settled = max(settled, _all_host_bytes(work) / _both(host))
        if abs(settled - seconds) < SETTLED_S:
            break
        seconds = settled
        cpu_share = min(1.0, cpu_s / settled)
    return seconds


def _both(host: HostRates) -> float:
    return host.cpu_beside + host.link_beside


def _all_host_bytes(work: EngineWork) -> float:
    awaited = sum(
        (misses + copies) * count for (misses, copies), count in work.steps.items()
    )
    return awaited * work.expert_bytes + work.background_bytes


def _cpu_rate(
    work: EngineWork,
    machine: Machine,
    host: HostRates,
    rates: Mapping[str, float],
    seconds: float,
    cpu_share: float,
) -> float:
    """Rate at which the CPU gets through a miss, background copies included."""
    alone = host.cpu * rates["host_factor"]
    beside = min(alone, host.cpu_beside * rates["beside_factor"])
    copying = cpu_share * host.link_beside + (1 - cpu_share) * host.link
    busy = min(1.0, work.background_bytes / (seconds * copying))
    read = alone * (1 - busy) + beside * busy

    group = family(work.expert_format)
    # Its helpers wait on every core, small ones included.
    threads = machine.processor.cores + machine.processor.small_cores
    unpack = busy_cores(machine, threads) * CORE_BYTES_PER_S[group]
    unpack *= rates[f"core:{group}"]
    return float((read**-SHARPNESS + unpack**-SHARPNESS) ** (-1 / SHARPNESS))


def _layer_waits(
    work: EngineWork,
    host: HostRates,
    rates: Mapping[str, float],
    cpu_rate: float,
) -> tuple[float, float]:
    """Seconds that experts take in all layer steps, and the CPU's part of them."""
    size = work.expert_bytes
    gpu_rate = size / device_seconds({work.expert_format: size}, rates)
    waits = cpu_total = 0.0

    for (misses, copies), count in work.steps.items():
        hits = max(0, work.top_k - misses - copies)
        gpu_s = hits * size / gpu_rate
        cpu_s = misses * size / cpu_rate
        link_s = copies * size / host.link
        if misses and copies:
            cpu_s, link_s = _side_by_side(misses * size, copies * size, host, cpu_rate)
        if misses:
            cpu_s += rates["engine_floor_s"]
        if copies:
            # A copied expert is computed on the GPU after it has landed.
            link_s += rates["fetch_s"] + copies * size / gpu_rate
        waits += count * max(gpu_s, cpu_s, link_s)
        cpu_total += count * cpu_s
    return waits, cpu_total


def _side_by_side(
    cpu_bytes: float, link_bytes: float, host: HostRates, cpu_rate: float
) -> tuple[float, float]:
    """Ends of a CPU read and a copy that start together and slow each other down."""
    cpu_slow = min(cpu_rate, host.cpu_beside)
    cpu_s = cpu_bytes / cpu_slow
    link_s = link_bytes / host.link_beside

    if cpu_s < link_s:
        rest = link_bytes - cpu_s * host.link_beside
        return cpu_s, cpu_s + rest / host.link
    rest = cpu_bytes - link_s * cpu_slow
    return link_s + rest / cpu_rate, link_s
