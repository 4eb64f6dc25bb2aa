"""Traces that ship are found by name, wherever moesim runs."""

import json
from pathlib import Path

import pytest
from support.small_trace import write_small_trace
from typer.testing import CliRunner

from moesim import cli
from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.shipped import SHIPPED, resolve_trace

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_name_opens_the_shipped_trace(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = open_trace(name)
    assert trace.path.samefile(ROOT / "traces" / "data" / SHIPPED[name])
    assert trace.shape.name == ("tiny" if name.startswith("tiny") else "gpt-oss-20b")


def test_what_is_drawn_says_so_and_keeps_its_source():
    provenance = open_trace("gpt-oss-20b-like").header.provenance
    assert provenance["synthetic"] is True
    assert provenance["like_licence"] == "Apache-2.0"


def test_a_file_of_that_name_comes_first_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert open_trace("tiny").shape.name == "tiny"
    Path("tiny").rmdir()
    write_small_trace(Path("tiny"))
    assert open_trace("tiny").shape.name == "small"
    assert open_trace(Path("tiny").absolute()).shape.name == "small"


def test_only_the_name_itself_is_resolved(tmp_path):
    """A wrong path must not be answered with other data."""
    assert resolve_trace(tmp_path / "tiny") == tmp_path / "tiny"
    with pytest.raises(TraceError, match="tiny, tiny-calibration ship"):
        open_trace(tmp_path / "tiny")


def test_commands_take_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["replay", "tiny", "--steps", "2", "--warm", "tiny-calibration", "--json"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["config"]["trace"] == "tiny"
