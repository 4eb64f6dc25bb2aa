"""An accelerator that is none: everything is done at once, on the CPU."""

import contextlib
import time

import numpy as np
import torch

from moesim.runtime.accelerators import Accelerator


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


class FakeAccelerator(Accelerator):
    """Streams and events of no device."""

    kind = "cuda"
    type = "cpu"
    page_locks = False

    def __init__(self):
        self.device = torch.device("cpu")
        self.waits = 0

    def current_stream(self):
        return FakeStream()

    def new_stream(self):
        return FakeStream()

    def on(self, stream):
        return contextlib.nullcontext()

    def event(self, *, asleep=True):
        return FakeEvent()

    def synchronize(self):
        self.waits += 1

    @classmethod
    def count(cls):
        return 1

    @property
    def name(self):
        return "a stand-in"

    @property
    def total_bytes(self):
        return 1 << 30

    @property
    def cache_bytes(self):
        return 1 << 20
