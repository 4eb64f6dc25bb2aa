"""Limited host memory: what must be read before it can be copied or used.

As `moesim.policies.planner.host_memory`. Where host memory holds everything, its number
in `world.constants` is `NONE`, and nothing here has an effect.
"""

from __future__ import annotations

from typing import Any

from moesim.machine_code.functions import compiled, rows_at
from moesim.policies.base import ABSENT, RESIDENT
from moesim.policies.kernels import Work
from moesim.sim.compiled import memory
from moesim.sim.compiled.records import NONE


@compiled
def holds_expert(world: Any, key: int) -> bool:
    """Whether an expert can be copied to a GPU without a read."""
    m = world.constants.host
    return m == NONE or world.state[m, key] == RESIDENT


@compiled
def wait_s(world: Any, layer: int, expert: int) -> float:
    """Seconds until an expert is in host memory.

    What is absent could be read next, after the read under way.
    """
    m = world.constants.host
    key = layer * world.constants.experts + expert
    now_s = world.run.now_s
    if world.state[m, key] == RESIDENT:
        return 0.0
    if world.state[m, key] == ABSENT:
        return (
            max(0.0, world.memories[m].busy_until_s - now_s)
            + world.read_s[world.size_of[key]]
        )
    return max(0.0, world.experts[m, key].landing_s - now_s)


@compiled
def note_accesses(world: Any, work: Work, lanes: Any) -> None:
    """Hold every active expert, and tell the host cache what the GPUs lack or the CPU
    computes: only that is asked of it.
    """
    m = world.constants.host
    first = work.layer * world.constants.experts
    experts = world.host_work_experts[0]
    tokens = world.host_work_experts[1]
    state = world.host_work_state
    cpu_s = world.host_work_s[0]
    host_s = world.host_work_s[1]
    asked = 0
    for i in range(len(lanes)):
        key = first + work.experts[i]
        world.holds[m, key] += 1
        if lanes[i] == 0:
            world.experts[m, key].used = True
        elif work.state[i] != ABSENT:
            continue
        experts[asked] = work.experts[i]
        tokens[asked] = work.tokens[i]
        state[asked] = world.state[m, key]
        cpu_s[asked] = work.cpu_s[i]
        host_s[asked] = work.host_s[i]
        asked += 1
    if not asked:
        return

    rows = len(work.gpu_s)
    gpu_s = rows_at(world.host_work_s[2], rows, asked)
    arrive_s = rows_at(world.host_work_s[3], rows, asked)
    for row in range(rows):
        n = 0
        for i in range(len(lanes)):
            if lanes[i] == 0 or work.state[i] == ABSENT:
                gpu_s[row, n] = work.gpu_s[row, i]
                arrive_s[row, n] = work.arrive_s[row, i]
                n += 1
    part_of_it = Work(
        work.step,
        work.layer,
        work.phase,
        work.batch,
        work.rows,
        experts[:asked],
        tokens[:asked],
        state[:asked],
        cpu_s[:asked],
        host_s[:asked],
        gpu_s,
        arrive_s,
        work.link_s,
        state[:asked],
        work.scores,
        work.first_scores,
        work.states,
        0.0,
        work.ranks[:0],
    )
    memory.cache(world, m).accessed(memory.cache_state(world, m), part_of_it)


# -- wishes ----------------------------------------------------------------------------


@compiled
def promote(world: Any, key: int) -> None:
    """Note that a layer step waits for an expert, whose read may be queued."""
    m = world.constants.host
    if m != NONE and world.experts[m, key].wished:
        world.experts[m, key].demanded = True


@compiled
def need(world: Any, work: Work, keys: Any, demanded: bool) -> Any:
    """Hold experts of one layer for a queued copy each, and wish for missing reads.

    Returns:
        Keys of those that must be read.
    """
    m = world.constants.host
    reads = world.keys[6]
    if m == NONE:
        return reads[:0]
    count = 0
    for key in keys:
        if world.state[m, key] == ABSENT and not world.experts[m, key].wished:
            reads[count] = key
            count += 1
        world.holds[m, key] += 1
    # A read that is queued already serves this copy, too.
    unread = reads[:count]
    if demanded:
        for key in keys:
            promote(world, key)
        if count:
            memory.demand(world, work, m, unread)
    else:
        for key in unread:
            memory.prefetch(world, work, m, key)
    return unread


@compiled
def release_gpu_experts(world: Any, work: Work, lanes: Any) -> None:
    """End the layer step's holds of what GPUs compute.

    Until a copy has landed it holds its expert itself.
    """
    first = work.layer * world.constants.experts
    for i in range(len(lanes)):
        if lanes[i] != 0:
            world.holds[world.constants.host, first + work.experts[i]] -= 1


# -- ends ------------------------------------------------------------------------------


@compiled
def _drop_if_unneeded(world: Any, key: int) -> bool:
    m = world.constants.host
    # Staging itself is one hold.
    needed = world.holds[m, key] > 1
    if not world.experts[m, key].staged or needed:
        return False
    if world.state[m, key] != RESIDENT:
        return False
    memory.drop_staged(world, m, key)
    return True


@compiled
def land(world: Any, key: int) -> bool:
    """Complete a read; whether a staging slot is free again."""
    world.state[world.constants.host, key] = RESIDENT
    return _drop_if_unneeded(world, key)


@compiled
def unneed(world: Any, key: int) -> bool:
    """End the need of one copy or product.

    Returns:
        Whether a staging slot is free again, or kept by copies that yield to a read
        that is awaited.
    """
    m = world.constants.host
    if m == NONE:
        return False
    was_staged = world.experts[m, key].staged
    world.holds[m, key] -= 1
    _drop_if_unneeded(world, key)
    return was_staged


@compiled
def computed(world: Any, key: int) -> bool:
    """Note that a product on the CPU has ended.

    Returns:
        Whether a staging slot is free again, or kept by copies that yield to a read
        that is awaited.
    """
    expert = world.experts[world.constants.host, key]
    if not expert.used:
        return False
    expert.used = False
    return unneed(world, key)


@compiled
def complete(world: Any, layer: int) -> None:
    """End the holds of a layer step that `computed` has not ended."""
    m = world.constants.host
    first = layer * world.constants.experts
    for key in range(first, first + world.constants.experts):
        world.experts[m, key].cpu_reads = False
        if world.experts[m, key].held_ahead:
            world.experts[m, key].held_ahead = False
            world.holds[m, key] -= 1
        if world.experts[m, key].used:
            world.experts[m, key].used = False
            world.holds[m, key] -= 1
    if world.pools[m, layer].staged:
        for key in range(first, first + world.constants.experts):
            _drop_if_unneeded(world, key)
