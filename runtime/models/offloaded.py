"""A Hugging Face model whose experts are ours.

The library calls every experts module through a registry: a name in the configuration
picks the function that gets ``(module, hidden [T, H], ids [T, K], weights [T, K])`` and
returns [T, H]. We register one function under one name. It looks up which MoE layer the
module is and hands over to a *handler*: an executor that computes experts where its
plan says, or `StoreExperts`, which reads them one after the other. Everything else of
the model (attention, norms, gates, shared experts) stays the library's own code.

Expert weights never enter the module. Its class is extended by one step: as soon as the
model's frame exists, on the ``meta`` device and without memory, the experts modules
lose their parameters; so loading finds nothing to fill there, and never reads those
tensors.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from moesim.runtime.errors import RuntimeFault, StoreError
from moesim.runtime.models.expert_math import (
    MODULE_GATING,
    ExpertLayout,
    combine,
    expert_forward,
    group_tokens,
)
from moesim.runtime.models.hf import tensor_bytes
from moesim.runtime.store.memory import HostTier
from moesim.runtime.store.sources import (
    checkpoint_digest,
    layout_of,
    moe_blocks,
    read_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.runtime.models.hf import MoeBlock
    from moesim.runtime.store.store import ExpertStore
    from torch import nn
    from torch.utils.hooks import RemovableHandle

IMPLEMENTATION: Final = "moesim"
"""The name under which the library finds our experts function."""

_SEAT: Final = "_moesim_seat"


class ExpertsHandler(Protocol):
    """Whoever computes the experts."""

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


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE layer of an offloaded model.

    Attributes:
        index: MoE layer, 0-based (dense layers not counted).
        name: where its experts module sits, e.g. ``model.layers.3.mlp.experts``.
        experts: routed experts E.
        layout: its experts' shapes and arithmetic in the model's dtype; a store may
            hold another dtype.
        gate: the module whose output decides.
        gating: the model's own gating function where `layout` cannot name it, else
            None.
    """

    index: int
    name: str
    experts: int
    layout: ExpertLayout
    gate: nn.Module
    gating: Callable[[torch.Tensor], torch.Tensor] | None


