"""One memory: where every expert is, what is wished for, and who leaves.

A copy is *wished for* when it is queued: nothing has changed yet. When it starts it
takes its place, in the cache or in the staging area beside it, and its victim leaves;
then it lands. The only bookkeeper of bytes, slots and holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.names import CACHED, NO_PLACE, RESERVED_SLOTS, STAGED
from moesim.policies.arrays import filled, zeros
from moesim.policies.base import PolicyError
from moesim.policies.names import ABSENT, IN_FLIGHT, NONE, RESIDENT
from moesim.policies.sizes import GLOBAL

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import CachePolicy, Work
    from moesim.policies.sizes import CacheSize
    from moesim.traces.format.schema import ModelShape


class Link:
    """Expected seconds of the link into a memory.

    Attributes:
        copy_s: float64, seconds to bring each expert, by flat key.
    """

    def __init__(self, copy_s: np.ndarray) -> None:
        self.copy_s: Floats = np.ascontiguousarray(copy_s, np.float64).data
        self.busy_until_s = 0.0
        self.queued_s = 0.0
        self.queued = 0

    def enqueue(self, key: int) -> None:
        """Note a queued copy."""
        self.queued += 1
        self.queued_s += self.copy_s[key]

    def withdraw(self, key: int) -> None:
        """Note that a queued copy has left the queue, started or not."""
        self.queued -= 1
        # An empty queue is empty, whatever sums of floating-point numbers say.
        self.queued_s = self.queued_s - self.copy_s[key] if self.queued else 0.0

    def left_s(self, now_s: float) -> float:
        """Seconds until the copy under way has landed."""
        return max(0.0, self.busy_until_s - now_s)


class Placement:
    """Where experts of a memory really lie: told whenever one comes or goes."""

    def take(self, key: int) -> None:
        """Give an expert its slot: its copy starts."""
        raise NotImplementedError

    def release(self, key: int) -> None:
        """Take an expert's slot back: it has left."""
        raise NotImplementedError


