"""The tensors of a module: their bytes, their main dtype, and a digest of them all."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch

from moesim.runtime.models.expert_layout import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of dtypes in recorded shapes."""

_DIGEST_BYTES: Final = 4096


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared tensors count once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(module))


def main_dtype(module: nn.Module) -> str:
    """Name the dtype that most bytes of a module have, as recorded shapes do."""
    sizes: dict[str, int] = {}
    for tensor in _tensors(module):
        name = dtype_name(tensor.dtype)
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()

    largest = max(sizes, key=lambda name: sizes[name], default="float32")
    return DTYPES.get(largest, largest)


def weights_digest(model: nn.Module) -> str:
    """Name the weights: SHA-256 over name, dtype, shape and both ends (4 KiB) of every
    tensor, in hexadecimal.

    Ends instead of everything, so that a model of 60 GB is named in a moment; training
    moves every tensor's ends.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # Tensors on meta have no bytes; their shapes still count.
        if tensor.device.type == "meta":
            continue

        flat = tensor.detach().reshape(-1)
        end = _DIGEST_BYTES // tensor.element_size()
        for piece in (flat[:end], flat[-end:]):
            # As bytes, because numpy has no bfloat16.
            raw = piece.cpu().contiguous().view(torch.uint8)
            total.update(raw.numpy().tobytes())
    return total.hexdigest()


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    """List parameters and buffers, each once."""
    yield from module.parameters()
    yield from module.buffers()
