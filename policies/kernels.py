"""What a policy brings so that a whole run can be compiled: its state and its kernels.

A policy *may* answer `kernels()`: arrays that hold all it knows, and compiled functions
on them, one for each question. The compiled engine asks these; the policy's own methods
call the same functions, so each decision is written once. A policy without kernels runs
as well, in the engine that everybody can read.

Kernels have fixed signatures, those below, so that one compiled loop serves all of
them. They may change their state and what is named as a result, and nothing else.

A active experts, G GPUs, L layers, E experts of a layer, T tokens, K experts per token,
M incoming, C candidates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled, structure
from moesim.machine_code.types import input_array


class State(NamedTuple):
    """All that a policy's kernels know, in four arrays of whatever size it wants.

    Attributes:
        scores: float64 [R, N], mostly a row of one number per expert, by flat key.
        marks: int64 [S, N], likewise.
        numbers: float64, single numbers.
        integers: int64, likewise.
    """

    scores: np.ndarray
    marks: np.ndarray
    numbers: np.ndarray
    integers: np.ndarray


def _state(
    scores: Any = (), marks: Any = (), numbers: Any = (), integers: Any = ()
) -> State:
    """Make a state of rows and numbers; what is left out is empty."""
    return State(
        scores=_rows(scores, np.float64),
        marks=_rows(marks, np.int64),
        numbers=np.array(numbers, np.float64),
        integers=np.array(integers, np.int64),
    )


def _rows(rows: Any, dtype: type) -> np.ndarray:
    if not len(rows):
        return np.zeros((0, 0), dtype)
    return np.array(rows, dtype, ndmin=2)


class Work(NamedTuple):
    """The work of one layer step, as `moesim.policies.base.LayerWork` has it.

    Attributes:
        step, layer, phase, batch: as there.
        rows: tokens of the layer step.
        experts, tokens: int32 [A].
        state: int8 [A].
        cpu_s, host_s: float64 [A].
        gpu_s, arrive_s: float64 [G, A].
        link_s: float64 [G], until each link has ended the copy under way.
        gpu_state: int8 [G * A], state of every expert on one GPU after the other.
        scores: float64 [E], gate scores, mean over the tokens; empty if there are none.
        first_scores: float64 [E], those of the first token; empty unless the policy
            `reads_tokens`.
        states: int8 [G, L * E], state of every expert of the layer on every GPU; no
            rows unless the policy `reads_states`.
        first_cpu_s: extra seconds of the first CPU expert of a layer step.
        ranks: int32 [A], the best place that each expert has among the experts of any
            token, 0 for a token's first; empty unless the policy `defers`.
    """

    step: int
    layer: int
    phase: int
    batch: int
    rows: int
    experts: np.ndarray
    tokens: np.ndarray
    state: np.ndarray
    cpu_s: np.ndarray
    host_s: np.ndarray
    gpu_s: np.ndarray
    arrive_s: np.ndarray
    link_s: np.ndarray
    gpu_state: np.ndarray
    scores: np.ndarray
    first_scores: np.ndarray
    states: np.ndarray
    first_cpu_s: float
    ranks: np.ndarray


class KernelView(NamedTuple):
    """What a prefetch kernel sees beside the layer step: the machine, as
    `moesim.policies.base.MachineView` has it, and what the trace says ahead of time.

    T tokens, K experts per token, L layers, E experts, P predictors that the policy
    needs, N tokens.

    Attributes:
        states: int8 [G, L * E], state of every expert on every GPU.
        routing: uint16 [T, K], experts of every token; no rows unless the policy
            `reads_routing`.
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
        copy_s: float64 [L], one expert's copy from host memory to a GPU.
        cpu_s, gpu_s: float64 [L, N], one expert's seconds by its tokens.
        link_wait_s: until the first GPU's link has served what is queued on it.
        gap_s: from the last layer's end to this one's planning.
    """

    states: np.ndarray
    routing: np.ndarray
    before: np.ndarray
    before_that: np.ndarray
    workload: np.ndarray
    score_sums: np.ndarray
    predicted: np.ndarray
    coming: np.ndarray
    coming_edges: np.ndarray
    copy_s: np.ndarray
    cpu_s: np.ndarray
    gpu_s: np.ndarray
    link_wait_s: float
    gap_s: float


class GateWork(NamedTuple):
    """Outputs of a layer's gate, as `moesim.policies.base.Gate` has them. What a trace
    lacks has no rows.

    Attributes:
        step, layer, phase: as there.
        experts: uint16 [T, K].
        weights: float64 [T, K].
        scores, predicted: float64 [T, E].
        states: int8 [G, L * E], state of every expert on every GPU.
    """

    step: int
    layer: int
    phase: int
    experts: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    predicted: np.ndarray
    states: np.ndarray


KEYS = input_array(nb.int64)
"""Flat keys of experts, ``layer * experts + expert``."""

EXPERT_IDS = input_array(nb.int32)
"""Ids of experts within one layer, or their workloads."""

SECONDS = input_array(nb.float64)
"""One number per expert: seconds, or scores."""

SECONDS_BY_GPU = input_array(nb.float64, 2)
"""Seconds per GPU and expert."""

LANES = nb.int8[::1]
"""Chosen lane of each active expert."""

ORDER = nb.int64[::1]
"""Positions of the active experts in launch order."""

_INT32 = nb.int32[::1]
_SECONDS = nb.float64[::1]
_KEYS = nb.int64[::1]

STATE = structure(
    State, (nb.float64[:, ::1], nb.int64[:, ::1], nb.float64[::1], nb.int64[::1])
)
WORK = structure(
    Work,
    (
        *[nb.int64] * 5,
        EXPERT_IDS,
        EXPERT_IDS,
        input_array(nb.int8),
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        SECONDS,
        input_array(nb.int8),
        SECONDS,
        SECONDS,
        input_array(nb.int8, 2),
        nb.float64,
        EXPERT_IDS,
    ),
)

VIEW = structure(
    KernelView,
    (
        nb.int8[:, ::1],
        *[nb.uint16[:, ::1]] * 3,
        nb.int32[:, ::1],
        nb.float32[:, ::1],
        nb.float64[:, ::1],
        _INT32,
        _KEYS,
        _SECONDS,
        nb.float64[:, ::1],
        nb.float64[:, ::1],
        nb.float64,
        nb.float64,
    ),
)

GATE = structure(
    GateWork,
    (
        *[nb.int64] * 3,
        input_array(nb.uint16, 2),
        *[input_array(nb.float64, 2)] * 3,
        nb.int8[:, ::1],
    ),
)

SERIAL = 1
WAITS = 2
"""What an assignment kernel may answer, added up: see `Assignment`."""

ASSIGN = nb.int64(STATE, WORK, nb.int8[::1], nb.int64[::1])
"""``assign(state, work, lanes, order) -> flags``: fills in lanes and launch order."""

PRECOMPUTE = nb.int64(STATE, GATE, nb.uint16[::1], nb.int32[::1])
"""``precompute(state, gate, routing, tokens) -> columns``, of the next layer before its
gate has spoken: fills in the experts that are predicted for its tokens, row by row, and
how many tokens of each expert the CPU starts now; 0 columns for none.
"""

ROUTE = nb.int64(STATE, GATE, nb.uint16[::1])
"""``route(state, gate, routing) -> columns``: fills in the experts of every token, row
by row, `UNUSED` in unused places; 0 columns leave the recorded ones.
"""

ACCESSED = nb.void(STATE, WORK)
"""``accessed(state, work)``."""

ADMITS = nb.void(STATE, WORK, _KEYS, nb.boolean[::1])
"""``admits(state, work, incoming, answers)``: fills in which may enter."""

PRECEDENCE = nb.void(STATE, _KEYS)
"""``precedence(state, incoming)``: reorders them in place."""

VICTIMS = nb.void(STATE, _KEYS, _KEYS, _KEYS)
"""``victims(state, incoming, candidates, chosen)``: fills in one for each incoming."""

MOVED = nb.void(STATE, _KEYS)
"""``admitted(state, keys)`` and ``evicted(state, keys)``."""

REPLACEMENTS = nb.int64(STATE, WORK, nb.int8[::1], _KEYS, _KEYS)
"""``replacements(state, work, states, outgoing, incoming) -> count``: fills in flat
keys of swaps; ``states`` int8 [L * E] is the state of every expert on the cache's GPU.
"""

PREFETCH = nb.int64(STATE, WORK, VIEW, _KEYS)
"""``prefetch(state, work, view, named) -> count``: fills in flat keys of experts of
coming layers, most wanted first.
"""

FORETOLD = nb.int64(STATE, input_array(nb.int32, 2), nb.float64, VIEW, _KEYS)
"""``foretold(state, predicted, draft_s, view, named) -> count``: as `PREFETCH`, of a
drafted token; ``predicted`` [L, K] are the experts that its draft knows of, -1 where it
knows of none. Of the view, what it says of a layer step is empty.
"""

UNUSED = 65535
"""Marks a place that no expert takes in a token's routing."""

