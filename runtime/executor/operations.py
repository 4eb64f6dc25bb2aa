"""What is really done: reads and copies (`Memories`), products, the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moesim.runtime.executor.lanes import Task
from moesim.runtime.executor.memories import LayerJob, PrecomputedRows
from moesim.runtime.models.expert_layout import expert_forward
from moesim.traces.timeline.spans import COMPUTE, DENSE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.runtime.executor.device import HostDevice
    from moesim.runtime.executor.lanes import Worker
    from moesim.runtime.executor.memories import HostSlotMap, SlotMap
    from moesim.runtime.models.expert_layout import ExpertLayout, ExpertWeights
    from moesim.runtime.store.memory import Slots
    from moesim.runtime.store.store import ExpertStore

    Gating = Callable[[torch.Tensor], torch.Tensor]


class Memories:
    """Where real experts are, and what computes with them: what a task needs.

    Attributes:
        store: every expert, on disk.
        host: host memory.
        slots: the device's slots.
        device: what computes from them.
        experts: routed experts per layer.
        layouts: how each layer's experts lie in a record.
        gatings: per layer, the model's own gating function or None.
        written_back: a record that copies back to host memory go to; None where nothing
            is written back.
        leaving: the device slot that they are made from.
        brought: a record for an expert that only the device holds and the CPU is to
            compute; None where the CPU reads the device's slots itself.
        job: the layer step under way.
    """

    def __init__(
        self,
        store: ExpertStore,
        host: HostSlotMap,
        slots: SlotMap,
        device: HostDevice,
        gatings: Sequence[Gating | None],
        written_back: Slots | None = None,
        brought: Slots | None = None,
    ) -> None:
        self.store = store
        self.host = host
        self.slots = slots
        self.device = device
        self.experts = store.experts(0)
        self.layouts: list[ExpertLayout] = [
            store.layout(layer) for layer in range(store.layers)
        ]
        self.gatings = list(gatings)
        self.written_back = written_back
        self.leaving = -1 if written_back is None else slots.slots.take()
        self.brought = brought
        self.job = LayerJob.nothing()

    def for_cpu(self, key: int) -> ExpertWeights:
        """Weights of an expert where the CPU reads them.

        An expert that the device keeps for good is not in host memory. A policy that
        lets the CPU compute it all the same pays for bringing it back.
        """
        if self.host.limited or self.host.holds_always(key):
            return self.host.weights(key)
        if self.brought is None:
            return self.slots.weights(key)
        layer = key // self.experts
        record = self.brought.record(0)
        self.device.copy_back(
            record, self.slots.slot(key), self.store.record_bytes(layer)
        )
        return self.brought.weights(0, self.layouts[layer])

    def read(self, key: int) -> None:
        """Read an expert around the page cache into its slot in host memory."""
        self.store.read_into(*divmod(key, self.experts), self.host.record(key))

    def copy(self, key: int) -> tuple[float, float] | None:
        """Copy an expert's record from host memory into its slot."""
        nbytes = self.store.record_bytes(key // self.experts)
        return self.device.copy(self.slots.slot(key), self.host.record(key), nbytes)

    def write_back(self, key: int) -> tuple[float, float] | None:
        """Copy an expert that leaves the device back to host memory.

        Host memory has the same weights still, so neither where the bytes come from nor
        where they go to matters: they are those of a slot that nobody writes, and as
        many are moved as their system moves.
        """
        assert self.written_back is not None
        record = self.written_back.record(0)
        nbytes = self.store.record_bytes(key // self.experts)
        return self.device.copy_back(record, self.leaving, nbytes)

    def close(self) -> None:
        """Let go of all of them."""
        self.host.close()
        self.slots.slots.close()
        for records in (self.written_back, self.brought):
            if records is not None:
                records.close()


class ExpertTask(Task):
    """A product of one expert.

    Args:
        memories: where its weights are.
        lane: index of its lane.
        place: step, layer, expert.

    Attributes:
        key: flat key of the expert, ``layer * E + expert``.
    """

    __slots__ = ("_memories", "key")

    def __init__(
        self, memories: Memories, lane: int, place: tuple[int, int, int]
    ) -> None:
        super().__init__(lane, COMPUTE, *place)
        self._memories = memories
        self.key = self.layer * memories.experts + self.expert


class Compute(ExpertTask):
    """One expert on its tokens, from a device slot or from host memory.

    Args:
        memories, lane, place: as in `ExpertTask`.
        position: of the expert among the active ones.
        on_cpu: reads host memory, else a device slot.

    Attributes:
        only: tokens to compute, int64 on the CPU; None for all that are routed to it.
        settles: wait for the device afterwards. Asked when the product was launched:
            the last fetched expert of a serial plan lets the CPU begin.
    """

    __slots__ = ("_job", "_on_cpu", "_position", "only", "settles")

    def __init__(
        self,
        memories: Memories,
        lane: int,
        place: tuple[int, int, int],
        position: int,
        *,
        on_cpu: bool,
    ) -> None:
        super().__init__(memories, lane, place)
        self.only: torch.Tensor | None = None
        self.settles: Callable[[], bool] | None = None
        self._position = position
        self._on_cpu = on_cpu
        # One that is deferred may run when the next layer step is under way.
        self._job = memories.job

    def run(self) -> tuple[float, float] | None:
        """Multiply."""
        memories = self._memories
        job = self._job
        if self._on_cpu:
            hidden = self._tokens_of(job.hidden_cpu, job.rows)
            job.results[self._position] = expert_forward(
                memories.for_cpu(self.key),
                hidden,
                memories.layouts[self.layer],
                memories.gatings[self.layer],
            )
            return None

        device = memories.device
        weights = memories.slots.weights(self.key)
        device.begin_compute(self, memories.slots.slot(self.key))
        hidden = self._tokens_of(job.hidden, job.device_rows)
        job.results[self._position] = expert_forward(
            weights,
            hidden,
            memories.layouts[self.layer],
            memories.gatings[self.layer],
        )
        times = device.end_compute(self)
        if self.settles is not None and self.settles():
            device.settle()
        return times

    def _tokens_of(
        self, hidden: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of the tokens to compute, [t, H]."""
        if self.only is not None:
            return hidden.index_select(0, self.only)
        if rows is None:
            return hidden
        starts = self._job.groups.starts
        first = starts[self._position]
        end = starts[self._position + 1]
        return hidden.index_select(0, rows[first:end])


class Precompute(ExpertTask):
    """An expert of the next layer on this layer's hidden state, computed on the CPU.

    Args:
        memories, lane, place: as in `ExpertTask`.
        hidden: [T, H] of the layer before.
        rows: tokens to compute; takes the result.

    Attributes:
        rows: what it computes.
    """

    __slots__ = ("_hidden", "rows")

    def __init__(
        self,
        memories: Memories,
        lane: int,
        place: tuple[int, int, int],
        hidden: torch.Tensor,
        rows: PrecomputedRows,
    ) -> None:
        super().__init__(memories, lane, place)
        self.rows = rows
        self._hidden = hidden

    def run(self) -> None:
        """Multiply."""
        memories = self._memories
        tokens = torch.from_numpy(self.rows.tokens + len(self._hidden))
        self.rows.result = expert_forward(
            memories.for_cpu(self.key),
            self._hidden.index_select(0, tokens),
            memories.layouts[self.layer],
            memories.gatings[self.layer],
        )
        # The hidden state need not outlive its use.
        self._hidden = self.rows.result


class Forward(Task):
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
        self._control.take()
