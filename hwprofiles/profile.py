"""One machine as numbers: its lanes, the workers they run on, its memories, costs,
contention and power.

A profile is one TOML file. Every number in it is a small table of its own, so that it
cannot be separated from where it came from::

    [costs.h2d.bytes_per_s]
    value = 25.2e9
    kind = "datasheet"
    source = "PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 / 8, 80 % achievable"

A *lane* does one kind of work at a time; a *worker* is what really executes, so lanes
that share a worker take turns, in the order in which the file lists them. Whatever
keeps a host core busy is a worker, and there are never more of those than cores.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, cast

import tomli_w

from moesim.base.files import user_folder, write_text
from moesim.base.inputs import load_toml, read_text
from moesim.base.text import did_you_mean, one_expected, visible, visible_lines
from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import (
    GPU,
    LANE_KINDS,
    Accelerator,
    gpu_of,
    kind_of,
    lane_names,
)
from moesim.hwprofiles.schema import (
    Curve,
    FitKey,
    Number,
    ProfileError,
    ProfileKind,
    Quantity,
    as_table,
    parse_numbers,
    parse_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


__all__ = [
    "Contention",
    "Curve",
    "HardwareProfile",
    "Memory",
    "Power",
    "Quantity",
    "default_profile",
    "list_profiles",
    "load_profile",
    "parse_profile",
    "save_profile",
]

# A common GPU, and one whose expert times were published.
DEFAULT_NAME = "rtx3090-epyc7532"
_DATA = Path(__file__).parent / "data"
_TEXT_KEYS = ("name", "kind", "description", "date", "accelerator")
_TOP_KEYS = (*_TEXT_KEYS, "versions", "workers", "fit", *paths.SECTIONS)
_BASE = "base"


class Memory(NamedTuple):
    """Sizes of a machine's memories.

    Attributes:
        gpu_bytes: for experts, on each GPU.
        host_bytes: for experts, in host memory.
        staging_experts: experts that fit the staging area beside each of both.
        unified: CPU and accelerator compute from one memory; nothing is copied.
    """

    gpu_bytes: int
    host_bytes: int
    staging_experts: int
    unified: bool = False


@dataclass(frozen=True)
class Contention:
    """Factors by which overlapping work takes longer.

    Attributes:
        factors: (kind of the slowed lane, kind of the other lane) -> slowdown >= 1.
    """

    factors: Mapping[tuple[str, str], float]

    def slowdown(self, victim: str, other: str) -> float:
        """Return by what factor work on a lane of kind `victim` takes longer while one
        of kind `other` works; 1.0 where unknown.
        """
        return self.factors.get((victim, other), 1.0)


@dataclass(frozen=True)
class Power:
    """Watts of the platform, whatever happens, and of each lane while idle and while
    busy; 0 where unstated.
    """

    platform_idle_w: float
    idle_w: Mapping[str, float]
    busy_w: Mapping[str, float]


@dataclass(frozen=True)
class HardwareProfile:
    """One machine.

    `numbers` and `curves` map the dotted path of the file (``costs.h2d.bytes_per_s``)
    to a value with its provenance. `fit` holds the residuals of fitted costs. `where`
    names the file in error messages.
    """

    name: str
    kind: str
    description: str
    date: str
    accelerator: str
    workers: Mapping[str, tuple[str, ...]]
    numbers: Mapping[str, Quantity]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    fit: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Two files with the same content describe the same machine.
    where: str = field(default="profile", compare=False)

    def __post_init__(self) -> None:
        """Refuse a machine that cannot be scheduled."""
        self._check_lanes()
        self._check_cores()

    def _check_lanes(self) -> None:
        """Refuse lanes without worker or with two, and a machine without GPU."""
        served = [lane for lanes in self.workers.values() for lane in lanes]
        repeated = sorted({lane for lane in served if served.count(lane) > 1})
        if repeated:
            raise ProfileError(
                f"{self.where}: workers: lane {repeated[0]!r} has two workers; list it"
                " once"
            )
        if set(served) != set(self.lanes) or self.gpus < 1:
            difference = sorted(set(served) ^ set(self.lanes)) or [GPU.lane(0)]
            # From the table of kinds, so that the message knows a new one, too.
            one_each = [kind.name for kind in LANE_KINDS if not kind.per_gpu]
            numbered = [f"{kind.name}N" for kind in LANE_KINDS if kind.per_gpu]
            raise ProfileError(
                f"{self.where}: workers: expected the lanes {', '.join(one_each)} and"
                f" {', '.join(numbered)} for N = 0…; missing or unknown:"
                f" {', '.join(difference)}"
            )

    def _check_cores(self) -> None:
        """Refuse more workers that keep a core busy than there are cores."""
        # Costs are calibrated where each busy worker has a core; threads that share
        # one take turns, and no cost knows of that.
        busy = [
            name for name, lanes in self.workers.items() if self._keeps_core_busy(lanes)
        ]
        if len(busy) > self.cores:
            raise ProfileError(
                f"{self.where}: workers: {', '.join(busy)} keep {len(busy)} cores busy,"
                f" found {self.cores} cores; let some of their lanes share a worker"
            )

    def _keeps_core_busy(self, lanes: Iterable[str]) -> bool:
        """Tell whether a worker occupies a host core while one of its lanes works."""
        return any(kind_of(lane).keeps_core_busy(self.accelerator) for lane in lanes)

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs; the host accelerator counts as one."""
        # Lanes of unknown kinds are still to be refused, so `kind_of` would not do.
        return sum(
            GPU.includes(lane) for lanes in self.workers.values() for lane in lanes
        )

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Lane names in their one order: control, cpu, gpu0…, h2d0…, d2h0…, ssd."""
        return lane_names(self.gpus)

    @cached_property
    def cores(self) -> int:
        """Host cores that may be busy."""
        return int(self.number(paths.CORES))

    @property
    def cpu_threads(self) -> int:
        """Threads of the CPU lane.

        One core is left to the host accelerator, or to control where there is a GPU.
        """
        # A machine with one core computes on it all the same.
        return max(1, self.cores - 1)

    @cached_property
    def memory(self) -> Memory:
        """Memory for experts."""
        return Memory(
            gpu_bytes=int(self.number(paths.GPU_BYTES)),
            host_bytes=int(self.number(paths.HOST_BYTES)),
            staging_experts=int(self.number(paths.STAGING_EXPERTS)),
            unified=paths.UNIFIED in self.numbers and bool(self.number(paths.UNIFIED)),
        )

    @cached_property
    def contention(self) -> Contention:
        """Slowdowns of overlapping lanes, by their kinds."""
        factors = {}
        for path, quantity in self.numbers.items():
            if paths.below(path, paths.CONTENTION):
                _, victim, other = path.split(".")
                factors[victim, other] = float(quantity.value)
        return Contention(factors)

    @cached_property
    def power(self) -> Power | None:
        """Watts, or None where the profile states none."""
        if not any(paths.below(path, paths.POWER) for path in self.numbers):
            return None
        return Power(
            platform_idle_w=self._watts(paths.PLATFORM_IDLE_W),
            idle_w={
                lane: self._watts(paths.power(lane, "idle")) for lane in self.lanes
            },
            busy_w={
                lane: self._watts(paths.power(lane, "busy")) for lane in self.lanes
            },
        )

    def _watts(self, path: str) -> float:
        quantity = self.numbers.get(path)
        return 0.0 if quantity is None else float(quantity.value)

    @property
    def shares_memory(self) -> bool:
        """True if CPU and accelerator compute in the same memory: results need no way
        back.
        """
        return self.accelerator == "host" or self.memory.unified

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything the file states, independent of its layout."""
        # Sorted keys: the same numbers in another order are the same machine.
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def number(self, path: str) -> float:
        """Look up one number by its dotted path.

        Raises:
            ProfileError: the profile does not have it.
        """
        quantity = self.numbers.get(path)
        if quantity is None:
            raise ProfileError(
                f"{self.where}: {path}: this number is needed and the profile lacks it;"
                " add it with value, kind and source, or measure it with `moesim"
                " profile hw.toml`"
            )
        return quantity.value

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the TOML file, nested and in its one order."""
        tree: dict[str, Any] = {key: getattr(self, key) for key in _TEXT_KEYS}
        tree["versions"] = dict(sorted(self.versions.items()))
        tree["workers"] = {name: list(lanes) for name, lanes in self.workers.items()}

        # Sorted within sections, so that files of two calibrations can be compared
        # line by line.
        entries: dict[str, Quantity | Curve] = {**self.numbers, **self.curves}
        ordered = sorted(entries)
        for section in paths.SECTIONS:
            for path in ordered:
                if paths.below(path, section):
                    _insert(tree, path, as_table(entries[path]))

        if self.fit:
            tree["fit"] = {
                name: dict(sorted(report.items()))
                for name, report in sorted(self.fit.items())
            }
        return tree


def _insert(tree: dict[str, Any], path: str, entry: dict[str, Any]) -> None:
    """Put an entry into nested tables, made on the way."""
    *folders, leaf = path.split(".")
    table = tree
    for folder in folders:
        table = table.setdefault(folder, {})
    table[leaf] = entry


def parse_profile(raw: Mapping[str, Any], *, where: str) -> HardwareProfile:
    """Build a profile from the nested tables of a TOML file.

    Args:
        raw: the tables.
        where: the file, for error messages.

    Raises:
        ProfileError: an unknown key, a number without provenance, an impossible value
            or a machine without workers.
    """
    # A misspelt section would otherwise be a machine without these costs.
    for key in raw:
        if key not in _TOP_KEYS:
            known = ", ".join(_TOP_KEYS)
            raise ProfileError(
                f"{where}: {key}: unknown key; known:"
                f" {known}{did_you_mean(key, _TOP_KEYS)}"
            )

    sections = {key: raw[key] for key in paths.SECTIONS if key in raw}
    stated = {key: raw[key] for key in raw if key not in sections}
    head = parse_table(stated, _Head, where=where)
    for key in _TEXT_KEYS:
        if not getattr(head, key):
            raise ProfileError(f"{where}: {key}: expected a text, found none")
    numbers, curves = parse_numbers(sections, where=where)
    return HardwareProfile(
        # Others' files must do nothing to a terminal or a page.
        name=visible(head.name),
        kind=head.kind,
        description=visible_lines(head.description),
        date=visible(head.date),
        accelerator=head.accelerator,
        workers=_with_shared_lanes(head.workers),
        numbers=numbers,
        curves=curves,
        versions=head.versions,
        fit=cast("dict[str, dict[str, float]]", head.fit),
        where=where,
    )


@dataclass(frozen=True)
class _Head:
    """What a file states beside numbers and curves."""

    name: str
    kind: ProfileKind
    description: str
    date: str
    accelerator: Accelerator
    workers: dict[str, tuple[str, ...]]
    versions: dict[str, str] = field(default_factory=dict)
    fit: dict[str, dict[FitKey, Number]] = field(default_factory=dict)

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}


def _with_shared_lanes(
    workers: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Add lanes that no worker names to the workers that serve them by default."""
    # A kind that is younger than a profile must not make the profile invalid.
    complete = {name: lanes for name, lanes in workers.items() if lanes}
    served = {lane for lanes in workers.values() for lane in lanes}
    for kind in LANE_KINDS:
        host = kind.shares_worker_of
        if host is None:
            continue
        for name, lanes in complete.items():
            shared = [kind.lane(gpu_of(lane)) for lane in lanes if host.includes(lane)]
            complete[name] += tuple(lane for lane in shared if lane not in served)
    return complete


