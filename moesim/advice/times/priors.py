"""Priors of each latent, from specification or probes, before any row.

The medians are round figures from specifications, instruction counts and published
probes; the spreads say how far machines differ. None was fitted to a speed that the
validation predicts; `docs/advise.md` says which were compared with which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moesim.advice.times.latents import Prior
from moesim.advice.times.step_times import CORE_BYTES_PER_S
from moesim.advice.times.work import TEXT_SKEW

if TYPE_CHECKING:
    from moesim.advice.machine.machine import Machine

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
REACH_FAMILY_SPREAD = 0.08
SYCL_MXFP4 = (0.25, 0.80)

# Seconds of one layer's kernel launches and small kernels on the GPU.
LAYER_S = {
    "cuda": (40e-6, 0.30),
    "rocm": (75e-6, 0.45),
    "vulkan": (75e-6, 0.45),
    "sycl": (75e-6, 0.45),
    "metal": (160e-6, 0.40),
}

# Recurrent layers launch about twice as many kernels as attention does.
RECURRENT = 2.0

# Experts of one layer on the CPU: two small copies, two synchronisations, waking the
# threads and some six barriers between the products.
FLOOR_S = (70e-6, 0.40)
FLOOR_S_OTHERS = (90e-6, 0.50)
WINDOWS = 1.4

# What two sockets reach together, of the sum of their memories' rates.
SOCKETS_SHARE = 0.5

# Two of the largest common memory modules, 48 GB each.
TWO_MODULES_BYTES = 96 * 1024**3


# FLOP/s of one core in products with several tokens, by its vector instructions: a
# quarter to a half of the multiply-add peak, because weights are unpacked on the way.
CORE_FLOPS = {"avx2": 70e9, "avx512": 110e9, "neon": 50e9}


class PriorTable(Mapping[str, Prior]):
    """Priors of one machine, and of misfits that rows bring with them.

    ``misfit:model:NAME`` and ``misfit:session:NAME`` multiply all times of one model
    file or of one session of measurements; their medians are 1.
    """

    MODEL_SPREAD = 0.04
    SESSION_SPREAD = 0.06

    def __init__(self, priors: Mapping[str, Prior]) -> None:
        self.priors = dict(priors)

    def __getitem__(self, name: str) -> Prior:
        """Return the prior of a latent; misfits exist for every name."""
        if name.startswith("misfit:model:"):
            return Prior(1.0, self.MODEL_SPREAD, "kernels differ in shape")
        if name.startswith("misfit:session:"):
            return Prior(1.0, self.SESSION_SPREAD, "builds, clocks and prompts differ")
        return self.priors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over names, misfits aside."""
        return iter(self.priors)

    def __len__(self) -> int:
        """Count latents, misfits aside."""
        return len(self.priors)


def priors_of(machine: Machine, threads: int | None = None) -> PriorTable:
    """Return the priors of a machine's latents, by its grade.

    Args:
        machine: by specification, with probes where there are any.
        threads: of the CPU; probes know rates by threads.
    """
    priors = _host_priors(machine, threads)
    if machine.graphics:
        priors |= _device_priors(machine)
        priors |= _prefill_priors(machine, priors["host_read"])
    # Random tokens, as benchmarks use them, are routed to a narrower choice of experts
    # than text. Source: uploads of used experts in llama.cpp#15346.
    priors["skew"] = Prior(2.4, 0.12, "experts' popularity under random tokens")
    # Gates balance their load on text, though never quite.
    priors["text_skew"] = Prior(TEXT_SKEW, 0.4, "experts' popularity in text")
    return PriorTable(priors)


def _host_priors(machine: Machine, threads: int | None) -> dict[str, Prior]:
    value, spread, why = _host_read(machine, threads)
    floor, floor_spread = FLOOR_S if machine.backend == "cuda" else FLOOR_S_OTHERS
    if machine.windows:
        floor *= WINDOWS
    core_flops = CORE_FLOPS.get(machine.processor.vector, CORE_FLOPS["avx2"])

    priors = {
        "host_read": Prior(value, spread, why),
        "host_reach": Prior(0.96, 0.07, "products read nearly as fast as a bare read"),
        "floor_s": Prior(floor, floor_spread, "copies, wake-up and barriers per layer"),
        "host_layer_s": Prior(100e-6, 0.5, "some 15 operations with a barrier each"),
        "core_flops": Prior(core_flops, 0.6, "products of quantised weights"),
        "step_s": Prior(200e-6, 0.7, "sampling and building the graph"),
    }
    for group in CORE_BYTES_PER_S:
        why = "instructions of ggml's dot product"
        priors[f"core:{group}"] = Prior(1.0, 0.35, why)
    return priors


