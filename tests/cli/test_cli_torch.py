"""Commands that run a model: record, train-tiny, and the demonstration's own steps."""

import dataclasses
import json

import numpy as np
import pytest
from support.real_machine import host_profile

from moesim import cli, demo
from moesim.hwprofiles.profile import save_profile
from moesim.runtime.record import calibration
from moesim.runtime.train import tiny
from moesim.traces.format.reader import open_trace

TEXTS = ("import os\nimport sys", "def main():\n    return 0")


def run(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main([str(word) for word in words])
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace of two short texts, recorded through the command line."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "prompts.txt").write_text("\n\n".join(TEXTS))
    words = (
        "--prompts",
        folder / "prompts.txt",
        "--out",
        folder / "t.parquet",
        "--max-new-tokens",
        6,
        "--json",
    )
    with pytest.MonkeyPatch.context() as patch:
        # As many as are calibrated with change no column.
        patch.setattr(calibration, "_TEXTS", 4)
        with pytest.raises(SystemExit) as end:
            cli.main(["record", *(str(word) for word in words)])
    assert not end.value.code
    return folder / "t.parquet"


def test_record_writes_every_column_a_policy_may_ask_for(recorded):
    """Bytes are tokens, and each text is continued by six."""
    trace = open_trace(recorded)
    columns = {
        "weights",
        "scores",
        "pred1_raw",
        "pred2_raw",
        "pred3_raw",
        "pred1_res",
        "token",
    }
    assert trace.columns == columns
    rows = list(trace.sequences())
    assert [len(sequence.pos) // trace.shape.layers for sequence in rows] == [
        len(text) + 6 for text in TEXTS
    ]
    assert trace.header.calibration["residual"]["tokens"] > 0


def test_what_was_recorded_replays_with_prediction(capsys, recorded):
    words = (
        "replay",
        recorded,
        "--policy",
        "greedy",
        "--prefetch",
        "residual",
        "--hw",
        "rtx3090-epyc7532",
        "--json",
    )
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert json.loads(out)["prefetched"] > 0


def test_a_run_hands_artefacts_to_its_planner(capsys, recorded, tmp_path, monkeypatch):
    """A folder that is none is refused before anything runs; a cache that needs none is
    told what lies there.
    """
    from safetensors.numpy import save_file
    from support.real_machine import host_profile

    from moesim.runs import machine, setup

    monkeypatch.setattr(
        machine,
        "default_profile",
        lambda: dataclasses.replace(host_profile(), kind="measured"),
    )
    words = (
        "run",
        recorded,
        "--store",
        tmp_path / "s",
        "--steps",
        1,
        "--json",
        "--artefacts",
        tmp_path / "a",
    )
    code, _, err = run(capsys, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert "--artefacts" in err
    (tmp_path / "a").mkdir()
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "a" / "notes.safetensors")
    given = []
    planner = setup.Planner
    monkeypatch.setattr(
        setup,
        "Planner",
        lambda *a, **named: (given.append(named["extras"]), planner(*a, **named))[1],
    )
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert json.loads(out)["config"]["artefacts"] == str(tmp_path / "a")
    assert all("notes" in extras for extras in given)
    assert given


def test_a_missing_prompt_file_is_one_line(capsys, tmp_path):
    code, out, err = run(
        capsys,
        "record",
        "--prompts",
        tmp_path / "none.txt",
        "--out",
        tmp_path / "t.parquet",
    )
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("x")
    monkeypatch.setattr("moesim.runtime.accelerators.accelerator_here", lambda: None)
    words = (
        "--prompts",
        tmp_path / "p.txt",
        "--out",
        tmp_path / "t.parquet",
        "--device",
        "cuda",
    )
    code, out, err = run(capsys, "record", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "torch finds no 'cuda'" in err
    assert not (tmp_path / "t.parquet").exists()


def test_a_folder_that_is_no_model_is_one_line(capsys, tmp_path):
    (tmp_path / "p.txt").write_text("x")
    code, _, err = run(
        capsys,
        "record",
        "--model",
        tmp_path,
        "--prompts",
        tmp_path / "p.txt",
        "--out",
        tmp_path / "t.parquet",
    )
    assert code == 2
    assert "config.json" in err


def test_train_tiny_passes_on_what_it_was_told(capsys, monkeypatch, tmp_path):
    asked = []

    def train(*arguments):
        asked.extend(arguments[:3])
        return {"steps": 7, "seconds_s": 90.0, "held_out": {"nats_per_byte": 1.5}}

    monkeypatch.setattr(tiny, "train_tiny", train)
    code, out, _ = run(
        capsys, "train-tiny", "--out", tmp_path / "m", "--minutes", 1.5, "--seed", 4
    )
    assert (code, asked) == (0, [tmp_path / "m", 1.5, 4])
    assert "7 steps in 1.5 minutes" in out
    assert "1.500 nats per byte" in out


def test_the_demonstration_shows_real_and_simulated_hits_side_by_side(
    recorded, tmp_path, monkeypatch, capsys
):
    """As many as were counted for real, in every row."""
    for name, value in {"REAL_SHAPE": None, "REAL_STEPS": 3, "REPETITIONS": 1}.items():
        monkeypatch.setattr(demo, name, value)
    profile = save_profile(host_profile(), tmp_path / "hw.toml")
    demo._run_and_simulate(open_trace(recorded), profile)
    rows = capsys.readouterr().out.partition("policy ")[2].splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(demo.REAL_POLICIES)
    counts = [row.split()[1:3] for row in rows]
    assert all(measured == simulated for measured, simulated in counts)
    assert any(measured != "0" for measured, _ in counts)