def list_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def shipped_heads() -> dict[str, dict[str, str]]:
    """Return each shipped profile's fields above its first table, by name."""
    heads = {}
    for name in list_profiles():
        # Reading the tables too would take twenty times as long.
        text = (_DATA / f"{name}.toml").read_text(encoding="utf-8")
        heads[name] = load_toml(text.partition("\n[")[0])
    return heads


def ships(name: str) -> bool:
    """Tell whether a shipped profile has this name."""
    return (_DATA / f"{name}.toml").is_file()


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """Load a shipped profile by name, or any profile by a path, which ends in
    ``.toml`` or has a folder in it (``./mine``).

    Raises:
        ProfileError: no such profile or file, not TOML, or content that `parse_profile`
            refuses.
    """
    text = os.fspath(name_or_path)
    # Spelling alone decides, so that a name never depends on what lies in the folder.
    is_path = text.endswith(".toml") or Path(text).name != text
    path = Path(text) if is_path else _DATA / f"{text}.toml"
    if path.parent == _DATA and not path.is_file():
        known = list_profiles()
        raise ProfileError(
            f"unknown hardware profile {text!r}"
            f"{did_you_mean(text.lower().replace(' ', ''), known)}; `moesim list"
            " machines` prints all, or name a file that ends in .toml"
            f"{one_expected(text, 'machine')}"
        )

    where = text if is_path else path.name
    try:
        status = path.stat()
    except OSError:
        return _parsed(path, where, 0, 0)
    loaded = _parsed(path.absolute(), where, status.st_mtime_ns, status.st_size)
    # Tables of its own: whoever changes a number changes it for nobody else.
    return replace(
        loaded,
        workers=dict(loaded.workers),
        numbers=dict(loaded.numbers),
        curves=dict(loaded.curves),
        versions=dict(loaded.versions),
        fit={name: dict(figures) for name, figures in loaded.fit.items()},
    )


