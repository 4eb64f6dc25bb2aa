"""The machine of a run as it stands: its memories and links, and every copy on its way.

Policies see it through `MachineView`. The engine reports to it what has started, landed
or was given up. It asks a policy only for the victim of a copy that starts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.hwprofiles.costs import seconds_by_expert
from moesim.policies.base import MachineView, PolicyError
from moesim.policies.names import IN_FLIGHT, RESIDENT
from moesim.policies.planner.host_memory import HostMemory
from moesim.policies.planner.memory_level import MemoryLevel
from moesim.policies.planner.plan import LAYERS, Copies, MemoryPlan, Policies
from moesim.policies.planner.residency import Residency

if TYPE_CHECKING:
    from moesim.hwprofiles.costs import Costs
    from moesim.policies.planner.memory_level import Place
    from moesim.policies.planner.records import LayerWork
    from moesim.policies.planner.residency import CacheSize
    from moesim.policies.run_context import Future
    from moesim.traces.format.schema import ModelShape


class MachineState:
    """Where every expert is, and what is expected of each link; a `MachineView`.

    Attributes:
        shape: the model.
        costs: what operations take on this machine.
        unequal: whether experts of one layer differ in size.
        policies: who decides.
        sizes: how large the memories are.
        gpu: cache and books of each GPU.
        host: books of host memory where it is limited, else None.
        links: what is expected of each GPU's link.
        orphans: flat keys of staged experts in flight that their layer step needs no
            more, by GPU.
        serving: GPUs that compute each layer's experts, its home first.
        no_wait_s: float64 [E], zeros: how long experts take to be in a host memory that
            holds them all.
        splits_layers: whether each layer is computed by one GPU.
        now_s: when the engine last reported a layer step.
        gap_s: see `MachineView`.
    """

    def __init__(
        self,
        shape: ModelShape,
        costs: Costs,
        policies: Policies,
        memory: MemoryPlan,
    ) -> None:
        if memory.staging < 1:
            raise PolicyError(
                "staging: no room to stage even one expert; give at least one slot"
                " beside the cache"
            )
        self.shape = shape
        self.costs = costs
        self.policies = policies
        self.sizes = memory
        self.layers = shape.layers
        self.experts = shape.experts
        self.unequal = bool(shape.bytes_by_expert)
        self.gpus = len(policies.caches)
        self.cpu_first_s = costs.cpu_first_s
        self.now_s = 0.0
        self.gap_s = 0.0
        self.assignment_name = policies.names.get("assignment", "")
        self.splits_layers = memory.gpu_split == LAYERS or self.gpus == 1
        self.serving = self._serving_gpus()

        # GPUs, then limited host memory; policies see the GPUs'.
        levels = self.gpus + (memory.host is not None)
        self.states = np.zeros((levels, self.layers * self.experts), np.int8)
        self.view = MachineView(self.gpus, self.layers, self.experts)
        self.view.states = self.states[: self.gpus].data
        self.view.first_cpu_s = costs.cpu_first_s
        self.view.copy_s = np.array(
            [costs.copy_s(layer) for layer in range(self.layers)], np.float64
        ).data
        self.tokens_shown = 0
        self.future: Future | None = None
        self._routing_seen: tuple[LayerWork, ...] = ()

        name = policies.names.get("cache", "cache")
        self.gpu = [
            self._level(memory.gpu, cache, name, self.states[gpu])
            for gpu, cache in enumerate(policies.caches)
        ]
        self.host: HostMemory | None = None
        if memory.host is not None:
            assert policies.host_cache is not None, (
                "limited host memory needs a host cache policy"
            )
            level = self._level(
                memory.host, policies.host_cache, name, self.states[self.gpus]
            )
            self.host = HostMemory(level, seconds_by_expert(shape, costs.read_s))
        self.links = [
            GpuLink(seconds_by_expert(shape, partial(costs.copy_s, gpu=gpu)))
            for gpu in range(self.gpus)
        ]
        self.orphans: list[set[int]] = [set() for _ in self.gpu]
        self._may_stage = policies.prefetch.no_place != "drop"

        # Made once, used in every layer step.
        self.no_wait_s = np.zeros(self.experts)
        self.no_wait_s.flags.writeable = False

    def _level(
        self, size: CacheSize, cache: Any, name: str, states: np.ndarray
    ) -> MemoryLevel:
        memory = Residency.for_model(self.shape, size, states)
        return MemoryLevel(memory, cache, name, self.sizes.staging)

    def _serving_gpus(self) -> list[tuple[int, ...]]:
        """GPUs that compute each layer's experts, its home first."""
        if self.splits_layers:
            return [(layer * self.gpus // self.layers,) for layer in range(self.layers)]
        return [tuple(range(self.gpus))] * self.layers

    def remember_routing(self, work: LayerWork) -> list[np.ndarray]:
        """Experts of every token, in this layer and the two before in its pass."""
        last = self._routing_seen
        follows = last and last[0].step == work.step
        if not follows or last[0].layer + 1 != work.layer:
            last = ()
        known = (work, *last)
        self._routing_seen = known[:2]
        routing = [np.array(each.routing, np.uint16) for each in known]
        nobody = np.empty((0, 0), np.uint16)
        return (routing + [nobody] * 2)[:3]

    # -- the machine's terms ----------------------------------------------------------

    def home(self, layer: int) -> int:
        """GPU that runs this layer's dense part.

        With split layers it also computes all the layer's GPU experts.
        """
        return self.serving[layer][0]

    def resident(self, layer: int, gpu: int = 0) -> np.ndarray:
        """Bool [E]: usable on that GPU now."""
        return self.gpu[gpu].memory.state[layer] == RESIDENT

    def in_flight(self, layer: int, gpu: int = 0) -> np.ndarray:
        """Bool [E]: being copied to that GPU."""
        return self.gpu[gpu].memory.state[layer] == IN_FLIGHT

    def capacity(self, layer: int, gpu: int = 0) -> int:
        """Cache slots of this layer, or of the whole GPU with the global scope."""
        slots = self.gpu[gpu].memory.size.slots
        return int(slots[layer] if len(slots) > 1 else slots[0])

    def copy_s(self, layer: int, expert: int | None = None) -> float:
        """Seconds to copy an expert of this layer from host memory to a GPU; one of
        mean size, if none is named.
        """
        if expert is None and self.unequal:
            return self.costs.copy_s(layer)
        return float(self.links[0].copy_s[layer, expert or 0])

    def link_wait_s(self, gpu: int = 0) -> float:
        """Seconds until the link has served what is queued on it, as expected."""
        return self.links[gpu].wait_s(self.now_s)

    def cpu_s(
        self, layer: int, tokens: np.ndarray, experts: np.ndarray | None = None
    ) -> np.ndarray:
        """Seconds that experts take on the CPU; of mean size, if none are named."""
        return self.costs.cpu_s(layer, tokens, experts=experts)

    def gpu_s(
        self, layer: int, tokens: np.ndarray, experts: np.ndarray | None = None
    ) -> np.ndarray:
        """The same of resident experts on a GPU."""
        return self.costs.gpu_s(layer, tokens, experts=experts)

    # -- what the engine reports ------------------------------------------------------

    def start_copy(
        self, gpu: int, layer: int, expert: int, now_s: float
    ) -> Place | None:
        """Take a place for a queued copy to a GPU that starts now.

        Returns:
            The place, or None if there is none now.
        """
        level = self.gpu[gpu]
        link = self.links[gpu]
        key = layer * self.experts + expert
        landing_s = now_s + link.copy_of_s[key]
        place = level.start(key, landing_s, self._may_stage)
        if place is None and level.is_demanded(key):
            # A prefetch that waits in staging is a guess; demand is not.
            idle = level.staged_prefetches(layer)
            if idle:
                level.memory.drop_staged(*divmod(idle[0], self.experts))
                place = level.start(key, landing_s)
        if place is not None:
            link.start(key, landing_s)
        return place

    def gives_up(self, gpu: int, layer: int, expert: int) -> bool:
        """Whether a queued copy that finds no place is dropped; else it waits."""
        level = self.gpu[gpu]
        key = layer * self.experts + expert
        if level.is_demanded(key):
            return False
        if level.is_replacement(key):
            return level.is_hopeless(key)
        no_place = self.policies.prefetch.no_place
        if no_place == "stage":
            return not level.staging_will_have_room()
        return no_place == "drop"

    def cancel_copy(self, gpu: int, layer: int, expert: int) -> None:
        """Forget a queued copy to a GPU."""
        key = layer * self.experts + expert
        self.gpu[gpu].cancel(key)
        self.links[gpu].withdraw(key)
        if self.host is not None:
            self.host.unneed(layer, expert)

    def landed(self, gpu: int, layer: int, expert: int) -> bool:
        """Note that an expert's copy to a GPU is complete.

        Returns:
            Whether a staging slot is free again.
        """
        memory = self.gpu[gpu].memory
        memory.land(layer, expert)
        key = layer * self.experts + expert
        freed = False
        if key in self.orphans[gpu]:
            self.orphans[gpu].remove(key)
            memory.drop_staged(layer, expert)
            freed = True
        if self.host is not None:
            freed |= self.host.unneed(layer, expert)
        return freed

    def start_read(self, layer: int, expert: int, now_s: float) -> Place | None:
        """Take a place in host memory for a read that starts now; None if there is
        none.
        """
        assert self.host is not None
        return self.host.start_read(layer * self.experts + expert, now_s)

    def yielding_copies(self, layer: int, expert: int) -> list[tuple[int, int, int]]:
        """Queued copies that should be cancelled so that a read finds a staging slot.

        A read that a layer step waits for goes before guesses: before prefetches and
        replacements whose experts lie in host memory's staging area until the link
        takes them.

        Returns:
            (GPU, layer, expert) of all copies of one expert; empty if the read is a
            guess itself, or no slot can be freed like this.
        """
        assert self.host is not None
        level = self.host.level
        if not level.is_demanded(layer * self.experts + expert):
            return []
        holds = level.memory.holds_of
        for key in level.staged_prefetches(layer):
            gpus = [gpu for gpu, cache in enumerate(self.gpu) if cache.is_wished(key)]
            demanded = any(self.gpu[gpu].is_demanded(key) for gpu in gpus)
            # Staging itself is one hold. More holds than copies: another need.
            if gpus and not demanded and holds[key] == 1 + len(gpus):
                return [(gpu, *divmod(key, self.experts)) for gpu in gpus]
        return []

    def cancel_read(self, layer: int, expert: int) -> None:
        """Forget a queued read."""
        assert self.host is not None
        self.host.level.cancel(layer * self.experts + expert)

    def read_done(self, layer: int, expert: int) -> bool:
        """Note that an expert has arrived in host memory from the SSD.

        Returns:
            Whether a staging slot is free again.
        """
        assert self.host is not None
        return self.host.land(layer, expert)

    def computed(self, gpu: int, layer: int, expert: int) -> bool:
        """Note that an active expert's product has ended, on a GPU or (-1) the CPU.

        A staged expert is needed no more then.

        Returns:
            Whether a staging slot is free again.
        """
        if gpu >= 0:
            memory = self.gpu[gpu].memory
            key = layer * self.experts + expert
            if not memory.staged_total or not memory.is_staged[key]:
                return False
            memory.drop_staged(layer, expert)
            return True
        return self.host is not None and self.host.computed(layer, expert)

    def unawaited_ended(self, layer: int, expert: int) -> bool:
        """Note that a product has ended for which its plan did not wait: one ahead of
        its gate, or one that joins one layer later.

        Returns:
            Whether a staging slot is free again.
        """
        return self.host is not None and self.host.unneed(layer, expert)

    # -- what decisions write down ----------------------------------------------------

    def queue(
        self, kind: int, gpu: int, layer: int, keys: list[int], read: list[bool]
    ) -> Copies:
        """Put copies on the books of their link."""
        self.links[gpu].enqueue(layer, keys)
        first = layer * self.experts
        return Copies(kind, gpu, layer, [key - first for key in keys], read)

    def need_in_host(
        self, work: LayerWork, layer: int, keys: np.ndarray, *, demanded: bool
    ) -> list[bool]:
        """Hold experts in host memory for queued copies, and wish for missing reads.

        Returns:
            Which of them must be read.
        """
        host = self.host
        if host is None:
            return [False] * len(keys)
        read = host.need(layer, keys)
        if demanded:
            for key in keys.tolist():
                host.promote(key)
            host.demand(work, layer, keys[read])
        else:
            for key in keys[read].tolist():
                host.level.prefetch(work, key)
        return read

    def is_in_host_memory(self, key: int) -> bool:
        """Whether an expert can be copied to a GPU without a read."""
        if self.host is None:
            return True
        return self.host.memory.state_of[key] == RESIDENT

    def drop_staged(self, gpu: int, layer: int, expert: int) -> None:
        """Forget a staged expert, now or when its copy has landed."""
        memory = self.gpu[gpu].memory
        if memory.state[layer, expert] == RESIDENT:
            memory.drop_staged(layer, expert)
        else:
            self.orphans[gpu].add(layer * self.experts + expert)


class GpuLink:
    """Expected seconds of one host-to-GPU link, by the profile's estimate.

    Attributes:
        copy_s: float64 [L, E], seconds to copy each expert.
        copy_of_s: the same by flat key.
        first_copy_s: of the first expert of each layer, which stands for all where they
            are alike.
        alike: whether they are, in every layer.
    """

    def __init__(self, copy_s: np.ndarray) -> None:
        self.copy_s = copy_s
        self.copy_of_s = cast("memoryview[float]", copy_s.reshape(-1).data)
        self.first_copy_s: list[float] = copy_s[:, 0].tolist()
        self.alike = bool((copy_s == copy_s[:, :1]).all())
        self._busy_until_s = 0.0
        self._queued_s = 0.0
        self._queued = 0

    def enqueue(self, layer: int, keys: list[int]) -> None:
        """Note queued copies of one layer, by flat key."""
        self._queued += len(keys)
        queued_s = self._queued_s
        # One by one, as they will be withdrawn: else roundings would differ.
        if self.alike:
            each_s = self.first_copy_s[layer]
            for _ in keys:
                queued_s += each_s
        else:
            copy_of_s = self.copy_of_s
            for key in keys:
                queued_s += copy_of_s[key]
        self._queued_s = queued_s

    def withdraw(self, key: int) -> None:
        """Note that a queued copy has left the queue, started or not."""
        self._queued -= 1
        # An empty queue is empty, whatever sums of floating-point numbers say.
        left_s = self._queued_s - self.copy_of_s[key]
        self._queued_s = left_s if self._queued else 0.0

    def start(self, key: int, landing_s: float) -> None:
        """Note that a queued copy starts, and when it is expected to land."""
        self.withdraw(key)
        self._busy_until_s = landing_s

    def left_s(self, now_s: float) -> float:
        """Seconds until the copy under way has landed; 0 if there is none."""
        return max(0.0, self._busy_until_s - now_s)

    def wait_s(self, now_s: float) -> float:
        """Seconds until everything that is queued has been served."""
        return self.left_s(now_s) + self._queued_s