class Memory:
    """Books of one memory, and the cache policy that rules it.

    Arrays are by flat key. What an expert's wish says counts while it is `wished`.

    Args:
        shape: the model.
        size: of the cache.
        state: int8 [L * E], zeros, which policies may see too.
        staging: slots beside the cache.
        cache: who rules it; name: as a user has named it.
        link: into this memory.

    Attributes:
        slots: of a real memory; None in a simulation.
        state: int8, ABSENT, IN_FLIGHT or RESIDENT.
        holds: int16, who needs it where it is.
        landing_s: float64, when what is in flight is expected.
        staged: uint8, it is beside the cache.
        used: uint8, the layer step under way computes it from here.
        orphan: uint8, staged and in flight, and needed no more.
        shielded: uint8, a prediction wants it.
        wished, enters, demanded, hurried: uint8, a copy is queued; the cache admits it;
            a layer step waits for it; it is late.
        replaces: int64, whose place a wish takes; -1 for none.
        order: int64, of the wishes.
        staged_of: int64 [L], staging slots in use by layer; staged_total: all.
        free_bytes, promised_bytes: int64, by pool.
    """

    def __init__(
        self,
        shape: ModelShape,
        size: CacheSize,
        state: np.ndarray,
        *,
        staging: int,
        cache: CachePolicy,
        name: str,
        link: Link,
    ) -> None:
        layers = shape.layers
        experts = shape.experts
        keys = layers * experts
        self.layers = layers
        self.experts = experts
        self.cache = cache
        self.name = name
        self.link = link
        self.size = size
        self.slots: Placement | None = None
        self.is_global = size.scope == GLOBAL
        self.staging = staging
        sizes = np.array(shape.sizes_by_expert(), np.int64)
        self.bytes_of: Ints = sizes.reshape(-1).data
        alike = not shape.bytes_by_expert
        # Of a pool.
        one_size = not self.is_global or len(set(shape.expert_bytes)) == 1
        self.equal_sizes = alike and one_size
        self.free_bytes: Ints = np.array(size.pool_bytes, np.int64).data
        self.promised_bytes: Ints = zeros(len(size.pool_bytes), np.int64)
        self.admits_all = cache.admits_all
        self.in_launch_order = cache.in_launch_order
        self.replaces_itself = cache.replaces
        self.hurries = cache.lands_by_next_visit
        self.state: Ints = state.data
        self.holds: Ints = zeros(keys, np.int16)
        self.landing_s: Floats = zeros(keys)
        self.staged: Ints = zeros(keys, np.uint8)
        self.used: Ints = zeros(keys, np.uint8)
        self.orphan: Ints = zeros(keys, np.uint8)
        self.shielded: Ints = zeros(keys, np.uint8)
        self.wished: Ints = zeros(keys, np.uint8)
        self.enters: Ints = zeros(keys, np.uint8)
        self.demanded: Ints = zeros(keys, np.uint8)
        self.hurried: Ints = zeros(keys, np.uint8)
        self.replaces: Ints = filled(keys, NONE, np.int64)
        self.order: Ints = zeros(keys, np.int64)
        self.staged_of: Ints = zeros(layers, np.int64)
        self.staged_total = 0
        self.used_bytes = self.used_high_bytes = 0
        self.evicted = NONE
        # Promises made to a wish: free room, and a list of residents that stay for it.
        self._promised: Ints = zeros(keys, np.uint8)
        self._room_of: Ints = zeros(keys, np.int64)
        self._victim_of: Ints = filled(keys, NONE, np.int64)
        self.next_victim: Ints = filled(keys, NONE, np.int64)
        self._wishes = 0
        self._incoming: Ints = zeros(keys, np.int64)
        self._candidates: Ints = zeros(keys, np.int64)
        self._chosen: Ints = zeros(keys, np.int64)
        self._victims: Ints = zeros(keys, np.int64)

    def fill(self, keys: np.ndarray) -> None:
        """Make absent experts resident before the run starts, without a copy."""
        for key in keys.tolist():
            self._take(key // self.experts, self.bytes_of[key])
            self.state[key] = RESIDENT
        for key in keys.tolist():
            self.cache.admitted(key)

    # -- places -----------------------------------------------------------------------

    def _pool(self, layer: int) -> int:
        """The pool that serves a layer."""
        return 0 if self.is_global else layer

    def _room(self, layer: int) -> int:
        """Free bytes of a layer's pool that are promised to nobody."""
        pool = self._pool(layer)
        return self.free_bytes[pool] - self.promised_bytes[pool]

    def _take(self, layer: int, nbytes: int) -> None:
        self.free_bytes[self._pool(layer)] -= nbytes
        self.used_bytes += nbytes
        self.used_high_bytes = max(self.used_high_bytes, self.used_bytes)

    def may_leave(self, key: int) -> bool:
        """Whether this is an unheld resident."""
        return self.state[key] == RESIDENT and self.holds[key] == 0

    def _find_candidates(self, layer: int, demanded: bool) -> int:
        """Fill in ascending keys of who may leave: for a prefetch, nobody that a
        prediction wants as well. Their number.
        """
        first = 0
        end = len(self.state)
        if not self.is_global:
            first = layer * self.experts
            end = first + self.experts
        count = 0
        for key in range(first, end):
            if self.state[key] == RESIDENT and self.holds[key] == 0:
                if demanded or not self.shielded[key]:
                    self._candidates[count] = key
                    count += 1
        return count

    def drop_staged(self, key: int) -> None:
        """Forget a staged expert that has landed and is needed no more."""
        self.staged[key] = 0
        self.holds[key] -= 1
        self.state[key] = ABSENT
        self.staged_total -= 1
        self.staged_of[key // self.experts] -= 1
        if self.slots is not None:
            self.slots.release(key)

    def forget_staged(self, key: int) -> None:
        """Forget a staged expert, now or when its copy has landed."""
        if self.state[key] == RESIDENT:
            self.drop_staged(key)
        else:
            self.orphan[key] = 1

    def land(self, key: int) -> bool:
        """Complete the copy in flight; whether a staging slot is free again."""
        self.state[key] = RESIDENT
        if not self.orphan[key]:
            return False
        self.orphan[key] = 0
        self.drop_staged(key)
        return True

    def computed(self, key: int) -> bool:
        """Note that a product has ended; whether a staging slot is free again."""
        if not self.staged[key]:
            return False
        self.drop_staged(key)
        return True

    # -- wishes -----------------------------------------------------------------------

    def wish(self, key: int, enters: bool, demanded: bool) -> None:
        """Wish for an absent expert."""
        self.wished[key] = 1
        self.enters[key] = enters
        self.demanded[key] = demanded
        self.hurried[key] = 0
        self._promised[key] = 0
        self.replaces[key] = NONE
        self.order[key] = self._wishes
        self._wishes += 1

    def prefetch(self, work: Work, key: int) -> None:
        """Wish for an absent expert of a coming layer."""
        enters = self.admits_all or self.cache.admits(work, key)
        self.wish(key, enters, False)

    def _promise(self, key: int, layer: int, room: int, victims: Ints) -> None:
        """Promise a wish free room and the places of residents, which stay until then.

        Held, they are promised to nobody else: each is in one list.
        """
        self.enters[key] = 1
        self._promised[key] = 1
        self._room_of[key] = room
        self._victim_of[key] = NONE
        self.promised_bytes[self._pool(layer)] += room
        for n in range(len(victims) - 1, -1, -1):
            victim = victims[n]
            self.next_victim[victim] = self._victim_of[key]
            self._victim_of[key] = victim
            self.holds[victim] += 1

    def _keep_promises(self, key: int, layer: int, sign: int) -> None:
        """End (-1) or renew (1) the promises made to a wish."""
        if not self._promised[key]:
            return
        self.promised_bytes[self._pool(layer)] += sign * self._room_of[key]
        victim = self._victim_of[key]
        while victim != NONE:
            self.holds[victim] += sign
            victim = self.next_victim[victim]

    def cancel(self, key: int) -> None:
        """Forget a wish; what was promised to it is free again."""
        self._keep_promises(key, key // self.experts, -1)
        self.wished[key] = 0

    def demand(self, work: Work, keys: Ints) -> None:
        """Wish for absent experts of one layer that its layer step waits for.

        Free room is promised first, in the policy's order; then it names victims among
        unheld residents. They stay, held, until the copies start: these are all awaited
        within this layer step, so nothing else can be decided about them meanwhile.

        Raises:
            PolicyError: the policy named a victim that is not a candidate, or one
                twice.
        """
        layer = work.layer
        entering = 0
        for n in range(len(keys)):
            self.wish(keys[n], False, True)
        for n in range(len(keys)):
            key = keys[n]
            if self.admits_all or self.cache.admits(work, key):
                self._incoming[entering] = key
                entering += 1
        if not self.equal_sizes:
            self._demand_unequal(layer, entering)
            return
        size = self.bytes_of[layer * self.experts]
        free = self._room(layer)
        room = free // size if free > 0 else 0
        if entering > room and not self.in_launch_order:
            self._reorder(self._incoming[:entering])
        for n in range(min(room, entering)):
            self._promise(self._incoming[n], layer, size, self._victims[:0])
        if entering <= room:
            return

        count = self._find_candidates(layer, True)
        entering = min(entering, room + count)
        if entering == room:
            return
        incoming = self._incoming[room:entering]
        chosen = self._name(incoming, count)
        for n in range(len(incoming)):
            if chosen[n] >= 0:
                self._promise(incoming[n], layer, 0, chosen[n : n + 1])

    def _demand_unequal(self, layer: int, entering: int) -> None:
        """A pool of unequal experts: name victims, one by one, until each one fits."""
        free = self._room(layer)
        # What large victims will leave over, for those that start after them.
        left_over = 0
        total = 0
        for n in range(entering):
            total += self.bytes_of[self._incoming[n]]
        if total > max(0, free) and not self.in_launch_order:
            self._reorder(self._incoming[:entering])
        for n in range(entering):
            key = self._incoming[n]
            size = self.bytes_of[key]
            before = free + left_over
            count = self._name_victims(self._incoming[n : n + 1], 0, before)
            gained = before
            for victim in range(count):
                gained += self.bytes_of[self._victims[victim]]
            if gained < size:
                continue
            # Only what is free now can be promised.
            missing = size - (gained - before)
            room = min(free, max(0, missing))
            self._promise(key, layer, room, self._victims[:count])
            free -= room
            left_over += room - missing

    def _name_victims(self, incoming: Ints, count: int, free: int) -> int:
        """Ask for victims of one expert, beside those listed already, until it fits in
        what is free beside them; their number. Too few if the policy declines, or
        nobody is left.
        """
        key = incoming[0]
        layer = key // self.experts
        size = self.bytes_of[key]
        demanded = self.demanded[key] != 0
        for n in range(count):
            free += self.bytes_of[self._victims[n]]
        while free < size:
            listed = self._find_candidates(layer, demanded)
            if count:
                listed = self._strike_out(listed, count)
            if not self._can_free(size - free, listed):
                break
            chosen = self._name(incoming, listed)
            if chosen[0] < 0:
                break
            self._victims[count] = chosen[0]
            count += 1
            free += self.bytes_of[chosen[0]]
        return count

    def _strike_out(self, listed: int, count: int) -> int:
        """Take those that are victims already off the candidates; how many are left."""
        kept = 0
        for n in range(listed):
            candidate = self._candidates[n]
            if not contains(self._victims[:count], candidate):
                self._candidates[kept] = candidate
                kept += 1
        return kept

    def _can_free(self, missing_bytes: int, listed: int) -> bool:
        """Whether a copy would fit if all candidates left.

        Else nobody is named: policies that keep lists take whom they name for gone.
        """
        if self.equal_sizes:
            return listed > 0
        for n in range(listed):
            missing_bytes -= self.bytes_of[self._candidates[n]]
        return missing_bytes <= 0

    def _name(self, incoming: Ints, listed: int) -> Ints:
        """Let the policy name a victim for each incoming expert.

        Raises:
            PolicyError: they are not distinct candidates.
        """
        candidates = self._candidates[:listed]
        chosen = self._chosen[: len(incoming)]
        for n in range(len(chosen)):
            chosen[n] = NONE
        self.cache.victims(incoming, candidates, chosen)
        for n in range(len(chosen)):
            victim = chosen[n]
            if victim < 0:
                continue
            if not contains(candidates, victim) or contains(chosen[:n], victim):
                raise PolicyError(
                    f"cache policy {self.name!r}: victims {list(chosen)} are not"
                    f" distinct members of the {listed} candidates it was given"
                )
        return chosen

    def _reorder(self, incoming: Ints) -> None:
        """Let the policy sort what enters.

        Raises:
            PolicyError: it lost or doubled one.
        """
        before = sorted(incoming)
        self.cache.precedence(incoming)
        if sorted(incoming) != before:
            raise PolicyError(
                f"cache policy {self.name!r}: precedence: expected the keys"
                f" {before} in another order, got {list(incoming)}"
            )

    # -- starts -----------------------------------------------------------------------

    def start(self, key: int, landing_s: float) -> int:
        """Take a place for a copy that starts now.

        Args:
            key: of the expert, wished for.
            landing_s: when it is expected.

        Returns:
            CACHED, STAGED, or NO_PLACE, which changes nothing. `evicted` is then the
            first of the list of those that have left (`next_victim`), or -1.
        """
        layer = key // self.experts
        self.evicted = NONE
        self._keep_promises(key, layer, -1)
        if self.enters[key] and self._make_room(key, layer):
            self.wished[key] = 0
            self._take(layer, self.bytes_of[key])
            self.state[key] = IN_FLIGHT
            self.landing_s[key] = landing_s
            if self.slots is not None:
                self.slots.take(key)
            self.cache.admitted(key)
            return CACHED
        # A swap belongs into the cache or nowhere, unless a layer step waits for it.
        demanded = self.demanded[key] != 0
        if demanded or self.replaces[key] == NONE:
            free = self.staging - self.staged_total
            if free > (0 if demanded else RESERVED_SLOTS):
                self.wished[key] = 0
                self.state[key] = IN_FLIGHT
                self.staged[key] = 1
                self.landing_s[key] = landing_s
                self.holds[key] += 1
                self.staged_total += 1
                self.staged_of[layer] += 1
                if self.slots is not None:
                    self.slots.take(key)
                return STAGED
        self._keep_promises(key, layer, 1)
        return NO_PLACE

    def _make_room(self, key: int, layer: int) -> bool:
        """Evict what must leave for a copy; False if it gets no place in the cache."""
        outgoing = self.replaces[key]
        if outgoing != NONE:
            return self._make_room_by_swap(key, layer, outgoing)
        count = 0
        # Whoever was promised leaves, unless somebody needs one of them after all.
        victim = self._victim_of[key] if self._promised[key] else NONE
        while victim != NONE:
            if not self.may_leave(victim):
                count = 0
                break
            self._victims[count] = victim
            count += 1
            victim = self.next_victim[victim]
        free = self._room(layer)
        self._incoming[0] = key
        count = self._name_victims(self._incoming[:1], count, free)
        for n in range(count):
            free += self.bytes_of[self._victims[n]]
        if free < self.bytes_of[key]:
            return False
        self._evict(count)
        return True

    def _make_room_by_swap(self, key: int, layer: int, outgoing: int) -> bool:
        """The named resident leaves; if it has left already, its room is enough."""
        if self.may_leave(outgoing):
            if not self.swap_fits(key, outgoing):
                return False
            self._victims[0] = outgoing
            self._evict(1)
            return True
        gone = self.state[outgoing] != RESIDENT
        return gone and self._room(layer) >= self.bytes_of[key]

    def swap_fits(self, key: int, outgoing: int) -> bool:
        """Whether an expert fits into the room of a resident and what is free."""
        missing_bytes = self.bytes_of[key] - self.bytes_of[outgoing]
        if missing_bytes <= 0:
            return True
        return self._room(key // self.experts) >= missing_bytes

    def _evict(self, count: int) -> None:
        """Let the listed victims leave; they may have to be copied back, one by one."""
        for n in range(count - 1, -1, -1):
            victim = self._victims[n]
            self.state[victim] = ABSENT
            self.next_victim[victim] = self.evicted
            self.evicted = victim
            self._take(victim // self.experts, -self.bytes_of[victim])
            if self.slots is not None:
                self.slots.release(victim)
        for n in range(count):
            self.cache.evicted(self._victims[n])

    # -- staging ----------------------------------------------------------------------

    def staging_will_have_room(self) -> bool:
        """Whether staging can take a prefetch once demand has done with its slots.

        What other prefetches have staged stays until their layers are over.
        """
        guesses = 0
        if self.staged_total:
            for key in range(len(self.state)):
                if self.staged[key] and not self.used[key]:
                    guesses += 1
        return self.staging - guesses > RESERVED_SLOTS

    def idle_prefetch(self, layer: int, after: int) -> int:
        """The landed staged expert that nobody computes now, of the most distant layer;
        the one that follows `after`, if that is not -1; -1 if there is none.

        Demand takes its slot if there is no other: a prefetch is only a guess.
        """
        if not self.staged_total:
            return NONE
        farthest = self.layers - 1
        if after != NONE:
            farthest = (after // self.experts - layer) % self.layers
        for distance in range(farthest, -1, -1):
            distant = (layer + distance) % self.layers
            if not self.staged_of[distant]:
                continue
            first = distant * self.experts
            for key in range(first, first + self.experts):
                if after != NONE and distance == farthest and key <= after:
                    continue
                landed = self.state[key] == RESIDENT
                if self.staged[key] and landed and not self.used[key]:
                    return key
        return NONE


def contains(keys: Ints, key: int) -> bool:
    """Whether a key is among others."""
    for n in range(len(keys)):
        if keys[n] == key:
            return True
    return False
