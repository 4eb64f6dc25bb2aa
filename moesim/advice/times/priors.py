"""Priors of each latent, from specification or probes, before any row.

The medians are round figures from specifications, instruction counts and published
probes; the spreads say how far machines differ. None was fitted to a speed that the
validation predicts; `docs/measurements/machines.md` says which were compared with
which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moesim.advice.machine import WSL
from moesim.advice.times.latents import Prior
from moesim.advice.times.population import (
    Population,
    kind_of,
    shipped_population,
)
from moesim.advice.times.step_times import CORE_BYTES_PER_S
from moesim.advice.times.work import TEXT_SKEW

if TYPE_CHECKING:
    from moesim.advice.machine import Machine

# Share of the specified memory bandwidth that a long read of GPU memory reaches.
DEVICE_READ = {
    "cuda": (0.92, 0.06),
    "rocm": (0.85, 0.12),
    "vulkan": (0.82, 0.12),
    "sycl": (0.80, 0.15),
    "metal": (0.82, 0.10),
}

# Share of that read which products of a matrix and one vector reach. Format families
# differ around it by REACH_FAMILY_SPREAD. SYCL's kernels for MXFP4 are young; their
# users report a fraction of the others' rate.
REACH = {
    "cuda": (0.80, 0.12),
    "rocm": (0.65, 0.25),
    "vulkan": (0.78, 0.22),
    "sycl": (0.65, 0.25),
    "metal": (0.75, 0.15),
}
# Stacked memory is wider than one token's products fill; cards before Turing have
# slower integer products. Source: speeds of 7B models in half precision and Q4_0 that
# llama.cpp's users publish, against bandwidth: A100 and H100 half, GTX 10 two thirds.
REACH_OF_CLASS = {"hbm": (0.55, 0.20), "old": (0.60, 0.25)}
OLD_LAUNCHES = 1.5
# A narrow memory is filled even by one token's products. Source: Q4_0 of 7B models on
# Strix Halo, M1 and M2, three quarters to five sixths; wide ones (M2 Ultra) half.
NARROW_BYTES_PER_S = 300e9
REACH_OF_NARROW = (0.90, 0.15)
# Intel's chips keep less. Source: 19.0 GiB of Qwen3.6-35B-A3B on an Arc 140T, 17 to 19
# tokens a second.
REACH_OF_NARROW_SYCL = (0.50, 0.30)
REACH_FAMILY_SPREAD = 0.08
SYCL_MXFP4 = (0.25, 0.80)
# Codebooks cost arithmetic: an RTX 3090 reads an 8B model in IQ3_XXS at 430 GB/s, the
# RTX 4090, with twice the FLOP/s and 8 % more bandwidth, at 700 (llama.cpp#8215).
LOOKUP_BYTES_PER_FLOP = 6.5e-3
LOOKUP_SPREAD = 0.2

# Seconds of one layer's kernel launches and small kernels on the GPU.
LAYER_S = {
    "cuda": (40e-6, 0.30),
    "rocm": (75e-6, 0.45),
    "vulkan": (75e-6, 0.45),
    "sycl": (75e-6, 0.45),
    "metal": (160e-6, 0.40),
}

# Recurrent layers launch somewhat more kernels than attention does; latent
# attention splits heads, absorbs matrices and joins again.
RECURRENT = (1.4, 0.3)
LATENT = (2.5, 0.4)

# Share of the device's read rate at which attention reads keys and values. Cards with
# much bandwidth do not fill it with one sequence's short pieces.
KV_REACH = {"cuda": 0.45, "rocm": 0.7, "vulkan": 0.8, "metal": 0.6, "sycl": 0.5}

# Experts of one layer on the CPU: two small copies, two synchronisations, waking the
# threads and some six barriers between the products.
FLOOR_S = (70e-6, 0.40)
FLOOR_S_OTHERS = (90e-6, 0.50)

# Of hosts whose dies, not their channels, limit reading.
DIES_SPREAD = 0.2

# Every wait for the card under WSL2 passes through Windows' driver, and files lie on a
# virtual disk. Source: an i7-4790K with a GTX 1080 Ti and a GTX 1070, 40 layers of
# Qwen3.6-35B-A3B on the CPU: 110 ms a token, 31 of them reading; 1.5 s with a third of
# the file beyond memory.
WSL_FLOOR_S = (1e-3, 0.7)
WSL_SSD_READ = (0.15e9, 1.2)

# Two of the largest common memory modules, 48 GB each.
TWO_MODULES_BYTES = 96 * 1024**3

# Instruction counts are good to a fifth; what is slower than that has other reasons.
CORE_SPREAD = 0.18

# FLOP/s of one core in products with several tokens, by its vector instructions: a
# quarter to a half of the multiply-add peak, because weights are unpacked on the way.
CORE_FLOPS = {"avx2": 70e9, "avx512": 110e9, "neon": 50e9}

# Share of the specified FLOP/s at 60 TFLOP/s, and how it falls as that rate grows: an
# expert's few rows fill a wider matrix engine less. Source: 0.3 and 0.5 both predicted
# prompts of left-out platforms better than 0; desktops hardly changed (12 bins: the
# median miss 21.6 to 21.4 % with 0.3, the interval score 2.88 to 2.92). SYCL multiplies
# one expert after the other: Qwen3.6-35B-A3B wholly on an Arc Pro B70 or B60 reads 558
# to 722 tokens/s of a prompt (llama.cpp#22078, #23142, #24452), a fourth of 0.20.
FLOPS_REACH = {"cuda": 0.30, "metal": 0.30, "rocm": 0.20, "vulkan": 0.20, "sycl": 0.05}
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


class PriorTable(Mapping[str, Prior]):
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
        self.priors = dict(priors)
        self.population = population

    def __getitem__(self, name: str) -> Prior:
        """Return the prior of a latent; misfits exist for every name."""
        if name in self.priors:
            return self.priors[name]
        prior = self.MISFITS.get(kind_of(name))
        if prior is None:
            raise KeyError(name)
        if self.population is not None:
            prior = self.population.applied(name, prior)
        self.priors[name] = prior
        return prior

    def __iter__(self) -> Iterator[str]:
        """Iterate over names, misfits aside."""
        return iter(self.priors)

    def __len__(self) -> int:
        """Count latents, misfits aside."""
        return len(self.priors)


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
    table = textbook_priors(machine, threads)
    return PriorTable(
        {name: learned.applied(name, prior) for name, prior in table.items()}, learned
    )


def textbook_priors(machine: Machine, threads: int | None = None) -> dict[str, Prior]:
    """Return what specifications and instruction counts say, before any population."""
    priors = _host_priors(machine, threads)
    if machine.graphics:
        priors |= _device_priors(machine)
    if machine.kind == "laptop":
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


def _host_priors(machine: Machine, threads: int | None) -> dict[str, Prior]:
    floor, floor_spread = FLOOR_S if machine.backend == "cuda" else FLOOR_S_OTHERS
    # Experts are read in pieces of megabytes as they are asked for.
    ssd_read = Prior(1.2e9, 0.9, "page faults on an NVMe drive")
    if machine.system == WSL:
        ssd_read = Prior(*WSL_SSD_READ, "page faults on a virtual disk")
        if machine.graphics:
            floor, floor_spread = WSL_FLOOR_S
    flops = CORE_FLOPS.get(machine.processor.vector, CORE_FLOPS["avx2"])
    shared = {
        "host_reach": (0.96, 0.07, "products read nearly as fast as a bare read"),
        "floor_s": (floor, floor_spread, "copies, wake-up and barriers per layer"),
        "host_layer_s": (100e-6, 0.5, "some 15 operations with a barrier each"),
        "core_flops": (flops, 0.6, "products of quantised weights"),
        "step_s": (200e-6, 0.7, "sampling and building the graph"),
    }
    for group in CORE_BYTES_PER_S:
        why = "instructions of ggml's dot product"
        shared[f"core:{group}"] = (1.0, CORE_SPREAD, why)
    return {
        "host_read": _host_read(machine, threads),
        "ssd_read": ssd_read,
        # Source: an RTX 3090 makes 157, 328, 382 and 432 tokens a second for 1, 4, 8
        # and 16 requests of Qwen3.6-35B-A3B; nobody says whether prompts are counted.
        "sample_s": Prior(
            2e-9, 0.6, "sampling among the vocabulary, request by request"
        ),
        # Source: UD-IQ1_S of Qwen3.8-Flash-Next, 92 tokens a second with its table in
        # memory, 85 to 91 with a cold page cache; prompts 1,823, 1,482 to 1,541. Builds
        # whose reads are not batched: 66 and 358.
        "table_s": Prior(0.3e-3, 0.7, "look-ups outside the graph"),
        "row_s": Prior(20e-6, 0.9, "page faults of one token's rows"),
        "batched_row_s": Prior(7e-6, 0.7, "page faults of a batch's rows"),
        **shared_priors(shared),
    }


def shared_priors(rows: Mapping[str, tuple[float, float, str]]) -> dict[str, Prior]:
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
        value = max(usable or reads.values())
        return Prior(value, 0.07, "probed read bandwidth", ("host_probe",))

    peak = machine.host_peak_bytes_per_s
    processor = machine.processor
    effects = ("host_read",)
    if machine.unified:
        why = "CPU's share of a unified memory's rate"
        return Prior(0.6 * peak, 0.2, why, effects)

    share, spread, why = 0.75, 0.13, "read share of the stated memory's rate"
    if processor.server or processor.sockets > 1:
        share = 0.65
        spread = 0.25
    if not machine.memory_stated:
        share, spread, why = _unstated(machine)
    if not processor.known:
        spread = max(spread, UNKNOWN_SPREAD)
    if processor.sockets > 1:
        # Weights lie on one socket or the other, and threads on both read across: a
        # second socket's memory is worth next to nothing without `--numa`.
        share /= processor.sockets
        spread = max(spread, 0.40)

    rate = share * peak
    if processor.dies_bytes_per_s:
        # The narrower of memory and the dies' links, rounded at the corner.
        dies = 0.95 * processor.dies_bytes_per_s / processor.sockets
        if dies < rate and processor.kind in {"workstation", "server"}:
            # Clocks of the fabric, and how dies share channels, are set in the BIOS.
            spread = max(spread, DIES_SPREAD)
        rate = (rate**-6 + dies**-6) ** (-1 / 6)
    return Prior(rate, spread, why, effects)


def _unstated(machine: Machine) -> tuple[float, float, str]:
    """Share and spread where nobody stated the memory's rate."""
    processor = machine.processor
    if processor.kind == "laptop":
        why = "laptops are often sold with one module in two channels"
        return 0.60, 0.40, why
    if machine.memory.generation is not None and not processor.server:
        why = "read share of the usual rate of the generation"
        return 0.75, 0.18, why
    if processor.server:
        why = "servers often run with part of their channels filled"
        return 0.50, 0.45, why
    if machine.generation_open:
        # Halfway between both generations.
        why = "between the rates of two generations that fit"
        return 0.60, 0.32, why
    size = machine.memory.size_bytes
    why = "read share of the fastest official rate, memory not stated"
    if size is not None and size > TWO_MODULES_BYTES:
        # Four modules run far below the rate of two; two hold up to 96 GB.
        return 0.55, 0.25, why
    return 0.70, 0.22, why


