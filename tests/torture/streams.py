"""Standard streams that are closed, full, or lose their reader; and results that are
poured into one. A command does its work or says one line; a stream that gets a result
gets nothing else.
"""

import csv
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .commands import faults_of_end
from .places import SHAPE, prepare
from .report import Report
from .subjects import ROOT

LONGEST_S = 60

COMMANDS = (
    "--help",
    "list",
    "config",
    "model olmoe-1b-7b",
    "advise olmoe-1b-7b --gpu RTX3090",
    "replay t.parquet --steps 3 --hw hw.toml --out result",
    "replay t.parquet --policy nope",
    "compare t.parquet --policy all-cpu,greedy --steps 3 --jobs 1 --html result.html",
    "sweep t.parquet --hw hw.toml --steps 3 --jobs 1 --results result",
    "hits t.parquet --cache lru --cache-ratio 0.5 --table result.csv",
    "gap t.parquet --steps 2 --hw hw.toml",
    "results STORE",
    "trace info t.parquet",
    "trace stats t.parquet --out result",
    "trace check t.parquet",
    f"trace import foreign result.parquet --shape {SHAPE}",
    "trace export t.parquet result.csv --to csv",
    "trace synth result.parquet --like t.parquet --tokens 20",
)
ENDS = {
    # name -> how a shell says it
    "stdout closed": '"$@" >&-',
    "stderr closed": '"$@" 2>&-',
    "both closed": '"$@" >&- 2>&-',
    "all closed": '"$@" <&- >&- 2>&-',
    "stdout full": '"$@" >/dev/full',
    "stderr full": '"$@" 2>/dev/full',
    "reader gone": '{ "$@"; echo $? >&3; } 3>code | true; exit $(cat code)',
    "no terminal": '"$@" </dev/null',
}

POURED = {
    # command -> ending of what `PLACE` gets
    "hits t.parquet --cache lru --cache-ratio 0.5 --table PLACE": ".csv",
    "compare t.parquet --policy all-cpu,greedy --steps 3 --jobs 1 --table PLACE": ".csv",
    "compare t.parquet --policy all-cpu,greedy --steps 3 --jobs 1 --perfetto PLACE": ".json",
    "replay t.parquet --steps 3 --perfetto PLACE": ".json",
    "sweep t.parquet --hw hw.toml --steps 3 --jobs 1 --table PLACE": ".csv",
    "trace export t.parquet PLACE --to csv": ".csv",
}
PLACES = {
    "-": '"$@"',
    "/dev/stdout": '"$@"',
    "/proc/self/fd/1": '"$@"',
    "/dev/fd/3": '"$@" 3>&1 >/dev/null',
    "link": 'ln -s /dev/stdout link; "$@"',
}


def attacks():
    """(shell's words, command, ending of what stdout must hold or None)."""
    for (name, shell), words in itertools.product(ENDS.items(), COMMANDS):
        yield name, shell, words, None
    for (place, shell), (words, end) in itertools.product(
        PLACES.items(), POURED.items()
    ):
        yield f"into {place}", shell, words.replace("PLACE", place), end


def judge(name, shell, words, ending, work):
    """Run one command as a shell runs it; what is wrong with its end."""
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-m", "moesim", *words.split()],
        cwd=work,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=LONGEST_S,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    is_shown = not any(word in name for word in ("stderr", "both", "all"))
    # What would be said cannot be where standard error is gone.
    said = err if is_shown or done.returncode != 2 else "somewhere else"
    yield from faults_of_end(
        done.returncode, said, (0, 1, 2) if name == "reader gone" else (0, 2)
    )
    if "Exception ignored" in err:
        yield f"an exception at the end: {err[-200:]!r}"
    left = [path.name for path in work.rglob("*") if path.name.endswith(".part")]
    if left:
        yield f"left {left}"
    if ending == ".csv":
        rows = list(csv.reader(io.StringIO(out)))
        if len(rows) < 2 or len({len(row) for row in rows}) != 1:
            yield f"no table: {out[:200]!r}"
    if ending == ".json":
        try:
            json.loads(out)
        except ValueError:
            yield f"no JSON: {out[:200]!r}"


def run_suite(count, seed=0, only=None):
    """Run `count` attacks in a drawn order."""
    report = Report("streams")
    chosen = [one for one in attacks() if not only or only in f"{one[0]}: {one[2]}"]
    random.Random(seed).shuffle(chosen)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        prepare(source)
        for name, shell, words, ending in chosen[:count]:
            if report.is_over:
                break
            work = Path(folder) / "work"
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(source, work)
            faults = list(judge(name, shell, words, ending, work))
            report.count(name, "fell" if faults else "held")
            for fault in faults:
                report.fail(f"{name}: {words}: {fault}")
    return report
