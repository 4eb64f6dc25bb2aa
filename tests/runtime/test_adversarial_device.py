"""The CUDA code on a device that is as late and as disorderly as CUDA may be: nothing
is found in it, and every wait that is taken out is missed.
"""

import gc
import random

import numpy as np
import pytest
import torch
from support.adversarial_device import ReadTooEarly
from support.adversarial_runs import PROFILE, Schedule, differ, expected
from support.broken_devices import BROKEN, a_copy_back_waits_for_nobody
from support.drawn_threads import Deadlock
from support.real_machine import COLUMNS, Case, combinations
from support.small_trace import write_trace

from moesim.base.errors import RuntimeFault
from moesim.engine.observers import repeat
from moesim.policies import systems
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.runs.config import MemoryOptions, RunConfig
from moesim.runs.setup import Setup
from moesim.runtime.executor.device import StreamDevice
from moesim.runtime.executor.live import verify
from moesim.runtime.executor.memories import LayerJob
from moesim.runtime.executor.trace_driven import shape_for
from moesim.runtime.models import local_model as tiny
from moesim.runtime.models.expert_layout import group_tokens
from moesim.runtime.store import memory as direct_io
from moesim.runtime.store.memory import HostSlots
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape

torch.set_num_threads(1)

SHAPE = ModelShape("f", 2, 8, 2, 32, 16, (8192,) * 2, 1, dtype="f32")
EXPERT = 8192
KEEP_ANSWERS = (
    "dali", "edgemoe", "fiddler", "hybrimoe", "mixtral-offloading", "moe-infinity",
    "moe-on-demand", "deepspeed",
)  # fmt: skip
"""Systems that leave the model's answers as they are; some begin with a full cache."""
POLICIES = (*KEEP_ANSWERS, *combinations(oracles=True))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    place = tmp_path_factory.mktemp("trace") / "t.parquet"
    return open_trace(write_trace(place, SHAPE, ((4, 3),), columns=COLUMNS))


@pytest.fixture(scope="module")
def right(trace, store):
    """No policy among them changes an answer, so there is one right one."""
    return expected(trace, "all-cpu", store=store)


def options(seed):
    """Policy and memories of a schedule: all policies in turn, memories as drawn."""
    draws = random.Random(seed)
    policy = POLICIES[seed % len(POLICIES)]
    host = draws.choice((None, 6, 8, 12))
    # Some stage whole layers, or keep a buffer, which need room.
    if host:
        system = systems.compose(policy)
        staged = (system.staging_slots(SHAPE) or 0) + system.buffer_slots()
        host += max(staged, 2 * SHAPE.experts if "whole-layer" in policy else 0)
    return policy, MemoryOptions(
        slots_per_layer=draws.choice((0, 1, 2, 4)),
        host_memory_bytes=host and host * EXPERT,
    )


@pytest.fixture
def fault(trace, store, right, artefacts):
    """What is found in one schedule, None if nothing."""

    def of(seed):
        schedule = Schedule(seed)
        policy, memory = options(seed)
        try:
            schedule.run(trace, policy, store=store, memory=memory, artefacts=artefacts)
        except (ReadTooEarly, Deadlock) as error:
            return str(error)
        if schedule.device.findings:
            return schedule.device.findings[0]
        return "other hidden states" if differ(schedule.states(), right) else None

    return of


def test_nothing_is_found_in_the_code_as_it_stands(fault, schedules):
    for seed in schedules.seeds():
        assert fault(seed) is None, f"seed {seed}"


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_variant_is_found(name, fault, monkeypatch, schedules):
    BROKEN[name](monkeypatch)
    assert any(map(fault, range(schedules.count))), f"{name}: not found"


@pytest.mark.parametrize(("policy", "memory"), [
    ("mixtral-offloading", MemoryOptions(slots_per_layer=1)),
    # The CPU computes a layer that is resident in part, and only on the device.
    ("llama.cpp", MemoryOptions(cache_ratio=0.6)),
])  # fmt: skip
def test_copies_back_land_before_anyone_uses_them(
    trace, store, right, schedules, policy, memory
):
    """And spans of those that are lanes' own say when, by the device's clock."""
    for seed in schedules.seeds(every=4):
        schedule = Schedule(seed)
        run = schedule.run(trace, policy, store=store, memory=memory)
        assert not schedule.device.findings
        assert not differ(schedule.states(), right)
        spans = run.timeline.frame()
        back = spans[(spans["lane"] == "d2h0") & (spans["kind"] == "replace")]
        assert (len(back) > 0) == (policy == "mixtral-offloading")
        assert (back["end_s"] >= back["start_s"]).all()


def test_copies_back_that_nobody_awaits_are_found(trace, store, monkeypatch):
    """They would write into memory that is no longer page-locked."""
    a_copy_back_waits_for_nobody(monkeypatch)
    memory = MemoryOptions(slots_per_layer=1)
    with pytest.raises(ReadTooEarly, match="that was let go of"):
        Schedule(0).run(trace, "mixtral-offloading", store=store, memory=memory)


