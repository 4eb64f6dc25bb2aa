"""A command line from a dataclass: every field becomes an option.

`from_dataclass` is given to a command, a function whose parameters say what it works
with:

- ``options``: the command's own options, a dataclass derived from `Options`;
- ``config``: a `RunConfig`; or ``configs``, a list of them, one for every combination of
  values that commas separate; or ``axes``, fields of `RunConfig` by name with the values
  that were given;
- ``context``: typer's;
- any other parameter is typer's own.

From these it makes the signature that typer reads, with ``--config FILE``. Before the
command begins, it checks which options fit together, and that results have a place
which is no input.
"""

import errno
import functools
import importlib.util
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.base.files import destination, is_stdout, is_stream
from moesim.base.options import (
    ConfigError,
    Options,
    as_list,
    check_together,
    default_of,
    flag_of,
    option,
    option_of,
)
from moesim.runs.config import RunConfig, in_order

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


def from_dataclass(
    run: type[RunConfig] = RunConfig,
    *,
    without: Collection[str] = (),
    from_file: bool = True,
) -> Callable[[Command], Command]:
    """Give a command an option for every field of its dataclasses.

    Args:
        run: the dataclass of ``config``.
        without: fields of `run` that mean nothing to the command and keep their
            defaults.
        from_file: whether there is ``--config``.
    """

    def decorate(command: Command) -> Command:
        line = _CommandLine(command, run, without, from_file=from_file)

        @functools.wraps(command)
        def call(**values: Any) -> None:
            line.call(values)

        # Typer reads options off a signature, so a signature is all that it needs.
        parameters = line.parameters()
        signature = inspect.Signature(parameters)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        return call

    return decorate


