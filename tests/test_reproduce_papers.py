"""The papers' tables: nothing that is compared feeds an input, figures follow from their
runs, orders are read off the records.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesim import cli
from moesim.hwprofiles import profile as profiles
from moesim.reproduction import papers
from moesim.reproduction.experiments import EXPERIMENTS
from moesim.reproduction.papers import dali, daop, orders, reproduce_all
from moesim.reproduction.papers import report as pages
from moesim.reproduction.papers.explanations import PARTS, better_run, explain
from moesim.reproduction.papers.question import (
    ANCHORED,
    COMPUTED,
    SIMULATED,
    Question,
    computed,
    ratio,
    simulated,
)
from moesim.reproduction.papers.reproduce_all import PAPERS, Answered, questions
from moesim.reproduction.papers.runs import UNANCHORED, RunSpec
from moesim.reproduction.papers.workloads import Workload
from moesim.reproduction.records import Record, records

PROFILES = sorted(profiles._DATA.glob("*.toml"))
SOURCES = sorted(Path(papers.__file__).parent.glob("*.py"))
SEED_PAPERS = re.compile(r"\b(DALI|HybriMoE|DAOP|SMoE|FlashMoE)\b")
ANCHOR = re.compile(r"Anchor: ([^|]+) \| ([^|]+) \| (\w+)(?: \| (\w+)=(\w+))?")
SINGLE_OPERATIONS = {
    "moe_time",
    "expert_migration_cpu_to_gpu",
    "block_exec_cpu",
    "block_exec_gpu",
    "expert_io_transition",
    "cpu_over_load_time_ratio",
    "expert_ssd_load_time",
    "ssd_read_bandwidth",
    # What a machine is made of.
    "platform",
    "config",
}
NO_FIGURE = ("16 of the EPYC", "without seconds", "Not stated", "not stated", "prints")
"""Words of sources that name a paper and take no published figure from it."""


def _numbers(tables, path=""):
    for key, entry in tables.items():
        if not isinstance(entry, dict):
            continue
        if "source" in entry:
            yield f"{path}{key}", entry
        else:
            yield from _numbers(entry, f"{path}{key}.")


def _sources():
    for file in PROFILES:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
        for path, entry in _numbers(raw):
            yield f"{file.stem}: {path}", entry


def _anchored_records():
    """Records that profiles name as anchors."""
    for where, entry in _sources():
        for source, ref, metric, key, value in ANCHOR.findall(entry["source"]):
            found = [
                record
                for record in records()
                if record.key == (source, ref, metric)
                and (not key or str(record.setting.get(key)) == value)
            ]
            yield where, (source, ref, metric), found


def _compared():
    return [q for q in questions() if q.status in {SIMULATED, COMPUTED}]


# Nothing that is compared feeds an input.


def test_a_profile_that_takes_a_papers_figure_names_the_record():
    for where, entry in _sources():
        text = entry["source"]
        takes = SEED_PAPERS.search(text) and not any(word in text for word in NO_FIGURE)
        if takes and entry["kind"] == "published":
            assert ANCHOR.search(text), f"{where}: {text}"


def test_anchors_exist_and_are_single_operations():
    named = list(_anchored_records())
    assert len(named) > 10
    for where, key, found in named:
        assert found, f"{where}: no record {key}"
        assert key[2] in SINGLE_OPERATIONS, where


def test_no_record_that_feeds_a_profile_is_compared():
    compared = {id(question.record) for question in _compared()}
    for where, key, found in _anchored_records():
        for record in found:
            assert id(record) not in compared, f"{where}: {key} is compared"


def test_no_record_that_feeds_a_workload_is_compared():
    compared = {question.record.key for question in _compared()}
    for question in questions():
        for run in question.runs:
            for key in run.workload.inputs:
                assert key not in compared, key


def test_accuracies_of_drawn_predictions_are_those_of_their_declared_records():
    """Recalls that no paper states are the ones listed here, and the papers' files say
    that they are assumed.
    """
    assumed = {0.881}
    workloads = {run.workload for question in questions() for run in question.runs}
    for load in workloads:
        stated = {
            round(record.value / 100, 4)
            for record in records()
            if record.key in load.inputs
        }
        for accuracy in (load.recall, load.residual):
            assert accuracy is None or accuracy in stated | assumed, load


def test_no_figure_that_is_compared_stands_in_the_code_or_in_a_profile():
    """A published speed of three digits or more is not a constant of ours."""
    figures = {
        question.record.value
        for question in _compared()
        if question.status == SIMULATED
        and isinstance(question.record.value, float)
        and len(f"{question.record.value:g}".replace(".", "").strip("0")) >= 3
    }
    assert 14.37 in figures
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                assert node.value not in figures, f"{file.name}:{node.lineno}"
    for where, entry in _sources():
        assert entry.get("value") not in figures, where


def test_a_compared_anchor_would_be_noticed(monkeypatch):
    """The tests above fail if DALI's optimal times were compared."""
    answers = dali.ANSWERS | {("Table 4", "moe_time"): dali._moe_time}
    monkeypatch.setitem(PAPERS, "DALI", answers)
    with pytest.raises(AssertionError, match=r"moe_time.* is compared"):
        test_no_record_that_feeds_a_profile_is_compared()


