"""Bases of policies whose every answer is a kernel, in every engine.

A subclass brings kernels and their state (`moesim.policies.kernels`), so that a rule
stands once. The compiled engine calls them as they are; here Python does.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.base import (
    IN_FLIGHT,
    RESIDENT,
    Assignment,
    AssignmentPolicy,
    CachePolicy,
    ExpertKey,
    Gate,
    Precompute,
    PrefetchPolicy,
    Routing,
    RoutingPolicy,
    Swap,
)
from moesim.policies.kernels import (
    SERIAL,
    UNUSED,
    WAITS,
    GateWork,
    KernelView,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.policies.base import Future, LayerWork, MachineView, RunContext
    from moesim.policies.kernels import (
        AssignmentKernels,
        CacheKernels,
        PrefetchKernels,
        RoutingKernels,
    )

_NO_SCORES = np.empty(0)
_NO_RANKS = np.empty(0, np.int32)
_NO_STATES = np.empty((0, 0), np.int8)


def kernel_work(
    work: LayerWork,
    view: MachineView | None = None,
    *,
    states: bool = False,
    ranks: bool = False,
) -> Work:
    """The work of a layer step as kernels want it, made when one is first asked.

    Args:
        work: the layer step.
        view: the machine; without it `gpu_state` knows only the best of several GPUs,
            and `first_cpu_s` is left out.
        states: whether `Work.states` is read.
        ranks: whether `Work.ranks` is read.
    """
    if work.handed is not None:
        made, made_with = work.handed
        if states and not len(made.states):
            assert view is not None
            made = made._replace(states=_states_of(view, [work.layer]))
            work.handed = made, made_with
        if ranks and not len(made.ranks):
            made = made._replace(ranks=_ranks_of(work))
            work.handed = made, made_with
        if view is None or view is made_with:
            return made
    state = work.state
    first_cpu_s = 0.0
    if view is not None:
        first_cpu_s = float(getattr(view, "cpu_first_s", 0.0))
        if len(work.arrive_s) > 1:
            state = _states_by_gpu(work, view)
    scores = first_scores = _NO_SCORES
    if work.scores is not None:
        scores = work.scores.mean(axis=0, dtype=np.float64)
        first_scores = work.scores[:1].astype(np.float64).reshape(-1)
    every_state = _NO_STATES
    if states:
        assert view is not None
        every_state = _states_of(view, [work.layer])
    made = Work(
        step=work.step,
        layer=work.layer,
        phase=int(work.phase),
        batch=work.batch,
        rows=len(work.routing),
        experts=work.experts,
        tokens=work.tokens,
        state=work.state,
        cpu_s=work.cpu_s,
        host_s=work.host_s,
        gpu_s=work.gpu_s,
        arrive_s=work.arrive_s,
        link_s=np.zeros(len(work.arrive_s)) if work.link_s is None else work.link_s,
        gpu_state=state,
        scores=scores,
        first_scores=first_scores,
        states=every_state,
        first_cpu_s=first_cpu_s,
        ranks=_ranks_of(work) if ranks else _NO_RANKS,
    )
    work.handed = made, view
    return made


def _ranks_of(work: LayerWork) -> np.ndarray:
    """Best place of each active expert among the experts of any token: int32 [A]."""
    best = np.zeros(1 + int(work.experts.max(initial=0)), np.int32)
    # Better places overwrite worse ones.
    for place in reversed(range(work.routing.shape[1])):
        column = work.routing[:, place]
        best[column[column != UNUSED]] = place
    return best[work.experts]


def _states_by_gpu(work: LayerWork, view: MachineView) -> np.ndarray:
    """State of every active expert on one GPU after the other: int8 [G * A]."""
    flying = np.concatenate(
        [
            view.in_flight(work.layer, gpu)[work.experts]
            for gpu in range(len(work.arrive_s))
        ]
    )
    resident = work.arrive_s.ravel() == 0.0
    return np.where(resident, RESIDENT, flying * IN_FLIGHT).astype(np.int8)


def kernel_gate(gate: Gate, view: MachineView) -> GateWork:
    """A gate's outputs as kernels want them, with the states of its layer."""
    return GateWork(
        step=gate.step,
        layer=gate.layer,
        phase=int(gate.phase),
        experts=np.ascontiguousarray(gate.experts, np.uint16),
        weights=_numbers(gate.weights),
        scores=_numbers(gate.scores),
        predicted=_numbers(gate.predicted),
        states=_states_of(view, [gate.layer]),
    )


