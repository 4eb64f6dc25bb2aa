"""Speeds, intervals, terms and machines in words, the same in every report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reporting.units import number
from moesim.traces.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.advice.machine.machine import Machine
    from moesim.advice.times.latents import Interval

TERMS = {
    "step": "start of a step",
    "gpu weights": "GPU reads weights",
    "gpu kernels": "GPU starts kernels",
    "gpu keys and values": "GPU reads keys and values",
    "gpu products": "GPU multiplies",
    "attention": "attention",
    "upload": "upload of experts",
    "cpu experts": "CPU reads experts",
    "cpu floor": "start of CPU layers",
    "cpu other layers": "CPU runs whole layers",
    "cpu keys and values": "CPU reads keys and values",
}


def term_words(name: str) -> str:
    """Return a term's name where people read."""
    return TERMS.get(name, name)


def interval_words(interval: Interval, unit: str) -> str:
    """Write ``12.3 s (90 %: 10.1 to 15.0)``."""
    low = number(interval.low)
    high = number(interval.high)
    return f"{number(interval.value)} {unit} (90 %: {low} to {high})"


def speed_words(interval: Interval, unit: str = "tokens/s") -> str:
    """Write a speed with its interval; without a unit as ``12.3 (10.1-15.0)``."""
    if unit:
        return interval_words(interval, unit)
    return f"{number(interval.value)} ({number(interval.low)}-{number(interval.high)})"


def limit_words(terms: Mapping[str, float]) -> str:
    """Say which term takes most of the time, and how much."""
    name = max(terms, key=lambda each: terms[each])
    share = terms[name] / sum(terms.values())
    return f"{100 * share:.0f} % of it: {term_words(name)}"


def memory_words(machine: Machine) -> str:
    """Say how much memory a machine has, as far as it is known."""
    memory = machine.memory
    parts = []
    if memory.size_bytes:
        parts.append(format_bytes(memory.size_bytes))
    if memory.kind:
        parts.append(memory.kind)
    # Assumed channels are among the assumptions, not here.
    if memory.channels and memory.kind:
        parts.append(f"{memory.channels} channels")
    words = f", {' '.join(parts)}" if parts else ""
    if machine.link_bytes_per_s and not machine.unified:
        words += f", link {machine.link_bytes_per_s / 1e9:.1f} GB/s"
    return words
