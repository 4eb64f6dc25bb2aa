"""Sizes of memories: how a user states them, and what they come to on a machine.

Without a statement the GPU cache gets what the card has left: its memory, less dense
weights, keys and values of the stated context, and workspace. A model that fits the
card as a whole needs no offloading; a quarter of its experts is cached then, which
studies policies and advises nobody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.units import format_bytes
from moesim.hwprofiles.dense_costs import KeptEntries
from moesim.policies.base import PolicyError
from moesim.policies.cache._slot_shares import divided, front_first
from moesim.policies.sizes import GLOBAL, LAYERS, PER_LAYER, CacheSize, MemoryPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.systems import System
    from moesim.runs.config import MemoryOptions
    from moesim.traces.format.schema import ModelShape

DEFAULT_CACHE_RATIO = 0.25
HOST_ACCELERATOR = "host"
KV_VALUE_BYTES = 2
"""Keys and values are kept in 16 bits."""

PROMPT_TOKENS = 512
"""Tokens of a prompt that a GPU works on at once, as llama.cpp's default."""

CONTEXT_BYTES = 450 << 20
"""A driver's context, its kernels and the engine's own buffers on one card.

Source: what nvidia-smi shows beside llama.cpp's own sums, 300 to 600 MiB.
"""

ACTIVATION_BYTES = 4
LIVE_ACTIVATIONS = 12
"""Activations of one layer that live at the same time, as multiples of T x H values."""


def plan_memory(
    options: MemoryOptions,
    shape: ModelShape,
    profile: HardwareProfile,
    system: System,
    artefacts: Mapping[str, Any] | None = None,
    *,
    kv_bytes: int = 0,
) -> MemoryPlan:
    """Turn options into sizes.

    Args:
        shape: the model.
        profile: the machine.
        system: the policies; one that divides slots by use needs `artefacts` for
            that.
        artefacts: ``single_share`` and ``prefetch_accuracy``, float [L], see
            `moesim.policies.cache._slot_shares`.
        kv_bytes: keys and values that the GPU holds, where no size of its
            cache is stated.

    Raises:
        PolicyError: contradicting options, no room to stage even one expert, or a
            machine without a memory of that kind.
    """
    if profile.memory.unified:
        return _unified(options, shape, profile)
    if options.stated > 1:
        raise PolicyError(
            "cache size: expected at most one of --cache-ratio, --slots-per-layer"
            " and --gpu-memory; drop the others"
        )

    # Staging comes first, as it is taken from the same memory.
    staging = _staging(options, shape, profile, system)
    scope = options.cache_scope or system.scope or PER_LAYER
    ratio = options.cache_ratio
    total_bytes = None
    if options.gpu_memory_bytes is not None:
        budget_bytes = options.gpu_memory_bytes
        total_bytes = _left_on_gpu(options, budget_bytes, shape, staging, profile.gpus)
    elif not options.is_stated:
        total_bytes = left_on_card(options, shape, profile, staging, kv_bytes)
        if total_bytes is None or total_bytes >= shape.routed_bytes:
            total_bytes = None
            ratio = DEFAULT_CACHE_RATIO
    gpu = CacheSize.for_model(
        shape,
        scope=scope,
        ratio=ratio,
        slots_per_layer=options.slots_per_layer,
        total_bytes=total_bytes,
    )
    if scope == PER_LAYER:
        slots = _division(gpu, shape, system, artefacts or {}, ratio)
        gpu = _divided(gpu, shape, slots)
    if scope == GLOBAL:
        gpu = _of_one_card(gpu, shape, sharing_cards(options.gpu_split, profile.gpus))
    plan = MemoryPlan(
        gpu=gpu,
        staging=staging,
        prefetch_budget_bytes=options.prefetch_budget_bytes,
        gpu_split=options.gpu_split,
    )
    never_left = 0
    if system.keeps_residents:
        never_left = of_all_cards(plan, shape, profile.gpus).total_bytes
    return replace(plan, host=_host(options, shape, staging, never_left))


def sharing_cards(gpu_split: str, gpus: int) -> int:
    """Count the cards among which the layers are divided."""
    return gpus if gpu_split == LAYERS else 1


