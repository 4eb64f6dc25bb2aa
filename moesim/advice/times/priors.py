"""Priors of each latent, from specification or probes, before any row.

A latent's logarithm is what specification or probe say, plus *effects* that machines
share (of the backend, the kind of card or processor, the weight format), as
`benchmarks.measured.fit` learned them, plus what is particular to one machine. An
effect of which nobody has measured anything keeps its whole spread.

Round figures and their sources stand in one table, ``advice/data/priors.yaml``; here
are those that follow from the machine. None was fitted to a speed that the validation
predicts; `docs/measurements/machines.md` says which were compared with which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from moesim.advice.machine import WSL
from moesim.advice.tables import table
from moesim.advice.times.latents import Prior
from moesim.advice.times.step_times import CORE_BYTES_PER_S
from moesim.advice.times.work import TEXT_SKEW

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.advice.machine import Machine

# Server cores run at about two thirds of a desktop's clock, so hand-offs take longer.
SERVER_CLOCK = 1.5
OLD_LAUNCHES = 1.5
# A narrow memory is filled even by one token's products.
NARROW_BYTES_PER_S = 300e9
REACH_FAMILY_SPREAD = 0.08
# SYCL's kernels for MXFP4 are young; their users report a fraction of the others' rate.
SYCL_MXFP4 = (0.25, 0.80)
# Codebooks cost arithmetic: an RTX 3090 reads an 8B model in IQ3_XXS at 430 GB/s, the
# RTX 4090, with twice the FLOP/s and 8 % more bandwidth, at 700 (llama.cpp#8215).
LOOKUP_BYTES_PER_FLOP = 6.5e-3
LOOKUP_SPREAD = 0.2

# Twice the bandwidth on two sockets: 2 to 11 % more tokens/s (llama.cpp#11733).
SECOND_SOCKET_SPREAD = 0.12

# Of hosts whose dies, not their channels, limit reading.
DIES_SPREAD = 0.2

# Two of the largest common memory modules, 48 GB each.
TWO_MODULES_BYTES = 96 * 1024**3

# Instruction counts are good to a fifth; what is slower than that has other reasons.
CORE_SPREAD = 0.18

# How the share of the specified FLOP/s falls as that rate grows: an expert's few rows
# fill a wider matrix engine less. Source: 0.3 and 0.5 both predicted prompts of
# left-out platforms better than 0; desktops hardly changed (12 bins: the median miss
# 21.6 to 21.4 % with 0.3, the interval score 2.88 to 2.92).
USUAL_FLOPS = 60e12
FLOPS_POWER = -0.3

# Passes over host memory that a copy out of ordinary memory takes: the driver reads,
# fetches the staging buffer's lines, writes them, and the card reads.
STAGED_PASSES = 4

# What a laptop's chips may draw and how they are cooled is its maker's choice: one name
# stands for 45 to 115 W. A guess: two laptops were measured.
LAPTOP_SPREAD = 1.25

# Without the processor's name its memory may be any; without the card's, likewise.
UNKNOWN_SPREAD = 0.45


# What a kind has of its own of which no machine was measured may be anything.
UNMEASURED_SPREAD = 0.7


@dataclass(frozen=True)
class Population:
    """Effects that machines share, and the scale of what they do not.

    Attributes:
        effects: name -> (mean, standard deviation) of its logarithm.
        scales: latent -> standard deviation over machines, relative to the textbook's.
        widths: grade of knowledge -> factor on spreads and addition to them, such that
            90 % intervals of machines that were left out hold what they say.
        source: rows and machines behind it.
    """

    effects: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    widths: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    source: str = ""

    def applied(self, name: str, prior: Prior) -> Prior:
        """Return a latent's prior with the effects that its machine shares."""
        shift = 0.0
        spread = prior.spread * self.scales.get(kind_of(name), 1.0)
        variance = spread**2
        for effect in prior.effects:
            unmeasured = (0.0, UNMEASURED_SPREAD * prior.spread)
            mean, deviation = self.effects.get(effect, unmeasured)
            shift += mean
            variance += deviation**2
        return replace(
            prior, value=prior.value * math.exp(shift), spread=math.sqrt(variance)
        )


def stretched(spread: float, stretch: tuple[float, float]) -> float:
    """Return a spread that left-out machines agree with.

    Args:
        spread: standard deviation of a logarithm, as beliefs have it.
        stretch: factor, and addition (in squares).
    """
    return math.hypot(stretch[0] * spread, stretch[1])


def kind_of(name: str) -> str:
    """Latents whose machines' particulars have one scale."""
    parts = name.split(":")
    return ":".join(parts[:2]) if parts[0] == "misfit" else parts[0]


@cache
def shipped_population() -> Population:
    """Return the population that `python -m benchmarks.measured` wrote."""
    rows = table("population")
    # YAML knows no tuples.
    pairs = {
        kind: {name: tuple(pair) for name, pair in rows[kind].items()}
        for kind in ("effects", "widths")
    }
    return Population(**{**rows, **pairs})


