"""What is read is bounded before it is parsed; what is shown can do nothing."""

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.base import inputs
from moesim.base.errors import TraceError
from moesim.base.files import user_folder
from moesim.base.text import LONGEST_LINE, VisibleStream, cell, one_line, visible
from moesim.hwprofiles.profile import load_profile
from moesim.reporting.answers import Answer
from moesim.reporting.parts import Listing, Section
from moesim.traces.format import parquet
from moesim.traces.importers.readers import arrays
from moesim.traces.importers.readers.arrays import load_named


@pytest.mark.parametrize(("load", "text"), [
    (inputs.load_json, "[" * 100_000 + "]" * 100_000),
    (inputs.load_json, '{"a":' * 100_000 + "1" + "}" * 100_000),
    (inputs.load_toml, "x = " + "[" * 100_000 + "]" * 100_000),
], ids=["lists", "objects", "TOML"])  # fmt: skip
def test_what_is_nested_without_end_is_refused(load, text):
    with pytest.raises(inputs.InputError, match="lists and objects in each other"):
        load(text)


@pytest.mark.parametrize("load", [inputs.load_json, inputs.load_toml])
def test_a_number_without_end_is_refused(load):
    with pytest.raises(ValueError, match="digits"):
        load(("%s" if load is inputs.load_json else "a = %s") % ("1" * 100_000))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_only_regular_files_are_opened(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(OSError, match="expected a file, found a"):
        inputs.open_input(tmp_path / "x")


def test_a_file_beyond_the_limit_says_how_to_raise_it(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(5000))
    assert len(inputs.read_bytes(tmp_path / "x")) == 5000
    monkeypatch.setenv("MOESIM_MOST_INPUT", "4KiB")
    with pytest.raises(OSError, match=r"at most 4\.0 KiB, found more;.*MOESIM_MOST_IN"):
        inputs.read_bytes(tmp_path / "x")


def test_arrays_of_a_file_are_bounded_together(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "MOST_ARRAY_BYTES", 1 << 20)
    monkeypatch.setenv("MOESIM_MOST_INPUT", "1MiB")
    numbers = np.arange(90_000)
    np.savez(tmp_path / "one.npz", a=numbers)
    np.savez(tmp_path / "two.npz", a=numbers, b=numbers)
    assert np.array_equal(load_named(tmp_path / "one.npz")["a"], numbers)
    with pytest.raises(TraceError, match=r"at most 1\.0 MiB.*MOESIM_MOST_INPUT raises"):
        load_named(tmp_path / "two.npz")


def test_a_table_is_bounded_by_what_it_holds_unpacked(tmp_path, monkeypatch):
    """Equal texts take no space in a file: 60 MB of them are a kilobyte or two."""
    path = tmp_path / "t.parquet"
    texts = pa.array(["x" * 20_000]).take(pa.array([0] * 3000))
    pq.write_table(pa.table({"a": texts, "b": range(3000)}), path)
    monkeypatch.setattr(parquet, "MOST_ARRAY_BYTES", 1 << 20)
    monkeypatch.setenv("MOESIM_MOST_INPUT", "1MiB")
    with parquet.open_parquet(path) as file:
        with pytest.raises(OSError, match=r"at most 1\.0 MiB unpacked, found more"):
            parquet.read_table(file, path)
        assert parquet.read_table(file, path, ["b"]).column("b").to_pylist() == [
            *range(3000)
        ]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/named")
    assert user_folder("cache") == Path("/named/moesim")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/someone"))
    assert user_folder("config") == Path("/someone/.config/moesim")

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(OSError, match="no home folder; set XDG_CONFIG_HOME"):
        user_folder("config")


def test_controls_are_visible():
    assert visible("a\x1b[2J\nb\u202e\x9b\ud800") == r"a\x1b[2J\nb\u202e\x9b\ud800"
    assert one_line("  two\n lines\x07 ") == r"two lines\x07"
    long = one_line("expected " + "x" * 5000 + " way out")
    assert len(long) <= LONGEST_LINE
    assert long.startswith("expected x")
    assert long.endswith("x way out")


def test_a_name_from_a_file_forges_no_line_of_a_page():
    hostile = "x\nerror: all is lost"
    pair = (hostile, hostile)
    table = Listing.of([hostile], [[hostile]], title=hostile)
    text = Answer(
        question=hostile,
        subject=hostile,
        setting=[pair],
        facts=[pair],
        tables=[table],
        sentences=[hostile],
        notes=[hostile],
        sources={hostile: hostile},
        commands=[pair],
        on_page=lambda: [Section(hostile, [table], hostile)],
        warnings=[hostile],
        settings="{\n}",
    ).html()
    assert "\nerror" not in text
    assert text.count("x\\nerror") == 25
    assert "{\n}" in text


def test_a_profile_bears_a_visible_name(tmp_path):
    profile = tmp_path / "hw.toml"
    profile.write_text('base = "two-core-host"\nname = "x\\n\\u001b[2J"\n')
    assert load_profile(profile).name == r"x\n\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("=1+2", "'=1+2"), ("@x", "'@x"), ("-a", "'-a"), ("-1.5", "-1.5"), ("a", "a")],
)
def test_a_spreadsheet_takes_no_cell_for_a_formula(text, shown):
    assert cell(text) == shown


def test_a_stream_shows_controls_but_for_line_ends_and_styles():
    raw = io.BytesIO()
    stream = VisibleStream(io.TextIOWrapper(raw, encoding="utf-8"))
    stream.write("\x1b[1mbold\x1b[0m\ta\r\x1b[2J\x1b[8mhidden\x1b]0;t\x07\n")
    stream.flush()
    assert raw.getvalue().decode() == (
        "\x1b[1mbold\x1b[0m\ta\\r\\x1b[2J\\x1b[8mhidden\\x1b]0;t\\x07\n"
    )
