"""Commands run by somebody who owns nothing: not the installation, not his home. Each
works or says one line, and no planted module runs.

Root alone can become somebody else; another user gets an empty report.
"""

import contextlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .commands import faults_of_end, lines_of
from .places import SHAPE, prepare
from .report import Report
from .subjects import ROOT

NOBODY, UNKNOWN = 65_534, 54_321
LONGEST_S = 600

COMMANDS = (
    "list", "config", "model olmoe-1b-7b", "advise olmoe-1b-7b --gpu RTX3090",
    "replay t.parquet --steps 3 --out result",
    "compare t.parquet --policy all-cpu,greedy --steps 3 --jobs 2 --html result.html",
    "sweep t.parquet --hw hw.toml --steps 3 --results result",
    "search t.parquet --hw hw.toml --steps 2 --trials 2 --policy greedy --over cache_ratio=0.1:0.9 --results result",
    "results STORE", "hits t.parquet --cache lru --png result.png",
    "gap t.parquet --steps 2 --hw hw.toml",
    "sensitivity t.parquet --hw hw.toml --steps 2 --policy greedy+lru,all-cpu",
    "trace info t.parquet", "trace stats t.parquet --html result.html",
    "trace check t.parquet", f"trace import foreign result.parquet --shape {SHAPE}",
    "trace export t.parquet result.csv --to csv",
    "trace synth result.parquet --like t.parquet --tokens 20",
    "trace predict t.parquet result.parquet --recall 0.8",
    "trace widths t.parquet result.parquet --bits 4,8",
    "train-cache t.parquet --out result --hidden 8 --epochs 1",
    "train-tiny --out result --minutes 0.01",
    "store build tiny --out result",
    "record result.parquet --prompts p.txt --new-tokens 1",
    "run t.parquet --steps 2 --hw two-core-host", "run tiny --steps 2",
    "quality --tokens 64 --cache-ratio 0.5",
    "doctor", "profile result.toml --quick",
    "calibrate result.toml --hw two-core-host --minutes 0.05 --quick",
    "validate tiny --hw two-core-host --policy on-demand+lru --cache-ratio 0.5 --batch 1 --steps 2 --repetitions 1 --shape olmoe-1b-7b/64 --out result",
    "verify --minutes 0.1 --out result",
    "reproduce --list", "reproduce --all --paper DAOP --jobs 1 --out result",
)  # fmt: skip

PLANTED = """
import os
open({mark!r}, "a").write(__name__ + os.linesep)
"""
MODULES = (
    "moesim", "numpy", "simpy", "typer", "sitecustomize", "usercustomize", "json",
)  # fmt: skip


def _somebody(source, folder, number=NOBODY):
    """A folder with what the commands read, which belongs to a user."""
    shutil.copytree(source, folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, number, number)


def _home(folder, mode):
    home = folder.with_name("home")
    home.mkdir()
    home.chmod(mode)
    return home


def read_only_home(folder):
    """Nothing can be written at home."""
    return {"HOME": str(_home(folder, 0o555))}


def no_home(folder):
    """A user whom the system does not know."""
    del folder
    return {"HOME": None}


def planted_modules(folder):
    """Modules with well-known names lie in the current folder."""
    for name in MODULES:
        text = PLANTED.format(mark=str(folder.with_name("mark")))
        (folder / f"{name}.py").write_text(text)
    return {"HOME": str(_home(folder, 0o777))}


CONDITIONS = {
    make.__name__.replace("_", " "): make
    for make in (
        read_only_home,
        no_home,
        planted_modules,
    )
}


def interpreter():
    """Words that start Python as any user can, and the folders of its modules; None
    where only this user can.
    """
    if os.geteuid():
        return None
    folders = [str(ROOT), *(path for path in sys.path if "site-packages" in path)]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for program in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [program, "-c", "import numpy"],
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                cwd="/",
                env={"PYTHONPATH": os.pathsep.join(folders)},
                capture_output=True,
                check=True,
            )
            return program, os.pathsep.join(folders)
    return None


def judge(words, variables, number, started, work):
    """Run one command as somebody; what is wrong with its end."""
    program, folders = started
    # As the installed program: the current folder is no place of modules.
    done = subprocess.run(
        [program, "-P", "-m", "moesim", *words.split()],
        user=number,
        group=number,
        extra_groups=[],
        cwd=work,
        env={
            name: value
            for name, value in {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": folders,
                "PYTHONDONTWRITEBYTECODE": "1",
                **variables,
            }.items()
            if value is not None
        },
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    lines = lines_of(done.stderr)
    # Two say by their code that what they found is not as it should be.
    says = words.startswith(("doctor", "verify"))
    codes = (0, 1, 2, 3) if says else (0, 2)
    yield from faults_of_end(done.returncode, done.stderr, codes)
    if done.returncode == 0 and lines and not _is_progress(lines):
        yield f"besides the answer: {done.stderr[-300:]!r}"
    mark = work.with_name("mark")
    if mark.exists():
        yield f"ran what was planted: {mark.read_text()!r}"
    yield f"={done.returncode} {lines[-1] if done.returncode == 2 else ''}"


def _is_progress(lines):
    return all(re.search("left|%| done$", line) for line in lines)


def run_suite(count, seed=0, only=None):
    """Run `count` commands, drawn from all under all conditions."""
    report = Report("users")
    started = interpreter()
    if started is None:
        return report
    chosen = [
        one
        for one in itertools.product(CONDITIONS, COMMANDS)
        if not only or only in ": ".join(one)
    ]
    random.Random(seed).shuffle(chosen)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        prepare(source)
        _try(chosen[:count], source, started, report)
    return report


def _try(chosen, source, started, report):
    """Run each command under its condition."""
    for name, words in chosen:
        if report.is_over:
            break
        number = UNKNOWN if name == "no home" else NOBODY
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            work = Path(folder) / "work"
            _somebody(source, work, number)
            variables = CONDITIONS[name](work)
            try:
                *faults, end = judge(words, variables, number, started, work)
            except subprocess.TimeoutExpired:
                report.count(f"{name}: worked for longer than {LONGEST_S} s:", words)
                continue
            report.count(name, "fell" if faults else f"ended {end[1:2]}")
            report.said += [f"{name}: {words}: {end[3:]}"] if end[3:] else []
            for fault in faults:
                report.fail(f"{name}: {words}: {fault}")
            shutil.rmtree(work, ignore_errors=True)
