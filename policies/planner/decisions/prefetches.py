"""Prefetches: what is wished for before its gate has spoken, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import ABSENT, LayerWork, PolicyError
from moesim.policies.planner.plan import FETCH, PREFETCH, Copies
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import ExpertKey
    from moesim.policies.planner.machine_state import MachineState


def wish_for_named(
    machine: MachineState, work: LayerWork, copies: list[Copies]
) -> None:
    """Wish for what the prefetch policy names, within its byte budget."""
    named = machine.policies.prefetch.prefetch(work, machine)
    _check(machine, named)
    # A new prediction of a layer takes the place of the last one; when the layer has
    # come, its prediction has served.
    for past in {work.layer, *(layer for layer, _ in named)}:
        machine.gpu[machine.home(past)].shielded[past] = False
    _wish(machine, work, named, copies)


def wish_for_foretold(
    machine: MachineState, named: Sequence[ExpertKey], copies: list[Copies]
) -> None:
    """Wish for what a drafted token foretells, beside what those before it did."""
    _check(machine, named)
    _wish(machine, _BETWEEN_LAYERS, named, copies)


def _wish(
    machine: MachineState,
    work: LayerWork,
    named: Sequence[ExpertKey],
    copies: list[Copies],
) -> None:
    """Wish for named experts that are absent, and shield all of them."""
    for layer, expert in named:
        machine.gpu[machine.home(layer)].shielded[layer, expert] = True
    budget = machine.sizes.prefetch_budget_bytes
    for layer, expert in named:
        gpu = machine.home(layer)
        level = machine.gpu[gpu]
        key = layer * machine.experts + expert
        if level.memory.state[layer, expert] != ABSENT or level.is_wished(key):
            continue
        if budget is not None:
            nbytes = level.memory.bytes_of[key]
            if budget < nbytes:
                break
            budget -= nbytes
        keys = np.array([key])
        level.prefetch(work, key)
        # The products of this very layer may wait for it: then it is no guess.
        awaited = layer == work.layer and machine.policies.prefetch.late == "wait"
        if awaited:
            level.promote(key)
        read = machine.need_in_host(work, layer, keys, demanded=awaited)
        kind = FETCH if awaited else PREFETCH
        copies.append(machine.queue(kind, gpu, layer, [key], read))


def drop_late(
    machine: MachineState,
    queued: Sequence[tuple[int, int, int]],
    layer: int,
    active: Sequence[int],
) -> list[tuple[int, int, int]]:
    """Decide about queued prefetches, now that a gate has spoken.

    What the layer turns out to need becomes a demand fetch, if the plan wants it on
    a GPU, and is dropped here for that; the others are dropped or stay, as the
    prefetch policy says.

    Args:
        queued: (GPU, layer, expert) of this layer's, and with `requeues` of all.
        layer: whose gate has spoken.
        active: experts that it chose.

    Returns:
        Those that are dropped.
    """
    dropped = []
    for place in queued:
        gpu, target, expert = place
        awaited = target == layer and expert in active
        rule = machine.policies.prefetch.late if target == layer else "drop"
        stays = rule == "wait" or (rule == "keep" and not awaited)
        if not stays:
            dropped.append(place)
            machine.cancel_copy(gpu, target, expert)
    return dropped


def _check(machine: MachineState, named: Sequence[ExpertKey]) -> None:
    """Refuse experts that the model has not.

    Raises:
        PolicyError: naming the policy.
    """
    for layer, expert in named:
        if not (0 <= layer < machine.layers and 0 <= expert < machine.experts):
            raise PolicyError(
                f"prefetch policy {machine.policies.names.get('prefetch')!r}: no"
                f" expert {layer, expert}"
            )


_NOTHING = np.zeros(0)
_BETWEEN_LAYERS = LayerWork(
    step=-1,
    layer=-1,
    phase=Phase.DECODE,
    experts=np.zeros(0, np.int32),
    tokens=np.zeros(0, np.int32),
    state=np.zeros(0, np.int8),
    cpu_s=_NOTHING,
    host_s=_NOTHING,
    gpu_s=np.zeros((1, 0)),
    arrive_s=np.zeros((1, 0)),
    routing=np.zeros((0, 0), np.uint16),
)
"""Asks for nothing: what caches are told of prefetches that no layer step named."""
