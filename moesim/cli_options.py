"""Options and checks that several commands share, each in one place."""

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer


def size_bytes(text: str) -> int:
    """Parse ``8GiB``, ``500MB`` or ``1024``."""
    from traces.sizes import parse_bytes

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


def check_places(*, folder: Path | None = None, files: Iterable[Path | None] = ()) -> None:
    """Find out before a long run, not after it, that a result has nowhere to go.

    Raises:
        OSError: naming the place.
    """
    for place in (folder, *files):
        if place is None:
            continue
        if place is not folder and place.is_dir():
            raise OSError(errno.EISDIR, "expected a place for a file, found a folder", str(place))
        nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
        if not (nearest.is_dir() or (nearest == place and place is not folder)):
            raise OSError(errno.ENOTDIR, "expected a folder, found a file", str(nearest))
        if not os.access(nearest, os.W_OK):
            raise OSError(errno.EACCES, "not writable; choose another place", str(nearest))


TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A moesim trace (Parquet).", show_default=False)]
Cache = Annotated[str | None, typer.Option(help="Cache policy, such as lru or lfu:decay=0.9 (see: list cache).")]
Prefetch = Annotated[str | None, typer.Option(help="Prefetch policy (see: list prefetch).")]
Routing = Annotated[str | None, typer.Option(help="Routing policy; any but as-recorded alters the model's output.")]
HostCache = Annotated[str, typer.Option(help="Cache policy of host memory where --host-memory limits it.")]
Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Hardware profile. Default: ./hw.toml, your own moesim/hw.toml, or rtx3090-epyc7532.",
    ),
]
CacheRatio = Annotated[
    float | None, typer.Option(metavar="R", min=0, max=1, help="Share of all experts in the GPU cache. Default: 0.25.")
]
SlotsPerLayer = Annotated[int | None, typer.Option(metavar="N", min=0, help="Experts per layer in the GPU cache.")]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE", parser=size_bytes, help="Memory of each GPU, such as 8GiB; experts get what the rest leaves."
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE", parser=size_bytes, help="Host memory for experts; what does not fit is read from SSD."
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
    int | None, typer.Option(metavar="N", min=1, help="Staging slots. Default: the system's or profile's.")
]
PrefetchBudget = Annotated[
    int | None, typer.Option(metavar="SIZE", parser=size_bytes, help="Most bytes prefetched per layer step.")
]
GpuSplit = Annotated[
    str, typer.Option(metavar="layers|experts", parser=one_of("layers", "experts"), help="What several GPUs share out.")
]
Batch = Annotated[int, typer.Option(metavar="B", min=1, help="Sequences that run together.")]
Steps = Annotated[int | None, typer.Option(metavar="N", min=1, help="Keep the first N forward passes.")]
Seed = Annotated[int, typer.Option(help="For policies that draw.")]
Warm = Annotated[
    Path | None, typer.Option(metavar="TRACE", help="Calibration trace from which policies may fill the cache first.")
]
Artefacts = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Calibration artefacts, such as the network that train-cache writes."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