def _device_priors(machine: Machine) -> dict[str, Prior]:
    backend = machine.backend
    card_class = machine.graphics[0].card_class
    share, spread = DEVICE_READ[backend]
    if not all(card.known for card in machine.graphics):
        spread = UNKNOWN_SPREAD
    read = Prior(
        share * machine.device_bytes_per_s,
        spread,
        f"share of the specified bandwidth under {backend}",
    )
    if machine.probes.device_read:
        read = Prior(machine.probes.device_read, 0.04, "probed device read")

    layer, layer_spread = LAYER_S[backend]
    reach, reach_spread = REACH[backend]
    if card_class in REACH_OF_CLASS:
        reach, reach_spread = REACH_OF_CLASS[card_class]
    elif machine.unified and machine.device_bytes_per_s < NARROW_BYTES_PER_S:
        reach, reach_spread = REACH_OF_NARROW
        if backend == "sycl":
            reach, reach_spread = REACH_OF_NARROW_SYCL
    if card_class == "old":
        layer *= OLD_LAUNCHES
    kv_why = "attention reads keys and values in short pieces"
    shared = {
        "layer_s": (layer, layer_spread, "launches and small kernels"),
        "recurrent_ratio": (*RECURRENT, "kernels of a recurrent layer"),
        "latent_ratio": (*LATENT, "kernels of latent attention"),
        "kv_reach": (KV_REACH[backend], 0.4, kv_why),
        "device_reach": (reach, reach_spread, "matrix times vector"),
    }
    for group in CORE_BYTES_PER_S:
        spread = REACH_FAMILY_SPREAD
        value = 1.0
        if (backend, group) == ("sycl", "mxfp4"):
            value, spread = SYCL_MXFP4
        if group == "lookup":
            most = LOOKUP_BYTES_PER_FLOP * machine.device_flops / (read.value * reach)
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
    share = (machine.device_flops / USUAL_FLOPS) ** FLOPS_POWER
    staged = (1 + staging) ** (-1 / sharpness)
    shared = {
        "pageable": (staged, 0.3, "copies through a staging buffer"),
        "upload_floor_s": (150e-6, 0.7, "synchronisation per uploaded layer"),
        "flops_reach": (
            FLOPS_REACH[backend] * share,
            0.6,
            "share of the specified FLOP/s",
        ),
        "attention_reach": (0.5, 0.6, "attention against products"),
        "tile": (32.0, 0.6, "padding of an expert's batch"),
        "batch_layer_s": (300e-6, 0.7, "kernels of one layer for many tokens"),
    }
    return {"upload": link, **shared_priors(shared)}
