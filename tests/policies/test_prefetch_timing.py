"""Prefetches by hand: delayed hits, late ones, the byte budget, and what they may never
evict.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.handmade import (
    HandCosts,
    plan_of,
    plan_step,
    registered,
    routed,
    run,
    shape,
    spans,
    states_of,
    steps,
)

from moesim.policies.base import Late, PrefetchPolicy
from moesim.policies.names import ABSENT, IN_FLIGHT, RESIDENT
from moesim.policies.systems import System


class Naming(PrefetchPolicy):
    """Names keys (layer, expert)."""

    def prefetch(self, work, view, named):
        keys = self.keys(work, view)
        for n, (layer, expert) in enumerate(keys):
            named[n] = layer * view.experts + expert
        return len(keys)


class Scripted(Naming):
    """Prefetch the experts written down for each layer."""

    def __init__(self, *, late: Late = "keep", script: str = "1") -> None:
        self.late = late
        self.script = [int(e) for e in script.split("/")]

    def keys(self, work, view):
        last = work.layer + 1 == view.layers
        return [] if last else [(work.layer + 1, e) for e in self.script]


class Far(Naming):
    """Layer 2 from layer 0."""

    def keys(self, work, view):
        return [(2, 0), (2, 1)] if work.layer == 0 else []


@pytest.fixture(autouse=True, scope="module")
def policies_of_this_module():
    with registered(prefetch_scripted=Scripted, prefetch_far=Far, prefetch_anew=Anew):
        yield


def ahead(spec="scripted", cache="lru"):
    return System("on-demand", cache=cache, prefetch=spec)


def test_section_1_5_e_a_delayed_hit_waits_only_for_the_remainder():
    """Layer 0: demand copy 2-6, then the prefetch of (1,1) 6-10, compute to 7; layer 1
    plans at 9: 1 s is left.
    """
    planner = plan_of(shape(layers=2), ahead(), slots=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert spans(timeline, "prefetch") == [("h2d0", 1, 6, 10)]
    assert spans(timeline, "compute") == [("gpu0", 0, 6, 7), ("gpu0", 1, 10, 11)]
    assert timeline.access_frame()["state"].tolist() == ["miss", "delayed"]


def test_section_1_5_c_what_a_layer_turns_out_to_need_becomes_a_demand():
    """Kept when late: (1,2) is active, so it goes first, as a fetch; (1,1), which has
    started, ends; (1,4) is not, so it stays in the queue, behind the fetches.
    """
    planner = plan_of(
        shape(layers=2, experts=5), ahead("scripted:script=1/4/2"), slots=4
    )
    passes = steps([routed(0, 0), routed(1, 2, 3)], [routed(0, 0)])
    _, timeline = run(planner, passes)
    assert spans(timeline, "prefetch")[:2] == [("h2d0", 1, 6, 10), ("h2d0", 4, 18, 22)]
    assert spans(timeline, "fetch") == [
        ("h2d0", 0, 2, 6),
        ("h2d0", 2, 10, 14),
        ("h2d0", 3, 14, 18),
    ]
    assert timeline.access_frame()["state"].tolist() == ["miss", "miss", "miss", "hit"]


class Anew(Naming):
    """Layer 0 wants (3, 0), (3, 1) and (2, 0); layer 1 thinks again and wants (2, 1)
    before (3, 1).
    """

    def __init__(self, *, requeue: bool = True) -> None:
        self.requeue = requeue

    def keys(self, work, view):
        script = {0: [(3, 0), (3, 1), (2, 0)], 1: [(2, 1), (3, 1)]}
        return script.get(work.layer, [])


@pytest.mark.parametrize(
    ("requeue", "prefetched"), [(True, [(3, 0), (2, 1)]), (False, [(3, 0), (3, 1)])]
)
def test_a_queue_that_is_sorted_anew_starts_with_what_the_nearer_layer_wants(
    requeue, prefetched
):
    """(3, 0) has started when layer 1 comes, and stays; what had not is taken back, and
    (2, 0) is named no more.

    Nor is (3, 1) when layer 2 comes: what is not named again is out. Dense 2 and
    compute 1 a layer: layer 0 copies 2-6 and computes to 7, layer 1 plans at 9 and
    copies behind (3, 0), 10-14. A queue that is not sorted anew goes on with (3, 1),
    14-18, and both copies for layer 2, whose gate speaks at 17, come too late.
    """
    planner = plan_of(
        shape(layers=4), ahead(f"anew:requeue={str(requeue).lower()}"), slots=4
    )
    _, timeline = run(
        planner, steps([routed(0, 0), routed(1, 0), routed(2, 3), routed(3, 3)])
    )
    moved = timeline.frame().query("kind == 'prefetch'")
    assert list(zip(moved["layer"], moved["expert"], strict=True)) == prefetched
    used = 4 * 4 - sum(planner.gpu[0].free_bytes) // 100
    assert used == 4 + len(prefetched)


def test_demand_goes_before_prefetches_that_have_not_started():
    """A prefetch two layers ahead waits behind the next layer's demand."""
    planner = plan_of(shape(layers=3), ahead("far"), slots=2)
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 0), routed(2, 0)]))
    copies = timeline.frame()
    copies = copies[copies["lane"] == "h2d0"]
    assert list(
        zip(copies["kind"], copies["layer"], copies["expert"], strict=True)
    ) == [("fetch", 0, 0), ("prefetch", 2, 0), ("fetch", 1, 0), ("prefetch", 2, 1)]


