"""Memories: what lies where, who may leave, and the life of a copy into them.

As `moesim.policies.planner.residency` and `moesim.policies.planner.memory_level`.
"""

from __future__ import annotations

from typing import Any

from moesim.machine_code.functions import compiled, loaded, table_at
from moesim.policies.base import ABSENT, IN_FLIGHT, RESIDENT
from moesim.policies.kernels import State, Work
from moesim.sim.compiled.records import NONE, WORLD

NO_PLACE = 0
CACHED = 1
STAGED = 2
"""Where a copy that starts has found its place."""

BAD_ASSIGNMENT = 1
BAD_VICTIMS = 2
BAD_PREFETCH = 3
BAD_SWAP = 4
STUCK = 5
RAISED = 6
"""What a run may fail with."""

RESERVED_SLOTS = 1
"""Staging slots that prefetches leave to demand."""


@compiled
def cache_state(world: Any, m: int) -> State:
    """The state of a memory's cache policy."""
    return loaded(State, world.memories[m].state)


@compiled
def cache(world: Any, m: int) -> Any:
    """Whose kernels answer for a memory: a table like the world's."""
    if m == world.constants.host:
        return table_at(WORLD, world.constants.host_cache)
    return world


# -- places ----------------------------------------------------------------------------


@compiled
def pool_of(world: Any, m: int, layer: int) -> Any:
    """Bytes of the pool that serves a layer."""
    return world.pools[m, 0 if world.memories[m].is_global else layer]


@compiled
def _room(world: Any, m: int, layer: int) -> int:
    """Free bytes of a layer's pool that are promised to nobody."""
    pool = pool_of(world, m, layer)
    return pool.free_bytes - pool.promised_bytes


@compiled
def _take(world: Any, m: int, layer: int, nbytes: int) -> None:
    memory = world.memories[m]
    pool_of(world, m, layer).free_bytes -= nbytes
    memory.used_bytes += nbytes
    memory.used_high_bytes = max(memory.used_high_bytes, memory.used_bytes)


@compiled
def may_leave(world: Any, m: int, key: int) -> bool:
    """Whether this is an unheld resident."""
    return world.state[m, key] == RESIDENT and world.holds[m, key] == 0


@compiled
def _candidates(world: Any, m: int, layer: int, demanded: bool, keys: Any) -> int:
    """Fill in ascending keys of who may leave: for a prefetch, nobody that a
    prediction wants as well. Their number.
    """
    experts = world.constants.experts
    first = layer * experts
    end = first + experts
    if world.memories[m].is_global:
        first = 0
        end = world.state.shape[1]
    count = 0
    for key in range(first, end):
        keys[count] = key
        count += world.state[m, key] == RESIDENT and world.holds[m, key] == 0
    if demanded:
        return count
    kept = 0
    for n in range(count):
        keys[kept] = keys[n]
        kept += not world.experts[m, keys[n]].shielded
    return kept


