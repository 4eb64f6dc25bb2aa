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
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w
from moesim.hwprofiles.errors import ProfileError
from moesim.hwprofiles.schema import (
    ACCELERATORS,
    NUMBER_KINDS,
    PROFILE_KINDS,
    Curve,
    Quantity,
    parse_fit,
    parse_numbers,
    plain,
    suggestion,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ACCELERATORS",
    "NUMBER_KINDS",
    "PROFILE_KINDS",
    "Contention",
    "Curve",
    "HardwareProfile",
    "Memory",
    "Power",
    "Quantity",
    "default_profile",
    "lane_class",
    "list_profiles",
    "load_profile",
    "parse_profile",
    "save_profile",
]

DEFAULT_NAME = "rtx3090-epyc7532"
_DATA = Path(__file__).parent / "data"
_TEXT_KEYS = ("name", "kind", "description", "date", "accelerator")
_NUMBER_SECTIONS = ("cores", "memory", "costs", "contention", "reference", "power")
_TOP_KEYS = (*_TEXT_KEYS, "versions", "workers", "fit", *_NUMBER_SECTIONS)


def lane_class(lane: str) -> str:
    """Drop the device number: ``h2d0`` -> ``h2d``."""
    return lane.rstrip("0123456789")


class Memory(NamedTuple):
    """Bytes for experts on each GPU and in host memory, and experts of staging room
    beside each.
    """

    gpu_bytes: int
    host_bytes: int
    staging_experts: int


@dataclass(frozen=True)
class Contention:
    """What overlapping work costs: `factors` maps (victim class, other class) ->
    slowdown >= 1.
    """

    factors: Mapping[tuple[str, str], float]

    def slowdown(self, victim_class: str, other_class: str) -> float:
        """How much longer work on `victim_class` takes while `other_class` works; 1.0
        where unknown.
        """
        return self.factors.get((victim_class, other_class), 1.0)


