"""Replacements: copies that a cache policy asks for by itself, after or before its
layer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import ABSENT, IN_FLIGHT, RESIDENT, PolicyError
from moesim.policies.planner.plan import FETCH, REPLACE, Copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, Swap
    from moesim.policies.planner.machine_state import MachineState


def ask(machine: MachineState, gpu: int, work: LayerWork) -> list[Swap]:
    """Ask the cache for its own copies, and check them."""
    level = machine.gpu[gpu]
    memory = level.memory
    swaps = list(level.cache.replacements(work, machine))
    for swap in swaps:
        enters = memory.state[swap.incoming] != RESIDENT
        if memory.staged[swap.incoming]:
            enters = True
        if memory.state[swap.outgoing] != RESIDENT or not enters:
            raise PolicyError(
                f"cache policy {level.name!r}: swap {tuple(swap.outgoing)} ->"
                f" {tuple(swap.incoming)}: the first must be resident and the"
                " second must not be"
            )
    return swaps


def replace_first(machine: MachineState, work: LayerWork) -> list[tuple[int, Swap]]:
    """Let caches replace residents before their layer step is assigned.

    `work` then tells of the new content.

    Returns:
        Replacements by GPU.
    """
    replacements = []
    for row, gpu in enumerate(machine.serving[work.layer]):
        level = machine.gpu[gpu]
        if not (level.cache.replaces and level.cache.replaces_first):
            continue
        lands_s = machine.links[gpu].left_s(machine.now_s)
        for swap in ask(machine, gpu, work):
            lands_s += machine.links[gpu].copy_s[swap.incoming]
            coming = work.experts == swap.incoming.expert
            work.state[coming] = IN_FLIGHT
            work.arrive_s[row, coming] = lands_s
            going = work.experts == swap.outgoing.expert
            work.arrive_s[row, going] = np.inf
            replacements.append((gpu, swap))
    if replacements:
        # What leaves every GPU that has it is a miss.
        gone = np.isinf(work.arrive_s).all(axis=0)
        work.state[gone] = ABSENT
    return replacements


def keep_computed(
    machine: MachineState,
    work: LayerWork,
    lanes: np.ndarray,
    replacements: Sequence[tuple[int, Swap]],
) -> None:
    """Note that outgoing experts are there which this step computes where they are:
    they leave after it (`wish_first`), so nothing has to be brought for them.
    """
    for gpu, swap in replacements:
        outgoing = work.experts == swap.outgoing.expert
        kept = outgoing & (lanes == 1 + gpu)
        row = machine.serving[work.layer].index(gpu)
        work.state[kept] = RESIDENT
        work.arrive_s[row, kept] = 0.0


def wish_first(
    machine: MachineState,
    work: LayerWork,
    lanes: np.ndarray,
    replacements: Sequence[tuple[int, Swap]],
    copies: list[Copies],
) -> tuple[list[tuple[int, int]], list[tuple[int, Swap]]]:
    """Wish for what `replace_first` found; demand, where this step awaits it.

    Returns:
        (GPU, expert) of active experts that nobody holds any more, so that they can
        leave; and replacements that are wished for after the step, as it computes
        the outgoing expert on that GPU all the same.
    """
    released: list[tuple[int, int]] = []
    postponed: list[tuple[int, Swap]] = []
    lane_of = dict(zip(work.experts.tolist(), lanes.tolist(), strict=True))
    for gpu, swap in replacements:
        outgoing = swap.outgoing.expert
        if lane_of.get(outgoing) == 1 + gpu:
            postponed.append((gpu, swap))
            continue
        if outgoing in lane_of:
            machine.gpu[gpu].memory.holds[work.layer, outgoing] -= 1
            released.append((gpu, outgoing))
        awaited = lane_of.get(swap.incoming.expert) == 1 + gpu
        wish(machine, work, gpu, swap, copies, demanded=awaited)
    return released, postponed


def wish(
    machine: MachineState,
    work: LayerWork,
    gpu: int,
    swap: Swap,
    copies: list[Copies],
    *,
    demanded: bool = False,
) -> None:
    """Wish for one replacement, unless a copy has overtaken it."""
    level = machine.gpu[gpu]
    layer, expert = swap.incoming
    key = layer * machine.experts + expert
    absent = level.memory.state[layer, expert] == ABSENT
    if not absent or level.is_wished(key):
        return
    if level.memory.state[swap.outgoing] != RESIDENT:
        return
    outgoing = swap.outgoing.layer * machine.experts + swap.outgoing.expert
    level.replace(outgoing, key)
    if demanded:
        level.promote(key)
    keys = np.array([key])
    read = machine.need_in_host(work, layer, keys, demanded=demanded)
    kind = FETCH if demanded else REPLACE
    copies.append(machine.queue(kind, gpu, layer, [key], read))
