"""An accelerator that is none: everything is done at once, on the CPU."""

import time

import numpy as np

from moesim.runtime.accelerators import Rehearsal


class FakeStream:
    """A stream that does everything at once, and counts who waits."""

    def __init__(self, *_):
        self.waited = 0

    def wait_event(self, event):
        assert event.at_s is not None, "waiting for an event that nobody recorded"
        self.waited += 1


class FakeEvent:
    """An event with the host's clock."""

    at_s = None

    def __init__(self, **_):
        pass

    def record(self, stream):
        assert isinstance(stream, FakeStream), (
            "on a stream that is named, whatever device is the thread's current one"
        )
        self.at_s = time.perf_counter()

    def synchronize(self):
        assert self.at_s is not None

    def query(self):
        return self.at_s is not None

    def elapsed_time(self, later):
        """Milliseconds in single precision, as CUDA gives them."""
        assert later.at_s >= self.at_s, "times count from an earlier event"
        return float(np.float32(1e3 * (later.at_s - self.at_s)))


class FakeAccelerator(Rehearsal):
    """Streams and events of no device, which look at how they are used."""

    kind = "cuda"
    name = "a stand-in"
    total_bytes = 1 << 30
    cache_bytes = 1 << 20

    def __init__(self):
        super().__init__()
        self.waits = 0

    def current_stream(self):
        return FakeStream()

    def new_stream(self):
        return FakeStream()

    def event(self, *, asleep=True):
        return FakeEvent()

    def synchronize(self):
        self.waits += 1