def test_plans_repeat_and_spans_are_in_order(trace, store, artefacts, schedules):
    for seed in schedules.seeds(every=3):
        policy, memory = options(seed)
        given = {"artefacts": artefacts, **memory.options()}
        run = Schedule(seed).run(
            trace, policy, store=store, memory=memory, artefacts=artefacts
        )
        config = RunConfig.of(policy=policy, **given)
        shape = shape_for(trace.shape, None)
        future = RecordedFuture.of(trace)
        planner = Setup(config, shape, PROFILE, config.system, future=future).planner()
        steps = compose(trace, columns=COLUMNS)
        plans = repeat(run.decision_log.entries, planner, steps)
        assert len(plans) == run.metrics["layer_steps"]
        spans = run.timeline.frame()
        assert (spans["end_s"] >= spans["start_s"]).all()
        assert (spans["kind"] == "compute").sum() == len(run.timeline.access_frame())


class Dying:
    """Dies at a drawn call."""

    def __init__(self, straight, calls, error):
        self.straight = straight
        self.calls = calls
        self.error = error

    def __call__(self, *arguments, **named):
        self.calls -= 1
        if self.calls == 0:
            raise self.error
        return self.straight(*arguments, **named)


FAULTS = {
    "a disk": (direct_io.os, "preadv", OSError(5, "EIO"), RuntimeFault),
    "a copy": (StreamDevice, "copy", torch.OutOfMemoryError("full"), RuntimeFault),
    "a product": (StreamDevice, "end_compute", ZeroDivisionError(), ZeroDivisionError),
    "the model": (StreamDevice, "mark", KeyboardInterrupt(), KeyboardInterrupt),
    "control": (StreamDevice, "join", KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize("fault_of", FAULTS)
def test_a_fault_anywhere_ends_every_thread(fault_of, trace, store, schedules):
    """What breaks at a drawn moment is raised as itself; nobody waits for ever, and no
    thread stays.
    """
    owner, name, error, expected_error = FAULTS[fault_of]
    memory = MemoryOptions(slots_per_layer=1, host_memory_bytes=6 * EXPERT)
    for seed in schedules.seeds(every=4):
        schedule = Schedule(seed)
        calls = 3 + random.Random(seed).randrange(6)
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(getattr(owner, name), calls, error)
            patch.setattr(owner, name, lambda *a, dying=dying, **k: dying(*a, **k))
            with pytest.raises(expected_error):
                schedule.run(
                    trace, "on-demand+lru+statistical", store=store, memory=memory
                )
        assert schedule.threads.names() == ["main"]


def interrupted(seed, trace, store):
    """A run during which ctrl-C is pressed at a drawn turn; whether it ended so."""
    schedule = Schedule(seed)
    schedule.threads.interrupt_at = 150 + random.Random(seed).randrange(1200)
    memory = MemoryOptions(slots_per_layer=1, host_memory_bytes=6 * EXPERT)
    try:
        schedule.run(trace, "on-demand+lru+statistical", store=store, memory=memory)
    except KeyboardInterrupt:
        assert schedule.threads.names() == ["main"]
        return True
    return False


def test_ctrl_c_at_any_moment_ends_every_thread(trace, store, schedules):
    ended = [interrupted(seed, trace, store) for seed in schedules.seeds(every=2)]
    assert any(ended)


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny") / "s"


def test_a_live_model_is_exact(tiny_store, schedules):
    """The shipped model, prefetching from the SSD, in some schedules."""
    for seed in schedules.seeds(every=12):
        case = Case.make(tiny.tiny_dir(), tiny_store)
        host = CacheSize.of(
            case.shape.expert_bytes,
            case.shape.experts,
            scope="global",
            total_bytes=40 * case.shape.max_expert_bytes,
        )
        slots = CacheSize.of(
            case.shape.expert_bytes, case.shape.experts, slots_per_layer=3
        )
        live, log, _, fresh, _ = Schedule(seed).live(
            case,
            System("on-demand" if seed % 2 else "greedy", "lru", "next-gate"),
            MemoryPlan(slots, host, 2, None),
            batch=2,
            new=1,
        )
        assert verify(case.plain, live.result.passes, "float32").passed
        repeat(log.entries, fresh, live.result.steps)
        case.store.close()


# -- the device itself, by hand --------------------------------------------------------


@pytest.fixture
def late():
    """A device that does nothing before somebody waits for it."""
    schedule = Schedule(0)
    with schedule.drawn():
        device = schedule.device
        device.side = device.new_stream()
        for stream in device.streams:
            stream.haste = 0.0
        yield device


def test_a_layer_step_is_handed_to_the_device_without_waiting_for_it(late):
    """Rows, and weights that a routing policy has changed, go through page-locked
    memory: a copy from any other would wait for all that was launched before it.
    """
    launched = torch.ones(2, 4, device=late.device) * 2.0
    weights = torch.ones(2, 1, device=late.device)
    routing = np.array([[1], [0]], np.uint16)
    device = StreamDevice(late)
    job = LayerJob(None, launched, weights, group_tokens(routing), device.send)
    job.reroute(routing, np.full((2, 1), 3.0))
    assert torch.isnan(launched.there).all()
    assert (launched + job.weights).tolist() == [[5.0] * 4] * 2
    assert job.device_rows.tolist() == [1, 0]


def test_slots_that_nobody_closes_are_unlocked_before_their_pages_go(late):
    slots = HostSlots(1, 4096, page_lock=late)
    locked = late._locked(slots.memory)
    assert slots.page_locked
    assert not locked.freed
    del slots
    gc.collect()
    assert locked.freed
