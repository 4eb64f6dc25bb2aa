"""The CUDA code with one thing wrong in it: each entry of `BROKEN` breaks another one."""

import torch

from moesim.runtime.executor import lanes, operations
from moesim.runtime.executor.device import StreamDevice
from moesim.runtime.executor.world import RealLayerStep


def device(name, method):
    """A `StreamDevice` with another method of this name."""
    return lambda patch: patch.setattr(StreamDevice, name, method)


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

    return device("copy", copy)


def copy_back(self, record, slot, nbytes):
    with self._accelerator.on(self._copies_back):
        record[:nbytes].copy_(self._slots.record(slot)[:nbytes], non_blocking=True)
    return -1.0, -1.0


a_copy_back_waits_for_nobody = device("copy_back", copy_back)
"""Only systems that copy back could show it."""


def ending(last_use):
    """`StreamDevice.end_compute` that notes a slot's last use in another way."""

    def end_compute(self, operation):
        start, slot = self._open.pop(id(operation))
        end = self._recorded()
        self._last_use |= last_use(self, operation, slot, start, end)
        self._untold.append((operation, start, end))
        return -1.0, -1.0

    return device("end_compute", end_compute)


def on_the_copy_stream(self, _operation, slot, _start, _end):
    event = self._accelerator.event()
    event.record(self._copies)
    return {slot: event}


def coming(*, sleeps_on, frees=False):
    """`StreamDevice.to_host` that waits for another event, or frees its buffer."""

    def to_host(self, hidden):
        there = self._accelerator.page_locked_like(hidden)
        earlier = self._recorded()
        there.copy_(hidden, non_blocking=True)
        event = self._recorded() if sleeps_on == "end" else earlier
        if frees:
            self._accelerator.page_unlock(there)
        if sleeps_on != "nothing":
            event.synchronize()
        return there, hidden.numel() * hidden.itemsize

    return device("to_host", to_host)


def without_waits_for(kind):
    """Make `synchronize` of a class do nothing while a method of the device runs."""

    def within(patch, name):
        straight = getattr(StreamDevice, name)

        def method(self, *args):
            with patch.context() as meanwhile:
                meanwhile.setattr(kind(self), "synchronize", lambda _: None)
                return straight(self, *args)

        patch.setattr(StreamDevice, name, method)

    return within


def slots_are_zeroed(patch):
    without_waits_for(lambda device: type(device._accelerator))(patch, "allocate")


def times_are_told(patch):
    from support.adversarial_device import Event

    without_waits_for(lambda _device: Event)(patch, "step_done")


def products_on_the_copy_stream(patch):
    straight = operations.expert_forward

    def expert_forward(weights, hidden, layout, gating=None):
        if hidden.device.type == "cpu":
            return straight(weights, hidden, layout, gating)
        accelerator = hidden.on
        with accelerator.on(accelerator.streams[-1]):
            return straight(weights, hidden, layout, gating)

    patch.setattr(operations, "expert_forward", expert_forward)


def joined_on_the_copy_stream(patch):
    straight = StreamDevice.join

    def join(self, job):
        with self._accelerator.on(self._copies):
            return straight(self, job)

    patch.setattr(StreamDevice, "join", join)


def sent_and_freed(self, values):
    buffer = self._accelerator.page_locked(values)
    sent = buffer.to(self.device, non_blocking=True)
    self._accelerator.page_unlock(buffer)
    return sent


def sent_from_one_buffer(self, values):
    device = self._accelerator
    if not hasattr(device, "buffer"):
        device.buffer = device.page_locked_like(torch.empty(1 << 14, dtype=torch.uint8))
    raw = values.contiguous().reshape(-1).view(torch.uint8)
    place = device.buffer[: len(raw)]
    place.copy_(raw)
    sent = place.view(values.dtype).view(values.shape)
    return sent.to(self.device, non_blocking=True)


def control_is_not_woken(patch):
    patch.setattr(RealLayerStep, "all_computed", lambda self: None)


def sleepers_are_forgotten(patch):
    patch.setattr(lanes.WakingLock, "wake_afterwards", lambda self, sleeper: None)


BROKEN = {
    "a copy waits for nobody to land": copying(sleeps_on="nothing"),
    "a copy is awaited by its beginning": copying(sleeps_on="start"),
    "a landing is recorded before the copy": copying(noted="before"),
    "a landing is recorded on the compute stream": copying(landing="compute"),
    "a slot is overwritten while a product reads it": copying(waits=False),
    "a copy waits for the last reader when it is over": copying(first=False),
    "the last use is recorded on the copy stream": ending(on_the_copy_stream),
    "the last use is recorded before the product": ending(
        lambda _self, _operation, slot, start, _end: {slot: start}
    ),
    "the last use is noted for another slot": ending(
        lambda _self, operation, _slot, _start, end: {operation.expert: end}
    ),
    "the last use is an event that nobody recorded": ending(
        lambda self, _operation, slot, *_: {slot: self._accelerator.event()}
    ),
    "hidden states are read before they have come": coming(sleeps_on="nothing"),
    "hidden states are awaited by an earlier event": coming(sleeps_on="start"),
    "hidden states come into a buffer that is freed": coming(
        sleeps_on="end", frees=True
    ),
    "slots are not waited for when they are zeroed": slots_are_zeroed,
    "products are launched on the copy stream": products_on_the_copy_stream,
    "results are joined on the copy stream": joined_on_the_copy_stream,
    "results of the cpu are sent from a buffer that is freed": device(
        "send", sent_and_freed
    ),
    "everything is sent from one buffer": device("send", sent_from_one_buffer),
    "times are told before the device knows them": times_are_told,
    "control is not woken when products have ended": control_is_not_woken,
    "sleepers are forgotten when a lock is left": sleepers_are_forgotten,
}
