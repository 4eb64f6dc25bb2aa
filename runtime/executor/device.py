"""Devices: what holds slots, takes copies in, computes from slots and joins results.

`HostDevice` is a core of this machine with memory of its own. `StreamDevice` is an
accelerator behind the same lanes: streams for compute and copies, events for their
times.

The control thread launches the dense part and the products on the compute stream, which
costs it microseconds each; each direction of the link has a thread of its own that
launches one copy at a time on a stream of its own and sleeps in an event until it has
landed, so that demand goes before prefetches and what has not started can still be
withdrawn.

Slots are reused without waiting on the host: a copy into a slot first waits, on its
stream, for the last product that read it; a product waits for nothing, because it is
launched only when its copy has landed. Small things for the device go through
page-locked memory, since a copy from any other would wait for all that was launched
before it.

Times come from the device's own clock and are written down after a forward pass. Each
pass begins with an *anchor*, an event whose time the host knows: the device tells times
as single-precision milliseconds since another event, which after some minutes is
coarser than a product is long, and its clock drifts from the host's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from moesim.runtime.store.memory import DeviceSlots, HostSlots

if TYPE_CHECKING:
    from moesim.runtime.accelerators import Accelerator
    from moesim.runtime.executor.lanes import Task
    from moesim.runtime.executor.memories import LayerJob
    from moesim.runtime.store.memory import Slots
    from moesim.traces.timeline.spans import Timeline


def weighted_sum(
    job: LayerJob, stacked: torch.Tensor, pairs: torch.Tensor
) -> torch.Tensor:
    """Add every expert's weighted answers to their tokens, in the order of `pairs`.

    A GPU adds the answers to one token in any order, as it does in the library's own
    forward: there the last bits may differ from one run to the next.

    Args:
        job: the layer step, T tokens.
        stacked: [P, H] answers by ascending expert id, on the device.
        pairs: int64 [P], flat positions in the routing [T, K], on the device.

    Returns:
        [T, H] in the dtype of the hidden states.
    """
    hidden = job.hidden
    weighted = stacked * job.weights.reshape(-1)[pairs, None]
    if job.device_rows is None:
        return weighted.sum(0, keepdim=True).to(hidden.dtype)
    total = torch.zeros_like(hidden)
    return total.index_add_(0, job.device_rows, weighted.to(hidden.dtype))


class HostDevice:
    """What the `gpu0`, `h2d0` and `d2h0` lanes do on a machine without a GPU; other
    devices do the same in their own way.

    Times that only the device's clock knows are returned where it can tell them at
    once; negative ones mean that `step_done` writes them down later.

    Attributes:
        device: where hidden states live.
        with_control: lane classes that the control thread serves itself.
        page_lock: for whom host memory must keep its pages, None for nobody.
    """

    device = torch.device("cpu")
    with_control: ClassVar[tuple[str, ...]] = ()
    page_lock: Accelerator | None = None

    def __init__(self) -> None:
        self._slots: Slots = DeviceSlots(0, 1)

    def allocate(self, slots: int, slot_bytes: int) -> Slots:
        """Take the accelerator's memory.

        Raises:
            RuntimeFault: there is not that much.
        """
        self._slots = DeviceSlots(slots, slot_bytes)
        return self._slots

    def copy(
        self, slot: int, record: torch.Tensor, nbytes: int
    ) -> tuple[float, float] | None:
        """Copy a record into a slot; it is there on return."""
        self._slots.record(slot)[:nbytes].copy_(record[:nbytes])
        return None

    def copy_back(
        self, record: torch.Tensor, slot: int, nbytes: int
    ) -> tuple[float, float] | None:
        """Copy a slot into a record of host memory; it is there on return."""
        record[:nbytes].copy_(self._slots.record(slot)[:nbytes])
        return None

    def begin_compute(self, operation: Task, slot: int) -> None:
        """Note that an expert in this slot is about to compute."""

    def end_compute(self, operation: Task) -> tuple[float, float] | None:
        """Note that it has; return its times where only the device knows them
        (negative: it tells them later).
        """

    def settle(self) -> None:
        """Wait until the last product has really been computed; here it has."""

    def to_host(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Bring hidden states to where the CPU reads; return them and the bytes moved:
        memory is shared, so none.
        """
        return hidden, 0

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Bring host values to the device without waiting for what it is doing."""
        return values

    def join(self, job: LayerJob) -> torch.Tensor:
        """Add weighted results by ascending expert id, whoever computed them."""
        if not job.results:
            return torch.zeros_like(job.hidden)
        return weighted_sum(
            job, torch.cat(job.results), torch.from_numpy(job.groups.pairs)
        )

    def begin(self, began_s: float) -> None:
        """Note when the run began."""

    def mark(self) -> None:
        """Note the start of dense work."""

    def marked(self, operation: Task) -> None:
        """Note the end of dense work."""

    def step_done(self, timeline: Timeline) -> None:
        """Wait for the device at the end of a forward pass, and write down what it has
        timed itself.
        """


def spare_record(nbytes: int) -> HostSlots:
    """One aligned record in host memory, to read into."""
    return HostSlots(1, nbytes)


_ANCHORINGS = 5
"""Tries to see the device's clock and the host's at one moment; the tightest counts."""


class Anchor(NamedTuple):
    """An event, and when it happened in seconds since the run began."""

    event: Any
    at_s: float

    def time_of(self, event: Any) -> float:
        """When a later event happened; both must be over."""
        return self.at_s + float(self.event.elapsed_time(event)) * 1e-3


class StreamDevice(HostDevice):
    """What the `gpu0`, `h2d0` and `d2h0` lanes do on a machine with an accelerator.

    Args:
        accelerator: what computes.
    """

    with_control: ClassVar[tuple[str, ...]] = ("gpu",)

    def __init__(self, accelerator: Accelerator) -> None:
        self.device = accelerator.device
        self.page_lock = accelerator if accelerator.page_locks else None
        self._accelerator = accelerator
        self._slots = DeviceSlots(0, 1)
        # Where torch launches what the model computes.
        self._compute: Any = accelerator.current_stream()
        self._copies: Any = accelerator.new_stream()
        self._copies_back: Any = accelerator.new_stream()
        self._last_use: dict[int, Any] = {}
        self._began_s = 0.0
        self._anchor: Anchor | None = None
        self._dense_start: Any = None
        self._open: dict[int, Any] = {}
        self._untold: list[tuple[Task, Any, Any]] = []

    def allocate(self, slots: int, slot_bytes: int) -> DeviceSlots:
        """Take GPU memory, and wait until it is zeroed: copies come on a stream that
        would not.

        Raises:
            RuntimeFault: there is not that much.
        """
        self._slots = DeviceSlots(slots, slot_bytes, self.device)
        self._accelerator.synchronize()
        return self._slots

    def begin(self, began_s: float) -> None:
        """Map the device's clock to the host's, while the device has nothing to do."""
        self._began_s = began_s
        self._accelerator.synchronize()
        self._drop_anchor()

    def copy(
        self, slot: int, record: torch.Tensor, nbytes: int
    ) -> tuple[float, float] | None:
        """Copy a record into a slot; return when it has landed, with the device's
        times.
        """
        target = self._slots.record(slot)
        last = self._last_use.get(slot)
        return self._copied(self._copies, target, record, nbytes, after=last)

    def copy_back(
        self, record: torch.Tensor, slot: int, nbytes: int
    ) -> tuple[float, float] | None:
        """Copy a slot, in which nothing is being written, into host memory; return when
        it is there, with the device's times.
        """
        source = self._slots.record(slot)
        return self._copied(self._copies_back, record, source, nbytes)

    def _copied(
        self,
        stream: Any,
        target: torch.Tensor,
        source: torch.Tensor,
        nbytes: int,
        after: Any = None,
    ) -> tuple[float, float] | None:
        """Copy on a stream once an event is over, and wait for it, asleep."""
        anchor = self._anchor  # control may drop another one meanwhile
        start = self._accelerator.event()
        end = self._accelerator.event()
        with self._accelerator.on(stream):
            if after is not None:
                stream.wait_event(after)
            start.record(stream)
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
            end.record(stream)
        end.synchronize()
        if anchor is None:  # before the run: the initial content
            return None
        return anchor.time_of(start), anchor.time_of(end)

    def begin_compute(self, operation: Task, slot: int) -> None:
        """Note on the compute stream that a product from this slot begins."""
        self._open[id(operation)] = (self._recorded(), slot)

    def end_compute(self, operation: Task) -> tuple[float, float]:
        """Note that it ends; its slot may be overwritten from then on. The device tells
        its times later.
        """
        start, slot = self._open.pop(id(operation))
        end = self._recorded()
        self._last_use[slot] = end
        self._untold.append((operation, start, end))
        return -1.0, -1.0

    def settle(self) -> None:
        """Wait until the last product has really been computed, asleep."""
        self._untold[-1][2].synchronize()

    def to_host(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Bring hidden states to page-locked host memory, and wait for them, asleep."""
        there = self._accelerator.page_locked_like(hidden)
        there.copy_(hidden, non_blocking=True)
        self._recorded().synchronize()
        return there, hidden.numel() * hidden.itemsize

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Bring host values to the device without waiting for what it is doing."""
        values = self._accelerator.page_locked(values)
        return values.to(self.device, non_blocking=True)

    def join(self, job: LayerJob) -> torch.Tensor:
        """Add weighted results by expert, those of the CPU brought here first, all in
        one copy.
        """
        if not job.results:
            return torch.zeros_like(job.hidden)
        results = job.results
        of_cpu = [result for result in results if result.device.type == "cpu"]
        if of_cpu:
            sent = iter(
                self.send(torch.cat(of_cpu)).split([len(result) for result in of_cpu])
            )
            results = [
                next(sent) if result.device.type == "cpu" else result
                for result in results
            ]
        return weighted_sum(
            job, torch.cat(results), self.send(torch.from_numpy(job.groups.pairs))
        )

    def mark(self) -> None:
        """Note the start of dense work on the compute stream."""
        self._dense_start = self._recorded()

    def marked(self, operation: Task) -> None:
        """Note its end; the device tells its times later."""
        self._untold.append((operation, self._dense_start, self._recorded()))
        operation.end_s = -1.0

    def step_done(self, timeline: Timeline) -> None:
        """Wait for what was computed (copies may go on), write down its times, and drop
        a fresh anchor.
        """
        if self._untold:
            self._untold[-1][2].synchronize()
        anchor = self._anchor
        assert anchor is not None, "a run begins before its first step is done"
        for op, start, end in self._untold:
            timeline.span(
                op.lane,
                op.kind,
                op.step,
                op.layer,
                op.expert,
                start_s=anchor.time_of(start),
                end_s=anchor.time_of(end),
                nbytes=op.nbytes,
            )
        self._untold.clear()
        self._drop_anchor()

    def _drop_anchor(self) -> None:
        """Note one moment on both clocks: the compute stream is empty, so an event
        happens when it is recorded.
        """
        tightest_s = float("inf")
        for _ in range(_ANCHORINGS):
            # Waited for awake: sleeping would cost what is measured here.
            event = self._accelerator.event(asleep=False)
            before_s = time.perf_counter()
            event.record(self._compute)
            event.synchronize()
            took_s = time.perf_counter() - before_s
            if took_s < tightest_s:
                tightest_s = took_s
                self._anchor = Anchor(event, before_s + took_s / 2 - self._began_s)

    def _recorded(self) -> Any:
        """An event recorded now on the compute stream."""
        event = self._accelerator.event()
        event.record(self._compute)
        return event