class OffloadedModel:
    """A model without expert weights; call `model` as usual once `handler` is set.

    Attributes:
        model: the library's model, in evaluation mode.
        layers: its MoE layers.
        handler: who computes the experts; may be set and replaced at any time between
            forward passes.
        digest: names the checkpoint, as `StoreIndex.model_digest` does.
        dense_bytes: bytes of everything that is loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[MoeLayer],
        digest: str,
        handler: ExpertsHandler | None = None,
    ) -> None:
        self.model: Any = model
        self.layers = tuple(layers)
        self.digest = digest
        self.handler = handler
        self.dense_bytes = tensor_bytes(model)
        for layer in self.layers:
            setattr(model.get_submodule(layer.name), _SEAT, _Seat(self, layer.index))

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
            handler: who computes the experts.
            device: where the loaded part lives and computes.
            dtype: to compute in; the checkpoint's own when None.

        Raises:
            StoreError: no directory with such a model, or one whose experts the
                library's interface does not serve.
            RuntimeFault: the device has not enough memory.
        """
        directory = Path(model_dir)
        _register()
        config, kind = read_config(directory)
        found: list[MoeLayer] = []
        try:
            model = _without_experts(kind, found).from_pretrained(
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
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # out of memory; or a torch without CUDA
            raise RuntimeFault(
                f"{device}: no room for {directory.name}: {str(error).splitlines()[0]}"
            ) from None
        return cls(model, found, checkpoint_digest(directory), handler)

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

    def watch_gates(
        self, seen: Callable[[int, torch.Tensor, Any], None]
    ) -> list[RemovableHandle]:
        """Observe the gates: `seen` gets the MoE layer, the gate's input and whatever
        it returned, as it returns.

        `moesim.runtime.models.hf.read_gate` reads the output. Remove the handles to
        stop watching.
        """

        def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, inputs, output: seen(layer, inputs[0], output)

        return [
            layer.gate.register_forward_hook(hook(layer.index)) for layer in self.layers
        ]


class StoreExperts:
    """The plainest handler: read each active expert, compute it, forget it. Slow,
    simple, and the yardstick.

    Args:
        store: where the experts are.
        gatings: per layer, the model's own gating or None (`MoeLayer.gating`).
        check: compare the checksum of every read.
    """

    def __init__(
        self,
        store: ExpertStore,
        gatings: Sequence[Callable[[torch.Tensor], torch.Tensor] | None] | None = None,
        *,
        check: bool = True,
    ) -> None:
        self._store = store
        self._gatings = gatings or [None] * store.layers
        self._check = check
        self._tier = HostTier(1, store.slot_bytes)

    def experts(
        self,
        layer: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Answer as `ExpertsHandler.experts`."""
        layout = self._store.layout(layer)
        groups = group_tokens(index.cpu().numpy())
        pairs = torch.from_numpy(groups.pairs).to(hidden.device)
        slot = self._tier.record(0)
        results = []
        for position, expert in enumerate(groups.experts.tolist()):
            mine = pairs[groups.starts[position] : groups.starts[position + 1]]
            self._store.read_into(layer, expert, slot, check=self._check)
            record = slot if hidden.device.type == "cpu" else slot.to(hidden.device)
            rows = hidden[mine // index.shape[1]]
            results.append(
                (
                    mine,
                    expert_forward(
                        layout.views(record), rows, layout, self._gatings[layer]
                    ),
                )
            )
        return combine(torch.zeros_like(hidden), results, weights)


@dataclass(frozen=True, slots=True)
class _Seat:
    """What an experts module knows: whose it is, and which MoE layer it serves."""

    owner: OffloadedModel
    layer: int


def _register() -> None:
    """Tell the library about our experts function."""
    from transformers.integrations.moe import (  # noqa: PLC0415 - seconds to import
        ALL_EXPERTS_FUNCTIONS,
    )

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _dispatch)


def _dispatch(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Hand a layer's experts over to the handler of its model."""
    seat: _Seat = getattr(module, _SEAT)
    handler = seat.owner.handler
    assert handler is not None, "set OffloadedModel.handler before calling the model"
    return handler.experts(seat.layer, hidden, index, weights)


def _without_experts(kind: Any, found: list[MoeLayer]) -> Any:
    """Extend a model class: its instances describe their MoE layers in `found` and drop
    their expert parameters.

    The new class keeps name and module of the old one, by which the library finds its
    conversions.
    """

    def __init__(self: Any, config: Any, *further: Any, **named: Any) -> None:  # noqa: N807 - a method in the making
        kind.__init__(self, config, *further, **named)
        found.clear()
        for index, block in enumerate(moe_blocks(self)):
            found.append(_describe(index, block))
            for name, _ in list(block.experts.named_parameters()):
                delattr(block.experts, name)
            block.experts._is_hf_initialized = True  # noqa: SLF001 - nothing left for the library to initialise
        names = {re.escape(f"{layer.name}.") for layer in found}
        self._keys_to_ignore_on_load_unexpected = (
            set(self._keys_to_ignore_on_load_unexpected or ()) | names
        )

    return type(
        kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__}
    )


def _describe(index: int, block: MoeBlock) -> MoeLayer:
    """Describe one MoE layer while its parameters are still there."""
    experts: Any = block.experts
    layout = layout_of(experts, next(experts.parameters()).dtype)
    own = experts._apply_gate if layout.gating.gated else experts.act_fn  # noqa: SLF001 - the library's joint
    gating = own if layout.gating.act == MODULE_GATING else None
    return MoeLayer(
        index, f"{block.name}.experts", block.count, layout, block.gate, gating
    )
