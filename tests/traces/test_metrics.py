"""Metrics against arithmetic done by hand."""

import re
from pathlib import Path

import numpy as np
import pytest

import moesim
from moesim.traces.timeline import spans
from moesim.traces.timeline.metrics import (
    METRICS,
    REQUEST_METRICS,
    ROW_METRICS,
    RUN_METRICS,
    Summary,
    summarise,
)

CPU = 0
GPU = 1
H2D = 2
SSD = 4
CONTROL = 5
LANES = ("cpu", "gpu0", "h2d0", "d2h0", "ssd", "control")
TWO_GPUS = ("cpu", "gpu0", "gpu1", "h2d0", "h2d1", "control")
ROOT = Path(__file__).parents[2]


def access(timeline, step, experts, states, *, layer=0, tokens=None, lanes=None):
    count = len(experts)
    tokens = [1] * count if tokens is None else tokens
    lanes = [GPU] * count if lanes is None else lanes
    columns = map(np.array, (experts, tokens, lanes, states))
    timeline.access(step, layer, *columns)


def of(figures, *names):
    return tuple(figures[name] for name in names)


def test_section_1_6_the_three_hit_rates():
    """Active {0,3,5,7} with workloads 1,6,2,4; GPU-assigned {3,7}; resident {3,5}: 2/4,
    1/2, 8/13.
    """
    timeline = spans.Timeline(LANES)
    states = [spans.MISS, spans.HIT, spans.HIT, spans.MISS]
    more = {"tokens": [1, 6, 2, 4], "lanes": [CPU, GPU, CPU, GPU]}
    access(timeline, 0, [0, 3, 5, 7], states, **more)
    figures = summarise(timeline)
    assert of(figures, "accesses", "hits", "delayed_hits", "misses") == (4, 2, 0, 2)
    rates = of(figures, "hit_rate_active", "hit_rate_gpu", "hit_rate_token")
    assert rates == (2 / 4, 1 / 2, 8 / 13)


def test_a_delayed_hit_is_no_hit():
    timeline = spans.Timeline(LANES)
    access(timeline, 0, [0, 1], [spans.DELAYED, spans.HIT])
    figures = summarise(timeline)
    assert of(figures, "hits", "delayed_hits", "hit_rate_active") == (1, 1, 0.5)


def test_section_1_6_decode_speed():
    """Two sequences make 64 tokens each in 32 s: 2 tokens/s per sequence, 4 in
    total.
    """
    timeline = spans.Timeline(LANES)
    for step in range(64):
        timeline.step(step, 1, 0, 2, 2, step / 2, (step + 1) / 2)
    figures = summarise(timeline)
    speeds = of(figures, "decode_tokens_per_s_seq", "decode_tokens_per_s")
    assert speeds == (2.0, 4.0)
    assert figures["tpot_s"] == figures["tpot_p50_s"] == figures["tpot_p95_s"] == 0.5
    speeds = of(figures, "prefill_tokens_per_s", "prefill_tokens_per_s_seq")
    assert (figures["ttft_s"], *speeds) == (None, None, None)


def test_two_batches_with_prefill():
    """Batch 0: 10 prompt tokens of two sequences in 4 s, then 2 s and 4 s; one ends
    after the first decode step. Batch 1: 8 prompt tokens of one sequence in 2 s, then 1
    s.
    """
    timeline = spans.Timeline(LANES)
    timeline.step(0, 0, 0, 10, 2, 0.0, 4.0)
    timeline.step(1, 1, 0, 2, 2, 4.0, 6.0)
    timeline.step(2, 1, 0, 1, 1, 6.0, 10.0)
    timeline.step(3, 0, 1, 8, 1, 10.0, 12.0)
    timeline.step(4, 1, 1, 1, 1, 12.0, 13.0)
    figures = summarise(timeline)
    assert figures["batches"] == 2
    assert figures["ttft_s"] == (4 + 2) / 2
    assert figures["tpot_s"] == (2 + 4 + 1) / 3
    assert figures["tpot_p50_s"] == 2.0
    # Between the second and third of 1, 2, 4.
    assert figures["tpot_p95_s"] == pytest.approx(2 + 0.9 * 2)
    assert figures["prefill_tokens_per_s"] == 18 / 6
    assert figures["prefill_tokens_per_s_seq"] == pytest.approx(
        (5 / 4 + 5 / 4 + 8 / 2) / 3
    )
    assert figures["decode_tokens_per_s"] == 4 / 7
    assert figures["decode_tokens_per_s_seq"] == pytest.approx(
        (1 / 2 + 2 / 6 + 1 / 1) / 3
    )
    assert figures["makespan_s"] == 13.0


