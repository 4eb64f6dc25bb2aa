"""Expert stores of runs: opened where they are, built where they are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.schema import ModelShape

Building = Callable[[int, int], None]
"""Called with records done and records to do while a store is built or checked."""


def default_store(name: str) -> Path:
    """The folder of a store that was given none, in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # A model's name may look like a path, which would nest folders.
    return Path(home) / "moesim" / "stores" / name.replace("/", "_")


def open_random_store(
    shape: ModelShape,
    store: str | Path | ExpertStore | None,
    dtype: str,
    distinct: int | None = None,
    seed: int = 0,
    building: Building | None = None,
) -> ExpertStore:
    """Open a store of random experts of a shape, or build it first.

    Args:
        shape: numbers and sizes of the experts.
        store: an open store, a folder, or None for `default_store`.
        dtype: of the weights.
        distinct: different records in a store that is built; None makes every expert
            its own.
        seed: of the weights.
        building: called while the store is built or checked.

    Raises:
        StoreError: the folder holds something else, or the disk is too small.
    """
    from moesim.runtime.store.build import build_random_store  # noqa: PLC0415 - torch
    from moesim.runtime.store.store import ExpertStore  # noqa: PLC0415 - torch

    if isinstance(store, ExpertStore):
        return store
    if store is None:
        counts = f"{shape.layers}x{shape.experts}"
        sizes = f"{shape.hidden}x{shape.expert_intermediate}"
        # Everything that decides the content is in the name, so that stores are shared.
        store = default_store(
            f"{shape.name}-{counts}-{sizes}-{dtype}-{distinct or 'all'}"
        )

    progress = _progress(building)
    # The index is written last, so a store that has one is complete.
    if (Path(store) / "store.json").is_file():
        return ExpertStore(store).trusted(progress)
    return build_random_store(
        shape, store, seed, dtype=dtype, distinct=distinct, progress=progress
    )


def open_model_store(
    folder: Path,
    store: str | Path | ExpertStore | None,
    dtype: str,
    building: Building | None = None,
) -> ExpertStore:
    """Open the store of a model, or build it first (or continue a build that was
    stopped).

    Args:
        folder: the checkpoint.
        store: an open store, a folder, or None for `default_store`.
        dtype: of the weights.
        building: called while the store is built or checked.

    Raises:
        StoreError: the folder holds another model's store, or the disk is too small.
    """
    from moesim.runtime.models.checkpoint import checkpoint_digest  # noqa: PLC0415 - torch
    from moesim.runtime.store.build import build_store  # noqa: PLC0415 - torch
    from moesim.runtime.store.store import ExpertStore  # noqa: PLC0415 - torch

    if isinstance(store, ExpertStore):
        return store
    if store is None:
        digest = checkpoint_digest(folder)[:12]
        store = default_store(f"{folder.resolve().name}-{digest}-{dtype}")
    return build_store(folder, store, dtype=dtype, progress=_progress(building))


def _progress(building: Building | None) -> Callable[[Any], None] | None:
    if building is None:
        return None
    return lambda done: building(done.records, done.total_records)