class _CommandLine:
    """The command line of one command; see `from_dataclass`."""

    def __init__(
        self,
        command: Command,
        run: type[RunConfig],
        without: Collection[str],
        *,
        from_file: bool,
    ) -> None:
        self.command = command
        self.declared = inspect.signature(command).parameters
        self.run = run
        self.options: type[Options] | None = None
        if "options" in self.declared:
            self.options = self.declared["options"].annotation
        self.own = {} if self.options is None else _fields(self.options)
        self.shared: dict[str, Field[Any]] = {}
        if {"config", "configs", "axes"} & self.declared.keys():
            # A command may say more exactly what one of the run's options means to it.
            hidden = {*without, *self.own}
            every = _fields(run)
            self.shared = {
                name: every[name]
                for name in in_order(every)
                if name not in hidden and self._is_option(every[name])
            }
        # What makes axes reads files of its own, with lists in them.
        self.from_file = from_file and "axes" not in self.declared

    def _is_option(self, field: Field[Any]) -> bool:
        # Axes take all but digests, which belong to one file.
        if "axes" in self.declared:
            return not field.name.endswith("_digest")
        return option_of(field).on_command_line

    def parameters(self) -> list[inspect.Parameter]:
        """Typer's parameters, in the order in which help shows them."""
        ordered: list[inspect.Parameter] = []
        for name, parameter in self.declared.items():
            if name == "options":
                ordered += map(self._parameter, self.own.values())
            elif name == "config":
                ordered += map(self._parameter, self.shared.values())
            elif name in {"configs", "axes"}:
                is_axis = name == "axes"
                ordered += [
                    self._several(field, is_axis=is_axis)
                    for field in self.shared.values()
                ]
            elif name != "context":
                # Required ones may follow optional ones only if all are keywords.
                ordered.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        if self.from_file:
            ordered.append(_keyword("config_file", ConfigFileOption, None))
        # Typer fills it in; it tells which options were given.
        ordered.append(_keyword("context", typer.Context))
        return ordered

    def _parameter(self, field: Field[Any]) -> inspect.Parameter:
        default = field.default
        if default is MISSING:
            # A file may state it; without one the command line must.
            default = None if self.from_file else inspect.Parameter.empty
        if field.name == "trace" and not self.from_file:
            default = inspect.Parameter.empty
        is_required = default is inspect.Parameter.empty
        annotation = _annotation(field, is_required=is_required)
        return _keyword(field.name, annotation, default)

    def _several(self, field: Field[Any], *, is_axis: bool) -> inspect.Parameter:
        """A parameter that takes several values, where the field can."""
        stated = option_of(field)
        if not is_axis and stated.several is None:
            return self._parameter(field)
        # Limits are one value, although a comma stands between them.
        is_single = field.name == "slo"
        info = typer.Option(
            flag_of(field),
            metavar=f"{stated.metavar or 'NAME'}{'' if is_single else ',…'}",
            parser=(lambda text: (text,)) if is_single else _list_parser(field),
            help=stated.several or stated.help,
            autocompletion=completion_of(field),
        )
        default = None if is_axis else default_of(field)
        return _keyword(field.name, Annotated[Any, info], default)

    def call(self, values: dict[str, Any]) -> None:
        """Build the dataclasses, check them, and call the command."""
        context = values.pop("context")
        file = values.pop("config_file", None)
        known = {*self.shared, *self.own}
        arguments = {name: values[name] for name in values.keys() - known}
        given = {name: values[name] for name in _explicit(context, known)}
        stated = {} if file is None else self._read(file, context)
        parts: list[Options] = []
        try:
            if self.options is not None:
                options = self._own(stated | given, context)
                arguments["options"] = options
                parts.append(options)
            if "axes" in self.declared:
                shared = given.keys() & self.shared.keys()
                arguments["axes"] = {name: given[name] for name in shared}
            elif self.shared:
                configs = self._runs(stated, given, context)
                # It knows the policies' names, which help does not need.
                from moesim.runs.words import check_words

                for config in configs:
                    check_words(config)
                several = "configs" in self.declared
                arguments |= {"configs": configs} if several else {"config": configs[0]}
                parts.append(configs[0])
            # A run.json names every option, also those that have their defaults.
            declared = self.shared | self.own
            chosen = {
                name
                for name in declared.keys() & stated.keys()
                if stated[name] != default_of(declared[name])
            }
            check_together(declared.values(), given.keys() | chosen, name=flag_of)
        except ConfigError as error:
            raise self._named(error, context) from None

        inputs = _inputs(parts, arguments.get("axes", {}))
        if file is not None:
            inputs.append(file)
        files = [place for part in parts for place in part.outputs()]
        check_places(
            folders=[place for part in parts for place in part.folders()],
            files=files,
            inputs=inputs,
        )
        if "context" in self.declared:
            arguments["context"] = context
        # What a result is poured into must not get the report as well.
        is_taken = any(is_stdout(place) for place in files)
        with redirect_stdout(sys.stderr) if is_taken else nullcontext():
            self.command(**arguments)

    def _own(self, values: Mapping[str, Any], context: typer.Context) -> Options:
        """The command's own options.

        Raises:
            typer.BadParameter: one that must be given is not.
        """
        assert self.options is not None
        for name, field in self.own.items():
            if field.default is MISSING and values.get(name) is None:
                raise typer.BadParameter(
                    "expected one, here or in the file of --config",
                    ctx=context,
                    param_hint=flag_of(field),
                )
        return self.options(
            **{name: values[name] for name in self.own.keys() & values.keys()}
        )

    def _runs(
        self,
        stated: Mapping[str, Any],
        given: Mapping[str, Any],
        context: typer.Context,
    ) -> list[RunConfig]:
        """One configuration for every combination of the values given.

        Raises:
            typer.BadParameter: no trace, where only a trace can run.
        """
        names = _fields(self.run).keys() - self.own.keys()
        base = self.run(**{name: stated[name] for name in names & stated.keys()})
        several = "configs" in self.declared
        values = {
            name: value if several and isinstance(value, tuple) else (value,)
            for name, value in given.items()
            if name in self.shared
        }
        configs = [
            base.replaced(**dict(zip(values, combination, strict=True)))
            for combination in itertools.product(*values.values())
        ]
        # A measured run may take a model instead; its command checks that.
        has_trace = "trace" not in self.shared or configs[0].trace is not None
        if self.run is RunConfig and not has_trace:
            raise typer.BadParameter(
                "expected a trace, here or in the file of --config",
                ctx=context,
                param_hint="TRACE",
            )
        return configs

    def _read(self, file: Path, context: typer.Context) -> dict[str, Any]:
        """Options of a file; a note where its run was made by another moesim."""
        from moesim.base.version import __version__, git_commit
        from moesim.runs.config_file import read_config

        content = read_config(file, more=self.own)
        # TOML files are written by hand and name no version.
        made_by = (content.version, content.git_commit)
        if content.version is not None and made_by != (__version__, git_commit()):
            print(
                f"note: {file} was made by moesim {content.version} at commit"
                f" {content.git_commit}; this is {__version__} at commit"
                f" {git_commit()}, so results may differ",
                file=sys.stderr,
            )
        # Digests are no options, but every run checks them.
        supported = {*self.shared, *self.own}
        if self.shared:
            supported |= {
                name
                for name, field in _fields(self.run).items()
                if not option_of(field).on_command_line
            }
        values = content.supported(supported, command=context.command_path)
        if content.version is not None:
            # Its policy is one of those that a comparison is asked for, if it is not
            # merely the default of a run.
            every = _fields(self.run)
            values = {
                name: value
                for name, value in values.items()
                if name not in self.own
                or name not in every
                or value != default_of(every[name])
            }
        if self.shared:
            # What is wrong in a file is told as the file's.
            names = _fields(self.run).keys() - self.own.keys()
            run = {name: values[name] for name in names & values.keys()}
            replace(content, values=run).build(self.run)
        return values

    def _named(self, error: ConfigError, context: typer.Context) -> Exception:
        """The error as the command line's, if it begins with the name of an option."""
        name, colon, reason = str(error).partition(": ")
        field = (self.shared | self.own).get(name)
        if not colon or field is None:
            return error
        return typer.BadParameter(reason, ctx=context, param_hint=flag_of(field))


