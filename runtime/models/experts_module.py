"""Describes a Hugging Face experts module as an `ExpertLayout`.

Shapes come from the module's parameters and flags from the library. The gating, which
is code, is found by trial: the module's own function and each gating that we know are
applied to the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from moesim.runtime.errors import StoreError
from moesim.runtime.models.expert_layout import (
    ACTIVATIONS,
    ALPHA_SWIGLU,
    MODULE_GATING,
    ExpertLayout,
    Gating,
    pack_layout,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

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
