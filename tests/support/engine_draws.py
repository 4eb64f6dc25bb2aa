"""Drawn machines, models, traces and policies that both engines must answer alike, to
the last bit: for tests, and for `benchmarks.engine_equality`, which counts them.
"""

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.cache_driver import untrained
from support.engine_pairs import assert_equal, both, machine
from support.strategies import traces, worker_tables

from moesim.policies.systems import SYSTEMS
from moesim.traces.format.reader import open_trace

ASSIGNMENTS = (
    "all-cpu", "on-demand", "greedy", "greedy:staging=1",
    "static-threshold", "static-threshold:rule=sum", "static-threshold:tokens=2",
    "fixed-mapping", "fixed-mapping:wait=true,prefill=gpu", "fixed-mapping:defer=1",
    "fixed-mapping:defer=2,wait=true",
    "layer-wise", "layer-wise:side=first", "layer-wise:upload_tokens=2",
    "layer-wise:upload_tokens=1,counted=expert", "mixtral-offloading",
    "fiddler", "fiddler:issue=parallel",
    "hybrimoe-schedule", "hybrimoe-schedule:reading=r1,stealing=false",
    "smoe-balancer", "smoe-balancer:form=guarded,prefill=balance",
    "fetch-split", "fetch-split:fraction=0.4", "fetch-split:table=0/0/1/2",
    "daop", "daop:first_layer=1,before_first=serial,prefill=cheapest",
    "daop:first_layer=1,ahead=predicted", "beam:width=2",
    "moe-lightning", "moe-lightning:undivided=true,tokens=2", "ik-break-even",
    "hybrimoe-released", "exact",
)  # fmt: skip
CACHES = (
    "none", "static", "static:fill=random", "lru",
    "lfu", "lfu:variant=perfect,decay=0.9,tie=lru", "lfu:tie=fifo", "fifo", "lifo",
    "lfru", "lfru:variant=in-cache", "decayed-frequency:half_life=2,margin=0.1",
    "recall", "foresight", "recall:margin=0,history=2,recall=1",
    "clock", "clock:rounds=2", "sieve",
    "s3-fifo", "s3-fifo:small=0.4,uses=1", "s3-fifo:variant=libcachesim,ghosts=0.3",
    "slru", "slru:segments=4,entry=free", "arc", "arc:ratio=real,fill=lowest",
    "finemoe",
    "workload-window:window=2,swaps=2",
    "workload-window:window=3,trigger=literal,gain=gain-only",
    "workload-window:window=1,prefill=false,deadline=none,fill=lowest",
    "belady", "belady:must_admit=true", "belady-cost", "belady-size",
    "prefill-swap", "prefill-swap:variant=released,margin=0.5",
    "prefill-swap:share=1,idle=true,margin=1", "flashmoe", "flashmoe:scoring_s=0.05",
    "score-window:window=2",
    "mrs", "mrs:fill=lowest,copies=missed", "mrs:first_row=true,tie=touched",
    "edgemoe", "edgemoe:variant=perfect,decay=0.9",
    "moe-infinity", "moe-infinity:topology=released,visits=perfect",
    "moe-infinity:reset=false", "least-stale-layer", "least-stale-pass", "lecar",
    "pinned-lru", "pinned-lru:share=0.3,preload=false",
    "random",
)  # fmt: skip
PREFETCHES = (
    "none",
    "next-gate", "next-gate:depth=3,refill=true,tie=score",
    "next-gate:depth=2,late=keep,requeue=true",
    "residual:size=2", "residual:refill=true,tie=score", "first-missing",
    "statistical", "statistical:refill=true,size=2",
    "impact", "impact:depth=1,size=2,requeue=false", "impact:depth=2,discount=0.5",
    "recall", "foresight", "recall:least=0.1,trust=0,depth=2,advance=0,history=2",
    "clairvoyant", "clairvoyant:depth=3", "pre-gated",
    "partial-hidden", "partial-hidden:merge=sum,size=2,prefill=predicted",
    "whole-layer", "whole-layer:phase=prefill", "statistical:preceding=2", "fate",
    "finemoe:distance=1", "finemoe:distance=2,capacity=3",
    "activation-matrix",
    "activation-matrix:mask=prefix,capacity=2,size=3,requeue=false",
    "hybrimoe-released", "moe-lightning", "noisy-oracle:depth=2,late=keep", "random",
    "sp-moe", "sp-moe:cutoff=2,accuracy=0.5", "moe-speq",
)  # fmt: skip
ROUTINGS = (
    "as-recorded",
    "expert-cache-router",
    "expert-cache-router:alpha=0.6,batch_aware=false,inflight_ok=true,phase=both",
    "expert-cache-router:reading=literal,phase=both",
    "graceful-degradation:first_layer=0",
    "graceful-degradation:first_layer=1,choice=gate",
    "cache-prior",
    "cache-prior:strength=0.6,top_j=0,scale=token",
    "adaptive-gating:budget=0.05",
)
COLUMNS = ("scores", "weights", "pred1_raw", "pred2_raw", "pred3_raw", "pred1_res")
HOST_RATIOS = (0.0, 0.1, 0.3, 0.6, 0.9)
HOST_CACHES = ("lru", "lfu", "fifo", "none", "static", "lfru:variant=in-cache")

