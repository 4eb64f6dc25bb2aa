"""The arithmetic of experts: one expert's products, tokens by expert, the weighted sum.

An expert is a small two-layer network: *up* to F intermediate features, a gated
activation, *down* to H again. Its layout (`moesim.runtime.models.expert_layout`) says
how the weights lie, so one function serves every model, wherever the record is.

Shape legend: T tokens, t tokens of one expert, K experts per token, A active experts, H
hidden, F intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runtime.models.expert_layout import ExpertLayout, ExpertWeights

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
