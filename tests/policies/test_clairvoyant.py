"""The clairvoyant system: values by hand, a ceiling over policies that see the past."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.cache_driver import TimedView, named, shape, victims, work
from support.engine_pairs import machine
from support.handmade import routed, steps

from benchmarks import drawn_ceilings
from benchmarks.causal_ceilings import HALF_LIVES, SHARES, HorizonCache
from moesim.policies.base import PolicyError
from moesim.policies.cache.foresight import ForesightCache
from moesim.policies.prefetch.foresight import ForesightPrefetch
from moesim.policies.run_context import RunContext
from moesim.policies.systems import SYSTEMS
from moesim.runs.clairvoyant import DECAYS, EXACT, FAR, MARGINS, searched
from moesim.runs.config import RunConfig
from moesim.runs.replay import replay
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import open_trace

EXPERTS = 4
LAYERS = 2


IdleLink = partial(TimedView, gap_s=3.0, cpu_token_s=1.0)
"""A layer lasts 3 s beside the CPU's work, and so does a copy."""


def context_of(tokens, *, slots=1):
    """A run whose tokens use one expert in each of two layers."""
    forward = [
        [routed(layer, expert) for layer, expert in enumerate(t)] for t in tokens
    ]
    return RunContext(
        shape(LAYERS, EXPERTS),
        1,
        np.full(LAYERS, slots),
        "layer",
        future=RecordedFuture(steps(*forward)),
    )


def layer_step(step, layer, expert):
    placed = {"step": step, "layer": layer, "width": EXPERTS}
    return work(experts=[expert], cpu_s=[1.0], state=[2], **placed)


TOKENS = ((0, 1), (2, 1), (0, 3), (0, 1))


def after_token_0(cache):
    cache.start(context_of(TOKENS))
    cache.accessed(layer_step(0, 0, 0))
    return cache


def test_an_expert_is_worth_its_coming_uses_by_their_distance():
    """After token 0, at a half per token: expert 0 comes after 2 and 3 tokens, expert 2
    after 1.
    """
    cache = after_token_0(ForesightCache(decay=0.5))
    values = list(cache.score)[:EXPERTS]
    assert values == pytest.approx([0.25 + 0.125, 0, 0.5, 0])


def test_a_horizon_shows_so_many_tokens_and_frequency_beyond():
    """After token 0, expert 0 is seen after 2 tokens, but not after 3."""
    cache = after_token_0(HorizonCache(tokens=2, decay=0.5))
    of_late = sum(
        w * (1 - 0.5 ** (1 / t)) for w, t in zip(SHARES, HALF_LIVES, strict=True)
    )
    values = list(cache.score)[:EXPERTS]
    assert values == pytest.approx([0.25 + 0.25 * of_late, 0, 0.5, 0])


def test_what_is_worth_less_than_all_residents_is_turned_away():
    cache = after_token_0(ForesightCache(decay=0.5))
    assert victims(cache, [0], [2]) == [-1]
    assert victims(cache, [2], [0]) == [0]


@pytest.mark.parametrize(("margin", "keys"), [(0.1, [(1, 1), (0, 2)]), (0.2, [(1, 1)])])
def test_coming_tokens_are_copied_for_where_that_gains_more_than_the_price(
    margin, keys
):
    """After layer 0 of token 0. Layer 1 has a free place for its expert; in layer 0
    expert 2 (0.5) gains 0.125 over the resident expert 0.
    """
    prefetch = ForesightPrefetch(decay=0.5, margin=margin, tokens=1)
    prefetch.start(context_of(TOKENS))
    view = IdleLink(LAYERS, EXPERTS, resident=[(0, 0, 0)])
    assert named(prefetch, layer_step(0, 0, 0), view) == keys


def test_without_a_future_there_is_no_foresight():
    with pytest.raises(PolicyError, match="'foresight' must see the future"):
        ForesightCache().start(RunContext(shape(), 1, np.ones(1), "layer"))


# The search.


def test_the_search_goes_downhill_to_the_fastest_rules():
    """Seconds grow with the distance to one price and one discount."""
    tried = []

    def seconds_of(config):
        tried.append(config)
        own = SYSTEMS["clairvoyant"].assignment
        if "margin" not in (config.prefetch or "") or config.policy != own:
            return 100.0
        *_, decay, margin = config.prefetch.replace("margin=", "decay=").split("decay=")
        return abs(float(decay.rstrip(",")) - DECAYS[1]) + abs(
            float(margin) - MARGINS[1]
        )

    found = searched(RunConfig(policy="clairvoyant", engine="simpy"), seconds_of)

    assert found.prefetch == f"foresight:decay={DECAYS[1]},margin={MARGINS[1]}"
    assert found.engine == "simpy"
    assert all(config.engine == "auto" for config in tried)
    assert len(tried) == len(set(map(str, tried))) < len(DECAYS) * len(MARGINS)


