"""A command line from a dataclass: every field becomes an option.

`from_dataclass` is given to a command, a function whose parameters say what it works
with:

- ``config``: a `RunConfig`; or ``axes``, fields of `RunConfig` by name with the values
  that were given, several of which commas separate;
- ``options``: the command's own options, a dataclass derived from `Options`.

Typer splits the command line into words, helps and completes. What a word stands for,
and whether it fits, the dataclasses say, as they do of files and of Python's arguments.
Before the command begins, it is checked which options fit together, and that results
have a place which is no input.
"""

import errno
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.base.files import destination, is_stdout
from moesim.base.options import (
    WRITTEN,
    ConfigError,
    Option,
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

CONFIG_FILE = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Take options from a TOML file, or those of a run.json; what is given"
            " here comes first.",
        ),
    ],
)
CONTEXT = inspect.Parameter(
    "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
)
"""Typer fills it in; errors name its command."""


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
        self.run = run
        taken = inspect.signature(command).parameters
        self.options: type[Options] | None = None
        if "options" in taken:
            self.options = taken["options"].annotation
        self.own = _fields(self.options)
        self.is_swept = "axes" in taken
        self.shared: dict[str, Field[Any]] = {}
        if self.is_swept or "config" in taken:
            # A command may say more exactly what one of the run's options means to it.
            hidden = {*without, *self.own}
            self.shared = {
                name: field
                for name, field in _fields(run).items()
                if name not in hidden and option_of(field).on_command_line
            }
        # What makes axes reads files of its own, with lists in them.
        self.from_file = from_file and not self.is_swept

    def parameters(self) -> list[inspect.Parameter]:
        """Typer's parameters, in the order in which help shows them."""
        ordered = [self._parameter(self.shared[name]) for name in in_order(self.shared)]
        of_command = sorted(self.own, key=lambda name: name in WRITTEN)
        ordered += [self._parameter(self.own[name]) for name in of_command]
        return [*ordered, *([CONFIG_FILE] if self.from_file else []), CONTEXT]

    def _parameter(self, field: Field[Any]) -> inspect.Parameter:
        stated = option_of(field)
        # A shell completes paths; all else is read here.
        kind: Any = stated.kind if stated.kind in (bool, Path) else str
        details: dict[str, Any] = {
            "help": _help(field),
            "metavar": stated.metavar,
            "show_default": False,
        }
        if self._is_argument(field):
            # A list without a default would ask for at least one word.
            kind = list[kind] if stated.many else kind
            info: Any = typer.Argument(**details)
        else:
            if self._is_several(field):
                kind = str
                details["metavar"] = f"{stated.metavar},…"
            info = typer.Option(_declared_flag(field), **details)
        # A file may state what must be given, and the dataclass knows defaults.
        must = field.default is MISSING and not self.from_file
        is_trace = field.name == "trace" and not self.from_file and not self.is_swept
        is_required = must or is_trace
        return inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kind if is_required else kind | None, info],
            default=inspect.Parameter.empty if is_required else None,
        )

    def _is_argument(self, field: Field[Any]) -> bool:
        is_trace = field.name == "trace" and not self.is_swept
        return is_trace or option_of(field).argument

    def _is_several(self, field: Field[Any]) -> bool:
        """Whether commas separate values of an option."""
        is_axis = self.is_swept and field.name in self.shared
        # Limits are one value, although a comma stands between them.
        return (is_axis or option_of(field).many) and field.name != "slo"

    def call(self, words: dict[str, Any]) -> None:
        """Build the dataclasses, check them, and call the command."""
        context = words.pop("context")
        file = words.pop("config_file", None)
        declared = self.shared | self.own
        arguments: dict[str, Any] = {}
        parts: list[Options] = []
        try:
            given = {
                name: self._value(declared[name], word)
                for name, word in words.items()
                if word not in (None, [])
            }
            stated = {} if file is None else self._read(file, context)
            if self.options is not None:
                parts.append(self.options(**_part(stated | given, self.own)))
                arguments["options"] = parts[0]
            if self.is_swept:
                axes = _part(given, self.shared)
                for name, values in axes.items():
                    configs = [self.run(**{name: value}) for value in values]
                    axes[name] = [getattr(config, name) for config in configs]
                    parts += configs
                arguments["axes"] = axes
            elif self.shared:
                parts.append(self._config(stated, given, context))
                arguments["config"] = parts[-1]
            check_together(declared.values(), {*stated, *given})
        except ConfigError as error:
            raise self._named(error, context) from None

        inputs = [place for part in parts for place in part.inputs()]
        if file is not None:
            inputs.append(file)
        files = [place for part in parts for place in part.outputs()]
        folders = [place for part in parts for place in part.folders()]
        check_places(folders=folders, files=files, inputs=inputs)
        # What a result is poured into must not get the report as well.
        is_taken = any(is_stdout(place) for place in files)
        with redirect_stdout(sys.stderr) if is_taken else nullcontext():
            self.command(**arguments)

    def _value(self, field: Field[Any], word: Any) -> Any:
        """What a word stands for; a number that is none is refused by the dataclass.

        Raises:
            ConfigError: nothing between the commas.
        """
        stated = option_of(field)
        # Flags, paths and arguments are ready.
        if not isinstance(word, str):
            return word
        if not self._is_several(field):
            is_axis = self.is_swept and field.name in self.shared
            return [word] if is_axis else _number(word, stated)
        if stated.policy_kind is not None:
            values: list[Any] = _policies_in(word, field.name)
        else:
            words = [part.strip() for part in word.split(",")]
            values = [_number(part, stated) for part in words if part]
        if not values:
            raise ConfigError(f"{field.name}: expected values, found only commas")
        # Bits, recalls and the like belong to places; whatever else is tried, once.
        is_placed = stated.kind is float and stated.minimum is None
        return values if is_placed else list(dict.fromkeys(values))

    def _config(
        self,
        stated: Mapping[str, Any],
        given: Mapping[str, Any],
        context: typer.Context,
    ) -> RunConfig:
        """The configuration of the run.

        Raises:
            typer.BadParameter: no trace, where only a trace can run.
        """
        base = self.run(**_part(stated, _fields(self.run).keys() - self.own.keys()))
        config = base.replaced(**_part(given, self.shared))
        # A measured run may take a model instead; its command checks that.
        needs_trace = self.run is RunConfig and "trace" in self.shared
        if needs_trace and config.trace is None:
            raise typer.BadParameter(
                "expected a trace, here or in the file of --config",
                ctx=context,
                param_hint="TRACE",
            )
        return config

    def _read(self, file: Path, context: typer.Context) -> dict[str, Any]:
        """Options of a file."""
        from moesim.runs.config_file import check_supported, config_of, read_config

        values = read_config(file, more=self.own)
        # Digests are no options, but every run checks them.
        digests = [name for name in _fields(self.run) if name.endswith("_digest")]
        known = [*self.shared, *self.own, *(digests if self.shared else ())]
        check_supported(file, values, known, context.command_path)
        if self.shared:
            # What is wrong in a file is told as the file's.
            of_run = _part(values, values.keys() - self.own.keys())
            config_of(file, of_run, self.run)
        return values

    def _named(self, error: ConfigError, context: typer.Context) -> Exception:
        """The error as the command line's, if it begins with the name of an option."""
        name, colon, reason = str(error).partition(": ")
        field = (self.shared | self.own).get(name)
        if not colon or field is None:
            return error
        return typer.BadParameter(reason, ctx=context, param_hint=flag_of(field))


