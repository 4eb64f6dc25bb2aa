"""The contracts of the four kinds of policy: what each is asked, and what it may know.

Routing, assignment, prefetch and cache are one small base class each. A policy decides;
it never waits, copies, computes or counts bytes. It sees small dense arrays about the
*active* experts of one layer step, and a view of the machine at that moment. The
simulator and the runtime ask the same objects through the same planner.

Shape legend: A active experts, G GPUs, L MoE layers, E routed experts per layer, K
experts per token, T tokens of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
)

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moesim.hwprofiles.costs import Costs
    from moesim.traces.format.schema import ModelShape, Phase

_Shared = TypeVar("_Shared")

# Plain numbers, not enumerations: lanes and states travel in arrays of int8.
CPU = 0
"""Lane code of the CPU in `Assignment.lanes`; GPU *g* is ``1 + g``."""

DEFERRED = -1
"""Lane code of the CPU for an expert whose result joins one layer later; see
`AssignmentPolicy.defers`.
"""

ABSENT = 0
IN_FLIGHT = 1
RESIDENT = 2
"""States of an expert in one memory."""

Late = Literal["keep", "drop", "wait", "active"]
"""What becomes of a prefetch whose layer has come before its copy started."""

NoPlace = Literal["stage", "drop", "wait"]
"""What becomes of a prefetch that finds no place in the cache when it could start."""


class PolicyError(ValueError):
    """A policy is unknown, wrongly parametrised, unsupported by the trace, or answered
    something illegal.
    """


class ExpertKey(NamedTuple):
    """One routed expert of the model."""

    layer: int
    expert: int


class Swap(NamedTuple):
    """A copy that a cache asks for by itself: `incoming` takes the slot of
    `outgoing`.
    """

    outgoing: ExpertKey
    incoming: ExpertKey


@dataclass(slots=True)
class LayerWork:
    """The work of one MoE layer in one step. Arrays are read-only for policies.

    Attributes:
        step: forward pass, counted over the whole run from 0.
        layer: MoE layer, 0-based.
        phase: ``Phase.PREFILL`` or ``Phase.DECODE``.
        experts: int32 [A], ascending.
        tokens: int32 [A], tokens routed to each (the workload).
        state: int8 [A] on the (home) GPU: ABSENT, IN_FLIGHT or RESIDENT when the layer
            step is planned.
        cpu_s: float64 [A], compute on the CPU once the weights are in host memory.
        host_s: float64 [A], until the weights are in host memory; 0 if they are.
        gpu_s: float64 [G, A], compute on each GPU once resident.
        arrive_s: float64 [G, A], until the weights are on that GPU (SSD read included);
            0 if resident, the remaining time if in flight, and if absent what a copy
            would take that is the next one on the link.
        routing: uint16 [T, K], experts of every token, best first.
        weights: float16 [T, K] combine weights, or None where the trace has none.
        scores: float16 [T, E] gate scores before top-k, or None.
        predicted: predictor name (``pred1_raw`` …) -> float16 [T, E] scores for a
            coming layer.
        batch: group of sequences, counted over the whole run; another number means that
            new sequences began.
        precomputed: bool [A], experts that the CPU began to compute one layer ahead;
            None where there are none. They stay on the CPU.
        link_s: float64 [G], until each link has ended the copy under way; contained in
            `arrive_s` of what is absent, of which only the first waits for it. None
            where all links are idle.
    """

    step: int
    layer: int
    phase: Phase
    experts: np.ndarray
    tokens: np.ndarray
    state: np.ndarray
    cpu_s: np.ndarray
    host_s: np.ndarray
    gpu_s: np.ndarray
    arrive_s: np.ndarray
    routing: np.ndarray
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    predicted: Mapping[str, np.ndarray] = field(default_factory=dict)
    batch: int = 0
    precomputed: np.ndarray | None = None
    link_s: np.ndarray | None = None
    # What `moesim.policies.compiled` has handed to kernels; nobody else's.
    handed: Any = field(default=None, init=False, repr=False, compare=False)


def flat_keys(work: LayerWork, width: int) -> np.ndarray:
    """Flat keys, ``layer * width + expert``, of the active experts of a layer step in a
    model with `width` experts per layer: int64 [A], ascending.
    """
    # Expert ids are int32, in which the product could overflow.
    return work.layer * width + work.experts.astype(np.int64)


class Assignment(NamedTuple):
    """Where each active expert is computed, and in which order they are launched.

    Attributes:
        lanes: int8 [A]: CPU (0) or 1 + GPU index; `DEFERRED` of policies that defer.
        order: int [A] permutation of positions, first launched first; None for
            ascending expert id. Each lane keeps this order, except that a GPU runs
            resident experts before arrivals.
        serial: True if the CPU begins only when every fetched expert has been computed
            on its GPU.
        waits: True if no product of the layer step begins on a GPU before every copy of
            the layer has landed; staging must be able to hold them all.
    """

    lanes: np.ndarray
    order: np.ndarray | None = None
    serial: bool = False
    waits: bool = False


class Precompute(NamedTuple):
    """Experts of the next layer that the CPU starts on this layer's hidden state
    (DAOP's pre-calculation).

    `experts` int32 [B] ascending, `tokens` int32 [B] predicted for each. Those that the
    next layer really uses are joined there; the others were in vain. `routing` uint16
    [T, K], the experts predicted for each token, tells which tokens those are: where
    experts really work, an expert that was not predicted for a token is computed in its
    own layer. None leaves that open.
    """

    experts: np.ndarray
    tokens: np.ndarray
    routing: np.ndarray | None = None


class Evaluations(NamedTuple):
    """What a prediction costs the home GPU beyond the model's own work, in one layer
    step, in units of what a profile knows the seconds of.

    Attributes:
        gates: gates of coming layers, on this layer's input. They are part of its dense
            part, so planning waits for them.
        dense_parts: dense parts of coming layers (attention, gate, shared experts),
            computed behind the layer's resident experts. Prefetches start after them,
            and the layer step ends after them.
    """

    gates: int = 0
    dense_parts: int = 0


class MachineView(Protocol):
    """What a real system would know at the moment of planning. No clock, no future."""

    shape: ModelShape
    layers: int
    experts: int
    gpus: int
    cpu_first_s: float
    """Extra seconds of the first CPU expert of a layer step."""
    gap_s: float
    """Seconds from the last layer's end to this one's planning: its dense part, mostly.

    As last seen within a forward pass; 0 until then.
    """

    def resident(self, layer: int, gpu: int = 0) -> np.ndarray:
        """Bool [E]: usable on that GPU now."""

    def in_flight(self, layer: int, gpu: int = 0) -> np.ndarray:
        """Bool [E]: being copied to that GPU."""

    def capacity(self, layer: int, gpu: int = 0) -> int:
        """Cache slots: of this layer (per-layer scope) or of the whole GPU (global
        scope).
        """

    def copy_s(self, layer: int, expert: int | None = None) -> float:
        """Seconds to copy an expert of this layer from host memory to a GPU; one of
        mean size, if none is named.
        """

    def link_wait_s(self, gpu: int = 0) -> float:
        """Seconds until the host-to-GPU link has served everything already queued on
        it.
        """

    def cpu_s(
        self,
        layer: int,
        tokens: np.ndarray,
        experts: np.ndarray | None = None,
    ) -> np.ndarray:
        """Seconds that experts take on the CPU, float64, same shape as `tokens`; of
        mean size, if none are named.
        """

    def gpu_s(
        self,
        layer: int,
        tokens: np.ndarray,
        experts: np.ndarray | None = None,
    ) -> np.ndarray:
        """The same of resident experts on a GPU."""


class Gate(NamedTuple):
    """Outputs of a layer's gate for the tokens of this step.

    `experts` uint16 [T, K] as recorded, best first; `weights` float16 [T, K] or None;
    `scores` float16 [T, E] or None; `predicted` float16 [T, E]: this gate's scores on
    the input of the layer before (``pred1_raw``), or None.
    """

    step: int
    layer: int
    phase: Phase
    experts: np.ndarray
    weights: np.ndarray | None
    scores: np.ndarray | None
    predicted: np.ndarray | None = None


class Routing(NamedTuple):
    """Experts that really serve the tokens: `experts` uint16 [T, K], `weights` float
    [T, K] or None.

    A token may have fewer experts than K: repeat none, and mark unused columns with
    weight 0 and expert 65535.
    """

    experts: np.ndarray
    weights: np.ndarray | None


class Future(Protocol):
    """The whole routing of a replay, given only to policies that declare ``oracle =
    True``.
    """

    def next_use(self, step: int, layer: int, expert: int) -> int:
        """First step strictly after `step` in which this expert is active; a number
        past the end if never.
        """

    def next_uses(
        self,
        step: int,
        layer: int,
        experts: np.ndarray,
    ) -> np.ndarray:
        """int64, same shape as `experts`: `next_use` of each."""

    def active(self, step: int, layer: int) -> np.ndarray:
        """int32 [A], ascending: the experts that layer step will use; empty past the
        end.
        """

    def tokens(self, step: int, layer: int) -> np.ndarray:
        """int32 [A]: the tokens routed to each of `active`."""

    @property
    def never(self) -> int:
        """The number that stands for "never again"."""

    @property
    def experts(self) -> np.ndarray:
        """int32, the active experts of all layer steps in replay order."""

    @property
    def following(self) -> np.ndarray:
        """int32, by the same accesses: the step of that expert's next use."""

    @property
    def edges(self) -> np.ndarray:
        """int64: layer step ``step * layers + layer`` has the accesses from its own
        edge to the next.
        """


class Policy:
    """Base of all four kinds. Subclass the kind's own base below.

    A class declares its parameters as keyword arguments of `__init__` and checks them
    there. One instance serves one run.

    Attributes:
        name: the registered name, set by the registry when it finds the class; empty
            for a class that was never looked up.
        oracle: whether it must see the future.
        needs: optional trace columns that it reads. A parameter may change them, so ask
            the instance.
        reference: parameter texts with which analyses hold other policies against this
            one, ``""`` for its defaults. Only policies that see nothing but the past
            qualify; a cache must also admit every miss.
        compared_with: specifications of the policies of the same kind that its own
            report judges it beside.
        reads_tokens: whether its kernels read the gate outputs of single tokens.
        reads_states: whether its kernels read where all experts of a layer are.
        own_planning_s: seconds that its decisions about one layer step take, where that
            is more than what a machine's planning counts for all policies.
    """

    # The registry knows policies by class. Code that needs to tell them apart reads
    # attributes such as these, and never compares names.
    name: ClassVar[str] = ""
    oracle: ClassVar[bool] = False
    reference: ClassVar[tuple[str, ...]] = ()
    compared_with: ClassVar[tuple[str, ...]] = ()
    needs: tuple[str, ...] = ()
    # May be parameters of a policy, as what it needs.
    reads_tokens: bool = False
    reads_states: bool = False
    own_planning_s: float = 0.0

    def start(self, context: RunContext) -> None:
        """Learn the sizes of the run, once, before the first layer step."""

    def remarks(self) -> Sequence[str]:
        """What a reader of the run's figures should know, one line each; asked when the
        run has ended. Default: nothing.
        """
        return ()

    def kernels(self) -> Any:
        """Compiled functions that answer in this policy's place, with what it knows.

        Asked once, when memories have their first content. None, the default, lets the
        policy itself answer: see `moesim.policies.kernels`.
        """
        return None


# Frozen, as all policies of a run are started with the same one.
@dataclass(frozen=True, slots=True)
class RunContext:
    """What is fixed for one run.

    Attributes:
        shape: the model.
        gpus: number of GPUs.
        capacity_slots: int [L] cache slots per layer (per-layer scope), or one entry
            (global scope).
        scope: ``layer`` or ``global``.
        seed: for policies that draw: ``random.Random(seed)`` or
            ``numpy.random.default_rng(seed)``.
        calibration: activation counts float64 [L, E] of a calibration trace, or None.
        future: only for oracles.
        extras: calibration artefacts by name (tables, trained networks).
        costs: what operations take on this machine; None where a cache is driven alone.
        served: bool [L], layers that this memory serves: some of them where the layers
            are divided among several GPUs; None for all.
        gpu: the GPU whose memory a cache serves; 0 for other policies.
        pool_bytes: int64 [L] or [1], bytes of each pool, as in `capacity_slots`; None
            where slots say everything. Experts of unequal layers fill a global pool by
            bytes: its one entry of `capacity_slots` counts the largest.
        shared: what policies of the run know together, by what describes it: see
            `share`.
    """

    shape: ModelShape
    gpus: int
    capacity_slots: np.ndarray
    scope: str
    seed: int = 0
    calibration: np.ndarray | None = None
    future: Future | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    costs: Costs | None = None
    served: np.ndarray | None = None
    gpu: int = 0
    pool_bytes: np.ndarray | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    def share(self, description: Any, make: Callable[[], _Shared]) -> _Shared:
        """What several policies of this run know together: made for the first that
        asks, the same for all that ask with an equal, hashable `description`.
        """
        if description not in self.shared:
            self.shared[description] = make()
        known: _Shared = self.shared[description]
        return known


class AssignmentPolicy(Policy, ABC):
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
        precomputes: whether it names experts that are computed ahead of their gate: the
            class overrides `precompute`.
    """

    # Both may be parameters of a policy.
    approximates: bool = False
    defers: bool = False
    places_on_gpu: ClassVar[bool] = True
    calibrates_planning: ClassVar[bool] = False

    @property
    def precomputes(self) -> bool:
        """See the class."""
        return type(self).precompute is not AssignmentPolicy.precompute

    @abstractmethod
    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place every active expert exactly once."""

    def precompute(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Precompute | None:
        """Name experts of layer ``work.layer + 1`` that the CPU computes ahead of their
        gate. Default: none.
        """
        # Named and unused: a policy that overrides this keeps the parameters' names.
        del work, view
        return None


class PrefetchPolicy(Policy, ABC):
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
            could hold them all. ``active`` is an older word for ``drop``.
        requeue: whether those for all other layers are forgotten as well before each
            layer step, so that naming them again, or not, sorts the queue anew.
        no_place: what becomes of a copy that the cache policy declines, or for which
            everybody is held, when it could start: ``stage`` uses a staging slot, waits
            for one that demand uses, and is dropped where other prefetches have them
            all; ``wait`` stays at the head of the queue until there is any place;
            ``drop`` never stages.
        buffer_slots: staging slots that it needs beside those of the system or the
            profile, as what it names never enters the cache.
        reads_routing: whether its kernel reads the experts of single tokens.
        foresees_passes: whether it also names experts of the next forward passes, in
            layers that this one has behind it.
    """

    # `late`, `requeue` and `no_place` may be parameters of a policy, so they are asked
    # of the instance; `prefetches` is a property of the class.
    prefetches: ClassVar[bool] = True
    late: Late = "drop"
    requeue: bool = False
    no_place: NoPlace = "stage"
    buffer_slots: int = 0
    reads_routing: ClassVar[bool] = False
    foresees_passes: ClassVar[bool] = False

    @abstractmethod
    def prefetch(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[ExpertKey]:
        """Keys of coming layers, most wanted first; the planner drops what is present
        and trims to the budget.
        """

    def foretold(
        self, experts: np.ndarray, draft_s: float, view: MachineView
    ) -> Sequence[ExpertKey]:
        """Keys that a drafted token foretells, most wanted first, before the pass that
        verifies it begins. Default: none.

        Args:
            experts: uint16 [L, K], those that the token really uses: which of them a
                draft knows is the policy's own assumption, so it is an oracle.
            draft_s: seconds until the next token is drafted.
            view: the machine.
        """
        del experts, draft_s, view
        return ()

    @property
    def foretells(self) -> bool:
        """Whether drafted tokens tell it anything: the class overrides `foretold`."""
        return type(self).foretold is not PrefetchPolicy.foretold

    def drafted(self, experts: np.ndarray) -> np.ndarray:
        """What drafts know of these experts of drafted tokens, [D, L, K]: int32, -1 for
        nothing. Of policies whose kernel answers `foretold`. Default: all.
        """
        return experts.astype(np.int32)

    def evaluations(self, following: int, phase: Phase) -> Evaluations:
        """What the prediction of one layer step evaluates on the GPU. Default: nothing.

        `following` counts the layers behind this one, at least 1. A table, an oracle or
        a gate that decides early in the place of the layer's own costs nothing more.
        What a trace replays as a recorded column is charged here.
        """
        del following, phase
        return Evaluations()


class CachePolicy(Policy, ABC):
    """Decides which fetched experts enter a memory, and which residents leave it.

    It is asked once per layer step and memory, and never about bytes. Experts are
    passed as flat keys, ``layer * E + expert`` (int64), so one policy serves both
    scopes.

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

    # May be a parameter of a policy, so it is asked of the instance.
    lands_by_next_visit: bool = False
    replaces_first: bool = False
    choosing_s: float = 0.0

    @property
    def replaces(self) -> bool:
        """Whether it asks for copies of its own: the class overrides `replacements`."""
        # Read off the class, so that no policy can forget to set a flag.
        return type(self).replacements is not CachePolicy.replacements

    def accessed(self, work: LayerWork) -> None:
        """Note the active experts of a layer step: `work.state` tells which were hits.
        Default: nothing.
        """
        # Not abstract: rules that depend on entries alone, such as FIFO, need nothing.
        del work

    def admits(
        self,
        work: LayerWork,
        incoming: np.ndarray,
    ) -> np.ndarray:
        """Bool, same shape as `incoming`: which fetched experts may enter. Default:
        all.
        """
        # Where a policy does not override this, the planner spares the call.
        del work
        return np.ones(len(incoming), dtype=np.bool_)

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """Reorder `incoming`, int64 [M], when there are fewer free slots than keys.
        Default: launch order.

        The first take the free slots, as many of the next as there are candidates are
        shown to `victims`, and the last run from staging.
        """
        return incoming

    @abstractmethod
    def victims(
        self,
        incoming: np.ndarray,
        candidates: np.ndarray,
    ) -> np.ndarray:
        """Choose one distinct victim among `candidates` for each of `incoming`, -1 to
        decline its admission.

        `candidates` int64 [C] ascending: residents of the scope that are not held.
        `incoming` int64 [M], M <= C, in the order of `precedence`.
        """

    def admitted(self, keys: np.ndarray) -> None:
        """Note keys that have entered (demand fetch, prefetch, swap or initial
        filling). Default: nothing.
        """
        del keys

    def evicted(self, keys: np.ndarray) -> None:
        """Note keys that have left. Default: nothing."""
        del keys

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Flat keys that fill the cache before the run; None for the experts that the
        calibration saw most often, if there is one.
        """
        del capacity_slots
        return None

    def replacements(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Sequence[Swap]:
        """Copies the cache itself asks for when its window closes (DALI Alg. 2).
        Default: none.
        """
        del work, view
        return ()


class RoutingPolicy(Policy, ABC):
    """Decides which experts serve each token.

    Attributes:
        alters: whether tokens may get other experts than their gate chose. That changes
            the model's output, and reports say so. Only ``as-recorded`` does not.
    """

    alters: ClassVar[bool] = True

    @abstractmethod
    def route(
        self,
        gate: Gate,
        view: MachineView,
    ) -> Routing:
        """Experts and combine weights as they will really be used."""