def _numbers(values: np.ndarray | None) -> np.ndarray:
    return _NO_TABLE if values is None else np.ascontiguousarray(values, np.float64)


def _states_of(view: MachineView, layers: Iterable[int]) -> np.ndarray:
    """State of every expert of some layers on every GPU: int8 [G, L * E]."""
    # Copies of masks, layer by layer: a view has no flat array to give.
    states = np.zeros((view.gpus, view.layers, view.experts), np.int8)
    for gpu in range(view.gpus):
        for layer in layers:
            states[gpu, layer][view.in_flight(layer, gpu)] = IN_FLIGHT
            states[gpu, layer][view.resident(layer, gpu)] = RESIDENT
    return states.reshape(view.gpus, -1)


def _writable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy of one that is shared for reading."""
    return array if array.flags.writeable else array.copy()


class CompiledAssignment(AssignmentPolicy):
    """An assignment that a kernel answers.

    A subclass sets `brought` when it knows all of the kernel's state: in `__init__`, or
    in `start`.

    Attributes:
        brought: the kernels and their state.
        precomputes_by_kernel: whether it brings a kernel for work ahead of a gate.
    """

    brought: AssignmentKernels
    precomputes_by_kernel: ClassVar[bool] = False

    @property
    def precomputes(self) -> bool:
        """Whether a kernel, or a subclass's own method, names experts ahead."""
        overridden = type(self).precompute is not CompiledAssignment.precompute
        return self.precomputes_by_kernel or overridden

    def kernels(self) -> AssignmentKernels:
        """The same in compiled runs."""
        return self.brought

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Ask the kernel."""
        active = len(work.experts)
        lanes = np.empty(active, np.int8)
        order = np.empty(active, np.int64)
        given = kernel_work(work, view, states=self.reads_states, ranks=self.defers)
        flags = self.brought.assign(self.brought.state, given, lanes, order)
        waits = bool(flags & WAITS)
        return Assignment(lanes, order, serial=bool(flags & SERIAL), waits=waits)

    def precompute(self, work: LayerWork, view: MachineView) -> Precompute | None:
        """Ask the kernel of this name, by what the next gate says of this layer's
        input.
        """
        gate = Gate(
            step=work.step,
            layer=work.layer + 1,
            phase=work.phase,
            experts=work.routing,
            weights=None,
            scores=None,
            predicted=work.predicted.get("pred1_raw"),
        )
        rows = len(work.routing)
        routing = np.empty(rows * view.experts, np.uint16)
        tokens = np.zeros(view.experts, np.int32)
        given = kernel_gate(gate, view)
        columns = self.brought.precompute(self.brought.state, given, routing, tokens)
        if not columns:
            return None
        experts = np.flatnonzero(tokens).astype(np.int32)
        predicted = routing[: rows * columns].reshape(rows, columns)
        return Precompute(experts, tokens[experts], predicted)


class CompiledRouting(RoutingPolicy):
    """A routing whose experts a kernel chooses.

    Attributes:
        brought: the kernel and its state, set as `CompiledAssignment` says.
    """

    brought: RoutingKernels
    reads_tokens = True

    def kernels(self) -> RoutingKernels:
        """The same in compiled runs, which need no weights."""
        return self.brought

    def route(self, gate: Gate, view: MachineView) -> Routing:
        """Ask the kernel, and weigh the experts that it has altered."""
        tokens = len(gate.experts)
        routing = np.empty(tokens * view.experts, np.uint16)
        given = kernel_gate(gate, view)
        columns = self.brought.route(self.brought.state, given, routing)
        if not columns:
            return Routing(gate.experts, gate.weights)
        experts = routing[: tokens * columns].reshape(tokens, columns)
        return self.weigh(gate, experts, view)

    @abstractmethod
    def weigh(self, gate: Gate, experts: np.ndarray, view: MachineView) -> Routing:
        """Find the combine weights of altered `experts`, uint16 [T, K']."""


class CompiledCache(CachePolicy):
    """Answers with the kernels that a subclass brings, in every engine.

    Attributes:
        brought: the kernels and their state.
        replaces_by_kernel: whether it brings a kernel for copies of its own.
    """

    brought: CacheKernels
    replaces_by_kernel: ClassVar[bool] = False

    @abstractmethod
    def bring(self, context: RunContext) -> CacheKernels:
        """Make the state of one run, and name the kernels."""

    def start(self, context: RunContext) -> None:
        """Take what the subclass brings."""
        self._gpu = context.gpu
        self.brought = self.bring(context)

    def kernels(self) -> CacheKernels | None:
        """The same in compiled runs."""
        return self.brought

    @property
    def inside(self) -> np.ndarray:
        """Experts that have entered and not left, copies in flight included: bool
        [L * E], of rules that mark them in the state's first row.
        """
        inside: np.ndarray = self.brought.state.marks[0] != 0
        return inside

    @property
    def score(self) -> np.ndarray:
        """The state's first row of scores: by most rules, what leaves lowest first."""
        return self.brought.state.scores[0]

    def accessed(self, work: LayerWork) -> None:
        """Ask the kernel of this name."""
        self.brought.accessed(self.brought.state, kernel_work(work))

    def admits(self, work: LayerWork, incoming: np.ndarray) -> np.ndarray:
        """Ask the kernel of this name."""
        answers = np.empty(len(incoming), np.bool_)
        given = kernel_work(work)
        self.brought.admits(self.brought.state, given, _writable(incoming), answers)
        return answers

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """Ask the kernel of this name."""
        ordered = incoming.copy()
        self.brought.precedence(self.brought.state, ordered)
        return ordered

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Ask the kernel of this name."""
        chosen = np.empty(len(incoming), np.int64)
        self.brought.victims(
            self.brought.state, _writable(incoming), _writable(candidates), chosen
        )
        return chosen

    def admitted(self, keys: np.ndarray) -> None:
        """Ask the kernel of this name."""
        self.brought.admitted(self.brought.state, _writable(keys))

    def evicted(self, keys: np.ndarray) -> None:
        """Ask the kernel of this name."""
        self.brought.evicted(self.brought.state, _writable(keys))

    @property
    def replaces(self) -> bool:
        """Whether a kernel, or a subclass's own method, asks for copies."""
        overridden = type(self).replacements is not CompiledCache.replacements
        return self.replaces_by_kernel or overridden

    def replacements(self, work: LayerWork, view: MachineView) -> Sequence[Swap]:
        """Ask the kernel of this name."""
        outgoing = np.empty(view.layers * view.experts, np.int64)
        incoming = np.empty(view.layers * view.experts, np.int64)
        count = self.brought.replacements(
            self.brought.state,
            kernel_work(work),
            _states_of(view, [work.layer])[self._gpu],
            outgoing,
            incoming,
        )
        pairs = zip(outgoing[:count].tolist(), incoming[:count].tolist(), strict=True)
        return [
            Swap(
                ExpertKey(*divmod(leaving, view.experts)),
                ExpertKey(*divmod(entering, view.experts)),
            )
            for leaving, entering in pairs
        ]


class AdmittingCompiledCache(CompiledCache):
    """As `CompiledCache`, of kernels that admit everything in launch order: nobody asks
    then.
    """

    admits = CachePolicy.admits
    precedence = CachePolicy.precedence


_NO_ROUTING = np.empty((0, 0), np.uint16)
_NO_TABLE = np.empty((0, 0))


class CompiledPrefetch(PrefetchPolicy):
    """Answers with the kernel that a subclass brings, in every engine.

    A subclass sets `brought` when it knows all of the kernel's state: in `__init__`, or
    in `start`.

    Attributes:
        brought: the kernel and its state.
        ahead: coming layers whose experts' states the kernel reads.
        weighs_costs: whether it reads seconds of the machine.
        foretells_by_kernel: whether it brings a kernel for drafted tokens.
    """

    brought: PrefetchKernels
    ahead: int = 1
    weighs_costs: ClassVar[bool] = False
    foretells_by_kernel: ClassVar[bool] = False
    _future: Future | None = None
    # What was routed in this pass so far, the last two layers.
    _last: tuple[LayerWork, ...] = ()

    def start(self, context: RunContext) -> None:
        """Keep the future, which only oracles are given."""
        self._future = context.future

    def kernels(self) -> PrefetchKernels | None:
        """The same in compiled runs."""
        return self.brought

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Ask the kernel."""
        named = np.empty(view.layers * view.experts, np.int64)
        count = self.brought.prefetch(
            self.brought.state,
            kernel_work(work, view),
            self._view(work, view),
            named,
        )
        keys = named[:count].tolist()
        return [ExpertKey(*divmod(key, view.experts)) for key in keys]

    @property
    def foretells(self) -> bool:
        """Whether a kernel, or a subclass's own method, looks at drafted tokens."""
        overridden = type(self).foretold is not CompiledPrefetch.foretold
        return self.foretells_by_kernel or overridden

    def foretold(
        self, experts: np.ndarray, draft_s: float, view: MachineView
    ) -> Sequence[ExpertKey]:
        """Ask the kernel of this name."""
        if not self.foretells_by_kernel:
            return ()
        layers = range(view.layers)
        none = np.empty((0, view.experts))
        machine = KernelView(
            states=_states_of(view, layers),
            routing=_NO_ROUTING,
            before=_NO_ROUTING,
            before_that=_NO_ROUTING,
            workload=none.astype(np.int32),
            score_sums=none.astype(np.float32),
            predicted=none,
            coming=np.empty(0, np.int32),
            coming_edges=np.empty(0, np.int64),
            copy_s=np.array([view.copy_s(layer) for layer in layers]),
            cpu_s=_NO_TABLE,
            gpu_s=_NO_TABLE,
            link_wait_s=view.link_wait_s(),
            gap_s=view.gap_s,
        )
        named = np.empty(view.layers * view.experts, np.int64)
        (predicted,) = self.drafted(experts[None])
        count = self.brought.foretold(
            self.brought.state, predicted, draft_s, machine, named
        )
        return [ExpertKey(*divmod(key, view.experts)) for key in named[:count].tolist()]

    def _view(self, work: LayerWork, view: MachineView) -> KernelView:
        end = min(view.layers, work.layer + 1 + self.ahead)
        seen = range(view.layers)
        if not self.foresees_passes:
            seen = range(work.layer + 1, end)
        # Few policies predict, and all would wait for its machine code.
        from moesim.traces.predictions import tallies  # noqa: PLC0415 - see above

        workload, score_sums = tallies(
            work.predicted, self.needs, view.shape.top_k, view.experts
        )

        routing = before = before_that = _NO_ROUTING
        if self.reads_routing:
            routing, before, before_that = self._routing(work)
        coming, edges = self._coming(work, view.layers)
        copy_s = np.empty(0)
        cpu_s = gpu_s = _NO_TABLE
        if self.weighs_costs:
            layers = range(view.layers)
            tokens = np.arange(1 + int(workload.max(initial=0)))
            copy_s = np.array([view.copy_s(layer) for layer in layers])
            cpu_s = np.zeros((view.layers, len(tokens)))
            gpu_s = np.zeros((view.layers, len(tokens)))
            for layer in range(work.layer + 1, end):
                cpu_s[layer] = view.cpu_s(layer, tokens)
                gpu_s[layer] = view.gpu_s(layer, tokens)
        return KernelView(
            _states_of(view, seen),
            routing,
            before,
            before_that,
            workload,
            score_sums,
            _numbers(work.predicted.get("pred1_raw")),
            coming,
            edges,
            copy_s,
            cpu_s,
            gpu_s,
            view.link_wait_s() if self.weighs_costs else 0.0,
            view.gap_s if self.weighs_costs else 0.0,
        )

    def _routing(self, work: LayerWork) -> list[np.ndarray]:
        """Experts of every token, in this layer and the two before in its pass."""
        last = self._last
        follows = last and last[0].step == work.step
        if not follows or last[0].layer + 1 != work.layer:
            last = ()
        known = (work, *last)
        self._last = known[:2]
        routing = [np.array(each.routing, np.uint16) for each in known]
        return (routing + [_NO_ROUTING] * 2)[:3]

    def _coming(self, work: LayerWork, layers: int) -> tuple[np.ndarray, np.ndarray]:
        """Active experts of the coming layers of this pass, and where each begins."""
        following = layers - 1 - work.layer
        edges = np.zeros(following + 1, np.int64)
        if self._future is None or not following:
            return np.empty(0, np.int32), edges
        active = [
            self._future.active(work.step, work.layer + 1 + n) for n in range(following)
        ]
        edges[1:] = np.cumsum([len(experts) for experts in active])
        return np.concatenate(active).astype(np.int32), edges
