"""The description of a run: one frozen dataclass for commands, Python and files.

`RunConfig` declares every option that runs share, once. The command line, the keyword
arguments of `moesim.replay` and its relatives, configuration files, ``run.json`` and
the JSON schema are all derived from its fields. So a new option is a field here and a
line where it is used.
"""

# ruff: noqa: RUF009 - `_option` answers `dataclasses.field`, which makes no defaults
from __future__ import annotations

import difflib
import inspect
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.systems import System
    from moesim.runs.memory import MemoryOptions, MemorySize
    from moesim.runtime.record.residual import Residual
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.reader import Trace
    from moesim.traces.passes import Passes

Function = TypeVar("Function", bound="Callable[..., Any]")


class ConfigError(ValueError):
    """An option that does not exist, or a value that does not fit it."""


@dataclass(frozen=True, slots=True)
class Option:
    """How people write the value of a field, and which values fit.

    Attributes:
        help: one line that explains it.
        kind: what a text is read as: ``str``, ``int``, ``float``, ``bool`` or ``Path``.
        metavar: stands for the value in help texts; None shows the kind.
        minimum, maximum: bounds of a number, both included.
        choices: the only texts that fit; empty where any does.
        is_size: the number counts bytes, which people write as ``8GiB``.
        policy_kind: the text names a policy of this kind, parameters included.
        several: help for commands that take several values at once; None where no
            command does.
        accepts_objects: Python may pass what the text stands for, already loaded.
        on_command_line: False for what only files and Python say.
    """

    help: str
    kind: type = str
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    is_size: bool = False
    policy_kind: str | None = None
    several: str | None = None
    accepts_objects: bool = False
    on_command_line: bool = True


def _option(default: Any, text: str, **details: Any) -> Any:
    """Declare a field of a configuration; `details` as in `Option`."""
    return field(default=default, metadata={"option": Option(text, **details)})


def option_of(declared: Field[Any]) -> Option:
    """How people write the value of a field."""
    option: Option = declared.metadata["option"]
    return option


MOST_MEMORY_BYTES = 1 << 50
"""A PiB: more than any machine has."""

CACHE_SIZES = ("cache_ratio", "slots_per_layer", "gpu_memory_bytes")
"""Three ways to state one quantity, the size of the GPU cache."""

