"""The options of commands that run something, made from the fields of `RunConfig`.

A command declares one parameter `config`, or `configs` if its options may take several
values at once. In its place the command line gets an option for every field, and
``--config`` for a file that holds them.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli import options
from moesim.runs.config import RunConfig, default_of, option_of

Command = Callable[..., None]

ConfigFileOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help=(
            "Take options from a TOML file, or those of a run.json; what is given here"
            " comes first."
        ),
    ),
]


def with_config(
    config: type[RunConfig] = RunConfig,
    *,
    without: Collection[str] = (),
    before: Mapping[str, Sequence[str]] | None = None,
    from_file: bool = True,
) -> Callable[[Command], Command]:
    """Give a command an option for every field of a configuration.

    Typer reads options off a signature, so a signature is all that this makes.

    Args:
        config: whose fields they are.
        without: fields that mean nothing to the command and keep their defaults.
        before: fields that stand before a parameter of the command's own, by its name;
            all others stand in the place of `config`.
        from_file: whether there is ``--config``.
    """
    shared = {
        field.name: field
        for field in fields(config)
        if field.name not in without and option_of(field).on_command_line
    }

    def decorate(command: Command) -> Command:
        declared = inspect.signature(command).parameters
        # The name in the signature says what the command can work with.
        several = "configs" in declared
        parameters = {
            name: _parameter(field, several=several, from_file=from_file)
            for name, field in shared.items()
        }
        ordered = _ordered(
            declared.values(), parameters, before or {}, from_file=from_file
        )

        @functools.wraps(command)
        def call(**values: Any) -> None:
            context = values.pop("context")
            given = {name: values.pop(name) for name in shared}
            file = values.pop("config_file", None)
            base = config()
            if file is not None:
                base = _from_file(file, config, shared, context)
                # A default must not override what the file says.
                given = {name: given[name] for name in _explicit(context, given)}

            configs = _combined(base, given, several=several)
            # All combinations have the same trace.
            _require_trace(configs[0], shared, context)
            if several:
                values["configs"] = configs
            else:
                values["config"] = configs[0]
            if "context" in declared:
                values["context"] = context
            command(**values)

        call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in ordered}
        return call

    return decorate


def _ordered(
    declared: Iterable[inspect.Parameter],
    shared: Mapping[str, inspect.Parameter],
    before: Mapping[str, Sequence[str]],
    *,
    from_file: bool,
) -> list[inspect.Parameter]:
    """All parameters in the order in which help shows them.

    Args:
        declared: those of the command itself.
        shared: those made of fields, by name.
        before: names of shared ones that stand before a declared one.
        from_file: whether ``--config`` closes the shared ones.
    """
    moved = {name for names in before.values() for name in names}
    rest = [parameter for name, parameter in shared.items() if name not in moved]
    if from_file:
        rest.append(_keyword("config_file", ConfigFileOption, None))

    ordered: list[inspect.Parameter] = []
    for parameter in declared:
        ordered += [shared[name] for name in before.get(parameter.name, ())]
        if parameter.name in {"config", "configs"}:
            ordered += rest
        else:
            # Required ones may follow optional ones only if all are keywords.
            ordered.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    # Typer fills it in; it tells which options were given.
    if all(parameter.name != "context" for parameter in ordered):
        ordered.append(_keyword("context", typer.Context))
    return ordered


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _parameter(
    field: Field[Any], *, several: bool, from_file: bool
) -> inspect.Parameter:
    if field.name == "trace":
        # A file may name the trace; without one the command line must.
        default = None if from_file else inspect.Parameter.empty
        return _keyword("trace", options.declared_argument(field), default)
    several = several and option_of(field).several is not None
    annotation = options.declared(field, several=several)
    return _keyword(field.name, annotation, default_of(field))


def _explicit(context: typer.Context, names: Collection[str]) -> list[str]:
    """Options that stand on the command line; all others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        name
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def _from_file(
    file: Path,
    config: type[RunConfig],
    shared: Collection[str],
    context: typer.Context,
) -> RunConfig:
    """Read a configuration file; note where its run was made by another moesim."""
    from moesim.runs.config_file import read_config
    from moesim.version import __version__, git_commit

    content = read_config(file)
    # TOML files are written by hand and name no version.
    made_by = (content.version, content.git_commit)
    if content.version is not None and made_by != (__version__, git_commit()):
        print(
            f"note: {file} was made by moesim {content.version} at commit"
            f" {content.git_commit}; this is {__version__} at commit {git_commit()}, so"
            " results may differ",
            file=sys.stderr,
        )
    # Digests are no options, but every run checks them.
    unsupported = {
        field.name
        for field in fields(config)
        if option_of(field).on_command_line and field.name not in shared
    }
    return content.build(config, without=unsupported, command=context.command_path)


def _combined(
    base: RunConfig, given: Mapping[str, Any], *, several: bool
) -> list[RunConfig]:
    """One configuration for every combination of the values given."""
    values = {
        name: value if several and isinstance(value, tuple) else (value,)
        for name, value in given.items()
    }
    return [
        base.replaced(**dict(zip(values, combination, strict=True)))
        for combination in itertools.product(*values.values())
    ]


def _require_trace(
    config: RunConfig, shared: Collection[str], context: typer.Context
) -> None:
    """Refuse to run without a trace, where only a trace can run.

    Raises:
        typer.BadParameter: there is none.
    """
    # A measured run may take a model instead; its command checks that.
    if type(config) is RunConfig and "trace" in shared and config.trace is None:
        raise typer.BadParameter(
            "expected a trace, here or in the file of --config",
            ctx=context,
            param_hint="TRACE",
        )
