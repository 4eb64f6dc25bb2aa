"""SMoE's TPOT and TTFT by setting, and its ablation."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from moesim.reproduction.papers.question import (
    Answers,
    Question,
    anchored,
    input_,
    ratio,
    unanswered,
)
from moesim.reproduction.papers.runs import RunSpec
from moesim.reproduction.papers.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.reproduction.papers.runs import Outcome
    from moesim.reproduction.records import Record

TOP_SCORE = ("SMoE", "6.2/6.3", "prefetch_accuracy_top_score")
_LENGTHS: dict[str, Any] = {
    "weights": "bf16",
    "prompt": 64,
    "generated": 48,
    "sequences": 3,
    "recall": 0.82,
    "recall_at": 1,
    "inputs": (TOP_SCORE,),
}
_GIB = 1 << 30
# A tenth of the card is left for keys, values and working memory.
_USABLE = 0.9
SETTINGS: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite's routing and sizes stand for deepseek-moe-16b, whose experts are
    # as large and as many in each of 27 layers, not 26.
    "S1": {
        "workload": Workload("deepseek-v2-lite", like="deepseek-v2-lite", **_LENGTHS),
        "machine": "rtx3080ti",
        "gpu_memory_bytes": int(12 * _GIB * _USABLE),
        "alpha": 0.35,
    },
    "S2": {
        "workload": Workload("xverse-moe-a4.2b", **_LENGTHS),
        "machine": "rtx4060ti",
        "gpu_memory_bytes": int(16 * _GIB * _USABLE),
        "alpha": 0.30,
    },
    "S3": {
        "workload": Workload("qwen2-57b-a14b", **_LENGTHS),
        "machine": "smoe-a6000",
        "gpu_memory_bytes": int(48 * _GIB * _USABLE),
        "alpha": 0.25,
    },
}
BASELINES = ("mixtral-offloading", "moe-infinity", "hybrimoe")
"""Systems that SMoE may have compared itself with; the reference names HybriMoE only.
AdapMoE needs combine weights, which are not drawn.
"""
_NOTE = f"the fastest of {', '.join(BASELINES)} stands for the best baseline"


def run(setting: str, batch: int, policy: str = "smoe", **options: Any) -> RunSpec:
    """A system in one of the paper's settings."""
    stated = SETTINGS[setting]
    if policy == "smoe":
        options["routing"] = f"expert-cache-router:alpha={stated['alpha']}"
    return RunSpec.of(
        stated["workload"],
        policy,
        stated["machine"],
        gpu_memory_bytes=stated["gpu_memory_bytes"],
        batch=batch,
        **options,
    )


def _reduction(key: str) -> Any:
    def answer(record: Record) -> Question:
        setting = record.setting
        batch = setting["batch"]
        settings = [setting["setting"]] if "setting" in setting else list(SETTINGS)
        groups = [
            [run(name, batch), *(run(name, batch, other) for other in BASELINES)]
            for name in settings
        ]
        runs = [spec for group in groups for spec in group]
        size = len(BASELINES) + 1

        def figure(outcomes: Sequence[Outcome]) -> float:
            reductions = []
            for begin in range(0, len(outcomes), size):
                system, *others = (
                    outcome[key] for outcome in outcomes[begin : begin + size]
                )
                reductions.append(100.0 * (1.0 - system / min(others)))
            return sum(reductions) / len(reductions)

        sides = (
            tuple(group[0] for group in groups),
            tuple(spec for group in groups for spec in group[1:]),
        )
        return Question(record, "simulated", tuple(runs), figure, _NOTE, sides=sides)

    return answer


_ROUTER = "expert-cache-router:alpha=0.3"
# Each step adds one part to the one before, in the order of the published ablation.
_STEPS: dict[str, dict[str, Any]] = {
    "bare": {"policy": "on-demand", "cache": "lru"},
    "+CE": {"policy": "on-demand", "cache": "score-window"},
    "+ER": {"policy": "on-demand", "cache": "score-window", "routing": _ROUTER},
    "+Pre": {
        "policy": "on-demand",
        "cache": "score-window",
        "routing": _ROUTER,
        "prefetch": "partial-hidden",
    },
    "+BA": {
        "policy": "smoe-balancer",
        "cache": "score-window",
        "routing": _ROUTER,
        "prefetch": "partial-hidden",
    },
}


def _ablation(record: Record) -> Question:
    step = record.setting["step"]
    before = next(early for early, late in pairwise(_STEPS) if late == step)

    def made(name: str, setting: str) -> RunSpec:
        options = dict(_STEPS[name])
        policy = options.pop("policy")
        return run(setting, 1, policy, staging=4, **options)

    pairs = [(made(step, name), made(before, name)) for name in SETTINGS]
    return ratio(
        record,
        pairs,
        lambda system, other: 100.0 * (system["tpot_s"] / other["tpot_s"] - 1.0),
        "over the step before, mean of the three settings at batch 1",
    )


_SETTINGS = input_("models, machines and router of our runs")

ANSWERS: Answers = {
    ("6.2/6.3", "tpot_reduction_vs_best_baseline"): _reduction("tpot_s"),
    ("6.2/6.3", "ttft_reduction_vs_best_baseline"): _reduction("ttft_s"),
    ("6.2/6.3", "ablation_tpot_delta"): _ablation,
    ("6.2/6.3", "prefetch_accuracy_top_score"): anchored(
        "predictions of the drawn traces foresee the best expert as often"
    ),
    ("6.3/Fig19", "cpu_over_load_time_ratio"): anchored("smoe-a6000 is anchored on it"),
    ("6.2", "alpha"): _SETTINGS,
    ("Table 1", "config"): _SETTINGS,
    ("Table 3", "accuracy"): unanswered(
        "answers of the real model are needed; moesim quality --routing"
        " expert-cache-router measures them for a model at hand"
    ),
}
