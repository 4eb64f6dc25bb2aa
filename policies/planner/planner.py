"""The planner: the one place that asks policies, in one fixed order, for both worlds.

For every layer step it looks at the active experts, asks for their assignment, holds
them, notes the accesses, and wishes for copies: what is missing, what the next layers
may need, what the cache wants to replace. A copy takes its place when it starts.

The planner keeps no clock: the engine passes the time and reports what has started and
landed, so the same reports always give the same plans.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.policies.base import (
    ABSENT,
    CPU,
    IN_FLIGHT,
    RESIDENT,
    AssignmentPolicy,
    Evaluations,
    Gate,
    LayerWork,
    PolicyError,
    Precompute,
)
from moesim.policies.planner.gate_mass import gate_mass_kept, weight_kept
from moesim.policies.planner.gpu_link import GpuLink
from moesim.policies.planner.host_memory import HostMemory
from moesim.policies.planner.memory_level import MemoryLevel
from moesim.policies.planner.plan import (
    FETCH,
    LAYERS,
    PREFETCH,
    READ,
    REPLACE,
    Copies,
    MemoryPlan,
    Plan,
    Policies,
)
from moesim.policies.planner.residency import Residency
from moesim.policies.planner.residency_kernels import is_legal, look_up, missing
from moesim.policies.planner.starting import fill_memories, start_policies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.hwprofiles.costs import Costs
    from moesim.policies.base import Future, Swap
    from moesim.policies.planner.memory_level import Place
    from moesim.policies.planner.residency import CacheSize
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.schema import ModelShape, Phase

_NO_EVALUATIONS: Final = Evaluations()

_RESERVED_SLOTS: Final = 1
"""Staging slots that prefetches leave to demand: so it always finds one."""


class Planner:
    """Asks the policies and keeps the books; also the `MachineView` that they see.

    Attributes:
        shape: the model.
        costs: what operations take on this machine.
        policies: who decides.
        sizes: how large the memories are.
        gpu: cache and books of each GPU.
        host: books of host memory where it is limited, else None.
        gap_s: see `MachineView`.
        gate_mass: share of the gate's weight that altered routing kept, by layer step.
    """

    def __init__(
        self,
        shape: ModelShape,
        costs: Costs,
        policies: Policies,
        memory: MemoryPlan,
        *,
        seed: int = 0,
        future: Future | None = None,
        calibration: np.ndarray | None = None,
        extras: Mapping[str, Any] | None = None,
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
        self.gpus = len(policies.caches)
        self.cpu_first_s = costs.cpu_first_s
        self.now_s = 0.0
        self.gap_s = 0.0
        self._joined_s = 0.0  # when the last layer step ended
        self.gate_mass: list[float] = []
        self.assignment_name = policies.names.get("assignment", "")
        self.splits_layers = memory.gpu_split == LAYERS or self.gpus == 1
        self._prefetches = policies.prefetch.prefetches
        self._serving = self._serving_gpus()

        # Memories and links.
        name = policies.names.get("cache", "cache")
        self.gpu = [self._level(memory.gpu, cache, name) for cache in policies.caches]
        self.host: HostMemory | None = None
        if memory.host is not None:
            assert policies.host_cache is not None, (
                "limited host memory needs a host cache policy"
            )
            level = self._level(memory.host, policies.host_cache, name)
            read_s = [costs.read_s(layer) for layer in range(self.layers)]
            self.host = HostMemory(level, read_s)
        self._links = [
            GpuLink([costs.copy_s(layer, gpu) for layer in range(self.layers)])
            for gpu in range(self.gpus)
        ]
        # Staged experts in flight that their layer step needs no more, by GPU.
        self._orphans: list[set[int]] = [set() for _ in self.gpu]

        # Work ahead of the gate.
        self._precomputes = (
            type(policies.assignment).precompute is not AssignmentPolicy.precompute
        )
        self._precomputed: dict[int, np.ndarray] = {}  # layer -> experts started
        self._held_precomputed: dict[int, np.ndarray] = {}
        # Step and layer whose gate was asked one layer earlier, and its answer.
        self._predicted_gate: tuple[int, int, np.ndarray | None] = (-1, -1, None)

        # Made once, used in every layer step.
        self._zeros = np.zeros(self.experts)
        self._zeros.flags.writeable = False
        self._ascending = np.arange(self.experts)
        limited = self.host is not None
        self._planning_s = cache(
            partial(costs.planning_s, self.assignment_name, tiered=limited)
        )

        start_policies(
            self, seed=seed, future=future, calibration=calibration, extras=extras or {}
        )
        fill_memories(self, calibration)

    def _level(self, size: CacheSize, cache: Any, name: str) -> MemoryLevel:
        memory = Residency(self.layers, self.experts, self.shape.expert_bytes, size)
        return MemoryLevel(memory, cache, name, self.sizes.staging)

    def _serving_gpus(self) -> list[tuple[int, ...]]:
        """GPUs that compute each layer's experts, its home first."""
        if self.splits_layers:
            return [(layer * self.gpus // self.layers,) for layer in range(self.layers)]
        return [tuple(range(self.gpus))] * self.layers

    # -- the view that policies see ---------------------------------------------------

    def home(self, layer: int) -> int:
        """GPU that runs this layer's dense part.

        With split layers it also computes all the layer's GPU experts.
        """
        return self._serving[layer][0]

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

    def copy_s(self, layer: int) -> float:
        """Seconds to copy one expert of this layer from host memory to a GPU."""
        return self._links[0].copy_s[layer]

    def link_wait_s(self, gpu: int = 0) -> float:
        """Seconds until the link has served what is queued on it, as expected."""
        return self._links[gpu].wait_s(self.now_s)

    def cpu_s(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds one expert takes on the CPU."""
        return self.costs.cpu_s(layer, tokens)

    def gpu_s(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds one resident expert takes on a GPU."""
        return self.costs.gpu_s(layer, tokens)

    @property
    def requeues(self) -> bool:
        """Whether queued prefetches of all layers are chosen anew before each one."""
        return self.policies.prefetch.requeue

    def evaluations(self, layer: int, phase: Phase) -> Evaluations:
        """What predicting in a layer step evaluates on the GPU."""
        following = self.layers - 1 - layer
        if not following or not self._prefetches:
            return _NO_EVALUATIONS
        return self.policies.prefetch.evaluations(following, phase)

    # -- what the engine reports ------------------------------------------------------

    def start_copy(
        self, gpu: int, layer: int, expert: int, now_s: float
    ) -> Place | None:
        """Take a place for a queued copy to a GPU that starts now.

        Returns:
            The place, or None if there is none now.
        """
        level = self.gpu[gpu]
        key = layer * self.experts + expert
        landing_s = now_s + self._links[gpu].copy_s[layer]
        stages = self.policies.prefetch.no_place != "drop"
        place = level.start(key, landing_s, reserve=_RESERVED_SLOTS, may_stage=stages)
        if place is None and level.is_demanded(key):
            # A prefetch that waits in staging is a guess; demand is not.
            idle = level.staged_prefetches(layer)
            if idle:
                level.memory.drop_staged(*divmod(idle[0], self.experts))
                place = level.start(key, landing_s, reserve=_RESERVED_SLOTS)
        if place is not None:
            self._links[gpu].start(layer, now_s)
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
            return not level.staging_will_have_room(_RESERVED_SLOTS)
        return no_place == "drop"

    def cancel_copy(self, gpu: int, layer: int, expert: int) -> None:
        """Forget a queued copy to a GPU."""
        self.gpu[gpu].cancel(layer * self.experts + expert)
        self._links[gpu].withdraw(layer)
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
        if key in self._orphans[gpu]:
            self._orphans[gpu].remove(key)
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
        holds = level.memory.holds.reshape(-1)
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
            if not memory.staged_total or not memory.staged[layer, expert]:
                return False
            memory.drop_staged(layer, expert)
            return True
        return self.host is not None and self.host.computed(layer, expert)

    def precompute_ended(self, layer: int, expert: int) -> bool:
        """Note that a product ahead of its gate has ended.

        Returns:
            Whether a staging slot is free again.
        """
        return self.host is not None and self.host.unneed(layer, expert)

    def drop_late(
        self,
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
            rule = self.policies.prefetch.late if target == layer else "drop"
            stays = rule == "wait" or (rule == "keep" and not awaited)
            if not stays:
                dropped.append(place)
                self.cancel_copy(gpu, target, expert)
        return dropped

    def complete(self, plan: Plan, now_s: float) -> list[Copies]:
        """Note that a layer step has joined: release its holds, forget what was staged
        for it.

        Returns:
            The copies that carry out the cache's replacements.
        """
        layer = plan.work.layer
        experts = plan.work.experts
        for gpu, expert in plan.released:
            # `release` ends one hold of every active expert.
            self.gpu[gpu].memory.holds[layer, expert] += 1
        for gpu, level in enumerate(self.gpu):
            memory = level.memory
            memory.release(layer, experts)
            level.end_use(layer)
            if not memory.staged_count[layer]:
                continue
            for expert in memory.staged_of(layer):
                self._drop_staged(gpu, layer, expert)
        if self.host is not None:
            held = self._held_precomputed.pop(layer, None)
            if held is not None:
                self.host.release(layer, held)
            self.host.complete(layer)
        self.now_s = now_s
        self._joined_s = now_s
        copies: list[Copies] = []
        for gpu, swap in plan.swaps:
            self._wish_swap(plan.work, gpu, swap, copies)
        return copies

    # -- planning ---------------------------------------------------------------------

    def plan(
        self,
        routed: RoutedLayer,
        step: int,
        phase: Phase,
        now_s: float,
        batch: int = 0,
    ) -> Plan:
        """Plan one layer step in the order of the contract (design §5).

        Assignment, holds, accesses, demand, prefetches, work ahead, replacements.

        Raises:
            PolicyError: a policy answered something illegal; the message names it.
        """
        self.now_s = now_s
        # Before a pass's first layer other things happen too: a head, another batch.
        if routed.layer:
            self.gap_s = now_s - self._joined_s
        if self.policies.routing.alters:
            routed = self._reroute(routed, step, phase)
        work = self._look(routed, step, phase, batch)
        first = self._replace_first(work)
        lanes, order, serial = self._assign(work)
        self._note_accesses(work, lanes)

        copies: list[Copies] = []
        promoted: list[tuple[int, int]] = []
        waits = self.policies.prefetch.late == "wait"
        # Only what earlier plans have queued can be promoted, so this comes first.
        self._promote_due(work.layer, promoted, everything=waits)
        released, postponed = self._wish_first(work, lanes, first, copies)
        exposed_s = 0.0
        for gpu in self._serving[work.layer]:
            keys = self._demand(work, gpu, lanes, order, copies, promoted)
            exposed_s = max(exposed_s, self._exposed_s(work, gpu, keys))
        if self.host is not None:
            self._read_for_cpu(self.host, work, lanes, order, copies)
            # What a GPU computes is needed in host memory until its copy has landed,
            # for which the copy holds it. A longer hold would keep a staging slot from
            # the next read, for which the same GPU may be waiting.
            self.host.memory.release(work.layer, work.experts[lanes != CPU])
        if self._prefetches:
            self._prefetch(work, copies)
        # Products that wait free no slot: staging must hold all that they wait for.
        waits = waits and self._can_stage_all(work.layer, copies, promoted)

        copied = len(promoted) + sum(len(part.experts) for part in copies)
        plan = Plan(
            work=work,
            lanes=lanes,
            order=order.tolist(),
            copies=copies,
            promoted=promoted,
            copied=copied,
            planning_s=exposed_s + self._planning_s(len(lanes), copied),
            serial=serial,
            waits=waits,
            dense_parts=self.evaluations(work.layer, phase).dense_parts,
            released=released,
            swaps=postponed,
        )
        if self._precomputes and work.layer + 1 < self.layers:
            self._ask_precompute(plan)
        for gpu in self._serving[work.layer]:
            cache = self.gpu[gpu].cache
            if cache.replaces and not cache.replaces_first:
                swaps = self._ask_replacements(gpu, work)
                plan.swaps += [(gpu, swap) for swap in swaps]
        return plan

    def _reroute(self, routed: RoutedLayer, step: int, phase: Phase) -> RoutedLayer:
        """Let the routing policy choose the experts of every token."""
        predicted_step, layer, predicted = self._predicted_gate
        if (predicted_step, layer) != (step, routed.layer):
            predicted = None
        coming = routed.predicted.get("pred1_raw")
        self._predicted_gate = (step, routed.layer + 1, coming)
        gate = Gate(
            step=step,
            layer=routed.layer,
            phase=phase,
            experts=routed.routing,
            weights=routed.weights,
            scores=routed.scores,
            predicted=predicted,
        )
        routing = self.policies.routing.route(gate, self)
        if routed.scores is not None:
            kept = gate_mass_kept(routed.scores, routed.routing, routing.experts)
            self.gate_mass.append(kept)
        elif routed.weights is not None:
            kept = weight_kept(routed.weights, routed.routing, routing.experts)
            self.gate_mass.append(kept)
        used = routing.experts[routing.experts < self.experts]
        experts, tokens = np.unique(used, return_counts=True)
        return replace(
            routed,
            experts=experts.astype(np.int32),
            tokens=tokens.astype(np.int32),
            routing=routing.experts,
            weights=routing.weights,
        )

    def _look(
        self, routed: RoutedLayer, step: int, phase: Phase, batch: int
    ) -> LayerWork:
        """Look the active experts up: states, costs and expected arrivals."""
        layer = routed.layer
        experts = routed.experts
        tokens = routed.tokens
        gpus = self._serving[layer]
        host_s = self._zeros[: len(experts)]
        if self.host is not None:
            host_s = self.host.wait_s(layer, experts, self.now_s)

        states = np.empty((len(gpus), len(experts)), np.int8)
        arrive_s = np.empty((len(gpus), len(experts)))
        # Links are idle in most layer steps, so this stays a list until the end.
        link_s = [self._links[gpu].left_s(self.now_s) for gpu in gpus]
        for row, gpu in enumerate(gpus):
            memory = self.gpu[gpu].memory
            copy_s = self._links[gpu].copy_s[layer]
            left_s = link_s[row]
            look_up(
                memory.state,
                memory.landing_s,
                layer,
                experts,
                self.now_s,
                left_s + copy_s,
                states[row],
                arrive_s[row],
            )
            if self.host is not None:
                # A copy starts when link and expert are there, whichever is later.
                absent = states[row] == ABSENT
                arrive_s[row, absent] = np.maximum(left_s, host_s[absent]) + copy_s

        if len(gpus) == 1:
            state = states[0]
            gpu_s = self.costs.gpu_s(layer, tokens, gpus[0])[None]
        else:
            state = states.max(axis=0)
            gpu_s = np.stack([self.costs.gpu_s(layer, tokens, gpu) for gpu in gpus])
        return LayerWork(
            step=step,
            layer=layer,
            phase=phase,
            experts=experts,
            tokens=tokens,
            state=state,
            cpu_s=self.costs.cpu_s(layer, tokens),
            host_s=host_s,
            gpu_s=gpu_s,
            arrive_s=arrive_s,
            routing=routed.routing,
            weights=routed.weights,
            scores=routed.scores,
            predicted=routed.predicted,
            batch=batch,
            precomputed=self._take_precomputed(layer, experts),
            link_s=np.array(link_s) if any(link_s) else None,
        )

    def _assign(self, work: LayerWork) -> tuple[np.ndarray, np.ndarray, bool]:
        """Ask for lanes and launch order, and check them."""
        lanes, order, serial = self.policies.assignment.assign(work, self)
        gpus = 1 if self.splits_layers else self.gpus
        if order is None:
            order = self._ascending[: len(work.experts)]
        if not is_legal(lanes, order, len(work.experts), gpus):
            raise PolicyError(
                f"assignment policy {self.assignment_name!r}: step {work.step}, layer"
                f" {work.layer}: expected a lane in 0..{gpus} for each of"
                f" {len(work.experts)} active experts and an order that is a"
                " permutation"
            )
        home = self.home(work.layer)
        if home:
            lanes = np.where(lanes > 0, lanes + home, lanes).astype(np.int8)
        if work.precomputed is not None:
            lanes = np.where(work.precomputed, CPU, lanes).astype(np.int8)
        return lanes, order, serial

    def _note_accesses(self, work: LayerWork, lanes: np.ndarray) -> None:
        """Hold every active expert before any victim is named, then tell the caches.

        Else one miss would evict the next hit.
        """
        for gpu, level in enumerate(self.gpu):
            level.memory.hold(work.layer, work.experts)
            level.begin_use(work, lanes, 1 + gpu)
            self._forget_wrong_guesses(gpu, work.layer)
        if self.host is not None:
            self.host.memory.hold(work.layer, work.experts)
            self.host.level.begin_use(work, lanes, CPU)
            self.host.accessed(work, lanes)
        for gpu in self._serving[work.layer]:
            self.gpu[gpu].cache.accessed(work)

    def _forget_wrong_guesses(self, gpu: int, layer: int) -> None:
        """Free the staging slots of prefetches that a GPU does not compute after all.

        What is under way is forgotten when it lands.
        """
        memory = self.gpu[gpu].memory
        if not memory.staged_count[layer]:
            return
        for expert in memory.staged_of(layer):
            if self.gpu[gpu].used[layer, expert]:
                # It may be on its way since a step that no longer needed it.
                self._orphans[gpu].discard(layer * self.experts + expert)
            else:
                self._drop_staged(gpu, layer, expert)

    def _drop_staged(self, gpu: int, layer: int, expert: int) -> None:
        """Forget a staged expert, now or when its copy has landed."""
        memory = self.gpu[gpu].memory
        if memory.state[layer, expert] == RESIDENT:
            memory.drop_staged(layer, expert)
        else:
            self._orphans[gpu].add(layer * self.experts + expert)

    def _demand(
        self,
        work: LayerWork,
        gpu: int,
        lanes: np.ndarray,
        order: np.ndarray,
        copies: list[Copies],
        promoted: list[tuple[int, int]],
    ) -> np.ndarray:
        """Wish for what a GPU lacks; what is queued already is promoted.

        Returns:
            Flat keys of what must be fetched.
        """
        level = self.gpu[gpu]
        layer = work.layer
        keys = missing(lanes, order, gpu + 1, level.memory.state, layer, work.experts)
        if not len(keys):
            return keys
        queued = [level.is_wished(key) for key in keys.tolist()]
        if any(queued):
            for key in keys[queued].tolist():
                if not level.is_demanded(key):
                    self._promote(gpu, key, promoted)
            keys = keys[np.logical_not(queued)]
            if not len(keys):
                return keys
        level.demand(work, layer, keys)
        read = self._need_in_host(work, layer, keys, demanded=True)
        copies.append(self._queued(FETCH, gpu, layer, keys, read))
        return keys

    def _promote_due(
        self, layer: int, promoted: list[tuple[int, int]], *, everything: bool
    ) -> None:
        """Promote queued copies of a layer that should have landed before it came.

        That is `everything` if its products wait for all of them, else what caches with
        a deadline asked for. A replacement whose predecessor is in use stays behind,
        and so does one that must be read first: a guess must not block the SSD.
        """
        for gpu, level in enumerate(self.gpu):
            hurries = level.cache.lands_by_next_visit
            if not everything and not hurries:
                continue
            for key in level.wished_of(layer):
                if everything:
                    self._promote(gpu, key, promoted)
                elif self._is_in_host_memory(key) and level.hurry(key):
                    promoted.append((gpu, key % self.experts))

    def _is_in_host_memory(self, key: int) -> bool:
        if self.host is None:
            return True
        return bool(self.host.memory.state.reshape(-1)[key] == RESIDENT)

    def _promote(self, gpu: int, key: int, promoted: list[tuple[int, int]]) -> None:
        """Note that a layer step waits for a queued copy and for the read before."""
        self.gpu[gpu].promote(key)
        if self.host is not None:
            self.host.promote(key)
        place = gpu, key % self.experts
        if place not in promoted:
            promoted.append(place)

    def _can_stage_all(
        self, layer: int, copies: list[Copies], promoted: list[tuple[int, int]]
    ) -> bool:
        """Whether staging could hold every queued copy of a layer at once, beside what
        it holds already.
        """
        for gpu in self._serving[layer]:
            memory = self.gpu[gpu].memory
            coming = [part for part in copies if (part.gpu, part.layer) == (gpu, layer)]
            count = sum(len(part.experts) for part in coming)
            count += sum(copied_to == gpu for copied_to, _ in promoted)
            # Slots of prefetches for other layers can be taken from them.
            if count + memory.staged_count[layer] > self.sizes.staging:
                return False
        return True

    def _exposed_s(self, work: LayerWork, gpu: int, keys: np.ndarray) -> float:
        """Seconds by which a cache's choice of victims outlasts the first load."""
        level = self.gpu[gpu]
        if not len(keys) or not level.deliberates:
            return 0.0
        row = 0 if self.splits_layers else gpu
        position = np.searchsorted(work.experts, keys - work.layer * self.experts)
        first_s = float(work.arrive_s[row][position].min())
        return level.cache.exposed_s(first_s)

    def _queued(
        self, kind: int, gpu: int, layer: int, keys: np.ndarray, read: list[bool]
    ) -> Copies:
        """Put copies on the books of their link."""
        link = self._links[gpu]
        for _ in range(len(keys)):
            link.enqueue(layer)
        experts = (keys - layer * self.experts).tolist()
        return Copies(kind, gpu, layer, experts, read)

    def _need_in_host(
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

    def _read_for_cpu(
        self,
        host: HostMemory,
        work: LayerWork,
        lanes: np.ndarray,
        order: np.ndarray,
        copies: list[Copies],
    ) -> None:
        """Wish for reads of what the CPU computes; the layer step itself holds it."""
        layer = work.layer
        keys = missing(lanes, order, CPU, host.memory.state, layer, work.experts)
        if not len(keys):
            return
        read = [not host.level.is_wished(key) for key in keys.tolist()]
        for key in keys.tolist():
            host.promote(key)
        host.demand(work, layer, keys[read])
        experts = (keys - layer * self.experts).tolist()
        copies.append(Copies(READ, -1, layer, experts, read))

    def _prefetch(self, work: LayerWork, copies: list[Copies]) -> None:
        """Wish for what the prefetch policy names, within its byte budget."""
        named = self.policies.prefetch.prefetch(work, self)
        self._shield(work.layer, named)
        if not named:
            return
        budget = self.sizes.prefetch_budget_bytes
        for layer, expert in named:
            gpu = self.home(layer)
            level = self.gpu[gpu]
            key = layer * self.experts + expert
            if level.memory.state[layer, expert] != ABSENT or level.is_wished(key):
                continue
            if budget is not None:
                if budget < self.shape.expert_bytes[layer]:
                    break
                budget -= self.shape.expert_bytes[layer]
            keys = np.array([key])
            level.prefetch(work, key)
            # The products of this very layer may wait for it: then it is no guess.
            awaited = layer == work.layer and self.policies.prefetch.late == "wait"
            if awaited:
                level.promote(key)
            read = self._need_in_host(work, layer, keys, demanded=awaited)
            kind = FETCH if awaited else PREFETCH
            copies.append(self._queued(kind, gpu, layer, keys, read))

    def _shield(self, layer: int, named: Sequence[tuple[int, int]]) -> None:
        """Protect what a prediction wants from its own copies.

        A new prediction of a layer takes the place of the last one; when the layer has
        come, its prediction has served.
        """
        for coming, expert in named:
            if not (0 <= coming < self.layers and 0 <= expert < self.experts):
                raise PolicyError(
                    f"prefetch policy {self.policies.names.get('prefetch')!r}: no"
                    f" expert {coming, expert}"
                )
        for past in {layer, *(coming for coming, _ in named)}:
            self.gpu[self.home(past)].shielded[past] = False
        for coming, expert in named:
            self.gpu[self.home(coming)].shielded[coming, expert] = True

    # -- work ahead of the gate -------------------------------------------------------

    def _take_precomputed(self, layer: int, experts: np.ndarray) -> np.ndarray | None:
        """Which active experts the CPU has started one layer ahead, bool [A]; None if
        it has started nothing here.
        """
        started = self._precomputed.pop(layer, None)
        return None if started is None else np.isin(experts, started)

    def _ask_precompute(self, plan: Plan) -> None:
        """Let the assignment name experts of the next layer.

        Those that are not in host memory are left to their own layer.
        """
        layer = plan.work.layer + 1
        named = self.policies.assignment.precompute(plan.work, self)
        if named is None or not len(named.experts):
            return
        experts = named.experts
        inside = experts.min() >= 0 and experts.max() < self.experts
        if not inside or (np.diff(experts) <= 0).any():
            raise PolicyError(
                f"assignment policy {self.assignment_name!r}: step {plan.work.step},"
                f" layer {layer}, ahead: expected ascending experts below"
                f" {self.experts}, got {experts.tolist()}"
            )
        if self.host is not None:
            # Staging is for reads that somebody waits for, not for guesses of a layer.
            memory = self.host.memory
            present = memory.state[layer][experts] == RESIDENT
            present &= ~memory.staged[layer][experts]
            named = Precompute(experts[present], named.tokens[present], named.routing)
            # Needed until the product has ended and its layer step is over.
            self.host.memory.hold(layer, named.experts)
            self.host.memory.hold(layer, named.experts)
            self._held_precomputed[layer] = named.experts
        self._precomputed[layer] = named.experts
        plan.precompute = named
        plan.precompute_s = self.costs.cpu_s(layer, named.tokens).tolist()

    # -- replacements -----------------------------------------------------------------

    def _ask_replacements(self, gpu: int, work: LayerWork) -> list[Swap]:
        """Ask the cache for its own copies, and check them."""
        level = self.gpu[gpu]
        memory = level.memory
        swaps = list(level.cache.replacements(work, self))
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

    def _replace_first(self, work: LayerWork) -> list[tuple[int, Swap]]:
        """Let caches replace residents before their layer step is assigned.

        `work` then tells of the new content.

        Returns:
            Replacements by GPU.
        """
        replacements = []
        for row, gpu in enumerate(self._serving[work.layer]):
            level = self.gpu[gpu]
            if not (level.cache.replaces and level.cache.replaces_first):
                continue
            lands_s = self._links[gpu].left_s(self.now_s)
            for swap in self._ask_replacements(gpu, work):
                lands_s += self._links[gpu].copy_s[work.layer]
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

    def _wish_first(
        self,
        work: LayerWork,
        lanes: np.ndarray,
        replacements: Sequence[tuple[int, Swap]],
        copies: list[Copies],
    ) -> tuple[list[tuple[int, int]], list[tuple[int, Swap]]]:
        """Wish for what `_replace_first` found; demand, where this step awaits it.

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
                self.gpu[gpu].memory.holds[work.layer, outgoing] -= 1
                released.append((gpu, outgoing))
            awaited = lane_of.get(swap.incoming.expert) == 1 + gpu
            self._wish_swap(work, gpu, swap, copies, demanded=awaited)
        return released, postponed

    def _wish_swap(
        self,
        work: LayerWork,
        gpu: int,
        swap: Swap,
        copies: list[Copies],
        *,
        demanded: bool = False,
    ) -> None:
        """Wish for one replacement, unless a copy has overtaken it."""
        level = self.gpu[gpu]
        layer, expert = swap.incoming
        key = layer * self.experts + expert
        absent = level.memory.state[layer, expert] == ABSENT
        if not absent or level.is_wished(key):
            return
        if level.memory.state[swap.outgoing] != RESIDENT:
            return
        outgoing = swap.outgoing.layer * self.experts + swap.outgoing.expert
        level.replace(outgoing, key)
        if demanded:
            level.promote(key)
        keys = np.array([key])
        read = self._need_in_host(work, layer, keys, demanded=demanded)
        kind = FETCH if demanded else REPLACE
        copies.append(self._queued(kind, gpu, layer, keys, read))
