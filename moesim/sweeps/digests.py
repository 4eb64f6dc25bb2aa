"""Digests that name a run by all that its figures depend on: options, trace, profile,
files of calibration, and code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies.registry import find
from moesim.traces.files import sha256
from moesim.traces.format.reader import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.base import Policy
    from moesim.runs.config import RunConfig

SIMULATING = ("traces", "hwprofiles", "policies", "engine", "sim", "runs")
"""Parts of moesim on which figures depend; reports and commands change none."""

_UNKNOWN_CODE = uuid.uuid4().hex
"""Stands for code that cannot be read: no later process takes it for its own."""


@functools.cache
def code_digest() -> str:
    """SHA-256 of the sources that simulate, the same wherever they are installed."""
    digest = hashlib.sha256()
    for part in SIMULATING:
        package = importlib.import_module(f"moesim.{part}")
        # Rooms are namespace packages with one folder each.
        (folder,) = map(Path, package.__path__)
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{part}/{file.relative_to(folder).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def run_digest(config: RunConfig, trace_digest: str, profile: HardwareProfile) -> str:
    """SHA-256 that names a run: equal if and only if its figures must be.

    Args:
        config: what the run is made with.
        trace_digest: of its trace.
        profile: its machine.
    """
    options = config.options()
    # What files are called does not matter, what they hold does.
    replaced = {
        "trace": trace_digest,
        "trace_digest": None,
        "hw": profile.digest,
        "hw_digest": None,
        "warm": _content_digest(config.warm),
        "artefacts": _content_digest(config.artefacts),
    }
    content = {
        "options": options | replaced,
        "code": code_digest(),
        "policies": _foreign_code(config),
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _content_digest(place: Any) -> str | None:
    """SHA-256 of a file, or of the files of a folder with their names."""
    if place is None:
        return None
    if isinstance(place, Trace):
        return place.digest()
    path = Path(place)
    if not path.is_dir():
        return file_digest(path) if path.is_file() else str(path)
    digests = {
        file.relative_to(path).as_posix(): file_digest(file)
        for file in path.rglob("*")
        if file.is_file()
    }
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file; read again only if it has changed."""
    status = path.stat()
    return _digest_of(path.resolve(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def _digest_of(path: Path, _mtime_ns: int, _size: int) -> str:
    return sha256(path)


def _foreign_code(config: RunConfig) -> dict[str, str]:
    """Digests of policies that are no part of moesim, by kind."""
    return {
        kind: _code_of(cls)
        for kind, cls in _classes(config)
        if not cls.__module__.startswith("moesim.")
    }


def _classes(config: RunConfig) -> Iterator[tuple[str, type[Policy]]]:
    system = config.system
    for kind in ("assignment", "cache", "prefetch", "routing"):
        spec: str = getattr(system, kind)
        yield kind, find(_name(spec), kind)
    yield "host_cache", find(_name(config.host_cache), "cache")


def _name(spec: str) -> str:
    """The name in a specification; a path may hold colons before its ``.py``."""
    head, suffix, _ = spec.partition(".py")
    return head + suffix if suffix else spec.partition(":")[0]


def _code_of(cls: type[Policy]) -> str:
    try:
        # The whole module: a policy may use what stands beside it.
        source = inspect.getsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):
            return _UNKNOWN_CODE
    return hashlib.sha256(source.encode()).hexdigest()
