"""A Hugging Face model whose experts are computed by a handler of ours.

The library calls every experts module through a registry: a name in the configuration
picks the function that gets ``(module, hidden [T, H], ids [T, K], weights [T, K])`` and
returns [T, H]. We register one function under one name. It looks up which MoE layer the
module is and calls a *handler*: an executor that computes experts where its plan says,
or `StoreExperts`, which computes one after the other. Everything else of the model
(attention, norms, gates, shared experts) stays the library's own code.

Expert weights never enter the module. Its class is extended by one step: as soon as the
model's frame exists, on the ``meta`` device and without memory, the experts modules
lose their parameters; so loading finds nothing to fill there, and never reads those
tensors.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from moesim.base.errors import RuntimeFault, StoreError
from moesim.runtime.models.checkpoint import (
    DTYPES,
    checkpoint_digest,
    read_config,
    skeleton,
    tensor_bytes,
)
from moesim.runtime.models.expert_layout import (
    MODULE_GATING,
    combine,
    expert_forward,
    gating_function,
    group_tokens,
    layout_of,
)
from moesim.runtime.models.gates import (
    GateFacts,
    MoeBlock,
    find_blocks,
    gate_facts,
    offloadable_blocks,
)
from moesim.runtime.models.local_model import (
    LocalModel,
    load_tokenizer,
    model_shape,
    tiny_dir,
)
from moesim.runtime.store.build import build_store
from moesim.runtime.store.memory import HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from moesim.runtime.models.expert_layout import ExpertWeights
    from moesim.runtime.store.store import BuildProgress, ExpertStore
    from moesim.traces.format.schema import ModelShape

    GatingFunction = Callable[[torch.Tensor], torch.Tensor]

IMPLEMENTATION: Final = "moesim"
"""The name under which the library finds our experts function."""

_BINDING: Final = "_moesim_binding"


class ExpertsHandler(Protocol):
    """Computes the routed experts of a model."""

    def experts(
        self,
        layer: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one MoE layer's experts for one forward pass.

        Args:
            layer: MoE layer, 0-based.
            hidden: [T, H], tokens of all sequences of the batch, sequence by sequence.
            index: [T, K] integer expert ids, best first.
            weights: [T, K] combine weights.

        Returns:
            [T, H] in the dtype and on the device of `hidden`.
        """


