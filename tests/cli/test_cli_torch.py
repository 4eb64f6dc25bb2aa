"""Commands that run a model: record, and the demonstration's own steps."""

import pytest
from support.real_machine import host_profile

from moesim import cli, demo
from moesim.hwprofiles.profile import save_profile
from moesim.traces.format.reader import open_trace

PROMPTS = "import os\nimport sys\n\ndef main():\n    return 0"


def run(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main([str(word) for word in words])
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err


def test_a_device_that_is_not_there_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("x")
    monkeypatch.setattr("moesim.runtime.accelerators.accelerator_here", lambda: None)
    words = (tmp_path / "t.parquet", "--prompts", tmp_path / "p.txt")
    code, out, err = run(capsys, "record", *words, "--device", "cuda")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "torch finds no 'cuda'" in err
    assert not (tmp_path / "t.parquet").exists()


def test_the_demonstration_shows_real_and_simulated_hits_side_by_side(
    tmp_path, monkeypatch, capsys
):
    """As many as were counted for real, in every row."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS)
    recorded = tmp_path / "t.parquet"
    words = (recorded, "--prompts", prompts, "--new-tokens", 6)
    code, _, _ = run(capsys, "record", *words)
    assert code == 0
    for name, value in {"REAL_SHAPE": None, "REAL_STEPS": 3, "REPETITIONS": 1}.items():
        monkeypatch.setattr(demo, name, value)
    profile = save_profile(host_profile(), tmp_path / "hw.toml")
    demo._run_and_simulate(open_trace(recorded), profile)
    rows = capsys.readouterr().out.partition("policy ")[2].splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(demo.REAL_POLICIES)
    counts = [row.split()[1:3] for row in rows]
    assert all(measured == simulated for measured, simulated in counts)
    assert any(measured != "0" for measured, _ in counts)
