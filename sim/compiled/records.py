"""What the compiled loop knows, as arrays of records: the books of `moesim.engine`,
`moesim.sim` and `moesim.policies.planner`.

M memories (GPUs, then limited host memory), K experts of the model by flat key, L
layers, G GPUs, N lanes. Operations are named by their places in one array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moesim.machine_code.types import (
    Array,
    Pointers,
    Record,
    Scalar,
    int64,
    void,
)
from moesim.policies.kernels import KERNELS as POLICY_KERNELS

MOST_LANES = 32
"""Lanes that a worker's record has room for."""

KEPT_ROUTING = 3
"""Layers whose altered routing is kept."""

NONE = -1
"""No operation, no key, no GPU."""


def _record(fields: list[Any]) -> np.dtype:
    return np.dtype(fields, align=True)


RUN = _record(
    [
        ("now_s", np.float64),
        ("joined_s", np.float64),
        ("gap_s", np.float64),
        ("scheduled", np.int64),  # events so far; equal ends keep this order
        ("events", np.int64),
        ("turns", np.int64),
        ("running", np.int64),
        ("free", np.int64),  # first unused operation
        ("operations", np.int64),  # in use
        ("evicted", np.int64),  # the first that left for the copy that starts
        ("spans", np.int64),
        ("pending", np.int64),
        ("fetched", np.int64),
        ("held", np.int64),
        ("reports", np.int64),
        ("awaited", np.int64),  # products of earlier layer steps, by the next one
        ("copies", np.int64),
        ("promoted", np.int64),
        ("swaps", np.int64),
        ("wishes", np.int64),
        ("queued", np.int64),  # copies that have not landed
        ("prefetches", np.int64),  # queued prefetches
        ("prefetched", np.int64),  # layers in `prefetched_layers`
        ("place", np.int64),  # of the layer step under way in its block
        ("barred", np.int64),  # products that wait for all copies of their layer
        ("barred_layer", np.int64),  # whose copies these are; -1 before all are known
        ("step", np.int64),
        ("layer_steps", np.int64),
        ("drafts", np.int64),  # drafted tokens of the block that have been read
        ("released", np.int64),  # active residents that nobody holds any more
        ("looked", np.int64),  # how often a layer step's work was looked up or changed
        (
            "columns",
            np.int64,
            (KEPT_ROUTING,),
        ),  # of `routed`; 0 where routing is as recorded
        ("exposed_s", np.float64),  # by which choosing victims outlasts a first load
        ("pass_s", np.float64),
        ("error", np.int64),
        ("read_step", np.int64),  # of the last read that a layer step demanded
        ("read_layer", np.int64),
        ("turn", np.bool_),
        ("takes", np.bool_),  # control's worker, as soon as it is free
        ("has_read", np.bool_),  # the last layer step demanded reads
        ("closed", np.bool_),
        ("predicting", np.bool_),
        ("precomputed", np.bool_),  # the layer step has products ahead of its gate
        ("begins", np.bool_),  # it begins such products of the next one
        ("defers", np.bool_),  # it leaves results to the next one
    ]
)
"""One record: clock and counters."""

OPERATION = _record(
    [
        ("lane", np.int64),
        ("kind", np.int64),
        ("step", np.int64),
        ("layer", np.int64),
        ("expert", np.int64),
        ("nbytes", np.int64),
        ("on_end", np.int64),
        ("priority", np.int64),
        # In its queue; of a free one the next free one + 1, 0 for the place behind it.
        ("next", np.int64),
        ("previous", np.int64),
        ("order", np.int64),
        ("work_s", np.float64),
        ("start_s", np.float64),
        ("end_s", np.float64),
        ("left_s", np.float64),
        ("rate", np.float64),
        ("settled_s", np.float64),
        ("awaits_read", np.bool_),  # a copy behind the read of its expert
    ]
)
"""As `moesim.sim.clock.Operation`; `next` and `previous` link a queue."""

LANE = _record(
    [
        ("worker", np.int64),
        ("gpu", np.int64),
        ("end_rank", np.int64),
        ("drawn", np.int64),  # noise factors used
        ("gated", np.bool_),
        ("first", np.int64, (3,)),
        ("last", np.int64, (3,)),
    ]
)
"""A lane with one queue for each priority."""