_SCOPE = {"scope": "cache_scope"}
"""`MemoryOptions` is about caches only, so it calls the field by a shorter name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run is made with: trace, policies, machine, memories, and the walk.

    Every field is an option of the command line and a key of configuration files. None
    leaves the choice to the system, the profile or the default that the help names.

    Raises:
        ConfigError: a value that does not fit its field.
    """

    trace: str | Path | Trace | None = _option(
        None,
        "A moesim trace (Parquet), or tiny, which ships.",
        kind=Path,
        metavar="TRACE",
        accepts_objects=True,
    )
    # Who decides. A system is all four policies; the others replace parts of it.
    policy: str = _option(
        "greedy",
        "A system or an assignment policy (see: list).",
        metavar="NAME",
        policy_kind="assignment",
    )
    cache: str | None = _option(
        None,
        "Cache policy, such as lru or lfu:decay=0.9 (see: list cache).",
        policy_kind="cache",
    )
    prefetch: str | None = _option(
        None, "Prefetch policy (see: list prefetch).", policy_kind="prefetch"
    )
    routing: str | None = _option(
        None,
        "Routing policy; any but as-recorded alters the model's output.",
        policy_kind="routing",
    )
    hw: str | Path | HardwareProfile | None = _option(
        None,
        "Hardware profile. Default: ./hw.toml, your own moesim/hw.toml, or"
        " rtx3090-epyc7532.",
        metavar="NAME|FILE",
        several="Hardware profiles. Default: ./hw.toml, your own moesim/hw.toml, or"
        " rtx3090-epyc7532.",
        accepts_objects=True,
    )
    # How large memories are. The first three state one size; at most one is given.
    cache_ratio: float | None = _option(
        None,
        "Share of all experts in the GPU cache.",
        kind=float,
        metavar="R",
        minimum=0,
        maximum=1,
        several="Shares of all experts in the GPU cache.",
    )
    slots_per_layer: int | None = _option(
        None,
        "Experts per layer in the GPU cache.",
        kind=int,
        metavar="N",
        minimum=0,
        several="Experts per layer in the GPU cache.",
    )
    gpu_memory_bytes: int | None = _option(
        None,
        "Memory of each GPU for weights, such as 8GiB; experts get what the rest"
        " leaves. Default: the card's own, less keys and values and workspace.",
        kind=int,
        metavar="SIZE",
        minimum=0,
        maximum=MOST_MEMORY_BYTES,
        is_size=True,
        several="Memory of each GPU for weights, such as 4GiB,8GiB; experts get what"
        " the rest leaves. Default: the card's own, less keys and values and"
        " workspace.",
    )
    context_tokens: int = _option(
        8192,
        "Tokens of a sequence whose keys and values the GPU holds, where no size of its"
        " cache is given.",
        kind=int,
        metavar="N",
        minimum=0,
    )
    host_memory_bytes: int | None = _option(
        None,
        "Host memory for experts; what does not fit is read from SSD.",
        kind=int,
        metavar="SIZE",
        minimum=0,
        maximum=MOST_MEMORY_BYTES,
        is_size=True,
    )
    host_cache: str = _option(
        "lru",
        "Cache policy of host memory where --host-memory limits it.",
        policy_kind="cache",
    )
    cache_scope: str | None = _option(
        None,
        "Do layers share the cache's slots? Default: the system's, else layer.",
        metavar="layer|global",
        choices=("layer", "global"),
    )
    staging: int | None = _option(
        None,
        "Staging slots. Default: the system's or profile's.",
        kind=int,
        metavar="N",
        minimum=1,
    )
    prefetch_budget_bytes: int | None = _option(
        None,
        "Most bytes prefetched per layer step.",
        kind=int,
        metavar="SIZE",
        minimum=0,
        is_size=True,
    )
    gpu_split: str = _option(
        "layers",
        "What several GPUs share out.",
        metavar="layers|experts",
        choices=("layers", "experts"),
    )
    # How the trace is walked through, and what is known before.
    batch: int = _option(
        1, "Sequences that run together.", kind=int, metavar="B", minimum=1
    )
    steps: int | None = _option(
        None, "Keep the first N forward passes.", kind=int, metavar="N", minimum=1
    )
    micro_batch: int | None = _option(
        None,
        "Most prompt tokens of a forward pass, llama.cpp's -ub. Default: the system's,"
        " else whole prompts.",
        kind=int,
        metavar="N",
        minimum=1,
    )
    draft_tokens: int | None = _option(
        None,
        "Tokens that a draft proposes for each forward pass to verify; 0 for none."
        " Default: the system's.",
        kind=int,
        metavar="N",
        minimum=0,
    )
    acceptance: float = _option(
        0.8,
        "Probability that a drafted token is right, if all before it are.",
        kind=float,
        metavar="P",
        minimum=0,
        maximum=1,
    )
    seed: int = _option(0, "For policies that draw.", kind=int, metavar="N", minimum=0)
    warm: str | Path | Trace | None = _option(
        None,
        "Calibration trace from which policies may fill the cache first.",
        kind=Path,
        metavar="TRACE",
        accepts_objects=True,
    )
    artefacts: str | Path | None = _option(
        None,
        "Calibration artefacts, such as the network that train-cache writes.",
        kind=Path,
        metavar="DIR",
    )
    noise_seed: int | None = _option(
        None,
        "Draw operation times from a calibrated profile's distributions, with this"
        " seed.",
        kind=int,
        metavar="N",
        minimum=0,
    )
    engine: str = _option(
        "auto",
        "What simulates: auto takes the compiled engine where it knows everything"
        " involved, else SimPy; both give the same results.",
        metavar="auto|simpy|compiled",
        choices=("auto", "simpy", "compiled"),
    )
    # When sequences arrive, as requests of users; without it they all wait in line.
    arrivals: str | None = _option(
        None,
        "When requests arrive: poisson:RATE (per second), or a file of seconds; the"
        " batch is formed as they come.",
        metavar="poisson:RATE|FILE",
        on_command_line=False,
    )
    slo: str | None = _option(
        None,
        "Limits in seconds that a request should meet, such as ttft=0.5,tpot=0.1.",
        metavar="LIMITS",
        on_command_line=False,
    )
    # What files must be, where a run is to be repeated exactly.
    trace_digest: str | None = _option(
        None,
        "SHA-256 that the trace must have; a run.json names that of its own trace.",
        on_command_line=False,
    )
    hw_digest: str | None = _option(
        None,
        "SHA-256 that the profile must have; a run.json names that of its own profile.",
        on_command_line=False,
    )

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or out of bounds.

        Raises:
            ConfigError: naming the field.
        """
        for declared in fields(self):
            value = getattr(self, declared.name)
            option = option_of(declared)
            if value is None and declared.default is None:
                continue
            if option.is_size and isinstance(value, str):
                value = _bytes_of(declared.name, value)
                object.__setattr__(self, declared.name, value)
            _check(declared.name, value, option)
            if isinstance(value, Real):
                # Numbers of numpy become Python's, which JSON and caches of compiled
                # loops take.
                object.__setattr__(self, declared.name, option.kind(value))

    @classmethod
    def of(
        cls,
        trace: RunConfig | str | Path | Trace | None = None,
        policy: str | None = None,
        *,
        memory: MemorySize | None = None,
        **options: Any,
    ) -> Self:
        """Build a configuration from the arguments of a Python call.

        Args:
            trace: a trace, or a configuration whose options are replaced.
            policy: a system or an assignment policy; None keeps the default.
            memory: sizes of memories in one object, or that of the GPU cache as text
                (``8GiB``, ``16 slots``, ``25 %``), instead of single options.
            options: fields of this class by name; sizes also without ``_bytes``.

        Raises:
            TypeError: an unknown option, or one that `memory` states too.
            ConfigError: a value that does not fit its field.
        """
        # A simulated run may be made of the options of a measured one, and vice versa.
        if isinstance(trace, cls):
            config = trace
        elif isinstance(trace, RunConfig):
            config = cls(**trace.options())
        else:
            config = cls(trace=trace)
        if policy is not None:
            options["policy"] = policy
        options = {_field_name(name): value for name, value in options.items()}
        if memory is not None:
            memory = _memory_of(memory)
            # All of them, so that sizes of `trace` do not shine through.
            sizes = {
                _SCOPE.get(size.name, size.name): getattr(memory, size.name)
                for size in fields(memory)
            }
            if doubled := sizes.keys() & options.keys():
                raise TypeError(
                    f"{min(doubled)}: expected it once, got it beside memory, which"
                    " states it too; drop one"
                )
            options |= sizes
        return config.replaced(**options)

    def replaced(self, **options: Any) -> Self:
        """Copy this configuration with other values of some fields.

        What belongs to a replaced value goes with it: the digest of another trace or
        profile, and the size of the GPU cache if it is stated in another way.

        Raises:
            TypeError: an unknown option.
            ConfigError: a value that does not fit its field.
        """
        names = [declared.name for declared in fields(self)]
        options = {_field_name(name): value for name, value in options.items()}
        for name in options:
            if name not in names:
                raise TypeError(
                    f"unknown option {name!r}{did_you_mean(name, names)}; known:"
                    f" {', '.join(names)}"
                )
        # Names are those of the fields, so this holds for digests to come.
        cleared = [f"{name}_digest" for name in ("trace", "hw") if name in options]
        if any(options.get(name) is not None for name in CACHE_SIZES):
            cleared += CACHE_SIZES
        values: dict[str, Any] = dict.fromkeys(cleared)
        return replace(self, **(values | options))

    @property
    def system(self) -> System:
        """The four policies that `policy` and the parts given beside it name.

        Raises:
            PolicyError: an unknown policy, or a part that is named twice.
        """
        # The command line imports this module for its help texts, which must be quick.
        from moesim.policies.systems import compose  # noqa: PLC0415 - imports numpy

        return compose(
            self.policy,
            cache=self.cache,
            prefetch=self.prefetch,
            routing=self.routing,
        )

    @property
    def passes(self) -> Passes:
        """What the forward passes of a run hold."""
        from moesim.traces.passes import Passes  # noqa: PLC0415 - imports numpy

        system = self.system
        micro_batch = self.micro_batch
        drafted = self.draft_tokens
        if drafted is None:
            # Sequences of a batch would advance at different paces.
            drafted = system.draft_tokens if self.batch == 1 else 0
        return Passes(
            system.micro_batch if micro_batch is None else micro_batch,
            draft_tokens=drafted,
            acceptance=self.acceptance,
            seed=self.seed,
        )

    @property
    def memory(self) -> MemoryOptions:
        """Sizes of memories, as one object."""
        from moesim.runs.memory import MemoryOptions  # noqa: PLC0415 - imports numpy

        sizes = {
            size.name: getattr(self, _SCOPE.get(size.name, size.name))
            for size in fields(MemoryOptions)
        }
        return MemoryOptions(**sizes)

    def options(self) -> dict[str, Any]:
        """All fields by name, as they are."""
        return {
            declared.name: getattr(self, declared.name) for declared in fields(self)
        }

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, which `moesim.load_config` reads back.

        Paths are absolute, so that a run can be repeated from any folder.
        """
        return {
            declared.name: _plain(getattr(self, declared.name), option_of(declared))
            for declared in fields(self)
        }


