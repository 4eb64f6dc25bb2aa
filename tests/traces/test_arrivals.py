"""Requests that arrive while others run: waiting by queueing theory, batches by hand."""

import numpy as np
import pytest
from support.command_line import refused
from support.small_trace import write_trace

import moesim
from moesim.base.errors import TraceError
from moesim.policies.base import PolicyError
from moesim.runs.config import RunConfig
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.rows import bytes_per_s, carry_out
from moesim.traces.format.arrivals import (
    Idle,
    RequestSteps,
    arrival_times,
    parse_slo,
    request_figures,
)
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase


def file_of(folder, times_s):
    file = folder / "arrivals.txt"
    file.write_text("\n".join(map(str, times_s)))
    return str(file)


# By hand.


def test_who_waits_joins_at_the_end_of_a_step(tmp_path, tiny_shape):
    """Steps of one second, room for two. Request 0 comes at 0 s and makes two tokens, 1
    comes at 0.5 s, 2 at 0.6 s and must wait until 0 leaves; 3 comes at 20 s.

    0 s prefill of 0; 1 s prefill of 1; 2 s both make a token; 3 s both, and leave; 4 s
    prefill of 2; 5 s and 6 s its tokens; idle until 20 s.
    """
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((3, 2),) * 4)
    now_s = 0.0
    source = RequestSteps(
        open_trace(path),
        iter([0.0, 0.5, 0.6, 20.0]),
        batch=2,
        columns=(),
        clock=lambda: now_s,
    )
    log = []
    for step in source.steps():
        if isinstance(step, Idle):
            log.append((now_s, "idle", step.until_s))
            now_s = step.until_s
            continue
        log.append((now_s, step.phase.label, step.tokens))
        now_s += 1.0
    assert log == [
        (0.0, "prefill", 3),
        (1.0, "prefill", 3),
        (2.0, "decode", 2),
        (3.0, "decode", 2),
        (4.0, "prefill", 3),
        (5.0, "decode", 1),
        (6.0, "decode", 1),
        (7.0, "idle", 20.0),
        (20.0, "prefill", 3),
        (21.0, "decode", 1),
        (22.0, "decode", 1),
    ]
    requests = source.requests
    assert [each.ttft_s for each in requests] == pytest.approx([1.0, 1.5, 4.4, 1.0])
    assert [each.tpot_s for each in requests] == pytest.approx([1.5, 1.0, 1.0, 1.0])

    figures = request_figures(requests, {"ttft": 1.5, "tpot": 1.2}, makespan_s=23.0)
    assert figures["requests"] == 4
    assert figures["ttft_p50_s"] == pytest.approx(1.25)
    assert figures["slo_attainment"] == 0.5
    assert figures["goodput_per_s"] == 2 / 23


def test_a_decode_step_holds_the_token_of_each_request(tmp_path, tiny_shape):
    """Each at its own place: the rows are those of the trace."""
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((2, 3), (2, 3)))
    trace = open_trace(path)
    first, second = trace.sequences()
    now_s = 0.0
    source = RequestSteps(
        trace, iter([0.0, 1.5]), batch=2, columns=(), clock=lambda: now_s
    )
    steps = []
    for step in source.steps():
        steps.append(step)
        now_s += 1.0
    # Prefill, a token of the first, prefill of the second, then both together.
    both = steps[3]
    assert both.phase == Phase.DECODE
    assert both.tokens == 2
    layers = tiny_shape.layers
    for layer, routed in enumerate(both.layers):
        rows = [
            first.experts[(2 + 1) * layers + layer],
            second.experts[(2 + 0) * layers + layer],
        ]
        # Within a layer step tokens stand in the order of their sequences.
        np.testing.assert_array_equal(routed.routing, rows)


# Against runs without arrivals, and theory.


def test_requests_that_never_meet_run_as_without_arrivals(tmp_path, tiny_shape):
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 6),) * 3)
    plain = moesim.replay(path, "on-demand").metrics
    alone = moesim.replay(
        path, "on-demand", arrivals=file_of(tmp_path, [0, 100, 200]), batch=3
    ).metrics
    assert alone["ttft_s"] == pytest.approx(plain["ttft_s"])
    assert alone["tpot_s"] == pytest.approx(plain["tpot_s"])
    assert alone["hits"] == plain["hits"]
    assert alone["requests"]["requests"] == 3
    assert plain["requests"] is None


def test_requests_that_come_together_are_a_batch(tmp_path, tiny_shape):
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 6),) * 3)
    batch = moesim.replay(path, "greedy", batch=3).metrics
    together = moesim.replay(
        path, "greedy", arrivals=file_of(tmp_path, [0, 0, 0]), batch=3
    ).metrics
    for name in ("makespan_s", "hits", "misses", "busy_s", "bytes"):
        assert together[name] == batch[name]


def test_a_row_is_a_sample_of_batches_or_one_of_requests(tmp_path, tiny_shape):
    """Batches are independent of each other, requests wait for one another."""
    trace = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 6),) * 3)
    arrivals = file_of(tmp_path, [0, 0, 0])
    configs = [RunConfig.of(trace, "greedy", arrivals=a) for a in (None, arrivals)]
    batches, requests = (
        carry_out(point, lambda _: None) for point in planned(configs).points
    )
    steps = moesim.replay(configs[0]).timeline.step_frame().groupby("batch")
    lengths_s = steps["end_s"].max() - steps["start_s"].min()
    assert batches["batch_makespan_s"] == pytest.approx(lengths_s.tolist())
    assert batches["batch_decode_tokens"] == [6] * 3
    gaps_s = sum(batches["batch_decode_s"]) / 18
    assert gaps_s == pytest.approx(batches["tpot_s"])

    sample = [requests[f"batch_{name}"] for name in ("decode_s", "decode_tokens")]
    assert sample == [[requests["tpot_s"]], [1]]
    assert requests["batch_makespan_s"] == [requests["makespan_s"]]
    busy = {"h2d0": 2.0, "h2d1": 4.0, "ssd": 1.0}
    moved = {"bytes": {"h2d0": 6, "h2d1": 0, "ssd": 5}, "busy_s": busy}
    assert bytes_per_s(moved, "h2d") == 3


