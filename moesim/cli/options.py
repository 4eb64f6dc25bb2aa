"""Options and checks that several commands share, each in one place."""

import dataclasses
import errno
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moesim.runs.memory import MemoryOptions


def size_bytes(text: str) -> int:
    """Parse ``8GiB``, ``500MB`` or ``1024``."""
    from moesim.traces.sizes import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def one_of(*words: str) -> Callable[[str], str]:
    """Make a parser that accepts these words only."""

    def parse(text: str) -> str:
        if text not in words:
            raise typer.BadParameter(f"expected {' or '.join(words)}, got {text!r}")
        return text

    return parse


def matching(pattern: str, words: str) -> Callable[[str], str]:
    """Make a parser that accepts what the whole of `pattern` matches, and else says
    that it expected `words`.
    """

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise typer.BadParameter(f"expected {words}, got {text!r}")
        return text

    return parse


def split_names(text: str, option: str) -> list[str]:
    """Split ``greedy+lfu:decay=0.9,variant=perfect,all-cpu`` where a policy begins, not
    inside its parameters.

    Raises:
        typer.BadParameter: no policy at all.
    """
    found: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if found and re.match(r"[\w-]+=", piece):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    if not found:
        raise typer.BadParameter(
            f"expected names separated by commas, got {text!r}", param_hint=option
        )
    return found


def shares(text: str) -> tuple[float, ...]:
    """Parse ``0.125,0.25,0.5``, each once."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 <= share <= 1 for share in found):
        raise typer.BadParameter(
            f"expected shares between 0 and 1 such as 0.125,0.25,0.5, got {text!r}"
        )
    return found


def counts(text: str) -> tuple[int, ...]:
    """Parse ``8,16,32``, each once."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise typer.BadParameter(
            f"expected whole numbers such as 8,16,32, got {text!r}"
        )
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def sizes_bytes(text: str) -> tuple[int, ...]:
    """Parse ``4GiB,8GiB``, each once."""
    return tuple(dict.fromkeys(size_bytes(part) for part in text.split(",")))


def words(text: str) -> tuple[str, ...]:
    """Parse ``a,b``, each once."""
    found = tuple(
        dict.fromkeys(filter(None, (part.strip() for part in text.split(","))))
    )
    if not found:
        raise typer.BadParameter(f"expected names separated by commas, got {text!r}")
    return found


