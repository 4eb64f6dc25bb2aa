"""HybriMoE's table III and its average speedups (figures 7 and 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.reproduction.papers.question import (
    Answers,
    Question,
    input_,
    ratio,
    simulated,
    unanswered,
)
from moesim.reproduction.papers.runs import RunSpec
from moesim.reproduction.papers.shapes import shape_answer
from moesim.reproduction.papers.workloads import Workload

if TYPE_CHECKING:
    from moesim.reproduction.records import Record

MACHINE = "a6000-xeon5220r-10c"
RATIOS = (0.25, 0.5, 0.75)

_LENGTHS: dict[str, Any] = {
    # Three quarters of Mixtral would not fit the card in 16 bits.
    "weights": "q4_k_m",
    "prompt": 128,
    "generated": 48,
    "sequences": 2,
}
_TABLE_5 = ("DALI", "Table 5", "prefetch_accuracy")
WORKLOADS = {
    "Mixtral": Workload(
        "mixtral-8x7b",
        like="mixtral-8x7b",
        recall=0.8411,
        inputs=(("DAOP", "III-3", "next_layer_prediction_accuracy"),),
        **_LENGTHS,
    ),
    "DeepSeek": Workload(
        "deepseek-v2-lite",
        like="deepseek-v2-lite",
        recall=0.726,
        inputs=(_TABLE_5,),
        **_LENGTHS,
    ),
    # No accuracy was published for it: DeepSeek's, which has as many experts.
    "Qwen2": Workload("qwen2-57b-a14b", recall=0.726, inputs=(_TABLE_5,), **_LENGTHS),
}

_BASELINE = "fixed-mapping:prefill=gpu"
"""KTransformers as HybriMoE reads it: prefill uses no CPU."""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "baseline": {"policy": _BASELINE, "cache": "static", "warm": True},
    "+scheduling": {"policy": "hybrimoe-schedule", "cache": "static", "warm": True},
    "+prefetching": {
        "policy": _BASELINE,
        "cache": "static",
        "prefetch": "impact",
        "warm": True,
    },
    "+caching": {"policy": _BASELINE, "cache": "mrs", "warm": True},
    "all": {"policy": "hybrimoe", "cache": "mrs", "warm": True},
}
"""One technique at a time, all from the same calibrated content of the cache."""
_LATENCY = {"prefill": "ttft_s", "decode": "tpot_s"}


def run(technique: str, model: str, cache_ratio: float) -> RunSpec:
    """HybriMoE's baseline with one technique, or all."""
    options = dict(TECHNIQUES[technique])
    policy = options.pop("policy")
    return RunSpec.of(
        WORKLOADS[model], policy, MACHINE, cache_ratio=cache_ratio, **options
    )


def _latency(record: Record) -> Question:
    setting = record.setting
    key = _LATENCY[setting["phase"]]
    return simulated(
        record,
        [run(setting["technique"], setting["model"], setting["cache_ratio"])],
        lambda outcomes: float(outcomes[0][key]),
        "a prompt of 128 tokens; the paper does not say which length this table has",
    )


def _speedup(record: Record) -> Question:
    setting = record.setting
    model, cache_ratio = setting["model"], setting["cache_ratio"]
    key = _LATENCY[setting["phase"]]
    system = run(setting["technique"], model, cache_ratio)
    baseline = run("baseline", model, cache_ratio)
    return ratio(record, [(system, baseline)], lambda ours, base: base[key] / ours[key])


def _average_speedup(record: Record) -> Question:
    key = _LATENCY[record.setting["phase"]]
    pairs = [
        (run("all", model, cache_ratio), run("baseline", model, cache_ratio))
        for model in WORKLOADS
        for cache_ratio in RATIOS
    ]
    return ratio(
        record,
        pairs,
        lambda ours, base: base[key] / ours[key],
        "three models, three cache ratios, prompts of 128 tokens",
    )


_MODELS = {name: workload.model for name, workload in WORKLOADS.items()}
_SETTINGS = input_("machines, ratios and lengths of our runs")

ANSWERS: Answers = {
    ("Table III", "latency"): _latency,
    ("Table III", "speedup"): _speedup,
    ("VI-B", "speedup_vs_kTransformers_avg"): _average_speedup,
    ("setup", "prefill_lengths"): _SETTINGS,
    ("setup", "cache_ratios"): _SETTINGS,
    ("setup", "platform"): _SETTINGS,
    ("Table II", "model_config.layers"): shape_answer("moe_layers", _MODELS),
    ("Table II", "model_config.shared_experts"): shape_answer("shared", _MODELS),
    ("Table II", "model_config.routed_experts"): shape_answer("experts", _MODELS),
    ("Table II", "model_config.activated_experts"): shape_answer("top_k", _MODELS),
    ("Table II", "routed_expert_size"): unanswered(
        "two sizes in one record; ours are in moesim list models"
    ),
    ("Table II", "shared_expert_size"): unanswered(
        "two sizes in one record; ours are in moesim list models"
    ),
}
