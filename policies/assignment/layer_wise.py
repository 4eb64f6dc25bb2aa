"""Layer-wise offloading as llama.cpp does it: some layers on the GPU, the others on the
CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from moesim.policies.arrays import view_of
from moesim.policies.assignment._placing import SpreadAssignment
from moesim.policies.names import WAITS
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work
    from moesim.policies.run_context import RunContext

Side = Literal["last", "first"]
Counted = Literal["step", "expert"]

_NEVER = np.iinfo(np.int64).max
"""More tokens than a step has."""


class LayerWise(SpreadAssignment):
    """Compute the experts of some layers on the GPU and those of all others on the CPU,
    whatever is resident.

    As many layers are chosen as the cache holds whole, ``floor(slots / experts)``.
    Their experts are fetched when they are first needed and stay if the cache has
    global scope, which is what loading them at the start amounts to; a per-layer cache
    smaller than a layer fetches them again and again. KTransformers, as DALI models it,
    is the same with a faster CPU, so its difference belongs in the hardware profile.

    With several GPUs that split the layers, each GPU takes the last (first) of its own;
    where they split the experts, their memories count together.

    In llama.cpp a large batch is another matter: from some tokens on, the experts that
    it uses of a CPU layer are uploaded and computed on the GPU, one layer after the
    other, and no product begins before the whole layer has come. So a micro-batch of a
    prompt costs one upload of all that it uses.

    Args:
        side: ``last`` layers go to the GPU (llama.cpp's ``-ngl``; the mirror of
            ``--n-cpu-moe`` for the first ones, and DALI's assumption), or the
            ``first``.
        gpu_layers: how many layers of the model; none for as many as fit.
        upload_tokens: tokens of a step from which CPU layers are uploaded; none for
            never, as DALI reads it. 32 in llama.cpp.
        counted: the tokens are those of the ``step``, or the mean of each ``expert``,
            ``tokens * top_k / experts`` (ik_llama.cpp: 32 of them).

    Source: llama.cpp (its threads 15346 and 25859 for uploads), ik_llama.cpp's pull
    request 520; DALI, section 6.1 (count and side).
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(
        self,
        *,
        side: Side = "last",
        gpu_layers: int | None = None,
        upload_tokens: int | None = None,
        counted: Counted = "step",
    ) -> None:
        expect_choice("side", side, Side)
        holds = gpu_layers is None or gpu_layers >= 0
        expect(holds, "gpu_layers", "a number >= 0 or none", gpu_layers)
        holds = upload_tokens is None or upload_tokens >= 1
        expect(holds, "upload_tokens", "a number >= 1 or none", upload_tokens)
        expect_choice("counted", counted, Counted)
        self.side = side
        self.gpu_layers = gpu_layers
        self.upload_tokens = upload_tokens
        self.counted = counted

    def start(self, context: RunContext) -> None:
        """Choose the layers, and what a large step is."""
        SpreadAssignment.start(self, context)
        self.large_tokens = self.upload_tokens or _NEVER
        if self.upload_tokens is not None and self.counted == "expert":
            choices = self.upload_tokens * context.shape.experts
            # Rounded up: so many tokens choose so often.
            self.large_tokens = -(-choices // context.shape.top_k)
        # Only a layer step shows whether an expert may run on any of several GPUs.
        self.on_one: Ints = self._chosen(context, split_experts=False)
        self.on_several: Ints = self._chosen(context, split_experts=True)

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        if work.gpus > 1:
            on_gpu = self.on_several[work.layer] != 0
        else:
            on_gpu = self.on_one[work.layer] != 0
        uploads = not on_gpu and work.rows >= self.large_tokens
        self.allow_all(work, on_gpu or uploads)
        self.spread(work, lanes)
        return WAITS if uploads else 0

    def _chosen(self, context: RunContext, *, split_experts: bool) -> Ints:
        """uint8 [L]: layers on a GPU."""
        layers = context.shape.layers
        sizes = np.array(context.shape.sizes_by_expert(), np.int64)
        layer_bytes = sizes.sum(axis=1)
        slots = context.capacity_slots
        by_layer = len(slots) == layers
        pool_bytes = context.pool_bytes
        if pool_bytes is None:
            pool_bytes = slots * (sizes.max(axis=1) if by_layer else sizes.max())

        # A given number counts layers of the model, so it is not divided by GPU.
        gpus = 1 if split_experts or self.gpu_layers is not None else context.gpus
        memories = context.gpus if split_experts else 1
        home = np.arange(layers) * gpus // layers

        chosen = np.zeros(layers, np.bool_)
        for gpu in range(gpus):
            home_layers = np.flatnonzero(home == gpu)
            filled = home_layers[::-1] if self.side == "last" else home_layers
            count = self.gpu_layers
            if count is None:
                room = pool_bytes[home_layers] if by_layer else pool_bytes
                # Layers of unequal experts are counted by what they weigh.
                weights = np.cumsum(layer_bytes[filled])
                room_bytes = int(room.sum()) * memories
                count = int(np.searchsorted(weights, room_bytes, side="right"))
            chosen[filled[:count]] = True
        return view_of(chosen, np.uint8)
