"""The arguments of an experts module's call, found by what they are.

Models call their experts with hidden states, expert ids and combine weights, in this or
another order, by position or by name.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

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