KERNELS = {
    "route": ROUTE,
    "assign": ASSIGN,
    "precompute": PRECOMPUTE,
    "prefetch": PREFETCH,
    "foretold": FORETOLD,
    "accessed": ACCESSED,
    "admits": ADMITS,
    "precedence": PRECEDENCE,
    "victims": VICTIMS,
    "admitted": MOVED,
    "evicted": MOVED,
    "replacements": REPLACEMENTS,
}
"""Signatures of all questions."""


@compiled(ACCESSED)
def ignores_accesses(state: State, work: Work) -> None:
    """Learn nothing from accesses."""


@compiled(ADMITS)
def admits_all(
    state: State, work: Work, incoming: np.ndarray, answers: np.ndarray
) -> None:
    """Admit everything."""
    for n in range(len(answers)):
        answers[n] = True


@compiled(ADMITS)
def admits_nothing(
    state: State, work: Work, incoming: np.ndarray, answers: np.ndarray
) -> None:
    """Admit nothing."""
    for n in range(len(answers)):
        answers[n] = False


@compiled(PRECEDENCE)
def launch_order(state: State, incoming: np.ndarray) -> None:
    """Leave incoming keys in launch order."""


@compiled(VICTIMS)
def declines_all(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Decline all."""
    for n in range(len(chosen)):
        chosen[n] = -1


@compiled(MOVED)
def ignores_moves(state: State, keys: np.ndarray) -> None:
    """Learn nothing from what enters or leaves."""


@compiled(REPLACEMENTS)
def replaces_nothing(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Ask for no copies."""
    return 0


@compiled(PREFETCH)
def prefetches_nothing(
    state: State, work: Work, view: KernelView, named: np.ndarray
) -> int:
    """Name nothing."""
    return 0


@compiled(FORETOLD)
def foretells_nothing(
    state: State,
    predicted: np.ndarray,
    draft_s: float,
    view: KernelView,
    named: np.ndarray,
) -> int:
    """Name nothing."""
    return 0


@compiled(PRECOMPUTE)
def precomputes_nothing(
    state: State, gate: GateWork, routing: np.ndarray, tokens: np.ndarray
) -> int:
    """Start nothing."""
    return 0


@compiled(ROUTE)
def routes_as_recorded(state: State, gate: GateWork, routing: np.ndarray) -> int:
    """Leave every token its experts."""
    return 0


# Fields of this name stand beside the function.
state = _state


class AssignmentKernels(NamedTuple):
    """What an assignment policy brings. Kernels are functions compiled for `ASSIGN`."""

    assign: Any
    state: State = _state()
    precompute: Any = precomputes_nothing


class RoutingKernels(NamedTuple):
    """What a routing policy brings."""

    route: Any = routes_as_recorded
    state: State = _state()


class PrefetchKernels(NamedTuple):
    """What a prefetch policy brings."""

    prefetch: Any = prefetches_nothing
    state: State = _state()
    foretold: Any = foretells_nothing


class CacheKernels(NamedTuple):
    """What a cache policy brings; what it leaves out is as in `CachePolicy`."""

    state: State
    victims: Any = declines_all
    accessed: Any = ignores_accesses
    admits: Any = admits_all
    precedence: Any = launch_order
    admitted: Any = ignores_moves
    evicted: Any = ignores_moves
    replacements: Any = replaces_nothing