@dataclass(frozen=True)
class Power:
    """Watts: of the platform whatever happens, and of each lane while idle and while
    busy (0 where unstated).
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
    where: str = field(default="profile", compare=False)

    def __post_init__(self) -> None:
        """Refuse a machine that cannot be scheduled."""
        if self.kind not in PROFILE_KINDS:
            raise ProfileError(
                f"{self.where}: kind: expected one of {', '.join(PROFILE_KINDS)}, found"
                f" {self.kind!r}"
            )
        if self.accelerator not in ACCELERATORS:
            raise ProfileError(
                f"{self.where}: accelerator: expected one of {', '.join(ACCELERATORS)},"
                f" found {self.accelerator!r}"
            )
        present = [lane for lanes in self.workers.values() for lane in lanes]
        twice = sorted({lane for lane in present if present.count(lane) > 1})
        if twice:
            raise ProfileError(
                f"{self.where}: workers: lane {twice[0]!r} has two workers; list it"
                " once"
            )
        if set(present) != set(self.lanes) or self.gpus < 1:
            difference = sorted(set(present) ^ set(self.lanes)) or ["gpu0"]
            raise ProfileError(
                f"{self.where}: workers: expected the lanes control, cpu, ssd and gpuN,"
                f" h2dN, d2hN for N = 0…; missing or unknown: {', '.join(difference)}"
            )
        busy = [
            name for name, lanes in self.workers.items() if self._keeps_core_busy(lanes)
        ]
        if len(busy) > self.cores:
            raise ProfileError(
                f"{self.where}: workers: {', '.join(busy)} keep {len(busy)} cores busy,"
                f" found {self.cores} cores; let some of their lanes share a worker"
            )

    def _keeps_core_busy(self, lanes: tuple[str, ...]) -> bool:
        """Tell whether a worker occupies a host core. A direct SSD read sleeps, and so
        does a CUDA copy.
        """
        host_classes = {"cpu", "control"} | (
            {"gpu", "h2d", "d2h"} if self.accelerator == "host" else set()
        )
        return any(lane_class(lane) in host_classes for lane in lanes)

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs; the host accelerator counts as one."""
        return sum(
            lane_class(lane) == "gpu"
            for lanes in self.workers.values()
            for lane in lanes
        )

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Lane names in their one order: control, cpu, gpu0…, h2d0…, d2h0…, ssd."""
        devices = tuple(
            f"{kind}{index}"
            for kind in ("gpu", "h2d", "d2h")
            for index in range(self.gpus)
        )
        return ("control", "cpu", *devices, "ssd")

    @cached_property
    def cores(self) -> int:
        """Host cores that may be busy."""
        return int(self.number("cores"))

    @property
    def cpu_threads(self) -> int:
        """Threads of the CPU lane: one core is left to the host accelerator, or to
        control where there is a GPU.
        """
        return max(1, self.cores - 1)

    @cached_property
    def memory(self) -> Memory:
        """Room for experts."""
        return Memory(
            int(self.number("memory.gpu_bytes")),
            int(self.number("memory.host_bytes")),
            int(self.number("memory.staging_experts")),
        )

    @cached_property
    def contention(self) -> Contention:
        """Slowdowns of overlapping lane classes."""
        factors = {}
        for path, quantity in self.numbers.items():
            if path.startswith("contention."):
                _, victim, other = path.split(".")
                factors[victim, other] = float(quantity.value)
        return Contention(factors)

    @cached_property
    def power(self) -> Power | None:
        """Watts, or None where the profile states none."""
        watts = {
            path.split(".", 1)[1]: float(q.value)
            for path, q in self.numbers.items()
            if path.startswith("power.")
        }
        if not watts:
            return None
        return Power(
            platform_idle_w=watts.get("platform.idle_w", 0.0),
            idle_w={lane: watts.get(f"{lane}.idle_w", 0.0) for lane in self.lanes},
            busy_w={lane: watts.get(f"{lane}.busy_w", 0.0) for lane in self.lanes},
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything the file says, independent of its layout."""
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
                " profile --out hw.toml`"
            )
        return quantity.value

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the TOML file, nested and in its one order."""
        tree: dict[str, Any] = {key: getattr(self, key) for key in _TEXT_KEYS}
        tree["versions"] = dict(sorted(self.versions.items()))
        tree["workers"] = {name: list(lanes) for name, lanes in self.workers.items()}
        entries: dict[str, Quantity | Curve] = {**self.numbers, **self.curves}
        for section in _NUMBER_SECTIONS:
            for path in sorted(entries):
                if path == section or path.startswith(f"{section}."):
                    *folders, leaf = path.split(".")
                    node = tree
                    for folder in folders:
                        node = node.setdefault(folder, {})
                    node[leaf] = plain(entries[path])
        if self.fit:
            tree["fit"] = {
                name: dict(sorted(report.items()))
                for name, report in sorted(self.fit.items())
            }
        return tree


def parse_profile(raw: Mapping[str, Any], *, where: str) -> HardwareProfile:
    """Build a profile from the nested tables of a TOML file.

    Raises:
        ProfileError: an unknown key, a number without provenance, an impossible value
            or a machine without workers.
    """
    for key in raw:
        if key not in _TOP_KEYS:
            known = ", ".join(_TOP_KEYS)
            raise ProfileError(
                f"{where}: {key}: unknown key; known:"
                f" {known}{suggestion(key, _TOP_KEYS)}"
            )
    texts: dict[str, str] = {}
    for key in _TEXT_KEYS:
        entry = raw.get(key)
        if not isinstance(entry, str) or not entry:
            raise ProfileError(
                f"{where}: {key}: expected a text, found {entry!r}; see"
                " docs/reference/hardware.md"
            )
        texts[key] = entry
    workers = raw.get("workers")
    if not isinstance(workers, dict) or not all(
        isinstance(lanes, list)
        and lanes
        and all(isinstance(lane, str) for lane in lanes)
        for lanes in workers.values()
    ):
        raise ProfileError(
            f"{where}: workers: expected worker = [lane, …] for every worker, found"
            f" {workers!r}"
        )
    versions = raw.get("versions", {})
    if not isinstance(versions, dict) or not all(
        isinstance(text, str) for text in versions.values()
    ):
        raise ProfileError(
            f"{where}: versions: expected name = text for every entry, found"
            f" {versions!r}"
        )
    numbers: dict[str, Quantity] = {}
    curves: dict[str, Curve] = {}
    for path, entry in parse_numbers(
        {key: raw[key] for key in _NUMBER_SECTIONS if key in raw}, where=where
    ):
        if isinstance(entry, Curve):
            curves[path] = entry
        else:
            numbers[path] = entry
    return HardwareProfile(
        workers={name: tuple(lanes) for name, lanes in workers.items()},
        numbers=numbers,
        curves=curves,
        versions=dict(versions),
        fit=parse_fit(raw.get("fit", {}), where=where),
        where=where,
        **texts,
    )


def list_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.toml")))


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """Load a shipped profile by name, or any profile by a path that ends in ``.toml``.

    Raises:
        ProfileError: no such profile or file, not TOML, or content that `parse_profile`
            refuses.
    """
    text = os.fspath(name_or_path)
    path = Path(text) if text.endswith(".toml") else _DATA / f"{text}.toml"
    if path.parent == _DATA and path.stem not in list_profiles():
        known = list_profiles()
        raise ProfileError(
            f"unknown hardware profile {text!r}; known: {', '.join(known)}, or a path"
            f" that ends in .toml{suggestion(text, known)}"
        )
    where = text if text.endswith(".toml") else path.name
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ProfileError(
            f"{where}: cannot be read: {reason}; `moesim profile --out {where}` makes"
            " one, `moesim list hardware` names those that ship"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(
            f"{where}: not TOML: {error}; see docs/reference/hardware.md"
        ) from None
    return parse_profile(raw, where=where)


def default_profile() -> HardwareProfile:
    """Load ``./hw.toml``, else the user's own ``moesim/hw.toml``, else the profile that
    a newcomer starts with.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    for path in (Path("hw.toml"), Path(home) / "moesim" / "hw.toml"):
        if path.is_file():
            return load_profile(path)
    return load_profile(DEFAULT_NAME)


def save_profile(profile: HardwareProfile, path: str | os.PathLike[str]) -> Path:
    """Write a profile beside its place, then rename it there; return the place.

    Raises:
        ProfileError: the place cannot be written.
    """
    target = Path(path)
    if target.suffix != ".toml":
        raise ProfileError(
            f"{target}: expected a file name that ends in .toml; `load_profile` knows"
            " files by it"
        )
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(tomli_w.dumps(profile.to_dict()), encoding="utf-8")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ProfileError(
            f"{target}: cannot be written: {error.strerror}; choose another place"
        ) from None
    return target
