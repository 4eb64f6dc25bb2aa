"""A parsed file, kept from one call to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class ParseCache:
    """Keeps what one file parsed to, so that `provenance` and `read` share the work.

    Args:
        parse: reads a file; its result is kept until another file is asked for.
    """

    def __init__(self, parse: Callable[[Path], Any]) -> None:
        self._parse = parse
        self._entry: tuple[tuple[Path, int, int], Any] | None = None

    def get(self, path: Path) -> Any:
        """Return what the file holds, and keep it for the next call."""
        status = path.stat()
        # Size and time too: the same name may hold another file by now.
        key = (path, status.st_size, status.st_mtime_ns)

        if self._entry is None or self._entry[0] != key:
            self._entry = (key, self._parse(path))

        return self._entry[1]

    def pop(self, path: Path) -> Any:
        """Return what the file holds, and keep it no longer."""
        value = self.get(path)
        self._entry = None
        return value
