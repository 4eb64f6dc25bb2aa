"""Commands that write, run in processes that are forked and attacked.

Forked, a command begins without a second of imports, so that an attack meets its work.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from .subjects import TESTS

PROMPTS = "The cat sat on the mat.\n\nOne, two, three, four.\n\nfor i in range(3):\n"


class Command(NamedTuple):
    """A command that writes below ``out`` in the current folder.

    Attributes:
        name: of the command.
        words: of its command line; SEED stands for a seed.
        measures: whether its results hold times of this machine, which differ from run
            to run; they must be whole, not equal.
    """

    name: str
    words: str
    measures: bool = False


COMMANDS = (
    Command(
        "replay", "replay tiny --policy greedy --steps 6 --seed SEED --out out/run"
    ),
    Command(
        "replay --perfetto",
        "replay tiny --policy on-demand --steps SEED --perfetto out/p.json",
    ),
    Command(
        "compare",
        "compare tiny --policy on-demand,greedy --steps SEED --jobs 1 --out out/runs --html out/runs.html",
    ),
    Command(
        "trace import",
        "trace import foreignSEED out/t.parquet --shape layers=3,experts=8,top_k=2,expert_bytes=1KiB",
    ),
    Command(
        "trace synth",
        "trace synth out/s.parquet --like smallSEED.parquet --tokens 200 --seed SEED --save-stats out/s.npz",
    ),
    Command("trace stats", "trace stats smallSEED.parquet --out out/stats"),
    Command("trace export", "trace export smallSEED.parquet out/t.csv --to csv"),
    Command(
        "trace export oracle",
        "trace export smallSEED.parquet out/t.oracle --to oracle-general",
    ),
    Command("hits", "hits smallSEED.parquet --cache-ratio 0.25,0.5 --png out/hits.png"),
    Command(
        "train-cache",
        "train-cache smallSEED.parquet --out out/learned --hidden 64 --epochs 3",
    ),
    Command("store build", "store build tiny --out out/store"),
    Command(
        "record",
        "record out/r.parquet --prompts promptsSEED.txt --new-tokens 2 --batch 1 --resume"
        " --no-overhead",
    ),
)
"""Each takes half a second or so."""

LONG_COMMANDS = (
    Command(
        "sweep",
        "sweep smallSEED.parquet --policy greedy,on-demand --cache-ratio 0.25,0.5 --steps 20"
        " --jobs 1 --results out/results --table out/t.csv --html out/t.html",
    ),
    Command(
        "sweep of two",
        "sweep smallSEED.parquet --policy greedy,on-demand --seed 0,1,2 --jobs 2"
        " --results out/results --table out/t.csv",
    ),
    Command(
        "search",
        "search smallSEED.parquet --policy greedy,on-demand --over cache_ratio=0.1:0.9"
        " --steps 10 --trials 8 --jobs 1 --results out/results --table out/t.csv",
    ),
    Command(
        "calibrate --from",
        "calibrate out/hw.toml --from runSEED --force",
        measures=True,
    ),
    Command(
        "calibrate",
        "calibrate out/hw.toml --hw two-core-host --quick --minutes 0.01 --force"
        " --shape olmoe-1b-7b/512,olmoe-1b-7b/1024 --seed SEED",
        measures=True,
    ),
    Command(
        "validate",
        "validate tiny --hw two-core-host --policy on-demand+lru --cache-ratio 0.5"
        " --batch 1 --steps SEED --repetitions 1 --shape olmoe-1b-7b/64 --out out/report",
        measures=True,
    ),
    Command("reproduce", "reproduce --all --paper DAOP --jobs 1 --out out/papers"),
)
"""These take seconds, or go on with what a killed one has left."""


class Ended(NamedTuple):
    """How a process ended: its exit code (negative: by that signal), what it said, and
    how long it took.
    """

    code: int
    out: str
    err: str
    seconds: float


def prepare(folder):
    """Write what the commands read."""
    from support import foreign_files as files
    from support.small_trace import write_small_trace

    for seed in (3, 4):
        write_small_trace(folder / f"small{seed}.parquet", seed=seed, new_tokens=60)
        files.llama_cpp(folder / f"foreign{seed}", files.routing(seed=seed))
        (folder / f"prompts{seed}.txt").write_text(PROMPTS * (seed - 2))


def words_of(command, seed):
    return command.words.replace("SEED", str(seed)).split()


def forked(words, folder, *, before=None):
    """Start a command in a process of its own; return its number when it begins.

    Args:
        words: of the command line.
        folder: where it runs; ``stdout`` and ``stderr`` are written beside it.
        before: called in the new process.
    """
    # What is buffered would be written twice.
    sys.stdout.flush()
    sys.stderr.flush()
    begins, here = os.pipe()
    number = os.fork()
    if number:
        os.close(here)
        # At once where the process dies before.
        os.read(begins, 1)
        os.close(begins)
        return number

    code = 70
    try:
        os.close(begins)
        os.setsid()
        os.chdir(folder)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(f"{folder}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        if before is not None:
            before()
        from moesim.start import main

        os.write(here, b".")
        os.close(here)
        main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 - as the interpreter would
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def finished(number, folder, began_s):
    """Wait for a process, `LONGEST_S` at most; end what it left of its session."""
    status = _status_within(number, LONGEST_S)
    seconds = time.monotonic() - began_s
    left = _of_session(number)
    for process in left:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    out, err = (
        Path(f"{folder}.{name}").read_text(errors="replace")
        for name in ("stdout", "stderr")
    )
    if left:
        err += f"\nleft processes {left}"
    return Ended(os.waitstatus_to_exitcode(status), out, err, seconds)


def _status_within(number, seconds):
    """Status of a process; one that does not end is killed, which its status says."""
    with os.fdopen(os.pidfd_open(number)) as process:
        if not select.select([process], [], [], seconds)[0]:
            os.kill(number, signal.SIGKILL)
    return os.waitpid(number, 0)[1]


# Of one command; the slowest, an import, takes a tenth.
LONGEST_S = 300
MOST_LINE_CHARACTERS = 400


def lines_of(err):
    """Lines on standard error, without what may always be said."""
    quiet = ("note: ", "compiling ")
    return [line for line in err.splitlines() if not line.startswith(quiet)]


def faults_of_end(code, err, allowed=(0, 2)):
    """What is wrong with an exit code and what was said on standard error."""
    lines = lines_of(err)
    if code not in allowed or "Traceback" in err:
        yield f"exit code {code}: {err[-300:]!r}"
    elif code == 2 and (len(lines) != 1 or len(lines[0]) > MOST_LINE_CHARACTERS):
        yield f"not one line: {err[-300:]!r}"


def run(words, folder, *, before=None):
    """Run a command to its end, in a process that has imported what we have."""
    began_s = time.monotonic()
    return finished(forked(words, folder, before=before), folder, began_s)


def _of_session(leader):
    """Processes of a session that still live."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def digests(folder):
    """Name -> digest of every file below a folder; times of day and of work are left
    out, as is a store's note of which file it checked. Rows of a sweep may lie in one
    file or in several.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name in PASSING:
            continue
        name = str(path.relative_to(folder))
        if path.parent.name == "results" and path.suffix == ".parquet":
            name, content = "results", _rows(path.parent)
        else:
            content = _lasting(path)
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def _rows(folder):
    """All results of a sweep, each once."""
    import pandas as pd

    frames = [pd.read_parquet(path) for path in folder.glob("*.parquet")]
    rows = pd.concat(frames).drop_duplicates("digest").sort_values("digest")
    return rows.to_csv(index=False).encode()


PASSING = ("checked", "lock")
TIMES = re.compile(
    rb'"[a-z_]*(?:date|wall|seconds_s|evaluation_s|simulat)[a-z_]*": [^,}\n]+'
    rb"|[\d.]+ CPU seconds without[^;]*; [\d.]+ s in|epochs in [\d.]+ \w+|[\d.]+ \S+ per evaluation here"
)


def _lasting(path):
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        # Its facts hold a time of training, and the digest covers them.
        return content[8 + int.from_bytes(content[:8], "little") :]
    if path.suffix in (".json", ".html", ".md"):
        return TIMES.sub(b"", content)
    return content


def warm_up(folder, commands=COMMANDS):
    """Import here what commands import, so that forked ones need not."""
    # As the command line does, before it imports them.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    # Pages say when they were made, to the minute; here all are of one.
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    names = set()
    for command in commands:
        report = folder.parent / "modules"

        def note(report=report):
            import atexit

            del atexit
            real = os._exit

            def leave(code):
                report.write_text("\n".join(sys.modules))
                real(code)

            os._exit = leave

        run(words_of(command, 3), folder, before=note)
        names |= set(report.read_text().split("\n"))
    for name in sorted(names):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    sys.path.insert(0, str(TESTS))


def library():
    """The failing disk, where it is loaded; None elsewhere."""
    own = ctypes.CDLL(None)
    return own if hasattr(own, "fail_at") else None
