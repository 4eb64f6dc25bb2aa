"""Replays layer steps through a cache alone, without machine or time: which accesses
hit?

Every miss is fetched and offered to the cache, as with on-demand assignment and nothing
in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.arrays import filled, read_only, view_of, zeros
from moesim.policies.base import PolicyError, Work
from moesim.policies.names import ABSENT, NONE, RESIDENT
from moesim.policies.run_context import RunContext
from moesim.policies.sizes import GLOBAL, fitting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.base import CachePolicy
    from moesim.policies.run_context import Future
    from moesim.policies.sizes import CacheSize
    from moesim.traces.format.batch import LayerSteps
    from moesim.traces.format.schema import ModelShape


@dataclass(slots=True)
class CacheCounts:
    """Hits and accesses of a cache alone, both int64 [L] by layer."""

    hits_by_layer: np.ndarray
    accesses_by_layer: np.ndarray

    @property
    def hits(self) -> int:
        """Accesses to resident experts."""
        return int(self.hits_by_layer.sum())

    @property
    def accesses(self) -> int:
        """Distinct active experts, summed over layer steps."""
        return int(self.accesses_by_layer.sum())

    @property
    def hit_rate(self) -> float | None:
        """Hits over accesses; None without accesses."""
        return self.hits / self.accesses if self.accesses else None


def replay(
    cache: CachePolicy,
    name: str,
    shape: ModelShape,
    size: CacheSize,
    blocks: Iterable[LayerSteps],
    *,
    future: Future | None = None,
    seed: int = 0,
    calibration: np.ndarray | None = None,
    extras: Mapping[str, Any] | None = None,
) -> CacheCounts:
    """Replay layer steps through any cache policy, step-atomic: look up all active
    experts, note them, then let misses enter among residents that are not held.

    Args:
        cache: the policy, not started yet.
        name: what messages call it.
        shape: the model.
        size: of the cache.
        blocks: layer steps in replay order, with the gate scores that the policy needs.
        future: of the same layer steps; given to oracles alone.
        seed: for policies that draw.
        calibration: activation counts float64 [L, E]; they fill a cache that has no
            content of its own.
        extras: calibration artefacts by name.

    Raises:
        PolicyError: the policy answered something illegal.
    """
    alone = LoneCache(cache, name, shape, size)
    cache.start(
        RunContext(
            shape=shape,
            gpus=1,
            capacity_slots=size.slots,
            scope=size.scope,
            seed=seed,
            calibration=calibration,
            # No other rule can profit by accident.
            future=future if cache.oracle else None,
            extras=extras or {},
            pool_bytes=size.pool_bytes,
        )
    )
    keys = cache.initial(size.slots)
    if keys is None and calibration is not None:
        keys = fitting(
            -calibration,
            size.slots,
            size.scope,
            pool_bytes=size.pool_bytes,
            shape=shape,
        )
    if keys is not None:
        alone.fill(view_of(keys, np.int64))
    for block in blocks:
        alone.run(block)
    return CacheCounts(np.array(alone.hits), np.array(alone.accesses))


class LoneCache:
    """A memory ruled by a cache policy, in which every copy lands at once. Arrays are
    by flat key, unless their names say otherwise.

    Attributes:
        hits, accesses: int64 [L], counts so far.
        holds: int64, who needs a resident where it is: it is active, or stays until an
            expert enters that it makes room for.
        enters: int8, whether an expert that is missed gets a place.
        room_of: int64, free bytes promised to it.
        victim_of, next_victim: int64, the list of those that leave for it; -1 ends it.
    """

    def __init__(
        self, cache: CachePolicy, name: str, shape: ModelShape, size: CacheSize
    ) -> None:
        self.cache = cache
        self.name = name
        self.admits_all = cache.admits_all
        self.in_launch_order = cache.in_launch_order
        self.experts = shape.experts
        self.is_global = size.scope == GLOBAL
        one_size = not self.is_global or len(set(shape.expert_bytes)) == 1
        self.equal_sizes = one_size and not shape.bytes_by_expert
        self.bytes_of: Ints = view_of(np.ravel(shape.sizes_by_expert()), np.int64)
        self.free_bytes: Ints = np.array(size.pool_bytes, np.int64).data
        self.promised_bytes = 0
        keys = shape.layers * shape.experts
        self.hits: Ints = zeros(shape.layers, np.int64)
        self.accesses: Ints = zeros(shape.layers, np.int64)
        self.resident: Ints = zeros(keys, np.int8)
        self.holds: Ints = zeros(keys, np.int64)
        self.enters: Ints = zeros(keys, np.int8)
        self.room_of: Ints = zeros(keys, np.int64)
        self.victim_of: Ints = filled(keys, NONE, np.int64)
        self.next_victim: Ints = filled(keys, NONE, np.int64)
        self.missing: Ints = zeros(keys, np.int64)
        self.incoming: Ints = zeros(keys, np.int64)
        self.one: Ints = zeros(1, np.int64)
        self.candidates: Ints = zeros(keys, np.int64)
        self.chosen: Ints = zeros(keys, np.int64)
        # Nothing takes time here, so the policy is shown states alone.
        nothing = np.zeros(shape.experts)
        states = np.zeros(shape.experts, np.int8)
        self.states: Ints = states.data
        self.work = Work(1, 0)
        self.work.show(
            state=states,
            cpu_s=nothing,
            host_s=nothing,
            gpu_s=np.zeros((1, shape.experts)),
            arrive_s=np.zeros((1, shape.experts)),
            link_s=np.zeros(1),
            gpu_state=states.reshape(1, -1),
            ranks=np.zeros(shape.experts, np.int32),
        )

    def fill(self, keys: Ints) -> None:
        """Make the initial content resident."""
        for n in range(len(keys)):
            self._enter(keys[n])

    def run(self, block: LayerSteps) -> None:
        """Replay the next layer steps."""
        layer: Ints = view_of(block.layer, np.int64)
        step: Ints = view_of(block.step, np.int64)
        batch: Ints = view_of(block.batch, np.int64)
        phase: Ints = view_of(block.phase, np.int8)
        rows: Ints = view_of(block.rows, np.int64)
        edges: Ints = view_of(block.edges, np.int64)
        experts: Ints = read_only(block.experts, np.int32)
        tokens: Ints = read_only(block.tokens, np.int32)
        scores: Floats = _flat(block.scores)
        token_scores: Floats = _flat(block.columns.get("scores"))
        width = self.experts
        row = 0
        work = self.work
        for i in range(len(layer)):
            work.step = step[i]
            work.layer = layer[i]
            work.phase = phase[i]
            work.batch = batch[i]
            work.rows = rows[i]
            work.active = edges[i + 1] - edges[i]
            work.first = layer[i] * width
            work.experts = experts[edges[i] : edges[i + 1]]
            work.tokens = tokens[edges[i] : edges[i + 1]]
            if len(scores):
                work.scores = scores[i * width : (i + 1) * width]
            if len(token_scores):
                work.first_scores = token_scores[row * width : (row + 1) * width]
            row += rows[i]
            self._serve()

    def _serve(self) -> None:
        """Count the hits of a layer step, and let its misses enter."""
        work = self.work
        layer = work.layer
        count = 0
        # All are held first, or one miss would evict the next hit.
        for i in range(work.active):
            key = work.first + work.experts[i]
            self.holds[key] += 1
            self.states[i] = RESIDENT
            if not self.resident[key]:
                self.states[i] = ABSENT
                self.missing[count] = key
                count += 1
        self.accesses[layer] += work.active
        self.hits[layer] += work.active - count
        self.cache.accessed(work)
        if count:
            self._promise(self._admitted_of(count))
            for n in range(count):
                self._start(self.missing[n])
        for i in range(work.active):
            self.holds[work.first + work.experts[i]] -= 1

    def _admitted_of(self, count: int) -> int:
        """List those of the missing that the policy admits; how many."""
        entering = 0
        for n in range(count):
            key = self.missing[n]
            self.enters[key] = 0
            if self.admits_all or self.cache.admits(self.work, key):
                self.incoming[entering] = key
                entering += 1
        return entering

    def _promise(self, entering: int) -> None:
        """Promise listed experts free room first, then the places of residents, which
        stay until the copies start.
        """
        if not self.equal_sizes:
            self._promise_unequal(entering)
            return
        size = self.bytes_of[self.work.first]
        room = self.free_bytes[self._pool_of(self.work.first)] // size
        if entering > room and not self.in_launch_order:
            self._reorder(entering)
        for n in range(min(room, entering)):
            self._grant(self.incoming[n], size)
        if entering <= room:
            return
        candidates = self._find_candidates()
        entering = min(entering, room + candidates)
        if entering <= room:
            return
        self._ask(self.incoming[room:entering], candidates)
        for n in range(entering - room):
            if self.chosen[n] >= 0:
                key = self.incoming[room + n]
                self.victim_of[key] = self.chosen[n]
                self._grant(key, 0)

    def _promise_unequal(self, entering: int) -> None:
        """A pool of unequal experts: name victims, one by one, until each one fits."""
        free = self.free_bytes[self._pool_of(self.work.first)]
        # What large victims leave over, for those that start after them.
        left_over = 0
        needed = 0
        for n in range(entering):
            needed += self.bytes_of[self.incoming[n]]
        if needed > free and not self.in_launch_order:
            self._reorder(entering)
        for n in range(entering):
            key = self.incoming[n]
            before = free + left_over
            missing = self.bytes_of[key] - (self._find_room(key, before) - before)
            if missing > before:
                self._release_victims(key)
                continue
            # Only what is free now can be promised.
            room = min(free, max(0, missing))
            self._grant(key, room)
            free -= room
            left_over += room - missing

    def _grant(self, key: int, room: int) -> None:
        self.enters[key] = 1
        self.room_of[key] = room
        self.promised_bytes += room

    def _start(self, key: int) -> None:
        """Let a missed expert enter, if it was granted a place; its victims leave."""
        if not self.enters[key]:
            return
        self.promised_bytes -= self.room_of[key]
        free = self.free_bytes[self._pool_of(key)] - self.promised_bytes
        victim = self.victim_of[key]
        while victim != NONE:
            free += self.bytes_of[victim]
            victim = self.next_victim[victim]
        # Those that share what a large victim leaves over may start before it leaves.
        free = self._find_room(key, free)
        if free < self.bytes_of[key]:
            self._release_victims(key)
            return
        victim = self.victim_of[key]
        self._release_victims(key)
        while victim != NONE:
            self.resident[victim] = 0
            self.free_bytes[self._pool_of(victim)] += self.bytes_of[victim]
            self.cache.evicted(victim)
            victim = self.next_victim[victim]
        self._enter(key)

    def _enter(self, key: int) -> None:
        pool = self._pool_of(key)
        if self.free_bytes[pool] < self.bytes_of[key]:
            raise PolicyError(
                f"cache policy {self.name!r}: its initial content is more than fits"
            )
        self.free_bytes[pool] -= self.bytes_of[key]
        self.resident[key] = 1
        self.cache.admitted(key)

    def _find_room(self, key: int, free: int) -> int:
        """Name victims of an expert until it fits in what is free beside them: bytes
        that are free then, too few if nobody is left or the policy declines.
        """
        size = self.bytes_of[key]
        while free < size:
            count = self._find_candidates()
            most = free
            for n in range(count):
                most += self.bytes_of[self.candidates[n]]
            # Nobody is named in vain: policies that keep lists take them for gone.
            if most < size:
                break
            self.one[0] = key
            self._ask(self.one, count)
            victim = self.chosen[0]
            if victim == NONE:
                break
            self._append_victim(key, victim)
            free += self.bytes_of[victim]
        return free

    def _append_victim(self, key: int, victim: int) -> None:
        last = self.victim_of[key]
        if last == NONE:
            self.victim_of[key] = victim
            return
        while self.next_victim[last] != NONE:
            last = self.next_victim[last]
        self.next_victim[last] = victim

    def _release_victims(self, key: int) -> None:
        """Hold the victims of an expert no more, and forget that they are."""
        victim = self.victim_of[key]
        self.victim_of[key] = NONE
        while victim != NONE:
            self.holds[victim] -= 1
            victim = self.next_victim[victim]

    def _find_candidates(self) -> int:
        """List who may leave the pool of this layer step, ascending; how many."""
        first = 0
        end = len(self.resident)
        if not self.is_global:
            first = self.work.first
            end = first + self.experts
        count = 0
        for key in range(first, end):
            if self.resident[key] and not self.holds[key]:
                self.candidates[count] = key
                count += 1
        return count

    def _ask(self, incoming: Ints, count: int) -> None:
        """Let the policy choose a victim among the candidates for each of `incoming`;
        they are held from now on.
        """
        candidates = self.candidates[:count]
        chosen = self.chosen[: len(incoming)]
        for n in range(len(incoming)):
            chosen[n] = NONE
        self.cache.victims(incoming, candidates, chosen)
        for n in range(len(incoming)):
            victim = chosen[n]
            if victim < 0:
                continue
            if not self._may_leave(victim):
                raise PolicyError(
                    f"cache policy {self.name!r}: victims {list(chosen)} are not"
                    f" distinct members of the {count} candidates it was given"
                )
            self.holds[victim] += 1
            self.next_victim[victim] = NONE

    def _may_leave(self, key: int) -> bool:
        if key >= len(self.resident):
            return False
        in_pool = self._pool_of(key) == self._pool_of(self.work.first)
        return in_pool and self.resident[key] != 0 and self.holds[key] == 0

    def _reorder(self, entering: int) -> None:
        """Let the policy sort what enters."""
        incoming = self.incoming[:entering]
        for n in range(entering):
            self.enters[incoming[n]] = 1
        self.cache.precedence(incoming)
        for n in range(entering):
            key = incoming[n]
            if not 0 <= key < len(self.enters) or not self.enters[key]:
                raise PolicyError(
                    f"cache policy {self.name!r}: precedence {list(incoming)} is not"
                    " an order of what it was given"
                )
            self.enters[key] = 0

    def _pool_of(self, key: int) -> int:
        return 0 if self.is_global else key // self.experts


def _flat(column: np.ndarray | None) -> Any:
    return zeros(0) if column is None else read_only(np.ravel(column), np.float64)
