"""One expert, as bytes and as arithmetic.

An expert is a small two-layer network: *up* to F intermediate features, a gated
activation, *down* to H again. Its weights lie in one flat record, one tensor after the
other; a layout is the map of that record. Models differ in the map (transposed or not,
biased or not, gate and up side by side or interleaved) and in the gating, never in the
idea, so one function serves them all, wherever the record is: a file, host memory or a
device slot.

Shape legend: T tokens, t tokens of one expert, K experts per token, A active experts, H
hidden, F intermediate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TENSOR_ALIGNMENT_BYTES: Final = 64
"""Every tensor of a record starts on a cache line: what vector loads and CUDA kernels
like best.
"""

ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}

ALPHA_SWIGLU: Final = "alpha_swiglu"
"""gpt-oss's activation: ``(up + 1) * gate * sigmoid(alpha * gate)``."""

UNUSED: Final = 65535
"""The expert id of an empty place in a routing (`moesim.policies.base.Routing`)."""

MODULE_GATING: Final = "module"
"""A gating that only the model's own experts module knows how to compute."""


@dataclass(frozen=True, slots=True)
class Gating:
    """How the up projection's features [t, 2F] become F.

    Attributes:
        act: a name in `ACTIVATIONS`, `ALPHA_SWIGLU`, or `MODULE_GATING`.
        gated: gate and up both exist; otherwise `act` alone is applied to [t, F].
        interleaved: columns are gate, up, gate, up, …; otherwise all gates, then all
            ups.
        limit: clamp before activation: gate from above, up on both sides; None for no
            clamp.
        alpha: slope of `ALPHA_SWIGLU`.
    """

    act: str = "silu"
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Apply to `features` [t, 2F] (or [t, F] if not gated) and return [t, F].

        Source: the experts modules of transformers 5.23 (Mixtral and most others;
        gpt-oss; DeepSeek-V4 for the clamp). `runtime/store/sources.py` compares a
        model's own function with this one before choosing it.
        """
        if not self.gated:
            return ACTIVATIONS[self.act](features)
        if self.interleaved:
            gate = features[..., ::2]
            up = features[..., 1::2]
        else:
            gate, up = features.chunk(2, dim=-1)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        if self.act == ALPHA_SWIGLU:
            return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return ACTIVATIONS[self.act](gate) * up


class TensorSpec(NamedTuple):
    """One tensor inside a record."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int


