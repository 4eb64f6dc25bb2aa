"""Runs on the adversarial device: one seed, one schedule, and what came of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from support.adversarial_device import AdversarialDevice, DeviceTensor
from support.drawn_threads import DrawnThreads
from support.real_machine import LAUNCHED, host_profile

from moesim.runs import machine, measured
from moesim.runs.config import MemoryOptions
from moesim.runtime.executor import device as stream_device
from moesim.runtime.executor import lanes
from moesim.runtime.executor.device import StreamDevice
from moesim.runtime.models.dense import DenseStack

PROFILE = host_profile(LAUNCHED, accelerator="cuda", cores=8)
NO_SIZES = MemoryOptions()


class _OnCpu(torch.Generator):
    """Random numbers of a device that is none."""

    def __new__(cls, device=None):
        return super().__new__(cls)


@dataclass
class Schedule:
    """Everything that one seed decides.

    Attributes:
        threads: who runs when.
        device: what is computed when.
        outcomes: hidden states at the end of each forward pass.
    """

    seed: int
    threads: DrawnThreads = field(init=False)
    device: AdversarialDevice = field(init=False)
    outcomes: list = field(default_factory=list)

    def __post_init__(self):
        """Make both of one seed."""
        self.threads = DrawnThreads(self.seed, self)
        self.device = AdversarialDevice(self.seed, self.threads)

    @contextlib.contextmanager
    def drawn(self):
        """Replace threads, clock and accelerator of the runtime within the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lanes, "threading", self.threads)
            patch.setattr(lanes, "time", self.threads)
            patch.setattr(stream_device, "time", self.threads)
            patch.setattr(machine, "this_machine", lambda: ("cuda", 8))
            patch.setattr(measured, "device_of", lambda _: StreamDevice(self.device))
            patch.setattr(torch, "Generator", _OnCpu)
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            patch.setattr(DenseStack, "head", noting(self.outcomes))
            try:
                with self.device.in_use():
                    yield self
            finally:
                self.threads.end()

    def run(self, trace, policy, *, memory=NO_SIZES, **options):
        """A measured run of a trace."""
        options |= memory.options()
        with self.drawn():
            run = measured.run_trace(
                trace, policy, dtype="float32", hw=PROFILE, **options
            )
            self.device.synchronize()
        return run

    def live(self, case, system, memory, **options):
        """A live run of a small model (`real_machine.Case.run`)."""
        with self.drawn():
            moved(case.offloaded.model, self.device)
            done = case.run(
                system,
                memory,
                profile=PROFILE,
                device=StreamDevice(self.device),
                **options,
            )
            self.device.synchronize()
        for one in done[0].result.passes:
            for name, value in one.inputs.items():
                if isinstance(value, DeviceTensor):
                    one.inputs[name] = value.there
        return done

    def enter(self):
        """Context of every thread."""
        return self.device.in_use()

    def between(self):
        """Something may happen on the device while threads take turns."""
        self.device.hurry()

    def states(self):
        """Hidden states at the end of each forward pass, as the CPU sees them."""
        return [
            one.there if isinstance(one, DeviceTensor) else one for one in self.outcomes
        ]


def moved(model, device):
    """Put a model's weights on the device, in place."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, DeviceTensor):
                    tensors[name] = device.own(tensor.detach().clone())


def noting(outcomes):
    """`DenseStack.head` that keeps what it is given."""
    straight = DenseStack.head

    def head(self, hidden, sequences):
        outcomes.append(hidden.clone())
        straight(self, hidden, sequences)

    return head


def expected(trace, policy, *, memory=NO_SIZES, **options):
    """Hidden states of the same run on the host accelerator."""
    outcomes = []
    options |= memory.options()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseStack, "head", noting(outcomes))
        measured.run_trace(trace, policy, dtype="float32", hw=host_profile(), **options)
    return outcomes


def differ(found, wanted):
    """Whether hidden states differ by more than sums in another order do."""
    return len(found) != len(wanted) or any(
        not torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=False)
        for one, other in zip(found, wanted, strict=True)
    )
