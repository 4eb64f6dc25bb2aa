"""Mutated inputs: whatever is read, the answer is one line, or what the file says.

No traceback, no hang over ten seconds, under one GB, no file of ours silently wrong.
"""

import random
import tempfile
import warnings
from pathlib import Path

from moesim.cli.errors import message_for_users

from .injuries import injured
from .report import HungError, Report, last_lines, limited, peak_bytes
from .subjects import subjects

LONGEST_S = 10.0
MOST_BYTES = 1 << 30


def attack(subject, count, seed, report):
    """Read mutated files of one kind.

    Args:
        subject: the kind.
        count: mutants.
        seed: decides them all.
        report: takes the outcomes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, other_folder = Path(name, "a"), Path(name, "b")
        folder.mkdir()
        other_folder.mkdir()
        path = subject.make(folder, 0)
        other = subject.make(other_folder, 1).read_bytes()
        data = path.read_bytes()
        expected = subject.read(path)

        for number in range(count):
            if report.is_over:
                return
            dice = random.Random(f"{seed} {subject.name} {number}")
            mutant = subject.seal(injured(data, dice, other))
            # A new file every time, as one that was copied.
            path.unlink()
            path.write_bytes(mutant)
            outcome = judged(subject, path, expected, is_same=mutant == data)
            report.count(subject.name + ":", outcome.partition(" ")[0])
            if outcome.startswith("BROKE"):
                report.fail(
                    f"{subject.name}, mutant {number} of seed {seed}: {outcome}"
                )


def judged(subject, path, expected, *, is_same):  # noqa: PLR0911 - one outcome each
    """Read a mutant; say what happened in a word, or ``BROKE`` and how."""
    try:
        with limited(LONGEST_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = subject.read(path)
    except HungError:
        return "BROKE: hung"
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        message = message_for_users(error)
        if message is None:
            return f"BROKE: {last_lines(error)}"
        if "\n" in message:
            return f"BROKE: several lines: {message!r}"
        return "refused"

    if found == expected:
        return "same"
    # What stands in somebody's text is what it says; a seal says that it is ours.
    if subject.is_sealed and not is_same:
        return "BROKE: other content, silently"
    return "read"


def run_suite(count, seed, only=None):
    """Attack every kind of file, the same number of times each."""
    report = Report("mutated inputs")
    chosen = [one for one in subjects() if only is None or only in one.name]
    for subject in chosen:
        attack(subject, -(-count // len(chosen)), seed, report)

    # Torch alone takes much of it.
    if peak_bytes() > MOST_BYTES:
        report.fail(f"peak memory {peak_bytes() >> 20} MiB")
    return report