WORKER = _record(
    [
        ("busy", np.bool_),
        ("gated", np.bool_),
        ("waiting", np.int64),
        ("count", np.int64),
        ("lanes", np.int64, (MOST_LANES,)),
    ]
)

EXPERT = _record(
    [
        ("landing_s", np.float64),
        ("order", np.int64),  # of the wish, among all wishes
        ("room", np.int64),
        ("victim", np.int64),  # the first that is promised to leave for it
        ("next_victim", np.int64),  # that leaves for the same copy, after this expert
        ("replaces", np.int64),
        ("queued", np.int64),  # the copy's operation; in host memory, the read's
        ("awaiting", np.int64),  # the product that waits for it
        # In memory 0, the product that runs ahead of its gate or joins one layer later.
        ("ahead", np.int64),
        ("first_copy", np.int64),  # copies that wait for a read
        ("last_copy", np.int64),
        ("staged", np.bool_),
        ("used", np.bool_),
        ("cpu_reads", np.bool_),  # this layer step reads it for the CPU
        ("started", np.bool_),  # the coming layer step finds it begun; in memory 0
        ("held_ahead", np.bool_),  # for that, until its layer step is over
        ("shielded", np.bool_),
        ("orphan", np.bool_),
        ("copying", np.bool_),
        ("wished", np.bool_),
        ("enters", np.bool_),
        ("demanded", np.bool_),
        ("hurried", np.bool_),
        ("promised", np.bool_),
    ]
)
"""One expert in one memory: as in `Residency`, `Wish` and `Transfers`."""

MEMORY = _record(
    [
        ("is_global", np.bool_),
        ("equal_sizes", np.bool_),  # all experts of a pool weigh the same
        ("admits_all", np.bool_),
        ("in_launch_order", np.bool_),
        ("replaces", np.bool_),
        ("hurries", np.bool_),
        ("staging", np.int64),
        ("staged", np.int64),
        ("used_bytes", np.int64),
        ("used_high_bytes", np.int64),
        ("busy_until_s", np.float64),
        ("queued_s", np.float64),
        ("queued", np.int64),
        # Where the arrays of the cache's state lie, and their sizes.
        ("state", np.int64, (10,)),
    ]
)
"""One memory, the link into it, and the state of its cache policy."""

POOL = _record(
    [
        ("free_bytes", np.int64),
        ("promised_bytes", np.int64),
        ("staged", np.int64),
        ("outstanding", np.int64),  # copies for it to any GPU that have not landed
        ("unawaited", np.int64),  # queued ones of them that no layer step waits for
        ("prefetched", np.bool_),  # a prefetch was queued for it, ever
        ("started", np.bool_),  # products ahead of its gate were named
    ]
)
"""Of one memory and layer; with the global scope bytes stand at layer 0. The last
four are the first memory's alone.
"""

COPY = _record(
    [
        ("read", np.bool_),  # its expert must first be read
        ("kind", np.int64),
        ("gpu", np.int64),
        ("layer", np.int64),
        ("expert", np.int64),
    ]
)
"""A copy that a plan wishes for; a swap has its outgoing expert as `kind`."""

REPORT = _record(
    [("kind", np.int64), ("gpu", np.int64), ("layer", np.int64), ("expert", np.int64)]
)
"""A report, by what has ended, that waits until decisions are over."""

CONSTANTS = _record(
    [
        ("gpus", np.int64),
        ("layers", np.int64),
        ("experts", np.int64),
        ("late", np.int64),
        ("no_place", np.int64),
        ("budget_bytes", np.int64),  # negative for no limit
        ("dispatch_s", np.float64),
        ("cpu_first_s", np.float64),
        ("gpu_first_s", np.float64),
        # Base, per expert, per copy, and with an SSD.
        ("planning_s", np.float64, (4,)),
        ("first_op_s", np.float64, (4,)),
        ("join_s", np.float64, (4,)),
        ("host", np.int64),  # which memory is limited host memory; -1 for none
        ("host_cache", np.int64),  # address of a table with its cache's kernels
        ("first_read_s", np.float64),
        # Factors on what follows a read.
        ("dense_after_read", np.float64),
        ("copy_after_read", np.float64),
        ("compute_after_read", np.float64),
        # Where the arrays of the policies' states lie, and their sizes.
        ("assignment", np.int64, (10,)),
        ("prefetch", np.int64, (10,)),
        ("routing", np.int64, (10,)),
        ("choosing_s", np.float64),  # of victims, by caches of GPUs
        ("splits_layers", np.bool_),
        ("moves_activations", np.bool_),
        ("writes_back", np.bool_),  # what leaves a GPU is copied to host memory
        ("inline", np.bool_),  # one thread serves control and the first GPU
        ("prefetches", np.bool_),
        ("requeue", np.bool_),
        ("oracle", np.bool_),  # the prefetch policy knows the future
        ("reads_routing", np.bool_),
        ("alters", np.bool_),  # routing
        ("notes_mass", np.bool_),  # of the gates, that altered routing keeps
        ("precomputes", np.bool_),
        ("defers", np.bool_),
        ("foretells", np.bool_),
        ("replaces_first", np.bool_),  # caches do, before their layer step
    ]
)
"""What does not change within a run; knobs of the prefetch policy as numbers."""

