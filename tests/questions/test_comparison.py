"""Policies beside each other: who is fastest and why, which expert was where, and a
page that shows it.
"""

import json
import re

import numpy as np
import pytest
from support.command_line import refused
from support.small_trace import LARGE, write_small_trace

import moesim
from moesim.base.options import PICTURES, ConfigError
from moesim.policies.base import PolicyError
from moesim.questions.ranked import ranked_answer
from moesim.questions.timeline import step_drawn
from moesim.traces.timeline.metrics import summarise

POLICIES = ("all-cpu", "on-demand", "greedy", "on-demand+belady")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "small.parquet"
    return write_small_trace(path, shape=LARGE)


@pytest.fixture(scope="module")
def compared(trace):
    return moesim.compare(trace, POLICIES, hw="rtx4060ti", slots_per_layer=3)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A trace without any optional column, as engines write them."""
    path = tmp_path_factory.mktemp("bare") / "bare.parquet"
    shape = "layers=2,experts=8,top_k=2,expert_bytes=1MiB"
    return moesim.synth(path, tokens=8, shape=shape).path


# The table and what it comes to.


def test_the_busiest_lane_is_the_one_that_worked_most(compared):
    table, runs = compared
    for row in table.to_dict("records"):
        figures = summarise(runs[row["policy"]].timeline)
        busy_s = figures["busy_s"]
        assert busy_s[row["busiest"]] == max(busy_s.values())
        assert row["busiest_share"] == busy_s[row["busiest"]] / figures["makespan_s"]
    assert table.set_index("policy")["busiest"]["all-cpu"] == "cpu"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_bound_is_that_of_the_fastest_and_not_of_an_oracle(command, trace, options):
    """Belady's run is the shorter one, and is compared with no bound of its own."""
    words = ("compare", trace, "--policy", "on-demand+belady,on-demand", "--steps", 9)
    code, out, _ = command(*words, "--slots-per-layer", 3, *options)
    assert code == 0
    alone = ("replay", trace, "--policy", "on-demand", "--steps", 9)
    _, expected, _ = command(*alone, "--slots-per-layer", 3, *options)
    if options:
        assert json.loads(out)["bound"] == json.loads(expected)["bound"]
        assert json.loads(out)["fastest"][0]["policy"] == "on-demand"
    else:
        (line,) = [line for line in out.splitlines() if line.startswith("bound: ")]
        assert line.startswith("bound: on-demand is at ")
        assert line.replace("on-demand is ", "") in expected


def test_other_answers_are_said(trace):
    found = moesim.compare(
        trace, ["on-demand+lru", "all-cpu"], routing="expert-cache-router:alpha=0.9"
    )
    assert "on-demand+lru, all-cpu: changes the routing" in found.answer().text()


def test_a_part_is_said_once(trace):
    """``greedy+lfu`` and --cache lfu agree; with --cache lru nobody could tell which
    was meant.
    """
    _, runs = moesim.compare(trace, ["greedy+lfu"], cache="lfu", steps=3)
    assert runs["greedy+lfu"].config["cache"] == "lfu"
    with pytest.raises(PolicyError, match="cache said once"):
        moesim.compare(trace, ["greedy+lfu"], cache="lru", steps=3)


# Which expert where.


def test_placement_counts_every_access_once(compared):
    """Summed over experts it gives the run's own figures; single cells by a plain count
    of the log.
    """
    _, runs = compared
    for run in runs.values():
        placed = run.placement()
        log = run.timeline.access_frame()
        assert placed["uses"].sum() == run.metrics["accesses"]
        assert placed["tokens"].sum() == log["tokens"].sum()
        assert (placed["uses"] * placed["resident"]).sum() == pytest.approx(
            run.metrics["hits"]
        )
        one = placed.loc[placed["uses"].idxmax()]
        mine = log[(log["layer"] == one["layer"]) & (log["expert"] == one["expert"])]
        assert one["uses"] == len(mine)
        assert one["on_gpu"] == np.mean(mine["lane"] == "gpu0")
    assert runs["all-cpu"].placement()["on_gpu"].max() == 0
    assert runs["on-demand"].placement()["on_gpu"].min() == 1


# Pictures and the page.


def test_the_page_warns_where_there_is_something_to_warn_of(compared, tmp_path):
    """A heading stands above each warning, once, and above nothing else."""
    pages = []
    for warnings in ([], ["beware", "of it"]):
        frame = compared.frame.assign(warnings=json.dumps(warnings))
        answer = ranked_answer(frame, compared.runs)
        pages.append(answer.write(tmp_path / "c.html").read_text())
    quiet, loud = pages
    assert "What to know" not in quiet
    assert (
        loud.count("What to know")
        == loud.count(">beware</p>")
        == loud.count(">of it</p>")
        == 1
    )