class PriorTable(dict[str, Prior]):
    """Priors of one machine, and of misfits that rows bring with them.

    ``misfit:model:NAME`` and ``misfit:session:NAME`` multiply all times of one model
    file or of one session of measurements, ``misfit:engine:NAME`` those of a fork;
    their medians are 1.
    """

    MISFITS = {  # noqa: RUF012 # read only
        "misfit:model": Prior(1.0, 0.05, "kernels differ in shape"),
        "misfit:session": Prior(1.0, 0.06, "builds, clocks and prompts differ"),
        # Half again as fast, or as slow: forks say so of their kernels.
        "misfit:engine": Prior(1.0, 0.25, "forks have kernels of their own"),
        # ik_llama.cpp#2155: 47 to 48 ms a token instead of 31 to 33 (gemma-3-1B).
        "misfit:slow engine": Prior(1.5, 0.25, "ik_llama.cpp's MXFP4 on the CPU"),
    }

    def __init__(
        self, priors: Mapping[str, Prior], population: Population | None = None
    ) -> None:
        super().__init__(priors)
        self.population = population

    def __missing__(self, name: str) -> Prior:
        """Return the prior of a misfit, which exists for every name."""
        prior = self.MISFITS.get(kind_of(name))
        if prior is None:
            raise KeyError(name)
        if self.population is not None:
            prior = self.population.applied(name, prior)
        self[name] = prior
        return prior


def priors_of(
    machine: Machine,
    threads: int | None = None,
    population: Population | None = None,
) -> PriorTable:
    """Return the priors of a machine's latents, by its grade.

    Args:
        machine: by specification, with probes where there are any.
        threads: of the CPU; probes know rates by threads.
        population: what machines have in common; None takes the shipped one.
    """
    learned = shipped_population() if population is None else population
    priors = {
        name: learned.applied(name, prior)
        for name, prior in textbook_priors(machine, threads).items()
    }
    return PriorTable(priors, learned)


def textbook_priors(machine: Machine, threads: int | None = None) -> dict[str, Prior]:
    """Return what specifications and instruction counts say, before any population."""
    priors = _host_priors(machine, threads)
    if machine.graphics:
        priors |= _device_priors(machine)
    if _is_laptop(machine):
        priors = {
            name: replace(prior, spread=LAPTOP_SPREAD * prior.spread)
            for name, prior in priors.items()
        }
    if machine.graphics:
        priors |= _prefill_priors(machine, priors["host_read"])
    # Random tokens, as benchmarks use them, are routed to a narrower choice of experts
    # than text. Source: uploads of used experts in llama.cpp#15346.
    why = "experts' popularity under random tokens"
    priors["skew"] = Prior(2.4, 0.12, why, ("skew",))
    # Gates balance their load on text, though never quite.
    priors["text_skew"] = Prior(TEXT_SKEW, 0.4, "experts' popularity in text")
    return priors


def _is_laptop(machine: Machine) -> bool:
    """Tell whether one card, or the processor beside it, is a laptop's."""
    if machine.unified or machine.processor.sockets > 1 or machine.gpu_count != 1:
        return False
    card_class = machine.graphics[0].card_class
    mobile = machine.processor.kind == "laptop" or card_class == "mobile"
    return mobile and card_class != "old"


def _host_priors(machine: Machine, threads: int | None) -> dict[str, Prior]:
    rows = table("priors")
    alone = rows["alone"]
    floor = rows["floor_s"]["cuda" if machine.backend == "cuda" else "other"]
    if machine.system == WSL:
        alone = {**alone, **rows["wsl"]}
        if machine.graphics:
            floor = rows["floor_s"]["wsl"]
    flops = rows["core_flops"].get(machine.processor.vector, rows["core_flops"]["avx2"])
    if machine.processor.server:
        flops /= SERVER_CLOCK
    shared = {
        **rows["host"],
        "floor_s": (*floor, "copies, wake-up and barriers per layer"),
        "core_flops": (
            flops,
            0.6,
            "products of quantised weights",
        ),
    }
    why = "instructions of ggml's dot product"
    shared |= {f"core:{group}": (1.0, CORE_SPREAD, why) for group in CORE_BYTES_PER_S}
    return {
        "host_read": _host_read(machine, threads),
        **{name: Prior(*row) for name, row in alone.items()},
        **shared_priors(shared),
    }


def shared_priors(rows: Mapping[str, Sequence[Any]]) -> dict[str, Prior]:
    """Return priors whose medians machines share an effect on, under the same name."""
    return {
        name: Prior(value, spread, why, (name,))
        for name, (value, spread, why) in rows.items()
    }


