"""Recording a model that is larger than memory: its experts stay in the store and
visit.

The model's frame is loaded, experts are read from the SSD store when a gate asks for
them, and those asked for last stay in as much host memory as is given. A recording
needs answers, not speed, so there is no planner here, no profile and no second lane:
one expert is read and computed after the other. Results are summed in the order of
expert ids whatever was in memory, so a recording does not depend on how much memory it
had.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from moesim.runtime.executor.live import live_blocks, reader_of
from moesim.runtime.models.expert_math import combine, expert_forward, group_tokens
from moesim.runtime.models.hf import (
    GateFacts,
    LocalModel,
    MoeBlock,
    find_blocks,
    gate_facts,
    model_shape,
)
from moesim.runtime.models.offloaded import OffloadedModel
from moesim.runtime.store.build import build_store
from moesim.runtime.store.memory import HostTier
from moesim.runtime.store.sources import skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moesim.runtime.models.expert_math import ExpertWeights
    from moesim.runtime.store.store import BuildProgress, ExpertStore
    from moesim.traces.format.schema import ModelShape

_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class VisitingExperts:
    """An `ExpertsHandler` with as many experts in host memory as fit; the one asked for
    longest ago makes room.

    Args:
        store: where the experts are.
        host_bytes: memory for them; at least one expert is kept.
        gatings: per layer, the model's own gating or None (`MoeLayer.gating`).

    Attributes:
        slots: experts that fit.
        reads: experts read so far; `hits`: found in memory; `read_bytes`: what was
            read.

    Raises:
        RuntimeFault: the host has not that much memory.
    """

    def __init__(
        self,
        store: ExpertStore,
        host_bytes: int,
        gatings: Sequence[Callable[[torch.Tensor], torch.Tensor] | None],
    ) -> None:
        total = sum(store.experts(layer) for layer in range(store.layers))
        self.slots = max(1, min(host_bytes // store.slot_bytes, total))
        self.reads = self.hits = self.read_bytes = 0
        self._store = store
        self._gatings = gatings
        self._tier = HostTier(self.slots, store.slot_bytes)
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()

    def experts(
        self,
        layer: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Answer as `moesim.runtime.models.offloaded.ExpertsHandler.experts`."""
        layout = self._store.layout(layer)
        gating = self._gatings[layer]
        groups = group_tokens(index.cpu().numpy())
        pairs = torch.from_numpy(groups.pairs).to(hidden.device)
        active = groups.experts.tolist()
        results = {}
        for position in sorted(
            range(len(active)), key=lambda one: (layer, active[one]) not in self._held
        ):
            mine = pairs[groups.starts[position] : groups.starts[position + 1]]
            record = self._visit(layer, active[position], hidden.device)
            results[position] = (
                mine,
                expert_forward(record, hidden[mine // index.shape[1]], layout, gating),
            )
        return combine(
            torch.zeros_like(hidden),
            [results[one] for one in range(len(active))],
            weights,
        )

    def close(self) -> None:
        """Let go of the memory."""
        self._tier.close()

    def _visit(self, layer: int, expert: int, device: torch.device) -> ExpertWeights:
        """Return an expert's weights, read where they are not in memory. Residents are
        asked for first, so stay.
        """
        key = (layer, expert)
        layout = self._store.layout(layer)
        slot = self._held.get(key)
        if slot is None:
            slot = (
                self._held.popitem(last=False)[1]
                if len(self._held) == self.slots
                else len(self._held)
            )
            self.read_bytes += self._store.read_into(
                layer, expert, self._tier.record(slot), check=True
            )
            self.reads += 1
            self._held[key] = slot
        else:
            self._held.move_to_end(key)
            self.hits += 1
        if device.type == "cpu":
            return self._tier.weights(slot, layout)
        return layout.views(self._tier.record(slot).to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel(LocalModel):
    """A model whose experts visit: what the recorder cannot see in it is said here.

    `checkpoint` names the files it comes from, since the weights of the frame alone do
    not name the experts.
    """

    blocks: list[MoeBlock]
    facts: GateFacts
    shape: ModelShape
    visits: VisitingExperts
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
        building: told of every expert while a store is built.

    Raises:
        StoreError: no such model, or another model's store.
        RuntimeFault: not enough memory.
    """
    from moesim.runtime.models.tiny import tiny_dir  # noqa: PLC0415 - it imports the training code

    tiny = str(spec) == "tiny"
    folder = tiny_dir() if tiny else Path(spec)
    dtype = "float32" if tiny else None
    offloaded = OffloadedModel.load(
        folder, device=device, dtype=torch.float32 if tiny else None
    )
    with build_store(folder, store, dtype=dtype, progress=building) as own:
        offloaded.check_store(own)
        visits = VisitingExperts(
            own, host_bytes, [layer.gating for layer in offloaded.layers]
        )
        offloaded.handler = visits
        try:
            blocks = live_blocks(offloaded)
            facts = gate_facts(offloaded.model, blocks)
            name = "tiny" if tiny else folder.resolve().name
            shape = _shape(folder, name, offloaded, own, facts)
            tokenizer = reader_of(folder, offloaded, tiny=tiny).tokenizer
            yield StoredModel(
                name,
                offloaded.model,
                tokenizer,
                blocks=blocks,
                facts=facts,
                shape=shape,
                visits=visits,
                checkpoint=offloaded.digest,
            )
        finally:
            offloaded.handler = None
            visits.close()


def _shape(
    folder: Path,
    name: str,
    offloaded: OffloadedModel,
    store: ExpertStore,
    facts: GateFacts,
) -> ModelShape:
    """Describe the model as if it were loaded: bytes are those of its tensors, without
    the store's padding.
    """
    frame = skeleton(folder)
    shape = model_shape(frame, name, find_blocks(frame), facts)
    sizes = tuple(store.layout(layer).expert_bytes for layer in range(store.layers))
    dtype = store.layout(0).dtype
    return replace(
        shape,
        expert_bytes=sizes,
        other_bytes=offloaded.dense_bytes,
        dtype=_DTYPES.get(dtype, dtype),
    )