def test_the_byte_budget_trims_what_is_wanted_least():
    planner = plan_of(
        shape(layers=2), ahead("scripted:script=1/2/3"), slots=4, budget=250
    )
    copies = plan_step(planner, routed(0, 0)).copies
    assert [key % 4 for key in copies.key[: copies.count]] == [0, 1, 2]


def seen(layers, *keys):
    """A calibration that saw these (layer, expert) and nothing else."""
    counts = np.zeros((layers, 4))
    for key in keys:
        counts[key] = 1
    return counts


def test_a_prefetch_never_evicts_what_the_same_prediction_wants():
    """Layer 1 holds {1, 2}; predicted {2, 1, 3}: 3 finds no victim in the cache and
    goes to staging.
    """
    planner = plan_of(
        shape(layers=2),
        ahead("scripted:script=2/1/3"),
        slots=2,
        staging=2,
        calibration=seen(2, (0, 0), (0, 1), (1, 1), (1, 2)),
    )
    run(planner, steps([routed(0, 0)]))
    assert states_of(planner)[1].tolist() == [ABSENT, RESIDENT, RESIDENT, IN_FLIGHT]
    assert list(planner.gpu[0].staged[4:8]) == [0, 0, 0, 1]


def test_declined_prefetches_wait_in_staging_but_one_slot_stays_for_demand():
    """Three slots: the demand fetch 20-24 has one until 25, the prefetch of 1 the second
    from 24 on; the last stays free, and when 2 could start at 28 the demand's slot is
    free again. Then prefetches have two of three, so 3 is dropped. Layer 1 wants
    neither 1 nor 2: both are forgotten, and its own prefetches find staging free.
    """
    planner = plan_of(
        shape(layers=3),
        ahead("scripted:script=1/2/3", cache="none"),
        HandCosts(dense=20.0),
        slots=0,
        staging=3,
    )
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 0)]))
    assert spans(timeline, "prefetch") == [("h2d0", 1, 24, 28), ("h2d0", 2, 28, 32)]
    assert not any(planner.gpu[0].staged[4:8])
    assert states_of(planner)[2].tolist() == [ABSENT, IN_FLIGHT, ABSENT, ABSENT]


def test_a_prefetch_from_ssd_reads_first():
    planner = plan_of(
        shape(layers=2), ahead(), HandCosts(dense=30.0), slots=2, host_slots=2
    )
    _, timeline = run(planner, steps([routed(0, 0), routed(1, 1)]))
    assert spans(timeline, "read") == [("ssd", 0, 30, 38), ("ssd", 1, 38, 46)]
    assert spans(timeline, "prefetch") == [("h2d0", 1, 46, 50)]
    assert np.array_equal(timeline.access_frame()["state"], ["miss", "hit"])
