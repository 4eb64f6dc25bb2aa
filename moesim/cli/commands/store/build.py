"""`moesim store build`: write a model's experts into a store."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.checks import check_places
from moesim.cli.options import Dtype

if TYPE_CHECKING:
    from moesim.runtime.store.store import BuildProgress


def build(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="tiny, or a Hugging Face folder.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The store's folder.", show_default=False),
    ],
    dtype: Dtype = None,
) -> None:
    """Write every expert of a model into one file, aligned and checksummed. A build
    that was stopped continues; a store that is there already is read and compared with
    its checksums.

    \b
    Example:
      moesim store build ~/models/olmoe --out /mnt/nvme/olmoe
    """
    check_places(folder=out)
    from moesim.cli.progress import bar
    from moesim.runtime.models.tiny import tiny_dir
    from moesim.runtime.store.build import build_store
    from moesim.runtime.store.index import INDEX_NAME
    from moesim.traces.sizes import format_bytes

    folder = Path(model)
    if model == "tiny":
        folder = tiny_dir()
        # The checkpoint that ships is stored in half precision to be small.
        dtype = dtype or "float32"
    # The index is written last, so a store that has one is complete.
    existed = (out / INDEX_NAME).is_file()
    with bar("checking" if existed else "building", 1.0) as show:

        def progress(done: "BuildProgress") -> None:
            show(done.done_bytes / done.total_bytes)

        store = build_store(folder, out, dtype=dtype, progress=progress)
        if existed:
            store.verify(progress)
    with store:
        index = store.index
        print(
            f"{len(index.offsets):,} experts of {index.model},"
            f" {format_bytes(index.data_bytes)}"
        )
        print(f"direct reads: {'yes' if store.direct else f'no: {store.reason}'}")
    print(f"{out} was there; every checksum is right" if existed else f"wrote {out}")