@lru_cache(maxsize=64)
def _parsed(path: Path, where: str, changed_ns: int, nbytes: int) -> HardwareProfile:
    """Parse a file once, until it is another one; runs of a sweep share its machine."""
    del changed_ns, nbytes
    return parse_profile(_with_base(_read(path, where), where), where=where)


def _read(path: Path, where: str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ProfileError: it cannot be read, or is not TOML.
    """
    try:
        return load_toml(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ProfileError(
            f"{where}: cannot be read: {reason}; `moesim profile {where}` makes"
            " one, `moesim list machines` names those that ship"
        ) from None
    except ValueError as error:
        raise ProfileError(
            f"{where}: not TOML: {error}; see docs/reference/hardware.md"
        ) from None


def _with_base(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the tables of a profile with what its base states beneath them.

    Raises:
        ProfileError: no profile of that name ships.
    """
    if _BASE not in raw:
        return raw
    stated = dict(raw)
    name = stated.pop(_BASE)
    known = [other for other in list_profiles() if f"{other}.toml" != where]
    if name not in known:
        raise ProfileError(
            f"{where}: base: expected a shipped profile, found {name!r}; known:"
            f" {', '.join(known)}"
        )
    base = _with_base(_read(_DATA / f"{name}.toml", name), f"{name}.toml")
    return _overlaid(base, stated)


def _overlaid(base: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables in which those of `own` replace those of `base`."""
    merged = dict(base)
    for key, entry in stated.items():
        below = merged.get(key)
        # A number is replaced whole: its value never keeps another one's source.
        is_table = isinstance(entry, dict) and not {"value", "seconds"} & entry.keys()
        if is_table and isinstance(below, dict):
            merged[key] = _overlaid(below, entry)
        else:
            merged[key] = entry
    return merged


def default_profile() -> HardwareProfile:
    """Load ``./hw.toml``, else ``moesim/hw.toml`` in the user's configuration folder,
    else the shipped profile `DEFAULT_NAME`.
    """
    return load_profile(own_profile_path() or DEFAULT_NAME)


def own_profile_path() -> Path | None:
    """The user's own profile: ``./hw.toml``, else ``moesim/hw.toml`` in the user's
    configuration folder; None where there is none.
    """
    places = [Path("hw.toml")]
    with suppress(OSError):
        places.append(user_folder("config") / "hw.toml")
    # The nearest one first, as for configuration files elsewhere.
    return next((path for path in places if path.is_file()), None)


def save_profile(profile: HardwareProfile, path: str | os.PathLike[str]) -> Path:
    """Write a profile and return its path.

    Raises:
        ProfileError: the file cannot be written, or is not called ``.toml``.
    """
    target = Path(path)
    if target.suffix != ".toml":
        raise ProfileError(
            f"{target}: expected a file name that ends in .toml; `load_profile` knows"
            " files by it"
        )

    try:
        write_text(target, tomli_w.dumps(profile.to_dict()))
    except OSError as error:
        raise ProfileError(
            f"{target}: cannot be written: {error.strerror}; choose another place"
        ) from None
    return target


PREDICTIONS: Final = "predictions"
DRIFT: Final = "drift"
"""Names of fits."""


def prediction_error(profile: HardwareProfile) -> float | None:
    """Largest relative error that a prediction's time may have; None where no
    calibration says so.
    """
    predictions = profile.fit.get(PREDICTIONS)
    if predictions is None:
        return None
    drift = profile.fit.get(DRIFT, {}).get("residual_median", 0.0)
    return hypot(predictions["residual_worst"], drift)


def rate_interval(rate: float, error: float) -> tuple[float, float]:
    """Lowest and highest rate whose times are within an error.

    Args:
        rate: predicted, per second.
        error: of times, relative, as `prediction_error` returns it.
    """
    longest = 1.0 + error
    shortest = max(1.0 - error, 1e-3)
    return rate / longest, rate / shortest
