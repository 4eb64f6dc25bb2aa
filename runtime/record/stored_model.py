"""A model larger than memory, opened for recording: its experts stay in a store.

The model's frame is loaded, experts are read from the store when a gate names them, and
those used last stay in as much host memory as is given. A recording needs answers, not
speed, so there is no planner here, no profile and no second lane: one expert is read
and computed after the other. Results are summed in the order of expert ids whatever was
in memory, so a recording does not depend on how much memory it had.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
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
    OneByOne,
    offloaded_shape,
)
from moesim.runtime.store.build import build_store
from moesim.runtime.store.memory import HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moesim.runtime.models.expert_layout import ExpertWeights
    from moesim.runtime.store.store import BuildProgress, ExpertStore
    from moesim.traces.format.schema import ModelShape


class CachedExperts(OneByOne):
    """A handler that keeps as many experts in host memory as fit; the one
    used longest ago is replaced.

    Args:
        store: holds the experts.
        host_bytes: memory for them; at least one expert is kept.
        gatings: per layer, the model's own gating or None (`MoeLayer.gating`).

    Attributes:
        slots: experts that fit.
        reads: experts read so far.
        hits: times that an expert was in memory.
        read_bytes: what was read.

    Raises:
        RuntimeFault: the host has not that much memory.
    """

    def __init__(
        self,
        store: ExpertStore,
        host_bytes: int,
        gatings: Sequence[Callable[[torch.Tensor], torch.Tensor] | None],
    ) -> None:
        super().__init__(store, gatings)
        # One at least: an expert must lie somewhere while it is computed.
        total = sum(store.experts(layer) for layer in range(store.layers))
        self.slots = max(1, min(host_bytes // store.slot_bytes, total))
        self.reads = 0
        self.hits = 0
        self.read_bytes = 0
        self._memory = HostSlots(self.slots, store.slot_bytes)
        # (layer, expert) -> slot, the one used longest ago first.
        self._residents: OrderedDict[tuple[int, int], int] = OrderedDict()

    def _order(self, layer: int, active: Sequence[int]) -> Sequence[int]:
        """Residents first: a read could evict one that this very layer needs."""
        return sorted(
            range(len(active)),
            key=lambda position: (layer, active[position]) not in self._residents,
        )

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _views(self, layer: int, expert: int, device: torch.device) -> ExpertWeights:
        """Return an expert's weights, read where they are not in memory."""
        key = (layer, expert)
        layout = self._store.layout(layer)
        slot = self._residents.get(key)
        if slot is None:
            slot = self._free_slot()
            try:
                self.read_bytes += self._store.read_into(
                    layer, expert, self._memory.record(slot), check=True
                )
            except BaseException:
                # Whoever goes on must not find it taken, nor by two experts.
                self._memory.give_back(slot)
                raise
            self.reads += 1
            self._residents[key] = slot
        else:
            self._residents.move_to_end(key)
            self.hits += 1

        if device.type == "cpu":
            return self._memory.weights(slot, layout)
        return layout.views(self._memory.record(slot).to(device))

    def _free_slot(self) -> int:
        """Take a slot to read into; evict where all are full."""
        if not self._memory.free:
            _, slot = self._residents.popitem(last=False)
            self._memory.give_back(slot)
        return self._memory.take()


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
    cache: CachedExperts
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
    # The shipped model computes in float32, as `load_tiny` loads it.
    dtype = "float32" if tiny else None
    offloaded = OffloadedModel.load(
        folder, device=device, dtype=torch.float32 if tiny else None
    )

    with build_store(folder, store, dtype=dtype, progress=building) as experts:
        offloaded.check_store(experts)
        cache = CachedExperts(
            experts, host_bytes, [layer.gating for layer in offloaded.layers]
        )
        offloaded.handler = cache
        try:
            blocks = offloaded.blocks()
            facts = gate_facts(offloaded.model, blocks)
            name = "tiny" if tiny else folder.resolve().name
            tokenizer = None if tiny else load_tokenizer(folder, offloaded.model)
            yield StoredModel(
                name,
                offloaded.model,
                tokenizer,
                blocks=blocks,
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
