"""Configuration files: TOML written by hand, or the ``run.json`` of a run; and one to
start from.

A TOML file is flat: its keys are the fields of `moesim.runs.config.RunConfig`::

    trace = "q.parquet"
    policy = "greedy"
    cache = "lfu:decay=0.9"
    gpu_memory_bytes = "8GiB"

Relative paths count from the current folder, as they do on the command line.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moesim.base.inputs import load_json, load_toml, read_text
from moesim.base.options import ConfigError, default_of, option_of
from moesim.base.text import did_you_mean
from moesim.policies.base import PolicyError
from moesim.runs.config import MeasuredConfig, RunConfig, in_order

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from dataclasses import Field as DeclaredField


Config = TypeVar("Config", bound=RunConfig)

# A measured run has every option of a simulated one, and more.
_FIELDS = {declared.name: declared for declared in fields(MeasuredConfig)}


def load_config(
    path: str | Path,
    config: type[Config] = RunConfig,  # type: ignore[assignment]
) -> Config:
    """Load the configuration that a TOML file or a ``run.json`` describes.

    Args:
        path: the file; JSON if its name ends so, else TOML.
        config: `RunConfig`, or `MeasuredConfig` for runs on this machine.

    Raises:
        ConfigError: unreadable, an unknown key, or a value that does not fit; one line
            that names the file and the key.
    """
    return config_of(Path(path), read_config(path), config)


def config_of(
    file: Path,
    values: Mapping[str, Any],
    config: type[Config],
    *,
    command: str = "this run",
) -> Config:
    """Make a configuration of the values in a file.

    Args:
        file: named in errors.
        values: by field.
        config: the kind of configuration.
        command: the caller, named in errors.

    Raises:
        ConfigError: naming the file and the key: a value that does not fit, or one for
            a field that means nothing here.
    """
    names = {declared.name for declared in fields(config)}
    check_supported(file, values, names, command)
    try:
        built = config(**values)
        # A policy that does not exist is an error of the file, so name the file.
        built.system.build(gpus=1, host_cache=built.host_cache)
    except (ConfigError, PolicyError) as error:
        raise ConfigError(f"{file}: {error}") from None
    return built


def check_supported(
    file: Path, values: Mapping[str, Any], names: Collection[str], command: str
) -> None:
    """Refuse a value for a field that means nothing to a command.

    Raises:
        ConfigError: naming the file and the key.
    """
    # A file may be meant for another command, and nothing in it is lost silently.
    for name, value in values.items():
        if name not in names:
            raise ConfigError(
                f"{file}: {name}: {command} has no such option, found {value!r};"
                " remove it"
            )


def read_config(
    path: str | Path,
    content: Mapping[str, Any] | None = None,
    *,
    more: Mapping[str, DeclaredField[Any]] | None = None,
) -> dict[str, Any]:
    """Read the values in a configuration file, by field, without checking them against
    each other.

    Args:
        path: the file.
        content: its keys and values; None reads them.
        more: fields that are keys too, by name: options of a single command.

    Raises:
        ConfigError: as `load_config`.
    """
    file = Path(path)
    content = _table(file, "", read_content(file) if content is None else content)
    is_run = file.suffix == ".json" and "config" in content
    if is_run:
        # The figures of a run stand around its configuration.
        recorded = _table(file, "config: ", content["config"])
        content = _table(file, "config.options: ", recorded.get("options"))

    known = _FIELDS | dict(more or {})
    for key in content:
        if key not in known:
            raise ConfigError(
                f"{file}: {key}: unknown key{did_you_mean(key, known)}; known:"
                f" {', '.join(known)}"
            )
    # A run.json names every option, also those that have their defaults.
    return {
        name: value
        for name, value in content.items()
        if not (is_run and name in _FIELDS and value == default_of(_FIELDS[name]))
    }


def _table(file: Path, where: str, content: Any) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file}: {where}expected keys and values, found a {content!r:.40}"
        )
    return content


def read_content(file: Path) -> Any:
    """Parse a file: JSON if its name ends so, else TOML.

    Raises:
        ConfigError: unreadable.
    """
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{file}: cannot be read: {reason}") from None
    try:
        return load_json(text) if file.suffix == ".json" else load_toml(text)
    except ValueError as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise ConfigError(f"{file}: not {kind}: {error}") from None


_WIDTH = 88


def toml_template(config: type[RunConfig] = RunConfig) -> str:
    """A TOML file in which every option stands as a comment, with help and default."""
    head = (
        "# Options of a moesim run. Remove the # of those that you set.\n"
        "# On the command line: moesim replay --config THIS-FILE"
    )
    blocks = [head]
    by_name = {field.name: field for field in fields(config)}
    for name in in_order(by_name):
        field = by_name[name]
        option = option_of(field)
        default = default_of(field)
        text = textwrap.fill(
            option.help,
            _WIDTH,
            initial_indent="# ",
            subsequent_indent="# ",
            break_on_hyphens=False,
        )
        if default is None:
            # What stands for a value, as in the help of the command line.
            value = f"{option.metavar}"
            value = value if option.kind in {int, float} else f'"{value}"'
        else:
            # JSON writes texts, numbers and truth values as TOML does.
            value = json.dumps(default)
        blocks.append(f"{text}\n# {field.name} = {value}")
    return "\n\n".join(blocks) + "\n"