def test_a_run_that_was_cut_in_a_prompt_does_not_know_when_it_would_have_ended():
    """From 7.25 s on, batches 1, 2 and 3. The first: 6 prompt tokens in 0.75 s, then 3
    tokens of a draft in 1.5 s. The second: 4 and 1 prompt tokens in 3 s and 1 s, then
    one in half a second. The third was cut after 6 tokens in 2 s.
    """
    timeline = spans.Timeline(LANES)
    timeline.step(0, 0, 1, 6, 1, 7.25, 8.0)
    timeline.step(1, 1, 1, 3, 1, 8.0, 9.5)
    timeline.step(2, 0, 2, 4, 1, 9.5, 12.5)
    timeline.step(3, 0, 2, 1, 1, 12.5, 13.5)
    timeline.step(4, 1, 2, 1, 1, 13.5, 14.0)
    timeline.step(5, 0, 3, 6, 1, 14.0, 16.0)
    whole, cut = (summarise(timeline, ends_in_prompt=ends) for ends in (False, True))
    assert (whole["ttft_s"], cut["ttft_s"]) == (6.75 / 3, 4.75 / 2)
    speeds = whole["prefill_tokens_per_s_seq"], cut["prefill_tokens_per_s_seq"]
    assert speeds == (pytest.approx((8 + 5 / 4 + 3) / 3), (8 + 5 / 4) / 2)
    assert of(cut, "batches", "makespan_s", "tpot_s") == (3, 8.75, 0.5)
    assert of(cut, "prefill_tokens", "decode_tokens") == (17, 4)
    assert cut["prefill_tokens_per_s"] == 17 / 6.75
    # Three tokens in 1.5 s, and one in 0.5 s.
    assert cut["decode_tokens_per_s_seq"] == 2.0


def layer_step(timeline, step=0, start_s=0.0):
    """Plan 0-1. CPU computes 1-5. Copy of expert 3 ends at 4, GPU computes resident 2
    at 1-2, then 3 at 4-6.
    """
    timeline.span(CONTROL, spans.PLAN, step, 0, -1, start_s, start_s + 1, 0)
    timeline.span(GPU, spans.COMPUTE, step, 0, 2, start_s + 1, start_s + 2, 0)
    timeline.span(H2D, spans.FETCH, step, 0, 3, start_s + 1, start_s + 4, 300)
    timeline.span(CPU, spans.COMPUTE, step, 0, 7, start_s + 1, start_s + 5, 0)
    timeline.span(GPU, spans.COMPUTE, step, 0, 3, start_s + 4, start_s + 6, 0)


def test_a_gpu_stalls_while_its_expert_is_being_copied():
    timeline = spans.Timeline(LANES)
    layer_step(timeline)
    figures = summarise(timeline)
    assert figures["stall_s"] == {"cpu": 0.0, "gpu0": 2.0}  # idle from 2 to 4
    assert of(figures["busy_s"], *LANES) == (4.0, 3.0, 3.0, 0.0, 0.0, 1.0)
    assert figures["imbalance"] == (4 - 3) / 4
    assert figures["bytes"] == {"h2d0": 300, "d2h0": 0, "ssd": 0}
    assert figures["bandwidth"] == {"h2d0": 100.0, "d2h0": None, "ssd": None}
    times = of(figures, "planning_s", "planning_share", "makespan_s")
    assert times == (1.0, 1 / 6, 6.0)


def test_waiting_for_another_lane_or_for_dispatch_is_no_stall():
    """The copy landed at 2, the GPU began at 3: only the second from 1 to 2 was spent
    waiting for the copy.
    """
    timeline = spans.Timeline(LANES)
    timeline.span(CONTROL, spans.PLAN, 0, 0, -1, 0.0, 1.0, 0)
    timeline.span(H2D, spans.PREFETCH, 0, 0, 3, 0.0, 2.0, 300)
    timeline.span(GPU, spans.COMPUTE, 0, 0, 3, 3.0, 4.0, 0)
    assert summarise(timeline)["stall_s"]["gpu0"] == 1.0


