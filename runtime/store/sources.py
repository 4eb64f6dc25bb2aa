"""Sources of a store's experts: a model in memory, or a random draw.

A third source, a checkpoint on disk, has a file of its own
(`runtime/store/checkpoint_source.py`).

H hidden, F expert intermediate.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from moesim.runtime.errors import StoreError
from moesim.runtime.models.expert_layout import swiglu_layout, torch_dtype
from moesim.runtime.models.experts_module import layout_of
from moesim.runtime.models.model_weights import weights_digest
from moesim.runtime.models.moe_blocks import offloadable_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from moesim.runtime.models.expert_layout import ExpertLayout
    from moesim.traces.format.schema import ModelShape


class ExpertSource(Protocol):
    """Experts, one after the other.

    `layouts` and `experts` have one entry per MoE layer: the record's layout and the
    number of experts. `distinct` is the number of different records where some experts
    share one, else None.
    """

    name: str
    digest: str
    layouts: tuple[ExpertLayout, ...]
    experts: tuple[int, ...]
    distinct: int | None

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Tensors of one expert on the CPU, in the order and shape of the layer's
        layout, in any float dtype.
        """


class RandomSource:
    """Experts of a model's shape with random weights: size and work are real, the
    results mean nothing.

    Every expert is ``3 H F`` weights in `dtype`, whatever bytes per expert the shape
    was quantised to. Weights are uniform with the variance 1 / inputs, so that
    activations keep their size.

    Args:
        shape: the model.
        seed: >= 0; with the same seed every expert is the same, in whatever order they
            are made.
        dtype: of the weights.
        distinct: make only so many different records, used in turn; None for one per
            expert.

    Raises:
        StoreError: `distinct` is out of range.
    """

    def __init__(
        self, shape: ModelShape, seed: int, dtype: str, distinct: int | None = None
    ) -> None:
        total = shape.layers * shape.experts
        if distinct is not None and not 1 <= distinct <= total:
            raise StoreError(
                f"distinct: expected 1 to {total} (layers x experts of {shape.name}),"
                f" got {distinct}"
            )
        width = shape.expert_intermediate
        layout = swiglu_layout(shape.hidden, width, torch_dtype(dtype))
        self.name = f"{shape.name} (random)"
        self.layouts = (layout,) * shape.layers
        self.experts = (shape.experts,) * shape.layers
        self.distinct = distinct
        self._seed = seed

        # All that decides the bytes of the store, so equal digests mean equal stores.
        counts = [shape.layers, shape.experts, shape.hidden, width]
        facts = json.dumps([*counts, seed, dtype, distinct])
        self.digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Draw one expert."""
        # Seeded per expert, so that a build can continue anywhere.
        draws = np.random.default_rng((self._seed, layer, expert))
        tensors = []
        for spec in self.layouts[layer].tensors:
            # A uniform draw within ±b has the variance b²/3.
            bound = math.sqrt(3 / spec.shape[-1])
            uniform = torch.from_numpy(draws.random(spec.shape, dtype=np.float32))
            tensors.append(uniform.mul_(2 * bound).sub_(bound))
        return tensors


class ModuleSource:
    """Experts of a model that is in memory already.

    Args:
        model: with its experts.
        dtype: of the store; that of the model's experts when None.

    Raises:
        StoreError: the model has no experts that the library's experts interface
            serves.
    """

    distinct: int | None = None

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._blocks = offloadable_blocks(model)
        chosen = dtype or next(self._blocks[0].experts.parameters()).dtype
        self.name = type(model).__name__
        self.digest = weights_digest(model)
        self.layouts = tuple(layout_of(block.experts, chosen) for block in self._blocks)
        self.experts = tuple(block.count for block in self._blocks)

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Return one expert's parameters."""
        module = self._blocks[layer].experts
        return [
            getattr(module, spec.name)[expert].detach().cpu()
            for spec in self.layouts[layer].tensors
        ]