machines = st.sampled_from([1, 1, 2]).flatmap(
    lambda gpus: st.builds(
        machine,
        gpus=st.just(gpus),
        workers=st.one_of(st.none(), worker_tables(gpus)),
        # Where links and reads are slow, copies wait for many layer steps.
        numbers=st.sampled_from(
            [
                None,
                None,
                {"costs.h2d.bytes_per_s": 4e8},
                {"costs.h2d.bytes_per_s": 1e9, "costs.ssd.bytes_per_s": 2e10},
                {"costs.ssd.bytes_per_s": 2e8},
                {"costs.dispatch.split_s": 3e-4},
            ]
        ),
        shared=st.sampled_from(
            [
                (),
                (),
                ("gpu", "h2d", "d2h"),
                ("control", "cpu"),
                ("control", "gpu", "h2d", "d2h"),
                ("control", "cpu", "gpu", "h2d", "d2h"),
            ]
        ),
        slowdown=st.sampled_from(
            [
                None,
                None,
                {("cpu", "ssd"): 1.1, ("h2d", "ssd"): 1.06, ("cpu", "h2d"): 1.8},
                {("cpu", "gpu"): 1.14, ("gpu", "cpu"): 1.09, ("gpu", "ssd"): 1.13},
                {("cpu", "h2d"): 1.3, ("h2d", "cpu"): 1.2, ("gpu", "cpu"): 1.1},
                {("gpu", "h2d"): 2.0, ("h2d", "gpu"): 1.7},
            ]
        ),
    )
)
memories = {
    "cache_ratio": st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]),
    "staging": st.integers(1, 3),
    "batch": st.integers(1, 3),
    "gpu_split": st.sampled_from(["layers", "experts"]),
    "draft_tokens": st.sampled_from([0, 0, 1, 3]),
    "acceptance": st.sampled_from([0.4, 1.0]),
    "micro_batch": st.sampled_from([None, None, 2]),
    "prefetch_budget_bytes": st.sampled_from([None, None, 2 << 20]),
}
composed = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(ASSIGNMENTS),
        "cache": st.sampled_from(CACHES),
        "prefetch": st.sampled_from(PREFETCHES),
        "routing": st.sampled_from((*ROUTINGS[:1] * len(ROUTINGS), *ROUTINGS)),
        "cache_scope": st.sampled_from(["layer", "global"]),
        **memories,
    }
)
systems = st.fixed_dictionaries({"policy": st.sampled_from(list(SYSTEMS)), **memories})
configurations = st.tuples(
    traces(max_layers=4),
    machines,
    st.one_of(composed, composed, systems),
    st.sampled_from(HOST_CACHES),
    st.sampled_from([None, *HOST_RATIOS]),
)
"""A trace, a machine, options of a run, and a host memory of some share of the experts.
"""


def compare_engines(drawn, hw, options, host_cache, host_ratio):
    """Run one drawn configuration in both engines.

    Raises:
        AssertionError: they differ.
    """
    options = options | {"hw": hw}
    if options["batch"] > 1:
        options["draft_tokens"] = 0
    if host_ratio is not None:
        every = drawn.shape.experts * drawn.shape.layers
        experts = options["staging"] + int(host_ratio * every)
        options["host_memory_bytes"] = experts * drawn.shape.max_expert_bytes
        options["host_cache"] = host_cache
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = untrained(drawn.shape.layers, drawn.shape.experts)
        save_file(network, folder / "flashmoe.safetensors")
        options["artefacts"] = folder / "flashmoe.safetensors"
        trace = open_trace(drawn.write(folder / "drawn.parquet", COLUMNS))
        assert_equal(*both(trace, options.pop("policy"), **options))


_SLOW_LINK = machine(numbers={"costs.h2d.bytes_per_s": 4e8})
_READS_FIRST = machine(
    numbers={"costs.h2d.bytes_per_s": 4e8, "costs.ssd.bytes_per_s": 4e10}
)
_AHEAD = "next-gate:depth=3,size=4"
SELDOM = (
    # Replacements that wait until their layer comes again, and longer.
    ("fixed-mapping", "workload-window:window=1,swaps=4,fill=lowest", "none", {}),
    ("greedy", "workload-window:window=2,swaps=3", "none", {"batch": 2}),
    ("fixed-mapping:prefill=gpu", "prefill-swap:share=1,margin=0.5", "none", {}),
    # Copies that give their places in host memory up for a read that is awaited.
    ("on-demand", "lru", _AHEAD, {"host": 2}),
    ("on-demand", "none", "clairvoyant:depth=3", {"host": 3}),
    ("fixed-mapping", "decayed-frequency:half_life=2,margin=0", "none", {"host": 8}),
    ("on-demand", "lru", _AHEAD, {"prefetch_budget_bytes": 2 << 20}),
    # Copies back; products ahead of their gate that are still queued.
    ("mixtral-offloading", None, "next-gate", {}),
    ("daop", None, None, {"batch": 3}),
    # Tokens with more experts than the model gives them: predictions keep its number.
    (
        "fixed-mapping",
        "none",
        "next-gate",
        {"routing": "expert-cache-router:reading=literal,phase=both"},
    ),
    # Results that join one layer later, of experts that may leave host memory.
    ("fixed-mapping:defer=1", "lru", "next-gate", {"host": 8, "batch": 2}),
)
"""Configurations for branches of the planner and of transfers that draws seldom reach.
"""


def compare_seldom(trace, policy, cache, prefetch, more):
    """Run one of `SELDOM` in both engines, on a machine whose link is slow."""
    host = more.get("host")
    options = {name: value for name, value in more.items() if name != "host"}
    if host is not None:
        size = host * trace.shape.max_expert_bytes
        options |= {"host_memory_bytes": size, "host_cache": "none"}
    assert_equal(
        *both(
            trace,
            policy,
            cache=cache,
            prefetch=prefetch,
            hw=_SLOW_LINK if host is None else _READS_FIRST,
            cache_ratio=0.3,
            staging=min(host or 2, 3),
            **options,
        )
    )