RECORDS = {"run": RUN, "constants": CONSTANTS}
"""What the loop has one of."""

ARRAYS: dict[str, tuple[Any, int]] = {
    # Lanes, and what runs.
    "operations": (OPERATION, 1),
    "lanes": (LANE, 1),
    "workers": (WORKER, 1),
    "running": (np.int64, 1),  # operations, first started first
    "slowdown": (np.float64, 2),  # [N, N]; empty where nothing slows anything
    "noise": (np.float64, 2),  # [N, draws]; empty for none
    "held": (np.int64, 1),  # what the CPU of a serial plan will start with
    "barred": (np.int64, 1),
    "reports": (REPORT, 1),
    "awaited": (np.int64, 1),  # keys
    # Spans.
    "codes": (np.int8, 2),  # [2, spans]: lane, kind
    "places": (np.int32, 2),  # [3, spans]: step, layer, expert
    "times_s": (np.float64, 2),  # [2, spans]: start, end
    "nbytes": (np.int64, 1),
    # Memories.
    "state": (np.int8, 2),  # [M, K]
    "holds": (np.int16, 2),  # [M, K]
    "experts": (EXPERT, 2),  # [M, K]
    "memories": (MEMORY, 1),
    "pools": (POOL, 2),  # [M, L]
    "prefetched_layers": (np.int64, 1),  # in the order of their first prefetches
    # The plan under way.
    "copies": (COPY, 1),
    "promoted": (COPY, 1),
    "swaps": (COPY, 1),
    "released": (COPY, 1),
    # Room for lists of keys, [7, K], and for answers.
    "keys": (np.int64, 2),
    "answers": (np.bool_, 1),
    # Sizes and seconds.
    "size_of": (np.int16, 1),  # [K], which of the model's S sizes an expert has
    "size_bytes": (np.int64, 1),  # [S]
    "copy_s": (np.float64, 2),  # [G, S]
    "back_s": (np.float64, 2),  # [G, S], of a copy to host memory
    "read_s": (np.float64, 1),  # [S]; empty where host memory holds everything
    "mean_copy_s": (np.float64, 1),  # [L], of an expert of mean size
    "cpu_s": (np.float64, 2),  # [L, T + 1], by tokens; of mean size
    "gpu_s": (np.float64, 2),
    "cpu_by_size_s": (np.float64, 2),  # [S, T + 1]
    "gpu_by_size_s": (np.float64, 2),
    "evaluations": (np.int64, 3),  # [L, phases, 2]: gates, dense parts
    "lane_by_use": (np.int64, 1),  # control, ssd, cpu, GPUs, links to, links back
    # A block of S layer steps, as `moesim.traces.format.layer_steps` cuts them.
    "step": (np.int64, 1),
    "batch": (np.int64, 1),
    "rows": (np.int64, 1),  # tokens of each layer step
    "layer": (np.int64, 1),
    "edges": (np.int64, 1),
    "phase": (np.int8, 1),
    "active": (np.int32, 1),  # experts, access by access, as recorded
    "tokens": (np.int32, 1),
    "drafted": (np.int64, 1),  # tokens of the pass that begins here; 0 elsewhere
    "draft_s": (np.float64, 1),  # seconds of each
    "drafts": (np.int32, 2),  # [D L, K], what drafts know of these tokens
    "scores": (np.float64, 2),  # [S, E] or [0, 0]
    "workload": (np.int32, 3),  # [S, P, E], predicted
    "score_sums": (np.float32, 3),
    "routing": (np.uint16, 2),  # [R, K] or [0, 0]
    "row_edges": (np.int64, 1),
    "token_scores": (np.float64, 2),  # [R, E] or [0, 0], and so the next two
    "token_weights": (np.float64, 2),  # [R, K]
    "token_predicted": (np.float64, 2),  # [R, E]
    "dense_s": (np.float64, 1),
    "gate_s": (np.float64, 1),
    "head_s": (np.float64, 1),  # negative but in the last layer step of a pass
    "activation_s": (np.float64, 1),
    # What the loop finds out about them.
    "served": (np.int32, 1),  # experts by access, once they have been routed
    "served_tokens": (np.int32, 1),
    "served_edges": (np.int64, 1),
    "gate_mass": (np.float64, 1),  # [S]
    "lane_of": (np.int8, 1),  # by access
    "state_of": (np.int8, 1),
    "start_s": (np.float64, 1),  # of the pass, in its last layer step
    "end_s": (np.float64, 1),
    # Room for the arrays of one layer step.
    "routed": (np.uint16, 2),  # [4, T E], altered routing; predicted one
    "counts": (np.int32, 1),  # [E], tokens
    "ahead_tokens": (np.int32, 1),  # [E], of products ahead of their gate
    "work_precomputed": (np.bool_, 1),
    "work_deferred": (np.bool_, 1),
    "work_ranks": (np.int32, 1),
    "work_s": (np.float64, 2),  # [4, G E]
    "work_state": (np.int8, 2),  # [2, G E]
    "work_lanes": (np.int8, 1),
    "work_order": (np.int64, 1),
    "work_link_s": (np.float64, 1),
    "host_work_s": (np.float64, 2),  # as above, of what is asked of host memory
    "host_work_state": (np.int8, 1),
    "host_work_experts": (np.int32, 2),  # [2, E]: experts, tokens
}
"""Types and numbers of axes of all arrays."""


