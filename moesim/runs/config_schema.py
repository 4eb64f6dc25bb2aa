"""Descriptions of configuration files: a JSON schema, and a TOML file to start from."""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.runs.config import RunConfig, default_of, option_of
from moesim.runs.config_file import POLICY_TABLES

if TYPE_CHECKING:
    from dataclasses import Field

_JSON_TYPES: dict[type, str] = {
    str: "string",
    Path: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
}
_WIDTH = 88


def json_schema(config: type[RunConfig] = RunConfig) -> dict[str, Any]:
    """The JSON schema of configuration files, for editors and checkers."""
    table = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        # Every policy has parameters of its own.
        "additionalProperties": True,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of a moesim run",
        "type": "object",
        "properties": {
            **{field.name: _property(field) for field in fields(config)},
            "policies": {
                "type": "object",
                "description": "Policies with their parameters, instead of texts.",
                "properties": dict.fromkeys(POLICY_TABLES, table),
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    }


def _property(field: Field[Any]) -> dict[str, Any]:
    option = option_of(field)
    default = default_of(field)
    types = [_JSON_TYPES[option.kind]]
    # ``8GiB`` is a size as well.
    if option.is_size:
        types.append("string")
    if default is None:
        types.append("null")

    schema: dict[str, Any] = {
        "description": option.help,
        "type": types if len(types) > 1 else types[0],
        "default": default,
    }
    # None must stand among the choices, or it would not fit them.
    if option.choices:
        schema["enum"] = [*option.choices, *([None] if default is None else [])]
    if option.minimum is not None:
        schema["minimum"] = option.minimum
    if option.maximum is not None:
        schema["maximum"] = option.maximum
    return schema


def toml_template(config: type[RunConfig] = RunConfig) -> str:
    """A TOML file in which every option stands as a comment, with help and default."""
    head = (
        "# Options of a moesim run. Remove the # of those that you set.\n"
        "# On the command line: moesim replay --config THIS-FILE"
    )
    blocks = [head]
    for field in fields(config):
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
            value = option.metavar or "NAME"
            value = value if option.kind in {int, float} else f'"{value}"'
        else:
            # JSON writes texts, numbers and truth values as TOML does.
            value = json.dumps(default)
        blocks.append(f"{text}\n# {field.name} = {value}")
    blocks.append(
        "# Parameters of a policy are keys of its table (see: moesim list cache)."
        '\n# [policies.cache]\n# name = "lfu"\n# decay = 0.9'
    )
    return "\n\n".join(blocks) + "\n"