def _host_read(machine: Machine, threads: int | None) -> Prior:
    """What reading host memory alone reaches."""
    reads = machine.probes.host_read
    if reads:
        wanted = threads or machine.processor.cores
        # Beyond the fast cores threads add nothing: the next smaller probe holds.
        usable = [rate for count, rate in reads.items() if count <= wanted]
        value, spread = max(usable or reads.values()), 0.07
        sockets = machine.processor.sockets
        if sockets > 1 and value > machine.host_peak_bytes_per_s / sockets:
            # Each socket read its own memory, as weights do only with `--numa`.
            value, spread = value / sockets, SECOND_SOCKET_SPREAD
        return Prior(value, spread, "probed read bandwidth", ("host_probe",))

    processor = machine.processor
    share, spread, why = table("priors")["host_read"][_memory_known(machine)]
    rate = share * machine.host_peak_bytes_per_s
    effects = ("host_read",)
    if machine.unified:
        return Prior(rate, spread, why, effects)
    if not processor.known:
        spread = max(spread, UNKNOWN_SPREAD)
    if processor.sockets > 1:
        # Weights lie on one socket or the other, and threads on both read across: a
        # second socket's memory is worth next to nothing without `--numa`.
        rate /= processor.sockets
        spread = max(spread, 0.40)

    if processor.dies_bytes_per_s:
        # The narrower of memory and the dies' links, rounded at the corner.
        dies = 0.95 * processor.dies_bytes_per_s / processor.sockets
        if dies < rate and processor.kind in {"workstation", "server"}:
            # Clocks of the fabric, and how dies share channels, are set in the BIOS.
            spread = max(spread, DIES_SPREAD)
        rate = (rate**-6 + dies**-6) ** (-1 / 6)
    return Prior(rate, spread, why, effects)


def _memory_known(machine: Machine) -> str:
    """What is known of host memory, as the table of priors calls it."""
    processor = machine.processor
    wide = processor.server or processor.sockets > 1
    size = machine.memory.size_bytes
    known = {
        "unified": machine.unified,
        "stated server": machine.memory_stated and wide,
        "stated": machine.memory_stated,
        "laptop": processor.kind == "laptop",
        "server": processor.server,
        "generation": machine.memory.generation is not None,
        "two generations": machine.generation_open,
        "four modules": size is not None and size > TWO_MODULES_BYTES,
    }
    return next((name for name, holds in known.items() if holds), "two modules")


def _device_priors(machine: Machine) -> dict[str, Prior]:
    rows = table("priors")
    backend = machine.backend
    figures = rows["backends"][backend]
    card_class = machine.graphics[0].card_class
    share, spread = figures["device_read"]
    if not all(card.known for card in machine.graphics):
        spread = UNKNOWN_SPREAD
    read = Prior(
        share * machine.device_bytes_per_s,
        spread,
        f"share of the specified bandwidth under {backend}",
    )
    if machine.probes.device_read:
        read = Prior(machine.probes.device_read, 0.04, "probed device read")

    layer, layer_spread = figures["layer_s"]
    narrow = machine.unified and machine.device_bytes_per_s < NARROW_BYTES_PER_S
    kinds = rows["reach"]
    reach = kinds.get(card_class)
    if reach is None and narrow:
        reach = kinds.get(f"narrow {backend}", kinds["narrow"])
    reach = reach or figures["reach"]
    if card_class == "old":
        layer *= OLD_LAUNCHES
    shared = {
        **rows["device"],
        "layer_s": (layer, layer_spread, "launches and small kernels"),
        "kv_reach": (
            figures["kv_reach"],
            0.4,
            "attention reads keys and values in short pieces",
        ),
        "device_reach": (*reach, "matrix times vector"),
    }
    for group in CORE_BYTES_PER_S:
        spread = REACH_FAMILY_SPREAD
        value = 1.0
        if (backend, group) == ("sycl", "mxfp4"):
            value, spread = SYCL_MXFP4
        if group == "lookup":
            bytes_per_s = read.value * reach[0]
            most = LOOKUP_BYTES_PER_FLOP * machine.device_flops / bytes_per_s
            value = (1 + most**-4) ** -0.25
            spread = LOOKUP_SPREAD
        why = "kernels differ by weight format"
        shared[f"reach:{group}"] = (value, spread, why)
    return {"device_read": read, **shared_priors(shared)}


def _prefill_priors(machine: Machine, host: Prior) -> dict[str, Prior]:
    probes = machine.probes
    if probes.link:
        link = Prior(0.9 * probes.link, 0.12, "uploads against the probed copy")
    elif machine.link_measured:
        link = Prior(0.95 * machine.link_bytes_per_s, 0.10, "stated as measured")
    else:
        # A copy out of host memory cannot be faster than reading it.
        wire = 0.82 * machine.link_bytes_per_s
        slower = (wire**-6 + (0.95 * host.value) ** -6) ** (-1 / 6)
        link = Prior(slower, 0.20, "protocol losses of PCIe, read rate of the host")
    link = replace(link, effects=("upload",))

    backend = machine.backend
    # The driver fills one piece while another crosses the link; ggml's Vulkan backend
    # does one after the other (`deferred_memcpy`).
    sharpness = 1 if backend == "vulkan" else 6
    staging = (STAGED_PASSES * link.value / host.value) ** sharpness
    staged = (1 + staging) ** (-1 / sharpness)
    share = (machine.device_flops / USUAL_FLOPS) ** FLOPS_POWER
    share *= table("priors")["backends"][backend]["flops_reach"]
    shared = {
        **table("priors")["prompt"],
        "pageable": (staged, 0.3, "copies through a staging buffer"),
        "flops_reach": (share, 0.6, "share of the specified FLOP/s"),
    }
    return {"upload": link, **shared_priors(shared)}
