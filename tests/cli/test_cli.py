"""The command line: what it prints, where it writes, and how it says no."""

import json
import signal
import sys
import tomllib
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from support import processes
from support.command_line import refused
from support.small_trace import (
    write_small_trace,
)
from typer.main import get_command

from moesim import cli
from moesim.base.errors import AdviceError, RuntimeFault, StoreError, TraceError
from moesim.base.units import number as number_text
from moesim.cli.errors import message_for_users

# Replay.


def test_defaults_are_printed(command, trace):
    """A newcomer sees which machine, cache, prefetch and batch were meant."""
    code, out, _ = command("replay", trace)
    assert code == 0
    assert "rtx3090-epyc7532 (datasheet profile)" in out
    assert "cache lru, prefetch none, routing as-recorded, batch 1" in " ".join(
        out.split()
    )
    assert "2 experts per layer, 25.0 % of all" in out


def test_a_profile_in_the_folder_is_the_default(command, trace):
    source = (processes.ROOT / "hwprofiles" / "data" / "rtx4060ti.toml").read_text(
        encoding="utf-8"
    )
    Path("hw.toml").write_text(source, encoding="utf-8")
    assert (
        json.loads(command("replay", trace, "--json")[1])["config"]["hw"] == "rtx4060ti"
    )


def test_replay_writes_tables_figures_and_perfetto(command, trace, tmp_path):
    out = tmp_path / "run"
    code, printed, _ = command(
        "replay", trace, "--out", out, "--perfetto", tmp_path / "p.json"
    )
    assert code == 0
    names = {"timeline.parquet", "accesses.parquet", "steps.parquet", "run.json"}
    assert {path.name for path in out.iterdir()} == names
    assert f"wrote {out}\n" in printed
    figures = json.loads((out / "run.json").read_text())
    assert pq.read_metadata(out / "accesses.parquet").num_rows == figures["accesses"]
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert (
        sum(event["ph"] == "X" and "cat" in event for event in events)
        == pq.read_metadata(out / "timeline.parquet").num_rows
    )


# List and trace.


@pytest.mark.parametrize(("kind", "words"), [
    ("assignment", "greedy"),
    ("cache", "oracle: sees the future"),
    ("prefetch", "needs pred1_raw"),
    ("routing", "as-recorded"),
    ("systems", "fiddler"),
    ("machines", "datasheet: RTX 3090"),
    ("models", "48 MoE layers x 128 experts"),
])  # fmt: skip
def test_list_names_what_can_be_named(command, kind, words):
    code, out, _ = command("list", kind)
    assert code == 0
    assert words in out
    entries = json.loads(command("list", kind, "--json")[1])[kind]
    assert all(entry["name"] and entry["summary"] for entry in entries)


# Bad input.


def test_a_failed_run_leaves_no_half_written_tables(command, trace, tmp_path):
    """The trace breaks after the run has begun: rows of its second half are missing."""
    table = pq.read_table(trace)
    metadata = table.schema.metadata
    broken = table.slice(0, table.num_rows - 1).replace_schema_metadata(metadata)
    path = tmp_path / "broken.parquet"
    pq.write_table(broken, path, row_group_size=16)
    assert refused(
        command(
            "replay", path, "--out", tmp_path / "run", "--perfetto", tmp_path / "p.json"
        ),
        str(path),
    )
    assert not (tmp_path / "p.json").exists()
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


