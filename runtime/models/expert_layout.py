"""The record of one expert: where its tensors lie among the bytes, and its gating.

An expert's weights lie in one flat record, one tensor after the other. A layout
describes that record. Models differ in the layout (transposed or not, biased or not,
gate and up side by side or interleaved) and in the gating between the two products. The
layout describes both, so one arithmetic (`moesim.runtime.models.expert_layout`) serves
them all, whether a record is in a file, in host memory or in a device slot.

Shape legend: t tokens of one expert, H hidden, F intermediate.

How a Hugging Face experts module lays its experts out is found here too: shapes come
from its parameters and flags from the library. The gating, which is code, is found by
trial: the module's own function and each gating that we know are applied to the same
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from moesim.base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

TENSOR_ALIGNMENT_BYTES: Final = 64
"""Every tensor of a record starts on a cache line, which suits vector loads and CUDA
kernels best.
"""

ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}

_MOST_TENSORS: Final = 4
"""Weights up and down, and their biases."""

ALPHA_SWIGLU: Final = "alpha_swiglu"
"""gpt-oss's activation: ``(up + 1) * gate * sigmoid(alpha * gate)``."""

MODULE_GATING: Final = "module"
"""A gating that only the model's own experts module knows how to compute."""


@dataclass(frozen=True, slots=True)
class Gating:
    """The function by which the up projection's features [t, 2F] become F.

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
        gpt-oss; DeepSeek-V4 for the clamp). `runtime/models/expert_layout.py` compares
        a model's own function with this one before choosing it.
        """
        if not self.gated:
            return ACTIVATIONS[self.act](features)

        if self.interleaved:
            gate = features[..., ::2]
            up = features[..., 1::2]
        else:
            gate, up = features.chunk(2, dim=-1)

        # The clamp is lopsided on purpose: a very negative gate is already silent.
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
    """The tensors of one expert's record, and how to compute with them.

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

    def __post_init__(self) -> None:
        """Refuse what no expert has: a layout may come from a file."""
        # A wrong name is met when an index is read, not later.
        torch_dtype(self.dtype)
        known = {*ACTIVATIONS, ALPHA_SWIGLU, MODULE_GATING}
        if self.gating.act not in known:
            raise ValueError(f"gating.act: unknown activation {self.gating.act!r}")
        if not 2 <= len(self.tensors) <= _MOST_TENSORS:
            raise ValueError(
                f"tensors: expected 2..{_MOST_TENSORS}, found {len(self.tensors)}"
            )
        end = 0
        for spec in self.tensors:
            if spec.offset_bytes < end or not spec.shape or min(spec.shape) < 1:
                raise ValueError(
                    f"tensors: {spec.name}: expected a place behind byte {end} and"
                    f" sizes above 0, found byte {spec.offset_bytes}, {spec.shape}"
                )
            end = spec.offset_bytes + self.tensor_bytes(spec)

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
        """View a record as weight tensors, without copying.

        Args:
            record: uint8, contiguous, at least `expert_bytes` long, starting on a cache
                line.
        """
        views = []
        for spec in self.tensors:
            end = spec.offset_bytes + self.tensor_bytes(spec)
            raw = record[spec.offset_bytes : end]
            views.append(raw.view(self.torch_dtype).view(spec.shape))
        return ExpertWeights(*views)


def torch_dtype(name: str) -> torch.dtype:
    """Find a dtype by its name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}; known: bfloat16, float16, float32")  # noqa: TRY004 - a wrong name
    return dtype


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
    offset = 0
    for name, shape in shapes.items():
        specs.append(TensorSpec(name, tuple(shape), offset))
        end = offset + math.prod(shape) * dtype.itemsize
        offset = round_up(end, TENSOR_ALIGNMENT_BYTES)
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


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `size`."""
    return -(-size // multiple) * multiple


_PROBE_ROWS: Final = 16

# Beyond every clamp in use (7 in gpt-oss); doubled limits reach further.
_PROBE_REACH: Final = 12.0


def layout_of(experts: nn.Module, dtype: torch.dtype) -> ExpertLayout:
    """Describe the experts of a module: shapes from its parameters, flags from the
    library, gating by trial.

    Args:
        experts: an experts module; its parameters may be on ``meta``.
        dtype: in which they will be stored.

    Raises:
        StoreError: it has parameters that no known kind of expert has.
    """
    module: Any = experts
    # In the order of `ExpertWeights`' fields, which is that of a record.
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]

    parameters = dict(experts.named_parameters())
    if set(parameters) != set(names):
        raise StoreError(
            f"{type(experts).__name__}: expected parameters {', '.join(names)}, found"
            f" {', '.join(sorted(parameters))}"
        )
    # The first axis counts experts; a record holds one.
    shapes = {name: tuple(parameters[name].shape)[1:] for name in names}
    return pack_layout(
        shapes,
        dtype=dtype,
        transposed=bool(module.is_transposed),
        gating=_gating(module),
    )


def gating_function(experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the module's own function between the two products."""
    return experts._apply_gate if experts.has_gate else experts.act_fn  # noqa: SLF001 - the library offers no public name