def _bytes_by_card(shape: ModelShape, cards: int) -> list[int]:
    """Bytes of all experts of the layers that each card computes."""
    by_card = [0] * cards
    for layer, sizes in enumerate(shape.sizes_by_expert()):
        by_card[layer * cards // shape.layers] += sum(sizes)
    return by_card


def _of_one_card(size: CacheSize, shape: ModelShape, cards: int) -> CacheSize:
    """A card's part of one pool for all layers: no more than the experts of its
    layers.
    """
    most = max(_bytes_by_card(shape, cards))
    return _pool(min(size.total_bytes // cards, most), shape)


def of_all_cards(plan: MemoryPlan, shape: ModelShape, gpus: int) -> CacheSize:
    """Return what all cards hold together where layers are divided among them; one
    card's cache where each of them has a part of every layer.
    """
    # Slots per layer are those of the one card that computes it.
    if plan.gpu.scope == PER_LAYER:
        return plan.gpu
    by_card = _bytes_by_card(shape, sharing_cards(plan.gpu_split, gpus))
    return _pool(sum(min(plan.gpu.total_bytes, most) for most in by_card), shape)


def _pool(pool_bytes: int, shape: ModelShape) -> CacheSize:
    """One pool for all layers."""
    slots = pool_bytes // shape.max_expert_bytes
    return CacheSize(GLOBAL, np.array([slots]), np.array([pool_bytes]))


def _unified(
    options: MemoryOptions, shape: ModelShape, profile: HardwareProfile
) -> MemoryPlan:
    """One memory for CPU and GPU: every expert is where both compute from it.

    Raises:
        PolicyError: a size of a cache that is not there, or a memory that does not
            hold every expert.
    """
    stated = {
        "cache_ratio": options.cache_ratio,
        "slots_per_layer": options.slots_per_layer,
        "gpu_memory": options.gpu_memory_bytes,
        "host_memory": options.host_memory_bytes,
    }
    for name, value in stated.items():
        if value is not None:
            option = name.replace("_", "-")
            raise PolicyError(
                f"--{option}: {profile.name} has one memory for CPU and GPU, so"
                " there is no cache to size and nothing is copied; drop it"
            )
    total = shape.routed_bytes
    if total > profile.memory.host_bytes:
        raise PolicyError(
            f"{profile.name}: its memory holds {profile.memory.host_bytes:,} bytes"
            f" of experts, {shape.name} has {total:,}; reads from the SSD into a"
            " unified memory are not simulated, so choose a smaller model or format"
        )
    everything = CacheSize.for_model(shape, ratio=1.0)
    return MemoryPlan(gpu=everything, unified=True, gpu_split=options.gpu_split)


def _staging(
    options: MemoryOptions, shape: ModelShape, profile: HardwareProfile, system: System
) -> int:
    """Staging slots: the user's, else the system's, else the profile's, and what
    its prefetch policy buffers.
    """
    if options.staging is not None:
        return options.staging
    slots = system.staging_slots(shape)
    if slots is None:
        slots = profile.memory.staging_experts
    return slots + system.buffer_slots()


def _left_on_gpu(
    options: MemoryOptions,
    budget_bytes: int,
    shape: ModelShape,
    staging: int,
    gpus: int,
) -> int:
    """Bytes left for the expert cache, over all GPUs that share the layers.

    Raises:
        PolicyError: no room to stage even one expert.
    """
    split = sharing_cards(options.gpu_split, gpus)
    rest = shape.other_bytes // split
    left = budget_bytes - rest - staging * shape.max_expert_bytes
    # Without staging not even an expert that is not kept could be computed.
    if left < 0:
        raise PolicyError(
            f"--gpu-memory: no room to stage {staging} experts:"
            f" {format_bytes(budget_bytes)} do not hold {format_bytes(rest)} of"
            f" non-expert weights and {staging} x"
            f" {format_bytes(shape.max_expert_bytes)}; give more memory, or fewer"
            " --staging slots"
        )
    return left * split


def left_on_card(
    options: MemoryOptions,
    shape: ModelShape,
    profile: HardwareProfile,
    staging: int,
    kv_bytes: int,
) -> int | None:
    """Bytes that the cards leave for experts; None without a card, or where the rest of
    the model fills it.
    """
    if profile.accelerator == HOST_ACCELERATOR:
        return None
    bill = card_bill(options, shape, profile, kv_bytes)
    budget_bytes = profile.memory.gpu_bytes - sum(bill.values())
    try:
        return _left_on_gpu(options, budget_bytes, shape, staging, profile.gpus)
    except PolicyError:
        return None


def card_bill(
    options: MemoryOptions, shape: ModelShape, profile: HardwareProfile, kv_bytes: int
) -> dict[str, int]:
    """List what a card holds beside weights: item -> bytes."""
    split = sharing_cards(options.gpu_split, profile.gpus)
    return {
        "keys and values": kv_bytes // split,
        "workspace": workspace_bytes(shape),
    }


def _host(
    options: MemoryOptions, shape: ModelShape, staging: int, kept_bytes: int
) -> CacheSize | None:
    """Host memory in front of the SSD; None where it holds every expert that the
    GPUs do not keep for good.
    """
    if options.host_memory_bytes is None:
        return None
    # Nobody asks host memory for what never leaves a GPU.
    total = shape.routed_bytes - kept_bytes
    left = options.host_memory_bytes - staging * shape.max_expert_bytes
    if left < 0:
        raise PolicyError(
            f"--host-memory: no room to stage {staging} experts of"
            f" {format_bytes(shape.max_expert_bytes)} in"
            f" {format_bytes(options.host_memory_bytes)}; give more memory"
        )
    # Nothing would ever be read from the SSD again.
    if left >= total:
        return None
    return CacheSize.for_model(shape, scope=GLOBAL, total_bytes=left)


def kept_bytes(shape: ModelShape, context_tokens: int) -> int:
    """Bytes of one sequence's keys and values over all layers; 0 where the model's
    heads are not known.
    """
    kept = KeptEntries.of(shape, KV_VALUE_BYTES)
    return round(shape.all_layers * kept.bytes(context_tokens))


def workspace_bytes(shape: ModelShape) -> int:
    """Compute what a driver and the largest tensors of one pass take of a card.

    Source: as in the bill of `moesim.advice.plan.memory`.
    """
    outputs = shape.vocab * PROMPT_TOKENS * ACTIVATION_BYTES
    activations = LIVE_ACTIVATIONS * PROMPT_TOKENS * shape.hidden * ACTIVATION_BYTES
    # Outputs come last, when the layers' tensors are dead: both share the buffer.
    return max(outputs, activations) + CONTEXT_BYTES


def _division(
    size: CacheSize,
    shape: ModelShape,
    system: System,
    artefacts: Mapping[str, Any],
    ratio: float | None,
) -> np.ndarray | None:
    """The same number of slots, divided among the layers as the system does it, int64
    [L]: by use where a calibration says how, or first layers first. None for evenly.
    """
    # The total stays, so that systems are compared at equal memory.
    total = int(size.slots.sum())
    expert_bytes = np.asarray(shape.expert_bytes, np.int64)
    # All that a ratio allows: what is spread evenly may be an expert short.
    budget = size.total_bytes
    if ratio is not None:
        budget = round(ratio * shape.experts * int(expert_bytes.sum()))
    if system.whole_layers:
        slots = front_first(total, shape.layers, shape.experts, system.whole_layers)
        return _in_bytes(slots, expert_bytes, shape.experts, budget)
    known = {"single_share", "prefetch_accuracy"} <= artefacts.keys()
    if not (system.divides_slots and known):
        return None
    slots = divided(
        total,
        shape.experts,
        shape.top_k,
        artefacts["single_share"],
        artefacts["prefetch_accuracy"],
    )
    if len(slots) != shape.layers:
        raise PolicyError(
            f"--artefacts: single_share, prefetch_accuracy: expected {shape.layers}"
            f" numbers, one for each MoE layer, found {len(slots)}; make them for this"
            " model"
        )
    return _in_bytes(slots, expert_bytes, shape.experts, budget)


def _divided(size: CacheSize, shape: ModelShape, slots: np.ndarray | None) -> CacheSize:
    """A cache with so many slots of the mean expert of each layer, int64 [L]; as it is
    for None.
    """
    if slots is None:
        return size
    expert_bytes = np.asarray(shape.expert_bytes, np.int64)
    pool_bytes = slots * expert_bytes
    # Slots count the largest experts of a layer.
    largest = [max(sizes) for sizes in shape.bytes_by_expert] or expert_bytes
    return CacheSize(size.scope, pool_bytes // largest, pool_bytes)


def _in_bytes(
    slots: np.ndarray, expert_bytes: np.ndarray, experts: int, total_bytes: int
) -> np.ndarray:
    """The division of slots, int64 [L], as near to it as `total_bytes` allow.

    Layers of unequal experts would otherwise hold more, or less, than other systems.
    """
    slots = slots.copy()
    left = total_bytes - int(slots @ expert_bytes)
    while left < 0:
        # A layer that is held whole stays so, while others have slots to give.
        parts = np.where(slots < experts, slots, 0)
        layer = int(parts.argmax() if parts.any() else slots.argmax())
        slots[layer] -= 1
        left += int(expert_bytes[layer])
    while True:
        growing = np.flatnonzero((expert_bytes <= left) & (slots < experts))
        if not len(growing):
            return slots
        layer = int(growing[slots[growing].argmin()])
        slots[layer] += 1
        left -= int(expert_bytes[layer])
