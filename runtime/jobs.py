"""What one layer step hands to its lanes: the job, and one product per active expert.

T tokens, K experts per token, P token-expert pairs, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runtime.expert_math import expert_forward, group_tokens
from runtime.lanes import Operation
from traces.timeline import COMPUTE, DENSE

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.base import LayerWork
    from runtime.executor import Executor
    from runtime.expert_math import Groups
    from runtime.lanes import Worker
    from traces.batch import RoutedLayer


class Job:
    """One layer step in the making: inputs, results by position, and how many are still missing.

    Attributes:
        routed: what the gate decided.
        hidden: [T, H]; `hidden_cpu` the same where the CPU reads it.
        weights: [T, K] combine weights.
        groups: pairs by expert.
        rows: int64 [P], the token of each pair, on the CPU; None where there is one token only.
        results: per active expert, [t, H].
        answer: [T, H], once `answered`.
    """

    __slots__ = (
        "answer", "answered", "device_rows", "groups", "hidden", "hidden_cpu", "pending", "results", "routed", "rows",
        "weights",
    )  # fmt: skip

    def __init__(self, routed: RoutedLayer, hidden: torch.Tensor, weights: torch.Tensor, groups: Groups) -> None:
        self.routed, self.hidden, self.weights = routed, hidden, weights
        self.hidden_cpu = self.answer = hidden
        self.results: list[Any] = []
        self.pending = 0
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
        self.rows = None if alone else torch.from_numpy(groups.pairs // max(1, self.weights.shape[1]))
        self.device_rows = self.rows if self.rows is None else self.rows.to(self.hidden.device)

    def reroute(self, work: LayerWork) -> None:
        """Serve tokens by the experts and weights that a routing policy has put in place of the gate's."""
        assert work.weights is not None, "a routing policy that replaces experts says how they are weighted"
        self.weights = torch.from_numpy(np.ascontiguousarray(work.weights, np.float32)).to(self.hidden)
        self._sort(group_tokens(work.routing))

    def begin(self, active: int) -> None:
        """Make room for the results of `active` experts."""
        self.results = [None] * active
        self.pending = active

    def is_computed(self) -> bool:
        """Whether every expert has answered."""
        return not self.pending

    def is_answered(self) -> bool:
        """Whether the device may go on."""
        return self.answered


class Compute(Operation):
    """One expert on its tokens, from a device slot or from host memory.

    `place` is its position among the active experts; `staged` says that its slot is free afterwards.
    """

    __slots__ = ("in_staging", "key", "on_cpu", "owner", "place")

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
        self.owner, self.place, self.on_cpu = owner, place, on_cpu
        self.key = layer * owner.experts + expert
        self.in_staging = staged and not on_cpu

    def run(self) -> tuple[float, float] | None:
        """Multiply."""
        owner = self.owner
        job, layer, place = owner.job, self.layer, self.place
        if self.on_cpu:
            hidden, rows, weights = job.hidden_cpu, job.rows, owner.host.weights(self.key)
        else:
            hidden, rows, weights = job.hidden, job.device_rows, owner.places.weights(self.key)
            owner.device.begin_compute(self, owner.places.slot(self.key))
        if rows is not None:
            starts = job.groups.starts
            hidden = hidden.index_select(0, rows[starts[place] : starts[place + 1]])
        job.results[place] = expert_forward(weights, hidden, owner.layouts[layer], owner.gatings[layer])
        return None if self.on_cpu else owner.device.end_compute(self)

    def ended(self) -> None:
        """Free what was held for it; the last one wakes control."""
        owner = self.owner
        if self.on_cpu:
            owner.host.unuse(self.key)
        elif self.in_staging:
            owner.places.release(self.key)
            owner.link.offer()
        owner.job.pending -= 1
        if not owner.job.pending:
            owner.lanes.control.wake()


class Forward(Operation):
    """The whole run, as the device sees it; its requests go to the control thread."""

    __slots__ = ("_control", "_forward", "done")

    def __init__(self, lane: int, forward: Callable[[], None], control: Worker) -> None:
        super().__init__(lane, DENSE, 0, -1)
        self._forward, self._control, self.done = forward, control, False

    def run(self) -> tuple[float, float]:
        """Run the model. Its own spans are those of its parts."""
        self._forward()
        return -1.0, -1.0

    def ended(self) -> None:
        """Tell control that the run is over."""
        self.done = True
        self._control.wake()
