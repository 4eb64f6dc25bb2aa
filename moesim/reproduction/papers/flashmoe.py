"""FlashMoE's speeds, loads and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.hwprofiles import paths
from moesim.hwprofiles.profile import load_profile
from moesim.reproduction.papers.question import (
    Answers,
    Question,
    anchored,
    computed,
    input_,
    largest_over,
    ratio,
    simulated,
    unanswered,
)
from moesim.reproduction.papers.runs import RunSpec, speed
from moesim.reproduction.papers.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.reproduction.papers.runs import Outcome
    from moesim.reproduction.records import Record

MACHINE = "flashmoe-rtx5070ti"
RATIO = 0.25
"""Not stated by the paper."""
_LENGTHS: dict[str, Any] = {
    "weights": "bf16",
    "prompt": 64,
    "generated": 64,
    "sequences": 2,
}
WORKLOADS = {
    "OLMoE-1B-7B": Workload("olmoe-1b-7b", like="olmoe-1b-7b", **_LENGTHS),
    "Qwen3-30B-A3B": Workload("qwen3-30b-a3b", like="qwen3-30b-a3b", **_LENGTHS),
}
# DAOP reads the next gate's predictions; their accuracy is Mixtral's, as none is known.
PREDICTED = Workload(
    "olmoe-1b-7b",
    like="olmoe-1b-7b",
    recall=0.8411,
    inputs=(("DAOP", "III-3", "next_layer_prediction_accuracy"),),
    **_LENGTHS,
)
EXISTING = ("llama.cpp", "fiddler", "daop")
_HIDDEN = 128
_HOST_BYTES = 1 << 30
"""Host memory for experts: next to nothing, so that they come from the SSD."""


def run(
    workload: Workload, policy: str, *, from_ssd: bool = True, **options: Any
) -> RunSpec:
    """A system with a quarter of the experts on the GPU, the rest on the SSD."""
    return RunSpec.of(
        workload,
        policy,
        MACHINE,
        cache_ratio=RATIO,
        host_memory_bytes=_HOST_BYTES if from_ssd else None,
        **options,
    )


def _learned(workload: Workload) -> RunSpec:
    return run(workload, "flashmoe", learned=True)


def _throughput_gain(record: Record) -> Question:
    workload = WORKLOADS[record.setting["model"]]
    pair = (_learned(workload), run(workload, "on-demand", cache="lru"))
    return ratio(
        record,
        [pair],
        lambda system, other: 100.0 * (speed(system) / speed(other) - 1.0),
        "a network trained on 8 other drawn sequences; 25 % of the experts cached",
    )


def _over_existing(record: Record) -> Question:
    return largest_over(
        record,
        _learned(WORKLOADS["OLMoE-1B-7B"]),
        [run(PREDICTED, policy, warm=policy != "llama.cpp") for policy in EXISTING],
        speed,
        f"largest over {', '.join(EXISTING)} with experts on the SSD, OLMoE",
    )


def _load_share(record: Record) -> Question:
    runs = [_learned(workload) for workload in WORKLOADS.values()]

    def share(outcome: Outcome) -> float:
        decode = outcome["decode"]
        return 100.0 * float(decode["ssd"] / decode["total"])

    return simulated(
        record,
        runs,
        lambda outcomes: min(map(share, outcomes)),
        "busy time of the SSD over decode time, least of both models",
    )


def _load_s(workload: Workload, *, experts: bool) -> float:
    """Seconds to read a model's weights from the SSD."""
    shape = workload.shape
    read_bytes = shape.other_bytes
    if experts:
        read_bytes += shape.routed_bytes
    rate = load_profile(MACHINE).number(paths.link("ssd").bytes_per_s)
    return read_bytes / rate


_LOADED = WORKLOADS["OLMoE-1B-7B"]


def _load_speedup(record: Record) -> Question:
    return computed(
        record,
        _load_s(_LOADED, experts=True) / _load_s(_LOADED, experts=False),
        "bytes read at the SSD's rate, OLMoE; starting programs is not counted, and all"
        " baselines read the same bytes",
    )


def _load_and_prefill(record: Record) -> Question:
    policies = ["llama.cpp"]
    if record.setting["baseline"] != "llama.cpp":
        policies = ["fiddler", "daop"]
    system = _learned(_LOADED)
    # Once loaded, the baselines have all experts in host memory.
    others = [
        run(PREDICTED, policy, from_ssd=False, warm=policy != "llama.cpp")
        for policy in policies
    ]

    def figure(outcomes: Sequence[Outcome]) -> float:
        own_ttft, *ttfts = (float(outcome["ttft_s"]) for outcome in outcomes)
        own_s = _load_s(_LOADED, experts=False) + own_ttft
        other_s = _load_s(_LOADED, experts=True) + sum(ttfts) / len(ttfts)
        return other_s / own_s

    return Question(
        record,
        "simulated",
        (system, *others),
        figure,
        "bytes read at the SSD's rate, then the prefill of 64 tokens, OLMoE",
        sides=((system,), tuple(others)),
    )


def _network_size(record: Record) -> Question:
    # Two inputs for each of 64 experts, two hidden layers, weights and biases.
    experts = _LOADED.shape.experts
    hidden = _HIDDEN
    weights = 2 * experts * hidden + hidden * hidden + hidden * experts
    biases = 2 * hidden + experts
    return computed(
        record,
        4.0 * (weights + biases) / 1024,
        f"network of table 1 with {hidden} hidden units, {experts} experts",
    )


_TABLE_1 = input_("the recipe of our network (docs/how-to/learned-cache.md)")
_OFFLINE = unanswered("recording and training on the paper's machine are not simulated")

ANSWERS: Answers = {
    ("text", "token_throughput_gain_over_LRU"): _throughput_gain,
    ("text", "speedup_vs_existing_max"): _over_existing,
    ("text", "initial_load_speedup"): _load_speedup,
    ("text", "load_plus_prefill_speedup"): _load_and_prefill,
    ("text", "expert_load_share_of_decode_min"): _load_share,
    ("text", "ffn_model_size_per_layer"): _network_size,
    ("text", "ffn_policy_time"): anchored("the policy charges it as scoring_s"),
    ("text", "expert_ssd_load_time"): anchored("flashmoe-rtx5070ti is anchored on it"),
    ("text", "ssd_read_bandwidth"): anchored("flashmoe-rtx5070ti is anchored on it"),
    ("text", "training_pipeline_time"): _OFFLINE,
    ("text", "trace_extraction_time_max"): _OFFLINE,
    ("text", "train_samples"): _TABLE_1,
    ("text", "epochs_max"): _TABLE_1,
    **{
        ("Table 1", f"ffn.{name}"): _TABLE_1
        for name in (
            "loss",
            "optimizer",
            "lr",
            "lr_decay",
            "layers",
            "hidden",
            "activation",
        )
    },
}