def test_a_missing_extra_names_itself(monkeypatch, command, tmp_path):
    """Without torch, what needs it says what to install; nothing else changes."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "moesim.runtime.measure.profile", raising=False)
    assert refused(
        command("profile", tmp_path / "hw.toml"),
        "torch",
        "pip install 'moesim[runtime]'",
    )


@pytest.mark.parametrize("error", [AdviceError, RuntimeFault, StoreError, TraceError])
def test_an_error_for_users_is_its_one_line(error):
    """A machine that gave no memory ended in a traceback."""
    assert message_for_users(error("close other programs")) == "close other programs"


def test_a_bug_of_ours_is_not_dressed_up():
    def bug():
        raise ValueError("a plain ValueError is nobody's message to a user")

    with pytest.raises(ValueError, match="plain"):
        cli.guarded(bug)


# The process.


def commands():
    """Every command with the words that call it."""
    words = []
    for name, deferred in get_command(cli.app).commands.items():
        of_group = getattr(deferred.command(), "commands", None)
        words += [f"{name} {each}" for each in of_group] if of_group else [name]
    return words


@pytest.mark.parametrize("words", commands())
def test_every_command_helps_with_an_example(command, words):
    code, out, _ = command(*words.split(), "--help")
    assert code == 0
    assert f"moesim {words}" in out.partition("Example")[2]


def test_version_is_that_of_the_distribution(command):
    assert f'version = "{command("--version")[1].split()[1]}"' in (
        processes.ROOT / "pyproject.toml"
    ).read_text(encoding="utf-8")


ALONE = ("replay", "--policy", "ilp")
SHARED_OUT = ("compare", "--policy", "ilp,beam", "--jobs", "2")


@pytest.mark.parametrize(("words", "number", "code"), [
    (ALONE, signal.SIGINT, 130),
    (SHARED_OUT, signal.SIGTERM, 143),
], ids=("ctrl-C", "SIGTERM, two processes"))  # fmt: skip
def test_stopped_from_outside_it_says_so_and_leaves_nothing(
    request, tmp_path, words, number, code
):
    """In the middle of replays that would take a minute or so; whoever shares the work
    ends too.
    """
    trace = write_small_trace(tmp_path / "long.parquet", sequences=40, new_tokens=2000)
    words = ("-m", "moesim", *words, trace, "--out", tmp_path / "run")
    process = processes.start(*words, cwd=tmp_path)
    request.addfinalizer(process.kill)
    begun = 6 if "--jobs" in words else 3
    processes.wait_for(lambda: len(list(tmp_path.glob("run/**/*.part"))) >= begun)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=processes.PATIENCE_S)
    assert process.returncode == code
    assert "Traceback" not in err
    assert [path for path in tmp_path.glob("run/**/*") if path.is_file()] == []
    assert psutil.wait_procs(children, timeout=processes.PATIENCE_S)[1] == []


# Somebody is quick: the signal comes while the commands are being imported.
EARLY = """
import os, sys
from moesim.start import main
class Quick:
    def find_spec(self, name, path=None, target=None):
        if name == "moesim.cli.errors":
            os.kill(os.getpid(), int(sys.argv[1]))
sys.meta_path.insert(0, Quick())
main(["list", "policies"])
"""


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")],
)
def test_a_signal_before_the_command_begins_ends_it_in_one_line(number, code, said):
    done = processes.run_python("-c", EARLY, int(number))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_the_installed_command_begins_where_signals_are_heard():
    facts = tomllib.loads(
        (processes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert facts["project"]["scripts"] == {"moesim": "moesim.start:main"}


SWALLOWED = """
import os, sys
from moesim.cli.errors import guarded
def work():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape of object") from None
guarded(work, [])
"""


def test_a_library_that_makes_an_error_of_an_interrupt_hides_it_from_nobody():
    """As torch does where its C code is asked for a slice of a tensor."""
    done = processes.run_python("-c", SWALLOWED, int(signal.SIGINT))
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


IMPATIENT = """
import os, sys
from moesim.cli.errors import guarded
def interrupt(times):
    for _ in range(times):
        os.kill(os.getpid(), int(sys.argv[1]))
def work():
    try:
        interrupt(1)
    finally:
        interrupt(int(sys.argv[2]) - 1)
        print("cleared up")
guarded(work, [])
"""


@pytest.mark.parametrize(("times", "out"), [(2, "cleared up\n"), (3, "")])
def test_a_second_interrupt_lets_the_clearing_up_end_and_a_third_cuts_it(times, out):
    done = processes.run_python("-c", IMPATIENT, int(signal.SIGINT), times)
    assert (done.returncode, done.stdout, done.stderr) == (130, out, "interrupted\n")


# Words and numbers.


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0"),
    (0.012345, "0.0123"),
    (1.5, "1.50"),
    (71.44, "71.4"),
    (7395.2, "7,395"),
    (None, "-"),
])  # fmt: skip
def test_numbers_keep_three_digits(value, text):
    assert number_text(value) == text
