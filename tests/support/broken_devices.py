"""The CUDA code with one thing wrong in it: each entry of `BROKEN` breaks another one."""

import torch

from moesim.runtime.executor import lanes, operations
from moesim.runtime.executor.device import StreamDevice

BROKEN = {}


def broken(change):
    """Register under the function's name, in words."""
    BROKEN[change.__name__.replace("_", " ")] = change
    return change


def copying(
    *, waits=True, first=True, landing="copies", noted="after", sleeps_on="end"
):
    """`StreamDevice.copy` with some of its waits."""

    def copy(self, slot, record, nbytes):
        anchor = self._anchor
        start = self._accelerator.event()
        end = self._accelerator.event()
        target = self._slots.record(slot)[:nbytes]
        with self._accelerator.on(self._copies):
            last = self._last_use.get(slot)
            if waits and first and last is not None:
                self._copies.wait_event(last)
            start.record(self._copies)
            stream = self._copies if landing == "copies" else self._compute
            if noted == "before":
                end.record(stream)
            target.copy_(record[:nbytes], non_blocking=True)
            if waits and not first and last is not None:
                self._copies.wait_event(last)
            if noted == "after":
                end.record(stream)
        if sleeps_on == "nothing":
            return -1.0, -1.0
        (end if sleeps_on == "end" else start).synchronize()
        return None if anchor is None else (-1.0, -1.0)

    return copy


@broken
def a_copy_waits_for_nobody_to_land(patch):
    patch.setattr(StreamDevice, "copy", copying(sleeps_on="nothing"))


@broken
def a_copy_is_awaited_by_its_beginning(patch):
    patch.setattr(StreamDevice, "copy", copying(sleeps_on="start"))


@broken
def a_landing_is_recorded_before_the_copy(patch):
    patch.setattr(StreamDevice, "copy", copying(noted="before"))


@broken
def a_landing_is_recorded_on_the_compute_stream(patch):
    patch.setattr(StreamDevice, "copy", copying(landing="compute"))


@broken
def a_slot_is_overwritten_while_a_product_reads_it(patch):
    patch.setattr(StreamDevice, "copy", copying(waits=False))


@broken
def a_copy_waits_for_the_last_reader_when_it_is_over(patch):
    patch.setattr(StreamDevice, "copy", copying(first=False))


def a_copy_back_waits_for_nobody(patch):
    """Only systems that copy back could show it."""

    def copy_back(self, record, slot, nbytes):
        with self._accelerator.on(self._copies_back):
            record[:nbytes].copy_(self._slots.record(slot)[:nbytes], non_blocking=True)
        return -1.0, -1.0

    patch.setattr(StreamDevice, "copy_back", copy_back)


def ending(note):
    """`StreamDevice.end_compute` that notes a slot's last use in another way."""

    def end_compute(self, operation):
        start, slot = self._open.pop(id(operation))
        end = self._recorded()
        note(self, operation, slot, start, end)
        self._untold.append((operation, start, end))
        return -1.0, -1.0

    return end_compute


@broken
def the_last_use_is_recorded_on_the_copy_stream(patch):
    def note(self, operation, slot, start, end):
        event = self._accelerator.event()
        event.record(self._copies)
        self._last_use[slot] = event

    patch.setattr(StreamDevice, "end_compute", ending(note))


@broken
def the_last_use_is_recorded_before_the_product(patch):
    def note(self, operation, slot, start, end):
        self._last_use[slot] = start

    patch.setattr(StreamDevice, "end_compute", ending(note))


@broken
def the_last_use_is_noted_for_another_slot(patch):
    def note(self, operation, slot, start, end):
        self._last_use[operation.expert] = end

    patch.setattr(StreamDevice, "end_compute", ending(note))


@broken
def the_last_use_is_an_event_that_nobody_recorded(patch):
    def note(self, operation, slot, start, end):
        self._last_use[slot] = self._accelerator.event()

    patch.setattr(StreamDevice, "end_compute", ending(note))


