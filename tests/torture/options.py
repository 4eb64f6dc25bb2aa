"""Options that are drawn two by two: an answer, or one line; and none without effect.

What a command prints for two options together must differ from what it prints without
one of them, or a note must say that the option changes nothing.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from pathlib import Path

from .commands import run
from .places import MOST_LINE_CHARACTERS, prepare
from .report import Report

VALUES = {
    "--policy": ("on-demand", "fiddler", "daop", "nope", "greedy:x=1"),
    "--cache": ("lfu", "belady", "none", "lfu:decay=2"),
    "--prefetch": ("next-gate", "random", "clairvoyant"),
    "--routing": ("cache-prior", "nope"),
    "--hw": ("rtx4060ti", "hw.toml", "nothing.toml", "two-core-host"),
    "--cache-ratio": ("0", "0.3", "1", "1.5"),
    "--slots-per-layer": ("0", "3", "99"),
    "--gpu-memory": ("1GiB", "600MiB", "0", "8"),
    "--context-tokens": ("0", "100", "99999999999999"),
    "--host-memory": ("1MiB", "1GiB"),
    "--host-cache": ("lfu", "arc"),
    "--cache-scope": ("global", "row"),
    "--staging": ("1", "8", "0"),
    "--prefetch-budget": ("1KiB", "1GiB"),
    "--gpu-split": ("experts", "rows"),
    "--batch": ("2", "1000", "0"),
    "--steps": ("1", "5", "0"),
    "--micro-batch": ("1", "3"),
    "--draft-tokens": ("1", "2"),
    "--acceptance": ("0.1", "2"),
    "--seed": ("1", "-1"),
    "--warm": ("warm.parquet", "a.txt"),
    "--noise-seed": ("1",),
    "--engine": ("simpy", "compiled"),
    "--arrivals": ("a.txt", "poisson:2", "poisson:0"),
    "--slo": ("ttft=1", "ttft=.5,ttft=.1"),
    "--out": ("result", "t.parquet"),
    "--perfetto": ("p.json", "p.png"),
    "--cache-only": (None,),
}
BASE = "replay t.parquet --json"
TIMES = re.compile(r'"(wall_s|simulated_s|date|version|git_commit)": [^,}]+')
SILENT = ("--seed", "--engine", "--out", "--perfetto", "--hw", "--warm")
"""What may leave figures as they are without a word: where results go, what equals a
default, and what answers the same in another way.
"""


def run_suite(count, seed, only=None):
    """Draw pairs."""
    report = Report("options")
    dice = random.Random(seed)
    names = [name for name in VALUES if not only or only in name]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        prepare(source)
        for number in range(count):
            if report.is_over:
                break
            first = dice.choice(names)
            second = dice.choice([name for name in VALUES if name != first])
            chosen = {name: dice.choice(VALUES[name]) for name in (first, second)}
            attack(chosen, source, Path(folder) / "work", report, f"{seed}/{number}")
    return report


def attack(chosen, source, work, report, name):
    """Run with both options, and where that works without each of them."""
    both = _ended(chosen, source, work)
    where = f"{name}: {_words(chosen)}"
    lines = [line for line in both.err.splitlines() if not line.startswith("note: ")]
    report.count("pair:", "answered" if both.code == 0 else "refused")
    if both.code not in (0, 2):
        report.fail(f"{where}: exit code {both.code}: {both.err[-300:]!r}")
        return
    if both.code == 2:
        if len(lines) != 1 or len(lines[0]) > MOST_LINE_CHARACTERS:
            report.fail(f"{where}: not one line: {both.err[-300:]!r}")
        return
    for option in chosen:
        rest = {key: value for key, value in chosen.items() if key != option}
        alone = _ended(rest, source, work)
        is_same = alone.code == 0 and _figures(alone.out) == _figures(both.out)
        is_told = f"{option} changes nothing" in both.err
        if is_same and not is_told and option not in SILENT:
            report.fail(f"{where}: {option} changes nothing, without a word")


def _ended(chosen, source, work):
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    return run([*BASE.split(), *_words(chosen)], work)


def _words(chosen):
    return [word for pair in chosen.items() for word in pair if word is not None]


def _figures(text):
    """What a run came to, without what merely repeats its options."""
    answer = json.loads(text)
    answer.pop("config", None)
    return TIMES.sub("", json.dumps(answer, sort_keys=True))
