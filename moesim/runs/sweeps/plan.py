"""The runs of a sweep: a configuration for every combination of the values of its axes.

Any field of `RunConfig` is an axis. In Python and in TOML a list makes one; on the
command line, words separated by commas do.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import uuid
from dataclasses import dataclass, fields
from itertools import product
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.files import sha256
from moesim.base.options import ConfigError, as_list, is_list
from moesim.policies.base import PolicyError
from moesim.policies.parameters import split_policies
from moesim.policies.registry import KINDS, find, name_in, registered
from moesim.policies.systems import SYSTEMS
from moesim.runs.config import CHOICES, RunConfig, in_order
from moesim.runs.config_file import config_of, load_config, read_config, read_content
from moesim.runs.setup import artefact_files, check_digests, profile_of, trace_of
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.base import Policy

CONFIG_SUFFIXES = (".toml", ".json")
"""Endings of configuration files; whatever else is named is a trace."""


def combined(base: RunConfig, values: Mapping[str, Sequence[Any]]) -> list[RunConfig]:
    """A configuration for every combination of values.

    Policies vary fastest, so that the runs that are compared stand together.

    Args:
        base: what all of them share.
        values: by field.

    Raises:
        TypeError, ConfigError: an unknown field, or a value that does not fit.
    """
    # A stable sort keeps the order in which other axes were given.
    ordered = sorted(values, key=lambda name: name in CHOICES)
    return [
        RunConfig.of(base, **dict(zip(ordered, combination, strict=True)))
        for combination in product(*(values[name] for name in ordered))
    ]


def split_options(
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """Divide the arguments of a call into single values and axes.

    Raises:
        PolicyError: a field without any value.
    """
    single: dict[str, Any] = {}
    axes: dict[str, Sequence[Any]] = {}
    for name, value in options.items():
        # Arrays and ranges are lists as well; texts and paths are not.
        is_one = not is_list(value) or isinstance(value, Path | Trace)
        values = [value] if is_one else list(value)
        if name == "policy":
            values = _policies(values)
        # Twice the same value would make two equal rows.
        values = _distinct(values)
        if not values:
            raise PolicyError(f"{name}: expected at least one value, got none")
        if len(values) == 1:
            (single[name],) = values
        else:
            axes[name] = values
    return single, axes


def _policies(names: Sequence[Any]) -> list[Any]:
    """Policies that commas separate; the word ``systems`` is every published one."""
    listed: list[Any] = []
    for name in names:
        for each in split_policies(name) if isinstance(name, str) else [name]:
            listed += SYSTEMS if each == "systems" else [each]
    return listed


def _distinct(values: Iterable[Any]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def configs_of_file(path: str | Path, *, given: Iterable[str] = ()) -> list[RunConfig]:
    """Every configuration that a file describes: each list in it is an axis.

    Args:
        path: TOML, or a ``run.json``.
        given: fields whose values come from elsewhere, so that lists of them in the
            file do not multiply.

    Raises:
        ConfigError: unreadable, an unknown key, or a value that does not fit; one line
            that names the file and the key.
    """
    file = Path(path)
    # A run.json names one run.
    if file.suffix == ".json":
        return [load_config(file)]
    content = read_content(file)
    for name in given:
        content.pop(name, None)
    choices = product(*map(as_list, content.values()))
    configs = [
        config_of(
            file,
            read_config(file, dict(zip(content, choice, strict=True))),
            RunConfig,
            command="moesim sweep",
        )
        for choice in choices
    ]
    if not configs:
        raise ConfigError(f"{file}: expected a value in every list, found an empty one")
    return configs


@dataclass(frozen=True, slots=True)
class Point:
    """One run that a sweep asks for, ready to travel to a worker.

    Attributes:
        config: what it is made with, without its trace and machine.
        trace: path of the trace, and its name in results.
        trace_digest: SHA-256 of the trace.
        profile: the machine.
        digest: names the run, see `run_digest`.
        contents: what its other files and policies hold, see `contents_of`, and the
            digest of the code.
        files_digest: of these contents.
    """

    config: RunConfig
    trace: str
    trace_name: str
    trace_digest: str
    profile: HardwareProfile
    digest: str
    contents: Mapping[str, str | None]
    files_digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a sweep, each once, and in what they differ.

    Attributes:
        points: in order.
        axes: fields that have several values.
        rows: rows of traces that all runs together replay.
    """

    points: list[Point]
    axes: list[str]
    rows: int