@compiled
def drop_staged(world: Any, m: int, key: int) -> None:
    """Forget a staged expert that has landed and is needed no more."""
    world.experts[m, key].staged = False
    world.holds[m, key] -= 1
    world.state[m, key] = ABSENT
    world.memories[m].staged -= 1
    experts = world.constants.experts
    world.pools[m, key // experts].staged -= 1


@compiled
def _stage(world: Any, m: int, key: int, layer: int, landing_s: float) -> None:
    world.state[m, key] = IN_FLIGHT
    world.experts[m, key].staged = True
    world.experts[m, key].landing_s = landing_s
    world.holds[m, key] += 1
    world.memories[m].staged += 1
    world.pools[m, layer].staged += 1


# -- wishes ----------------------------------------------------------------------------


@compiled
def wish(world: Any, m: int, key: int, enters: bool, demanded: bool) -> None:
    """Wish for an absent expert."""
    wished = world.experts[m, key]
    wished.wished = True
    wished.enters = enters
    wished.demanded = demanded
    wished.hurried = False
    wished.promised = False
    wished.replaces = NONE
    run = world.run
    wished.order = run.wishes
    run.wishes += 1


@compiled
def _promise(world: Any, m: int, key: int, layer: int, room: int, victims: Any) -> None:
    """Promise a wish free room and the places of residents, which stay until then."""
    wished = world.experts[m, key]
    wished.enters = True
    wished.promised = True
    wished.room = room
    wished.victim = NONE
    pool_of(world, m, layer).promised_bytes += room
    # Held, they are promised to nobody else: each is in one list.
    for n in range(len(victims) - 1, -1, -1):
        victim = victims[n]
        world.experts[m, victim].next_victim = wished.victim
        wished.victim = victim
        world.holds[m, victim] += 1


@compiled
def _keep_promises(world: Any, m: int, key: int, layer: int, sign: int) -> None:
    """End (-1) or renew (1) the promises made to a wish."""
    wished = world.experts[m, key]
    if not wished.promised:
        return
    pool_of(world, m, layer).promised_bytes += sign * wished.room
    victim = wished.victim
    while victim != NONE:
        world.holds[m, victim] += sign
        victim = world.experts[m, victim].next_victim


@compiled
def cancel(world: Any, m: int, key: int) -> None:
    """Forget a wish; what was promised to it is free again."""
    experts = world.constants.experts
    _keep_promises(world, m, key, key // experts, -1)
    world.experts[m, key].wished = False


@compiled
def demand(world: Any, work: Work, m: int, keys: Any) -> None:
    """Wish for absent experts of one layer that a layer step waits for."""
    for key in keys:
        wish(world, m, key, False, True)
    memory = world.memories[m]
    entering = world.keys[1][: len(keys)]
    if memory.admits_all:
        for n in range(len(keys)):
            entering[n] = keys[n]
    else:
        answers = world.answers[: len(keys)]
        cache(world, m).admits(cache_state(world, m), work, keys, answers)
        count = 0
        for n in range(len(keys)):
            if answers[n]:
                entering[count] = keys[n]
                count += 1
        entering = entering[:count]

    layer = work.layer
    if not memory.equal_sizes:
        _demand_unequal(world, m, layer, entering)
        return
    free = _room(world, m, layer)
    size = world.size_bytes[world.size_of[layer * world.constants.experts]]
    room = max(0, free // size)
    if len(entering) > room and not memory.in_launch_order:
        cache(world, m).precedence(cache_state(world, m), entering)
    for n in range(min(room, len(entering))):
        _promise(world, m, entering[n], layer, size, entering[:0])
    if len(entering) <= room:
        return

    candidates = world.keys[2]
    count = _candidates(world, m, layer, True, candidates)
    incoming = entering[room : room + count]
    if not len(incoming):
        return
    chosen = world.keys[3][: len(incoming)]
    cache(world, m).victims(cache_state(world, m), incoming, candidates[:count], chosen)
    _check(world, chosen, candidates[:count])
    for n in range(len(incoming)):
        if chosen[n] >= 0:
            _promise(world, m, incoming[n], layer, 0, chosen[n : n + 1])


@compiled
def _demand_unequal(world: Any, m: int, layer: int, incoming: Any) -> None:
    """A pool of unequal experts: name victims, one by one, until each expert fits."""
    leaving = world.keys[4]
    free = _room(world, m, layer)
    # What large victims will leave over, for those that start after them.
    left_over = 0
    total = 0
    for key in incoming:
        total += world.size_bytes[world.size_of[key]]
    if total > max(0, free) and not world.memories[m].in_launch_order:
        cache(world, m).precedence(cache_state(world, m), incoming)
    for n in range(len(incoming)):
        size = world.size_bytes[world.size_of[incoming[n]]]
        before = free + left_over
        count, gained = _name_victims(world, m, incoming[n : n + 1], 0, before)
        if world.run.error:
            return
        if gained < size:
            continue
        # Only what is free now can be promised.
        missing = size - (gained - before)
        room = min(free, max(0, missing))
        _promise(world, m, incoming[n], layer, room, leaving[:count])
        free -= room
        left_over += room - missing


@compiled
def _name_victims(world: Any, m: int, incoming: Any, count: int, free: int) -> Any:
    """Ask for victims of one expert, beside those listed already, until it fits.

    Returns:
        How many there are, and the bytes that are free without them: too few if the
        policy declines, or nobody is left.
    """
    layer = incoming[0] // world.constants.experts
    demanded = world.experts[m, incoming[0]].demanded
    size = world.size_bytes[world.size_of[incoming[0]]]
    candidates = world.keys[2]
    victims = world.keys[4]
    while free < size:
        listed = _candidates(world, m, layer, demanded, candidates)
        kept = 0
        for n in range(listed):
            candidates[kept] = candidates[n]
            kept += not contains(victims[:count], candidates[n])
        if not _can_free(world, m, size - free, candidates[:kept]):
            break
        chosen = world.keys[3][:1]
        cache(world, m).victims(
            cache_state(world, m), incoming, candidates[:kept], chosen
        )
        if chosen[0] < 0:
            break
        _check(world, chosen, candidates[:kept])
        if world.run.error:
            break
        victims[count] = chosen[0]
        count += 1
        free += world.size_bytes[world.size_of[chosen[0]]]
    return count, free


@compiled
def _can_free(world: Any, m: int, missing_bytes: int, candidates: Any) -> bool:
    """Whether a copy would fit if all candidates left.

    Else nobody is named: policies that keep lists take whom they name for gone.
    """
    if world.memories[m].equal_sizes:
        return len(candidates) > 0
    for key in candidates:
        missing_bytes -= world.size_bytes[world.size_of[key]]
    return missing_bytes <= 0


@compiled
def _check(world: Any, victims: Any, candidates: Any) -> None:
    """Note an error unless victims are distinct candidates, or -1."""
    for i in range(len(victims)):
        victim = victims[i]
        if victim < 0:
            continue
        if not contains(candidates, victim):
            world.run.error = BAD_VICTIMS
        for j in range(i):
            if victims[j] == victim:
                world.run.error = BAD_VICTIMS


@compiled
def prefetch(world: Any, work: Work, m: int, key: int) -> None:
    """Wish for an absent expert of a coming layer."""
    enters = True
    if not world.memories[m].admits_all:
        world.keys[1][0] = key
        cache(world, m).admits(
            cache_state(world, m), work, world.keys[1][:1], world.answers[:1]
        )
        enters = world.answers[0]
    wish(world, m, key, enters, False)


# -- starts ----------------------------------------------------------------------------


@compiled
def start(
    world: Any,
    m: int,
    key: int,
    landing_s: float,
    reserve: int,
    may_stage: bool,
) -> int:
    """Take a place for a copy that starts now; `NO_PLACE` changes nothing."""
    wished = world.experts[m, key]
    layer = key // (world.constants.experts)
    world.run.evicted = NONE
    _keep_promises(world, m, key, layer, -1)
    if wished.enters and _make_room(world, m, key, layer):
        wished.wished = False
        _take(world, m, layer, world.size_bytes[world.size_of[key]])
        world.state[m, key] = IN_FLIGHT
        wished.landing_s = landing_s
        world.keys[1][0] = key
        cache(world, m).admitted(cache_state(world, m), world.keys[1][:1])
        return CACHED

    if wished.demanded or (wished.replaces == NONE and may_stage):
        memory = world.memories[m]
        free = memory.staging - memory.staged
        if free > (0 if wished.demanded else reserve):
            wished.wished = False
            _stage(world, m, key, layer, landing_s)
            return STAGED
    _keep_promises(world, m, key, layer, 1)
    return NO_PLACE


@compiled
def _make_room(world: Any, m: int, key: int, layer: int) -> bool:
    """Evict what must leave for a copy; False if it gets no place in the cache."""
    wished = world.experts[m, key]
    size = world.size_bytes[world.size_of[key]]
    victims = world.keys[4]
    if wished.replaces != NONE:
        if may_leave(world, m, wished.replaces):
            if not swap_fits(world, m, key, wished.replaces):
                return False
            victims[0] = wished.replaces
            _evict(world, m, victims[:1])
            return True
        gone = world.state[m, wished.replaces] != RESIDENT
        return gone and _room(world, m, layer) >= size

    room = _room(world, m, layer)
    free = room
    count = 0
    # Whoever was promised leaves, unless somebody needs one of them after all.
    victim = wished.victim if wished.promised else NONE
    while victim != NONE:
        if not may_leave(world, m, victim):
            count = 0
            free = room
            break
        victims[count] = victim
        count += 1
        free += world.size_bytes[world.size_of[victim]]
        victim = world.experts[m, victim].next_victim
    world.keys[1][0] = key
    count, free = _name_victims(world, m, world.keys[1][:1], count, free)
    if free < size or world.run.error:
        return False
    _evict(world, m, victims[:count])
    return True


@compiled
def swap_fits(world: Any, m: int, key: int, outgoing: int) -> bool:
    """Whether an expert fits into the room of a resident and what is free."""
    missing_bytes = (
        world.size_bytes[world.size_of[key]] - world.size_bytes[world.size_of[outgoing]]
    )
    if missing_bytes <= 0:
        return True
    return _room(world, m, key // world.constants.experts) >= missing_bytes


@compiled
def contains(keys: Any, key: int) -> bool:
    """Whether a key is among others."""
    for other in keys:
        if other == key:
            return True
    return False


@compiled
def _evict(world: Any, m: int, victims: Any) -> None:
    experts = world.constants.experts
    # In a list of their own: they may have to be copied back, one by one.
    run = world.run
    for n in range(len(victims) - 1, -1, -1):
        victim = victims[n]
        world.state[m, victim] = ABSENT
        world.experts[m, victim].next_victim = run.evicted
        run.evicted = victim
        layer = victim // experts
        _take(world, m, layer, -world.size_bytes[world.size_of[victim]])
    if len(victims):
        cache(world, m).evicted(cache_state(world, m), victims)


# -- staging ---------------------------------------------------------------------------


@compiled
def staging_will_have_room(world: Any, m: int) -> bool:
    """Whether staging can take a prefetch once demand has done with its slots."""
    guesses = 0
    if world.memories[m].staged:
        for key in range(world.state.shape[1]):
            expert = world.experts[m, key]
            guesses += expert.staged and not expert.used
    return world.memories[m].staging - guesses > RESERVED_SLOTS


@compiled
def idle_prefetch(world: Any, m: int, layer: int, after: int) -> int:
    """The landed staged expert that nobody computes now, of the most distant layer;
    the one that follows `after`, if that is no `NONE`; -1 if there is none.
    """
    experts = world.constants.experts
    layers = world.constants.layers
    farthest = layers - 1
    if after != NONE:
        farthest = (after // experts - layer) % layers
    for distance in range(farthest, -1, -1):
        distant = (layer + distance) % layers
        if not world.pools[m, distant].staged:
            continue
        first = distant * experts
        for key in range(first, first + experts):
            if after != NONE and distance == farthest and key <= after:
                continue
            expert = world.experts[m, key]
            landed = world.state[m, key] == RESIDENT
            if expert.staged and landed and not expert.used:
                return key
    return NONE
