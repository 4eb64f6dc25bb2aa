"""The bill of memory: what a setting puts into graphics memory and host memory.

Weights and key-value entries are exact; compute buffers follow llama.cpp's graph
allocator as far as its largest tensors go. Beyond the *cliff* a driver moves graphics
memory into host memory behind the engine's back, and speed falls several times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.advice.times.setting import KV_SHARES

if TYPE_CHECKING:
    from moesim.advice.machine.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.setting import Setting

MIB = 1024**2
GIB = 1024**3

# A driver's context, its kernels and the engine's own buffers on one card.
# Source: what nvidia-smi shows beside llama.cpp's own sums, 300 to 600 MiB.
CONTEXT_BYTES = 450 * MIB
# What a desktop shows on the card that also drives the screen.
SCREEN_BYTES = {"linux": 300 * MIB, "windows": 1200 * MIB}
# Graphics memory that is never free for programs: page tables; on Windows the part
# that its memory manager keeps back before it moves buffers into host memory.
UNUSABLE_SHARE = {"linux": 0.015, "windows": 0.06}
# Program, vocabulary, graphs and threads of the engine in host memory.
PROGRAM_BYTES = 600 * MIB
# An operating system with a desktop and little else.
SYSTEM_BYTES = 3 * GIB
ACTIVATION_BYTES = 4
# Activations of one layer that live at the same time, as multiples of T x H values.
LIVE_ACTIVATIONS = 12


@dataclass(frozen=True, slots=True)
class MemoryBill:
    """Bytes that one setting needs, and what there is.

    Attributes:
        gpu: item -> bytes in graphics memory.
        host: item -> bytes in host memory.
        gpu_free: graphics memory that programs may use; 0 without a GPU.
        host_free: host memory that programs may use; None unknown.
        shared: both are one memory.
    """

    gpu: dict[str, float]
    host: dict[str, float]
    gpu_free: float
    host_free: float | None
    shared: bool = False

    @property
    def gpu_bytes(self) -> float:
        """All of graphics memory."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        """All of host memory."""
        return sum(self.host.values())

    @property
    def gpu_left(self) -> float:
        """Distance to the cliff; negative beyond it."""
        return self.gpu_free - self.gpu_bytes

    @property
    def host_left(self) -> float | None:
        """Host memory to spare; None where its size is not known."""
        if self.host_free is None:
            return None
        # On one memory the GPU's bytes are taken from the host's.
        needed = self.host_bytes + (self.gpu_bytes if self.shared else 0)
        return self.host_free - needed

    @property
    def fits(self) -> bool:
        """Tell whether both memories hold what they shall."""
        host_left = self.host_left
        return self.gpu_left >= 0 and (host_left is None or host_left >= 0)


def memory_bill(
    model: ModelContents,
    machine: Machine,
    setting: Setting,
    context_tokens: int,
    *,
    keep_vram_bytes: int = 0,
    keep_ram_bytes: int = 0,
    sequences: int = 1,
) -> MemoryBill:
    """Add up what a setting needs.

    Args:
        model: its contents.
        machine: for the sizes of its memories.
        setting: where layers and experts lie.
        context_tokens: key-value entries kept for each sequence.
        keep_vram_bytes: graphics memory to leave to others.
        keep_ram_bytes: host memory to leave to others.
        sequences: requests at the same time.
    """
    first_gpu = setting.first_gpu_layer(model)
    on_host = set(setting.on_host(model))
    kv_share = KV_SHARES.get(setting.kv_format, 1.0)
    gpu = dict.fromkeys(("dense weights", "experts", "keys and values"), 0.0)
    host = dict.fromkeys(("embeddings", "dense weights", "experts"), 0.0)
    host["keys and values"] = 0.0

    for at, layer in enumerate(model.layers):
        # Keys and values lie where their layer runs.
        place = gpu if at >= first_gpu else host
        place["dense weights"] += layer.dense_bytes
        entries = layer.kv_bytes(context_tokens) * kv_share + layer.state_bytes
        place["keys and values"] += entries * sequences
        (host if at in on_host else gpu)["experts"] += layer.expert_bytes

    head_on_gpu = setting.head_on_gpu(model)
    (gpu if head_on_gpu else host)["dense weights"] += model.head_bytes
    host["embeddings"] = model.embed_bytes
    host["program"] = PROGRAM_BYTES
    if machine.graphics:
        gpu["compute buffers"] = _compute_buffers(model, setting, on_host)
        gpu["driver"] = CONTEXT_BYTES * machine.gpu_count

    return MemoryBill(
        gpu=gpu,
        host=host,
        gpu_free=_gpu_free(machine, keep_vram_bytes),
        host_free=_host_free(machine, keep_ram_bytes),
        shared=machine.unified,
    )


def _compute_buffers(
    model: ModelContents, setting: Setting, on_host: set[int]
) -> float:
    """Largest live tensors of one micro-batch.

    Source: llama.cpp reserves a worst-case graph: outputs of a whole micro-batch, its
    activations, and the experts that a layer in host memory uploads.
    """
    tokens = min(setting.micro_batch, setting.batch)
    outputs = 0.0
    if model.hidden:
        vocabulary = model.head_weights / model.hidden
        outputs = vocabulary * tokens * ACTIVATION_BYTES
    width = max(model.hidden, 2048)
    activations = LIVE_ACTIVATIONS * tokens * width * ACTIVATION_BYTES
    uploads = max((model.layers[at].expert_bytes for at in on_host), default=0)

    # Outputs come last, when the layers' tensors are dead: both share the buffer.
    return max(outputs, activations + uploads) + 64 * MIB


def _gpu_free(machine: Machine, keep_bytes: int) -> float:
    if not machine.graphics:
        return 0.0
    if machine.unified:
        return (float(machine.vram_bytes) or float("inf")) - keep_bytes
    system = "windows" if machine.windows else "linux"
    usable = machine.vram_bytes * (1 - UNUSABLE_SHARE[system])
    return usable - SCREEN_BYTES[system] - keep_bytes


def _host_free(machine: Machine, keep_ram_bytes: int) -> float | None:
    size = machine.memory.size_bytes
    if size is None:
        return None
    return size - max(keep_ram_bytes, SYSTEM_BYTES)