def test_a_layer_step_is_judged_by_itself():
    """Step 0 computes on the CPU alone. Step 1 has both lanes busy from 8 to 12; nothing
    was planned, so the GPU did not wait for the copy that landed at 8.
    """
    timeline = spans.Timeline(LANES)
    timeline.span(CONTROL, spans.PLAN, 0, 0, -1, 0.0, 1.0, 0)
    timeline.span(CPU, spans.COMPUTE, 0, 0, 7, 1.0, 5.0, 0)
    timeline.span(H2D, spans.FETCH, 1, 0, 3, 6.0, 8.0, 300)
    for lane, expert in ((CPU, 7), (GPU, 3)):
        timeline.span(lane, spans.COMPUTE, 1, 0, expert, 8.0, 12.0, 0)
    figures = summarise(timeline)
    assert figures["imbalance"] == (1 + 0) / 2
    assert figures["stall_s"] == {"cpu": 0.0, "gpu0": 0.0}


def test_the_cpu_stalls_on_reads():
    timeline = spans.Timeline(LANES)
    timeline.span(CONTROL, spans.PLAN, 0, 0, -1, 0.0, 1.0, 0)
    timeline.span(SSD, spans.READ, 0, 0, 3, 1.0, 3.5, 300)
    timeline.span(CPU, spans.COMPUTE, 0, 0, 3, 3.5, 4.0, 0)
    assert summarise(timeline)["stall_s"]["cpu"] == 2.5


def prefetch(timeline, step, layer, expert, start_s):
    timeline.span(H2D, spans.PREFETCH, step, layer, expert, start_s, start_s + 0.5, 10)


def test_prefetch_accuracy_by_hand():
    """Experts 1 and 6 are found on arrival, 2 under way, 3 never asked for, 4 gone when
    asked for in the next step; that it is there again later is no merit of the prefetch.
    """
    timeline = spans.Timeline(LANES)
    for expert in (1, 2, 3, 4, 6):
        prefetch(timeline, 0, 1, expert, 0.1 * expert)
    states = [spans.HIT, spans.DELAYED, spans.HIT]
    access(timeline, 0, [1, 2, 6], states, layer=1)
    access(timeline, 1, [4, 5], [spans.MISS, spans.MISS], layer=1)
    access(timeline, 2, [4], [spans.HIT], layer=1)
    figures = summarise(timeline)
    assert figures["prefetched"] == 5
    assert figures["prefetch_accuracy"] == 3 / 5
    assert figures["prefetch_coverage"] == 3 / (3 + 2)
    assert figures["prefetch_timeliness"] == 2 / 3


def test_a_prefetch_for_the_next_step_looks_past_the_miss_before_it():
    """Layer 0 missed expert 1 on the CPU, then a later layer prefetched it for the
    coming step.
    """
    timeline = spans.Timeline(LANES)
    access(timeline, 0, [1], [spans.MISS], lanes=[CPU])
    prefetch(timeline, 0, 0, 1, 5.0)
    access(timeline, 1, [1], [spans.HIT])
    assert summarise(timeline)["prefetch_accuracy"] == 1.0


def test_a_prefetch_that_had_to_be_repeated_was_useless():
    timeline = spans.Timeline(LANES)
    prefetch(timeline, 0, 1, 1, 0.0)
    timeline.span(H2D, spans.FETCH, 0, 1, 1, 1.0, 2.0, 10)
    access(timeline, 0, [1], [spans.MISS], layer=1)
    access(timeline, 1, [1], [spans.HIT], layer=1)
    assert summarise(timeline)["prefetch_accuracy"] == 0.0