def _gating(experts: Any) -> Gating:
    """Find the gating that computes what the module's own function computes, on numbers
    large enough to reach every clamp.
    """
    limits = [None, *_numbers(experts, ("limit", "swiglu_limit"))]
    bounds = [2 * abs(limit) for limit in limits if limit is not None]
    reach = max([_PROBE_REACH, *bounds])

    # Models are described while their frame is built on meta, where nothing computes.
    with torch.device("cpu"):
        draws = torch.Generator().manual_seed(0)
        features = torch.empty(_PROBE_ROWS, _PROBE_ROWS)
        features.uniform_(-reach, reach, generator=draws)

        expected = gating_function(experts)(features)
        for candidate in _candidates(experts, limits):
            if torch.allclose(candidate(features), expected, rtol=1e-5, atol=1e-6):
                return candidate
    return Gating(MODULE_GATING, gated=bool(experts.has_gate))


def _candidates(experts: Any, limits: list[float | None]) -> Iterable[Gating]:
    """List every gating that a module with these numbers could mean, simplest first."""
    if not experts.has_gate:
        yield from (Gating(act, gated=False) for act in ACTIVATIONS)
        return

    alphas = _numbers(experts, ("alpha", "swiglu_alpha"))
    for limit in limits:
        for interleaved in (False, True):
            for act in ACTIVATIONS:
                yield Gating(act, interleaved=interleaved, limit=limit)
            for alpha in alphas:
                yield Gating(
                    ALPHA_SWIGLU, interleaved=interleaved, limit=limit, alpha=alpha
                )


def _numbers(experts: Any, names: Iterable[str]) -> list[float]:
    """Return those of a module's attributes that are numbers."""
    values = (getattr(experts, name, None) for name in names)
    return [float(value) for value in values if isinstance(value, int | float)]


# -- expert math -----------------------------------------------------------------------
# The arithmetic of experts: one expert's products, tokens by expert, the weighted
# sum.
#
# An expert is a small two-layer network: *up* to F intermediate features, a gated
# activation, *down* to H again. Its layout (`moesim.runtime.models.expert_layout`)
# says how the weights lie, so one function serves every model, wherever the record
# is.
#
# Shape legend: T tokens, t tokens of one expert, K experts per token, A active
# experts, H hidden, F intermediate.

UNUSED: Final = 65535
"""The expert id of an empty column in a routing (`moesim.policies.base.Routing`)."""


def expert_forward(
    weights: ExpertWeights,
    hidden: torch.Tensor,
    layout: ExpertLayout,
    gating: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute one expert for its tokens, without combine weights.

    Args:
        weights: views into the record, on the device of `hidden`.
        hidden: [t, H]; cast to the weights' dtype where it differs.
        layout: of the record.
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
    """The (token, column) pairs of a layer step, sorted by expert.

    `experts` int32 [A] ascending; `tokens` int32 [A] how many pairs each has; `starts`
    int64 [A + 1] where they begin in `pairs`; `pairs` int64 [T K]: flat positions in
    the routing [T, K], ascending within an expert.
    """

    experts: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    pairs: np.ndarray


def group_tokens(routing: np.ndarray) -> Groups:
    """Sort the pairs of `routing` [T, K] by expert.

    Columns that a routing policy left `UNUSED` belong to no expert and are left out.
    """
    flat = routing.reshape(-1)
    # Stable, so that pairs ascend within an expert: sums follow this order.
    pairs = np.argsort(flat, kind="stable")
    ordered = flat[pairs]

    # UNUSED is the largest id there is, so unused columns stand at the end.
    if len(ordered) and ordered[-1] == UNUSED:
        used = int(np.searchsorted(ordered, UNUSED))
        pairs = pairs[:used]
        ordered = ordered[:used]

    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    if len(ordered):
        starts = np.concatenate(([0], edges, [len(ordered)]))
    else:
        starts = np.zeros(1, dtype=np.int64)
    return Groups(
        experts=ordered[starts[:-1]].astype(np.int32),
        tokens=np.diff(starts).astype(np.int32),
        starts=starts.astype(np.int64),
        pairs=pairs,
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
        # Cast after the product: weights may be wider than the hidden states.
        out.index_add_(0, pairs // top_k, weighted.to(out.dtype))
    return out


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
    # addmm has no form without a bias.
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)
