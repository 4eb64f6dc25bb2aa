"""Long work: finished pieces in a file from which the next call goes on, and reports
meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from moesim.base.files import write_text
from moesim.base.inputs import load_json, read_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Journal:
    """Finished pieces of long work, one JSON line each, so that work that was
    interrupted goes on where it stopped. A line is on the disk before the next piece
    begins; half a line, the mark of a kill, does not count.

    Args:
        path: the file; made with the first line.
        key: what the pieces were made with.
        refuse: raised where the file is damaged or of another key; None begins anew.

    Attributes:
        lines: those of earlier calls.
    """

    def __init__(
        self, path: Path, key: str, *, refuse: type[Exception] | None = None
    ) -> None:
        self._path = path
        self._key = key
        self.lines: list[Any] = []
        if not path.exists():
            return
        text = read_text(path)
        complete = text[: text.rfind("\n") + 1]
        wrong = ""
        try:
            lines = [load_json(line) for line in complete.splitlines()]
        except ValueError as error:
            wrong = f"damaged: {error}; remove it"
        else:
            if lines[:1] == [{"key": key}]:
                self.lines = lines[1:]
            elif lines:
                wrong = (
                    "expected runs made with the same options, found others; choose"
                    " another --out, or remove it"
                )
        if wrong and refuse is not None:
            raise refuse(f"{path}: {wrong}")
        # What follows must not continue half a line.
        write_text(path, "" if wrong else complete)

    def add(self, line: Any) -> None:
        """Write one line."""
        text = json.dumps(line) + "\n"
        if not self._path.exists() or not self._path.stat().st_size:
            text = json.dumps({"key": self._key}) + "\n" + text
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Remove the file: the work is whole."""
        self._path.unlink(missing_ok=True)


class Every:
    """Calls something at most every half minute.

    Args:
        call: what is called.
    """

    SECONDS = 30.0

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._last_s = time.monotonic()

    def if_due(self) -> None:
        """Call if half a minute has passed."""
        if time.monotonic() - self._last_s >= self.SECONDS:
            self.now()

    def now(self) -> None:
        """Call."""
        self._call()
        self._last_s = time.monotonic()