_SIZES = {
    declared.name for declared in fields(RunConfig) if option_of(declared).is_size
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredConfig(RunConfig):
    """What a run on this machine is made with: a `RunConfig`, and its real experts."""

    trace: str | Path | Trace | None = _option(
        None,
        "Routing to be forced; without it, a model runs.",
        kind=Path,
        metavar="TRACE",
        accepts_objects=True,
    )
    hw: str | Path | HardwareProfile | None = _option(
        None,
        "Profile of this machine. Default: ./hw.toml, your own moesim/hw.toml, or"
        " measured now, about 10 s.",
        metavar="NAME|FILE",
        accepts_objects=True,
    )
    # For traces: what their experts are, as routing alone has no weights.
    shape: str | None = _option(
        None,
        "Sizes of the experts, such as qwen3-30b-a3b/4. Default: the trace's.",
        metavar="NAME[/N]",
    )
    distinct: int | None = _option(
        None,
        "Different experts in a random store; others share them in turn.",
        kind=int,
        metavar="N",
        minimum=1,
    )
    # For live models: what they generate.
    model: str | Path | None = _option(
        None,
        "The shipped model or a Hugging Face folder.",
        metavar="tiny|DIR",
        accepts_objects=True,
    )
    max_new_tokens: int = _option(
        64, "Tokens to generate per prompt.", kind=int, metavar="N", minimum=0
    )
    temperature: float = _option(0.0, "0 decodes greedily.", kind=float, minimum=0)
    residual: str | Path | Residual | None = _option(
        None,
        "Residual vectors for --prefetch residual (see: record).",
        kind=Path,
        metavar="FILE",
        accepts_objects=True,
    )
    verify: bool = _option(
        False,
        "Compare all logits with the plain model's.",
        kind=bool,
    )
    # For both: where weights lie, and what computes them.
    store: str | Path | ExpertStore | None = _option(
        None,
        "Expert store; built where there is none. Default: the user's cache folder.",
        kind=Path,
        metavar="DIR",
        accepts_objects=True,
    )
    dtype: str | None = _option(
        None,
        "float32, bfloat16 or float16. Default: the model's own; float32 for tiny and"
        " TRACE, bfloat16 on CUDA.",
        metavar="NAME",
        choices=("float32", "bfloat16", "float16"),
    )
    own_cores: bool = _option(
        False,
        "Give the host accelerator a core of its own; for idle machines.",
        kind=bool,
    )


def takes_options(
    config: type[RunConfig], *, without: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Show the fields of `config` in the signature of a function with ``**options``.

    Help and completion in notebooks read signatures.

    Args:
        config: whose fields the function takes.
        without: fields that it does not take.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        kept = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        # What a function declares itself it documents itself.
        taken = {parameter.name for parameter in kept} | set(without)
        shared = [
            inspect.Parameter(
                declared.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=declared.default,
                annotation=declared.type,
            )
            for declared in fields(config)
            if declared.name not in taken
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*kept, *shared]
        )
        return function

    return decorate


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known word; nothing if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def default_of(declared: Field[Any]) -> Any:
    """The default of a field."""
    assert declared.default is not MISSING, "every option has a default"
    return declared.default


_TYPES: dict[type, tuple[Any, str]] = {
    str: (str, "a text"),
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    Path: ((str, Path), "a path"),
}
"""What each kind of option may be in Python, and how errors call it. Numbers of numpy
are numbers too."""


def _field_name(name: str) -> str:
    """``gpu_memory`` is ``gpu_memory_bytes``, as on the command line."""
    return f"{name}_bytes" if f"{name}_bytes" in _SIZES else name


def _memory_of(memory: MemorySize) -> MemoryOptions:
    from moesim.runs.memory import MemoryOptions  # noqa: PLC0415 - imports numpy

    if is_list(memory):
        raise ConfigError(
            f"memory: expected one size, got {memory!r}; moesim.sweep takes several"
        )
    return MemoryOptions.of(memory)


def _bytes_of(name: str, text: str) -> int:
    from moesim.traces.sizes import parse_bytes  # noqa: PLC0415 - for texts only

    try:
        return parse_bytes(text, where=name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def is_list(value: Any) -> bool:
    """Whether a value is several values: a list, tuple, array or range."""
    is_sequence = hasattr(value, "__iter__") and hasattr(value, "__len__")
    return is_sequence and not isinstance(value, str)


def as_list(value: Any) -> list[Any]:
    """Several values as a list; a single one as a list of one."""
    return list(value) if is_list(value) else [value]


def _check(name: str, value: Any, option: Option) -> None:
    if is_list(value):
        raise ConfigError(
            f"{name}: expected one value, got {value!r}; moesim.sweep takes several"
        )
    accepted, expected = _TYPES[option.kind]
    # Python counts truth values among the integers; `batch=True` is a slip.
    is_flag = isinstance(value, bool) and option.kind is not bool
    fits = isinstance(value, accepted) and not is_flag

    # Choices say more than the kind of a text.
    if option.choices:
        expected = " or ".join(option.choices)
        fits = fits and value in option.choices
    if option.minimum is not None:
        low = option.minimum
        high = option.maximum
        expected += f" >= {low}" if high is None else f" between {low} and {high}"
        # NaN fails both comparisons, as it should.
        fits = fits and value >= low and (high is None or value <= high)
    # Whether an object is the right one shows where it is used.
    is_object = option.accepts_objects and not isinstance(value, Real)
    if not fits and not is_object:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


def _plain(value: Any, option: Option) -> Any:
    if value is None:
        return None
    # A relative path would mean another file elsewhere.
    if option.kind is Path:
        return str(Path(value).absolute())
    return option.kind(value)
