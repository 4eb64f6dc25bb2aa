"""Policies that bring no kernels, in compiled runs: the loop asks their Python.

Everything between two answers is compiled all the same: lanes, copies, the books of
memories, records.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.machine_code.functions import call_address, compiled
from moesim.policies.base import (
    DEFERRED,
    IN_FLIGHT,
    RESIDENT,
    CachePolicy,
    ExpertKey,
    LayerWork,
)
from moesim.policies.kernels import (
    ACCESSED,
    ADMITS,
    ASSIGN,
    FORETOLD,
    KERNELS,
    MOVED,
    PRECEDENCE,
    PRECOMPUTE,
    PREFETCH,
    REPLACEMENTS,
    ROUTE,
    SERIAL,
    VICTIMS,
    WAITS,
    AssignmentKernels,
    CacheKernels,
    GateWork,
    KernelView,
    PrefetchKernels,
    RoutingKernels,
    State,
    Work,
)
from moesim.policies.planner.copies import BETWEEN_LAYERS
from moesim.policies.planner.layer_work import check_ahead
from moesim.policies.planner.memory_level import preferred
from moesim.sim.compiled.memory import BAD_ASSIGNMENT, BAD_VICTIMS, RAISED
from moesim.sim.compiled.records import KEPT_ROUTING
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.base import AssignmentPolicy, PrefetchPolicy, RoutingPolicy
    from moesim.policies.planner.planner import Planner
    from moesim.sim.compiled.records import World
    from moesim.traces.format.batch import RoutedLayer
    from moesim.traces.format.layer_steps import LayerSteps


QUESTIONS = tuple(KERNELS)
"""What policies are asked; a question's number is its place here."""

COUNTS = 0
INCOMING = 1
CANDIDATES = 2
ANSWERS = 3
"""Rows of the marks. The first holds two counts of keys, and a number as the answer."""

ROWS = 4

_ROUTE = QUESTIONS.index("route")
_ASSIGN = QUESTIONS.index("assign")
_PRECOMPUTE = QUESTIONS.index("precompute")
_FORETOLD = QUESTIONS.index("foretold")
_PREFETCH = QUESTIONS.index("prefetch")
_ACCESSED = QUESTIONS.index("accessed")
_ADMITS = QUESTIONS.index("admits")
_PRECEDENCE = QUESTIONS.index("precedence")
_VICTIMS = QUESTIONS.index("victims")
_ADMITTED = QUESTIONS.index("admitted")
_EVICTED = QUESTIONS.index("evicted")
_REPLACEMENTS = QUESTIONS.index("replacements")


@compiled(ASSIGN)
def ask_assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> int:
    """Let Python fill in the lanes and the order, where they lie."""
    call_address(state.integers[0], state.integers[1], _ASSIGN)
    return state.marks[COUNTS, 2]


@compiled(ROUTE)
def ask_route(state: State, gate: GateWork, routing: np.ndarray) -> int:
    """Let Python fill in the experts of every token, where they lie."""
    call_address(state.integers[0], state.integers[1], _ROUTE)
    return state.marks[COUNTS, 2]


@compiled(PRECOMPUTE)
def ask_precompute(
    state: State, gate: GateWork, routing: np.ndarray, tokens: np.ndarray
) -> int:
    """Let Python fill in tokens, where they lie."""
    call_address(state.integers[0], state.integers[1], _PRECOMPUTE)
    return state.marks[COUNTS, 2]


@compiled(FORETOLD)
def ask_foretold(
    state: State,
    predicted: np.ndarray,
    draft_s: float,
    view: KernelView,
    named: np.ndarray,
) -> int:
    """Let Python fill in keys, where they lie."""
    call_address(state.integers[0], state.integers[1], _FORETOLD)
    return state.marks[COUNTS, 2]


