"""Files that are either complete or absent: written beside, synced, then renamed.

Everything that moesim writes goes through this module. A link is followed, and what it
points to is replaced. Standard output (``-``) gets all bytes at the end.

A file in progress has an unpredictable name. What a killed process left of one is
removed by whoever writes in that folder a week later.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from moesim.base.inputs import check_file_name, load_json, read_text

try:
    import fcntl

    _HAS_LOCKS = True
except ImportError:
    # Windows.
    _HAS_LOCKS = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class Closing(ABC):
    """Something that a ``with`` block closes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds."""

    def __enter__(self) -> Self:
        """Use it within the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


STDOUT: Final = Path("-")
"""Stands for standard output where a file is asked for."""

_IN_PROGRESS: Final = ".*.moesim-*.part"
_LEFT_AFTER_S: Final = 7 * 24 * 3600.0
# File systems allow 255 bytes; what stands behind the stem needs some 30 of them.
_LONGEST_STEM: Final = 200

_BINARY: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class NewFile:
    """A file in progress: written at `path`, it gets its name by `commit`.

    Args:
        final: the name to be; what stands there stays untouched until `commit`.

    Attributes:
        path: where to write; in the same folder, for a rename across disks would copy.

    Raises:
        OSError: the folder cannot be made or written, or something that is no file
            stands at `final`.
    """

    def __init__(self, final: Path | str) -> None:
        self.final = Path(final)
        check_file_name(self.final)
        self._target = destination(self.final)
        if self._target.is_dir():
            raise IsADirectoryError(
                errno.EISDIR,
                "expected a place for a file, found a folder",
                str(self.final),
            )
        beside = self._target
        if is_stdout(self.final):
            beside = Path(tempfile.gettempdir()) / "stream"
        beside.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(beside.parent)
        stem = os.fsdecode(os.fsencode(beside.name)[:_LONGEST_STEM])
        name = f".{stem}.moesim-{secrets.token_hex(6)}.part"
        self.path = beside.with_name(name)
        with _named(beside, self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY
            os.close(os.open(self.path, flags, 0o666))

    def errors_named(self) -> AbstractContextManager[None]:
        """Let errors of a block of writes name `final`, which users know."""
        return _named(self.final, self.path)

    def commit(self) -> None:
        """Bring the bytes to the disk, then give them their name."""
        with self.errors_named():
            if is_stdout(self.final):
                _pour(self.path)
            else:
                _sync(self.path)
                os.replace(self.path, self._target)  # noqa: PTH105 - as promised
                _sync_folder(self._target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove what is not committed; harmless afterwards."""
        # What made the write fail may make this fail; the next writer looks again.
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


@contextmanager
def written_beside(path: Path | str) -> Iterator[Path]:
    """Yield a path to write to; it becomes `path` on success and disappears on any
    exception.

    Raises:
        OSError: a write failed; it names `path`, not the file in progress.
    """
    new = NewFile(path)
    try:
        with new.errors_named():
            yield new.path
        new.commit()
    finally:
        new.discard()


def is_stdout(path: Path) -> bool:
    """Tell whether a result that is written there goes to standard output."""
    return path == STDOUT


def destination(path: Path) -> Path:
    """Where a result goes that is to be written at `path`: links are followed.

    Raises:
        OSError: a loop of links, or something that is no file.
    """
    if is_stdout(path):
        return path
    target = Path(os.path.realpath(path))
    # What is still a link leads back to itself.
    if target.is_symlink():
        raise OSError(errno.ELOOP, "expected a file, found a loop of links", str(path))
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    # A pipe that nobody reads would keep us for ever.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(
            errno.EINVAL,
            "expected a file, found a pipe or a device; choose another place, or - for"
            " standard output",
            str(path),
        )
    return target


def write_text(path: Path | str, text: str) -> None:
    """Write a text file in UTF-8, or none.

    Bytes of a path that are no UTF-8 appear as escapes.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path | str, content: bytes | memoryview) -> None:
    """Write a file from memory, or none."""
    with written_beside(path) as part, part.open("wb") as file:
        file.write(content)


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A folder for the time of a block, as a context manager.

    Args:
        inside: folder to make it in; the system's for temporary files where None.
    """

    def __init__(self, inside: Path | str | None = None) -> None:
        super().__init__(".part", ".folder.moesim-", inside, ignore_cleanup_errors=True)

    def __enter__(self) -> Path:  # type: ignore[override]
        """Return its path."""
        return Path(self.name)


def remove_leftovers(folder: Path, older_s: float = _LEFT_AFTER_S) -> None:
    """Remove the files and folders in progress that killed processes left here.

    Args:
        folder: where to look.
        older_s: seconds since they were last written.
    """
    for path in folder.glob(_IN_PROGRESS):
        # Another user's, or gone in the meantime: not ours to remove.
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime >= older_s:
                remove: Any = shutil.rmtree if path.is_dir() else Path.unlink
                remove(path)


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder until it is closed.

    Returns:
        Whether the lock is ours; None where there are no locks: on Windows and on some
        network file systems.
    """
    if not _HAS_LOCKS:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def open_own(path: Path, flags: int) -> int:
    """Open a file whose name is known beforehand, such as a lock or a log.

    Args:
        path: of the file, which is made where it is not there.
        flags: of `os.open`, without those that make or truncate.

    Returns:
        A descriptor.
    """
    return os.open(path, flags | os.O_CREAT | _BINARY, 0o666)


def user_folder(kind: str) -> Path:
    """The folder of moesim among those that a user has of one kind, which may be
    missing.

    Args:
        kind: ``cache`` for what can be made again, or ``config``.

    Raises:
        OSError: this user has none.
    """
    variable = f"XDG_{kind.upper()}_HOME"
    named = os.environ.get(variable)
    if named:
        return Path(named) / "moesim"
    try:
        return Path.home() / f".{kind}" / "moesim"
    except RuntimeError:
        reason = f"this user has no home folder; set {variable}"
        raise OSError(errno.ENOENT, reason, "~") from None


def sha256(path: Path) -> str:
    """Return the digest of a file's bytes, which are read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pour(part: Path) -> None:
    """Write the bytes of a finished file to standard output, if there is one."""
    if sys.__stdout__ is None:
        return
    with part.open("rb") as source:
        # What was printed before comes first.
        sys.__stdout__.flush()
        shutil.copyfileobj(source, sys.__stdout__.buffer)
        sys.__stdout__.flush()


@contextmanager
def _named(final: Path, part: Path | None = None) -> Iterator[None]:
    """Let errors of the block name the file that users know."""
    try:
        yield
    except OSError as error:
        is_ours = error.filename is None or str(error.filename) == str(part)
        if not (is_ours and error.errno):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(final)) from None


def _sync(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDWR | _BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on the disk, where the system can."""
    # The file is complete and has its name; some file systems refuse this.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- long work -------------------------------------------------------------------------


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
