"""One way of writing for all files: whole or absent, under names nobody can guess."""

import os

import pytest
from support.processes import run_python
from support.small_trace import write_small_trace

from moesim.base.errors import TraceError
from moesim.base.files import ScratchFolder, write_text, written_beside
from moesim.traces.format.reader import open_trace


def test_what_fails_leaves_the_older_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a.txt", "older")
    with pytest.raises(UnicodeEncodeError), written_beside(tmp_path / "a.txt") as part:
        part.write_text("half \ud800", encoding="utf-8")
    assert (tmp_path / "a.txt").read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_error_names_the_file_that_users_know(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left on device.*a\.txt"),
        written_beside(tmp_path / "a.txt"),
    ):
        raise OSError(28, "whatever the system says")


def test_bytes_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda *to: (calls.append("name"), replace(*to)))
    write_text(tmp_path / "a.txt", "text")
    assert calls == ["sync", "name", "sync"]


def test_names_in_progress_cannot_be_guessed(tmp_path):
    names = set()
    for _ in range(20):
        with written_beside(tmp_path / "a.txt") as part:
            part.write_text("")
            names.add(part.name)
    assert len(names) == 20


@pytest.mark.parametrize("thing", ["fifo", "link"])
def test_what_stands_at_the_old_name_in_progress_is_left_alone(tmp_path, thing):
    """Formerly a pipe at ``a.txt.part`` hung the writer, and a link was followed."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    trap = tmp_path / "a.txt.part"
    os.mkfifo(trap) if thing == "fifo" else trap.symlink_to(victim)
    write_text(tmp_path / "a.txt", "text")
    assert victim.read_text() == "mine"
    assert (tmp_path / "a.txt").read_text() == "text"


def test_a_pipe_a_device_or_a_folder_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, message in (("pipe", "expected a file"), ("folder", "found a folder")):
        with pytest.raises(OSError, match=message):
            write_text(tmp_path / name, "text")


def test_what_a_killed_process_left_goes_a_week_later_but_not_what_lives(tmp_path):
    with ScratchFolder(tmp_path) as folder, written_beside(tmp_path / "a.txt") as part:
        (folder / "large").write_text("960 MiB")
        left = {
            part: part.with_name(f".old{part.name}"),
            folder: tmp_path / ".x.moesim-y.part",
        }
        left[part].write_text("half")
        left[folder].mkdir()
        for path in left.values():
            os.utime(path, (0, 0))
        write_text(tmp_path / "b.txt", "another file in that folder")
        assert sorted(tmp_path.iterdir()) == sorted([*left, tmp_path / "b.txt"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_every_flipped_bit_of_a_trace_is_found(tmp_path):
    """Formerly most gave other rows, silently."""
    data = bytearray(write_small_trace(tmp_path / "t.parquet").read_bytes())
    copy = tmp_path / "copy.parquet"
    for at in range(0, len(data), len(data) // 150):
        data[at] ^= 1 << at % 8
        copy.write_bytes(data)
        with pytest.raises(TraceError):
            list(open_trace(copy).sequences())
        data[at] ^= 1 << at % 8
    copy.write_bytes(data)
    assert list(open_trace(copy).sequences())


@pytest.mark.parametrize(("environment", "words"), [
    ({"MPLBACKEND": "nonsense"}, "hits t.parquet --cache-ratio 0.5 --png h.png"),
    ({"PYTHONOPTIMIZE": "2"}, "list cache"),
    ({"HOME": "/dev/null", "XDG_CONFIG_HOME": ""}, "trace info t.parquet"),
])  # fmt: skip
def test_odd_environments_change_nothing(tmp_path, environment, words):
    write_small_trace(tmp_path / "t.parquet")
    words = ("-m", "moesim", *words.split())
    done = run_python(*words, cwd=tmp_path, environment=environment)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
