"""What the lanes do for one layer step: the planner's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.policies.arrays import zeros

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work


class Copies:
    """Copies in queue order, or other pairs of a GPU and an expert.

    Attributes:
        count: how many.
        kind, gpu: int32; key: int64, flat; other: int64, a second key or whether a read
            comes first.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self.kind: Ints = zeros(most, np.int32)
        self.gpu: Ints = zeros(most, np.int32)
        self.key: Ints = zeros(most, np.int64)
        self.other: Ints = zeros(most, np.int64)

    def add(self, kind: int, gpu: int, key: int, other: int) -> None:
        """Append one."""
        n = self.count
        self.kind[n] = kind
        self.gpu[n] = gpu
        self.key[n] = key
        self.other[n] = other
        self.count = n + 1


class Plan:
    """What the lanes do for one layer step.

    Attributes:
        flags: SERIAL, WAITS.
        lanes: int8 [E], order: int64 [E], of the active experts.
        copies: what is to be queued, demand first; `other` says whether the expert must
            first be read.
        promoted: queued copies that this layer step waits for.
        swaps: replacements wished for when the layer has joined; `other` is who goes.
        released: active residents that replacements of this very layer step evict.
        exposed_s: seconds by which choosing victims outlasts the first load.
        precomputed, deferred: uint8 [E], of active experts: computed one layer ahead,
            for all (`WHOLLY`) or for some (`PARTLY`) of its tokens; joining one layer
            later. Only where `has_precomputed`, `defers`.
        ahead_tokens: int32 [E], tokens of next layer's experts that the CPU starts now,
            if `begins_ahead`.
    """

    def __init__(self, gpus: int, keys: int, experts: int) -> None:
        self.flags = 0
        self.exposed_s = 0.0
        self.has_precomputed = self.defers = self.begins_ahead = False
        self.lanes: Ints = zeros(experts, np.int8)
        self.order: Ints = zeros(experts, np.int64)
        self.copies = Copies(gpus * keys + experts)
        self.promoted = Copies(gpus * keys + experts)
        self.swaps = Copies(gpus * keys + experts)
        self.asked = Copies(gpus * keys + experts)
        self.released = Copies(gpus * keys + experts)
        self.precomputed: Ints = zeros(experts, np.uint8)
        self.deferred: Ints = zeros(experts, np.uint8)
        self.ahead_tokens: Ints = zeros(experts, np.int32)


class Decisions(NamedTuple):
    """What a plan decides about a layer step, as plain comparable values.

    Copies are (kind, GPU, flat key, whether it is read first or who goes), active
    experts in ascending order.

    Attributes:
        step, layer: which one.
        experts, state: active experts, and how they were found.
        lanes, order: where they are computed, and in which order they are launched.
        flags: of the assignment.
        copies, promoted, swaps: as in `Plan`.
        precomputed, deferred: of each active expert; empty where there are none.
        ahead_tokens: by expert of the next layer; empty where nothing begins ahead.
    """

    step: int
    layer: int
    experts: tuple[int, ...]
    state: tuple[int, ...]
    lanes: tuple[int, ...]
    order: tuple[int, ...]
    flags: int
    copies: tuple[tuple[int, ...], ...]
    promoted: tuple[tuple[int, ...], ...]
    swaps: tuple[tuple[int, ...], ...]
    precomputed: tuple[int, ...]
    deferred: tuple[int, ...]
    ahead_tokens: tuple[int, ...]


def decisions(work: Work, plan: Plan) -> Decisions:
    """Write down what was decided last; plans live until the next one."""
    active = work.active

    def listed(copies: Copies) -> tuple[tuple[int, ...], ...]:
        columns = (copies.kind, copies.gpu, copies.key, copies.other)
        return tuple(
            zip(*(list(column[: copies.count]) for column in columns), strict=True)
        )

    def first(column: Any, *, known: bool = True) -> tuple[int, ...]:
        return tuple(column[:active]) if known else ()

    return Decisions(
        step=work.step,
        layer=work.layer,
        experts=tuple(work.experts),
        state=first(work.state),
        lanes=first(plan.lanes),
        order=first(plan.order),
        flags=plan.flags,
        copies=listed(plan.copies),
        promoted=listed(plan.promoted),
        swaps=listed(plan.swaps),
        precomputed=first(plan.precomputed, known=plan.has_precomputed),
        deferred=first(plan.deferred, known=plan.defers),
        ahead_tokens=tuple(plan.ahead_tokens) if plan.begins_ahead else (),
    )
