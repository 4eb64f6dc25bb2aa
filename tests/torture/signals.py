"""SIGINT and SIGTERM at random moments, once or several times: one line, exit code 130
or 143, within two seconds, nothing left, no children.
"""

import os
import signal
import tempfile
import time

from .commands import finished, forked, words_of
from .report import Report
from .stage import NEWER, UNFINISHED, Stage

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
LONGEST_S = 2.0


def run_suite(count, seed, only=None, longest_s=LONGEST_S):
    """Interrupt one process per attack."""
    report = Report("signals")
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(folder, only)
        for command, dice, name in stage.attacks(count, seed, report):
            attack(stage, command, dice, report, name, longest_s)
    return report


def attack(stage, command, dice, report, name, longest_s):
    """Interrupt one command once, twice or three times."""
    stage.set(command, with_older=False)
    first = dice.choice((signal.SIGINT, signal.SIGTERM))
    after_s = dice.uniform(0.05, stage.seconds[command.name])
    number = forked(words_of(command, NEWER), stage.work)
    time.sleep(after_s)

    began_s = time.monotonic()
    for turn in range(dice.choice((1, 1, 2, 3))):
        if turn:
            time.sleep(dice.uniform(0.0, 0.1))
        os.kill(number, first)
    ended = finished(number, stage.work, began_s)

    where = f"{command.name}, {first.name} after {after_s:.3f} s, attack {name}"
    lines = ended.err.strip().splitlines()
    # A recording says what it keeps, and how to go on.
    lines = [line for line in lines if "--resume goes on" not in line]
    if ended.code == 0:
        # It had ended, or came too late to be noticed.
        report.count(f"{command.name}:", "had ended")
        return
    report.count(f"{command.name}:", first.name)
    if ended.code != CODES[first] or len(lines) != 1:
        report.fail(f"{where}: exit code {ended.code}: {ended.err[-300:]!r}")
    if ended.seconds > longest_s:
        report.fail(f"{where}: ended after {ended.seconds:.1f} s")
    allowed = UNFINISHED.get(command.name, ())
    for fault in stage.faults(command, with_older=False, allowed=allowed):
        report.fail(f"{where}: {fault}")
