"""Whoever pulls the plug on a recording loses the batch at work, and whoever goes on
gets the same file.
"""

import json
import os
import shutil
import signal

import pyarrow.parquet as pq
import pytest
import torch
from support.families import family
from support.processes import ROOT, run_python
from support.small_trace import write_small_trace

from moesim import cli
from moesim.base.errors import TraceError
from moesim.runtime.record import record as recorder
from moesim.runtime.record.record import record
from moesim.runtime.record.segments import Segments, finish, parts_dir, unfinished
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import TraceHeader

torch.set_num_threads(1)
PROMPTS = ["def double(x):", "for i", "import numpy as np", "class A:", "x = 1"]
HOW = {"new_tokens": 4, "batch": 2, "temperature": 1.0}
FIXED = HOW | {"provenance": {"date": "2026-01-01"}}

KILLED = """
import json, os, signal, sys, torch
from support.families import family
from moesim.runtime.record.record import record
torch.set_num_threads(1)
prompts, how = json.loads(sys.argv[2])
record(family("qwen3_moe"), prompts, sys.argv[1],
       progress=lambda done, expected: done > 62 and os.kill(os.getpid(), signal.SIGKILL), **how)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A recording that nobody disturbed: groups of 2, 2 and 1 sequences."""
    out = tmp_path_factory.mktemp("whole") / "t.parquet"
    record(family("qwen3_moe"), PROMPTS, out, **FIXED)
    assert list(out.parent.iterdir()) == [out]
    return out


def stopped(out, after, **change):
    """Record until so many tokens are done, then press ctrl-C."""

    def stop(done, _expected):
        if done > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(family("qwen3_moe"), PROMPTS, out, progress=stop, **(FIXED | change))


def test_a_killed_recording_goes_on_to_the_same_bytes(tmp_path, whole):
    """SIGKILL in the third group: four sequences are safe, as valid traces; the rest is
    made as if nothing had been.
    """
    out = tmp_path / "t.parquet"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    words = ("-c", KILLED, out, json.dumps([PROMPTS, FIXED]))
    done = run_python(*words, environment={"PYTHONPATH": paths})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert unfinished(out) == 4
    parts = [open_trace(path) for path in sorted(parts_dir(out).glob("*.parquet"))]
    assert [
        rows.seq for part in parts for rows in part.sequences(("token", "scores"))
    ] == [0, 1, 2, 3]

    shorter = tmp_path / "shorter.parquet"
    shutil.copytree(parts_dir(out), parts_dir(shorter))
    made = finish(shorter)
    assert (made.sequences, made.planned) == (4, 5)
    full = pq.read_table(whole)
    assert pq.read_table(shorter).equals(full.filter(full["seq"].to_numpy() < 4))
    said = open_trace(shorter).header.provenance
    assert (said["sequences"], said["asked_sequences"]) == (4, 5)
    assert not parts_dir(shorter).exists()

    done = record(family("qwen3_moe"), PROMPTS, out, **FIXED)
    assert done.resumed == 4
    assert out.read_bytes() == whole.read_bytes()
    assert not parts_dir(out).exists()


def test_stops_may_be_many_and_the_date_is_the_first_ones(tmp_path, whole):
    """Stopped in each group and continued on other days, by hand or by machine: the
    first day stays in the header.
    """
    out = tmp_path / "t.parquet"
    stopped(out, 0)
    assert unfinished(out) is None
    stopped(out, 40)
    assert unfinished(out) == 2
    stopped(out, 62, provenance={"date": "2026-01-02"})
    assert unfinished(out) == 4
    done = record(family("qwen3_moe"), PROMPTS, out, **HOW)
    assert out.read_bytes() == whole.read_bytes()
    assert done.header.provenance["date"] == "2026-01-01"
    assert (done.prompt_tokens, done.decode_tokens) == (sum(map(len, PROMPTS)), 20)


def test_killed_while_merging_needs_no_model_again(tmp_path, whole, monkeypatch):
    out = tmp_path / "t.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(
            Segments, "merge", lambda _self: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            record(family("qwen3_moe"), PROMPTS, out, **FIXED)
    assert unfinished(out) == 5
    monkeypatch.setattr(
        recorder, "generate", lambda *_a, **_k: pytest.fail("everything is there")
    )
    assert record(family("qwen3_moe"), PROMPTS, out, **FIXED).resumed == 5
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_torn_segment_is_made_again(tmp_path, whole, is_there):
    """As a crash of the machine leaves it; what comes behind it is made again too."""
    out = tmp_path / "t.parquet"
    stopped(out, 62)
    first = min(parts_dir(out).glob("*.parquet"))
    torn = first.read_bytes()[:100]
    first.unlink()
    if is_there:
        first.write_bytes(torn)
    assert unfinished(out) is None
    assert record(family("qwen3_moe"), PROMPTS, out, **FIXED).resumed == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("change", "message"), [
    ({"batch": 1}, "batch: expected 2 as in the unfinished recording, got 1"),
    ({"new_tokens": 5}, "new_tokens: expected 4"),
    ({"seed": 3}, "seed: expected 0"),
    ({"scores": False}, "columns: expected 'pred1_raw, pred2_raw, pred3_raw, scores"),
    ({"prompts": [*PROMPTS[:-1], "y = 1"]}, "prompts: expected '"),
    ({"model": "olmoe"},
     "model: expected 'qwen3_moe' as in the unfinished recording, got 'olmoe'"),
    ({"split": "calibration"}, "split: expected 'evaluation'"),
])  # fmt: skip
def test_another_recording_is_not_continued(tmp_path, change, message):
    """The first fact that differs is named, and what was there stays."""
    out = tmp_path / "t.parquet"
    stopped(out, 40)
    how = {"prompts": PROMPTS, "model": "qwen3_moe"} | FIXED | change
    with pytest.raises(TraceError, match=message):
        record(family(how.pop("model")), how.pop("prompts"), out, **how)
    assert unfinished(out) == 2


def test_what_is_no_recording_is_not_finished(tmp_path):
    out = tmp_path / "t.parquet"
    parts_dir(out).mkdir()
    write_small_trace(parts_dir(out) / "000000000.parquet")
    with pytest.raises(TraceError, match=r"provenance\.batch: expected a number above"):
        finish(out)


def test_two_recordings_of_one_trace_do_not_meet(tmp_path, tiny_shape):
    header = TraceHeader(tiny_shape, {"sequences": 1, "batch": 1})
    mine, theirs = (Segments(tmp_path / "t.parquet", header, ()) for _ in range(2))
    with (
        mine,
        pytest.raises(
            TraceError, match=r"another recording is at work in t\.parquet\.parts"
        ),
        theirs,
    ):
        pytest.fail("both are at work")
    assert not any(tmp_path.iterdir())


def test_the_command_line_keeps_what_was_stopped(tmp_path, capsys):
    """`--finish` makes a trace of it without prompts and without a model."""
    out = tmp_path / "t.parquet"
    stopped(out, 40)

    def run(*words):
        with pytest.raises(SystemExit) as end:
            cli.main(["record", str(out), *words])
        return end.value.code or 0, capsys.readouterr()

    code, printed = run("--finish")
    assert code == 0
    assert printed.out.startswith("2 of 5 sequences, ")
    assert [rows.seq for rows in open_trace(out).sequences()] == [0, 1]
    code, printed = run("--finish")
    assert code == 2
    assert (
        "expected an unfinished recording in t.parquet.parts, found none" in printed.err
    )
    code, printed = run()
    assert code == 2
    assert "expected a file with prompts" in printed.err
