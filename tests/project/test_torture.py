"""A small part of the counted attacks of `tests/torture`, and proof that their checkers
see faults.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.small_trace import write_small_trace
from torture import (
    configurations,
    mutations,
    places,
    real_runs,
    separators,
    streams,
    users,
)
from torture.audit import Record, audit
from torture.report import Report
from torture.subjects import Subject, subjects

import moesim
from moesim.traces.format.reader import open_trace

ROOT = Path(__file__).parents[2]
MUTANTS = 10


@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.name)
def test_mutated_files_are_read_or_refused_in_one_line(subject):
    report = Report("mutants")
    mutations.attack(subject, MUTANTS, "tests", report)
    assert report.failures == []
    assert report.tried == MUTANTS


def _broken_reader(path):
    data = json.loads(path.read_bytes())
    return data["value"] / len(data)


def test_the_judge_of_mutants_sees_tracebacks_and_silent_changes():
    """A reader without any check is found out on both counts."""

    def make(folder, seed):
        (folder / "a.json").write_text(json.dumps({"value": 1 + seed}))
        return folder / "a.json"

    report = Report("mutants")
    sealed = Subject("unchecked", make, _broken_reader, is_sealed=True)
    mutations.attack(sealed, 100, "tests", report)
    assert any("TypeError" in text or "KeyError" in text for text in report.failures)
    assert any("silently" in text for text in report.failures)


def test_a_line_with_a_field_too_many_is_refused():
    assert separators.run_suite(140, "tests").failures == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trace = write_small_trace(folder / "t.parquet", sequences=3)
    options = {"policy": "on-demand", "steps": 20, "cache_ratio": 0.25, "batch": 2}
    replayed = moesim.replay(str(trace), **options, out=folder)
    return folder, open_trace(trace), replayed


def record_of(run):
    folder, trace, replayed = run
    return Record(folder, trace, replayed.config, replayed.metrics["makespan_s"])


def test_a_replay_passes_the_audit(run):
    assert audit(record_of(run)) == []


@pytest.mark.parametrize("acceptance", [0.3, 1.0])
def test_passes_that_verify_drafts_are_audited_too(tmp_path, acceptance):
    trace = write_small_trace(
        tmp_path / "t.parquet", columns=("weights", "scores", "pred1_raw")
    )
    run = moesim.replay(
        trace,
        "sp-moe",
        hw="rtx3080ti",
        cache_ratio=0.5,
        acceptance=acceptance,
        out=tmp_path / "run",
    )
    makespan_s = run.metrics["makespan_s"]
    record = Record(tmp_path / "run", open_trace(trace), run.config, makespan_s)
    assert audit(record) == []
    record.accesses.loc[50, "tokens"] += 1
    assert any(text.startswith("accesses:") for text in audit(record))


def test_real_runs_pass_the_same_audit():
    report = real_runs.run_suite(3, "tests")
    assert report.failures == []
    assert report.counts["run"] > 0


def overlap(record):
    place = record.spans.index[record.spans.lane == "gpu0"][3]
    record.spans.loc[place, "start_s"] -= 1e-6


def early(record):
    spans = record.spans
    missed = record.accesses[
        (record.accesses.state == "miss") & (record.accesses.lane == "gpu0")
    ].iloc[0]
    copy = spans.index[
        (spans.kind == "fetch")
        & (spans.step == missed.step)
        & (spans.layer == missed.layer)
        & (spans.expert == missed.expert)
    ][0]
    record.spans = spans.drop(copy)


def fewer_bytes(record):
    record.spans.loc[record.spans.index[record.spans.kind == "fetch"][0], "bytes"] -= 1


def never_computed(record):
    place = record.spans.index[record.spans.kind == "compute"][5]
    record.spans = record.spans.drop(place)


def too_many_resident(record):
    record.accesses.loc[record.accesses.lane == "gpu0", "state"] = "hit"
    copies = record.spans.index[record.spans.kind == "fetch"]
    record.spans = record.spans.drop(copies)


def late_end(record):
    record.makespan_s *= 1.01


def other_expert(record):
    place = record.accesses.index[0]
    record.accesses.loc[place, "tokens"] += 1


@pytest.mark.parametrize(("fault", "named"), [
    (overlap, "overlap"),
    (early, "arrival"),
    (fewer_bytes, "bytes"),
    (never_computed, "compute"),
    (too_many_resident, "memory"),
    (late_end, "makespan"),
    (other_expert, "accesses"),
])  # fmt: skip
def test_the_audit_sees_a_fault_put_in_on_purpose(run, fault, named):
    record = record_of(run)
    fault(record)
    assert any(text.startswith(f"{named}:") for text in audit(record))


def test_drawn_configurations_give_the_same_bytes_in_any_process():
    report = configurations.run_suite(4, "tests")
    assert report.failures == []
    assert report.tried == 4


def test_streams_that_are_gone_or_full_end_in_a_line():
    report = streams.run_suite(4, "tests", "trace info")
    assert report.failures == []
    assert report.tried == 4


def test_the_judge_of_streams_sees_what_is_printed_beside_a_table(tmp_path):
    shell = 'echo more; "$@" >/dev/null'
    assert list(streams.judge("into -", shell, "list", ".csv", tmp_path))


@pytest.mark.skipif(
    users.interpreter() is None,
    reason="only root can run it as another user, where Python is readable",
)
def test_somebody_without_a_home_is_answered():
    report = users.run_suite(1, "tests", "no home: trace info")
    assert report.failures == []
    assert report.tried == 1


def forking(suite, count, only=""):
    """Run a suite that forks in a process that no test has started threads in: a fork
    that meets another's locks waits for ever. Returns what it printed.
    """
    words = [suite, "--count", str(count), "--only", only]
    asked = [sys.executable, "-m", "torture", *words]
    path = {"PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        asked, check=False, env=os.environ | path, capture_output=True, text=True
    ).stdout


def test_results_replace_nothing_that_is_read():
    told = forking("places", 24, "replay t.parquet")
    assert "places: 24 tried, 0 failed" in told, told


def test_the_judge_of_places_sees_what_was_overwritten(tmp_path):
    (tmp_path / "work").mkdir()
    places.prepare(tmp_path / "work")
    report = Report("places")
    # An output that the suite takes for another one's: it may replace `t.parquet`.
    writer = places.Writer("trace export t.parquet OUT --to csv", {"OUT": ""}, ())
    case = (writer, "OUT", "input", "same name|c.toml", tmp_path / "work")
    places.attack(*case, report)
    assert any("changed ['c.toml']" in text for text in report.failures)


def test_pairs_of_options_are_answered_or_refused_in_one_line():
    told = forking("options", 6)
    assert "options: 6 tried, 0 failed" in told, told