@compiled(PREFETCH)
def ask_prefetch(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    """Let Python fill in keys, where they lie."""
    call_address(state.integers[0], state.integers[1], _PREFETCH)
    return state.marks[COUNTS, 2]


@compiled(ACCESSED)
def ask_accessed(state: State, work: Work) -> None:
    """Tell how many experts are meant."""
    state.marks[COUNTS, 0] = len(work.experts)
    call_address(state.integers[0], state.integers[1], _ACCESSED)


@compiled(ADMITS)
def ask_admits(
    state: State, work: Work, incoming: np.ndarray, answers: np.ndarray
) -> None:
    """Hand over keys, take an answer for each."""
    count = len(incoming)
    state.marks[COUNTS, 0] = count
    state.marks[COUNTS, 1] = work.layer
    state.marks[INCOMING, :count] = incoming
    call_address(state.integers[0], state.integers[1], _ADMITS)
    for n in range(count):
        answers[n] = state.marks[ANSWERS, n] != 0


@compiled(PRECEDENCE)
def ask_precedence(state: State, incoming: np.ndarray) -> None:
    """Hand over keys, take them in another order."""
    count = len(incoming)
    state.marks[COUNTS, 0] = count
    state.marks[INCOMING, :count] = incoming
    call_address(state.integers[0], state.integers[1], _PRECEDENCE)
    incoming[:] = state.marks[ANSWERS, :count]


@compiled(VICTIMS)
def ask_victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Hand over keys and candidates, take a victim for each."""
    count = len(incoming)
    state.marks[COUNTS, 0] = count
    state.marks[COUNTS, 1] = len(candidates)
    state.marks[INCOMING, :count] = incoming
    state.marks[CANDIDATES, : len(candidates)] = candidates
    call_address(state.integers[0], state.integers[1], _VICTIMS)
    chosen[:] = state.marks[ANSWERS, :count]


@compiled(MOVED)
def ask_admitted(state: State, keys: np.ndarray) -> None:
    """Hand over keys."""
    state.marks[COUNTS, 0] = len(keys)
    state.marks[INCOMING, : len(keys)] = keys
    call_address(state.integers[0], state.integers[1], _ADMITTED)


@compiled(MOVED)
def ask_evicted(state: State, keys: np.ndarray) -> None:
    """Hand over keys."""
    state.marks[COUNTS, 0] = len(keys)
    state.marks[INCOMING, : len(keys)] = keys
    call_address(state.integers[0], state.integers[1], _EVICTED)


@compiled(REPLACEMENTS)
def ask_replacements(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Let Python fill in keys, where they lie."""
    call_address(state.integers[0], state.integers[1], _REPLACEMENTS)
    return state.marks[COUNTS, 2]


ASKING = {
    "accessed": ask_accessed,
    "admits": ask_admits,
    "precedence": ask_precedence,
    "victims": ask_victims,
    "admitted": ask_admitted,
    "evicted": ask_evicted,
    "replacements": ask_replacements,
}
"""Kernels of caches by their questions."""

_PHASES = tuple(Phase)
"""By code."""

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


class MachineArrays:
    """A `MachineView` of a compiled run."""

    def __init__(self, planner: Planner, world: World) -> None:
        self.shape = planner.shape
        self.layers = planner.layers
        self.experts = planner.experts
        self.gpus = planner.gpus
        self.cpu_first_s = planner.cpu_first_s
        self.capacity = planner.capacity
        self.home = planner.home
        self.copy_s = planner.copy_s
        self.cpu_s = planner.cpu_s
        self.gpu_s = planner.gpu_s
        self._run = world["run"]
        self._memories = world["memories"]
        self._state = world["state"].reshape(-1, self.layers, self.experts)

    @property
    def gap_s(self) -> float:
        """See `MachineView`."""
        return float(self._run["gap_s"][0])

    def resident(self, layer: int, gpu: int = 0) -> np.ndarray:
        """See `MachineView`."""
        mask: np.ndarray = self._state[gpu, layer] == RESIDENT
        return mask

    def in_flight(self, layer: int, gpu: int = 0) -> np.ndarray:
        """See `MachineView`."""
        mask: np.ndarray = self._state[gpu, layer] == IN_FLIGHT
        return mask

    def link_wait_s(self, gpu: int = 0) -> float:
        """See `MachineView`."""
        link = self._memories[gpu]
        left_s = max(0.0, float(link["busy_until_s"] - self._run["now_s"][0]))
        return left_s + float(link["queued_s"])


class PythonPolicies:
    """Answers the questions of a compiled run with the policies' own methods.

    Attributes:
        raised: what a policy has raised; the run ends then.
    """

    def __init__(self, planner: Planner, world: World) -> None:
        self.raised: BaseException | None = None
        self._planner = planner
        self._world = world
        self._run = world["run"]
        self._place = self._run["place"]
        self._rows = 1 if planner.splits_layers else planner.gpus
        self._as_given = np.arange(planner.experts)
        keys = planner.layers * planner.experts
        self._marks = np.zeros((ROWS, max(keys, 4)), np.int64)
        self._function = _FUNCTION(self._ask)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value
        self._answers: list[list[Callable[[], None]]] = []
        self._view: Any = None
        self._block: LayerSteps | None = None
        self._made: tuple[int, LayerWork] | None = None
        self._rerouted: RoutedLayer | None = None

    def begin(self, block: LayerSteps) -> None:
        """Take the next block, whose layer steps the loop will ask about."""
        self._block = block
        self._made = None
        self._view = MachineArrays(self._planner, self._world)

    # -- kernels ----------------------------------------------------------------------

    def assignment(self, policy: AssignmentPolicy) -> AssignmentKernels:
        """Kernels that ask an assignment policy."""

        def assign() -> None:
            work = self._work()
            lanes, order, serial, waits = policy.assign(work, self._view)
            count = len(work.experts)
            if order is None:
                order = self._as_given[:count]
            lanes = np.asarray(lanes)
            order = np.asarray(order)
            legal = len(lanes) == count == len(order)
            # Other types could hide a lane that is none.
            if legal and lanes.dtype != np.int8 and count:
                legal = lanes.min() >= DEFERRED and lanes.max() <= self._planner.gpus
            if not legal:
                self._run["error"] = BAD_ASSIGNMENT
                return
            self._world["work_lanes"][:count] = lanes
            self._world["work_order"][:count] = order
            self._marks[COUNTS, 2] = SERIAL * serial + WAITS * waits

        def precompute() -> None:
            work = self._work()
            named = policy.precompute(work, self._view)
            self._marks[COUNTS, 2] = 0
            if named is None or not len(named.experts):
                return
            check_ahead(self._planner, work, named)
            self._world["ahead_tokens"][named.experts] = named.tokens
            self._marks[COUNTS, 2] = 1

        answers = {"assign": assign, "precompute": precompute}
        return AssignmentKernels(ask_assign, self._state(answers), ask_precompute)

    def routing(self, policy: RoutingPolicy) -> RoutingKernels:
        """Kernels that ask a routing policy."""
        del policy  # the planner's, which notes what it keeps of the gates

        def route() -> None:
            s = int(self._place[0])
            block = self._block
            assert block is not None
            assert block.routed is not None
            rerouted = self._planner.rerouting.route(
                self._view,
                block.routed[s],
                int(block.step[s]),
                _PHASES[block.phase[s]],
            )
            self._rerouted = rerouted
            routing = rerouted.routing
            room = self._world["routed"][rerouted.layer % KEPT_ROUTING]
            room[: routing.size] = routing.reshape(-1)
            self._marks[COUNTS, 2] = routing.shape[1]

        return RoutingKernels(ask_route, self._state({"route": route}))

    def prefetch(self, policy: PrefetchPolicy) -> PrefetchKernels:
        """Kernels that ask a prefetch policy."""
        experts = self._planner.experts

        def give(named: Sequence[ExpertKey]) -> None:
            keys = [
                layer * experts + expert
                if 0 <= expert < experts
                else self._planner.layers * experts
                for layer, expert in named
            ]
            self._give(5, keys)

        def foretold() -> None:
            layers = self._planner.layers
            first = int(self._run["drafts"][0]) * layers
            token = self._world["drafts"][first : first + layers].astype(np.uint16)
            draft_s = float(self._world["draft_s"][self._place[0]])
            give(policy.foretold(token, draft_s, self._view))

        answers = {
            "prefetch": lambda: give(policy.prefetch(self._work(), self._view)),
            "foretold": foretold,
        }
        return PrefetchKernels(ask_prefetch, self._state(answers), ask_foretold)

    def cache(self, policy: CachePolicy, *, of_host: bool = False) -> CacheKernels:
        """Kernels that ask a cache policy."""
        marks = self._marks
        name = self._planner.policies.names.get("cache", "cache")

        def incoming() -> np.ndarray:
            count = marks[COUNTS, 0]
            keys: np.ndarray = marks[INCOMING, :count].copy()
            return keys

        def answer(answers: np.ndarray) -> None:
            count = marks[COUNTS, 0]
            if len(answers) != count:
                self._run["error"] = BAD_VICTIMS
                return
            marks[ANSWERS, :count] = answers

        def accessed() -> None:
            policy.accessed(self._host_work() if of_host else self._work())

        def admits() -> None:
            between = marks[COUNTS, 1] < 0
            work = BETWEEN_LAYERS if between else self._work()
            answer(policy.admits(work, incoming()))

        def victims() -> None:
            count = marks[COUNTS, 1]
            candidates = marks[CANDIDATES, :count].copy()
            answer(policy.victims(incoming(), candidates))

        def replacements() -> None:
            swaps = policy.replacements(self._work(), self._view)
            self._give(1, [self._key(swap.incoming) for swap in swaps])
            self._give(0, [self._key(swap.outgoing) for swap in swaps])

        state = self._state(
            {
                "accessed": accessed,
                "admits": admits,
                "precedence": lambda: answer(preferred(policy, name, incoming())),
                "victims": victims,
                "admitted": lambda: policy.admitted(incoming()),
                "evicted": lambda: policy.evicted(incoming()),
                "replacements": replacements,
            }
        )
        # What a policy leaves out needs no Python.
        asked: dict[str, Any] = {
            name: ASKING[name]
            for name in CacheKernels._fields
            if name != "state" and _overrides(policy, name)
        }
        return CacheKernels(state, **asked)

    def _state(self, answers: dict[str, Callable[[], None]]) -> State:
        """The state of one policy: its number, and the marks that all share."""
        number = len(self._answers)
        self._answers.append(
            [answers.get(question, _nothing) for question in QUESTIONS]
        )
        return State(
            np.zeros((0, 0)),
            self._marks,
            np.zeros(0),
            np.array([self._address, number], np.int64),
        )

    # -- questions --------------------------------------------------------------------

    def _ask(self, policy: int, question: int) -> None:
        """What the C function does. It must not raise: the loop is no Python."""
        try:
            self._answers[policy][question]()
        except BaseException as error:  # noqa: BLE001 - raised again when the loop is left
            self.raised = error
            self._marks[COUNTS, 2] = 0
            # The loop ends soon; until then it needs keys that there are.
            self._marks[ANSWERS] = -1
            if QUESTIONS[question] == "precedence":
                self._marks[ANSWERS] = self._marks[INCOMING]
            self._run["error"] = RAISED

    def _key(self, expert: ExpertKey) -> int:
        return expert.layer * self._planner.experts + expert.expert

    def _give(self, row: int, keys: list[int]) -> None:
        room = self._world["keys"][row]
        if len(keys) > len(room):
            # What is named twice is no copy.
            keys = list(dict.fromkeys(keys))[: len(room)]
        room[: len(keys)] = keys
        self._marks[COUNTS, 2] = len(keys)

    def _work(self) -> LayerWork:
        """The work of the layer step under way, in arrays of its own."""
        looked = int(self._run["looked"][0])
        # One object for all policies, as the planner makes it.
        if self._made is not None and self._made[0] == looked:
            return self._made[1]
        work = self._of_layer_step(int(self._place[0]))
        self._made = looked, work
        return work

    def _of_layer_step(self, s: int) -> LayerWork:
        block = self._block
        assert block is not None
        assert block.routed is not None
        routed = self._rerouted or block.routed[s]
        world = self._world
        # Copies, as policies may keep what they are shown.
        count = len(routed.experts)
        rows = self._rows
        seconds = world["work_s"][:, : rows * count].copy()
        link_s = world["work_link_s"][:rows].copy()
        # Mostly one number, of which numpy's own question takes microseconds.
        waits = link_s[0] != 0.0 if rows == 1 else link_s.any()
        return LayerWork(
            step=int(block.step[s]),
            layer=routed.layer,
            phase=_PHASES[block.phase[s]],
            experts=routed.experts,
            tokens=routed.tokens,
            state=world["work_state"][0, :count].copy(),
            cpu_s=seconds[0, :count],
            host_s=seconds[1, :count],
            gpu_s=seconds[2].reshape(rows, count),
            arrive_s=seconds[3].reshape(rows, count),
            routing=routed.routing,
            weights=routed.weights,
            scores=routed.scores,
            predicted=routed.predicted,
            batch=int(block.batch[s]),
            precomputed=(
                world["work_precomputed"][:count].copy()
                if self._run["precomputed"][0]
                else None
            ),
            link_s=link_s if waits else None,
        )

    def _host_work(self) -> LayerWork:
        """What of it is asked of host memory."""
        work = self._work()
        world = self._world
        count = int(self._marks[COUNTS, 0])
        rows = len(work.gpu_s)
        seconds = world["host_work_s"]
        return replace(
            work,
            experts=world["host_work_experts"][0, :count].copy(),
            tokens=world["host_work_experts"][1, :count].copy(),
            state=world["host_work_state"][:count].copy(),
            cpu_s=seconds[0, :count].copy(),
            host_s=seconds[1, :count].copy(),
            gpu_s=seconds[2, : rows * count].reshape(rows, count).copy(),
            arrive_s=seconds[3, : rows * count].reshape(rows, count).copy(),
        )


def _nothing() -> None:
    """Answer nothing."""


def _overrides(policy: CachePolicy, name: str) -> bool:
    return getattr(type(policy), name) is not getattr(CachePolicy, name)
