"""The compiled engine answers what SimPy answers, to the last bit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from engine_pairs import assert_equal, both, machine
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

import moesim
from moesim.policies.base import PolicyError
from moesim.policies.cache.lru import LRU
from moesim.policies.registry import find, names
from moesim.sim.compiled import compilation
from moesim.sim.compiled.support import brings_kernels
from moesim.traces.format.reader import open_trace
from tests.handmade import hand_trace, registered

ASSIGNMENTS = (
    "all-cpu",
    "on-demand",
    "greedy",
    "greedy:staging=1",
    "static-threshold",
    "static-threshold:rule=sum",
    "static-threshold:tokens=2",
    "fixed-mapping",
    "fixed-mapping:wait=true,prefill=gpu",
    "layer-wise",
    "layer-wise:side=first",
    "fiddler",
    "fiddler:issue=parallel",
    "hybrimoe-schedule",
    "hybrimoe-schedule:reading=r1,stealing=false",
    "smoe-balancer",
    "smoe-balancer:form=guarded,prefill=balance",
    "fetch-split",
    "fetch-split:fraction=0.4",
    "fetch-split:table=0/0/1/2",
)
CACHES = (
    "none",
    "static",
    "static:fill=random",
    "lru",
    "lfu",
    "lfu:variant=perfect,decay=0.9,tie=lru",
    "lfu:tie=fifo",
    "fifo",
    "lifo",
    "lfru",
    "lfru:variant=in-cache",
    "decayed-frequency:half_life=2,margin=0.1",
    "clock",
    "clock:rounds=2",
    "sieve",
    "s3-fifo",
    "s3-fifo:small=0.4,uses=1",
    "s3-fifo:variant=libcachesim,ghosts=0.3",
    "slru",
    "slru:segments=4,entry=free",
    "arc",
    "arc:ratio=real",
    "workload-window:window=2,swaps=2",
    "workload-window:window=3,trigger=literal,gain=gain-only",
    "workload-window:window=1,prefill=false,deadline=none,fill=lowest",
    "belady",
    "belady:must_admit=true",
    "belady-cost",
    "belady-size",
)
PREFETCHES = ("none",)

machines = st.builds(
    machine,
    gpus=st.sampled_from([1, 1, 2]),
    shared=st.booleans(),
    slowdown=st.sampled_from(
        [
            None,
            {("cpu", "h2d"): 1.3, ("h2d", "cpu"): 1.2, ("gpu", "cpu"): 1.1},
            {("gpu", "h2d"): 2.0, ("h2d", "gpu"): 1.7},
        ]
    ),
)
options = st.fixed_dictionaries(
    {
        "cache": st.sampled_from(CACHES),
        "prefetch": st.sampled_from(PREFETCHES),
        "hw": machines,
        "cache_ratio": st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]),
        "cache_scope": st.sampled_from(["layer", "global"]),
        "staging": st.integers(1, 3),
        "batch": st.integers(1, 3),
        "gpu_split": st.sampled_from(["layers", "experts"]),
        "noise_seed": st.sampled_from([None, 7]),
    }
)


def check(drawn, policy, given):
    """Run one drawn configuration in both engines."""
    if len(set(drawn.shape.expert_bytes)) > 1:
        given = given | {"cache_scope": "layer"}
    with tempfile.TemporaryDirectory() as folder:
        trace = open_trace(drawn.write(Path(folder) / "drawn.parquet"))
        assert_equal(*both(trace, policy, **given))


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from(ASSIGNMENTS), options)
def test_both_engines_give_the_same_run(drawn, policy, given):
    check(drawn, policy, given)


@pytest.mark.parametrize(
    "cache",
    [
        "score-window:window=2",
        "score-window",
        "mrs",
        "mrs:alpha=0.3,p=2,tie=touched,fill=lowest",
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_caches_that_read_gate_scores(make_trace, cache, batch):
    trace = open_trace(
        make_trace(sequences=((3, 9), (2, 5), (0, 4)), columns=("scores",))
    )
    for policy in ("greedy", "on-demand"):
        assert_equal(*both(trace, policy, cache=cache, cache_ratio=0.4, batch=batch))


def test_by_hand_two_misses_share_one_link(tmp_path):
    """Two experts fetched on one link: the second copy starts when the first lands."""
    trace = hand_trace(tmp_path / "t.parquet", [[[0, 1]]], experts=4, prompt=0)
    run = moesim.replay(trace, "on-demand", cache="lru", engine="compiled")
    spans = run.timeline.frame()
    copies = spans[spans["kind"] == "fetch"]
    assert list(copies["expert"]) == [0, 1]
    assert copies["start_s"].iloc[1] == copies["end_s"].iloc[0]
    products = spans[(spans["kind"] == "compute")]
    assert products["start_s"].iloc[0] == copies["end_s"].iloc[0]


def test_auto_says_which_engine_ran_and_why(make_trace):
    trace = make_trace()
    run = moesim.replay(trace, "greedy", cache="lru")
    assert run.config["engine"] == "compiled"
    assert run.config["engine_reason"] is None
    run = moesim.replay(trace, "exact", cache="lru")
    assert run.config["engine"] == "simpy"
    assert run.config["engine_reason"] == "assignment policy 'exact': no kernels"
    assert moesim.replay(trace, "greedy", engine="simpy").config["engine"] == "simpy"


def test_what_is_not_compiled_is_refused_in_one_line(make_trace):
    with pytest.raises(PolicyError, match="--engine compiled: not possible"):
        moesim.replay(make_trace(), "exact", engine="compiled")


def test_an_answer_overridden_in_python_is_not_passed_over(make_trace):
    """A subclass that inherits kernels would otherwise be run as its parent."""

    class Moody(LRU):
        def victims(self, incoming, candidates):
            return candidates[-len(incoming) :]

    assert brings_kernels(LRU)
    assert not brings_kernels(Moody)
    with registered(cache_moody=Moody):
        run = moesim.replay(make_trace(), "greedy", cache="moody")
    assert run.config["engine"] == "simpy"


@pytest.mark.parametrize("kind", ["assignment", "cache", "prefetch"])
def test_the_page_names_the_policies_that_bring_kernels(kind):
    page = Path(__file__).parents[1] / "docs" / "reference" / "engines.md"
    row = re.search(rf"^\| {kind} \| (.*) \|$", page.read_text("utf-8"), re.MULTILINE)
    bring = [name for name in names(kind) if brings_kernels(find(name, kind))]
    assert re.findall(r"`([a-z0-9-]+)`", row[1]) == sorted(bring)


def test_every_file_of_the_loop_counts_for_what_is_on_disk():
    """Machine code on disk is used only if all files it was made of are the same."""
    folder = Path(compilation.__file__).parent
    made_of = {
        path.name
        for path in folder.glob("*.py")
        if "@part" in path.read_text("utf-8") or "@entry" in path.read_text("utf-8")
    }
    assert made_of <= {path.name for path in compilation.PARTS}


def test_results_do_not_depend_on_where_chunks_end(make_trace, monkeypatch):
    """Blocks, chunks and room for spans are cut elsewhere; rows stay the same."""
    from moesim.sim.compiled import engine
    from moesim.traces.timeline import spans

    trace = open_trace(make_trace(sequences=((4, 6), (2, 5))))
    whole, _ = both(trace, "on-demand", cache="lru")
    for module in (engine, spans):
        monkeypatch.setattr(module, "CHUNK_SPANS", 7)
        monkeypatch.setattr(module, "CHUNK_ACCESSES", 3)
    first, second = both(trace, "on-demand", cache="lru")
    assert_equal(first, second)
    rows = np.concatenate([c["end_s"] for c in second.timeline.chunks()])
    assert len(list(second.timeline.chunks())) > 1
    np.testing.assert_array_equal(rows, next(iter(whole.timeline.chunks()))["end_s"])
