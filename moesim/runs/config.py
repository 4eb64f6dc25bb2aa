"""The description of a run: one frozen dataclass for commands, Python and files.

`RunConfig` declares every option that runs share, once. The command line, the keyword
arguments of `moesim.replay` and its relatives, configuration files, ``run.json`` and
the JSON schema are all derived from its fields. So a new option is a field here and a
line where it is used.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from moesim.base.options import (
    Options,
    input_option,
    option,
    option_of,
)
from moesim.base.text import did_you_mean
from moesim.base.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.systems import System
    from moesim.runtime.record.calibration import Residual
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.reader import Passes, Trace

Function = TypeVar("Function", bound="Callable[..., Any]")


MOST_CONTEXT_TOKENS = 1 << 24
"""More than any model takes."""

MOST_SLOTS = 1 << 20
"""More than any model has experts."""

MOST_DRAFTED_TOKENS = 1 << 10

MOST_MEMORY_BYTES = 1 << 50
"""A PiB: more than any machine has."""

CACHE_SIZES = ("cache_ratio", "slots_per_layer", "gpu_memory_bytes")
"""Three ways to state one quantity, the size of the GPU cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions(Options):
    """Sizes of memories as a user states them; at most one of the first three."""

    cache_ratio: float | None = option(
        None,
        "Share of all experts in the GPU cache.",
        metavar="R",
        minimum=0,
        maximum=1,
    )
    slots_per_layer: int | None = option(
        None, "Experts per layer in the GPU cache.", minimum=0
    )
    gpu_memory_bytes: int | None = option(
        None,
        "Memory of each GPU for weights, such as 8GiB; experts get what the rest"
        " leaves. Default: the card's own, less keys and values and workspace;"
        " a quarter of all experts where it would hold them all.",
        minimum=0,
        maximum=MOST_MEMORY_BYTES,
    )
    host_memory_bytes: int | None = option(
        None,
        "Host memory for experts; what does not fit is read from SSD.",
        minimum=0,
        maximum=MOST_MEMORY_BYTES,
    )
    cache_scope: str | None = option(
        None,
        "Do layers share the cache's slots? Default: the system's, else layer.",
        choices=("layer", "global"),
    )
    staging: int | None = option(
        None,
        "Staging slots. Default: the system's or profile's.",
        minimum=1,
        maximum=MOST_SLOTS,
    )
    prefetch_budget_bytes: int | None = option(
        None,
        "Most bytes prefetched per layer step.",
        minimum=0,
        maximum=MOST_MEMORY_BYTES,
    )
    gpu_split: str = option(
        "layers", "What several GPUs share out.", choices=("layers", "experts")
    )

    @property
    def is_stated(self) -> bool:
        """True if the size of the GPU cache was stated."""
        return self.stated > 0

    @property
    def stated(self) -> int:
        """In how many ways it was stated."""
        sizes = (self.cache_ratio, self.slots_per_layer, self.gpu_memory_bytes)
        return sum(size is not None for size in sizes)

    @property
    def size_words(self) -> str:
        """The size of the GPU cache for people: ``8.0 GiB``, ``8.01 GiB``, ``16 slots``
        or ``25 %``; ``default`` for what the card has left.
        """
        if self.gpu_memory_bytes is None:
            if self.slots_per_layer is not None:
                return f"{self.slots_per_layer} slots"
            ratio = self.cache_ratio
            return "default" if ratio is None else f"{100 * ratio:.6g} %"
        # As many decimals as tell this size from its neighbours, up to three.
        for decimals in (1, 2):
            text = format_bytes(self.gpu_memory_bytes, decimals)
            if parse_bytes(text) == self.gpu_memory_bytes:
                return text
        return format_bytes(self.gpu_memory_bytes, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(MemoryOptions):
    """The configuration of a run: trace, policies, machine, memories, and the walk.

    Every field is an option of the command line and a key of configuration files. None
    leaves the choice to the system, the profile or the default that the help names.

    Raises:
        ConfigError: a value that does not fit its field.
    """

    trace: str | Path | Trace | None = input_option(
        "A moesim trace (Parquet), or tiny, which ships.",
        metavar="TRACE",
        accepts_objects=True,
    )
    # Who decides. A system is all four policies; the others replace parts of it.
    policy: str = option(
        "greedy",
        "A system or an assignment policy (see: list).",
        metavar="NAME",
        policy_kind="assignment",
    )
    cache: str | None = option(
        None,
        "Cache policy, such as lru or lfu:decay=0.9 (see: list cache).",
        policy_kind="cache",
    )
    prefetch: str | None = option(
        None, "Prefetch policy (see: list prefetch).", policy_kind="prefetch"
    )
    routing: str | None = option(
        None,
        "Routing policy; any but as-recorded alters the model's output.",
        policy_kind="routing",
    )
    hw: str | Path | HardwareProfile | None = option(
        None,
        "Hardware profile. Default: ./hw.toml, your own moesim/hw.toml, or"
        " rtx3090-epyc7532.",
        metavar="NAME|FILE",
        place="input",
        accepts_objects=True,
    )
    context_tokens: int = option(
        8192,
        "Tokens of a sequence whose keys and values the GPU holds, where no size of its"
        " cache is given.",
        minimum=0,
        maximum=MOST_CONTEXT_TOKENS,
    )
    host_cache: str = option(
        "lru",
        "Cache policy of host memory where --host-memory limits it.",
        policy_kind="cache",
    )
    # How the trace is walked through, and what is known before.
    batch: int = option(1, "Sequences that run together.", metavar="B", minimum=1)
    steps: int | None = option(None, "Keep the first N forward passes.", minimum=1)
    micro_batch: int | None = option(
        None,
        "Most prompt tokens of a forward pass, llama.cpp's -ub. Default: the system's,"
        " else whole prompts.",
        minimum=1,
    )
    draft_tokens: int | None = option(
        None,
        "Tokens that a draft proposes for each forward pass to verify; 0 for none."
        " Default: the system's.",
        minimum=0,
        maximum=MOST_DRAFTED_TOKENS,
    )
    acceptance: float = option(
        0.8,
        "Probability that a drafted token is right, if all before it are.",
        metavar="P",
        minimum=0,
        maximum=1,
    )
    seed: int = option(0, "For policies that draw.", minimum=0)
    warm: str | Path | Trace | None = input_option(
        "Calibration trace from which policies may fill the cache first.",
        metavar="TRACE",
        accepts_objects=True,
    )
    artefacts: str | Path | None = input_option(
        "Calibration artefacts, such as the network that train-cache writes.",
        metavar="DIR",
    )
    engine: str = option(
        "auto",
        "What keeps virtual time: the fast clock, which auto means too, or SimPy; both"
        " give the same results.",
        choices=("auto", "simpy", "fast"),
    )
    # When sequences arrive, as requests of users; without it they all wait in line.
    arrivals: str | None = option(
        None,
        "When requests arrive: poisson:RATE (per second), or a file of seconds; --batch"
        " is the most that run together.",
        metavar="poisson:RATE|FILE",
    )
    slo: str | None = option(
        None,
        "Limits in seconds that a request should meet, such as ttft=0.5,tpot=0.1.",
        metavar="LIMITS",
        needs=("arrivals",),
    )
    # What files must be, where a run is to be repeated exactly.
    trace_digest: str | None = option(
        None,
        "SHA-256 that the trace must have; a run.json names that of its own trace.",
        on_command_line=False,
    )
    hw_digest: str | None = option(
        None,
        "SHA-256 that the profile must have; a run.json names that of its own profile.",
        on_command_line=False,
    )

    @classmethod
    def of(
        cls,
        trace: RunConfig | str | Path | Trace | None = None,
        policy: str | None = None,
        **options: Any,
    ) -> Self:
        """Build a configuration from the arguments of a Python call.

        Args:
            trace: a trace, or a configuration whose options are replaced.
            policy: a system or an assignment policy; None keeps the default.
            options: fields of this class by name; sizes also without ``_bytes``.

        Raises:
            TypeError: an unknown option.
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

    def inputs(self) -> list[Path]:
        """Files that are read, those that nobody named included."""
        from moesim.hwprofiles.profile import own_profile_path  # noqa: PLC0415 - numpy

        named = Options.inputs(self)
        machine = own_profile_path() if self.hw is None else self.hw
        # A word may name what ships, or stand for a rate of requests.
        for value in (machine, self.arrivals):
            if isinstance(value, str | Path) and Path(value).exists():
                named.append(Path(value))
        return named

    @property
    def system(self) -> System:
        """The four policies that `policy` and the parts given beside it name.

        Raises:
            PolicyError: an unknown policy, or a part that is named twice.
        """
        # The command line imports this module for its help texts, which must be quick.
        from moesim.policies.systems import compose  # noqa: PLC0415 - imports numpy

        return compose(
            self.policy, cache=self.cache, prefetch=self.prefetch, routing=self.routing
        )

    @property
    def passes(self) -> Passes:
        """Sizes of a run's forward passes."""
        from moesim.traces.format.reader import Passes  # noqa: PLC0415 - imports numpy

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
        names = [declared.name for declared in fields(MemoryOptions)]
        return MemoryOptions(**{name: getattr(self, name) for name in names})


def of_run(name: str, *default: Any) -> Any:
    """An option of a command that means what it means to a run, as one value or as
    several, with another default if one is given.
    """
    (declared,) = [each for each in fields(RunConfig) if each.name == name]
    (value,) = default or (declared.default,)
    return field(default=value, metadata=declared.metadata)


CHOICES = tuple(
    declared.name
    for declared in fields(RunConfig)
    if declared.metadata["option"].policy_kind is not None
)
"""Fields that name a policy, and so compete; all others say where."""


def in_order(names: Collection[str]) -> list[str]:
    """Names of fields in the order in which help shows them: sizes of memories stand
    behind what decides and the machine.
    """
    sizes = [declared.name for declared in fields(MemoryOptions)]
    rest = [name for name in names if name not in sizes]
    cut = rest.index("hw") + 1 if "hw" in rest else len(rest)
    return [*rest[:cut], *(name for name in sizes if name in names), *rest[cut:]]


_SIZES = {
    declared.name for declared in fields(RunConfig) if option_of(declared).is_size
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredConfig(RunConfig):
    """Configuration of a run on this machine: a `RunConfig` and its real experts."""

    trace: str | Path | Trace | None = input_option(
        "Routing to be forced; without it, a model runs.",
        metavar="TRACE",
        accepts_objects=True,
    )
    hw: str | Path | HardwareProfile | None = option(
        None,
        "Profile of this machine. Default: ./hw.toml, your own moesim/hw.toml, or"
        " measured now, about 10 s.",
        metavar="NAME|FILE",
        place="input",
        accepts_objects=True,
    )
    # For traces: what their experts are, as routing alone has no weights.
    shape: str | None = option(
        None,
        "Sizes of the experts, such as qwen3-30b-a3b/4. Default: the trace's.",
        metavar="NAME[/N]",
        needs=("trace",),
    )
    distinct: int | None = option(
        None,
        "Different experts in a random store; others share them in turn.",
        minimum=1,
        needs=("trace",),
    )
    # For live models: what they generate.
    model: str | Path | None = option(
        None,
        "The shipped model or a Hugging Face folder.",
        metavar="tiny|DIR",
        accepts_objects=True,
        # What is forced, and how much of it, is a trace's.
        excludes=("trace", "steps", "warm"),
    )
    new_tokens: int = option(
        64, "Tokens to generate per prompt, at most.", minimum=0, needs=("model",)
    )
    temperature: float = option(0.0, "0 decodes greedily.", minimum=0, needs=("model",))
    residual: str | Path | Residual | None = input_option(
        "Residual vectors for --prefetch residual (see: record).",
        accepts_objects=True,
        needs=("model",),
    )
    verify: bool = option(
        False, "Compare all logits with the plain model's.", needs=("model",)
    )
    # For both: where weights lie, and what computes them.
    store: str | Path | ExpertStore | None = option(
        None,
        "Expert store; built where there is none. Default: the user's cache folder.",
        kind=Path,
        metavar="DIR",
        accepts_objects=True,
    )
    dtype: str | None = option(
        None,
        "float32, bfloat16 or float16. Default: the model's own, float32 for tiny; for"
        " a TRACE the type in which the profile's experts were measured.",
        metavar="NAME",
        choices=("float32", "bfloat16", "float16"),
    )

    @property
    def store_folder(self) -> str | Path | None:
        """Folder of the expert store; None for that of the user's cache."""
        if self.store is None or isinstance(self.store, str | Path):
            return self.store
        return self.store.directory


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


def _field_name(name: str) -> str:
    """``gpu_memory`` is ``gpu_memory_bytes``, as on the command line."""
    return f"{name}_bytes" if f"{name}_bytes" in _SIZES else name
