"""One memory and the policy that rules it: admission with victims, staging for what is
declined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from moesim.policies.base import CachePolicy, LayerWork, PolicyError
from moesim.policies.planner.residency import PER_LAYER
from moesim.policies.planner.residency_kernels import distinct_members

if TYPE_CHECKING:
    from moesim.policies.planner.residency import Residency


class Tier:
    """A `Residency` with its cache policy. The planner is its only caller."""

    def __init__(self, memory: Residency, cache: CachePolicy, name: str) -> None:
        self.memory = memory
        self.cache = cache
        self.name = name
        self.replaces = type(cache).replacements is not CachePolicy.replacements
        self.deliberates = type(cache).exposed_s is not CachePolicy.exposed_s
        self._equal_sizes = (
            len(set(memory.expert_bytes)) == 1 or memory.size.scope == PER_LAYER
        )
        self._admits_all = type(cache).admits is CachePolicy.admits
        self._in_launch_order = type(cache).precedence is CachePolicy.precedence

    def fill(self, keys: np.ndarray) -> None:
        """Make the policy's initial content resident."""
        self.memory.fill(keys)
        self.cache.admitted(keys)

    def admit(
        self, work: LayerWork, layer: int, keys: np.ndarray, landing_s: np.ndarray
    ) -> list[bool]:
        """Give each absent key of one layer a place in the cache, or send it to
        staging.

        Free places go first, in the policy's order; then it names victims among unheld
        residents.

        Returns:
            For each key, whether it is staged.

        Raises:
            PolicyError: the policy named a victim that is not a candidate, or one
                twice, or lost one in reordering.
        """
        memory = self.memory
        wanted = keys if self._admits_all else keys[self.cache.admits(work, keys)]
        room = max(0, memory.free_bytes(layer) // memory.expert_bytes[layer])
        placed = wanted
        if len(wanted) > room:
            if not self._in_launch_order:
                wanted = self._preferred(wanted)
            made = self._make_room(
                layer,
                wanted[room:],
                memory.free_bytes(layer) - room * memory.expert_bytes[layer],
            )
            placed = (
                wanted
                if room + len(made) == len(wanted)
                else np.concatenate((wanted[:room], made))
            )
        if len(placed) == len(keys):
            memory.reserve(layer, keys, landing_s)
            self.cache.admitted(keys)
            return [False] * len(keys)
        staged = np.isin(keys, placed, invert=True)
        if len(placed):
            placed = keys[~staged]
            memory.reserve(layer, placed, landing_s[~staged])
            self.cache.admitted(placed)
        memory.stage(keys[staged], landing_s[staged])
        return staged.tolist()

    def _preferred(self, wanted: np.ndarray) -> np.ndarray:
        """`wanted` in the policy's order of precedence."""
        order = self.cache.precedence(wanted)
        if len(order) != len(wanted) or not np.array_equal(
            np.sort(order), np.sort(wanted)
        ):
            raise PolicyError(
                f"cache policy {self.name!r}: precedence {order.tolist()} is not an"
                f" order of {wanted.tolist()}"
            )
        return order

    def cancel(self, key: int) -> None:
        """Take back a copy that has not started."""
        layer, expert = divmod(key, self.memory.experts)
        keys = np.array([key])
        if self.memory.staged[layer, expert]:
            self.memory.drop_staged(keys)
        else:
            self.memory.evict(keys)
            self.cache.evicted(keys)

    def swap(self, outgoing: int, incoming: int, landing_s: float) -> None:
        """Replace a resident by an absent expert whose copy is now in flight."""
        out = np.array([outgoing])
        into = np.array([incoming])
        self.memory.evict(out)
        self.cache.evicted(out)
        self.memory.reserve(
            incoming // self.memory.experts, into, np.array([landing_s])
        )
        self.cache.admitted(into)

    def _make_room(self, layer: int, incoming: np.ndarray, free: int) -> np.ndarray:
        """Evict for as many of `incoming` as the policy finds victims for; returns
        those, in order.

        `free` bytes are left over, too few for one expert.
        """
        if not self._equal_sizes:
            return self._make_room_unequal(layer, incoming, free)
        candidates = self.memory.candidates(layer)
        incoming = incoming[: len(candidates)]
        if not len(incoming):
            return incoming
        victims = self.cache.victims(incoming, candidates)
        if min(victims.tolist()) < 0:
            incoming = incoming[victims >= 0]
            victims = victims[victims >= 0]
        self._evict(victims, candidates)
        return incoming

    def _make_room_unequal(
        self, layer: int, incoming: np.ndarray, free: int
    ) -> np.ndarray:
        """Global pool with unequal experts: evict one by one until each incoming expert
        fits.
        """
        placed = []
        size = self.memory.expert_bytes[layer]
        for i in range(len(incoming)):
            while free < size:
                candidates = self.memory.candidates(layer)
                if not len(candidates):
                    break
                victim = self.cache.victims(incoming[i : i + 1], candidates)
                if victim[0] < 0:
                    break
                self._evict(victim, candidates)
                free += self.memory.expert_bytes[int(victim[0]) // self.memory.experts]
            if free >= size:
                placed.append(i)
                free -= size
        return incoming[placed]

    def _evict(self, victims: np.ndarray, candidates: np.ndarray) -> None:
        if not distinct_members(victims, candidates):
            raise PolicyError(
                f"cache policy {self.name!r}: victims {victims.tolist()} are not"
                f" distinct members of the {len(candidates)} candidates it was given"
            )
        self.memory.evict(victims)
        self.cache.evicted(victims)
