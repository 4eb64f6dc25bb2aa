"""What a suite tried, and what broke."""

from __future__ import annotations

import resource
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

MOST_SHOWN = 400


@dataclass
class Report:
    """Counts of one suite.

    Attributes:
        name: of the suite.
        counts: how often each outcome was met, by subject and outcome.
        failures: one text per failure, which names the seed that repeats it.
        said: refusals, for a reader to judge.
        longest_s: seconds that every suite of this process may take.
    """

    name: str
    counts: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    longest_s: ClassVar[float] = float("inf")

    @property
    def is_over(self):
        """Whether the time of a suite is up; it then reports what it has tried."""
        return time.monotonic() - self.began_s > self.longest_s

    def count(self, *what):
        self.counts[" ".join(map(str, what))] += 1

    def fail(self, text):
        self.failures.append(text)

    @property
    def tried(self):
        return sum(self.counts.values())

    def show(self, file=sys.stdout):
        seconds = time.monotonic() - self.began_s
        print(
            f"{self.name}: {self.tried:,} tried, {len(self.failures)} failed,"
            f" {seconds:.0f} s",
            file=file,
        )
        for what, count in sorted(self.counts.items()):
            print(f"    {count:8,}  {what}", file=file)
        for text in self.said[:MOST_SHOWN]:
            print(f"    said {text}", file=file)
        for text in self.failures[:MOST_SHOWN]:
            print(f"    FAILED {text}", file=file, flush=True)


class HungError(BaseException):
    """A reader took longer than it may; no `Exception`, so that nobody catches it."""


@contextmanager
def limited(seconds):
    """Raise `HungError` in a block that takes too long."""

    def stop(_number, _frame):
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_bytes():
    """Memory that this process ever held at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def last_lines(error, count=3):
    """Where an exception came from, for a failure's text."""
    frames = traceback.extract_tb(error.__traceback__)[-count:]
    places = " > ".join(
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames
    )
    return f"{type(error).__name__}: {str(error)[:160]!r} at {places}"
