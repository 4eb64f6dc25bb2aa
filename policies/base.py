"""The contracts of the four kinds of policy: what each is asked, and what it may know.

Routing, assignment, prefetch and cache are one small class each, with one method for
each question. A policy decides; it never waits, copies, computes or counts bytes. It
sees small arrays about the *active* experts of one layer step and the machine at that
moment, and fills its answer into arrays that it is given. Simulator and runtime ask the
same objects through the same planner.

A policy is a plain Python class: a subclass in a notebook works in every engine. Beside
this file `base.pxd` gives the C types with which it is compiled where there is a C
compiler; a policy in a file of its own may have one, too.

Shape legend: A active experts, G GPUs, L MoE layers, E routed experts per layer, K
experts per token, T tokens of the step. A flat key is ``layer * E + expert``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from moesim.policies.arrays import read_only, zeros
from moesim.policies.names import IN_FLIGHT, NONE, RESIDENT
from moesim.policies.run_context import Evaluations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.run_context import RunContext

Late = Literal["keep", "drop", "wait"]
"""What becomes of a prefetch whose layer has come before its copy started."""


class PolicyError(ValueError):
    """A policy is unknown, wrongly parametrised, unsupported by the trace, or answered
    something illegal.
    """


_NO_EXPERTS: Ints = read_only(np.zeros(0, np.int32))
_NO_SCORES: Floats = read_only(np.zeros(0))


class WorkArrays(NamedTuple):
    """The arrays of a `Work`, cut to the active experts; read-only."""

    experts: np.ndarray
    tokens: np.ndarray
    state: np.ndarray
    cpu_s: np.ndarray
    host_s: np.ndarray
    gpu_s: np.ndarray
    arrive_s: np.ndarray
    link_s: np.ndarray


class Work:
    """The work of one MoE layer in one step. All arrays are read-only.

    Rows of E places are filled in for the first A, the active experts.

    Attributes:
        step: forward pass, counted over the whole run from 0.
        layer: MoE layer, 0-based; -1 between layer steps.
        phase: 0 in a prefill, 1 in a decode step (`Phase`).
        batch: group of sequences, counted over the whole run; another number means that
            new sequences began.
        rows: T, tokens of the layer step.
        active: A.
        gpus: G, GPUs that may compute this layer's experts.
        first: flat key of the layer's first expert.
        experts: int32 [A], ascending.
        tokens: int32 [A], tokens routed to each (the workload).
        state: int8 [E] on the (home) GPU: ABSENT, IN_FLIGHT or RESIDENT when the layer
            step is planned.
        cpu_s: float64 [E], compute on the CPU once the weights are in host memory.
        host_s: float64 [E], until the weights are in host memory; 0 if they are.
        gpu_s: float64 [G, E], compute on each GPU once resident.
        arrive_s: float64 [G, E], until the weights are on that GPU (SSD read included);
            0 if resident, the remaining time if in flight, and if absent what a copy
            would take that is the next one on the link.
        link_s: float64 [G], until each link has ended the copy under way; contained in
            `arrive_s` of what is absent, of which only the first waits for it.
        gpu_state: int8 [G, E], state of the active experts on each GPU.
        first_cpu_s: extra seconds of the first CPU expert of a layer step.
        scores: float64 [E], gate scores by expert id, mean over the tokens; empty if
            there are none.
        first_scores: float64 [E], those of the first token; empty unless the policy
            `reads_tokens`.
        ranks: int32 [E], the best place that each active expert has among the experts
            of any token, 0 for a token's first; filled in where the policy `defers`.
    """

    def __init__(self, gpus: int, experts: int) -> None:
        self.gpus = gpus
        self.experts: Ints = _NO_EXPERTS
        self.tokens: Ints = _NO_EXPERTS
        self.scores: Floats = _NO_SCORES
        self.first_scores: Floats = _NO_SCORES
        self.step = self.layer = NONE
        self.phase = self.batch = self.rows = self.active = 0
        self.first = 0
        self.first_cpu_s = 0.0
        # Else somebody shows arrays of their own.
        if experts:
            self.show_new(gpus, experts)

    def show_new(self, gpus: int, experts: int) -> dict[str, np.ndarray]:
        """Show arrays of zeros, and return them by name to whoever fills them in."""
        arrays: dict[str, np.ndarray] = {
            "state": np.zeros(experts, np.int8),
            "cpu_s": np.zeros(experts),
            "host_s": np.zeros(experts),
            "gpu_s": np.zeros((gpus, experts)),
            "arrive_s": np.zeros((gpus, experts)),
            "link_s": np.zeros(gpus),
            "gpu_state": np.zeros((gpus, experts), np.int8),
            "ranks": np.zeros(experts, np.int32),
        }
        self.show(**arrays)
        return arrays

    def show(
        self,
        *,
        state: np.ndarray,
        cpu_s: np.ndarray,
        host_s: np.ndarray,
        gpu_s: np.ndarray,
        arrive_s: np.ndarray,
        link_s: np.ndarray,
        gpu_state: np.ndarray,
        ranks: np.ndarray,
    ) -> None:
        """Show arrays that somebody else fills in."""
        self.state: Ints = read_only(state)
        self.cpu_s: Floats = read_only(cpu_s)
        self.host_s: Floats = read_only(host_s)
        self.gpu_s: Floats = read_only(gpu_s)
        self.arrive_s: Floats = read_only(arrive_s)
        self.link_s: Floats = read_only(link_s)
        self.gpu_state: Ints = read_only(gpu_state)
        self.ranks: Ints = read_only(ranks)

    def arrays(self) -> WorkArrays:
        """NumPy arrays of the active experts, for rules that compute with them."""
        active = self.active
        return WorkArrays(
            experts=np.asarray(self.experts),
            tokens=np.asarray(self.tokens),
            state=np.asarray(self.state)[:active],
            cpu_s=np.asarray(self.cpu_s)[:active],
            host_s=np.asarray(self.host_s)[:active],
            gpu_s=np.asarray(self.gpu_s)[:, :active],
            arrive_s=np.asarray(self.arrive_s)[:, :active],
            link_s=np.asarray(self.link_s),
        )


class MachineView:
    """What a real system would know at the moment of planning. No clock, no future but
    an oracle's.

    P predictors that the policy needs, N tokens. All arrays are read-only.

    Attributes:
        layers, experts, gpus: L, E, and all GPUs of the machine.
        first_cpu_s: extra seconds of the first CPU expert of a layer step.
        states: int8 [G, L * E], state of every expert on every GPU.
        copy_s: float64 [L], one expert's copy from host memory to a GPU.
        cpu_s, gpu_s: float64 [L, N], seconds of one expert of mean size by its tokens.
        gap_s: from the last layer's end to this one's planning: its dense part, mostly.
            As last seen within a forward pass; 0 until then.
        link_wait_s: until the first GPU's link has served what is queued on it.
        routing: uint16 [T, K], experts of every token, best first; no rows unless the
            policy `reads_routing`.
        before, before_that: the same of the layer before in this forward pass, and of
            the one before that.
        workload: int32 [P, E], tokens that each predictor gives to the experts of its
            layer.
        score_sums: float32 [P, E], their predicted scores, summed over the tokens.
        predicted: float64 [T, E], ``pred1_raw`` of every token; no rows unless the
            policy `reads_tokens`.
        coming: int32, active experts, layer after layer, for oracles; empty for others.
        coming_edges: int64, where in `coming` each of the following layers of this
            forward pass begins, and where the last one ends.
    """

    def __init__(self, gpus: int, layers: int, experts: int) -> None:
        self.gpus = gpus
        self.layers = layers
        self.experts = experts
        self.first_cpu_s = self.gap_s = self.link_wait_s = 0.0
        keys = layers * experts
        self.states: Ints = zeros((gpus, keys), np.int8)
        self.copy_s: Floats = zeros(layers)
        self.cpu_s: Floats = zeros((layers, 1))
        self.gpu_s: Floats = zeros((layers, 1))
        self.forget()

    def forget(self) -> None:
        """Say nothing of a layer step."""
        nobody = zeros((0, 0), np.uint16)
        self.routing: Ints = nobody
        self.before: Ints = nobody
        self.before_that: Ints = nobody
        self.workload: Ints = zeros((0, self.experts), np.int32)
        self.score_sums: Floats = zeros((0, self.experts), np.float32)
        self.predicted: Floats = zeros((0, self.experts))
        self.coming: Ints = zeros(0, np.int32)
        self.coming_edges: Ints = zeros(0, np.int64)

    def resident(self, layer: int, gpu: int = 0) -> np.ndarray:
        """Bool [E]: usable on that GPU now."""
        return self._states_of(layer, gpu) == RESIDENT

    def in_flight(self, layer: int, gpu: int = 0) -> np.ndarray:
        """Bool [E]: being copied to that GPU."""
        return self._states_of(layer, gpu) == IN_FLIGHT

    def _states_of(self, layer: int, gpu: int) -> np.ndarray:
        first = layer * self.experts
        return np.asarray(self.states)[gpu, first : first + self.experts]


class Gate:
    """Outputs of a layer's gate for the tokens of this step.

    What a trace lacks has no rows.

    Attributes:
        step, layer, phase: as in `Work`; rows: T.
        experts: uint16 [T, K] as recorded, best first.
        weights: float64 [T, K].
        scores: float64 [T, E].
        predicted: float64 [T, E], this gate's scores on the input of the layer before
            (``pred1_raw``).
    """

    def __init__(self) -> None:
        self.step = self.layer = NONE
        self.phase = self.rows = 0
        nothing = zeros((0, 0))
        self.experts: Ints = zeros((0, 0), np.uint16)
        self.weights: Floats = nothing
        self.scores: Floats = nothing
        self.predicted: Floats = nothing


class Policy:
    """Base of all four kinds. Subclass the kind's own base below.

    A class declares its parameters as keyword arguments of `__init__` and checks them
    there. One instance serves one run.

    Attributes:
        oracle: whether it must see the future.
        needs: optional trace columns that it reads. A parameter may change them, so ask
            the instance.
        reference: parameter texts with which analyses hold other policies against this
            one, ``""`` for its defaults. Only policies that see nothing but the past
            qualify; a cache must also admit every miss.
        compared_with: specifications of the policies of the same kind that its own
            report judges it beside.
        reads_tokens: whether it reads the gate outputs of single tokens.
        own_planning_s: seconds that its decisions about one layer step take, where that
            is more than what a machine's planning counts for all policies.
    """

    # The registry knows policies by class. Code that needs to tell them apart reads
    # attributes such as these, and never compares names.
    oracle: ClassVar[bool] = False
    reference: ClassVar[tuple[str, ...]] = ()
    compared_with: ClassVar[tuple[str, ...]] = ()
    # May be parameters of a policy, so they are asked of the instance.
    needs: tuple[str, ...] = ()
    reads_tokens: bool = False
    own_planning_s: float = 0.0

    def start(self, context: RunContext) -> None:
        """Learn the sizes of the run, once, before the first layer step."""

    def remarks(self) -> Sequence[str]:
        """What a reader of the run's figures should know, one line each; asked when the
        run has ended. Default: nothing.
        """
        return ()


class AssignmentPolicy(Policy):
    """Decides on which device each active expert is computed, and in which order.

    Attributes:
        approximates: whether an expert's result may be another than the model's, or
            join elsewhere (work ahead, on the layer before; deferral). Answers then
            differ even with recorded routing, and reports say so.
        calibrates_planning: whether a calibration runs it once more for what its
            planning takes.
        places_on_gpu: whether a GPU may compute an expert at all.
        defers: whether it may answer `DEFERRED`. The CPU computes such an expert behind
            the others of its layer step, which ends without it; the next one waits for
            its result and adds it to its own. Where that cannot be, it joins at once:
            in prefill, in the last layer, where it was computed ahead of its gate or
            is not in (limited) host memory.
    """

    # The first two may be parameters of a policy.
    approximates: bool = False
    defers: bool = False
    places_on_gpu: ClassVar[bool] = True
    calibrates_planning: ClassVar[bool] = False

    @property
    def precomputes(self) -> bool:
        """Whether it names experts that are computed ahead of their gate: the class
        overrides `precompute`.
        """
        return overrides(self, AssignmentPolicy, "precompute")

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        """Place every active expert exactly once.

        Args:
            work: the layer step.
            view: the machine.
            lanes: int8 [A], to be filled in: CPU, or 1 + GPU; `DEFERRED` of policies
                that defer. All CPU until then.
            order: int64 [A], positions of the active experts, first launched first;
                ascending until then. Each lane keeps this order, except that a GPU runs
                resident experts before arrivals.

        Returns:
            `SERIAL` and `WAITS`, added up; mostly 0.
        """
        raise NotImplementedError

    def precompute(
        self, gate: Gate, view: MachineView, routing: Ints, tokens: Ints
    ) -> int:
        """Name experts of the next layer that the CPU starts on this layer's hidden
        state (DAOP's pre-calculation). Default: none.

        Args:
            gate: the next layer's, before it has spoken: `predicted` is what it says
                of this layer's input, `experts` are this layer's.
            view: the machine.
            routing: uint16 [T * K], to be filled in row by row with the experts that
                are predicted for each token.
            tokens: int32 [E], zeros, to be filled in with how many tokens of each
                expert the CPU starts now.

        Returns:
            K, columns of `routing`; 0 for none.
        """
        return 0


class PrefetchPolicy(Policy):
    """Decides which experts of coming layers are copied before a layer needs them.

    Copies wait in a queue, behind all demand, in the order in which they were named.
    Until one starts it changes nothing: it has no place, and nobody has left for it.
    What a layer step turns out to need becomes a demand fetch, if the plan wants it on
    a GPU. What has started is never stopped.

    Attributes:
        prefetches: whether it ever asks for a copy; false for `none` alone.
        late: what becomes of the others that have not started when their layer comes:
            ``drop`` forgets them, ``keep`` leaves them in the queue, where they may
            serve a later step through the cache, ``wait`` makes all of them demand
            fetches, and the layer's GPU products wait for every one, where staging
            could hold them all.
        requeue: whether those for all other layers are forgotten as well before each
            layer step, so that naming them again, or not, sorts the queue anew.
        buffer_slots: staging slots that it needs beside those of the system or the
            profile, as what it names never enters the cache.
        reads_routing: whether it reads the experts of single tokens.
        foresees_passes: whether it also names experts of the next forward passes, in
            layers that this one has behind it.
    """

    # `late` and `requeue` may be parameters of a policy, so they are asked of the
    # instance; `prefetches` is a property of the class.
    prefetches: ClassVar[bool] = True
    late: Late = "drop"
    requeue: bool = False
    buffer_slots: int = 0
    reads_routing: ClassVar[bool] = False
    foresees_passes: ClassVar[bool] = False

    def prefetch(self, work: Work, view: MachineView, named: Ints) -> int:
        """Name experts of coming layers; the planner drops what is present and trims to
        the budget.

        Args:
            work: the layer step.
            view: the machine, and what the trace says ahead of time.
            named: int64 [L * E], to be filled in with flat keys, most wanted first.

        Returns:
            How many.
        """
        raise NotImplementedError

    def foretold(
        self, predicted: Ints, draft_s: float, view: MachineView, named: Ints
    ) -> int:
        """Name what a drafted token foretells, before the pass that verifies it begins.
        Default: nothing.

        Args:
            predicted: int32 [L, K], the experts that its draft knows of (`drafted`), -1
                where it knows of none.
            draft_s: seconds until the next token is drafted.
            view: the machine; it says nothing of a layer step.
            named: int64 [L * E], to be filled in with flat keys, most wanted first.

        Returns:
            How many.
        """
        return 0

    @property
    def foretells(self) -> bool:
        """Whether drafted tokens tell it anything: the class overrides `foretold`."""
        return overrides(self, PrefetchPolicy, "foretold")

    def drafted(self, experts: np.ndarray) -> np.ndarray:
        """What drafts know of these experts of drafted tokens, [D, L, K]: int32, -1 for
        nothing. Default: all, which makes it an oracle.
        """
        return experts.astype(np.int32)

    def evaluations(self, following: int, phase: int) -> Evaluations:
        """What the prediction of one layer step evaluates on the GPU. Default: nothing.

        `following` counts the layers behind this one, at least 1. A table, an oracle or
        a gate that decides early in the place of the layer's own costs nothing more.
        What a trace replays as a recorded column is charged here.
        """
        del following, phase
        return Evaluations()


class CachePolicy(Policy):
    """Decides which fetched experts enter a memory, and which residents leave it.

    It is asked once per layer step and memory, and never about bytes. Experts are
    passed as flat keys, so one policy serves both scopes.

    Attributes:
        lands_by_next_visit: whether copies that it asked for itself (`replacements`)
            and that have not started when their layer comes again go before all others
            then. Else they wait until the link has nothing better to do.
        replaces_first: whether `replacements` is asked before the layer step is
            assigned, which then runs on the new content: incoming experts count as in
            flight and outgoing ones as absent. Else copies follow the layer step.
        choosing_s: seconds that choosing victims takes, once per layer step that loads
            something. It runs beside the first demand load; what outlasts that load is
            charged to planning. 0 for rules whose evaluation takes no time worth
            modelling.
    """

    # May be parameters of a policy, so they are asked of the instance.
    lands_by_next_visit: bool = False
    replaces_first: bool = False
    choosing_s: float = 0.0

    @property
    def admits_all(self) -> bool:
        """Whether everything may enter: the class does not override `admits`."""
        return not overrides(self, CachePolicy, "admits")

    @property
    def in_launch_order(self) -> bool:
        """Whether incoming experts keep their order: the class does not override
        `precedence`.
        """
        return not overrides(self, CachePolicy, "precedence")

    @property
    def replaces(self) -> bool:
        """Whether it asks for copies of its own: the class overrides `replacements`."""
        # Read off the class, so that no policy can forget to set a flag.
        return overrides(self, CachePolicy, "replacements")

    def accessed(self, work: Work) -> None:
        """Note the active experts of a layer step: `work.state` tells which were hits.
        Default: nothing.
        """

    def admits(self, work: Work, key: int) -> bool:
        """Whether a fetched expert may enter. Default: yes."""
        return True

    def precedence(self, incoming: Ints) -> None:
        """Reorder `incoming`, int64 [M], in place, when there are fewer free slots than
        keys. Default: launch order.

        The first take the free slots, as many of the next as there are candidates are
        shown to `victims`, and the last run from staging.
        """

    def victims(self, incoming: Ints, candidates: Ints, chosen: Ints) -> None:
        """Choose one distinct victim among the candidates for each incoming expert.

        Args:
            incoming: int64 [M], M <= C, in the order of `precedence`.
            candidates: int64 [C], ascending: residents of the scope that are not held.
            chosen: int64 [M], to be filled in; -1, which they are until then, declines
                an admission.
        """
        raise NotImplementedError

    def admitted(self, key: int) -> None:
        """Note an expert that has entered (demand fetch, prefetch, swap or initial
        filling). Default: nothing.
        """

    def evicted(self, key: int) -> None:
        """Note an expert that has left. Default: nothing."""

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Flat keys that fill the cache before the run; None for the experts that the
        calibration saw most often, if there is one.
        """
        del capacity_slots
        return None

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        """Ask for copies of its own, when a window closes (DALI Alg. 2). Default: none.

        Args:
            work: the layer step.
            states: int8 [L * E], state of every expert in the memory it rules.
            outgoing, incoming: int64 [L * E], to be filled in: each incoming expert
                takes the slot of the outgoing one beside it.

        Returns:
            How many.
        """
        return 0


class RoutingPolicy(Policy):
    """Decides which experts serve each token.

    Attributes:
        alters: whether tokens may get other experts than their gate chose. That changes
            the model's output, and reports say so. Only ``as-recorded`` does not.
    """

    alters: ClassVar[bool] = True

    def route(self, gate: Gate, view: MachineView, routing: Ints) -> int:
        """Choose the experts of every token.

        Args:
            gate: what the gate says.
            view: the machine.
            routing: uint16 [T * E], to be filled in row by row; `UNUSED` in places that
                no expert takes, none twice in a row.

        Returns:
            Columns of each row; 0 leaves the recorded experts.
        """
        raise NotImplementedError

    def weigh(self, gate: Gate, experts: np.ndarray) -> np.ndarray | None:
        """Combine weights of altered experts, float [T, K'], of `experts` uint16
        [T, K']; None where the trace has none. Default: the gate's own.
        """
        del experts
        weights = np.asarray(gate.weights)
        return weights if len(weights) else None


def overrides(policy: Any, base: type, name: str) -> bool:
    """Whether a policy's class answers a question itself."""
    return getattr(type(policy), name) is not getattr(base, name)