def _fields(kind: type[Options] | None) -> dict[str, Field[Any]]:
    return {} if kind is None else {field.name: field for field in fields(kind)}


def _part(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: values[name] for name in values if name in names}


def _declared_flag(field: Field[Any]) -> str:
    """Its flag, with the one that says no to what is done without being asked."""
    flag = flag_of(field)
    if option_of(field).kind is bool and field.default is True:
        return f"{flag}/--no-{flag.removeprefix('--')}"
    return flag


def _help(field: Field[Any]) -> str:
    """What help says of a field, its default included if it is any."""
    text = option_of(field).help
    default = default_of(field)
    if default is None or isinstance(default, bool) or default in ("", ()):
        return text
    return f"{text}  [default: {','.join(map(str, as_list(default)))}]"


def _number(word: str, stated: Option) -> Any:
    """A word as a number, where one is wanted; sizes have units."""
    if stated.is_size or stated.kind not in (int, float):
        return word
    try:
        return stated.kind(word)
    except ValueError:
        return word


def _policies_in(text: str, option: str) -> list[str]:
    from moesim.policies.base import PolicyError
    from moesim.policies.parameters import split_policies

    try:
        return split_policies(text)
    except PolicyError as error:
        raise ConfigError(f"{option}: {error}") from None


def device_option() -> Any:
    """``--device``, where a model computes."""
    return option("cpu", "Where the model computes: cpu or cuda.", metavar="NAME")


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
    *, folders: Iterable[Path], files: Iterable[Path], inputs: Iterable[Path]
) -> None:
    """Refuse, before a long run and not after it, a result that has nowhere to go or
    would destroy something.

    Args:
        folders: results go there, each with a name of its own.
        files: each is a result.
        inputs: files and folders that are read; no result replaces one of them or goes
            into one.

    Raises:
        OSError: naming the place.
    """
    read = list(inputs)
    written: list[Path] = []
    results = [*((each, True) for each in folders), *((each, False) for each in files)]
    for place, is_folder in results:
        target = destination(place)
        for other in read:
            if _is_within(target, other, is_folder=is_folder):
                raise _taken(place, "what is read")
        if any(_is_same(target, other) for other in written):
            raise _taken(place, "another result")
        written.append(target)
        if not is_stdout(place):
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
        errno.EEXIST, f"it would replace {victim}; choose another place", str(place)
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
