"""What a layer step asks to be copied: demand, prefetches, replacements.

None of these copies starts here. They are queued, and take their places when a link is
free (`moesim.policies.planner.memory_level`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.names import ABSENT, CPU, IN_FLIGHT, RESIDENT
from moesim.policies.planner import questions
from moesim.policies.planner.lookups import missing
from moesim.policies.planner.plan import FETCH, PREFETCH, READ, REPLACE, Copies
from moesim.policies.planner.records import LayerWork
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.planner.host_memory import HostMemory
    from moesim.policies.planner.machine_state import MachineState
    from moesim.policies.planner.plan import Launch
    from moesim.policies.planner.records import ExpertKey, Swap
    from moesim.policies.planner.residency import Residency


def wish_for_missing(
    machine: MachineState,
    work: LayerWork,
    gpu: int,
    launch: Launch,
    copies: list[Copies],
    promoted: list[tuple[int, int]],
) -> np.ndarray:
    """Wish for what a GPU lacks; what is queued already is promoted.

    Returns:
        Flat keys of what must be fetched.
    """
    level = machine.gpu[gpu]
    layer = work.layer
    keys = _missing(work, launch, gpu + 1, level.memory)
    key_list = keys.tolist()
    queued = level.wished_among(key_list)
    if queued:
        for key in queued:
            if not level.is_demanded(key):
                _promote(machine, gpu, key, promoted)
        key_list = [key for key in key_list if key not in queued]
        keys = np.array(key_list, np.int64)
    if not key_list:
        return keys
    level.demand(work, layer, keys)
    read = machine.need_in_host(work, layer, keys, demanded=True)
    copies.append(machine.queue(FETCH, gpu, layer, key_list, read))
    return keys


def promote_due(
    machine: MachineState,
    layer: int,
    promoted: list[tuple[int, int]],
    *,
    everything: bool,
) -> None:
    """Promote queued copies of a layer that should have landed before it came.

    That is `everything` if its products wait for all of them, else what caches with
    a deadline asked for. A replacement whose predecessor is in use stays behind,
    and so does one that must be read first: a guess must not block the SSD.
    """
    for gpu, level in enumerate(machine.gpu):
        for key in level.wished_of(layer):
            if everything:
                _promote(machine, gpu, key, promoted)
            elif machine.is_in_host_memory(key) and level.hurry(key):
                promoted.append((gpu, key % machine.experts))


def can_stage_all(
    machine: MachineState,
    layer: int,
    copies: list[Copies],
    promoted: list[tuple[int, int]],
) -> bool:
    """Whether staging could hold every queued copy of a layer at once, beside what
    it holds already.
    """
    for gpu in machine.serving[layer]:
        memory = machine.gpu[gpu].memory
        coming = [part for part in copies if (part.gpu, part.layer) == (gpu, layer)]
        count = sum(len(part.experts) for part in coming)
        count += sum(copied_to == gpu for copied_to, _ in promoted)
        # Slots of prefetches for other layers can be taken from them.
        if count + memory.staged_count[layer] > machine.sizes.staging:
            return False
    return True


def exposed_s(
    machine: MachineState, work: LayerWork, gpu: int, keys: np.ndarray
) -> float:
    """Seconds by which a cache's choice of victims outlasts the first load."""
    level = machine.gpu[gpu]
    if not len(keys):
        return 0.0
    row = 0 if machine.splits_layers else gpu
    position = np.searchsorted(work.experts, keys - work.layer * machine.experts)
    first_s = float(work.arrive_s[row][position].min())
    return max(0.0, level.cache.choosing_s - first_s)


def read_for_cpu(
    machine: MachineState,
    host: HostMemory,
    work: LayerWork,
    launch: Launch,
    copies: list[Copies],
) -> None:
    """Wish for reads of what the CPU computes; the layer step itself holds it."""
    layer = work.layer
    keys = _missing(work, launch, CPU, host.memory)
    if not len(keys):
        return
    read = [not host.level.is_wished(key) for key in keys.tolist()]
    for key in keys.tolist():
        host.promote(key)
    host.demand(work, layer, keys[read])
    experts = (keys - layer * machine.experts).tolist()
    copies.append(Copies(READ, -1, layer, experts, read))


def _missing(
    work: LayerWork, launch: Launch, lane: int, memory: Residency
) -> np.ndarray:
    """Flat keys, in launch order, of what a lane computes and its memory lacks."""
    keys = np.empty(len(work.experts), np.int64)
    count = missing(
        launch.lanes, launch.order, lane, memory.state, work.layer, work.experts, keys
    )
    return keys[:count]


def _promote(
    machine: MachineState, gpu: int, key: int, promoted: list[tuple[int, int]]
) -> None:
    """Note that a layer step waits for a queued copy and for the read before."""
    machine.gpu[gpu].promote(key)
    if machine.host is not None:
        machine.host.promote(key)
    place = gpu, key % machine.experts
    if place not in promoted:
        promoted.append(place)


def wish_for_named(
    machine: MachineState, work: LayerWork, copies: list[Copies]
) -> None:
    """Wish for what the prefetch policy names, within its byte budget."""
    named = questions.prefetch(machine, work)
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
    _wish(machine, BETWEEN_LAYERS, named, copies)


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
BETWEEN_LAYERS = LayerWork(
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


def ask(machine: MachineState, gpu: int, work: LayerWork) -> list[Swap]:
    """Ask the cache for its own copies, and check them."""
    level = machine.gpu[gpu]
    memory = level.memory
    states = machine.states[gpu]
    swaps = questions.replacements(level.cache, work, states, machine.experts)
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