@broken
def hidden_states_are_read_before_they_have_come(patch):
    def to_host(self, hidden):
        there = self._accelerator.page_locked_like(hidden)
        there.copy_(hidden, non_blocking=True)
        return there, hidden.numel() * hidden.itemsize

    patch.setattr(StreamDevice, "to_host", to_host)


@broken
def hidden_states_are_awaited_by_an_earlier_event(patch):
    def to_host(self, hidden):
        there = self._accelerator.page_locked_like(hidden)
        event = self._recorded()
        there.copy_(hidden, non_blocking=True)
        event.synchronize()
        return there, hidden.numel() * hidden.itemsize

    patch.setattr(StreamDevice, "to_host", to_host)


@broken
def slots_are_not_waited_for_when_they_are_zeroed(patch):
    straight = StreamDevice.allocate

    def allocate(self, slots, slot_bytes):
        with patch.context() as within:
            within.setattr(type(self._accelerator), "synchronize", lambda _: None)
            return straight(self, slots, slot_bytes)

    patch.setattr(StreamDevice, "allocate", allocate)


@broken
def products_are_launched_on_the_copy_stream(patch):
    straight = operations.expert_forward

    def expert_forward(weights, hidden, layout, gating=None):
        if hidden.device.type == "cpu":
            return straight(weights, hidden, layout, gating)
        accelerator = hidden.on
        with accelerator.on(accelerator.streams[-1]):
            return straight(weights, hidden, layout, gating)

    patch.setattr(operations, "expert_forward", expert_forward)


@broken
def results_are_joined_on_the_copy_stream(patch):
    straight = StreamDevice.join

    def join(self, job):
        with self._accelerator.on(self._copies):
            return straight(self, job)

    patch.setattr(StreamDevice, "join", join)


@broken
def results_of_the_cpu_are_sent_from_a_buffer_that_is_freed(patch):
    def send(self, values):
        buffer = self._accelerator.page_locked(values)
        sent = buffer.to(self.device, non_blocking=True)
        self._accelerator.page_unlock(buffer)
        return sent

    patch.setattr(StreamDevice, "_send", send)


@broken
def everything_is_sent_from_one_buffer(patch):
    def send(self, values):
        device = self._accelerator
        if not hasattr(device, "buffer"):
            device.buffer = device.page_locked_like(
                torch.empty(1 << 14, dtype=torch.uint8)
            )
        raw = values.contiguous().reshape(-1).view(torch.uint8)
        place = device.buffer[: len(raw)]
        place.copy_(raw)
        return (
            place.view(values.dtype)
            .view(values.shape)
            .to(self.device, non_blocking=True)
        )

    patch.setattr(StreamDevice, "_send", send)


@broken
def times_are_told_before_the_device_knows_them(patch):
    straight = StreamDevice.step_done

    def step_done(self, timeline):
        with patch.context() as within:
            from support.adversarial_device import Event

            within.setattr(Event, "synchronize", lambda _: None)
            return straight(self, timeline)

    patch.setattr(StreamDevice, "step_done", step_done)


@broken
def hidden_states_come_into_a_buffer_that_is_freed(patch):
    def to_host(self, hidden):
        there = self._accelerator.page_locked_like(hidden)
        there.copy_(hidden, non_blocking=True)
        event = self._recorded()
        self._accelerator.page_unlock(there)
        event.synchronize()
        return there, hidden.numel() * hidden.itemsize

    patch.setattr(StreamDevice, "to_host", to_host)


@broken
def control_is_not_woken_when_products_have_ended(patch):
    from moesim.runtime.executor.world import RealWorld

    patch.setattr(RealWorld, "computed", lambda self, _: None)


@broken
def sleepers_are_forgotten_when_a_lock_is_left(patch):
    patch.setattr(lanes.WakingLock, "wake_afterwards", lambda self, sleeper: None)
