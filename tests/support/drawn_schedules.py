"""Which schedules a claim about the device is tried with: so many, for so long, and the
next time those that follow.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class DrawnSchedules:
    """Counts seeds upwards from where the claim came to in earlier runs.

    Args:
        count: seeds at most.
        seconds: after which no further seed is given; None gives all of them.
        done: file that holds, by claim, how many were given; None begins at 0.
    """

    def __init__(self, count: int, seconds: float | None, done: Path | None) -> None:
        self.count = count
        self._seconds = seconds
        self._done = done
        self._first = 0
        self._next = 0

    def of(self, claim: str) -> Self:
        """Begin where an earlier run of the claim ended."""
        self._first = self._next = self._noted().get(claim, 0)
        return self

    def seeds(self, every: int = 1) -> Iterator[int]:
        """Yield seeds, every so-manieth of them, at least one."""
        begin_s = time.monotonic()
        for seed in range(self._first, self._first + self.count, every):
            # Counted before it is tried: one that never ends is not tried again.
            self._next = seed + every
            yield seed
            if self._seconds is None:
                continue
            if time.monotonic() - begin_s > self._seconds:
                return

    def note(self, claim: str) -> None:
        """Note how far the claim has come."""
        if self._done is None or self._next == self._first:
            return
        self._done.parent.mkdir(parents=True, exist_ok=True)
        noted = self._noted() | {claim: self._next}
        part = self._done.with_suffix(".part")
        part.write_text(json.dumps(noted, indent=1), encoding="utf-8")
        part.replace(self._done)

    def _noted(self) -> dict[str, int]:
        if self._done is None or not self._done.is_file():
            return {}
        return dict(json.loads(self._done.read_text(encoding="utf-8")))