class OffloadedModel:
    """A model without expert weights; call `model` as usual once `handler` is set.

    Attributes:
        model: the library's model, in evaluation mode.
        blocks: its MoE layers.
        gatings: per layer, the model's own gating function where its experts' layout
            cannot name it, else None.
        handler: computes the experts; may be set and replaced at any time between
            forward passes.
        digest: names the checkpoint, as `StoreIndex.model_digest` does.
        dense_bytes: bytes of everything that is loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[MoeBlock],
        gatings: Sequence[GatingFunction | None],
        digest: str,
        handler: ExpertsHandler | None = None,
    ) -> None:
        self.model: Any = model
        self.blocks = list(blocks)
        self.gatings = list(gatings)
        self.digest = digest
        self.dense_bytes = tensor_bytes(model)
        self._served = _Served(handler)
        for layer, block in enumerate(self.blocks):
            # On the module itself: the library's function is given nothing else.
            setattr(block.experts, _BINDING, (self._served, layer))

    @property
    def handler(self) -> ExpertsHandler | None:
        """Computes the experts."""
        return self._served.handler

    @handler.setter
    def handler(self, handler: ExpertsHandler | None) -> None:
        self._served.handler = handler

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        handler: ExpertsHandler | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> OffloadedModel:
        """Load everything but the experts.

        Args:
            model_dir: a Hugging Face directory.
            handler: computes the experts.
            device: where the loaded part lives and computes.
            dtype: to compute in; the checkpoint's own when None.

        Raises:
            StoreError: no directory with such a model, or one whose experts the
                library's interface does not serve.
            RuntimeFault: the device has not enough memory.
        """
        directory = Path(model_dir)
        # Before loading: the name in the configuration must be known by then.
        _register()
        config, model_class = read_config(directory)

        blocks: list[MoeBlock] = []
        gatings: list[GatingFunction | None] = []
        try:
            model = _without_experts(model_class, blocks, gatings).from_pretrained(
                directory,
                config=config,
                dtype="auto" if dtype is None else dtype,
                experts_implementation=IMPLEMENTATION,
                local_files_only=True,
            )
        except OSError as error:
            raise StoreError(
                f"{directory}: cannot load: {str(error).splitlines()[0]}"
            ) from None

        try:
            model = model.eval().to(device)
        # A torch without CUDA raises an AssertionError, a full device a RuntimeError.
        except (RuntimeError, AssertionError) as error:
            raise RuntimeFault(
                f"{device}: no room for {directory.name}: {str(error).splitlines()[0]}"
            ) from None
        made = cls(model, blocks, gatings, checkpoint_digest(directory), handler)
        # The model's class, which refers to itself, holds this list.
        blocks.clear()
        return made

    def check_store(self, store: ExpertStore) -> None:
        """Make sure that a store holds this model's experts, from this very checkpoint.

        Raises:
            StoreError: it holds another's.
        """
        if store.index.model_digest != self.digest:
            raise StoreError(
                f"{store.directory}: expected the experts of this model's checkpoint,"
                f" found those of {store.index.model} (another model or version); build"
                " a store from this directory"
            )


def offloaded_shape(
    offloaded: OffloadedModel,
    model_dir: Path,
    name: str,
    store: ExpertStore,
    expert_bytes: Sequence[int],
) -> ModelShape:
    """Describe an offloaded model as if its experts were loaded.

    Args:
        offloaded: the model.
        model_dir: its directory.
        name: what it is called.
        store: its experts.
        expert_bytes: [L] of an expert of each layer, with padding or without.
    """
    # On meta the experts' shapes are still there.
    frame = skeleton(model_dir)
    facts = gate_facts(offloaded.model, offloaded.blocks)
    shape = model_shape(frame, name, find_blocks(frame), facts)
    # The frame's tensors were never loaded, so their type says nothing.
    dtype = store.layout(0).dtype
    return replace(
        shape,
        expert_bytes=tuple(expert_bytes),
        other_bytes=offloaded.dense_bytes,
        dtype=DTYPES.get(dtype, dtype),
    )


class StoreExperts:
    """A handler that reads experts from a store, computes one active expert after the
    other, and keeps as many in host memory as fit; the one used longest ago is
    replaced. It is slow and simple, so others are checked against it.

    Args:
        store: holds the experts.
        gatings: per layer, the model's own gating or None (`OffloadedModel.gatings`).
        host_bytes: memory for experts; at least one is kept.
        check: compare the checksum of every read.

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
        gatings: Sequence[GatingFunction | None] | None = None,
        host_bytes: int = 0,
        *,
        check: bool = True,
    ) -> None:
        self._store = store
        self._check = check
        self._gatings = gatings or [None] * store.layers
        # One at least: an expert must lie somewhere while it is computed.
        total = sum(store.experts(layer) for layer in range(store.layers))
        self.slots = max(1, min(host_bytes // store.slot_bytes, total))
        self.reads = 0
        self.hits = 0
        self.read_bytes = 0
        self._memory = HostSlots(self.slots, store.slot_bytes)
        # (layer, expert) -> slot, the one used longest ago first.
        self._residents: OrderedDict[tuple[int, int], int] = OrderedDict()

    def experts(
        self,
        layer: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute as `ExpertsHandler.experts`."""
        layout = self._store.layout(layer)
        gating = self._gatings[layer]
        groups = group_tokens(index.cpu().numpy())
        pairs = torch.from_numpy(groups.pairs).to(hidden.device)
        active = groups.experts.tolist()

        # Residents first: a read could evict one that this very layer needs.
        order = sorted(
            range(len(active)),
            key=lambda position: (layer, active[position]) not in self._residents,
        )
        results = {}
        for position in order:
            expert_pairs = pairs[groups.starts[position] : groups.starts[position + 1]]
            views = self._views(layer, active[position], hidden.device)
            rows = hidden[expert_pairs // index.shape[1]]
            result = expert_forward(views, rows, layout, gating)
            results[position] = (expert_pairs, result)

        # Sums are always by ascending expert id.
        by_expert = [results[position] for position in range(len(active))]
        return combine(torch.zeros_like(hidden), by_expert, weights)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _views(self, layer: int, expert: int, device: torch.device) -> ExpertWeights:
        """Return an expert's weights, read where they are not in memory; valid until
        the next are asked for.
        """
        key = (layer, expert)
        layout = self._store.layout(layer)
        slot = self._residents.get(key)
        if slot is None:
            slot = self._free_slot()
            try:
                self.read_bytes += self._store.read_into(
                    layer, expert, self._memory.record(slot), check=self._check
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


@dataclass(slots=True)
class _Served:
    """Who computes the experts of one model now.

    Modules hold this and not their offloaded model, which holds them: weights would
    outlive their last use until the garbage collector comes by.
    """

    handler: ExpertsHandler | None


def _register() -> None:
    """Tell the library about our experts function."""
    from transformers.integrations.moe import (  # noqa: PLC0415 - seconds to import
        ALL_EXPERTS_FUNCTIONS,
    )

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _call_handler)


def _call_handler(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Let the handler of a module's model compute its experts."""
    served, layer = getattr(module, _BINDING)
    handler = served.handler
    assert handler is not None, "set OffloadedModel.handler before calling the model"
    return handler.experts(layer, hidden, index, weights)


def _without_experts(
    model_class: Any, blocks: list[MoeBlock], gatings: list[GatingFunction | None]
) -> Any:
    """Extend a model class: its instances list their MoE layers, with gating functions,
    and drop their expert parameters.

    The new class keeps name and module of the old one, by which the library finds its
    conversions.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - a method in the making
        model_class.__init__(self, config, *args, **kwargs)

        # The library may build the model more than once; the last one counts.
        blocks[:] = offloadable_blocks(self)
        gatings[:] = [_own_gating(block.experts) for block in blocks]
        for block in blocks:
            for name, _ in list(block.experts.named_parameters()):
                delattr(block.experts, name)
            # Nothing is left there for the library to initialise.
            block.experts._is_hf_initialized = True  # noqa: SLF001 - the library's own mark

        # Else it warns of every expert tensor in the checkpoint.
        patterns = {re.escape(f"{block.name}.experts.") for block in blocks}
        ignored = set(self._keys_to_ignore_on_load_unexpected or ())
        self._keys_to_ignore_on_load_unexpected = ignored | patterns

    members = {"__init__": __init__, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def _own_gating(experts: Any) -> GatingFunction | None:
    """Return a module's gating function if a layout has no name for it; asked while its
    parameters are still there.
    """
    layout = layout_of(experts, next(experts.parameters()).dtype)
    return gating_function(experts) if layout.gating.act == MODULE_GATING else None


# -- for recording ---------------------------------------------------------------------
# The model's frame is loaded, experts are read from the store when a gate names them,
# and those used last stay in as much host memory as is given. A recording needs
# answers, not speed, so there is no planner here, no profile and no second lane.
# Results are summed in the order of expert ids whatever was in memory, so a recording
# does not depend on how much memory it had.


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
