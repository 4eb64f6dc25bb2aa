"""`moesim config`: every option that runs share, as a file to start from."""

import json
from typing import Annotated

import typer


def config(
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print a JSON schema instead, for editors."),
    ] = False,
) -> None:
    """Print a TOML file with every option that runs share, what it means, and its
    default; for --config.

    \b
    Examples:
      moesim config > exp.toml
      moesim config --schema > moesim.schema.json
    """
    from moesim.runs.config_schema import json_schema, toml_template

    # Both are made from the fields, so neither can be out of date.
    if schema:
        print(json.dumps(json_schema(), indent=2))
        return
    print(toml_template(), end="")
