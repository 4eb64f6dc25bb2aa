"""Errors of the file system at every call: full disks, quotas, broken disks.

A command that cannot write says so in one line, leaves nothing of its own, and does not
touch an older result.
"""

import errno
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .commands import library, run, words_of
from .report import Report
from .stage import NEWER, RESUMING, UNFINISHED, Stage

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
SOURCE = Path(__file__).with_name("failing.c")


def _inject(count, seed, only=None):
    """Inject one error per run."""
    report = Report("write errors")
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(folder, only)
        for command, dice, name in stage.attacks(count, seed, report):
            attack(stage, command, dice, report, name)
    return report


def attack(stage, command, dice, report, name):
    """Let one call of one command fail."""
    with_older = dice.random() < 0.5
    error = dice.choice(ERRORS)
    # Most calls are writes of rows; the first and the last ones are of other kinds.
    nth = dice.choice((dice.randrange(6), dice.randrange(40), dice.randrange(400)))
    stays = error != errno.EIO and dice.random() < 0.7
    stage.set(command, with_older=with_older)

    def arm():
        below = str(stage.work / "out").encode()
        library().fail_at(below, nth, error, int(stays))

    ended = run(words_of(command, NEWER), stage.work, before=arm)
    lines = ended.err.strip().splitlines()
    outcome = "done" if ended.code == 0 else "refused"
    report.count(f"{command.name}:", outcome)
    where = f"{command.name}, {errno.errorcode[error]} at call {nth}, attack {name}"
    if ended.code not in (0, 2) or (ended.code == 2 and len(lines) != 1):
        report.fail(f"{where}: exit code {ended.code}: {ended.err[-300:]!r}")
        return
    if ended.code == 0 and stage.faults(command, with_older=False):
        report.fail(f"{where}: done, but {stage.faults(command, with_older=False)}")
        return
    allowed = UNFINISHED.get(command.name, ())
    for fault in stage.faults(command, with_older=with_older, allowed=allowed):
        report.fail(f"{where}: {fault}")
    left = [path.name for path in (stage.work / "out").rglob(".*.part")]
    if left:
        report.fail(f"{where}: left {left}")
    if ended.code == 2 and command.name in RESUMING:
        again = run(words_of(command, NEWER), stage.work)
        if again.code or stage.faults(command, with_older=False):
            report.fail(f"{where}: does not go on: {again.err[-200:]!r}")


def run_suite(count, seed, only=None):
    """Run the suite in a process with the failing disk."""
    if library() is not None:
        return _inject(count, seed, only)

    compiler = shutil.which("cc") or shutil.which("gcc")
    report = Report("write errors")
    if compiler is None or sys.platform != "linux":
        report.count("left out: it needs Linux and a C compiler")
        return report
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "failing.so"
        flags = ["-shared", "-fPIC", "-O1", "-w"]
        command = [compiler, *flags, SOURCE, "-o", built, "-ldl"]
        subprocess.run(command, check=True)
        words = [sys.executable, "-m", __package__, "write_errors"]
        words += ["--count", str(count), "--seed", str(seed)]
        words += [] if only is None else ["--only", only]
        if math.isfinite(report.longest_s):
            words += ["--minutes", str(report.longest_s / 60)]
        environment = {**os.environ, "LD_PRELOAD": str(built)}
        done = subprocess.run(words, env=environment, check=False)
    # The other process has shown its report.
    if done.returncode:
        report.fail("see above")
    return report
