"""Where every expert is: the only bookkeeper of bytes, slots, holds and copies in
flight.

One `Residency` stands for one memory (a GPU's expert cache, or host memory in front of
the SSD). Think of a cloakroom: numbered hooks (slots), coats on their way (in flight),
coats somebody is wearing (held) and a small bench beside it (staging) for coats that
get no hook.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from moesim.policies.base import ABSENT, IN_FLIGHT, RESIDENT, PolicyError
from moesim.policies.planner.residency_kernels import count_holds, depart, leave, unheld

PER_LAYER = "layer"
GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How large an expert cache is, for one memory.

    Attributes:
        scope: ``layer`` (every layer has slots of its own) or ``global`` (one pool of
            bytes).
        slots: int64 [L] slots of each layer; for the global scope, one entry: how many
            of the largest experts fit.
        pool_bytes: int64 [L] or [1]: bytes of each pool.
    """

    scope: str
    slots: np.ndarray
    pool_bytes: np.ndarray

    @classmethod
    def of(
        cls,
        expert_bytes: tuple[int, ...],
        experts: int,
        *,
        scope: str = PER_LAYER,
        ratio: float | None = None,
        slots_per_layer: int | None = None,
        total_bytes: int | None = None,
    ) -> CacheSize:
        """Size a cache by exactly one of a ratio of all experts, slots per layer, or
        bytes.

        Bytes with the per-layer scope follow FlashMoE eq. 1: the same number of slots
        in every layer, ``floor(total_bytes / bytes of one expert index across all
        layers)``.

        Raises:
            PolicyError: none or several of the three are given, or one is out of range.
        """
        if (
            sum(value is not None for value in (ratio, slots_per_layer, total_bytes))
            != 1
        ):
            raise PolicyError(
                "cache size: give exactly one of a ratio, slots per layer, or bytes"
            )
        if scope not in (PER_LAYER, GLOBAL):
            raise PolicyError(
                f"cache scope: expected 'layer' or 'global', got {scope!r}"
            )
        sizes = np.asarray(expert_bytes, dtype=np.int64)
        if ratio is not None:
            if not 0 <= ratio <= 1:
                raise PolicyError(f"cache ratio: expected 0 <= ratio <= 1, got {ratio}")
            slots = round(ratio * experts)
            pool = round(ratio * experts * float(sizes.sum()))
        elif slots_per_layer is not None:
            if not 0 <= slots_per_layer <= experts:
                raise PolicyError(
                    f"slots per layer: expected 0 <= slots <= {experts}, got"
                    f" {slots_per_layer}"
                )
            slots = slots_per_layer
            pool = slots_per_layer * int(sizes.sum())
        else:
            assert total_bytes is not None
            pool = max(0, total_bytes)
            slots = min(experts, pool // int(sizes.sum()))
        if scope == GLOBAL:
            return cls(
                scope,
                np.array([pool // int(sizes.max())], np.int64),
                np.array([pool], np.int64),
            )
        return cls(scope, np.full(len(sizes), slots, np.int64), slots * sizes)

    def split(self, gpus: int) -> CacheSize:
        """One GPU's share of a global pool whose layers are divided among `gpus`."""
        return CacheSize(self.scope, self.slots // gpus, self.pool_bytes // gpus)

    @property
    def total_bytes(self) -> int:
        """Bytes the cache may occupy."""
        return int(self.pool_bytes.sum())


class Residency:
    """State of every expert in one memory.

    `state` int8 [L, E] is ABSENT, IN_FLIGHT or RESIDENT; `holds` int16 [L, E] counts
    the reasons why an expert must not be evicted (active in the current layer step, or
    staged); `landing_s` float64 [L, E] is when a copy in flight is expected; `staged`
    bool [L, E] marks experts outside the cache.
    """

    def __init__(
        self, layers: int, experts: int, expert_bytes: tuple[int, ...], size: CacheSize
    ) -> None:
        self.layers = layers
        self.experts = experts
        self.expert_bytes = expert_bytes
        self.size = size
        self.state = np.full((layers, experts), ABSENT, np.int8)
        self.holds = np.zeros((layers, experts), np.int16)
        self.landing_s = np.zeros((layers, experts), np.float64)
        self.staged = np.zeros((layers, experts), np.bool_)
        self.staged_count = [0] * layers
        self._free_bytes: list[int] = size.pool_bytes.tolist()
        self._global = size.scope == GLOBAL
        self.used_high_bytes = 0
        self._used_bytes = 0

    def free_bytes(self, layer: int) -> int:
        """Free bytes of the pool that serves this layer."""
        return self._free_bytes[0 if self._global else layer]

    def candidates(self, layer: int) -> np.ndarray:
        """Flat keys, ascending, of residents of this layer's pool that nobody holds."""
        if self._global:
            return unheld(self.state, self.holds, 0, self.layers)
        return unheld(self.state, self.holds, layer, layer + 1)

    def reserve(self, layer: int, keys: np.ndarray, landing_s: np.ndarray) -> None:
        """Give absent experts of one layer their places in the cache; their copies are
        now in flight.
        """
        self._take(layer, len(keys))
        depart(self.state, self.landing_s, keys, landing_s)

    def fill(self, keys: np.ndarray) -> None:
        """Make absent experts resident before the run starts, without a copy."""
        for key in keys.tolist():
            self._take(key // self.experts, 1)
        self.state.reshape(-1)[keys] = RESIDENT

    def stage(self, keys: np.ndarray, landing_s: np.ndarray) -> None:
        """Send absent experts to the staging area; each is held until `drop_staged`."""
        self.state.reshape(-1)[keys] = IN_FLIGHT
        self.staged.reshape(-1)[keys] = True
        self.holds.reshape(-1)[keys] += 1
        self.landing_s.reshape(-1)[keys] = landing_s
        for key in keys.tolist():
            self.staged_count[key // self.experts] += 1

    def land(self, layer: int, expert: int) -> None:
        """Complete the copy in flight."""
        assert self.state[layer, expert] == IN_FLIGHT, "landed without a copy in flight"
        self.state[layer, expert] = RESIDENT

    def evict(self, keys: np.ndarray) -> None:
        """Free the places of residents, or of cancelled copies; of one layer unless the
        scope is global.
        """
        assert leave(self.state, self.holds, keys), (
            "a held or absent expert was evicted"
        )
        if self._global:
            for key in keys.tolist():
                self._take(key // self.experts, -1)
        elif len(keys):
            self._take(int(keys[0]) // self.experts, -len(keys))

    def drop_staged(self, keys: np.ndarray) -> None:
        """Forget staged experts whose layer step is over or whose copy was
        cancelled.
        """
        self.staged.reshape(-1)[keys] = False
        self.holds.reshape(-1)[keys] -= 1
        self.state.reshape(-1)[keys] = ABSENT
        for key in keys.tolist():
            self.staged_count[key // self.experts] -= 1

    def staged_of(self, layer: int) -> np.ndarray:
        """Flat keys of this layer's experts outside the cache."""
        return np.flatnonzero(self.staged[layer]) + layer * self.experts

    def _take(self, layer: int, count: int) -> None:
        pool = 0 if self._global else layer
        taken = count * self.expert_bytes[layer]
        self._free_bytes[pool] -= taken
        assert self._free_bytes[pool] >= 0, "the planner reserved more than fits"
        self._used_bytes += taken
        self.used_high_bytes = max(self.used_high_bytes, self._used_bytes)

    def hold(self, layer: int, experts: np.ndarray) -> None:
        """Protect the active experts of a layer step."""
        count_holds(self.holds, layer, experts, 1)

    def release(self, layer: int, experts: np.ndarray) -> None:
        """End the protection of `hold`."""
        count_holds(self.holds, layer, experts, -1)
