"""Replaying, comparing, importing and reading need nothing that only Linux has."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import foreign_files as files
from support.imports import WRITERS, write
from support.small_trace import write_small_trace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def as_on_windows(tmp_path):
    """Run commands in one process that sees what Windows has; return what it printed."""
    if not sys.platform.startswith("linux"):
        pytest.skip("it hides what only Linux has, and asks /proc which files are open")

    def run(commands):
        script = tmp_path / "commands.json"
        script.write_text(json.dumps(commands), encoding="utf-8")
        done = subprocess.run(
            [
                sys.executable,
                "-X",
                "warn_default_encoding",
                str(ROOT / "tests" / "support" / "windows_like.py"),
                str(script),
            ],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        finished = [line for line in done.stdout.splitlines() if "done: " in line]
        assert len(finished) == len(commands)
        return done.stdout

    return run


def test_a_trace_is_replayed_compared_and_described(as_on_windows, tmp_path):
    trace = str(write_small_trace(tmp_path / "small.parquet"))
    shipped = str(ROOT / "traces" / "data" / "tiny_evaluation.parquet")
    hybrimoe = ["replay", shipped, "--policy", "hybrimoe", "--steps", "4"]
    printed = as_on_windows(
        [
            [*hybrimoe, "--out", "run", "--perfetto", "run.json"],
            ["replay", trace, "--policy", "greedy", "--cache", "belady", "--json"],
            ["compare", trace, "--policy", "greedy,fiddler", "--out", "table"],
            ["compare", trace, "--policy", "greedy+lru", "--html", "page.html"],
            ["hits", trace, "--cache", "lru,lfu", "--table", "hits.csv"],
            ["gap", trace, "--policy", "greedy"],
            ["trace", "info", trace],
            ["trace", "stats", trace],
            ["trace", "check", trace],
            ["trace", "export", trace, "plain.csv", "--to", "csv"],
            ["trace", "synth", "new.parquet", "--like", trace, "--tokens", "50"],
            ["list", "cache"],
        ]
    )
    assert "4 forward passes" in printed
    assert (tmp_path / "run" / "timeline.parquet").is_file()
    assert (tmp_path / "table").is_dir()


def test_every_importer_reads_its_files(as_on_windows, tmp_path):
    commands = []
    for name, (_, _, options, _) in WRITERS.items():
        (tmp_path / name).mkdir()
        source = write(tmp_path / name, name)
        command = ["trace", "import", str(source), f"{name}.parquet"]
        command += ["--shape", files.SHAPE]
        for option, value in options.items():
            command += [f"--{option.replace('_', '-')}", value]
        commands.append(command)
    as_on_windows(commands)
    assert all((tmp_path / f"{name}.parquet").is_file() for name in WRITERS)


DISGUISED = """
import sys, tempfile
from support import windows_like
windows_like.install()
ours = {"__name__": "moesim.somewhere"}
exec("import os, mmap; from pathlib import Path", ours)
with tempfile.TemporaryDirectory() as folder:
    ours["place"] = ours["Path"](folder) / "file.txt"
    for code in sys.stdin.read().splitlines():
        try:
            exec(code, ours)
        except Exception as error:
            print(type(error).__name__)
        else:
            print("passed")
"""


def test_the_disguise_hides_what_windows_lacks(tmp_path):
    """Else the tests above could not fail."""
    expected = {
        "import fcntl": "ModuleNotFoundError",
        "from signal import SIGKILL": "ImportError",
        "os.pread": "AttributeError",
        "mmap.MAP_PRIVATE": "AttributeError",
        "place.write_text('ä')": "EncodingWarning",
        "file = place.open('w', encoding='utf-8')": "passed",
        "place.unlink()": "PermissionError",
        "os.replace(place, place.with_suffix('.new'))": "PermissionError",
        "file.close()": "passed",
        "os.replace(place, place.with_suffix('.new'))  # closed": "passed",
    }
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", DISGUISED],
        input="\n".join(expected),
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == list(expected.values())


def test_what_is_imported_at_the_top_is_there_on_every_system():
    """Also where a command's own modules are not reached by the tests above."""
    posix = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty"}
    unportable = []
    for room in ("hwprofiles", "moesim", "policies", "runtime", "sim", "traces"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                names = {alias.name for alias in getattr(node, "names", [])}
                module = getattr(node, "module", None)
                if isinstance(node, ast.Import | ast.ImportFrom) and posix & (
                    names | {module}
                ):
                    unportable.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert unportable == []
