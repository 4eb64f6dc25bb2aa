"""Work to seconds: the terms of one decode step and of a prompt.

Every rate is a *latent*: a positive number that is known with a spread, named by a
string such as ``host_read``. `moesim.advice.times.priors` gives the spreads, a fit
narrows them, and the functions here say what they mean:

Decode, one token
    device weights + key-value reads + kernels of each layer on the GPU, then per layer
    with experts in host memory a floor (two small copies, waking the threads) and
    reading. CPU and GPU never work at the same time in llama.cpp, so terms add up.

Prefill, one micro-batch
    uploads of the used experts of each such layer, products on the GPU, weight reads on
    the GPU, attention. Batches below the engine's threshold are computed on the CPU.

Source of both pictures: llama.cpp#15346 and #25859, ik_llama.cpp#520.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from moesim.advice.times.latents import Beliefs, Interval, Observation
from moesim.advice.times.work import (
    HELD,
    DecodeWork,
    PrefillWork,
    decode_work,
    prefill_work,
    used_share,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.work import ExpertGroup, PrefillWork, Setting


# Sharpness of "the slower of reading and unpacking": 1 adds both, infinity takes the
# larger. Source: 4 had the smallest error on machines left out, of 1, 2, 4 and 8.
SHARPNESS = 4.0

# Bytes per second that one fast core unpacks and multiplies, by weight format.
# Source: instruction counts of ggml's AVX2 dot products at about 4 GHz (MXFP4 looks up
# 32 weights in some 11 cycles, Q8_0 loads them in some 6); good to a third.
CORE_BYTES_PER_S = {
    "float": 24e9,
    "eight": 18e9,
    "quant": 12e9,
    "mxfp4": 8e9,
    "small": 6e9,
    "lookup": 3.5e9,
}

# An efficiency core counts as this share of a fast one.
SMALL_CORE = 0.5
FLOPS_PER_WEIGHT = 2


@cache
def family(name: str) -> str:  # noqa: PLR0911 # one answer per family
    """Return the group of weight formats whose kernels are alike.

    Args:
        name: weight format, such as ``q4_k``.
    """
    if name in {"f32", "f16", "bf16"}:
        return "float"
    if name in {"mxfp4", "nvfp4"}:
        return "mxfp4"
    if name.startswith(("q8", "fp8", "q6")):
        return "eight"
    if name in {"q2_k", "q3_k"}:
        return "small"
    # Forks have formats of few bits without a codebook: iq2_k, iq3_ks and the like.
    if name.startswith(("iq2_k", "iq3_k")) and not name.endswith("kt"):
        return "small"
    # Codebook formats of one to three bits are limited by table look-ups.
    if name.startswith(("iq1", "iq2", "iq3")):
        return "lookup"
    return "quant"


# Query heads that one pass over the keys serves, and backends whose kernels do so only
# where that number divides the heads of a group. Source: flash attention of ggml:
# `gqa_ratio % 8 == 0` and so on for SYCL and HIP; CUDA pads groups instead.
HEADS_PER_PASS = (8, 4, 2)
DIVIDING_BACKENDS = ("sycl", "rocm")


def key_passes(query_group: int, backend: str) -> int:
    """Return how often one decode step reads the keys and values of a layer.

    Args:
        query_group: query heads that share a key head.
        backend: of the GPU.
    """
    if backend not in DIVIDING_BACKENDS:
        return 1
    fitting = (heads for heads in HEADS_PER_PASS if query_group % heads == 0)
    return query_group // next(fitting, 1)


def busy_cores(machine: Machine, threads: int | None) -> float:
    """Return how many fast cores' worth of work so many threads do.

    Two threads of one core share its units, so they count once.
    """
    processor = machine.processor
    wanted = processor.cores if threads is None else threads
    fast = min(wanted, processor.cores)
    small = min(max(0, wanted - processor.cores), processor.small_cores)
    return max(1.0, fast + SMALL_CORE * small)


def decode_terms(
    work: DecodeWork, machine: Machine, setting: Setting, rates: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of one decode step by term.

    Args:
        work: what the step reads.
        machine: for its cores.
        setting: for its threads.
        rates: value of every latent.
    """
    terms = {"step": rates["step_s"]}

    if work.device:
        terms["gpu weights"] = device_seconds(work.device, rates)
        terms["gpu kernels"] = kernels_s(work, rates)
    if work.device_kv_bytes:
        rate = rates["device_read"] * rates["kv_reach"]
        read = sum(
            stored * key_passes(group, machine.backend)
            for group, stored in work.device_kv.items()
        )
        terms["gpu keys and values"] = read / rate

    if work.host_expert_layers:
        reading = host_seconds(work.host_experts, machine, setting, rates)
        terms["cpu experts"] = reading
        terms["cpu floor"] = work.host_expert_layers * rates["floor_s"]

    if work.ssd_bytes:
        terms["ssd"] = work.ssd_bytes / rates["ssd_read"]
    if work.sampled:
        terms["sampling"] = work.sampled * rates["sample_s"]
    if work.table_rows:
        terms["look-up tables"] = rates["table_s"] + work.cold_rows * rates["row_s"]
    if work.host_dense_layers or work.host_dense:
        reading = host_seconds(work.host_dense, machine, setting, rates)
        terms["cpu other layers"] = (
            reading + work.host_dense_layers * rates["host_layer_s"]
        )
    if work.host_kv_bytes:
        # Attention on the CPU reads its keys and values like any other bytes.
        kv_rate = rates["host_read"] * rates["host_reach"]
        terms["cpu keys and values"] = work.host_kv_bytes / kv_rate
    return terms


