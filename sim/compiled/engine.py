"""A run in the compiled engine: arrays for the loop, and what it has found out."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hwprofiles import lanes
from moesim.machine_code.library import announce, load, missing
from moesim.machine_code.types import slots_of
from moesim.policies.base import CachePolicy, PolicyError
from moesim.policies.kernels import CacheKernels, State
from moesim.policies.planner.residency import GLOBAL
from moesim.sim.compiled import memory, records
from moesim.sim.compiled.loop import run_steps
from moesim.sim.compiled.planning import plan_layer_step
from moesim.sim.compiled.records import KEPT_ROUTING, NONE, World
from moesim.sim.compiled.support import (
    COMPILE_S,
    all_bring_kernels,
    answers_with_kernels,
    host_answers_with_kernels,
)
from moesim.sim.compiled.transfers import (
    DROP,
    LATE_DROP,
    LATE_KEEP,
    LATE_WAIT,
    STAGE,
    WAIT,
    end_operation,
    serve_worker,
)
from moesim.sim.noise import Noise
from moesim.sim.results import ReplayResult, SimulationError, draft_seconds
from moesim.traces.format.batch import RoutedStep
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.spans import CHUNK_ACCESSES, CHUNK_SPANS, CHUNK_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.memory_level import MemoryLevel
    from moesim.policies.planner.planner import Planner
    from moesim.sim.compiled.python_policies import PythonPolicies
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.timeline.spans import Chunk, Timeline

_LATE = {
    "drop": LATE_DROP,
    "active": LATE_DROP,
    "keep": LATE_KEEP,
    "wait": LATE_WAIT,
}
_PARTS = {
    "serve_worker": serve_worker,
    "end_operation": end_operation,
    "plan_layer_step": plan_layer_step,
}
"""Parts of the loop that it calls through its table."""

_NO_PLACE = {"stage": STAGE, "wait": WAIT, "drop": DROP}


class CompiledReplay:
    """One run, as `moesim.sim.replay.Replay`, of what the compiled engine supports."""

    def __init__(
        self,
        profile: HardwareProfile,
        costs: Costs,
        planner: Planner,
        timeline: Timeline,
        *,
        noise_seed: int | None = None,
    ) -> None:
        self._profile = profile
        self._costs = costs
        self._planner = planner
        self._timeline = timeline
        self._noise = None if noise_seed is None else Noise(profile, noise_seed)
        self._world = World()
        self._host_cache = World()
        self._noise_factors = np.zeros((len(profile.lanes), 0))
        self._kept: list[Any] = []  # states of policies, which the loop points to
        self._accesses: list[Chunk] = []
        self._passes: list[Chunk] = []
        self._steps = 0
        self._steps_given = 0
        self._layer_steps = 0
        loop: list[Any] = [run_steps, *_PARTS.values()]
        if missing(loop):
            announce("the engine", COMPILE_S)
        load(loop)
        for name, program in _PARTS.items():
            self._world.give_kernel(name, program)
        self._make_lanes()
        self._make_memories()
        self._make_constants()

    @property
    def _levels(self) -> list[MemoryLevel]:
        """Memories: GPUs, then limited host memory."""
        host = self._planner.host
        return self._planner.gpu + ([] if host is None else [host.level])

    @cached_property
    def _asked(self) -> PythonPolicies:
        """Policies that bring no kernels."""
        # What asks them has kernels of its own, which few runs need.
        from moesim.sim.compiled.python_policies import (  # noqa: PLC0415 - see above
            PythonPolicies,
        )

        return PythonPolicies(self._planner, self._world)

    # -- arrays -----------------------------------------------------------------------

    def _make_lanes(self) -> None:
        world = self._world
        shape = self._planner.shape
        profile = self._profile
        keys = shape.layers * shape.experts
        count = len(profile.lanes)

        world["run"] = np.zeros(1, records.RUN)
        world["run"]["read_step"] = NONE
        world["run"]["barred_layer"] = NONE
        world["run"]["evicted"] = NONE
        # Copies to every GPU and reads, queued and waiting; products; one of control.
        most = 2 * keys * (self._planner.gpus + 1) + 3 * shape.experts + 64
        world["operations"] = np.zeros(0, records.OPERATION)
        self._make_operations(most)

        table = np.zeros(count, records.LANE)
        table["first"] = NONE
        table["last"] = NONE
        kinds = [lanes.kind_of(name) for name in profile.lanes]
        for number, (name, kind) in enumerate(zip(profile.lanes, kinds, strict=True)):
            table[number]["gpu"] = lanes.gpu_of(name) if kind.per_gpu else NONE
            table[number]["end_rank"] = kind.end_rank
            table[number]["gated"] = kind.fills_memory
        workers = np.zeros(len(profile.workers), records.WORKER)
        for number, names in enumerate(profile.workers.values()):
            served = [profile.lanes.index(name) for name in names]
            workers[number]["count"] = len(served)
            workers[number]["lanes"][: len(served)] = served
            workers[number]["gated"] = table["gated"][served].any()
            table["worker"][served] = number
        world["lanes"] = table
        world["workers"] = workers
        world["running"] = np.zeros(len(workers) + 1, np.int64)

        slowdown = np.array(
            [
                [profile.contention.slowdown(a.name, b.name) for b in kinds]
                for a in kinds
            ],
            np.float64,
        )
        alone = bool((slowdown == 1.0).all())
        world["slowdown"] = np.zeros((0, 0)) if alone else slowdown
        world["held"] = np.zeros(shape.experts, np.int64)
        world["barred"] = np.zeros(shape.experts, np.int64)
        world["reports"] = np.zeros(most, records.REPORT)
        world["awaited"] = np.zeros(2 * shape.experts, np.int64)
        self._most = 3 * shape.experts + 2 * keys * (self._planner.gpus + 1) + 8
        self._make_spans(CHUNK_SPANS + 2 * self._most)

    def _make_operations(self, count: int) -> None:
        """Give the loop so many operations, and keep those that it has."""
        operations = np.zeros(count, records.OPERATION)
        held = self._world["operations"]
        operations[: len(held)] = held
        self._world["operations"] = operations

    def _make_spans(self, count: int) -> None:
        """Give the loop room for so many spans, and keep those that it has."""
        world = self._world
        used = int(world["run"]["spans"][0])
        for name, rows, dtype in (
            ("codes", 2, np.int8),
            ("places", 3, np.int32),
            ("times_s", 2, np.float64),
        ):
            larger = np.zeros((rows, count), dtype)
            if used:
                larger[:, :used] = world[name][:, :used]
            world[name] = larger
        nbytes = np.zeros(count, np.int64)
        if used:
            nbytes[:used] = world["nbytes"][:used]
        world["nbytes"] = nbytes
        if self._noise is None:
            world["noise"] = np.zeros((len(self._profile.lanes), 0))
        else:
            self._make_noise(count)

    def _make_noise(self, count: int) -> None:
        """Hold so many factors of each lane: no call of the loop starts more."""
        assert self._noise is not None
        lanes_total = len(self._profile.lanes)
        held = self._noise_factors.shape[1]
        larger = np.zeros((lanes_total, count))
        larger[:, :held] = self._noise_factors
        for lane in range(lanes_total):
            larger[lane, held:] = self._noise.factors(lane, count - held)
        self._noise_factors = larger

    def _make_memories(self) -> None:
        world = self._world
        planner = self._planner
        shape = planner.shape
        keys = shape.layers * shape.experts
        levels = self._levels

        world["state"] = np.array([level.memory.state.ravel() for level in levels])
        world["holds"] = np.zeros((len(levels), keys), np.int16)
        experts = np.zeros((len(levels), keys), records.EXPERT)
        for name in (
            "queued",
            "awaiting",
            "ahead",
            "first_copy",
            "last_copy",
            "replaces",
            "victim",
            "next_victim",
        ):
            experts[name] = NONE
        world["experts"] = experts
        world["pools"] = np.zeros((len(levels), shape.layers), records.POOL)
        world["memories"] = np.zeros(len(levels), records.MEMORY)
        world["prefetched_layers"] = np.zeros(shape.layers, np.int64)
        for m, level in enumerate(levels):
            self._make_memory(m, level)
        for name in ("copies", "promoted", "swaps", "released"):
            world[name] = np.zeros(planner.gpus * keys + shape.experts, records.COPY)
        world["keys"] = np.zeros((7, keys), np.int64)
        world["answers"] = np.zeros(keys, np.bool_)

    def _make_memory(self, m: int, level: MemoryLevel) -> None:
        table = self._world["memories"][m]
        pools = self._world["pools"][m]
        cache = level.cache
        books = level.memory
        kind = type(cache)
        table["is_global"] = books.size.scope == GLOBAL
        table["equal_sizes"] = books.equal_sizes
        table["admits_all"] = kind.admits is CachePolicy.admits
        table["in_launch_order"] = kind.precedence is CachePolicy.precedence
        table["replaces"] = cache.replaces
        table["hurries"] = cache.lands_by_next_visit
        table["staging"] = self._planner.sizes.staging
        table["used_high_bytes"] = books.used_high_bytes
        # What it starts with is all that it ever held.
        table["used_bytes"] = books.used_high_bytes
        for layer in range(1 if table["is_global"] else len(pools)):
            pools[layer]["free_bytes"] = books.free_bytes(layer)
        of_host = m == self._planner.gpus
        brought = self._kernels_of_cache(cache, of_host=of_host)
        world = self._host_cache if of_host else self._world
        world.give_kernels(brought)
        table["state"] = self._keep(brought.state)

    def _kernels_of_cache(self, cache: CachePolicy, *, of_host: bool) -> CacheKernels:
        answers = host_answers_with_kernels if of_host else answers_with_kernels
        if answers(cache):
            brought: CacheKernels = cache.kernels()
            return brought
        return self._asked.cache(cache, of_host=of_host)

    def _make_constants(self) -> None:
        world = self._world
        planner = self._planner
        profile = self._profile
        costs = self._costs
        shape = planner.shape
        gpus = planner.gpus
        prefetch = planner.policies.prefetch

        table = np.zeros(1, records.CONSTANTS)
        constants = table[0]
        constants["gpus"] = gpus
        constants["layers"] = shape.layers
        constants["experts"] = shape.experts
        constants["late"] = _LATE[prefetch.late]
        constants["no_place"] = _NO_PLACE[prefetch.no_place]
        budget = planner.sizes.prefetch_budget_bytes
        constants["budget_bytes"] = NONE if budget is None else budget
        constants["dispatch_s"] = costs.dispatch_s
        constants["cpu_first_s"] = costs.cpu_first_s
        constants["gpu_first_s"] = costs.gpu_first_s
        tiered = planner.host is not None
        constants["planning_s"] = costs.planning_terms(
            planner.assignment_name, tiered=tiered, own_s=planner.own_planning_s
        )
        constants["first_op_s"] = costs.first_op_terms(tiered=tiered)
        constants["join_s"] = costs.join_terms(tiered=tiered)
        constants["host"] = NONE
        layers = range(shape.layers)
        sizes = np.array(shape.sizes_by_expert(), np.int64).reshape(-1)
        # One expert of each size stands for all of them.
        _, firsts, size_of = np.unique(sizes, return_index=True, return_inverse=True)
        self._firsts = firsts
        world["size_of"] = size_of.astype(np.int16)
        world["size_bytes"] = sizes[firsts]
        world["read_s"] = np.zeros(0)
        if tiered:
            constants["host"] = gpus
            constants["host_cache"] = self._host_cache.table.ctypes.data
            world["read_s"] = np.array(self._by_size(costs.read_s), np.float64)
            constants["first_read_s"] = costs.ssd_first_s
            constants["dense_after_read"] = costs.after_read("dense")
            constants["copy_after_read"] = costs.after_read("h2d")
            constants["compute_after_read"] = costs.after_read("cpu")
        constants["splits_layers"] = planner.splits_layers
        # Where all memory is shared, results need no way back.
        constants["moves_activations"] = not profile.shares_memory
        constants["writes_back"] = planner.policies.writes_back
        constants["prefetches"] = prefetch.prefetches
        constants["requeue"] = prefetch.requeue
        constants["oracle"] = prefetch.oracle
        constants["reads_routing"] = prefetch.reads_routing
        self._take_policies(constants)
        world["constants"] = table

        for name, seconds_of in (
            ("copy_s", costs.copy_s),
            ("back_s", costs.writeback_s),
        ):
            by_gpu = [
                self._by_size(partial(seconds_of, gpu=gpu)) for gpu in range(gpus)
            ]
            world[name] = np.array(by_gpu, np.float64)
        world["mean_copy_s"] = np.array([costs.copy_s(layer) for layer in layers])
        evaluations = [
            [planner.evaluations(layer, phase) for phase in Phase]
            for layer in range(shape.layers)
        ]
        world["evaluations"] = np.array(evaluations, np.int64)
        self._gates = bool(world["evaluations"][..., 0].any())
        names = [lanes.CONTROL.lane(), lanes.SSD.lane(), lanes.CPU.lane()]
        for kind in (lanes.GPU, lanes.H2D, lanes.D2H):
            names += kind.lanes(gpus)
        by_use = [profile.lanes.index(name) for name in names]
        world["lane_by_use"] = np.array(by_use, np.int64)
        control, _, _, first_gpu, *_ = by_use
        worker_of = world["lanes"]["worker"]
        constants["inline"] = worker_of[control] == worker_of[first_gpu]
        if constants["inline"]:
            world["workers"]["busy"][worker_of[control]] = True

        world["work_s"] = np.zeros((4, gpus * shape.experts))
        world["work_state"] = np.zeros((2, gpus * shape.experts), np.int8)
        world["work_lanes"] = np.zeros(shape.experts, np.int8)
        world["work_order"] = np.zeros(shape.experts, np.int64)
        world["work_link_s"] = np.zeros(gpus)
        world["host_work_s"] = np.zeros((4, gpus * shape.experts))
        world["host_work_state"] = np.zeros(shape.experts, np.int8)
        world["host_work_experts"] = np.zeros((2, shape.experts), np.int32)
        world["counts"] = np.zeros(shape.experts, np.int32)
        world["ahead_tokens"] = np.zeros(shape.experts, np.int32)
        world["work_precomputed"] = np.zeros(shape.experts, np.bool_)
        world["work_deferred"] = np.zeros(shape.experts, np.bool_)
        world["work_ranks"] = np.zeros(shape.experts, np.int32)
        self._most_tokens = -1
        self._activation_s = np.zeros(0)

    def _take_policies(self, constants: Any) -> None:
        """Take what policies bring, and note what they do besides answering."""
        planner = self._planner
        prefetch = planner.policies.prefetch
        policies = planner.policies
        constants["alters"] = policies.routing.alters
        constants["precomputes"] = policies.assignment.precomputes
        constants["defers"] = policies.assignment.defers
        constants["foretells"] = prefetch.foretells
        cache = policies.caches[0]
        constants["replaces_first"] = cache.replaces and cache.replaces_first
        constants["choosing_s"] = cache.choosing_s

        # Its weights are shown to Python alone, and so are those of altered routing.
        by_kernels = all_bring_kernels(planner)
        constants["notes_mass"] = by_kernels
        for name, policy, is_kernel in (
            ("assignment", policies.assignment, answers_with_kernels),
            ("prefetch", prefetch, answers_with_kernels),
            ("routing", policies.routing, lambda _: by_kernels),
        ):
            if is_kernel(policy):
                brought = policy.kernels()
            else:
                brought = getattr(self._asked, name)(policy)
            self._world.give_kernels(brought)
            constants[name] = self._keep(brought.state)
        self._alters = policies.routing.alters
        self._notes_mass = self._alters and by_kernels
        self._drafts_with = prefetch if prefetch.foretells else None

    def _by_size(self, seconds_of: Callable[..., float]) -> list[float]:
        """Seconds of one expert of each size, of its layer and itself."""
        experts = self._planner.shape.experts
        places = [divmod(key, experts) for key in self._firsts.tolist()]
        return [seconds_of(layer, expert=expert) for layer, expert in places]

    def _keep(self, state: State) -> list[int]:
        """Where the arrays of a policy's state lie, and their sizes."""
        self._kept.append(state)
        return slots_of(state)

    # -- blocks -----------------------------------------------------------------------

    def run(
        self,
        blocks: Iterable[LayerSteps],
        progress: Callable[[RoutedStep], None] | None = None,
    ) -> ReplayResult:
        """Replay all blocks and return when the last layer step has joined.

        Args:
            blocks: as `moesim.traces.format.layer_steps.layer_steps` cuts them.
            progress: called after each forward pass, whose layers it is not told.

        Raises:
            PolicyError: a policy answered something illegal.
            SimulationError: the loop got stuck: our bug.
        """
        for block in blocks:
            self._run(block, progress)
        self._give_spans()
        self._give_accesses()
        self._give_passes()
        run = self._world["run"][0]
        for m, level in enumerate(self._levels):
            high_bytes = int(self._world["memories"][m]["used_high_bytes"])
            level.memory.used_high_bytes = high_bytes
        return ReplayResult(
            steps=self._steps,
            layer_steps=self._layer_steps,
            events=int(run["events"] + run["turns"]),
            makespan_s=float(run["now_s"]),
        )

    def _run(
        self, block: LayerSteps, progress: Callable[[RoutedStep], None] | None
    ) -> None:
        world = self._world
        run = world["run"][0]
        passes = self._put(block)
        if block.routed is not None:
            self._asked.begin(block)
        begin = 0
        while begin < len(block.layer):
            self._draw()
            if run["operations"] + self._most > len(world["operations"]):
                self._make_operations(2 * len(world["operations"]))
            end = run_steps(world.table.ctypes.data, begin, CHUNK_SPANS, CHUNK_ACCESSES)
            if run["error"]:
                self._fail(int(run["error"]), block, end)
            self._note_accesses(block, begin, end)
            if self._notes_mass:
                mass = world["gate_mass"][begin:end]
                self._planner.gate_mass.extend(mass[~np.isnan(mass)].tolist())
            full_spans = run["spans"] >= CHUNK_SPANS
            full_accesses = run["layer_steps"] >= CHUNK_ACCESSES
            at_end = end == 0 or world["head_s"][end - 1] >= 0.0
            # The loop stopped for want of room: within a pass, or before a draft.
            is_short = not at_end or not (full_spans or full_accesses)
            if full_spans and at_end:
                self._give_spans()
            elif end < len(block.layer) and is_short:
                self._make_spans(2 * len(world["nbytes"]))
            if full_accesses and at_end:
                self._give_accesses()
            self._note_passes(
                block, passes[(passes >= begin) & (passes < end)], progress
            )
            self._layer_steps += end - begin
            begin = end

    def _put(self, block: LayerSteps) -> np.ndarray:
        """Give the loop a block; return the last layer steps of its passes."""
        world = self._world
        costs = self._costs
        shape = self._planner.shape
        count = len(block.layer)
        last = np.flatnonzero(block.layer == shape.layers - 1)

        world["step"] = np.ascontiguousarray(block.step, np.int64)
        world["batch"] = np.ascontiguousarray(block.batch, np.int64)
        world["rows"] = np.ascontiguousarray(block.rows, np.int64)
        world["layer"] = np.ascontiguousarray(block.layer, np.int64)
        world["edges"] = np.ascontiguousarray(block.edges, np.int64)
        world["phase"] = np.ascontiguousarray(block.phase, np.int8)
        world["active"] = np.ascontiguousarray(block.experts, np.int32)
        world["tokens"] = np.ascontiguousarray(block.tokens, np.int32)
        scores = np.zeros((0, 0)) if block.scores is None else block.scores
        world["scores"] = np.ascontiguousarray(scores)
        self._put_predictions(block)
        self._put_routing(block)
        self._put_drafts(block, last)
        world["start_s"] = np.zeros(count)
        world["end_s"] = np.zeros(count)

        tokens = block.pass_tokens[last]
        dense_s, head_s = costs.dense_of_passes(
            tokens, block.context_tokens[last], block.sequences[last]
        )
        if block.drafted is not None:
            # Of a draft every token is compared with what the model says.
            outputs = np.where(block.drafted[last], tokens, block.sequences[last])
            _, head_s = costs.dense_of_passes(
                tokens, block.context_tokens[last], outputs
            )
        gate_s = np.zeros(len(last))
        if self._gates:
            gate_s[:] = [costs.gate_s(count) for count in tokens.tolist()]
        heads = np.full(count, -1.0)
        heads[last] = head_s
        world["head_s"] = heads
        world["dense_s"] = np.repeat(dense_s, shape.layers)
        world["gate_s"] = np.repeat(gate_s, shape.layers)

        # Predictions may give an expert more tokens than it gets.
        most_tokens = int(block.rows.max(initial=0))
        if most_tokens > self._most_tokens:
            tokens = np.arange(most_tokens + 1)
            layers = range(shape.layers)
            world["cpu_s"] = np.array([costs.cpu_s(layer, tokens) for layer in layers])
            world["gpu_s"] = np.array([costs.gpu_s(layer, tokens) for layer in layers])
            world["cpu_by_size_s"] = self._by_size_s(costs.cpu_s, tokens)
            world["gpu_by_size_s"] = self._by_size_s(costs.gpu_s, tokens)
            self._most_tokens = most_tokens
        most_rows = int(block.rows.max(initial=0))
        if most_rows >= len(self._activation_s):
            by_rows = [costs.activation_s(rows) for rows in range(most_rows + 1)]
            self._activation_s = np.array(by_rows)
        world["activation_s"] = self._activation_s[block.rows]
        return last

    def _by_size_s(
        self, seconds_of: Callable[..., np.ndarray], tokens: np.ndarray
    ) -> np.ndarray:
        """Seconds of one expert of each size, float64 [S, T + 1]."""
        shape = self._planner.shape
        rows = []
        for key in self._firsts.tolist():
            layer, expert = divmod(key, shape.experts)
            experts = np.full(len(tokens), expert)
            rows.append(seconds_of(layer, tokens, experts=experts))
        return np.array(rows)

    def _put_predictions(self, block: LayerSteps) -> None:
        """Give the loop what the prefetch policy reads of a block."""
        world = self._world
        experts = self._planner.shape.experts
        if block.workload is None or block.score_sums is None:
            # One layer step without predictors stands for all.
            world["workload"] = np.zeros((1, 0, experts), np.int32)
            world["score_sums"] = np.zeros((1, 0, experts), np.float32)
        else:
            world["workload"] = block.workload
            world["score_sums"] = block.score_sums

    def _put_routing(self, block: LayerSteps) -> None:
        """Give the loop the routing of tokens, and room for what becomes of it."""
        world = self._world
        shape = self._planner.shape
        count = len(block.layer)
        row_edges = np.zeros(count + 1, np.int64)
        np.cumsum(block.rows, out=row_edges[1:])
        world["row_edges"] = row_edges
        nothing = np.zeros((0, 0))
        for name, column in (
            ("routing", block.routing),
            ("token_scores", block.token_scores),
            ("token_weights", block.token_weights),
            ("token_predicted", block.token_predicted),
        ):
            dtype = np.uint16 if name == "routing" else np.float64
            given = nothing if column is None else column
            world[name] = np.ascontiguousarray(given, dtype)

        world["gate_mass"] = np.full(count if self._notes_mass else 0, np.nan)
        alters = self._alters
        tokens = int(block.rows.max(initial=0))
        ahead = self._planner.policies.assignment.precomputes
        room = tokens * shape.experts if alters or ahead else 0
        world["routed"] = np.zeros((KEPT_ROUTING + 1, room), np.uint16)
        accesses = count * shape.experts if alters else len(block.experts)
        if alters:
            world["served"] = np.zeros(accesses, np.int32)
            world["served_tokens"] = np.zeros(accesses, np.int32)
            world["served_edges"] = np.zeros(count + 1, np.int64)
        else:
            world["served"] = world["active"]
            world["served_tokens"] = world["tokens"]
            world["served_edges"] = world["edges"]
        world["lane_of"] = np.zeros(accesses, np.int8)
        world["state_of"] = np.zeros(accesses, np.int8)

    def _put_drafts(self, block: LayerSteps, last: np.ndarray) -> None:
        """Give the loop what is drafted before each pass of a block."""
        world = self._world
        layers = self._planner.shape.layers
        world["run"]["drafts"] = 0
        world["drafts"] = np.zeros((0, self._planner.shape.top_k), np.int32)
        drafted = np.zeros(len(block.layer), np.int64)
        draft_s = np.zeros(len(block.layer))
        if block.drafted is not None:
            first = last - (layers - 1)
            drafted[first] = block.drafted[last]
            draft_s[first] = draft_seconds(
                self._costs, self._planner, block.context_tokens[last]
            )
            if self._drafts_with is not None:
                # Rows of each drafted token, layer by layer: [D, L].
                rows = [
                    world["row_edges"][place : place + layers] + token
                    for place, count in zip(first, drafted[first], strict=True)
                    for token in range(count)
                ]
                if rows:
                    tokens = world["routing"][np.array(rows)]
                    known = self._drafts_with.drafted(tokens)
                    world["drafts"] = np.ascontiguousarray(
                        known.reshape(-1, known.shape[2]), np.int32
                    )
        world["drafted"] = drafted
        world["draft_s"] = draft_s

    def _draw(self) -> None:
        """Draw as many factors as operations have used."""
        if self._noise is None:
            return
        factors = self._noise_factors
        drawn = self._world["lanes"]["drawn"]
        for lane, used in enumerate(drawn.tolist()):
            if used:
                factors[lane, :-used] = factors[lane, used:]
                factors[lane, -used:] = self._noise.factors(lane, used)
        drawn[:] = 0
        self._world["noise"] = factors

    # -- results ----------------------------------------------------------------------

    def _note_accesses(self, block: LayerSteps, begin: int, end: int) -> None:
        edges = self._world["served_edges"][begin : end + 1]
        first = int(edges[0])
        last = int(edges[-1])
        counts = np.diff(edges)
        self._accesses.append(
            {
                "step": np.repeat(block.step[begin:end].astype(np.int32), counts),
                "layer": np.repeat(block.layer[begin:end].astype(np.int16), counts),
                "expert": self._world["served"][first:last],
                "tokens": self._world["served_tokens"][first:last],
                "lane": self._world["lane_of"][first:last],
                "state": self._world["state_of"][first:last],
            }
        )

    def _give_accesses(self) -> None:
        self._give("accesses", self._accesses)
        self._accesses = []
        self._world["run"]["layer_steps"] = 0

    def _give_spans(self) -> None:
        world = self._world
        count = int(world["run"]["spans"][0])
        world["run"]["spans"] = 0
        codes = world["codes"][:, :count].copy()
        places = world["places"][:, :count]
        times_s = world["times_s"][:, :count].copy()
        self._timeline.take(
            "timeline",
            {
                "lane": codes[0],
                "kind": codes[1],
                "step": places[0].copy(),
                "layer": places[1].astype(np.int16),
                "expert": places[2].copy(),
                "start_s": times_s[0],
                "end_s": times_s[1],
                "bytes": world["nbytes"][:count].copy(),
            },
        )

    def _note_passes(
        self,
        block: LayerSteps,
        last: np.ndarray,
        progress: Callable[[RoutedStep], None] | None,
    ) -> None:
        """Note forward passes that have ended, by their last layer steps."""
        world = self._world
        made = block.pass_tokens if block.made is None else block.made
        self._passes.append(
            {
                "step": block.step[last].astype(np.int32),
                "phase": block.phase[last],
                "batch": block.batch[last].astype(np.int32),
                "tokens": made[last].astype(np.int32),
                "sequences": block.sequences[last].astype(np.int32),
                "start_s": world["start_s"][last],
                "end_s": world["end_s"][last],
            }
        )
        self._steps += len(last)
        if self._steps - self._steps_given >= CHUNK_STEPS:
            self._give_passes()
        if progress is None:
            return
        for place in last.tolist():
            progress(
                RoutedStep(
                    step=int(block.step[place]),
                    phase=Phase(int(block.phase[place])),
                    batch=int(block.batch[place]),
                    tokens=int(block.pass_tokens[place]),
                    context_tokens=int(block.context_tokens[place]),
                    sequences=int(block.sequences[place]),
                    layers=[],
                    kept=None if block.made is None else int(block.made[place]),
                )
            )

    def _give_passes(self) -> None:
        self._give("steps", self._passes)
        self._passes = []
        self._steps_given = self._steps

    def _give(self, table: str, parts: list[Chunk]) -> None:
        if parts:
            chunk = {
                name: np.concatenate([part[name] for part in parts])
                for name in parts[0]
            }
            self._timeline.take(table, chunk)

    def _fail(self, error: int, block: LayerSteps, s: int) -> None:
        """Raise what a run has failed with.

        Raises:
            PolicyError: a policy answered something illegal.
            SimulationError: nothing ran although something was awaited.
        """
        # What a policy has raised comes first: the loop has gone on with no answer.
        if self._asked.raised is not None:
            raise self._asked.raised
        names = self._planner.policies.names
        kind, problem = _ERRORS[error]
        where = f"step {block.step[s]}, layer {block.layer[s]}"
        if not kind:
            raise SimulationError(f"{where}: {problem}")
        raise PolicyError(f"{kind} policy {names.get(kind)!r}: {where}: {problem}")


_ERRORS = {
    memory.BAD_ASSIGNMENT: (
        "assignment",
        "expected a lane of each active expert and an order that is a permutation",
    ),
    memory.BAD_VICTIMS: ("cache", "victims are not distinct members of the candidates"),
    memory.BAD_PREFETCH: ("prefetch", "no such expert"),
    memory.BAD_SWAP: (
        "cache",
        "swap: the first must be resident and the second must not be",
    ),
    memory.STUCK: ("", "nothing runs, although something is awaited"),
}
