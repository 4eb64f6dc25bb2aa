"""Reads the probes out of a profile that `moesim profile` measured on this machine."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from moesim.advice.machine.devices import Graphics, graphics_cards, processors
from moesim.advice.machine.machine import (
    CHANNELS_ASSUMED,
    CORES_ASSUMED,
    Machine,
    Probes,
    describe_machine,
)
from moesim.advice.machine.names import find
from moesim.hwprofiles import paths
from moesim.hwprofiles.profile import HardwareProfile, load_profile

if TYPE_CHECKING:
    from pathlib import Path

_MEMORY_SUFFIX = re.compile(r" \d+GB$")
_READ = re.compile(r"probes\.host_read\.(\d+)\.bytes_per_s")


def machine_of_profile(
    path: Path,
    *,
    cpu: str | None = None,
    ram: str | None = None,
    gpu: str | None = None,
    pcie: str | None = None,
) -> Machine:
    """Describe a machine by its profile; words of the user add what it does not say.

    Args:
        path: a TOML file, or the name of a profile that ships.
        cpu: as in `describe_machine`; default: read from the profile's description.
        ram: as in `describe_machine`.
        gpu: as in `describe_machine`; default: read from the description.
        pcie: as in `describe_machine`.

    Raises:
        ProfileError: no such profile.
        AdviceError: words that name no device.
    """
    profile = load_profile(str(path))
    text = profile.description
    # A description is a sentence; only the devices that it names are taken from it.
    card = _card_in(profile) if profile.accelerator == "cuda" else None
    named = find(text, processors())
    machine = describe_machine(
        cpu=cpu or (named.name if named else text),
        ram=ram,
        gpu=gpu or (card.name if card else None),
        pcie=pcie,
        probes=probes_of(profile),
        name=profile.name,
        lenient=True,
    )
    if cpu is None and not machine.processor.known:
        processor = replace(machine.processor, cores=profile.cores)
        # A measured rate needs no guess about modules and channels.
        assumed = () if machine.probes.host_read else machine.assumed
        # The profile states its cores.
        assumed = tuple(
            f"CPU: {CHANNELS_ASSUMED}" if words == CORES_ASSUMED else words
            for words in assumed
        )
        machine = replace(machine, processor=processor, assumed=assumed)
    return machine


def _card_in(profile: HardwareProfile) -> Graphics | None:
    """Find the card that a description names, in the variant with enough memory.

    Descriptions leave out "16GB"; what the profile grants to experts must fit.
    """
    card = find(profile.description, graphics_cards())
    if card is None:
        return None
    needed = profile.number(paths.GPU_BYTES)
    base = _MEMORY_SUFFIX.sub("", card.name)
    variants = [
        other
        for other in graphics_cards().values()
        if _MEMORY_SUFFIX.sub("", other.name) == base and other.vram_bytes >= needed
    ]
    return min(variants, key=lambda each: each.vram_bytes, default=card)


def probes_of(profile: HardwareProfile) -> Probes:
    """Return the measured rates of a profile; empty where it is not measured.

    Profiles from before the probes existed still hold what experts and copies reached,
    which is close to it.
    """
    if profile.kind != "measured":
        return Probes()

    reads = {}
    for name, quantity in profile.numbers.items():
        match = _READ.fullmatch(name)
        if match:
            reads[int(match.group(1))] = quantity.value
    if not reads:
        # Experts read their weights once: nearly a probe, if a slow one.
        reads[profile.cpu_threads] = profile.number("costs.cpu.bytes_per_s")

    # The host accelerator's copies do not cross a link.
    cuda = profile.accelerator == "cuda"
    return Probes(
        host_read=reads,
        link=_first(profile, paths.LINK_PAGE_LOCKED, "costs.h2d.bytes_per_s")
        if cuda
        else None,
        pageable=_first(profile, paths.LINK_PAGEABLE),
        device_read=_first(profile, paths.DEVICE_READ),
        host_beside_link=_first(profile, paths.HOST_BESIDE_LINK),
        link_beside_host=_first(profile, paths.LINK_BESIDE_HOST),
    )


def _first(profile: HardwareProfile, *names: str) -> float | None:
    # The first one is the better source.
    for name in names:
        if name in profile.numbers:
            return profile.numbers[name].value
    return None