def test_experiments_on_routing_alone_count_no_anchors():
    """Predictions with published accuracies would prove themselves."""
    anchored = reproduce_all.anchors()
    for experiment in EXPERIMENTS.values():
        if set(experiment.published) & anchored:
            note = pages.anchor_note(experiment)
            assert "not counted" in note


# Every record has its place.


def test_every_record_is_answered_or_said_why_not():
    of_experiments = {
        key for experiment in EXPERIMENTS.values() for key in experiment.published
    }
    for record in records():
        known = (record.ref, record.metric) in PAPERS[record.source]
        assert known or record.key in of_experiments, record


def test_as_many_records_as_the_summary_says():
    """Speeds, times, speedups, shares, energy and memory; sizes of models are apart."""
    asked = questions()
    sizes = [q for q in asked if q.record.metric.startswith("model_config")]
    beside = [q for q in asked if q.figure is not None or q.status == ANCHORED]
    beside = [q for q in beside if q not in sizes]
    of_experiments = {
        key for experiment in EXPERIMENTS.values() for key in experiment.published
    }
    new = [q for q in beside if q.record.key not in of_experiments]
    assert len(new) >= 135
    assert len(sizes) >= 35


@pytest.mark.parametrize("question", questions(), ids=lambda q: q.record.metric)
def test_questions_without_answer_say_why(question):
    assert question.figure is not None or question.note


# What the figures are.

RECORD = Record("DAOP", "V-B", "speedup_avg", {"method": "a"}, 2.0, "x")
LOAD = Workload("olmoe-1b-7b", "q4_k_m", 4, 6, 2, like="olmoe-1b-7b")


def _spec(policy):
    return RunSpec.of(LOAD, policy, "dali-rtx3090", cache_ratio=0.5, batch=2)


def test_a_ratio_is_the_mean_over_its_pairs():
    """(4 / 2 + 9 / 3) / 2 = 2.5."""
    pairs = [(_spec("greedy"), _spec("all-cpu"))] * 2
    question = ratio(RECORD, pairs, lambda own, other: own["x"] / other["x"])
    assert question.figure([{"x": 4}, {"x": 2}, {"x": 9}, {"x": 3}]) == 2.5
    assert question.sides == (
        (_spec("greedy"), _spec("greedy")),
        (_spec("all-cpu"), _spec("all-cpu")),
    )


def test_parts_of_a_step_are_those_of_its_phase(tmp_path):
    """Two sequences of 4 + 6 tokens: one prefill, and six decode steps that last as
    long as TPOT says.
    """
    outcome = _spec("greedy").do(tmp_path)
    decode = outcome["decode"]
    assert outcome["prefill"]["steps"] == 1
    assert decode["steps"] == 6
    assert outcome["prefill"]["total"] == pytest.approx(outcome["ttft_s"])
    assert decode["total"] / 6 == pytest.approx(outcome["tpot_s"])
    for part in ("cpu", "gpu", "link", "dense", "planning"):
        assert 0 <= decode[part] <= decode["total"]


def test_the_anchored_machine_gives_the_times_it_was_anchored_on(tmp_path):
    """DALI's table 4, Mixtral at batch 16, least time: 22.6 s, fitted within 6 %."""
    load = replace(dali.WORKLOADS["Mixtral"], recall=None, residual=None, sequences=16)
    spec = RunSpec(load, "exact", dali.MACHINE, (("batch", 16),), modelled=True)
    assert spec.do(tmp_path)["modelled_s"] == pytest.approx(22.6, rel=0.06)


def test_workloads_are_drawn_alike_and_once(tmp_path):
    first = LOAD.draw(tmp_path)
    written = first.read_bytes()
    assert LOAD.draw(tmp_path) == first
    # A second draw from nothing has the same bytes.
    other = tmp_path / "other"
    other.mkdir()
    assert LOAD.draw(other).read_bytes() == written
    assert LOAD.calibration().draw(tmp_path) != first
    assert "like olmoe-1b-7b" in LOAD.words


def test_daop_runs_on_a_datasheet_machine_when_asked():
    run = daop.run("DAOP", "Mixtral-8x7B")
    assert run.unanchored().machine == UNANCHORED["daop-a6000"]
    assert set(UNANCHORED) | set(UNANCHORED.values()) <= set(profiles.list_profiles())


# What they say about orders.


def _answered(value, ours, *, metric="decode_speed", **setting):
    record = Record("DAOP", "V-B", metric, setting, value)
    return Answered(simulated(record, [], lambda _outcomes: ours), ours)


def test_two_systems_of_one_setting_are_ordered():
    """Published a > b > c; ours b > a > c: of three pairs, two hold."""
    answered = [
        _answered(3.0, 5.0, method="a", batch_size=8),
        _answered(2.0, 6.0, method="b", batch_size=8),
        _answered(1.0, 4.0, method="c", batch_size=8),
        # Another setting is not compared with these.
        _answered(9.0, 1.0, method="a", batch_size=16),
    ]
    found = orders.orders(answered)
    held = [(each.records[0].record.setting["method"], each.holds) for each in found]
    assert sorted(held) == [("a", False), ("a", True), ("b", True)]


