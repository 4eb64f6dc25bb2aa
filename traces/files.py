"""Files that are either complete or absent: write beside, then rename."""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def part_path(path: Path) -> Path:
    """Return where a file lies until it is complete: the same name with ``.part``
    behind it.
    """
    # In the same folder, for a rename across disks would copy.
    return path.with_name(path.name + ".part")


@contextmanager
def written_beside(path: Path | str) -> Iterator[Path]:
    """Yield a path to write to; it becomes `path` on success and disappears on any
    exception.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    part = part_path(final)

    try:
        yield part
        os.replace(part, final)  # noqa: PTH105 - named as the promise is
    finally:
        part.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Return the digest of a file's bytes, which are read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