def planned(configs: Sequence[RunConfig]) -> Plan:
    """Name every run, and check what can be checked without running it.

    Raises:
        TraceError, ProfileError, PolicyError, ConfigError: an unknown policy, machine
            or trace.
    """
    traces: dict[Any, Trace] = {}
    systems: set[tuple[str | None, ...]] = set()
    points: dict[str, Point] = {}
    rows = 0
    for config in configs:
        parts = tuple(getattr(config, name) for name in CHOICES)
        if parts not in systems:
            config.system.build(gpus=1, host_cache=config.host_cache)
            systems.add(parts)
        key = _key(config.trace)
        if key not in traces:
            traces[key] = trace_of(config)
        point = _point(config, traces[key])
        if point.digest not in points:
            points[point.digest] = point
            rows += traces[key].rows
    return Plan(list(points.values()), _axes(configs), rows)


def _point(config: RunConfig, trace: Trace) -> Point:
    """A run by its digest."""
    profile = profile_of(config.hw)
    check_digests(config, trace, profile)
    trace_digest = file_digest(trace.path)
    # Workers may be in other folders, and do not share opened files.
    warm = config.warm
    files = {
        # The name of a trace that ships is no path.
        "warm": None if warm is None else _opened(warm).path.absolute(),
        "artefacts": _absolute(config.artefacts),
        "arrivals": _absolute_arrivals(config.arrivals),
    }
    contents = contents_of(config)
    # What cannot be digested is never found among results.
    is_hidden = None in {contents[name] for name in contents.keys() - files.keys()}
    together = _digest_of_json([contents, uuid.uuid4().hex if is_hidden else ""])
    return Point(
        config=config.replaced(trace=None, hw=None, **files),
        trace=str(trace.path.absolute()),
        trace_name=trace.name,
        trace_digest=trace_digest,
        profile=profile,
        digest=run_digest(config, trace_digest, profile, together),
        contents=contents | {"code": code_digest()},
        files_digest=together,
    )


def _key(value: Any) -> Any:
    """Return what tells values of an option apart; objects count as themselves."""
    return value if isinstance(value, str | Path | Real | None) else id(value)


def _absolute(place: str | Path | None) -> Path | None:
    return None if place is None else Path(place).absolute()


def _absolute_arrivals(arrivals: str | None) -> str | None:
    """``poisson:RATE`` stays, a file gets its whole path."""
    if arrivals is None or not Path(arrivals).is_file():
        return arrivals
    return str(Path(arrivals).absolute())


def _axes(configs: Sequence[RunConfig]) -> list[str]:
    """Fields in which configurations differ, in the order of their declaration."""
    declared = [field.name for field in fields(RunConfig)]
    names = [name for name in in_order(declared) if not name.endswith("_digest")]
    values = {
        name: {_key(getattr(config, name)) for config in configs} for name in names
    }
    return [name for name in names if len(values[name]) > 1]


SIMULATING = ("base", "traces", "hwprofiles", "policies", "engine", "sim", "runs")
"""Parts of moesim on which figures depend; reports and commands change none."""