def test_a_tie_holds_nothing():
    answered = [_answered(2.0, 5.0, method="a"), _answered(1.0, 4.99, method="b")]
    (order,) = orders.orders(answered)
    assert not order.holds


def test_parameters_of_one_system_are_counted_apart():
    answered = [
        _answered(2.0, 5.0, method="DALI", w_size=2, u_size=8),
        _answered(1.0, 4.0, method="DALI", w_size=4, u_size=8),
    ]
    (order,) = orders.orders(answered)
    assert order.holds
    assert not order.of_systems


def test_a_speedup_is_a_direction_and_its_baseline_is_none():
    metric = "speedup"
    up = _answered(1.5, 1.2, metric=metric, technique="x")
    down = _answered(1.5, 0.9, metric=metric, technique="x")
    baseline = _answered(1.0, 1.0, metric=metric, technique="x")
    assert [each.holds for each in orders.directions([up, down, baseline])] == [
        True,
        False,
    ]


def test_an_order_of_speedups_is_explained_by_the_baselines():
    """The system is the same in both; a larger speedup is over the slower baseline."""
    own = _spec("greedy")
    baselines = {"slow": _spec("all-cpu"), "fast": _spec("on-demand")}
    answered = []
    for published, ours, name in ((4.0, 2.0, "slow"), (2.0, 3.0, "fast")):
        setting = {"baseline": name}
        record = Record("DALI", "abstract", "speedup_avg", setting, published)
        question = ratio(record, [(own, baselines[name])], lambda _own, _other: 1.0)
        answered.append(Answered(question, ours))
    (order,) = orders.orders(answered)
    assert not order.holds
    assert better_run(order) == baselines["fast"]


def test_the_best_baseline_is_the_other_side_of_what_was_compared_with_it():
    """Of a baseline of 3 s a step and one of 2 s, the second: 5 s against 2 s."""
    system, slow, fast = map(_spec, ("greedy", "all-cpu", "on-demand"))
    parts = dict.fromkeys(PARTS, 0.0)
    outcomes = {
        run: {"decode": {**parts, "steps": 2, "total": 2 * step_s}}
        for run, step_s in ((system, 5.0), (slow, 3.0), (fast, 2.0))
    }
    metric = "tpot_reduction_vs_best_baseline"
    record = Record("SMoE", "6.2", metric, {}, 34.0)
    sides = ((system,), (slow, fast))
    question = Question(record, SIMULATED, figure=lambda _: -150.0, sides=sides)
    (direction,) = orders.directions([Answered(question, -150.0)])
    explanation = explain(direction, outcomes, {})
    assert [side.step_s for side in explanation.sides] == [5.0, 2.0]


def test_anchored_records_count_nowhere():
    record = Record("DAOP", "V-B", "speedup", {"technique": "x"}, 1.5)
    one = Answered(Question(record, ANCHORED, figure=lambda _outcomes: 1.5), 1.5)
    assert not one.compared
    assert not orders.directions([one])
    counts = pages.summary([one])
    assert counts["anchored"] == 1
    assert counts["simulated"] == counts["computed"] == 0


# The command.


@pytest.fixture
def moesim():
    return lambda *words: CliRunner().invoke(cli.app, ["reproduce", *map(str, words)])


@pytest.fixture
def small(monkeypatch):
    """A paper of two records: one run against another, and one size."""

    def speedup(record):
        pairs = [(_spec("all-cpu"), _spec("greedy"))]
        return ratio(
            record,
            pairs,
            lambda own, other: other["makespan_s"] / own["makespan_s"],
        )

    answers = {
        ("abstract", "speedup_vs_offloading"): speedup,
        ("Fig1", "activated_param_share"): lambda record: computed(record, 27.0),
    }
    monkeypatch.setitem(PAPERS, "DAOP", answers)


def test_everything_becomes_one_page(moesim, small, tmp_path):
    """All-CPU is no faster than greedy, so the published direction does not hold, and
    the page says why.
    """
    done = moesim("--all", "--out", tmp_path, "--paper", "DAOP", "--jobs", 1)
    assert done.exit_code == 0, done.output
    assert "0 of 1" in done.stdout
    page = (tmp_path / "reproduction.md").read_text()
    for words in (
        "## Summary",
        "DIRECTION DIFFERS",
        "## Where ours disagrees",
        "against",
        "like olmoe-1b-7b",
    ):
        assert words in page
    saved = json.loads((tmp_path / "reproduction.json").read_text())
    assert [entry["ours"] is not None for entry in saved["records"]] == [True, True]
    assert saved["summary"]["all"]["directions_held"] == 0
    assert "<table" in (tmp_path / "reproduction.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--all"], "expected --out DIR"),
        (["--all", "--out", "x", "--machines", "mine"], "anchored or datasheet"),
        (["--all", "--out", "x", "--paper", "DALLI"], "expected one of DALI"),
    ],
)
def test_what_is_missing_is_said_in_one_line(moesim, words, message):
    done = moesim(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
