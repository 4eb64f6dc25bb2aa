"""The machine that real runs happen on: its profile, the device of its GPU lane, and
where the stores of its experts lie.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib.metadata
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.errors import RuntimeFault
from moesim.base.files import user_folder
from moesim.base.host import available_cores
from moesim.base.version import __version__
from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import gpu_of, lane_names
from moesim.hwprofiles.profile import HardwareProfile, default_profile, load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.traces.weight_formats import FLOAT_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runtime.store.store import BuildProgress, ExpertStore
    from moesim.traces.format.schema import ModelShape

_MEASURED = "this-machine"
"""Name of a profile that a run has measured by itself."""


def this_machine() -> tuple[str, int]:
    """The kind of accelerator that is here, and how many cores this process may use."""
    from moesim.runtime.accelerators import (  # noqa: PLC0415 - torch
        accelerator_here,
    )

    accelerator = accelerator_here()
    return "host" if accelerator is None else accelerator.kind, available_cores()


def machine_profile(
    hw: str | Path | HardwareProfile | None,
    *,
    store: str | Path | None = None,
    measure_again: bool = False,
) -> HardwareProfile:
    """A profile of this machine: the one that is named, ``hw.toml``, or one measured
    in some ten seconds, which is kept in the user's cache folder. Of several GPUs it
    keeps the first: real runs use one.

    Args:
        hw: a profile, its name or path.
        store: folder that will hold the experts, whose disk a measurement reads; None
            for that of `moesim.runs.machine.default_store`.
        measure_again: measure also where an earlier measurement is kept.

    Raises:
        ProfileError: the profile describes another kind of machine, or more cores than
            there are.
    """
    if hw is None:
        profile = default_profile()
        # A profile that ships describes another machine.
        if profile.kind != "measured":
            disk = Path(store or default_store(""))
            profile = _measured_here(disk, again=measure_again)
    else:
        profile = hw if isinstance(hw, HardwareProfile) else load_profile(hw)

    # Lanes become threads here; more of them than cores would measure waiting.
    kind, count = this_machine()
    if profile.accelerator != kind or profile.cores > count:
        raise ProfileError(
            f"profile {profile.name}: expected this machine (accelerator {kind},"
            f" {count} cores), found accelerator {profile.accelerator},"
            f" {profile.cores} cores; measure it with `moesim profile hw.toml`"
        )
    return _with_first_gpu(profile)


def _with_first_gpu(profile: HardwareProfile) -> HardwareProfile:
    """The same machine with the lanes of its first GPU only."""
    if profile.gpus == 1:
        return profile
    lanes = lane_names(1)
    workers = {
        name: tuple(lane for lane in served if lane in lanes)
        for name, served in profile.workers.items()
    }
    return replace(
        profile,
        workers={name: served for name, served in workers.items() if served},
        # Watts are stated by lane.
        numbers={
            path: quantity
            for path, quantity in profile.numbers.items()
            if not paths.below(path, paths.POWER) or not gpu_of(path.rpartition(".")[0])
        },
    )


def experts_dtype(profile: HardwareProfile) -> str:
    """Type of experts that a run computes in unless another is named: that in which the
    processor was measured; without a measurement float32 beside the host accelerator
    and bfloat16 beside a card.
    """
    curve = profile.curves.get(paths.points("cpu"))
    if curve is not None and curve.kind == "measured" and curve.reference is not None:
        # Shapes of models name formats, measurements of experts name dtypes.
        dtypes = {weights: dtype for dtype, weights in FLOAT_FORMATS.items()}
        measured = curve.reference.dtype
        return dtypes.get(measured, measured)
    return "float32" if profile.accelerator == "host" else "bfloat16"


def _measured_here(disk: Path, *, again: bool) -> HardwareProfile:
    """This machine, measured now or kept from an earlier run.

    Args:
        disk: folder that will hold the experts.
        again: measure now.
    """
    while not disk.is_dir():
        disk = disk.parent
    kept = _measurement_file(disk)
    if kept.is_file() and not again:
        # What a killed process or another moesim left there is made anew.
        with contextlib.suppress(ProfileError):
            return load_profile(kept)
    from moesim.runtime.measure.profile import measure  # noqa: PLC0415 - torch

    kept.parent.mkdir(parents=True, exist_ok=True)
    return measure(None, kept, quick=True, disk_dir=disk)


def _measurement_file(disk: Path) -> Path:
    """Where a measurement of this machine is kept: by host, disk and whatever else
    makes it another one.
    """
    kind, count = this_machine()
    facts = (
        platform.node(),
        platform.machine(),
        kind,
        count,
        disk.stat().st_dev,
        __version__,
        importlib.metadata.version("torch"),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return user_folder("cache") / "machines" / digest / f"{_MEASURED}.toml"


def measurement_notes(profile: HardwareProfile) -> list[str]:
    """Say how old a kept measurement of this PC is; nothing for users' profiles."""
    if profile.name != _MEASURED:
        return []
    today = dt.datetime.now(tz=dt.UTC).date()
    days = (today - dt.date.fromisoformat(profile.date)).days
    age = "today" if days <= 0 else f"{days} day{'s' * (days > 1)} ago"
    note = (
        f"costs of this machine were measured {age}, in ten seconds; `moesim profile`"
        " measures them anew"
    )
    return [note]


def device_of(profile: HardwareProfile) -> Any:
    """The device that the GPU lane runs on.

    Raises:
        RuntimeFault: torch finds no accelerator any more.
    """
    from moesim.runtime.accelerators import (  # noqa: PLC0415 - torch
        accelerator_here,
    )
    from moesim.runtime.executor.device import (  # noqa: PLC0415 - torch
        HostDevice,
        StreamDevice,
    )

    if profile.accelerator == "host":
        return HostDevice()
    accelerator = accelerator_here()
    if accelerator is None:
        raise RuntimeFault(
            f"profile {profile.name}: expected an accelerator ({profile.accelerator}),"
            " torch finds none; use a profile of this machine"
        )
    return StreamDevice(accelerator)


def default_store(name: str) -> Path:
    """The folder of a store that was given none, in the user's cache folder."""
    # Stores of another version (`runtime.store.store.VERSION`) lie elsewhere. A model's
    # name may look like a path, which would nest folders.
    return user_folder("cache") / "stores-2" / name.replace("/", "_")


def open_random_store(
    shape: ModelShape,
    store: str | Path | ExpertStore | None,
    dtype: str,
    distinct: int | None = None,
    building: Callable[[BuildProgress], None] | None = None,
) -> ExpertStore:
    """Open a store of random experts of a shape, or build it first.

    Its weights are always the same ones: they decide neither times nor routing, so the
    seed of a run is not theirs.

    Args:
        shape: numbers and sizes of the experts.
        store: an open store, a folder, or None for `default_store`.
        dtype: of the weights.
        distinct: different records in a store that is built; None makes every expert
            its own.
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

    # The index is written last, so a store that has one is complete.
    if (Path(store) / "store.json").is_file():
        return ExpertStore(store).trusted(building)
    return build_random_store(
        shape, store, dtype=dtype, distinct=distinct, progress=building
    )


def open_model_store(
    folder: Path,
    store: str | Path | ExpertStore | None,
    dtype: str,
    building: Callable[[BuildProgress], None] | None = None,
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
    return build_store(folder, store, dtype=dtype, progress=building)
