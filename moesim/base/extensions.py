"""How a checkout runs: with links to its rooms; compiled or not.

Either all modules that have C types beside them run compiled, or none does.

An extension that is older than its source must never be used in silence, and a part of
them cannot be, as they share C structures. So where one is stale, all run as Python.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PLAIN_VARIABLE = "MOESIM_PLAIN"
"""Set to 1, it lets everything run as Python: for debuggers, and coverage."""

PACKAGE = Path(__file__).resolve().parents[1]
NOTES = PACKAGE / "_extensions.json"
"""Written by the build: digests of what each extension was made of, by module."""

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def digest_of(source: Path) -> str:
    """Digest of a Python file and the C types beside it."""
    parts = [source.read_bytes(), source.with_suffix(".pxd").read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def state() -> tuple[str, str]:
    """How typed modules run: ``compiled`` or ``plain``, and why, in a phrase."""
    if os.environ.get(PLAIN_VARIABLE, "") not in {"", "0"}:
        return "plain", f"{PLAIN_VARIABLE} is set"
    if not NOTES.is_file():
        return "plain", "nothing was compiled: no C compiler when moesim was installed"
    for name, digest in json.loads(NOTES.read_text(encoding="utf-8")).items():
        source = _source_of(name)
        built = source.with_suffix("").with_name(source.stem + SUFFIX)
        if not built.is_file():
            return "plain", f"{name} was not compiled for this Python"
        is_newer = source.is_file() and source.stat().st_mtime > built.stat().st_mtime
        types = source.with_suffix(".pxd")
        is_newer |= types.is_file() and types.stat().st_mtime > built.stat().st_mtime
        if is_newer and digest_of(source) != digest:
            return "plain", f"{source.name} was changed after it was compiled"
    return "compiled", ""


def _source_of(name: str) -> Path:
    return PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")


class _PlainFinder:
    """Finds the Python file of a module that has an extension beside it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's Python file, if it has C types."""
        del target
        if path is None or not name.startswith("moesim."):
            return None
        for folder in path:
            source = Path(folder) / f"{name.rpartition('.')[2]}.py"
            if source.with_suffix(".pxd").is_file() and source.is_file():
                loader = importlib.machinery.SourceFileLoader(name, str(source))
                return importlib.util.spec_from_file_location(
                    name, source, loader=loader
                )
        return None


def choose() -> None:
    """Let typed modules run compiled if all of them can, else as Python."""
    how, why = state()
    if how == "compiled":
        return
    sys.meta_path.insert(0, _PlainFinder())
    if "was changed" in why:
        sys.stderr.write(
            f"moesim: {why}, so everything runs uncompiled, about 40 times slower;"
            " `make build` compiles it again\n"
        )


# -- links -----------------------------------------------------------------------------


ROOMS = ("policies", "engine", "sim", "runtime", "traces", "hwprofiles")


def check_links(package: Path) -> None:
    """Refuse a checkout without symbolic links.

    Args:
        package: folder of moesim.

    Raises:
        ImportError: a link was checked out as a text.
    """
    for room in ROOMS:
        if (package / room).is_file():
            raise ImportError(
                f"{package / room}: expected a link to the folder {room}, found a text:"
                " this checkout has no symbolic links; on Windows turn on Developer"
                " Mode, then `git config core.symlinks true` and `git checkout --"
                f" {package}`, or install a wheel"
            )
