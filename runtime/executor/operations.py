"""What one layer step hands to its lanes: the job, one product per active expert, and
products ahead of the next gate.

T tokens, K experts per token, P token-expert pairs, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from moesim.runtime.executor.lanes import Operation
from moesim.runtime.models.expert_math import expert_forward, group_tokens
from moesim.traces.timeline.spans import COMPUTE, DENSE

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.policies.base import LayerWork
    from moesim.runtime.executor.executor import Executor
    from moesim.runtime.executor.lanes import Worker
    from moesim.runtime.models.expert_math import Groups
    from moesim.traces.format.batch import RoutedLayer


class Share(NamedTuple):
    """What an expert computed one layer ahead has to give to its own layer step.

    Attributes:
        place: its position among the active experts.
        early: its product on the layer before's hidden state.
        at: int64 [t], the row of `early` for each token routed here; any where there is
            none.
        have: bool [t], whether there is one.
    """

    place: int
    early: Early
    at: np.ndarray
    have: np.ndarray


class Job:
    """One layer step in the making: inputs, results by position, and how many are still
    missing.

    Attributes:
        routed: what the gate decided.
        hidden: [T, H]; `hidden_cpu` the same where the CPU reads it.
        weights: [T, K] combine weights.
        groups: pairs by expert.
        rows: int64 [P], the token of each pair, on the CPU; None where there is one
            token only.
        results: per active expert, [t, H]; after `gather` for those computed ahead.
        shares: what comes from products of the layer step before.
        fetched: fetched experts that a serial plan's CPU still waits for.
        answer: [T, H], once `answered`.
    """

    __slots__ = (
        "answer",
        "answered",
        "device_rows",
        "fetched",
        "groups",
        "hidden",
        "hidden_cpu",
        "pending",
        "results",
        "routed",
        "rows",
        "shares",
        "weights",
    )

    def __init__(
        self,
        routed: RoutedLayer,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        groups: Groups,
    ) -> None:
        self.routed = routed
        self.hidden = hidden
        self.weights = weights
        self.hidden_cpu = self.answer = hidden
        self.results: list[Any] = []
        self.shares: list[Share] = []
        self.pending = self.fetched = 0
        self.answered = False
        self._sort(groups)

    @classmethod
    def nothing(cls) -> Job:
        """Stand in until the first layer step."""
        none = torch.empty(0, 0)
        return cls(None, none, none, group_tokens(np.empty((0, 1), np.int64)))  # type: ignore[arg-type]

    def _sort(self, groups: Groups) -> None:
        self.groups = groups
        alone = len(self.hidden) == 1
        self.rows = (
            None
            if alone
            else torch.from_numpy(groups.pairs // max(1, self.weights.shape[1]))
        )
        self.device_rows = (
            self.rows if self.rows is None else self.rows.to(self.hidden.device)
        )

    def reroute(self, work: LayerWork) -> None:
        """Serve tokens by the experts and weights that a routing policy has put in
        place of the gate's.
        """
        assert work.weights is not None, (
            "a routing policy that replaces experts says how they are weighted"
        )
        self.weights = torch.from_numpy(
            np.ascontiguousarray(work.weights, np.float32)
        ).to(self.hidden)
        self._sort(group_tokens(work.routing))

    def tokens_of(self, place: int) -> np.ndarray:
        """Tokens routed to the expert at `place`, int64 [t], ascending."""
        starts = self.groups.starts
        return self.groups.pairs[starts[place] : starts[place + 1]] // max(
            1, self.weights.shape[1]
        )

    def gather(self) -> None:
        """Complete the results of experts that were computed ahead."""
        for place, early, at, have in self.shares:
            if have.all():
                self.results[place] = early.result[torch.from_numpy(at)]
                continue
            whole = early.result.new_empty(len(have), early.result.shape[1])
            whole[torch.from_numpy(have)] = early.result[torch.from_numpy(at[have])]
            whole[torch.from_numpy(~have)] = self.results[place]
            self.results[place] = whole

    def is_computed(self) -> bool:
        """Whether every expert has answered."""
        return not self.pending

    def is_answered(self) -> bool:
        """Whether the device may go on."""
        return self.answered


class Compute(Operation):
    """One expert on its tokens, from a device slot or from host memory.

    `place` is its position among the active experts; `staged` says that its slot is
    free afterwards. `only` names the tokens to compute, int64 on the CPU, None for all
    that are routed to it; `fetched` says that the CPU waits for it.
    """

    __slots__ = ("fetched", "in_staging", "key", "on_cpu", "only", "owner", "place")

    def __init__(
        self,
        owner: Executor,
        lane: int,
        step: int,
        layer: int,
        expert: int,
        place: int,
        *,
        on_cpu: bool,
        staged: bool,
    ) -> None:
        super().__init__(lane, COMPUTE, step, layer, expert)
        self.owner = owner
        self.place = place
        self.on_cpu = on_cpu
        self.key = layer * owner.experts + expert
        self.in_staging = staged and not on_cpu
        self.only: torch.Tensor | None = None
        self.fetched = False

    def run(self) -> tuple[float, float] | None:
        """Multiply."""
        owner = self.owner
        job = owner.job
        layer = self.layer
        place = self.place
        if self.on_cpu:
            hidden = job.hidden_cpu
            rows = job.rows
            weights = owner.host.weights(self.key)
        else:
            hidden = job.hidden
            rows = job.device_rows
            weights = owner.places.weights(self.key)
            owner.device.begin_compute(self, owner.places.slot(self.key))
        if self.only is not None:
            hidden = hidden.index_select(0, self.only)
        elif rows is not None:
            starts = job.groups.starts
            hidden = hidden.index_select(0, rows[starts[place] : starts[place + 1]])
        job.results[place] = expert_forward(
            weights, hidden, owner.layouts[layer], owner.gatings[layer]
        )
        if self.on_cpu:
            return None
        times = owner.device.end_compute(self)
        if self.fetched and job.fetched == 1:
            owner.device.settle()
        return times

    def ended(self) -> None:
        """Free what was held for it; the last one wakes control."""
        owner = self.owner
        if self.on_cpu:
            owner.host.unuse(self.key)
        elif self.in_staging:
            owner.places.release(self.key)
            owner.link.offer()
        if self.fetched:
            owner.computes.fetched_computed()
        owner.job.pending -= 1
        if not owner.job.pending:
            owner.lanes.control.wake()


class Early(Operation):
    """An expert of the next layer on this layer's hidden state, computed by the CPU
    before that gate has spoken.

    `tokens` int64 [t] ascending are those for which it was predicted, counted from the
    end (-1 is the last): in a ragged prefill a layer asks about the last tokens only.
    `result` [t, H] is there once `done`. The weights are in use until it is done and
    its own layer step is `over`, as in the planner's books.
    """

    __slots__ = (
        "_hidden",
        "awaited",
        "done",
        "key",
        "over",
        "owner",
        "result",
        "tokens",
    )

    def __init__(
        self,
        owner: Executor,
        lane: int,
        step: int,
        layer: int,
        expert: int,
        hidden: torch.Tensor,
        rows: np.ndarray,
    ) -> None:
        super().__init__(lane, COMPUTE, step, layer, expert)
        self.owner = owner
        self.key = layer * owner.experts + expert
        self._hidden = self.result = hidden
        self.tokens = rows - len(hidden)
        self.awaited: Job | None = None
        self.done = self.over = False

    def run(self) -> None:
        """Multiply."""
        owner = self.owner
        hidden = self._hidden
        rows = torch.from_numpy(self.tokens + len(hidden))
        weights = owner.host.weights(self.key)
        self.result = expert_forward(
            weights,
            hidden.index_select(0, rows),
            owner.layouts[self.layer],
            owner.gatings[self.layer],
        )
        self._hidden = self.result

    def ended(self) -> None:
        """Let go of the weights, and wake control if it waits for this product, or for
        the weights' place.
        """
        owner = self.owner
        self.done = True
        if self.over:
            owner.host.unuse(self.key)
        owner.computes.running.remove(self)
        if self.awaited is not None:
            self.awaited.pending -= 1
        owner.lanes.control.wake()


class Forward(Operation):
    """The whole run, as the device sees it; its requests go to the control thread."""

    __slots__ = ("_control", "_forward", "done")

    def __init__(self, lane: int, forward: Callable[[], None], control: Worker) -> None:
        super().__init__(lane, DENSE, 0, -1)
        self._forward = forward
        self._control = control
        self.done = False

    def run(self) -> tuple[float, float]:
        """Run the model. Its own spans are those of its parts."""
        self._forward()
        return -1.0, -1.0

    def ended(self) -> None:
        """Tell control that the run is over."""
        self.done = True
        self._control.wake()