class ExpertWeights(NamedTuple):
    """Views into one record. `up` holds gate and up together where the expert is gated.

    Shapes are ``[out, in]``, or ``[in, out]`` in a transposed layout.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The map of one expert's record, and how to compute with it.

    Attributes:
        dtype: a torch dtype's name, e.g. ``bfloat16``.
        tensors: in the order of `ExpertWeights`' fields (biases last), each aligned to
            `TENSOR_ALIGNMENT_BYTES`.
        transposed: weights are ``[in, out]``.
        gating: what happens between the two products.
    """

    dtype: str
    tensors: tuple[TensorSpec, ...]
    transposed: bool
    gating: Gating

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        return torch_dtype(self.dtype)

    @property
    def expert_bytes(self) -> int:
        """Bytes from the record's start to the end of its last tensor."""
        last = self.tensors[-1]
        return last.offset_bytes + self.tensor_bytes(last)

    def tensor_bytes(self, spec: TensorSpec) -> int:
        """Bytes of one tensor."""
        return math.prod(spec.shape) * int(self.torch_dtype.itemsize)

    def views(self, record: torch.Tensor) -> ExpertWeights:
        """Look at a record as weight tensors, without copying.

        Args:
            record: uint8, contiguous, at least `expert_bytes` long, starting on a cache
                line.
        """
        return ExpertWeights(
            *(
                record[spec.offset_bytes : spec.offset_bytes + self.tensor_bytes(spec)]
                .view(self.torch_dtype)
                .view(spec.shape)
                for spec in self.tensors
            )
        )

    def to_json(self) -> dict[str, Any]:
        """Describe as plain values for an index file."""
        return asdict(self) | {"tensors": [list(spec) for spec in self.tensors]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ExpertLayout:
        """Rebuild from `to_json`.

        Raises:
            KeyError, TypeError, ValueError: `raw` is not such a description.
        """
        tensors = tuple(
            TensorSpec(str(n), tuple(int(d) for d in s), int(o))
            for n, s, o in raw["tensors"]
        )
        torch_dtype(raw["dtype"])
        return cls(
            str(raw["dtype"]), tensors, bool(raw["transposed"]), Gating(**raw["gating"])
        )


def torch_dtype(name: str) -> torch.dtype:
    """Find a dtype by its name.

    Raises:
        ValueError: torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}; known: bfloat16, float16, float32")  # noqa: TRY004 - a wrong name
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype: ``torch.bfloat16`` is ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def pack_layout(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    transposed: bool,
    gating: Gating,
) -> ExpertLayout:
    """Lay tensors one after the other, each on the next cache line.

    Args:
        shapes: name -> shape of one expert's tensor, in the order of `ExpertWeights`.
        dtype: of all of them.
        transposed: as in `ExpertLayout`.
        gating: as in `ExpertLayout`.
    """
    specs: list[TensorSpec] = []
    at = 0
    for name, shape in shapes.items():
        specs.append(TensorSpec(name, tuple(shape), at))
        at = round_up(at + math.prod(shape) * dtype.itemsize, TENSOR_ALIGNMENT_BYTES)
    return ExpertLayout(dtype_name(dtype), tuple(specs), transposed, gating)


def swiglu_layout(hidden: int, intermediate: int, dtype: torch.dtype) -> ExpertLayout:
    """Describe the usual expert, ``3 H F`` weights: fused gate and up [2F, H], SiLU,
    down [H, F], no biases.
    """
    shapes = {
        "gate_up_proj": (2 * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    return pack_layout(shapes, dtype=dtype, transposed=False, gating=Gating())


def expert_forward(
    weights: ExpertWeights,
    hidden: torch.Tensor,
    layout: ExpertLayout,
    gating: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute one expert for its tokens, without combine weights.

    Args:
        weights: where the record is, on the device of `hidden`.
        hidden: [t, H]; cast to the weights' dtype where it differs.
        layout: the record's map.
        gating: the model's own function, for layouts whose gating is `MODULE_GATING`.

    Returns:
        [t, H] in the weights' dtype.
    """
    apply = layout.gating if gating is None else gating
    rows = hidden if hidden.dtype == weights.up.dtype else hidden.to(weights.up.dtype)
    features = _project(rows, weights.up, weights.up_bias, transposed=layout.transposed)
    return _project(
        apply(features), weights.down, weights.down_bias, transposed=layout.transposed
    )


class Groups(NamedTuple):
    """The (token, place) pairs of a layer step, sorted by expert.

    `experts` int32 [A] ascending; `tokens` int32 [A] how many pairs each has; `starts`
    int64 [A + 1] where they begin in `pairs`; `pairs` int64 [T K]: flat positions in
    the routing [T, K], ascending within an expert.
    """

    experts: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    pairs: np.ndarray


def group_tokens(routing: np.ndarray) -> Groups:
    """Sort the pairs of `routing` [T, K] by expert: who works, on how many tokens, on
    which.

    Places that a routing policy left `UNUSED` belong to nobody and are left out.
    """
    flat = routing.reshape(-1)
    pairs = np.argsort(flat, kind="stable")
    ordered = flat[pairs]
    if len(ordered) and ordered[-1] == UNUSED:
        used = int(np.searchsorted(ordered, UNUSED))
        pairs = pairs[:used]
        ordered = ordered[:used]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = (
        np.concatenate(([0], edges, [len(ordered)]))
        if len(ordered)
        else np.zeros(1, dtype=np.int64)
    )
    experts = ordered[starts[:-1]].astype(np.int32)
    return Groups(
        experts, np.diff(starts).astype(np.int32), starts.astype(np.int64), pairs
    )


def combine(
    out: torch.Tensor,
    results: list[tuple[torch.Tensor, torch.Tensor]],
    weights: torch.Tensor,
) -> torch.Tensor:
    """Add weighted expert results to their tokens, in the order given.

    Floating-point sums depend on their order, so callers pass results by ascending
    expert id, as the library's own forward does; then every mix of devices gives the
    same bits for the same products. A token occurs once per expert, so no order inside
    one addition is left to chance.

    Args:
        out: [T, H], zeros; written.
        results: per expert, its pairs (int64 [t], flat positions in [T, K]) and its
            result [t, H].
        weights: [T, K] combine weights.

    Returns:
        `out`.
    """
    top_k = weights.shape[1]
    flat = weights.reshape(-1)
    for pairs, result in results:
        weighted = result * flat[pairs, None]
        out.index_add_(0, pairs // top_k, weighted.to(out.dtype))
    return out


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `size`."""
    return -(-size // multiple) * multiple


def _project(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    transposed: bool,
) -> torch.Tensor:
    """Multiply `rows` [t, in] by a weight [out, in], or [in, out] if transposed."""
    if not transposed:
        return functional.linear(rows, weight, bias)
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)