def kernels_s(work: DecodeWork, rates: Mapping[str, float]) -> float:
    """Seconds of launches and small kernels of all layers on the GPUs.

    Recurrent layers and latent attention launch more kernels than others do.
    """
    layers = float(work.device_layers - work.device_latent)
    if work.device_latent:
        layers += work.device_latent * rates["latent_ratio"]
    if work.device_recurrent:
        layers += work.device_recurrent * rates["recurrent_ratio"]
    return layers * rates["layer_s"]


def device_seconds(formats: Mapping[str, float], rates: Mapping[str, float]) -> float:
    """Seconds to read and multiply weights on a GPU, one token at a time."""
    reach = rates["device_read"] * rates["device_reach"]
    return sum(
        stored / (reach * rates[f"reach:{family(name)}"])
        for name, stored in formats.items()
    )


def host_seconds(
    formats: Mapping[str, float],
    machine: Machine,
    setting: Setting,
    rates: Mapping[str, float],
) -> float:
    """Seconds to read and multiply weights on the CPU."""
    cores = busy_cores(machine, setting.threads)
    read = rates["host_read"] * rates["host_reach"]
    seconds = 0.0
    for name, stored in formats.items():
        group = family(name)
        unpack = cores * CORE_BYTES_PER_S[group] * rates[f"core:{group}"]
        slower = (read**-SHARPNESS + unpack**-SHARPNESS) ** (1 / SHARPNESS)
        seconds += stored * slower
    return seconds


def gpu_threshold(setting: Setting) -> float:
    """Return the micro-batch from which host experts are computed on the GPU.

    Source: llama.cpp offloads products of 32 rows or more (GGML_OP_OFFLOAD_MIN_BATCH);
    ik_llama.cpp#520 asks for 32 rows per expert on average.
    """
    if setting.gpu_from_tokens is not None:
        return setting.gpu_from_tokens
    return 32.0