@pytest.mark.parametrize("assignment", [EXACT, "fetch-split", "fixed-mapping"])
def test_other_assignments_are_tried_with_the_best_rules(assignment):
    """Fetch-split was 0.25 % faster in a cell of the map."""
    found = searched(
        RunConfig(policy="clairvoyant"),
        lambda config: 9.0 if config.policy == assignment else 10.0,
    )
    assert found.policy == assignment


@pytest.mark.parametrize("system", ["fiddler", "llama.cpp", "dali", "recall"])
def test_systems_are_tried_as_they_are(system):
    """With limited host memory those that keep what they have were faster."""
    found = searched(
        RunConfig(policy="clairvoyant"),
        lambda config: 9.0 if config.policy == system else 10.0,
    )
    assert (found.policy, found.cache, found.prefetch) == (system, None, None)


@pytest.mark.parametrize("system", ["daop", "dali-ktransformers", "moe-speq"])
def test_systems_that_do_other_work_are_not_tried(system):
    """Altered routing, faster kernels, drafts."""
    tried = []
    searched(
        RunConfig(policy="clairvoyant"),
        lambda config: tried.append(config.policy) or 10.0,
    )
    assert system not in tried
    assert "ktransformers" in tried


def test_systems_that_cannot_run_here_are_left_out():
    def seconds_of(config):
        if config.cache is None:
            raise PolicyError("no such column")
        return 10.0

    found = searched(RunConfig(policy="clairvoyant"), seconds_of)
    assert found.cache is not None


def test_what_stays_on_a_gpu_may_be_chosen_by_the_uses_that_come():
    """Whoever never replaces lives by what it begins with."""

    def seconds_of(config):
        return (9.0 if config.policy == "fiddler" else 10.0) - (config.warm is not None)

    found = searched(RunConfig(trace="t.parquet", policy="clairvoyant"), seconds_of)
    assert (found.policy, found.warm) == ("fiddler", "t.parquet")


def test_a_part_of_the_users_own_is_not_searched(make_trace):
    trace = make_trace(sequences=((4, 6),))
    parts = replay(trace, "clairvoyant", cache="foresight:decay=0.4").config["policies"]
    assert parts["cache"]["decay"] == 0.4


SLOW = {
    "hw": machine(name="rtx3080ti", numbers={"costs.h2d.bytes_per_s": 11.9e9}),
    "cache_ratio": 0.03,
}
LIMITED = {"hw": "rtx4060ti", "cache_ratio": 0.3, "host_memory_bytes": 5 << 30}


@pytest.mark.parametrize(
    ("cell", "rivals"),
    [
        (SLOW, ("fixed-mapping+decayed-frequency", "all-cpu", "recall")),
        (LIMITED, ("ktransformers", "fiddler", "hybrimoe-schedule+static")),
    ],
    ids=["copies slow the CPU", "limited host memory"],
)
def test_where_it_was_beaten_no_causal_policy_beats_the_ceiling(cell, rivals):
    """By 7 % where a slow link takes the CPU's memory, by 2.4 times where what a GPU
    keeps need not be in host memory.
    """
    cell = cell | {"trace": "gpt-oss-20b-like", "steps": 40, "keep": False}
    ceiling_s = replay(policy="clairvoyant", **cell).metrics["makespan_s"]
    for policy in rivals:
        assert ceiling_s <= replay(policy=policy, **cell).metrics["makespan_s"], policy


@pytest.mark.parametrize("number", [2, 11, 13])
def test_no_causal_policy_beats_the_ceiling_on_drawn_machines(tmp_path, number):
    """`benchmarks.drawn_ceilings` tries 400 cells; neither is any below its bound."""
    drawn = drawn_ceilings.workloads(None)[0]
    line = drawn_ceilings.cell(number, 0, [open_trace(drawn.draw(tmp_path))])
    words, holds = drawn_ceilings.verdict([line])
    assert holds, words


DRAFTED = {"hw": "rtx4060ti", "cache_ratio": 0.1, "draft_tokens": 4, "keep": False}


def test_the_search_tries_what_drafts_want():
    cell = DRAFTED | {"trace": "gpt-oss-20b-like", "steps": 24}
    taken = replay(policy=EXACT, cache=FAR, prefetch="clairvoyant", **cell)
    ceiling_s = replay(policy="clairvoyant", **cell).metrics["makespan_s"]
    assert ceiling_s <= taken.metrics["makespan_s"]
