"""The one place that asks policies, in one fixed order, for both worlds.

A layer step is planned like a kitchen order: who cooks what (assignment), nobody clears
away what is on the stove (hold), the pantry notes what was asked for (access), what is
missing is fetched (demand, with victims), what the next course may need is put on its
way (prefetch), and the pantry may tidy up (replacement). The planner keeps no clock:
the world passes the time and reports what has landed, so the same reports always give
the same plans.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.policies.base import (
    ABSENT,
    CPU,
    IN_FLIGHT,
    RESIDENT,
    AssignmentPolicy,
    Gate,
    LayerWork,
    PolicyError,
    Precompute,
    RunContext,
)
from moesim.policies.planner.gate_mass import gate_mass_kept, weight_kept
from moesim.policies.planner.host_memory import HostMemory
from moesim.policies.planner.initial_content import fitting
from moesim.policies.planner.memory_level import Tier
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
from moesim.policies.planner.residency import CacheSize, Residency
from moesim.policies.planner.residency_kernels import legal, look, missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.hwprofiles.costs import Costs
    from moesim.policies.base import Future, Policy, Swap
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.schema import ModelShape, Phase


class Planner:
    """Asks the policies and keeps the books; also the `MachineView` that policies
    see.
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
        name = policies.names.get("cache", "cache")
        self.gpu = [
            Tier(self._memory(memory.gpu), cache, name) for cache in policies.caches
        ]
        self.host: HostMemory | None = None
        if memory.host is not None:
            assert policies.host_cache is not None, (
                "limited host memory needs a host cache policy"
            )
            tier = Tier(self._memory(memory.host), policies.host_cache, name)
            self.host = HostMemory(
                tier, [costs.read_s(layer) for layer in range(self.layers)]
            )
        self.cpu_first_s = costs.cpu_first_s
        self.now_s = 0.0
        self.gate_mass: list[float] = []
        self._precomputed: dict[
            int, np.ndarray
        ] = {}  # layer -> experts that the CPU computes ahead
        self._held_precomputed: dict[
            int, np.ndarray
        ] = {}  # the same, held in limited host memory
        # Step, layer, its gate asked earlier.
        self._predicted_gate: tuple[int, int, np.ndarray | None] = (
            -1,
            -1,
            None,
        )
        self._precomputes = (
            type(policies.assignment).precompute is not AssignmentPolicy.precompute
        )
        self.assignment_name = policies.names.get("assignment", "")
        self._link_free_s = [0.0] * self.gpus
        # Staged prefetches, by GPU.
        self._ahead: list[set[int]] = [set() for _ in self.gpu]
        # Staged, still in flight, layer step over.
        self._orphans: list[set[int]] = [set() for _ in self.gpu]
        self._prefetching = policies.names.get("prefetch") != "none"
        self._copy_s = [
            [costs.copy_s(layer, g) for layer in range(self.layers)]
            for g in range(self.gpus)
        ]
        self._zeros = np.zeros(self.experts)
        self._zeros.flags.writeable = False
        self._ascending = np.arange(self.experts)
        self._counting = np.arange(1.0, self.experts + 1.0)
        self._planning_s = cache(
            partial(
                costs.planning_s, self.assignment_name, tiered=self.host is not None
            )
        )
        self._split_layers = memory.gpu_split == LAYERS or self.gpus == 1
        everyone = tuple(range(self.gpus))
        self._serving = [  # GPUs that compute a layer's experts, its home first
            (layer * self.gpus // self.layers,) if self._split_layers else everyone
            for layer in range(self.layers)
        ]
        self._start(seed, future, calibration, extras or {})

    def _memory(self, size: CacheSize) -> Residency:
        return Residency(self.layers, self.experts, self.shape.expert_bytes, size)

    def _start(
        self,
        seed: int,
        future: Future | None,
        calibration: np.ndarray | None,
        extras: Mapping[str, Any],
    ) -> None:
        for policy in self.policies.all():
            if policy.oracle and future is None:
                raise PolicyError(
                    "policy"
                    f" {type(policy).__module__.rpartition('.')[2].replace('_', '-')!r}"
                    " is an oracle: it needs the future, which only the replay of a"
                    " trace has; choose a policy that sees the past only"
                )
            size = (
                self.sizes.host
                if policy is self.policies.host_cache
                else self.sizes.gpu
            )
            assert size is not None
            policy.start(
                RunContext(
                    shape=self.shape,
                    gpus=self.gpus,
                    capacity_slots=size.slots,
                    scope=size.scope,
                    seed=seed,
                    calibration=calibration,
                    future=future if policy.oracle else None,
                    extras=extras,
                    costs=self.costs,
                    served=self._served(policy),
                )
            )
        for tier in [*self.gpu, self.host.tier] if self.host else self.gpu:
            size = tier.memory.size
            keys = tier.cache.initial(size.slots)
            if keys is None and calibration is not None:
                keys = fitting(
                    -calibration, size.slots, size.scope, self._served(tier.cache)
                )
            if keys is None:
                continue
            if tier in self.gpu and self._split_layers and self.gpus > 1:
                keys = keys[
                    [
                        self.gpu[self.home(key // self.experts)] is tier
                        for key in keys.tolist()
                    ]
                ]
            tier.fill(keys)

    def _served(self, policy: Policy) -> np.ndarray | None:
        """Bool [L]: layers of the GPU whose cache this is, where GPUs share the layers
        out; None for all.
        """
        gpu = next(
            (g for g, cache in enumerate(self.policies.caches) if cache is policy), -1
        )
        if gpu < 0 or self.gpus == 1 or not self._split_layers:
            return None
        return np.array([self.home(layer) == gpu for layer in range(self.layers)])

    # -- the view that policies see ----------------------------------------------------

    def home(self, layer: int) -> int:
        """GPU that runs this layer's dense part (and, with split layers, all its GPU
        experts).
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
        return self._copy_s[0][layer]

    def link_wait_s(self, gpu: int = 0) -> float:
        """Seconds until the link has served what is queued on it, by the profile's
        estimate.
        """
        return max(0.0, self._link_free_s[gpu] - self.now_s)

    def cpu_s(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds one expert takes on the CPU."""
        return self.costs.cpu_s(layer, tokens)

    def gpu_s(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds one resident expert takes on a GPU."""
        return self.costs.gpu_s(layer, tokens)

    @property
    def requeues(self) -> bool:
        """Whether prefetches of all layers that have not started are offered to `late`
        before each layer step.
        """
        return self.policies.prefetch.requeue

    # -- what the world reports --------------------------------------------------------

    def read_done(self, layer: int, expert: int) -> None:
        """Note that an expert has arrived in host memory from the SSD."""
        assert self.host is not None
        self.host.memory.land(layer, expert)

    def landed(self, gpu: int, layer: int, expert: int) -> None:
        """Note that an expert's copy to a GPU is complete."""
        self.gpu[gpu].memory.land(layer, expert)
        key = layer * self.experts + expert
        if key in self._orphans[gpu]:
            self._orphans[gpu].remove(key)
            self._drop_ahead(gpu, key)
        if self.host is not None:
            self.host.unhold(layer, expert)

    def late(
        self, waiting: Sequence[tuple[int, int, int]], layer: int, active: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Decide about prefetches ``(gpu, layer, expert)`` that have not started, now
        that a gate has spoken.

        All of `layer`, and with `requeues` those of other layers; `active` are the
        experts that its gate chose.

        Returns those that are dropped; their places are free again. The others, of
        `layer`, become demand fetches.
        """
        rule = self.policies.prefetch.late
        kept = {(layer, expert) for expert in active} if rule == "active" else set()
        dropped = [
            one
            for one in waiting
            if one[1] != layer or (rule != "keep" and (one[1], one[2]) not in kept)
        ]
        for gpu, own, expert in dropped:
            key = own * self.experts + expert
            self._ahead[gpu].discard(key)
            self._orphans[gpu].discard(key)
            self.gpu[gpu].cancel(key)
            self._link_free_s[gpu] -= self._copy_s[gpu][own]
            if self.host is not None:
                self.host.unhold(own, expert, cancelled=True)
        return dropped

    def complete(self, plan: Plan, now_s: float) -> list[Copies]:
        """Note that a layer step has joined: release its holds, forget what was staged
        for it.

        Returns:
            The copies that carry out the cache's replacements.
        """
        layer = plan.work.layer
        experts = plan.work.experts
        for gpu, tier in enumerate(self.gpu):
            tier.memory.release(layer, experts)
            if tier.memory.staged_count[layer]:
                for key in tier.memory.staged_of(layer).tolist():
                    if tier.memory.state[layer, key - layer * self.experts] == RESIDENT:
                        self._drop_ahead(gpu, key)
                    else:
                        self._orphans[gpu].add(key)
        if self.host is not None:
            if layer in self._held_precomputed:
                self.host.memory.release(layer, self._held_precomputed.pop(layer))
            self.host.release(layer, experts)
        self.now_s = now_s
        copies: list[Copies] = []
        for gpu, swap in plan.swaps:
            self._swap(gpu, swap, copies)
        return copies

    # -- planning ----------------------------------------------------------------------

    def plan(  # noqa: C901 - the contract's order, in one place
        self, routed: RoutedLayer, step: int, phase: Phase, now_s: float, batch: int = 0
    ) -> Plan:
        """Plan one layer step: assignment, holds, accesses, demand, prefetch,
        replacement, in this order.

        Raises:
            PolicyError: a policy answered something illegal; the message names it.
        """
        self.now_s = now_s
        if self.policies.routing.alters:
            routed = self._reroute(routed, step, phase)
        work = self._look(routed, step, phase, batch)
        lanes, order, serial = self._assign(work)
        copies: list[Copies] = []
        gpus = self._serving[work.layer]
        for tier in self.gpu:
            tier.memory.hold(work.layer, work.experts)
        if self.host is not None:
            self.host.memory.hold(work.layer, work.experts)
            self.host.accessed(work, lanes)
        for gpu in gpus:
            self.gpu[gpu].cache.accessed(work)
        planning_s = 0.0
        for gpu in gpus:
            planning_s = max(planning_s, self._demand(work, gpu, lanes, order, copies))
        if self.host is not None:
            self._read_for_cpu(self.host, work, lanes, order, copies)
        if self._prefetching:
            self._prefetch(work, copies)
        copied = sum(len(one.experts) for one in copies)
        planning_s += self._planning_s(len(lanes), copied)
        staging_slots = [self.sizes.staging - len(ahead) for ahead in self._ahead]
        plan = Plan(
            work,
            lanes,
            order.tolist(),
            copies,
            copied,
            staging_slots,
            planning_s,
            serial,
        )
        if self._precomputes and work.layer + 1 < self.layers:
            self._ask_precompute(plan)
        for gpu in gpus:
            if self.gpu[gpu].replaces:
                self._ask_replacements(gpu, plan)
        return plan

    def _reroute(self, routed: RoutedLayer, step: int, phase: Phase) -> RoutedLayer:
        said, layer, predicted = self._predicted_gate
        predicted = predicted if (said, layer) == (step, routed.layer) else None
        self._predicted_gate = (
            step,
            routed.layer + 1,
            routed.predicted.get("pred1_raw"),
        )
        gate = Gate(
            step,
            routed.layer,
            phase,
            routed.routing,
            routed.weights,
            routed.scores,
            predicted,
        )
        routing = self.policies.routing.route(gate, self)
        if routed.scores is not None:
            self.gate_mass.append(
                gate_mass_kept(routed.scores, routed.routing, routing.experts)
            )
        elif routed.weights is not None:
            self.gate_mass.append(
                weight_kept(routed.weights, routed.routing, routing.experts)
            )
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
        layer = routed.layer
        experts = routed.experts
        tokens = routed.tokens
        host_s = self._zeros[: len(experts)]
        if self.host is not None:
            host_s = self.host.wait_s(layer, experts, self.now_s)
        gpus = self._serving[layer]
        states = np.empty((len(gpus), len(experts)), np.int8)
        arrive_s = np.empty((len(gpus), len(experts)))
        for row, gpu in enumerate(gpus):
            memory = self.gpu[gpu].memory
            copy_s = self._copy_s[gpu][layer]
            look(
                memory.state,
                memory.landing_s,
                layer,
                experts,
                self.now_s,
                copy_s,
                states[row],
                arrive_s[row],
            )
        if len(gpus) == 1:
            state = states[0]
            gpu_s = self.costs.gpu_s(layer, tokens, gpus[0])[None]
        else:
            state = states.max(axis=0)
            gpu_s = np.stack([self.costs.gpu_s(layer, tokens, gpu) for gpu in gpus])
        if self.host is not None:
            arrive_s = np.where(state == ABSENT, arrive_s + host_s, arrive_s)
        return LayerWork(
            step,
            layer,
            phase,
            experts,
            tokens,
            state,
            self.costs.cpu_s(layer, tokens),
            host_s,
            gpu_s,
            arrive_s,
            routed.routing,
            routed.weights,
            routed.scores,
            routed.predicted,
            batch,
            self._was_precomputed(layer, experts) if self._precomputed else None,
        )

    def _was_precomputed(self, layer: int, experts: np.ndarray) -> np.ndarray | None:
        """Bool [A]: which active experts the CPU has begun one layer ahead; None if it
        has begun nothing here.
        """
        begun = self._precomputed.pop(layer, None)
        return None if begun is None else np.isin(experts, begun)

    def _ask_precompute(self, plan: Plan) -> None:
        """Let the assignment name experts of the next layer; those not in host memory
        are left to their own layer.
        """
        layer = plan.work.layer + 1
        ahead = self.policies.assignment.precompute(plan.work, self)
        if ahead is None or not len(ahead.experts):
            return
        if (
            ahead.experts.min() < 0
            or ahead.experts.max() >= self.experts
            or (np.diff(ahead.experts) <= 0).any()
        ):
            raise PolicyError(
                f"assignment policy {self.assignment_name!r}: step {plan.work.step},"
                f" layer {layer}, ahead: expected ascending experts below"
                f" {self.experts}, got {ahead.experts.tolist()}"
            )
        if self.host is not None:
            there = self.host.memory.state[layer][ahead.experts] == RESIDENT
            ahead = Precompute(ahead.experts[there], ahead.tokens[there], ahead.routing)
            self.host.memory.hold(layer, ahead.experts)
            self._held_precomputed[layer] = ahead.experts
        self._precomputed[layer] = ahead.experts
        plan.precompute = ahead
        plan.precompute_s = self.costs.cpu_s(layer, ahead.tokens).tolist()

    def _assign(self, work: LayerWork) -> tuple[np.ndarray, np.ndarray, bool]:
        lanes, order, serial = self.policies.assignment.assign(work, self)
        gpus = 1 if self._split_layers else self.gpus
        if order is None:
            order = self._ascending[: len(work.experts)]
        if not legal(lanes, order, len(work.experts), gpus):
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

    def _demand(
        self,
        work: LayerWork,
        gpu: int,
        lanes: np.ndarray,
        order: np.ndarray,
        copies: list[Copies],
    ) -> float:
        """Fetch what a GPU lacks; returns the seconds by which its cache's choice
        outlasts the first load.
        """
        tier = self.gpu[gpu]
        layer = work.layer
        keys = missing(lanes, order, gpu + 1, tier.memory.state, layer, work.experts)
        if not len(keys):
            return 0.0
        copies.append(self._copy(FETCH, gpu, layer, keys, work))
        if not tier.deliberates:
            return 0.0
        arrive_s = work.arrive_s[0 if self._split_layers else gpu]
        return tier.cache.exposed_s(
            float(
                arrive_s[
                    np.searchsorted(work.experts, keys - layer * self.experts)
                ].min()
            )
        )

    def _copy(
        self, kind: int, gpu: int, layer: int, keys: np.ndarray, work: LayerWork
    ) -> Copies:
        """Place absent experts of one layer on a GPU and put their copies on the
        books.
        """
        experts = keys - layer * self.experts
        read, host_staged = self._bring(work, layer, keys)
        staged = self.gpu[gpu].admit(
            work, layer, keys, self._link_landings(gpu, layer, len(keys))
        )
        return Copies(kind, gpu, layer, experts.tolist(), staged, read, host_staged)

    def _link_landings(self, gpu: int, layer: int, count: int) -> np.ndarray:
        """Expected landing times, float64 [count], of copies queued now; the link is
        then busy until the last.
        """
        each_s = self._copy_s[gpu][layer]
        start_s = max(self.now_s, self._link_free_s[gpu])
        self._link_free_s[gpu] = start_s + count * each_s
        return start_s + each_s * self._counting[:count]

    def _bring(
        self, work: LayerWork | None, layer: int, keys: np.ndarray
    ) -> tuple[list[bool], list[bool]]:
        """Hold experts in host memory for their copies; which are read from the SSD,
        and which of those staged.
        """
        if self.host is None:
            nothing = [False] * len(keys)
            return nothing, nothing
        return self.host.bring(work, layer, keys, self.now_s)

    def _read_for_cpu(
        self,
        host: HostMemory,
        work: LayerWork,
        lanes: np.ndarray,
        order: np.ndarray,
        copies: list[Copies],
    ) -> None:
        layer = work.layer
        keys = missing(lanes, order, CPU, host.memory.state, layer, work.experts)
        if len(keys):
            read, staged = host.bring(work, layer, keys, self.now_s)
            host.memory.holds.reshape(-1)[keys] -= 1  # the layer step itself holds them
            copies.append(
                Copies(
                    READ,
                    -1,
                    layer,
                    (keys - layer * self.experts).tolist(),
                    staged,
                    read,
                    staged,
                )
            )

    def _prefetch(self, work: LayerWork, copies: list[Copies]) -> None:
        wanted = self.policies.prefetch.prefetch(work, self)
        if not wanted:
            return
        budget = self.sizes.prefetch_budget_bytes
        for layer, expert in wanted:
            if not (0 <= layer < self.layers and 0 <= expert < self.experts):
                raise PolicyError(
                    f"prefetch policy {self.policies.names.get('prefetch')!r}: no"
                    f" expert {layer, expert}"
                )
        shielded = [
            (self.gpu[self.home(layer)].memory, layer, expert)
            for layer, expert in wanted
        ]
        for memory, layer, expert in shielded:
            memory.holds[layer, expert] += (
                1  # a prefetch never evicts what the same prediction wants
            )
        for layer, expert in wanted:
            gpu = self.home(layer)
            tier = self.gpu[gpu]
            if tier.memory.state[layer, expert] != ABSENT:
                continue
            if budget is not None:
                if budget < self.shape.expert_bytes[layer]:
                    break
                budget -= self.shape.expert_bytes[layer]
            self._prefetch_one(work, gpu, layer, expert, copies)
        for memory, layer, expert in shielded:
            memory.holds[layer, expert] -= 1

    def _prefetch_one(
        self, work: LayerWork, gpu: int, layer: int, expert: int, copies: list[Copies]
    ) -> None:
        tier = self.gpu[gpu]
        keys = np.array([layer * self.experts + expert])
        landing_s = max(self.now_s, self._link_free_s[gpu]) + self._copy_s[gpu][layer]
        staged = tier.admit(work, layer, keys, np.array([landing_s]))
        if staged[0]:
            # One slot always stays for demand fetches.
            if len(self._ahead[gpu]) + 1 >= self.sizes.staging:
                tier.memory.drop_staged(keys)
                return
            self._ahead[gpu].add(int(keys[0]))
        self._link_free_s[gpu] = landing_s
        copies.append(
            Copies(
                PREFETCH, gpu, layer, [expert], staged, *self._bring(work, layer, keys)
            )
        )

    def _drop_ahead(self, gpu: int, key: int) -> None:
        self._ahead[gpu].discard(key)
        self.gpu[gpu].memory.drop_staged(np.array([key]))

    def _ask_replacements(self, gpu: int, plan: Plan) -> None:
        memory = self.gpu[gpu].memory
        for swap in self.gpu[gpu].cache.replacements(plan.work, self):
            if (
                memory.state[swap.outgoing] != RESIDENT
                or memory.state[swap.incoming] == RESIDENT
            ):
                if memory.staged[swap.incoming]:
                    plan.swaps.append((gpu, swap))
                    continue
                raise PolicyError(
                    f"cache policy {self.gpu[gpu].name!r}: swap {tuple(swap.outgoing)}"
                    f" -> {tuple(swap.incoming)}: the first must be resident and the"
                    " second must not be"
                )
            plan.swaps.append((gpu, swap))

    def _swap(self, gpu: int, swap: Swap, copies: list[Copies]) -> None:
        memory = self.gpu[gpu].memory
        if (
            memory.state[swap.outgoing] != RESIDENT
            or memory.holds[swap.outgoing]
            or memory.state[swap.incoming]
        ):
            return  # overtaken by a copy since it was decided
        layer, expert = swap.incoming
        key = layer * self.experts + expert
        landing_s = float(self._link_landings(gpu, layer, 1)[0])
        self.gpu[gpu].swap(
            swap.outgoing.layer * self.experts + swap.outgoing.expert, key, landing_s
        )
        read = self._bring(None, layer, np.array([key]))
        copies.append(Copies(REPLACE, gpu, layer, [expert], [False], *read))
