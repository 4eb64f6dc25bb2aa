"""A model larger than memory, opened for recording: its experts stay in a store.

The model's frame is loaded, experts are read from the store when a gate names them, and
those used last stay in as much host memory as is given. A recording needs answers, not
speed, so there is no planner here, no profile and no second lane: one expert is read
and computed after the other. Results are summed in the order of expert ids whatever was
in memory, so a recording does not depend on how much memory it had.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moesim.runtime.models.gates import GateFacts, MoeBlock, gate_facts
from moesim.runtime.models.local_model import (
    LocalModel,
    load_tokenizer,
    tiny_dir,
)
from moesim.runtime.models.offloaded import (
    OffloadedModel,
    StoreExperts,
    offloaded_shape,
)
from moesim.runtime.store.build import build_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moesim.runtime.store.store import BuildProgress
    from moesim.traces.format.schema import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel(LocalModel):
    """A model whose experts are in a store, with what the recorder cannot find in its
    frame.

    Attributes:
        blocks: its MoE layers.
        facts: how its gates choose.
        shape: as if its experts were loaded.
        cache: computes the experts.
        checkpoint: names the files it comes from, since the weights of the frame alone
            do not name the experts.
    """

    blocks: list[MoeBlock]
    facts: GateFacts
    shape: ModelShape
    cache: StoreExperts
    checkpoint: str


@contextmanager
def stored_model(
    spec: str | Path,
    store: str | Path,
    *,
    host_bytes: int,
    device: str = "cpu",
    building: Callable[[BuildProgress], None] | None = None,
) -> Iterator[StoredModel]:
    """Open a model for recording from its store, which is built where there is none.

    Args:
        spec: ``tiny``, or a Hugging Face directory.
        store: the store's folder.
        host_bytes: host memory for experts.
        device: where the frame lives and computes.
        building: called for every expert while a store is built.

    Raises:
        StoreError: no such model, or another model's store.
        RuntimeFault: not enough memory.
    """
    tiny = str(spec) == "tiny"
    folder = tiny_dir() if tiny else Path(spec)
    # The shipped model computes in float32, as `load_model` loads it.
    dtype = "float32" if tiny else None
    offloaded = OffloadedModel.load(
        folder, device=device, dtype=torch.float32 if tiny else None
    )

    with build_store(folder, store, dtype=dtype, progress=building) as experts:
        offloaded.check_store(experts)
        cache = StoreExperts(experts, offloaded.gatings, host_bytes)
        offloaded.handler = cache
        try:
            facts = gate_facts(offloaded.model, offloaded.blocks)
            name = "tiny" if tiny else folder.resolve().name
            tokenizer = None if tiny else load_tokenizer(folder, offloaded.model)
            yield StoredModel(
                name,
                offloaded.model,
                tokenizer,
                blocks=offloaded.blocks,
                facts=facts,
                shape=offloaded_shape(
                    offloaded,
                    folder,
                    name,
                    experts,
                    [experts.layout(at).expert_bytes for at in range(experts.layers)],
                ),
                cache=cache,
                checkpoint=offloaded.digest,
            )
        finally:
            offloaded.handler = None
            cache.close()