def test_time_without_requests_belongs_to_no_phase(tmp_path, tiny_shape):
    """Two equal requests an hour apart: their speeds are those of one alone."""
    trace = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 6),) * 2)
    alone = moesim.replay(trace, "all-cpu", steps=7).metrics
    arrivals = file_of(tmp_path, [10.0, 3600.0])
    apart = moesim.replay(trace, "all-cpu", arrivals=arrivals).metrics
    assert apart["batches"] == 2
    for name in (
        "ttft_s",
        "tpot_s",
        "prefill_tokens_per_s",
        "prefill_tokens_per_s_seq",
        "decode_tokens_per_s",
        "decode_tokens_per_s_seq",
    ):
        assert apart[name] == pytest.approx(alone[name], rel=1e-6), name
    assert apart["decode_tokens_per_s_seq"] == pytest.approx(1 / apart["tpot_s"])


def test_steps_cut_between_micro_batches(tmp_path, tiny_shape):
    """Two steps are two steps, and half a prompt has no first token."""
    trace = write_trace(tmp_path / "t.parquet", tiny_shape, ((40, 6),))
    for arrivals in (None, file_of(tmp_path, [0.0])):
        options = {"micro_batch": 4, "arrivals": arrivals}
        whole = moesim.replay(trace, "all-cpu", **options).metrics
        prompt = moesim.replay(trace, "all-cpu", steps=10, **options).metrics
        cut = moesim.replay(trace, "all-cpu", steps=2, **options).metrics
        assert cut["steps"] == 2
        assert cut["prefill_tokens"] == 8
        assert cut["ttft_s"] is None
        assert cut["prefill_tokens_per_s"] == pytest.approx(
            8 / cut["makespan_s"], rel=1e-6
        )
        if arrivals is None:
            assert prompt["ttft_s"] == whole["ttft_s"]


def test_requests_that_were_not_served_do_not_count(tmp_path, tiny_shape):
    """Cut in the middle of the second of two: its times are not known yet, and it is
    within no limit.
    """
    trace = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 6), (4, 60)))
    options = {"batch": 2, "arrivals": file_of(tmp_path, [0.0, 0.0])}
    cut = moesim.replay(trace, "all-cpu", steps=9, slo="ttft=9", **options).metrics
    assert cut["requests"]["requests"] == 1
    assert cut["requests"]["goodput_per_s"] == 1 / cut["makespan_s"]


def test_waiting_is_that_of_a_queue_with_one_server(tmp_path, tiny_shape):
    """Poisson arrivals, one request at a time, equal service: M/D/1.

    Half of the time busy, a request waits ρ S / 2 (1 - ρ) = S / 2 on average.
    """
    count = 600
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((1, 1),) * count)
    plain = moesim.replay(path, "all-cpu", keep=False).metrics
    service_s = plain["makespan_s"] / count
    waits = []
    for seed in range(3):
        served = moesim.replay(
            path,
            "all-cpu",
            arrivals=f"poisson:{0.5 / service_s}",
            seed=seed,
            keep=False,
        ).metrics
        waits.append(served["ttft_s"] - plain["ttft_s"])
    assert np.mean(waits) == pytest.approx(service_s / 2, rel=0.2)


# Words and refusals.


def test_arrivals_are_an_axis(command, tmp_path, tiny_shape):
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 6),) * 4)
    frame = moesim.sweep(
        path, "greedy", arrivals=["poisson:1", "poisson:100"], batch=2, jobs=1
    )
    assert frame["requests"].tolist() == [4, 4]
    assert frame["ttft_p99_s"].iloc[1] > frame["ttft_p99_s"].iloc[0]
    words = ("--arrivals", "poisson:100", "--slo", "ttft=0.5,tpot=0.1")
    code, out, _ = command("replay", path, "--batch", 2, *words)
    assert code == 0
    assert "4 served" in out
    assert "such requests/s" in out


@pytest.mark.parametrize(
    "text",
    ["poisson:0", "poisson:-1", "poisson:nan", "poisson:x", "nothing.txt", "poisson"],
)
def test_what_are_no_arrivals_is_said(text):
    with pytest.raises(TraceError, match="expected poisson:RATE"):
        arrival_times(text, 0)


@pytest.mark.parametrize("text", ["ttft", "ttft=0", "tbt=1", "ttft=nan"])
def test_what_are_no_limits_is_said(text):
    with pytest.raises(TraceError, match="expected a limit in seconds of each"):
        parse_slo(text)


def test_nobody_knows_the_future_of_arrivals(command, tmp_path, tiny_shape):
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 6),))
    with pytest.raises(PolicyError, match="sees the future"):
        moesim.replay(path, "greedy", cache="belady", arrivals="poisson:1")
    unsorted = file_of(tmp_path, [1, 0])
    assert refused(command("replay", path, "--arrivals", unsorted), "ascending")