def _fields(kind: type[Options]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(kind)}


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _explicit(context: typer.Context, names: Collection[str]) -> list[str]:
    """Options that stand on the command line; all others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        name
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def _inputs(parts: Iterable[Options], axes: Mapping[str, Any]) -> list[Path]:
    """Every file that the options name to be read, those that are implied too."""
    inputs = [place for part in parts for place in part.inputs()]
    for name in ("trace", "warm", "hw", "artefacts"):
        for value in as_list(axes.get(name, ())):
            inputs += RunConfig(**{name: value}).inputs()
    return inputs


def _annotation(field: Field[Any], *, is_required: bool = False) -> Any:
    """The annotation from which typer makes an option or argument of a field."""
    stated = option_of(field)
    details = _details(field)
    kind: Any = stated.kind
    if stated.argument or field.name == "trace":
        # A list without a default would ask for at least one word.
        kind = list[kind] if stated.many else kind
        kind = kind if is_required else kind | None
        return Annotated[kind, typer.Argument(**details, show_default=False)]
    if stated.many:
        kind = Any
        default = default_of(field)
        details["show_default"] = ",".join(map(str, default)) if default else False
    # Typer reads from the type whether an option may be left out.
    elif default_of(field) is None:
        kind = kind | None
    return Annotated[kind, typer.Option(_declared_flag(field), **details)]


def _declared_flag(field: Field[Any]) -> str:
    """Its flag, with the one that says no to what is done without being asked."""
    flag = flag_of(field)
    if option_of(field).kind is bool and field.default is True:
        return f"{flag}/--no-{flag.removeprefix('--')}"
    return flag


def _details(field: Field[Any]) -> dict[str, Any]:
    """What typer is told of a field's values."""
    stated = option_of(field)
    details: dict[str, Any] = {
        "metavar": stated.metavar,
        "help": stated.help,
        "autocompletion": completion_of(field),
    }
    if stated.many and not stated.argument:
        details["metavar"] = f"{stated.metavar or 'NAME'},…"
        details["parser"] = _list_parser(field)
    elif stated.choices:
        details["parser"] = one_of(*stated.choices)
    # Bounds of a size are checked with the other sizes, against the model.
    elif stated.is_size:
        details["parser"] = size_bytes
    elif stated.pattern is not None:
        details["parser"] = matching(*stated.pattern)
    elif stated.kind in {int, float}:
        details["min"] = stated.minimum
        details["max"] = stated.maximum
    return details


