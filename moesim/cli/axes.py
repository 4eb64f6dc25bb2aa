"""Options that make axes: every field of `RunConfig`, each with values separated by
commas.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli import parsers
from moesim.cli.options import flag
from moesim.runs.config import RunConfig, option_of

Command = Callable[..., None]

PLURALS = {
    "trace": "--traces",
    "policy": "--policies",
    "cache": "--caches",
    "cache_ratio": "--cache-ratios",
    "batch": "--batches",
    "seed": "--seeds",
    "noise_seed": "--noise-seeds",
}
"""Second names of options, for those who give several values."""


def with_axes(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command an option for every field of a configuration, in the place of its
    parameter ``axes``: fields by name, with the values that were given.

    Args:
        without: fields that mean nothing to the command.
    """
    axes = {
        field.name: field
        for field in fields(RunConfig)
        if field.name not in without and not field.name.endswith("_digest")
    }

    def decorate(command: Command) -> Command:
        ordered: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "axes":
                ordered += [_parameter(field) for field in axes.values()]
            else:
                # Required ones may follow optional ones only if all are keywords.
                ordered.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def call(**values: Any) -> None:
            given = {name: values.pop(name) for name in axes}
            command(
                axes={
                    name: value for name, value in given.items() if value is not None
                },
                **values,
            )

        call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in ordered}
        return call

    return decorate


def _parameter(field: Field[Any]) -> inspect.Parameter:
    option = option_of(field)
    plural = PLURALS.get(field.name)
    parser = _parser(option.kind, is_size=option.is_size, kind=option.policy_kind)
    # Limits are one value, although a comma stands between them.
    is_single = field.name == "slo"
    info = typer.Option(
        flag(field.name),
        *([] if plural is None else [plural]),
        metavar=f"{option.metavar or 'NAME'}{'' if is_single else ',…'}",
        parser=(lambda text: (text,)) if is_single else parser,
        help=option.several or option.help,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[str | None, info],
        default=None,
    )


def _parser(
    option_kind: type, *, is_size: bool, kind: str | None
) -> Callable[[str], tuple[Any, ...]]:
    if kind is not None:
        return lambda text: tuple(parsers.split_policies(text, ""))
    if is_size:
        return parsers.sizes_bytes
    if option_kind is int:
        return parsers.counts
    if option_kind is float:
        return lambda text: tuple(parsers.numbers(text))
    if option_kind is Path:
        return lambda text: tuple(Path(name) for name in parsers.names(text))
    return parsers.names
