"""A memory level: one memory and the cache policy that rules it.

The life of a copy into it: *wished* for, when nothing changes; *started*,
when it takes its place and, in a full cache, its victim leaves; *landed*. A wish
that is cancelled before it started leaves no trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from moesim.policies.base import CachePolicy, PolicyError
from moesim.policies.names import RESIDENT
from moesim.policies.planner import questions
from moesim.policies.planner.lookups import distinct_members

if TYPE_CHECKING:
    from moesim.policies.planner.records import LayerWork
    from moesim.policies.planner.residency import Residency

NO_VICTIMS: Final[tuple[int, ...]] = ()

_RESERVED_SLOTS: Final = 1
"""Staging slots that prefetches leave to demand: so it always finds one."""


class Place(NamedTuple):
    """The place that a starting copy has taken.

    Attributes:
        staged: in the staging area instead of the cache.
        evicted: flat keys of residents that left for it, now.
    """

    staged: bool
    evicted: tuple[int, ...] = NO_VICTIMS


_ENTERED: Final = Place(staged=False)


class Wish:
    """A copy that has not started.

    Attributes:
        enters: the cache policy admits it; else it goes to staging.
        demanded: a layer step waits for it.
        hurried: a replacement that should have landed by now. It goes before demand on
            the link, so it is given up where it would have to wait for its place.
        room: bytes of free room promised to it.
        leaving: flat keys promised to leave for it, held until then; None where the
            victim is chosen when the copy starts.
        replaces: flat key of the resident whose place it takes (a swap that the cache
            asked for); -1 otherwise.
    """

    __slots__ = ("demanded", "enters", "hurried", "leaving", "replaces", "room")

    # One is made for every copy, and keyword arguments would double its time.
    def __init__(self, demanded: bool = False) -> None:
        self.enters = False
        self.demanded = demanded
        self.hurried = False
        self.replaces = -1
        self.room = 0
        self.leaving: tuple[int, ...] | None = None


def preferred(cache: CachePolicy, name: str, incoming: np.ndarray) -> np.ndarray:
    """`incoming` in the order of precedence of a cache policy of this name.

    Raises:
        PolicyError: the policy lost one in reordering.
    """
    order = questions.precedence(cache, incoming)
    same = np.array_equal(np.sort(order), np.sort(incoming))
    if len(order) != len(incoming) or not same:
        raise PolicyError(
            f"cache policy {name!r}: precedence {order.tolist()} is not an"
            f" order of {incoming.tolist()}"
        )
    return order


class MemoryLevel:
    """A `Residency` with its cache policy. The planner is its only caller.

    Attributes:
        memory: the books.
        cache: the policy.
        name: the policy's name, for messages.
        shielded: bool [L, E], experts that a prediction wants: no prefetch takes their
            places.
    """

    def __init__(
        self, memory: Residency, cache: CachePolicy, name: str, staging: int
    ) -> None:
        self.memory = memory
        self.cache = cache
        self.name = name
        self.shielded = np.zeros(memory.state.shape, np.bool_)
        self._holds = memory.holds_of
        self._state = memory.state_of
        self._used = np.zeros(memory.state.shape, np.bool_)
        self._noted_use: tuple[LayerWork, np.ndarray, int] | None = None
        self._staging = staging
        self._wishes: dict[int, Wish] = {}
        self._promised_bytes = [0] * len(memory.size.pool_bytes)
        self._equal_sizes = memory.equal_sizes
        self._bytes_of = np.array(memory.bytes_of, np.int64)
        # A slice of it stands for one key, in a third of the time of a new array.
        self._keys = np.arange(memory.state.size)
        self._admits_all = cache.admits_all
        self._in_launch_order = cache.in_launch_order

    def fill(self, keys: np.ndarray) -> None:
        """Make the policy's initial content resident."""
        self.memory.fill(keys)
        for key in keys.tolist():
            self.cache.admitted(key)

    # -- use --------------------------------------------------------------------------

    def accessed(self, work: LayerWork) -> None:
        """Tell the policy of a layer step."""
        self.cache.accessed(questions.shown(work, self.memory.experts))

    def _admits(self, work: LayerWork, keys: np.ndarray) -> np.ndarray:
        return questions.admits(self.cache, work, keys, self.memory.experts)

    def begin_use(self, work: LayerWork, lanes: np.ndarray, code: int) -> None:
        """Note what a layer step computes from this memory.

        Args:
            work: the layer step.
            lanes: int8 [A], lane code of each active expert.
            code: of the lane that computes from here.
        """
        # Most layer steps stage nothing, and nobody looks: written down when asked for.
        self._noted_use = (work, lanes, code)

    def end_use(self, layer: int) -> None:
        """Note that a layer step is over."""
        if self._noted_use is None:
            self._used[layer] = False
        self._noted_use = None

    @property
    def used(self) -> np.ndarray:
        """Bool [L, E], experts that the layer step under way computes from this
        memory: if they are staged, nobody takes their slots.
        """
        if self._noted_use is not None:
            work, lanes, code = self._noted_use
            self._used[work.layer, work.experts[lanes == code]] = True
            self._noted_use = None
        return self._used

    # -- wishes -----------------------------------------------------------------------

    def is_wished(self, key: int) -> bool:
        """Whether a copy of this expert is queued."""
        return key in self._wishes

    def wished_among(self, keys: list[int]) -> list[int]:
        """Flat keys of those experts of which a copy is queued."""
        wishes = self._wishes
        if not wishes:
            return []
        return [key for key in keys if key in wishes]

    def is_demanded(self, key: int) -> bool:
        """Whether a layer step waits for the queued copy of this expert."""
        return self._wishes[key].demanded

    def is_replacement(self, key: int) -> bool:
        """Whether the queued copy of this expert is one that the cache asked for."""
        return self._wishes[key].replaces >= 0

    def is_hopeless(self, key: int) -> bool:
        """Whether a queued replacement that found no place is given up.

        So it is if the resident that it should follow has left or is too small, or if
        demand would have to wait behind it.
        """
        wish = self._wishes[key]
        left = self._state[wish.replaces] != RESIDENT
        return left or wish.hurried or not self._swap_fits(key, wish.replaces)

    def hurry(self, key: int) -> bool:
        """Note that a queued copy is late, if it is a replacement whose place is free.

        Returns:
            Whether that is news.
        """
        wish = self._wishes[key]
        if wish.replaces < 0 or wish.hurried or not self._may_leave(wish.replaces):
            return False
        wish.hurried = True
        return True

    def demand(self, work: LayerWork, layer: int, keys: np.ndarray) -> None:
        """Wish for absent experts of one layer that a layer step waits for.

        Free room is promised first, in the policy's order; then it names victims among
        unheld residents. They stay, held, until the copies start: these are all awaited
        within this layer step, so nothing else can be decided about them meanwhile.

        Raises:
            PolicyError: the policy named a victim that is not a candidate, or one
                twice, or lost one in reordering.
        """
        wishes = self._wishes
        for key in keys.tolist():
            wishes[key] = Wish(True)
        entering = keys if self._admits_all else keys[self._admits(work, keys)]
        if not self._equal_sizes:
            self._demand_unequal(layer, entering)
            return
        memory = self.memory
        size = memory.bytes_of[layer * memory.experts]
        room = max(0, self._room(layer) // size)
        lacking = len(entering) - room
        if lacking > 0 and not self._in_launch_order:
            entering = preferred(self.cache, self.name, entering)
        if room:
            pool = memory.pool(layer)
            for key in entering[:room].tolist():
                self._promise(key, pool, size, NO_VICTIMS)
        if lacking <= 0:
            return

        candidates = memory.candidates(layer)
        incoming = entering[room : room + len(candidates)]
        if not len(incoming):
            return
        victims = questions.victims(self.cache, incoming, candidates)
        leaving = victims.tolist()
        if min(leaving) < 0:
            chosen = victims >= 0
            incoming = incoming[chosen]
            victims = victims[chosen]
            leaving = victims.tolist()
        self._check(victims, candidates)
        holds = self._holds
        for key, victim in zip(incoming.tolist(), leaving, strict=True):
            wish = wishes[key]
            wish.enters = True
            wish.leaving = (victim,)
            holds[victim] += 1

    def _demand_unequal(self, layer: int, incoming: np.ndarray) -> None:
        """A pool of unequal experts: name victims until each one fits."""
        bytes_of = self.memory.bytes_of
        pool = self.memory.pool(layer)
        free = self._room(layer)
        # What large victims will leave over, for those that start after them.
        left_over = 0
        lacks_room = int(self._bytes_of[incoming].sum()) > max(0, free)
        if lacks_room and not self._in_launch_order:
            incoming = preferred(self.cache, self.name, incoming)
        for position, key in enumerate(incoming.tolist()):
            leaving: list[int] = []
            missing = bytes_of[key]
            while missing > free + left_over:
                candidates = self.memory.candidates(layer)
                candidates = candidates[~np.isin(candidates, leaving)]
                if not self._can_free(missing - free - left_over, candidates):
                    break
                victim = questions.victims(
                    self.cache, incoming[position : position + 1], candidates
                )
                if victim[0] < 0:
                    break
                self._check(victim, candidates)
                leaving.append(int(victim[0]))
                missing -= bytes_of[leaving[-1]]
            if missing > free + left_over:
                continue
            # Only what is free now can be promised.
            room = min(free, max(0, missing))
            self._promise(key, pool, room, leaving)
            free -= room
            left_over += room - missing

    def prefetch(self, work: LayerWork, key: int) -> None:
        """Wish for an absent expert of a coming layer."""
        wish = Wish()
        asked = questions.shown(work, self.memory.experts)
        wish.enters = self._admits_all or self.cache.admits(asked, key)
        self._wishes[key] = wish

    def replace(self, outgoing: int, incoming: int) -> None:
        """Wish for an absent expert in the place of a resident one."""
        wish = Wish()
        wish.enters = True
        wish.replaces = outgoing
        self._wishes[incoming] = wish

    def wished_of(self, layer: int) -> list[int]:
        """Flat keys of queued copies of one layer, in queue order."""
        first = layer * self.memory.experts
        end = first + self.memory.experts
        return [key for key in self._wishes if first <= key < end]

    def promote(self, key: int) -> None:
        """Note that a layer step waits for a copy that was wished for otherwise."""
        self._wishes[key].demanded = True

    def cancel(self, key: int) -> None:
        """Forget a wish; what was promised to it is free again."""
        wish = self._wishes.pop(key)
        if wish.leaving is not None:
            self._keep_promises(key // self.memory.experts, wish)

    def _promise(
        self, key: int, pool: int, room: int, leaving: tuple[int, ...] | list[int]
    ) -> None:
        wish = self._wishes[key]
        wish.enters = True
        wish.room = room
        wish.leaving = tuple(leaving)
        self._promised_bytes[pool] += room
        holds = self._holds
        for victim in leaving:
            holds[victim] += 1

    def _keep_promises(self, layer: int, wish: Wish) -> None:
        """End the promises made to a wish that starts or is cancelled."""
        assert wish.leaving is not None
        if wish.room:
            self._promised_bytes[self.memory.pool(layer)] -= wish.room
        holds = self._holds
        for victim in wish.leaving:
            holds[victim] -= 1

    # -- starts -----------------------------------------------------------------------

    def start(self, key: int, landing_s: float, may_stage: bool = True) -> Place | None:
        """Take a place for a copy that starts now.

        Args:
            key: flat key of the expert, wished for.
            landing_s: when it is expected.
            may_stage: whether a prefetch may go to staging.

        Returns:
            The place, or None if there is none now; then nothing has changed.
        """
        wish = self._wishes[key]
        memory = self.memory
        layer, expert = divmod(key, memory.experts)
        if wish.leaving is not None:
            self._keep_promises(layer, wish)
        victims = self._make_room(key, layer, wish) if wish.enters else None
        if victims is not None:
            del self._wishes[key]
            memory.enter(layer, expert, landing_s)
            self.cache.admitted(key)
            return Place(False, victims) if victims else _ENTERED

        # A swap belongs into the cache or nowhere, unless a layer step waits for it.
        stages = wish.demanded or (wish.replaces < 0 and may_stage)
        if stages and self._can_stage(wish):
            del self._wishes[key]
            memory.stage(layer, expert, landing_s)
            return Place(staged=True)
        self._renew_promises(key, wish)
        return None

    def _renew_promises(self, key: int, wish: Wish) -> None:
        """Promise again what `start` could not use."""
        if wish.leaving is None:
            return
        pool = self.memory.pool(key // self.memory.experts)
        self._promised_bytes[pool] += wish.room
        holds = self._holds
        for victim in wish.leaving:
            holds[victim] += 1

    def _make_room(self, key: int, layer: int, wish: Wish) -> tuple[int, ...] | None:
        """Evict what must leave for a copy; None if it gets no place in the cache."""
        if wish.replaces >= 0:
            return self._make_room_by_swap(key, wish.replaces)
        # Whoever was promised leaves, unless somebody needs one of them after all.
        promised = wish.leaving or NO_VICTIMS
        for outgoing in promised:
            if not self._may_leave(outgoing):
                promised = NO_VICTIMS
                break
        if promised and self._equal_sizes:
            return self._evict(promised)
        victims = list(promised)
        bytes_of = self.memory.bytes_of
        size = bytes_of[key]
        free = self._room(layer) + sum(bytes_of[outgoing] for outgoing in promised)
        # That may be too little: where experts differ in size, copies share what a
        # large victim leaves over, and one of them may start before it has left.
        while free < size:
            incoming = self._keys[key : key + 1]
            candidates = self._candidates(layer, wish)
            if victims:
                candidates = candidates[~np.isin(candidates, victims)]
            if not self._can_free(size - free, candidates):
                return None
            victim = questions.victims(self.cache, incoming, candidates)
            if victim[0] < 0:
                return None
            self._check(victim, candidates)
            victims.append(int(victim[0]))
            free += bytes_of[victims[-1]]
        return self._evict(victims)

    def _can_free(self, missing_bytes: int, candidates: np.ndarray) -> bool:
        """Whether a copy would fit if all candidates left.

        Else nobody is named: policies that keep lists take whom they name for gone.
        """
        if self._equal_sizes:
            return len(candidates) > 0
        return int(self._bytes_of[candidates].sum()) >= missing_bytes

    def _make_room_by_swap(self, key: int, outgoing: int) -> tuple[int, ...] | None:
        """The named resident leaves; if it has left already, its room is enough."""
        if self._may_leave(outgoing):
            return self._evict([outgoing]) if self._swap_fits(key, outgoing) else None
        gone = self._state[outgoing] != RESIDENT
        free = self._room(key // self.memory.experts)
        if gone and free >= self.memory.bytes_of[key]:
            return NO_VICTIMS
        return None

    def _swap_fits(self, key: int, outgoing: int) -> bool:
        """Whether an expert fits into the room of a resident and what is free."""
        bytes_of = self.memory.bytes_of
        missing_bytes = bytes_of[key] - bytes_of[outgoing]
        if missing_bytes <= 0:
            return True
        return self._room(key // self.memory.experts) >= missing_bytes

    def _room(self, layer: int) -> int:
        """Free bytes of a layer's pool that are promised to nobody."""
        memory = self.memory
        return memory.free_bytes(layer) - self._promised_bytes[memory.pool(layer)]

    def _may_leave(self, key: int) -> bool:
        return self._state[key] == RESIDENT and not self._holds[key]

    def _candidates(self, layer: int, wish: Wish) -> np.ndarray:
        """Who may leave: for a prefetch, nobody that a prediction wants as well."""
        candidates = self.memory.candidates(layer)
        if wish.demanded:
            return candidates
        return candidates[~self.shielded.reshape(-1)[candidates]]

    def _evict(self, victims: list[int] | tuple[int, ...]) -> tuple[int, ...]:
        for victim in victims:
            self.memory.evict(victim)
        for victim in victims:
            self.cache.evicted(victim)
        return tuple(victims)

    def _check(self, victims: np.ndarray, candidates: np.ndarray) -> None:
        if not distinct_members(victims, candidates):
            raise PolicyError(
                f"cache policy {self.name!r}: victims {victims.tolist()} are not"
                f" distinct members of the {len(candidates)} candidates it was given"
            )

    # -- staging ----------------------------------------------------------------------

    def _can_stage(self, wish: Wish) -> bool:
        """Whether a staging slot is free for this wish."""
        free = self._staging - self.memory.staged_total
        if wish.demanded:
            return free > 0
        return free > _RESERVED_SLOTS

    def staging_will_have_room(self) -> bool:
        """Whether staging can take a prefetch once demand has done with its slots.

        What other prefetches have staged stays until their layers are over.
        """
        memory = self.memory
        guesses = np.count_nonzero(memory.staged & ~self.used)
        return bool(self._staging - guesses > _RESERVED_SLOTS)

    def staged_prefetches(self, layer: int) -> list[int]:
        """Landed staged experts that nobody computes now, most distant layer first.

        Demand takes their slots if there is no other: a prefetch is only a guess.

        Args:
            layer: the layer under way; distance counts forward from it.
        """
        memory = self.memory
        idle = memory.staged & (memory.state == RESIDENT) & ~self.used
        keys = np.flatnonzero(idle)
        distance = (keys // memory.experts - layer) % memory.layers
        return keys[np.argsort(-distance, kind="stable")].tolist()
