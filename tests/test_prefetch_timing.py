"""Prefetches by hand: delayed hits, late ones, the byte budget, and what they may never evict."""

from __future__ import annotations

import numpy as np
import pytest

from policies.base import ExpertKey, PolicyError, PrefetchPolicy
from policies.systems import System
from tests.handmade import HandCosts, plan_of, registered, routed, run, shape, spans, steps


class Scripted(PrefetchPolicy):
    """Prefetch the experts written down for each layer."""

    def __init__(self, *, keep: bool = True, script: str = "1") -> None:
        self.keep_late = keep
        self.script = [int(e) for e in script.split("/")]

    def prefetch(self, work, view):
        return [ExpertKey(work.layer + 1, e) for e in self.script] if work.layer + 1 < view.layers else []


class Far(PrefetchPolicy):
    """Layer 2 from layer 0."""

    def prefetch(self, work, view):
        return [ExpertKey(2, 0), ExpertKey(2, 1)] if work.layer == 0 else []


@pytest.fixture(autouse=True, scope="module")
def policies_of_this_module():
    with registered(prefetch_scripted=Scripted, prefetch_far=Far):
        yield


def ahead(spec="scripted", cache="lru"):
    return System("on-demand", cache=cache, prefetch=spec)


def test_delayed_hit_waits_only_for_the_remainder():
    """Layer 0: demand copy 2-6, then the prefetch of (1,1) 6-10, compute to 7; layer 1 plans at 9: 1 s is left."""
    planner = plan_of(shape(layers=2), ahead(), slots=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert spans(timeline, "prefetch") == [("h2d0", 1, 6, 10)]
    assert spans(timeline, "compute") == [("gpu0", 0, 6, 7), ("gpu0", 1, 10, 11)]
    assert timeline.access_frame()["state"].tolist() == ["miss", "delayed"]


def test_a_prefetch_that_came_in_time_is_a_hit():
    planner = plan_of(shape(layers=2), ahead(), HandCosts(dense=8.0), slots=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert timeline.access_frame()["state"].tolist() == ["miss", "hit"]


def test_a_late_prefetch_is_dropped_when_the_policy_says_so():
    """Two prefetches, one running (6-10) when layer 1 comes at 9: the other has not started and is dropped."""
    planner = plan_of(shape(layers=2), ahead("scripted:keep=false,script=1/2"), slots=3)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 3)]))
    assert spans(timeline, "prefetch") == [("h2d0", 1, 6, 10)]
    assert spans(timeline, "fetch")[-1] == ("h2d0", 3, 10, 14)
    assert planner.gpu[0].memory.free_bytes(1) == 100  # experts 1 and 3 of three slots


def test_a_late_prefetch_that_is_kept_goes_before_younger_demand():
    planner = plan_of(shape(layers=2), ahead("scripted:script=1/2"), slots=3)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 2, 3)]))
    assert spans(timeline, "prefetch") == [("h2d0", 1, 6, 10), ("h2d0", 2, 10, 14)]
    assert spans(timeline, "fetch")[-1] == ("h2d0", 3, 14, 18)


def test_demand_goes_before_prefetches_that_have_not_started():
    """A prefetch two layers ahead waits behind the next layer's demand."""
    planner = plan_of(shape(layers=3), ahead("far"), slots=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 0), routed(2, 0)]))
    copies = timeline.frame()
    copies = copies[copies["lane"] == "h2d0"]
    assert list(zip(copies["kind"], copies["layer"], copies["expert"], strict=True)) == [
        ("fetch", 0, 0), ("prefetch", 2, 0), ("fetch", 1, 0), ("prefetch", 2, 1),
    ]  # fmt: skip


def test_the_byte_budget_trims_what_is_wanted_least():
    planner = plan_of(shape(layers=2), ahead("scripted:script=1/2/3"), slots=4, budget=250)
    plan = planner.plan(routed(0, 0), 0, 1, 0.0)
    assert [c.experts for c in plan.copies] == [[0], [1], [2]]


def test_a_prefetch_never_evicts_what_the_same_prediction_wants():
    """Layer 1 holds {1, 2}; predicted {2, 1, 3}: 3 finds no victim in the cache and goes to staging."""
    planner = plan_of(shape(layers=2), ahead("scripted:script=2/1/3"), slots=2, staging=2)
    for step, experts in enumerate(([1], [2])):
        planner.complete(planner.plan(routed(1, *experts), step, 1, 0.0), 0.0)
        planner.landed(0, 1, experts[0])
    planner.plan(routed(0, 0), 2, 1, 0.0)
    assert planner.resident(1).tolist() == [False, True, True, False]
    assert planner.gpu[0].memory.staged[1].tolist() == [False, False, False, True]


def test_declined_prefetches_wait_in_staging_but_one_slot_stays_for_demand():
    planner = plan_of(shape(layers=2), ahead("scripted:script=1/2/3", cache="none"), slots=0, staging=3)
    plan = planner.plan(routed(0, 0), 0, 1, 0.0)
    assert [c.experts for c in plan.copies] == [[0], [1], [2]]
    assert plan.staging_slots == [1]


def test_staged_prefetches_are_forgotten_after_their_layer():
    planner = plan_of(shape(layers=2), ahead("scripted:script=1", cache="none"), slots=0, staging=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 2)], [routed(0, 0), routed(1, 1)]))
    assert timeline.access_frame()["state"].tolist() == ["miss", "miss", "miss", "delayed"]
    assert not planner.gpu[0].memory.staged.any()
    assert not planner.gpu[0].memory.holds.any()


def test_a_prefetch_of_an_expert_that_does_not_exist_is_the_policys_error():
    planner = plan_of(shape(layers=2), ahead("scripted:script=9"), slots=1)
    with pytest.raises(PolicyError, match="scripted"):
        planner.plan(routed(0, 0), 0, 1, 0.0)


def test_a_prefetch_from_ssd_reads_first():
    planner = plan_of(shape(layers=2), ahead(), HandCosts(dense=30.0), slots=2, host_slots=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert spans(timeline, "read") == [("ssd", 0, 30, 38), ("ssd", 1, 38, 46)]
    assert spans(timeline, "prefetch") == [("h2d0", 1, 46, 50)]
    assert np.array_equal(timeline.access_frame()["state"], ["miss", "hit"])
