"""Machine code on disk: in the user's own cache folder, found by digest.

Whoever could write there could make others run anything, so a folder or file that
belongs to somebody else, or that others may write, is not used. What is damaged is made
anew.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.base.files import user_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER_VARIABLE = "MOESIM_MACHINE_CODE"
"""Environment variable that names another folder."""

_SUM_BYTES = 32


@cache
def folder() -> Path | None:
    """The folder; None where there is no safe one, so that nothing is kept."""
    named = os.environ.get(FOLDER_VARIABLE)
    local = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else None
    try:
        if named:
            place = Path(named)
        else:
            place = Path(local) / "moesim" if local else user_folder("cache")
        place /= "machine-code"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        return place if _is_own(place) else None
    except OSError:
        return None


def read(digest: str) -> bytes | None:
    """What was kept under a digest; None if nothing, or nothing that can be trusted."""
    place = folder()
    if place is None:
        return None
    file = place / digest
    try:
        if not _is_own(file):
            return None
        content = file.read_bytes()
    except OSError:
        return None
    code = content[_SUM_BYTES:]
    if hashlib.sha256(code).digest() != content[:_SUM_BYTES]:
        return None
    return code


def write(digest: str, code: bytes) -> None:
    """Keep something under a digest, if it can be kept."""
    place = folder()
    if place is None:
        return
    # A full disk, or one that must not be written: it is made again next time.
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=place)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(name).replace(place / digest)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def noted(name: str) -> bool:
    """Note that something has happened; whether it had been noted before."""
    place = folder()
    if place is None:
        return False
    try:
        (place / name).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def alone(digest: str) -> Iterator[None]:
    """Wait until no other process makes what belongs to a digest."""
    place = folder()
    try:
        import fcntl  # noqa: PLC0415 - not on every system
    except ImportError:
        place = None
    if place is None:
        yield
        return
    try:
        file = (place / f"{digest[:2]}.lock").open("w")
    except OSError:
        yield
        return
    with file:
        # Where locks do not work, two processes may do the same work.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_own(place: Path) -> bool:
    """Whether nobody else can have written a file or folder."""
    user = getattr(os, "getuid", None)  # Windows has none, and folders of one's own
    if user is None:
        return True
    about = place.lstat()
    if stat.S_ISLNK(about.st_mode) or about.st_uid != user():
        return False
    return not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
