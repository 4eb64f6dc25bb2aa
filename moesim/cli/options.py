"""Options that commands declare one by one, some of them fields of `RunConfig`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli import parsers
from moesim.runs.config import MeasuredConfig, RunConfig, default_of, option_of

_PARSERS: Mapping[type, Callable[[str], Any]] = {
    int: parsers.counts,
    float: parsers.shares,
    str: parsers.names,
}
"""Parsers of several values, separated by commas, by the kind of one of them."""

PLURALS = {"cache_ratio": "--cache-ratios"}
"""Second names of options that take several values; other commands know only these."""


def declared(field: Field[Any], *, several: bool = False) -> Any:
    """The annotation from which typer makes an option of a field.

    Args:
        field: of a configuration.
        several: whether the option takes several values, separated by commas.
    """
    option = option_of(field)
    if several:
        parser = parsers.sizes_bytes if option.is_size else _PARSERS[option.kind]
        plural = PLURALS.get(field.name)
        info = typer.Option(
            flag(field.name),
            *([] if plural is None else [plural]),
            metavar=f"{option.metavar},…",
            parser=parser,
            help=option.several,
            autocompletion=completion_of(field),
        )
        return Annotated[str | None, info]

    info = _option_info(field)
    kind: Any = option.kind
    # Typer reads from the type whether an option may be left out.
    if default_of(field) is None:
        kind = kind | None
    return Annotated[kind, info]


def declared_argument(field: Field[Any]) -> Any:
    """The annotation from which typer makes an argument of a field."""
    option = option_of(field)
    info = typer.Argument(metavar=option.metavar, help=option.help, show_default=False)
    return Annotated[Path | None, info]


def _option_info(field: Field[Any]) -> Any:
    option = option_of(field)
    details: dict[str, Any] = {
        "metavar": option.metavar,
        "help": option.help,
        "autocompletion": completion_of(field),
    }
    # Bounds of a size are checked with the other sizes, against the model.
    if option.choices:
        details["parser"] = parsers.one_of(*option.choices)
    elif option.is_size:
        details["parser"] = parsers.size_bytes
    else:
        details["min"] = option.minimum
        details["max"] = option.maximum
    return typer.Option(flag(field.name), **details)


def completion_of(field: Field[Any]) -> Callable[[str], list[str]] | None:
    """What a shell completes a field's value from; None where it should offer files."""
    kind = option_of(field).policy_kind
    if kind is not None:
        return lambda incomplete: _beginning(incomplete, _policies(kind))
    if field.name == "hw":
        return lambda incomplete: _beginning(incomplete, _machines())
    return None


def complete_policies(incomplete: str) -> list[str]:
    """What a shell completes a list of policies from."""
    return _beginning(incomplete, _policies("assignment"))


def _beginning(word: str, names: Iterable[str]) -> list[str]:
    """Continuations of the last of several words that commas separate."""
    before, comma, last = word.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def _policies(kind: str) -> list[str]:
    from moesim.policies.registry import names
    from moesim.policies.systems import SYSTEMS

    # A system stands wherever an assignment policy does.
    return [*(SYSTEMS if kind == "assignment" else ()), *names(kind)]


def _machines() -> tuple[str, ...]:
    from moesim.hwprofiles.profile import list_profiles

    return list_profiles()


def flag(name: str) -> str:
    """``gpu_memory_bytes`` -> ``--gpu-memory``: people write the unit themselves."""
    return "--" + name.removesuffix("_bytes").replace("_", "-")


def _shared(name: str, config: type[RunConfig] = RunConfig) -> Any:
    """The typer option of one field, for commands that share only a few of them."""
    return _option_info(next(field for field in fields(config) if field.name == name))


# Commands that need a trace and take no file of options.
TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="A moesim trace (Parquet), or tiny, which ships.",
        show_default=False,
    ),
]
# Fields of a configuration, for commands that have only some of them.
Hardware = Annotated[str | None, _shared("hw")]
ThisMachine = Annotated[str | None, _shared("hw", MeasuredConfig)]
Batch = Annotated[int, _shared("batch")]
Steps = Annotated[int | None, _shared("steps")]
Seed = Annotated[int, _shared("seed")]
DrawSeed = Annotated[
    int, typer.Option(min=0, metavar="N", help="Of the random numbers drawn here.")
]
Dtype = Annotated[str | None, _shared("dtype", MeasuredConfig)]
Residual = Annotated[Path | None, _shared("residual", MeasuredConfig)]

# Options that belong to no configuration: where something runs, and what is written.
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        parser=parsers.matching(r"cpu|cuda(:\d+)?", "cpu or cuda"),
        help="cpu or cuda.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write the run's tables and figures there."),
]
Perfetto = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write a timeline, with every run, for ui.perfetto.dev."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Shorter runs.")]
Stores = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder on the disk that shall hold the experts meanwhile."
    ),
]
