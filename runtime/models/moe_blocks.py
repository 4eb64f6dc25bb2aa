"""Finds the MoE layers of a Hugging Face model, and reads the calls of their experts.

Every MoE model of Transformers 5 has the same structure in each MoE layer: a module
called `gate` or `router` reads a token's hidden state and names experts, and a sibling
called `experts` receives the hidden states with the chosen ids and weights, in this or
another order, by position or by name. Modules are found by name and arguments by what
they are, so no model needs code of its own.

T tokens, E routed experts, K experts per token, H hidden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn

from moesim.base.errors import TraceError
from moesim.runtime.errors import StoreError
from moesim.runtime.models.checkpoint import (
    tensor_bytes,
)

GATE_NAMES: Final = ("gate", "router")

_LAYER_NUMBER: Final = re.compile(r"\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """One MoE layer.

    Attributes:
        layer: the decoder layer it sits in, dense layers counted.
        name: its owner's name in the model, e.g. ``model.layers.3.mlp``.
        owner: the module that holds gate and experts.
        gate: the router.
        experts: the module of all routed experts.
        count: routed experts E.
    """

    layer: int
    name: str
    owner: nn.Module
    gate: nn.Module
    experts: nn.Module
    count: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as loaded."""
        return tensor_bytes(self.experts) // self.count


def find_blocks(model: nn.Module) -> list[MoeBlock]:
    """List the MoE layers of a model in the order of its layers.

    Raises:
        TraceError: there are none, or they differ in their number of experts.
    """
    blocks = [
        block
        for name, owner in model.named_modules()
        if (block := _block(name, owner)) is not None
    ]
    if not blocks:
        raise TraceError(
            f"{type(model).__name__}: expected MoE layers (a module named 'experts'"
            " beside a 'gate' or 'router'), found none; this needs a"
            " Mixture-of-Experts model of transformers >= 5"
        )

    counts = sorted({block.count for block in blocks})
    if len(counts) > 1:
        raise TraceError(
            f"{type(model).__name__}: expected equally many experts in every layer,"
            f" found {counts}"
        )
    return blocks


def offloadable_blocks(model: nn.Module) -> list[MoeBlock]:
    """List the MoE layers of a model, which the library's experts interface must serve.

    Raises:
        StoreError: there are none, or their experts bypass that interface.
    """
    try:
        blocks = find_blocks(model)
    except TraceError as error:
        raise StoreError(str(error)) from None

    for block in blocks:
        # The interface's decorator adds this method; it leaves no public mark.
        if not hasattr(block.experts, "_apply_gate"):
            raise StoreError(
                f"{block.name}.experts ({type(block.experts).__name__}): expected"
                " experts served by the library's experts interface, found a module of"
                " its own kind; this model cannot be offloaded"
            )
    return blocks


def _block(name: str, owner: nn.Module) -> MoeBlock | None:
    """Recognise an MoE layer by its children."""
    children = dict(owner.named_children())
    gate = next((children[key] for key in GATE_NAMES if key in children), None)
    experts = children.get("experts")
    # A list of experts means one module each, as before Transformers 5.
    if gate is None or experts is None or isinstance(experts, nn.ModuleList):
        return None

    declared = getattr(experts, "num_experts", None)
    stacked = next(
        (len(tensor) for tensor in experts.parameters() if tensor.dim() == 3), None
    )
    # Offloaded modules have no parameters left; then the declaration counts.
    count = declared if isinstance(declared, int) else stacked
    layer = _LAYER_NUMBER.search(name)
    if count is None or layer is None:
        return None
    if stacked not in (None, count):
        raise TraceError(
            f"{name}.experts: expected weights of {count} experts, found {stacked};"
            " zero-computation experts and other models whose experts differ in kind"
            " are not supported"
        )
    return MoeBlock(int(layer.group(1)), name, owner, gate, experts, count)


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


class ExpertsCall(NamedTuple):
    """What an experts module is called with.

    Attributes:
        hidden: [T, H] hidden states.
        index: [T, K] expert ids.
        weights: [T, K] combine weights.
        positions: where these three stand among the arguments: a number, or a name.
    """

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    positions: tuple[int | str, ...]

    @classmethod
    def find(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsCall | None:
        """Read arguments by what they are; None where they are no such call.

        Hidden states come first, integers are ids, floats of their shape the weights.
        """
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = [
            (position, value)
            for position, value in arguments
            if isinstance(value, torch.Tensor)
        ]
        ids = [
            (position, tensor)
            for position, tensor in tensors
            if not tensor.is_floating_point() and tensor.dim() == 2
        ]
        if not ids:
            return None

        index_position, index = ids[0]
        # Without the first tensor: hidden states can have the shape of the ids.
        weights = [
            (position, tensor)
            for position, tensor in tensors[1:]
            if tensor.is_floating_point() and tensor.shape == index.shape
        ]
        if not weights:
            return None

        hidden_position, hidden = tensors[0]
        weights_position, weight = weights[0]
        return cls(
            hidden, index, weight, (hidden_position, index_position, weights_position)
        )

    def changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *values: torch.Tensor
    ) -> Arguments:
        """Put other hidden states, ids and weights into the arguments."""
        changes = dict(zip(self.positions, values, strict=True))
        new_args = tuple(changes.get(at, value) for at, value in enumerate(args))
        new_kwargs = {name: changes.get(name, value) for name, value in kwargs.items()}
        return new_args, new_kwargs