def refuse(context: typer.Context, names: Iterable[str], meant_for: str) -> None:
    """Refuse options that were given although they say nothing here.

    Raises:
        typer.BadParameter: one was.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"it is meant for {meant_for}", param_hint=f"--{name.replace('_', '-')}"
            )


def check_device(device: str) -> None:
    """Find out before a model is loaded that this machine has no such device.

    Raises:
        typer.BadParameter: naming it.
    """
    if device == "cpu":
        return
    from moesim.runtime.executor.cuda_device import cuda_is_there

    if not cuda_is_there():
        raise typer.BadParameter(
            f"torch finds no {device!r} on this machine", param_hint="--device"
        )


def check_places(
    *,
    folder: Path | None = None,
    files: Iterable[Path | None] = (),
    inputs: Iterable[Path | None] = (),
) -> None:
    """Find out before a long run, not after it, that a result has nowhere to go or
    would destroy something.

    Args:
        folder: results go there, each with a name of its own.
        files: each is a result.
        inputs: files that are read; no result replaces one of them.

    Raises:
        OSError: naming the place.
    """
    taken = {place.resolve(): "what is read" for place in inputs if place is not None}
    for place in (folder, *files):
        if place is None:
            continue
        if place is not folder and (what := taken.get(place.resolve())):
            raise OSError(
                errno.EEXIST,
                f"it would replace {what}; choose another place",
                str(place),
            )
        taken[place.resolve()] = "another result"
        if place is not folder and place.is_dir():
            raise OSError(
                errno.EISDIR, "expected a place for a file, found a folder", str(place)
            )
        nearest = next(
            path for path in (place, *place.absolute().parents) if path.exists()
        )
        if not (nearest.is_dir() or (nearest == place and place is not folder)):
            raise OSError(
                errno.ENOTDIR, "expected a folder, found a file", str(nearest)
            )
        if not os.access(nearest, os.W_OK):
            raise OSError(
                errno.EACCES, "not writable; choose another place", str(nearest)
            )


TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="A moesim trace (Parquet), or tiny, which ships.",
        show_default=False,
    ),
]
Policy = Annotated[
    str,
    typer.Option(metavar="NAME", help="A system or an assignment policy (see: list)."),
]
Cache = Annotated[
    str | None,
    typer.Option(help="Cache policy, such as lru or lfu:decay=0.9 (see: list cache)."),
]
Prefetch = Annotated[
    str | None, typer.Option(help="Prefetch policy (see: list prefetch).")
]
Routing = Annotated[
    str | None,
    typer.Option(help="Routing policy; any but as-recorded alters the model's output."),
]
HostCache = Annotated[
    str, typer.Option(help="Cache policy of host memory where --host-memory limits it.")
]
Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=(
            "Hardware profile. Default: ./hw.toml, your own moesim/hw.toml, or"
            " rtx3090-epyc7532."
        ),
    ),
]
ThisMachine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=(
            "Profile of this machine. Default: ./hw.toml, your own moesim/hw.toml, or"
            " measured now, about 10 s."
        ),
    ),
]
CacheRatio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        min=0,
        max=1,
        help="Share of all experts in the GPU cache. Default: 0.25.",
    ),
]
SlotsPerLayer = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Experts per layer in the GPU cache."),
]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=size_bytes,
        help="Memory of each GPU, such as 8GiB; experts get what the rest leaves.",
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=size_bytes,
        help="Host memory for experts; what does not fit is read from SSD.",
    ),
]
CacheScope = Annotated[
    str | None,
    typer.Option(
        metavar="layer|global",
        parser=one_of("layer", "global"),
        help="Do layers share the cache's slots? Default: the system's, else layer.",
    ),
]
Staging = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Staging slots. Default: the system's or profile's."
    ),
]
PrefetchBudget = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE", parser=size_bytes, help="Most bytes prefetched per layer step."
    ),
]
GpuSplit = Annotated[
    str,
    typer.Option(
        metavar="layers|experts",
        parser=one_of("layers", "experts"),
        help="What several GPUs share out.",
    ),
]
Batch = Annotated[
    int, typer.Option(metavar="B", min=1, help="Sequences that run together.")
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Keep the first N forward passes."),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="For policies that draw.")]
Warm = Annotated[
    Path | None,
    typer.Option(
        metavar="TRACE",
        help="Calibration trace from which policies may fill the cache first.",
    ),
]
Artefacts = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Calibration artefacts, such as the network that train-cache writes.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        parser=matching(r"cpu|cuda(:\d+)?", "cpu or cuda"),
        help="cpu or cuda.",
    ),
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


SEVERAL: dict[str, Any] = {
    "hw": Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE,…",
            parser=words,
            help=(
                "Hardware profiles. Default: ./hw.toml, your own moesim/hw.toml, or"
                " rtx3090-epyc7532."
            ),
        ),
    ],
    "cache_ratio": Annotated[
        str | None,
        typer.Option(
            "--cache-ratio",
            "--cache-ratios",
            metavar="R,…",
            parser=shares,
            help="Shares of all experts in the GPU cache. Default: 0.25.",
        ),
    ],
    "slots_per_layer": Annotated[
        str | None,
        typer.Option(
            metavar="N,…", parser=counts, help="Experts per layer in the GPU cache."
        ),
    ],
    "gpu_memory": Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,…",
            parser=sizes_bytes,
            help=(
                "Memory of each GPU, such as 4GiB,8GiB; experts get what the rest"
                " leaves."
            ),
        ),
    ],
}
"""Fields of `Setting` for which a command that has `settings` takes several values,
separated by commas.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """What `replay`, `compare` and `gap` are told besides the policy: its parts, the
    machine, memories, the walk.
    """

    cache: Cache = None
    prefetch: Prefetch = None
    routing: Routing = None
    hw: Hardware = None
    cache_ratio: CacheRatio = None
    slots_per_layer: SlotsPerLayer = None
    gpu_memory: GpuMemory = None
    host_memory: HostMemory = None
    host_cache: HostCache = "lru"
    cache_scope: CacheScope = None
    staging: Staging = None
    prefetch_budget: PrefetchBudget = None
    gpu_split: GpuSplit = "layers"
    batch: Batch = 1
    steps: Steps = None
    seed: Seed = 0
    warm: Warm = None
    artefacts: Artefacts = None

    @property
    def memory(self) -> "MemoryOptions":
        """Sizes of memories."""
        from moesim.runs.memory import MemoryOptions

        return MemoryOptions(
            self.cache_ratio,
            self.slots_per_layer,
            self.gpu_memory,
            self.host_memory,
            self.cache_scope,
            self.staging,
            self.prefetch_budget,
            self.gpu_split,
        )

    def keywords(self, *names: str) -> dict[str, Any]:
        """Keyword arguments as `moesim.runs.replay.replay` takes them; only those of
        `names`, if any are given.
        """
        names = names or (
            "cache",
            "prefetch",
            "routing",
            "host_cache",
            "hw",
            "memory",
            "batch",
            "steps",
            "seed",
            "warm",
            "artefacts",
        )
        return {name: getattr(self, name) for name in names}


def with_setting(
    command: Callable[..., None], *, without: Iterable[str] = (), **instead: Any
) -> Callable[..., None]:
    """Give a command, in the place of its parameter `setting`, one option for every
    field of `Setting`.

    In the place of a parameter `settings` the fields of `SEVERAL` take several values
    each, and the command gets a setting for every combination of them. Fields named in
    `without` mean nothing there and keep their defaults; those in `instead` are
    declared by what they are given. Typer reads a command's options off its signature,
    so a signature is all that it needs.
    """
    signature = inspect.signature(command)
    several = SEVERAL if "settings" in signature.parameters else {}
    declared = several | instead
    fields = [
        field for field in dataclasses.fields(Setting) if field.name not in without
    ]
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=declared.get(field.name, field.type),
        )
        for field in fields
    ]
    others = {
        name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in signature.parameters.items()
    }
    parameters = [
        one
        for name in others
        for one in (options if name.startswith("setting") else [others[name]])
    ]

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        asked = {field.name: given.pop(field.name) for field in fields}
        values = (
            (
                asked[name]
                if name in several and asked[name] is not None
                else (asked[name],)
            )
            for name in asked
        )
        settings = [
            Setting(**dict(zip(asked, one, strict=True)))
            for one in itertools.product(*values)
        ]
        command(
            **{"settings": settings} if several else {"setting": settings[0]}, **given
        )

    spread.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {one.name: one.annotation for one in parameters}
    return spread
