"""What a sweep runs: a configuration for every combination of the values of its axes.

Any field of `RunConfig` is an axis. In Python and in TOML a list makes one; on the
command line, words separated by commas do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies.base import PolicyError
from moesim.runs.config import ConfigError, RunConfig, option_of
from moesim.runs.config_file import load_config, read_config, read_content
from moesim.runs.memory import MemoryOptions
from moesim.runs.setup import check_digests, profile_of, trace_of
from moesim.sweeps.digests import code_digest, file_digest, run_digest
from moesim.sweeps.rows import Point
from moesim.traces.format.reader import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.hwprofiles.profile import HardwareProfile

CONFIG_SUFFIXES = (".toml", ".json")
"""Endings of configuration files; whatever else is named is a trace."""


def combined(base: RunConfig, values: Mapping[str, Sequence[Any]]) -> list[RunConfig]:
    """A configuration for every combination of values.

    Policies vary fastest, so that the runs that are compared stand together.

    Args:
        base: what all of them share.
        values: by field; those of ``memory`` are `MemoryOptions`.

    Raises:
        TypeError, ConfigError: an unknown field, or a value that does not fit.
        PolicyError: a field without any value.
    """
    policies = _policy_fields()
    # A stable sort keeps the order in which other axes were given.
    ordered = sorted(values, key=lambda name: name in policies)
    for name in ordered:
        if not values[name]:
            raise PolicyError(f"sweep: {name}: expected at least one value, got none")
    return [
        RunConfig.of(base, **dict(zip(ordered, combination, strict=True)))
        for combination in product(*(values[name] for name in ordered))
    ]


def _policy_fields() -> list[str]:
    return [
        declared.name
        for declared in fields(RunConfig)
        if option_of(declared).policy_kind is not None
    ]


def split_options(
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """Divide the arguments of a call into single values and axes."""
    single: dict[str, Any] = {}
    axes: dict[str, Sequence[Any]] = {}
    for name, value in options.items():
        if _is_list(value):
            # Twice the same value would make two equal rows.
            axes[name] = _distinct(value)
        else:
            single[name] = value
    return single, axes


def _is_list(value: Any) -> bool:
    # Arrays and ranges are lists as well; texts and paths are not.
    is_sequence = hasattr(value, "__iter__") and hasattr(value, "__len__")
    return is_sequence and not isinstance(value, str | Path | Trace | MemoryOptions)


def _distinct(values: Iterable[Any]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def configs_of_file(path: str | Path, *, given: Iterable[str] = ()) -> list[RunConfig]:
    """Every configuration that a file describes: each list in it is an axis, also those
    of policies' parameters.

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
    configs = [
        read_config(file, variant).build(RunConfig, command="moesim sweep")
        for variant in _variants(content)
    ]
    if not configs:
        raise ConfigError(f"{file}: expected a value in every list, found an empty one")
    return configs


def _variants(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One content without lists for every combination of their items."""
    choices = [
        _variants(value) if isinstance(value, dict) else _as_list(value)
        for value in content.values()
    ]
    return [
        dict(zip(content, combination, strict=True))
        for combination in product(*choices)
    ]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
    inputs = _Inputs()
    points: dict[str, Point] = {}
    rows = 0
    for config in configs:
        point = inputs.point(config)
        if point.digest not in points:
            points[point.digest] = point
            rows += inputs.trace(config).rows
    return Plan(list(points.values()), _axes(configs), rows)


class _Inputs:
    """Traces and machines of a sweep, each opened once."""

    def __init__(self) -> None:
        self._traces: dict[Any, Trace] = {}
        self._profiles: dict[Any, HardwareProfile] = {}
        self._systems: set[tuple[str | None, ...]] = set()

    def trace(self, config: RunConfig) -> Trace:
        key = _key(config.trace)
        if key not in self._traces:
            self._traces[key] = trace_of(config)
        return self._traces[key]

    def profile(self, config: RunConfig) -> HardwareProfile:
        key = _key(config.hw)
        if key not in self._profiles:
            self._profiles[key] = profile_of(config.hw)
        return self._profiles[key]

    def point(self, config: RunConfig) -> Point:
        """A run by its digest; a policy that does not exist is refused."""
        parts = tuple(getattr(config, name) for name in _policy_fields())
        if parts not in self._systems:
            config.system.build(gpus=1, host_cache=config.host_cache)
            self._systems.add(parts)

        trace = self.trace(config)
        profile = self.profile(config)
        check_digests(config, trace, profile)
        trace_digest = file_digest(trace.path)
        # Workers may be in other folders, and do not share opened files.
        files = {
            name: _absolute(getattr(config, name)) for name in ("warm", "artefacts")
        }
        return Point(
            config=config.replaced(trace=None, hw=None, **files),
            trace=str(trace.path.absolute()),
            trace_name=trace.name,
            trace_digest=trace_digest,
            profile=profile,
            digest=run_digest(config, trace_digest, profile),
            code=code_digest(),
        )


def _key(value: Any) -> Any:
    """What tells values of an option apart; objects count as themselves."""
    return value if isinstance(value, str | Path | Real | None) else id(value)


def _absolute(place: Any) -> Path | None:
    if place is None:
        return None
    return Path(place.path if isinstance(place, Trace) else place).absolute()


def _axes(configs: Sequence[RunConfig]) -> list[str]:
    """Fields in which configurations differ, in the order of their declaration."""
    names = [
        declared.name
        for declared in fields(RunConfig)
        if not declared.name.endswith("_digest")
    ]
    values = {
        name: {_key(getattr(config, name)) for config in configs} for name in names
    }
    return [name for name in names if len(values[name]) > 1]