def _host_read(machine: Machine, threads: int | None) -> tuple[float, float, str]:
    """Median, spread and source of what reading host memory alone reaches."""
    reads = machine.probes.host_read
    if reads:
        wanted = threads or machine.processor.cores
        # Beyond the fast cores threads add nothing: the next smaller probe holds.
        usable = [rate for count, rate in reads.items() if count <= wanted]
        return max(usable or reads.values()), 0.05, "probed read bandwidth"

    peak = machine.host_peak_bytes_per_s
    processor = machine.processor
    if machine.unified:
        return 0.7 * peak, 0.2, "CPU's share of a unified memory's rate"

    if machine.memory_stated:
        share, spread = (0.68, 0.20) if processor.server else (0.78, 0.13)
        why = "read share of the stated memory's rate"
    elif processor.server:
        share, spread = 0.50, 0.45
        why = "servers often run with part of their channels filled"
    else:
        share, spread = _desktop_share(machine.memory.size_bytes)
        why = "read share of the fastest official rate, memory not stated"
    if not processor.known:
        spread = 0.40
    if processor.sockets > 1:
        # Weights lie on one socket or the other, and threads on both read across.
        share *= SOCKETS_SHARE
        spread = max(spread, 0.35)

    rate = share * peak
    if processor.dies_bytes_per_s:
        # The narrower of memory and the dies' links, rounded at the corner.
        dies = 0.95 * processor.dies_bytes_per_s
        rate = (rate**-6 + dies**-6) ** (-1 / 6)
    return rate, spread, why


def _desktop_share(size_bytes: int | None) -> tuple[float, float]:
    """Share of the official memory rate that a desktop reads at, and its spread.

    Four modules run far below the rate of two; two hold up to 96 GB.
    """
    if size_bytes is None:
        return 0.64, 0.22
    if size_bytes <= TWO_MODULES_BYTES:
        return 0.74, 0.16
    return 0.55, 0.22


def _device_priors(machine: Machine) -> dict[str, Prior]:
    backend = machine.backend
    share, spread = DEVICE_READ[backend]
    if machine.probes.device_read:
        read = Prior(machine.probes.device_read, 0.04, "probed device read")
    else:
        why = f"share of the specified bandwidth under {backend}"
        read = Prior(share * machine.device_bytes_per_s, spread, why)

    layer, layer_spread = LAYER_S[backend]
    if machine.windows:
        layer *= WINDOWS
    priors = {
        "device_read": read,
        "layer_s": Prior(layer, layer_spread, "launches and small kernels"),
        "recurrent_s": Prior(RECURRENT * layer, 0.5, "kernels of a recurrent layer"),
        "kv_reach": Prior(0.5, 0.5, "attention reads keys and values in short pieces"),
    }
    priors["device_reach"] = Prior(*REACH[backend], "matrix times vector")
    for group in CORE_BYTES_PER_S:
        why = "kernels differ by weight format"
        priors[f"reach:{group}"] = Prior(1.0, REACH_FAMILY_SPREAD, why)
    if backend == "sycl":
        priors["reach:mxfp4"] = Prior(*SYCL_MXFP4, "young kernels")
    return priors


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

    flops_reach = 0.20 if machine.backend in {"rocm", "vulkan", "sycl"} else 0.30
    return {
        "upload": link,
        "pageable": Prior(0.5, 0.3, "copies through a staging buffer"),
        "upload_floor_s": Prior(150e-6, 0.7, "synchronisation per uploaded layer"),
        "flops_reach": Prior(flops_reach, 0.6, "share of the specified FLOP/s"),
        "attention_reach": Prior(0.5, 0.6, "attention against products"),
        "tile": Prior(32.0, 0.6, "rows by which an expert's batch is padded"),
        "batch_layer_s": Prior(300e-6, 0.7, "kernels of one layer for many tokens"),
    }
