"""Lines of foreign text with a field too many or too few, and with other separators.

A strict reader refuses them. What it accepts must be what the file said before: no value
may move into another column, and none may get lost.
"""

import random
import re
import tempfile
from pathlib import Path

from .mutations import judged
from .report import Report
from .subjects import subjects

TEXT = (
    "llama_cpp", "megatron", "route_trace", "columns_csv", "lattice", "per_token",
    "imp",
)  # fmt: skip
SEPARATORS = b",;:|\t /=[](){}-"


def changed(data, dice):
    """One separator doubled, removed, exchanged or brought in, or a field doubled or
    removed; in one line of the file.
    """
    lines = data.split(b"\n")
    at = dice.choice([number for number, line in enumerate(lines) if line.strip()])
    line = lines[at]
    places = [found.start() for found in re.finditer(rb"[,;:|\t \[\](){}]", line)]
    if not places:
        places = [dice.randrange(len(line))]
    place = dice.choice(places)
    other = bytes([dice.choice(SEPARATORS)])
    kind = dice.randrange(6)
    if kind == 0:
        line = line[:place] + line[place : place + 1] + line[place:]
    elif kind == 1:
        line = line[:place] + line[place + 1 :]
    elif kind == 2:
        line = line[:place] + other + line[place + 1 :]
    elif kind == 3:
        line = line[:place] + other + line[place:]
    else:
        stop = min((one for one in places if one > place), default=len(line))
        field = line[place:stop]
        line = line[:stop] + field * (kind == 4) + line[stop:]
        if kind == 5:
            line = line[:place] + line[stop:]
    lines[at] = line
    return b"\n".join(lines)


def run_suite(count, seed, only=None):
    """Change as many lines of each layout."""
    report = Report("separators of foreign text")
    chosen = [one for one in subjects() if one.name.removeprefix("foreign ") in TEXT]
    chosen = [one for one in chosen if only is None or only in one.name]
    for subject in chosen:
        with tempfile.TemporaryDirectory() as name:
            path = subject.make(Path(name), 0)
            data = path.read_bytes()
            expected = subject.read(path)
            strict = subject._replace(is_sealed=True)
            for number in range(-(-count // len(chosen))):
                if report.is_over:
                    break
                dice = random.Random(f"{seed} {subject.name} {number}")
                mutant = changed(data, dice)
                path.write_bytes(mutant)
                outcome = judged(strict, path, expected, is_same=mutant == data)
                report.count(f"{subject.name}:", outcome.partition(" ")[0])
                if outcome.startswith("BROKE"):
                    lines = zip(data.split(b"\n"), mutant.split(b"\n"), strict=False)
                    pair = next(((a[:90], b[:90]) for a, b in lines if a != b), None)
                    report.fail(
                        f"{subject.name}, {number} of seed {seed}: {outcome}: {pair}"
                    )
    return report