def test_section_5_6_refetch_rate_counts_what_was_there_five_steps_ago():
    """Copies of expert 1 at steps 0, 5 and 11: 5 apart, then 6; of expert 2 at 11, hit
    at 12, again at 17.
    """
    timeline = spans.Timeline(LANES)
    for step, expert in ((0, 1), (5, 1), (11, 1), (11, 2), (17, 2)):
        kind = spans.REPLACE if step == 5 else spans.FETCH
        timeline.span(H2D, kind, step, 0, expert, float(step), step + 0.5, 10)
        access(timeline, step, [expert], [spans.MISS])
        if expert == 2 and step == 11:
            access(timeline, 12, [2], [spans.HIT])
    assert summarise(timeline)["refetch_rate_5"] == 2 / 5


@pytest.mark.parametrize("first", ["timeline", "accesses"])
def test_chunks_may_be_small_and_one_table_far_ahead_of_the_other(first):
    how = {"prefetch": "next-gate", "cache_ratio": 0.3, "steps": 12, "batch": 2}
    run = moesim.replay("tiny", "greedy", hw="rtx3090-epyc7532", **how).timeline
    tables = {
        "timeline": run.chunks(),
        "accesses": run.access_chunks(),
        "steps": run.step_chunks(),
    }
    summary = Summary(run.lanes)
    for table in sorted(tables, key=lambda table: table != first):
        for chunk in tables[table]:
            for at in range(0, len(chunk["step"]), 3):
                rows = slice(at, at + 3)
                summary.add(table, {name: each[rows] for name, each in chunk.items()})
    expected = summarise(run)
    assert expected["prefetched"] > 0 < expected["stall_s"]["gpu0"]
    assert summary.figures() == expected


def test_section_2_5_energy():
    """10 s makespan: platform 50 W; GPU 20 W idle, 120 W for 4 s; the SSD never works.
    900 J for 3 tokens.
    """
    timeline = spans.Timeline(LANES)
    timeline.span(GPU, spans.COMPUTE, 0, 0, 0, 0.0, 4.0, 0)
    timeline.step(0, 1, 0, 3, 3, 0.0, 10.0)
    power = {"platform": (50.0, 0.0), "gpu0": (20.0, 120.0), "ssd": (0.0, 9.0)}
    power["gpu1"] = (0.0, 7.0)
    figures = summarise(timeline, power=power)
    assert figures["energy_j"] == 50 * 10 + 20 * 10 + 100 * 4
    assert figures["tokens_per_kj"] == pytest.approx(3 / 1.1)
    assert summarise(timeline)["energy_j"] is None


def test_an_empty_run_has_no_rates():
    figures = summarise(spans.Timeline(LANES))
    assert set(figures) == set(METRICS)
    assert figures["accesses"] == figures["makespan_s"] == 0
    rates = of(figures, "hit_rate_active", "tpot_s", "refetch_rate_5")
    assert rates == (None, None, None)


def test_two_cards_do_not_fetch_for_each_other():
    """Expert 1 goes to card 0, then to card 1, where it has never been; in step 2 it is
    brought back to card 0.
    """
    timeline = spans.Timeline(TWO_GPUS)
    for step, link in ((0, "h2d0"), (1, "h2d1"), (2, "h2d0")):
        lane = TWO_GPUS.index(link)
        timeline.span(lane, spans.FETCH, step, 0, 1, float(step), step + 0.5, 10)
        access(timeline, step, [1], [spans.MISS], lanes=[1 + int(link[-1])])
    assert summarise(timeline)["refetch_rate_5"] == 1 / 3


def test_a_prefetch_to_one_card_is_not_used_by_another():
    """Card 1 hits the expert that it has; card 0 got it for nothing."""
    timeline = spans.Timeline(TWO_GPUS)
    timeline.span(TWO_GPUS.index("h2d0"), spans.PREFETCH, 0, 0, 1, 0.0, 0.5, 10)
    access(timeline, 0, [1], [spans.HIT], lanes=[2])
    assert summarise(timeline)["prefetch_accuracy"] == 0.0


def test_the_page_of_metrics_defines_every_one_once():
    """Name, unit, direction and definition."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    for table in (METRICS, RUN_METRICS, REQUEST_METRICS, ROW_METRICS):
        for name, metric in table.items():
            row = f"| `{name}` | {metric.unit} | {metric.better} | "
            assert len(re.findall(rf"(?m)^{re.escape(row)}\S.* \|$", page)) == 1, row
