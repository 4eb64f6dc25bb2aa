"""Where commands are attacked: a folder with an older result and what a clean run makes."""

import random
import shutil
from pathlib import Path

from .commands import COMMANDS, LONG_COMMANDS, digests, prepare, run, warm_up, words_of

OLDER, NEWER = 3, 4


class Stage:
    """A folder in which each command has run cleanly once, with two seeds.

    Args:
        folder: an empty one.
        only: the name of a command, or part of the names of several.
        with_long: whether those that take seconds are among them.
    """

    def __init__(self, folder, only=None, *, with_long=False):
        self.work = Path(folder) / "work"
        self.work.mkdir()
        prepare(self.work)
        every = (*COMMANDS, *LONG_COMMANDS) if with_long or only else COMMANDS
        named = [one for one in every if one.name == only]
        self.commands = named or [
            one for one in every if only is None or only in one.name
        ]
        short = [one for one in self.commands if not one.measures]
        warm_up(self.work, short)
        self.seconds = {}
        self._older = {}
        self._digests = {}
        for command in self.commands:
            for seed in (OLDER, NEWER):
                shutil.rmtree(self.work / "out", ignore_errors=True)
                if command.name == "calibrate --from":
                    self._real_run(seed)
                ended = run(words_of(command, seed), self.work)
                assert ended.code == 0, (command.name, ended)
                self._digests[command.name, seed] = digests(self.work / "out")
                self.seconds[command.name] = ended.seconds
                if seed == OLDER:
                    kept = self.work.parent / f"older {command.name}".replace("/", "_")
                    shutil.copytree(self.work / "out", kept)
                    self._older[command.name] = kept

    def _real_run(self, seed):
        """A finished run to learn from."""
        words = f"run tiny --policy greedy --steps 8 --hw two-core-host --out run{seed}"
        assert run(words.split(), self.work).code == 0

    def attacks(self, count, seed, report):
        """Yield a command in turn, dice of its own and the attack's name, until the
        report's time is up.
        """
        for number in range(count):
            if report.is_over:
                return
            command = self.commands[number % len(self.commands)]
            yield command, random.Random(f"{seed} {number}"), f"{number} of seed {seed}"

    def set(self, command, *, with_older):
        """Lay out nothing, or the older result."""
        shutil.rmtree(self.work / "out", ignore_errors=True)
        # A store of one model is what it is, whatever is asked for again.
        if with_older and command.name not in RESUMING:
            shutil.copytree(self._older[command.name], self.work / "out")

    def clean(self, command, seed=NEWER):
        """Digests of what a clean run makes."""
        return self._digests[command.name, seed]

    def faults(self, command, *, with_older, allowed=()):
        """What stands below ``out`` and is neither of the older nor of the newer result.

        Args:
            command: what ran.
            with_older: whether an older result had been there.
            allowed: beginnings of names that may be there as well.
        """
        newer, older = self.clean(command), self.clean(command, OLDER)
        found = digests(self.work / "out")
        if command.measures:
            return self._broken(found, older if with_older else {}, newer, allowed)
        faults = []
        for name, digest in found.items():
            may = {newer.get(name)}
            if with_older and command.name not in RESUMING:
                may.add(older.get(name))
            if digest not in may and not name.startswith(allowed):
                faults.append(f"{name} is no whole file of a clean run")
        if with_older and command.name not in RESUMING:
            faults += [f"{name} is gone" for name in older if name not in found]
        return faults

    def _broken(self, found, older, newer, allowed):
        """What measuring commands left that is neither older nor whole."""
        faults = [f"{name} is gone" for name in older if name not in found]
        for name, digest in found.items():
            if name.startswith(allowed) or digest == older.get(name):
                continue
            if name not in newer:
                faults.append(f"{name} is no result")
            elif not is_whole(self.work / "out" / name):
                faults.append(f"{name} is not whole")
        return faults


def is_whole(path):
    """Whether a result of a measuring command can be read from end to end."""
    from moesim.evidence.validation import report
    from moesim.hwprofiles.profile import load_profile

    try:
        if path.suffix == ".toml":
            load_profile(path)
        elif path.suffix == ".json":
            report.load(path)
        elif path.suffix == ".html":
            return path.read_text().rstrip().endswith("</html>")
    except ValueError:
        return False
    return path.stat().st_size > 0


RESUMING = ("store build", "record", "sweep", "sweep of two", "search", "reproduce")
"""These go on with what an interrupted one left."""

UNFINISHED = {
    "store build": ("store/experts.bin", "store/experts.journal"),
    "record": ("r.parquet.parts",),
    "sweep": ("results",),
    "sweep of two": ("results",),
    "search": ("results",),
    "validate": ("report/runs.jsonl",),
    "reproduce": ("papers/",),
}
"""What those leave for it."""