def prefill_terms(
    work: PrefillWork, machine: Machine, setting: Setting, rates: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of a prompt by term.

    Args:
        work: the prompt, cut into micro-batches.
        machine: for its cards and cores.
        setting: for thresholds and page-locking.
        rates: value of every latent.
    """
    terms = dict.fromkeys(("upload", "gpu products", "gpu weights", "gpu kernels"), 0.0)
    terms |= dict.fromkeys(("attention", "cpu experts", "cpu other layers"), 0.0)
    terms["ssd"] = 0.0

    for (tokens, before), count in work.chunks.items():
        chunk = _chunk_terms(work, machine, setting, rates, tokens, before)
        for name, seconds in chunk.items():
            terms[name] += count * seconds
    if work.cold_rows:
        rows = work.tokens * work.cold_rows
        terms["look-up tables"] = rows * rates["batched_row_s"]
    return {name: seconds for name, seconds in terms.items() if seconds}


def _chunk_terms(
    work: PrefillWork,
    machine: Machine,
    setting: Setting,
    rates: Mapping[str, float],
    tokens: int,
    before: int,
) -> dict[str, float]:
    """Seconds of one micro-batch by term."""
    gpu = bool(machine.graphics)
    terms: dict[str, float] = {}
    device_flops = FLOPS_PER_WEIGHT * work.device_dense_weights * tokens
    host_flops = FLOPS_PER_WEIGHT * work.host_dense_weights * tokens
    upload_s = 0.0
    host_s = 0.0

    ssd_bytes = 0.0
    for group, layers in work.groups.items():
        share = used_share(group.experts, group.top_k, tokens, rates[_skew(setting)])
        on_gpu = not group.host_format
        if group.host_format and work.ssd_share:
            ssd_bytes += layers * group.stored_bytes * share * work.ssd_share
        if group.host_format and gpu and tokens >= gpu_threshold(setting):
            uploaded = share if setting.used_only else 1.0
            link = rates["upload"]
            if not setting.page_locked:
                link *= rates["pageable"]
            upload_s += layers * (
                uploaded * group.stored_bytes / link + rates["upload_floor_s"]
            )
            on_gpu = True

        if on_gpu:
            # Each used expert's rows are padded to whole tiles.
            rows = tokens * group.top_k + rates["tile"] * share * group.experts
            device_flops += FLOPS_PER_WEIGHT * layers * rows * group.weights
        else:
            host_s += layers * _host_batch(
                group, machine, setting, rates, tokens, share
            )

    if gpu:
        flops_rate = machine.device_flops * rates["flops_reach"]
        terms["gpu products"] = device_flops / flops_rate
        read = rates["device_read"] * rates["device_reach"]
        terms["gpu weights"] = work.device_bytes / read
        terms["gpu kernels"] = work.layers * rates["batch_layer_s"]
        terms["attention"] = _attention_flops(work, tokens, before) / (
            flops_rate * rates["attention_reach"]
        )
    else:
        host_flops += _attention_flops(work, tokens, before)
    if ssd_bytes:
        # Whole experts follow each other in the file, which is twice as fast.
        terms["ssd"] = ssd_bytes / (2 * rates["ssd_read"])
    terms["upload"] = upload_s
    terms["cpu experts"] = host_s
    if host_flops:
        terms["cpu other layers"] = host_flops / _host_flops(machine, setting, rates)
    return terms


def _skew(setting: Setting) -> str:
    return "skew" if setting.random_tokens else "text_skew"


def _host_flops(
    machine: Machine, setting: Setting, rates: Mapping[str, float]
) -> float:
    flops = busy_cores(machine, setting.threads) * rates["core_flops"]
    return flops * rates["iqk_ratio"] if setting.iqk else flops


def _host_batch(
    group: ExpertGroup,
    machine: Machine,
    setting: Setting,
    rates: Mapping[str, float],
    tokens: int,
    share: float,
) -> float:
    """Seconds of one layer's experts on the CPU for several tokens.

    Used experts are read once, whatever their number of tokens; then arithmetic counts.
    """
    formats = {group.host_format: share * group.stored_bytes}
    reading = host_seconds(formats, machine, setting, rates)
    flops = FLOPS_PER_WEIGHT * tokens * group.top_k * group.weights
    computing = flops / _host_flops(machine, setting, rates)
    return max(reading, computing) + rates["floor_s"]


def _attention_flops(work: PrefillWork, tokens: int, before: int) -> float:
    """Products of queries with keys and of weights with values, all layers.

    Kernels walk through the whole micro-batch for each of its tokens, so the mask saves
    nothing inside it.
    """
    flops = 0.0
    for (width, window), layers in work.attention_widths.items():
        context = before + tokens
        if window:
            context = min(context, window + tokens)
        flops += layers * FLOPS_PER_WEIGHT * width * tokens * context
    return flops


class _Asked(dict[str, float]):
    """Rates of 1 that remember which of them were asked for."""

    def __missing__(self, name: str) -> float:
        self[name] = 1.0
        return 1.0


def latents_of(terms: Callable[[Mapping[str, float]], object]) -> frozenset[str]:
    """Name the latents that some terms depend on, by asking for them once."""
    asked = _Asked()
    terms(asked)
    return frozenset(asked)


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
        model: name of the model.
    """

    machine: Machine
    setting: Setting
    work: DecodeWork | PrefillWork
    misfits: tuple[str, ...] = ()
    model: str = ""

    @cached_property
    def latents(self) -> frozenset[str]:
        """Every latent that the seconds depend on."""
        return latents_of(self.seconds)

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


# What an operating system and the engine itself keep from the page cache.
NOT_CACHE_BYTES = 4 * 1024**3
# Misses of the page cache, as a power of the share of experts that it lacks: popular
# experts stay. Source: 28 MiB read per token of 880 where 60 % fitted (i7-7700, 31 GB,
# 45 GiB of experts), which a power of 3.7 gives; less to be safe.
PAGE_CACHE_POWER = 2.5


def cached_share(machine: Machine, model: ModelContents, setting: Setting) -> float:
    """Return the share of host experts that memory holds; the rest is on the SSD."""
    size = machine.memory.size_bytes
    if size is None or machine.unified:
        return 1.0
    on_host = sum(model.layers[at].expert_bytes for at in setting.on_host(model))
    room = size - NOT_CACHE_BYTES
    return min(1.0, max(0.05, room / on_host)) if on_host else 1.0


def cold_rows(machine: Machine, model: ModelContents, setting: Setting) -> float:
    """Return the rows of look-up tables that a token reads from the drive."""
    size = machine.memory.size_bytes
    if size is None or setting.tables == HELD or not model.table_bytes:
        return 0.0
    on_host = sum(model.layers[at].expert_bytes for at in setting.on_host(model))
    room = size - NOT_CACHE_BYTES - on_host
    return model.table_rows * min(1.0, max(0.0, 1 - room / model.table_bytes))


def misfits_of(
    model: ModelContents, session: str = "", fork: str = "", *, slow: bool = False
) -> tuple[str, ...]:
    """Name the latents that all times of one model, session or fork share.

    Args:
        model: whose file it is.
        session: of measurements.
        fork: of the engine.
        slow: it decodes this format on the CPU more slowly than llama.cpp.
    """
    names = [f"misfit:model:{model.name}"]
    if session:
        names.append(f"misfit:session:{session}")
    if fork:
        names.append(f"misfit:{'slow ' if slow else ''}engine:{fork}")
    return tuple(names)


def decode_target(
    machine: Machine,
    model: ModelContents,
    setting: Setting,
    context_tokens: float,
    session: str = "",
    fork: str = "",
) -> Target:
    """Describe one decode step at a mean depth of the context."""
    work = decode_work(model, setting, context_tokens)
    lacking = 1 - cached_share(machine, model, setting)
    if lacking:
        missed = lacking**PAGE_CACHE_POWER * sum(work.host_experts.values())
        work = replace(work, ssd_bytes=missed)
    if cold := cold_rows(machine, model, setting):
        work = replace(work, cold_rows=setting.sequences * cold)
    slow = "mxfp4" in work.host_experts
    misfits = misfits_of(model, session, fork, slow=slow)
    return Target(machine, setting, work, misfits, model.name)


def prefill_target(
    machine: Machine,
    model: ModelContents,
    setting: Setting,
    prompt_tokens: int,
    depth_tokens: int = 0,
    session: str = "",
    fork: str = "",
) -> Target:
    """Describe reading a prompt."""
    work = prefill_work(model, setting, prompt_tokens, depth_tokens)
    lacking = 1 - cached_share(machine, model, setting)
    if lacking:
        work = replace(work, ssd_share=lacking)
    if cold := cold_rows(machine, model, setting):
        work = replace(work, cold_rows=cold)
    return Target(machine, setting, work, misfits_of(model, session, fork), model.name)
