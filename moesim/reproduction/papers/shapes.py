"""Sizes of the papers' models, as our table of models has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reproduction.papers.question import Question, computed
from moesim.traces.models import model_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.reproduction.records import Record
    from moesim.traces.format.schema import ModelShape

_BILLION = 1e9


def _expert_params(shape: ModelShape) -> float:
    return 3.0 * shape.hidden * shape.expert_intermediate


def _all_expert_params(shape: ModelShape) -> float:
    return shape.layers * shape.experts * _expert_params(shape)


def _all_params(shape: ModelShape) -> float:
    # Bytes in bf16 are two for every parameter.
    return _all_expert_params(shape) + shape.other_bytes / 2


def _active_share(shape: ModelShape) -> float:
    """Parameters that one token uses, % of all."""
    idle = _all_expert_params(shape) * (1 - shape.top_k / shape.experts)
    return 100.0 * (1 - idle / _all_params(shape))


_FIELDS: dict[str, Callable[[ModelShape], float]] = {
    "layers": lambda shape: shape.layers + len(shape.dense_layers),
    "moe_layers": lambda shape: shape.layers,
    "hidden": lambda shape: shape.hidden,
    "shared": lambda shape: shape.shared_experts,
    "experts": lambda shape: shape.experts,
    "top_k": lambda shape: shape.top_k,
    "expert_params_B": lambda shape: _all_expert_params(shape) / _BILLION,
    "params_B": lambda shape: _all_params(shape) / _BILLION,
    "active_share": _active_share,
}


def shape_answer(field: str, models: Mapping[str, str]) -> Callable[[Record], Question]:
    """Answer records with a size of our model.

    Args:
        field: of `_FIELDS`.
        models: beginning of the paper's name of a model -> ours.
    """

    def answer(record: Record) -> Question:
        named = str(record.setting["model"])
        ours = next(model for name, model in models.items() if named.startswith(name))
        value = _FIELDS[field](model_shape(ours))
        return computed(record, float(value), f"{ours} in moesim's table of models")

    return answer
