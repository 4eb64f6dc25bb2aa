"""`moesim store`: experts on disk, ready to be read one by one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moesim.base.options import REQUIRED, Options, folder_option, option
from moesim.cli.options import from_dataclass

if TYPE_CHECKING:
    from moesim.runtime.store.store import BuildProgress


app = typer.Typer(
    no_args_is_help=True,
    # As in `moesim.cli.app`.
    rich_markup_mode=None,
    help="Experts on disk, ready to be read one by one.",
)


@app.callback()
def _group() -> None:
    # Without a callback typer would take the only command for the group itself.
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions(Options):
    """Which experts are written, where, and as what."""

    model: str = option(
        REQUIRED, "tiny, or a Hugging Face folder.", metavar="MODEL", argument=True
    )
    out: Path = folder_option("The store's folder.", default=REQUIRED)
    dtype: str | None = option(
        None,
        "float32, bfloat16 or float16. Default: the model's own; float32 for tiny.",
        metavar="NAME",
        choices=("float32", "bfloat16", "float16"),
    )


@app.command("build", short_help="Write a model's experts into a store.")
@from_dataclass(from_file=False)
def build(options: BuildOptions) -> None:
    """Write every expert of a model into one file, aligned and checksummed. A build
    that was stopped continues; a store that is there already is read and compared with
    its checksums.

    \b
    Example:
      moesim store build ~/models/olmoe --out /mnt/nvme/olmoe
    """
    from moesim.base.units import format_bytes
    from moesim.cli.output import bar
    from moesim.runtime.models.local_model import tiny_dir
    from moesim.runtime.store.build import build_store
    from moesim.runtime.store.store import INDEX_NAME

    folder = Path(options.model)
    dtype = options.dtype
    if options.model == "tiny":
        folder = tiny_dir()
        # The checkpoint that ships is stored in half precision to be small.
        dtype = dtype or "float32"
    # The index is written last, so a store that has one is complete.
    existed = (options.out / INDEX_NAME).is_file()
    with bar("checking" if existed else "building", 1.0) as show:

        def progress(done: "BuildProgress") -> None:
            show(done.done_bytes / done.total_bytes)

        store = build_store(folder, options.out, dtype=dtype, progress=progress)
        if existed:
            store.verify(progress)
    with store:
        index = store.index
        print(
            f"{len(index.offsets):,} experts of {index.model},"
            f" {format_bytes(index.data_bytes)}"
        )
        print(f"direct reads: {'yes' if store.direct else f'no: {store.reason}'}")
    if existed:
        print(f"{options.out} was there; every checksum is right")
    else:
        print(f"wrote {options.out}")