@functools.cache
def code_digest() -> str:
    """SHA-256 of the sources that simulate, the same wherever they are installed."""
    digest = hashlib.sha256()
    for part in SIMULATING:
        package = importlib.import_module(f"moesim.{part}")
        # Rooms are namespace packages with one folder each.
        (folder,) = map(Path, package.__path__)
        for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.pxd"))):
            digest.update(f"{part}/{file.relative_to(folder).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def run_digest(
    config: RunConfig, trace_digest: str, profile: HardwareProfile, files_digest: str
) -> str:
    """SHA-256 that names a run: equal if and only if its figures must be.

    What decides them: the values of the options, what the files hold that they name,
    the machine, and the code. What files are called decides nothing, nor do digests
    that only refuse other files. Versions of libraries are left out: within the bounds
    that the project states, figures are the same.

    Args:
        config: what the run is made with.
        trace_digest: of its trace.
        profile: its machine.
        files_digest: of its other files and policies.
    """
    inputs = config.options()
    del inputs["trace_digest"], inputs["hw_digest"]
    for path in _foreign_policies(config):
        for option in CHOICES:
            if inputs[option] is not None:
                inputs[option] = inputs[option].replace(path, Path(path).name)
    # Files of either kind are in the digest of all of them.
    del inputs["warm"], inputs["artefacts"]
    if Path(str(config.arrivals)).is_file():
        del inputs["arrivals"]
    inputs |= {
        "trace": trace_digest,
        "hw": profile.digest,
        "files": files_digest,
        "code": code_digest(),
    }
    return _digest_of_json(inputs)


def contents_of(config: RunConfig) -> dict[str, str | None]:
    """SHA-256 of what a run reads beside its trace and machine: of each file by its
    option, None for none, and of the code of policies that are no part of moesim.

    The latter is None for what no file tells: classes that were registered by hand, and
    files that were edited since.
    """
    arrivals = Path(str(config.arrivals))
    contents = {
        "warm": None if config.warm is None else _opened(config.warm).digest(),
        "artefacts": _artefacts_digest(config.artefacts),
        "arrivals": file_digest(arrivals) if arrivals.is_file() else None,
    }
    by_hand = registered().values()
    for name, cls in _foreign_policies(config).items():
        digest = None if cls in by_hand else _source_digest(cls)
        contents[f"policy {Path(name).name}"] = digest
    return contents


def _source_digest(cls: type[Policy]) -> str | None:
    """SHA-256 of the Python files beside that of a policy, which may be its helpers;
    None where one was edited since this process may have imported it.
    """
    import psutil  # noqa: PLC0415 - our own policies need none

    source = Path(inspect.getfile(cls))
    begin_s = psutil.Process().create_time()
    digest = hashlib.sha256()
    for file in sorted(source.parent.glob("*.py")):
        # A policy that is named by its path is read anew whenever it is found.
        is_reread = file == source and cls.__module__.startswith("moesim_policy_")
        if file.stat().st_mtime > begin_s and not is_reread:
            return None
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _digest_of_json(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _opened(trace: str | Path | Trace) -> Trace:
    return trace if isinstance(trace, Trace) else open_trace(trace)


def _artefacts_digest(place: str | Path | None) -> str | None:
    """Of the tensor files, whose names policies ask for."""
    if place is None:
        return None
    return _digest_of_json(
        {file.name: file_digest(file) for file in artefact_files(Path(place))}
    )


def file_digest(path: Path) -> str:
    """SHA-256 of a file; read again only if it has changed."""
    status = path.stat()
    return _digest_of(path.resolve(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def _digest_of(path: Path, _mtime_ns: int, _size: int) -> str:
    return sha256(path)


def _foreign_policies(config: RunConfig) -> dict[str, type[Policy]]:
    """Policies of a run that are no part of moesim, by name or path."""
    system = config.system
    specs = {kind: getattr(system, kind) for kind in KINDS}
    used = [*specs.items(), ("cache", config.host_cache)]
    classes = {name_in(spec): find(name_in(spec), kind) for kind, spec in used}
    return {
        name: cls
        for name, cls in classes.items()
        if not cls.__module__.startswith("moesim.")
    }