def _list_parser(field: Field[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """The parser of several values, separated by commas."""
    stated = option_of(field)

    def parse(text: Any) -> tuple[Any, ...]:
        # Typer parses defaults, too.
        if not isinstance(text, str):
            return tuple(text)
        if stated.policy_kind is not None:
            return tuple(split_policies(text, flag_of(field)))
        if stated.is_size:
            return sizes_bytes(text)
        if stated.kind is int:
            return counts(text)
        if stated.kind is float:
            is_share = (stated.minimum, stated.maximum) == (0, 1)
            return shares(text) if is_share else tuple(numbers(text))
        return tuple(stated.kind(name) for name in names(text))

    return parse


def completion_of(field: Field[Any]) -> Callable[[str], list[str]] | None:
    """What a shell completes a field's value from; None where it should offer files."""
    kind = option_of(field).policy_kind
    if kind is not None:
        return lambda incomplete: _beginning(incomplete, _policies(kind))
    if field.name == "hw":
        return lambda incomplete: _beginning(incomplete, _machines())
    return None


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


# -- parsers of values -----------------------------------------------------------------


def size_bytes(text: str) -> int:
    """Parse ``8GiB``, ``500MB`` or ``1024``."""
    # Only commands that are given a size need the module.
    from moesim.base.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        from moesim.base.text import one_expected

        raise typer.BadParameter(f"{error}{one_expected(text, 'size')}") from None


def sizes_bytes(text: str) -> tuple[int, ...]:
    """Parse ``4GiB,8GiB``, each once."""
    return tuple(dict.fromkeys(size_bytes(part) for part in text.split(",")))


def one_of(*choices: str) -> Callable[[str], str]:
    """Make a parser that accepts these texts only."""

    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"expected {' or '.join(choices)}, got {text!r}")
        return text

    return parse


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Make a parser that accepts texts which the whole of `pattern` matches.

    Args:
        pattern: a regular expression.
        expected: what the pattern stands for, in errors.
    """

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise typer.BadParameter(f"expected {expected}, got {text!r}")
        return text

    return parse


def split_policies(text: str, option: str) -> list[str]:
    """Split the policies of an option.

    Raises:
        typer.BadParameter: no policy at all.
    """
    from moesim.policies.base import PolicyError
    from moesim.policies.parameters import split_policies as split

    try:
        return split(text)
    except PolicyError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def shares(text: str) -> tuple[float, ...]:
    """Parse ``0.125,0.25,0.5``, each once."""
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    # NaN is a number to Python, but no share.
    if not numbers or not all(0 <= share <= 1 for share in numbers):
        raise typer.BadParameter(
            f"expected shares between 0 and 1 such as 0.125,0.25,0.5, got {text!r}"
        )
    return numbers


def counts(text: str) -> tuple[int, ...]:
    """Parse ``8,16,32``, each once."""
    # `int` would take signs, spaces and underscores too.
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise typer.BadParameter(
            f"expected whole numbers such as 8,16,32, got {text!r}"
        )
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Parse ``a,b``, each once."""
    parts = (part.strip() for part in text.split(","))
    unique = tuple(dict.fromkeys(filter(None, parts)))
    if not unique:
        raise typer.BadParameter(f"expected names separated by commas, got {text!r}")
    return unique


def numbers(text: str) -> list[float]:
    """Parse ``0.1,0.3,0.6`` as it stands."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers separated by commas, got {text!r}"
        ) from None


def device_option() -> Any:
    """``--device``, where a model computes."""
    text = "Where the model computes: cpu or cuda."
    pattern = (r"cpu|cuda(:\d+)?", "cpu or cuda")
    return option("cpu", text, metavar="NAME", pattern=pattern)


def check_device(device: str) -> None:
    """Refuse, before a model is loaded, a device that this machine does not have.

    Raises:
        typer.BadParameter: naming it.
    """
    # Every machine has one, and importing torch takes seconds.
    if device == "cpu":
        return
    from moesim.runtime.accelerators import accelerator_here

    accelerator = accelerator_here()
    if accelerator is None or accelerator.type != device.partition(":")[0]:
        raise typer.BadParameter(
            f"torch finds no {device!r} on this machine", param_hint="--device"
        )


def check_places(
    *,
    folder: Path | None = None,
    folders: Iterable[Path] = (),
    files: Iterable[Path | None] = (),
    inputs: Iterable[object] = (),
) -> None:
    """Refuse, before a long run and not after it, a result that has nowhere to go or
    would destroy something.

    Args:
        folder, folders: results go there, each with a name of its own.
        files: each is a result.
        inputs: files and folders that are read; no result replaces one of them or goes
            into one. What is no path, such as an opened trace, is skipped.

    Raises:
        OSError: naming the place.
    """
    read = [Path(place) for place in inputs if isinstance(place, str | Path)]
    written: list[Path] = []
    results = [(each, True) for each in folders]
    results += [] if folder is None else [(folder, True)]
    results += [(file, False) for file in files if file is not None]
    for place, is_folder in results:
        target = destination(place)
        for other in read:
            if _is_within(target, other, is_folder=is_folder):
                raise _taken(place, "what is read")
        if any(_is_same(target, other) for other in written):
            raise _taken(place, "another result")
        written.append(target)
        if not is_stream(place):
            _check_writable(target, is_file=not is_folder)


def _is_within(target: Path, read: Path, *, is_folder: bool) -> bool:
    """Whether a result would replace what is read, or go into a folder that is read."""
    if _is_same(target, read):
        # Results stand beside others in a folder, each with a name of its own.
        return not is_folder
    return read.is_dir() and Path(os.path.realpath(read)) in target.parents


def _is_same(target: Path, other: Path) -> bool:
    """Whether two paths mean one file: by name, over links, or by its inode."""
    if target == Path(os.path.realpath(other)):
        return True
    try:
        return target.samefile(other)
    except OSError:
        return False


def _taken(place: Path, victim: str) -> OSError:
    return OSError(
        errno.EEXIST,
        f"it would replace {victim}; choose another place",
        str(place),
    )


def _check_writable(place: Path, *, is_file: bool) -> None:
    # Opening it would say so only after the run.
    if is_file and place.is_dir():
        raise OSError(
            errno.EISDIR, "expected a place for a file, found a folder", str(place)
        )
    # Folders on the way are made later, so the nearest that is there decides.
    nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not (nearest.is_dir() or (nearest == place and is_file)):
        raise OSError(errno.ENOTDIR, "expected a folder, found a file", str(nearest))
    if not os.access(nearest, os.W_OK):
        raise OSError(errno.EACCES, "not writable; choose another place", str(nearest))


def check_installed(library: str) -> None:
    """Check that a library is there, without importing it.

    Raises:
        ImportError: it is not.
    """
    try:
        is_there = importlib.util.find_spec(library) is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise ImportError(f"no module {library}", name=library)
