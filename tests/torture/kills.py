"""``kill -9`` at random moments: whatever stands afterwards is whole, and the next run
gives the same bytes and leaves nothing.
"""

import os
import signal
import tempfile
import time

from .commands import digests, finished, forked, run, words_of
from .report import Report
from .stage import NEWER, UNFINISHED, Stage


def run_suite(count, seed, only=None):
    """Kill the processes of one command per attack."""
    report = Report("kills")
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(folder, only, with_long=True)
        for command, dice, name in stage.attacks(count, seed, report):
            attack(stage, command, dice, report, name)
    return report


def attack(stage, command, dice, report, name):
    """Kill one command, look, and run it again."""
    with_older = dice.random() < 0.5
    stage.set(command, with_older=with_older)
    after_s = dice.uniform(0.02, 1.1 * stage.seconds[command.name])

    began_s = time.monotonic()
    number = forked(words_of(command, NEWER), stage.work)
    time.sleep(after_s)
    # Its workers too, as a machine that loses power ends them.
    os.killpg(number, signal.SIGKILL)
    ended = finished(number, stage.work, began_s)

    report.count(f"{command.name}:", "killed" if ended.code < 0 else "had ended")
    where = f"{command.name}, killed after {after_s:.3f} s, attack {name}"
    # Hidden files in progress may be left; they bear no result's name.
    allowed = UNFINISHED.get(command.name, ())
    for fault in stage.faults(command, with_older=with_older, allowed=allowed):
        if ".part " not in fault and ".part/" not in fault:
            report.fail(f"{where}: {fault}")

    # A calibration takes minutes whatever was left; every fifth is enough.
    if command.name == "calibrate" and dice.random() < 0.8:
        return
    again = run(words_of(command, NEWER), stage.work)
    found = digests(stage.work / "out")
    if again.code != 0:
        report.fail(f"{where}: the next run fails: {again.err[-300:]!r}")
    elif command.measures:
        for fault in stage.faults(command, with_older=False):
            report.fail(f"{where}: the next run leaves: {fault}")
    elif found != stage.clean(command):
        names = {
            one
            for one in found | stage.clean(command)
            if found.get(one) != stage.clean(command).get(one)
        }
        report.fail(f"{where}: the next run gives other files: {sorted(names)}")