ENTRIES = {
    "serve_worker": void(int64, int64),
    "end_operation": void(int64, int64),
    "plan_layer_step": int64(int64, int64),
}
"""The loop's own parts that call each other in circles. Each takes the table's address.
"""

_ENTRY = 4
"""Slots per name: an address and up to three sizes. A kernel needs no more."""


def _array(dtype: Any, ndim: int) -> Array:
    dtype = np.dtype(dtype)
    if dtype.names:
        return Array(Record(dtype), ndim)
    return Array(Scalar("boolean" if dtype == np.bool_ else dtype.name), ndim)


_KINDS = {
    **{name: _array(*kind) for name, kind in ARRAYS.items()},
    **{name: Record(dtype) for name, dtype in RECORDS.items()},
    **POLICY_KERNELS,
    **ENTRIES,
}
WORLD = Pointers(
    "World",
    {name: (_ENTRY * place, kind) for place, (name, kind) in enumerate(_KINDS.items())},
)
"""The table's type, for `moesim.machine_code.functions.table_at`."""


class World:
    """The arrays of a run, by name, and their table.

    Attributes:
        table: int64, what `table_at` wants the address of.
    """

    def __init__(self) -> None:
        self.table = np.zeros(_ENTRY * len(_KINDS), np.int64)
        self._arrays: dict[str, np.ndarray] = {}

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        """Give the loop an array; records are arrays of one."""
        dtype, ndim = ARRAYS[name] if name in ARRAYS else (RECORDS[name], 1)
        assert array.dtype == np.dtype(dtype), name
        assert array.ndim == ndim, name
        assert array.flags.c_contiguous, name
        place, _ = WORLD.places[name]
        self.table[place] = array.ctypes.data
        self.table[place + 1 : place + 1 + ndim] = array.shape
        # Kept alive as long as the loop may look at it.
        self._arrays[name] = array

    def give_kernels(self, brought: Any) -> None:
        """Give the loop all that a policy brings but its state."""
        for name, kernel in brought._asdict().items():
            if name != "state":
                self.give_kernel(name, kernel)

    def give_kernel(self, name: str, kernel: Any) -> None:
        """Give the loop what it calls by this name: a compiled function."""
        # LLVM takes a moment to load, and not every run that could be compiled is.
        from moesim.machine_code.library import address  # noqa: PLC0415

        place, _ = WORLD.places[name]
        self.table[place] = address(kernel)

    def __getitem__(self, name: str) -> np.ndarray:
        """An array of the loop."""
        return self._arrays[name]
