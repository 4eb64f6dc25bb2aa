"""How an engine is started, as far as times depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesim.advice.model.contents import ModelContents

DEFAULT_MICRO_BATCH = 512
DEFAULT_BATCH = 2048
ALL_LAYERS = 999

# Key-value formats: stored bytes relative to half precision.
KV_SHARES = {
    "f32": 2.0,
    "f16": 1.0,
    "bf16": 1.0,
    "q8_0": 34 / 64,
    "q5_1": 24 / 64,
    "q5_0": 22 / 64,
    "q4_1": 20 / 64,
    "q4_0": 18 / 64,
    "iq4_nl": 18 / 64,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Flags of llama.cpp that times depend on.

    Attributes:
        cpu_layers: layers, counted from the first and with dense ones, whose experts
            stay in host memory (``--n-cpu-moe``).
        gpu_layers: layers kept on the GPUs at all (``-ngl``); the others run on the
            CPU as a whole. 0 is a machine without a GPU.
        threads: of the CPU; None takes the engine's default, one per fast core.
        micro_batch: ``-ub``.
        batch: ``-b``.
        flash: ``-fa``.
        kv_format: of keys and values (``-ctk``, ``-ctv``).
        page_locked: host weights lie in page-locked memory.
        used_only: a micro-batch uploads the experts that it uses, not all.
        gpu_from_tokens: a micro-batch of at least so many tokens computes host experts
            on the GPU; None asks the engine's rule.
        overlapped: uploads run beside compute (patched engines only).
        chosen_layers: layers whose experts stay in host memory by name (``-ot``)
            instead of by number; None where `cpu_layers` counts.
        sequences: requests that are decoded together.
        random_tokens: prompts are drawn at random, as benchmarks do; such tokens
            choose fewer experts than text does.
    """

    cpu_layers: int = 0
    gpu_layers: int = ALL_LAYERS
    threads: int | None = None
    micro_batch: int = DEFAULT_MICRO_BATCH
    batch: int = DEFAULT_BATCH
    flash: bool = True
    kv_format: str = "f16"
    page_locked: bool = True
    used_only: bool = True
    gpu_from_tokens: int | None = None
    overlapped: bool = False
    chosen_layers: frozenset[int] | None = None
    sequences: int = 1
    random_tokens: bool = True

    def on_host(self, model: ModelContents) -> tuple[int, ...]:
        """Indices of MoE layers whose experts the CPU computes in decode."""
        first_gpu = self.first_gpu_layer(model)
        chosen = self.chosen_layers
        if chosen is None:
            chosen = frozenset(range(min(self.cpu_layers, len(model.layers))))
        return tuple(at for at in model.moe_layers if at in chosen or at < first_gpu)

    def first_gpu_layer(self, model: ModelContents) -> int:
        """Return the first layer that the GPUs hold; layers are taken from the end."""
        return max(0, len(model.layers) - self.gpu_layers)

    def head_on_gpu(self, model: ModelContents) -> bool:
        """Tell whether the output head is on a GPU: it counts as one more layer."""
        return self.gpu_layers > len(model.layers)

    def with_cpu_layers(self, count: int) -> Setting:
        """Return the same setting with another ``--n-cpu-moe``."""
        return replace(self, cpu_layers=count)