def test_the_page_is_the_same_every_time(compared, tmp_path, monkeypatch):
    """Where the environment states the date, as for reproducible builds."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first, second = (
        compared.answer().write(tmp_path / name).read_bytes()
        for name in ("a.html", "b.html")
    )
    assert first == second


@pytest.mark.parametrize("suffix", PICTURES)
def test_pictures_are_what_their_names_say(compared, tmp_path, suffix):
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    figure = compared.answer().figure()
    pictures = [figure.save(tmp_path / f"{name}{suffix}").read_bytes() for name in "ab"]
    assert pictures[0].startswith(start)
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize("name", ["c.jpg", "c", "c.png.txt"])
def test_other_pictures_are_refused(compared, tmp_path, name):
    """They were PNG under another name."""
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        compared.answer().figure().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_step_shows_each_lane_that_worked_in_it(compared):
    run = compared.runs["greedy"]
    spans = run.timeline.frame()
    mine = spans[(spans["step"] == 7) & (spans["layer"] >= 0) & (spans["layer"] < 2)]
    shown = step_drawn(run, 7, layers=2).rows
    assert set(shown["lane"]) == set(mine["lane"])
    assert len(shown["start"]) == len(mine)
    experts = {str(expert) for expert in mine["expert"] if expert >= 0}
    assert {label for label in shown["label"] if label} <= experts
    with pytest.raises(PolicyError, match="99999"):
        moesim.answer(run).plot("step", step=99999)


def with_times(compared, seconds):
    """The rows of three policies that see the past only, with other times per token."""
    rows = compared.frame[~compared.frame["oracle"]].iloc[:3].copy()
    rows["tpot_s"] = seconds
    tokens = rows["batch_decode_tokens"]
    rows["batch_decode_s"] = [
        [each * count for count in of_batch]
        for each, of_batch in zip(seconds, tokens, strict=True)
    ]
    rows.attrs["axes"] = ["policy"]
    return rows


def test_a_tie_says_of_each_what_is_its_own(compared):
    """One's tokens per second were said of both."""
    near = with_times(compared, [1.0, 1.005, 1.2])
    near["decode_tokens_per_s"] = [58.6, 66.9, 1.0]
    first, second, _ = near["policy"]
    expected = f"a tie per token: {first} 58.6 tokens/s, {second} 66.9 tokens/s"
    assert ranked_answer(near).sentences[0] == expected


def test_a_lead_inside_the_interval_of_a_profile_is_a_tie(compared):
    """Ten per cent apart, where the machine is known to a quarter."""
    rows = with_times(compared, [1.0, 1.1, 1.2])

    def is_tie(error):
        answer = ranked_answer(rows.assign(prediction_error=error))
        return answer.sentences[0].startswith("a tie per token")

    assert is_tie(0.25)
    assert not is_tie(0.01)
    assert not is_tie(np.nan)


# How systems begin.


def test_where_all_fits_systems_begun_alike_are_within_two_per_cent(trace):
    """Twenty passes: begun empty, one that copies everything first seems far behind."""
    policies = ["fiddler", "on-demand", "greedy", "mixtral-offloading"]
    machine = {"hw": "rtx4060ti", "cache_ratio": 1.0, "steps": 20}
    alike = moesim.compare(trace, policies, warm=trace, **machine)
    assert alike.table["begins"].unique().tolist() == ["all experts"]
    assert alike.table["behind"].max() < 0.02
    apart = moesim.compare(trace, policies, **machine)
    assert len(apart.table["begins"].unique()) > 1
    late = apart.table.loc[apart.table["filling_share"] > 0.1, "candidate"]
    assert len(late)
    assert f"{', '.join(late)}: much was copied" in apart.answer().text()
    assert "much was copied" not in ranked_answer(alike.frame).text()


# The command.


def test_out_holds_the_tables_of_every_run(command, trace, tmp_path):
    policies = "all-cpu,greedy+lfu:variant=perfect,tie=fifo"
    code, printed, _ = command(
        "compare", trace, "--policy", policies, "--out", tmp_path
    )
    assert code == 0
    assert (tmp_path / "all-cpu" / "timeline.parquet").is_file()
    assert (tmp_path / "greedy+lfu_variant=perfect,tie=fifo" / "run.json").is_file()
    assert "greedy+lfu:variant=perfect,tie=fifo" in printed


def test_one_timeline_holds_every_run(command, trace, tmp_path):
    line = f"compare {trace} --policy all-cpu,greedy --steps 3"
    assert command(*line.split(), "--perfetto", tmp_path / "p.json")[0] == 0
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "all-cpu",
        "greedy",
    }


def test_without_out_nothing_is_written(command, trace, tmp_path):
    assert command("compare", trace, "--policy", "all-cpu")[0] == 0
    assert list((tmp_path / "cwd").iterdir()) == []


def test_systems_are_those_that_the_trace_can_serve(command, trace):
    """Without predictions in the trace DALI and DAOP are left out and say why;
    llama.cpp needs none.
    """
    code, out, err = command("compare", trace, "--policy", "systems", "--steps", 2)
    assert code == 0
    assert re.search(r"left out .*\bdali\b.*: .* lacks .*pred1_res", err)
    assert "\nllama.cpp " in out
    assert "\ndali " not in out


def test_systems_that_the_trace_cannot_serve_are_left_out_in_one_line(command, bare):
    code, out, err = command(
        "compare", bare, "--policy", "smoe,hybrimoe,greedy,all-cpu", "--steps", 4
    )
    assert code == 0
    assert "greedy" in out
    (line,) = [line for line in err.splitlines() if "left out" in line]
    assert line.startswith("note: left out smoe, hybrimoe: ")
    assert "lacks pred1_raw" in line
    assert "`moesim trace predict` adds synthetic ones" in line


def test_where_nothing_is_left_the_way_out_is_named(command, bare):
    assert refused(
        command("compare", bare, "--policy", "smoe"), "pred1_raw", "trace predict"
    )
