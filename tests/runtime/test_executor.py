"""Lanes with threads in them: order, gates, withdrawals, failures; and trace-driven
runs with real bytes.
"""

import signal
import threading
import time

import pytest
import torch
from support.real_machine import float_model, host_profile, real_run
from support.small_trace import write_trace

from moesim.base.errors import RuntimeFault, StoreError
from moesim.engine.names import BEHIND_DEMAND, DEMAND, DROP, REPLACEMENT, START, WAIT
from moesim.engine.operations import Consequences, Gate
from moesim.policies.sizes import GLOBAL, CacheSize
from moesim.runtime.executor.lanes import Lanes, Stopped, Task
from moesim.runtime.executor.memories import cache_slots
from moesim.runtime.executor.trace_driven import shape_for
from moesim.runtime.models.dense import DenseStack
from moesim.traces.timeline.spans import COMPUTE, DENSE, FETCH

torch.set_num_threads(1)


class Noted(Task):
    """Writes its name down; may wait for a signal first."""

    __slots__ = ("block", "log", "name")

    def __init__(self, lane, name, log, block=None):
        super().__init__(lane, COMPUTE, 0, 0)
        self.name = name
        self.log = log
        self.block = block

    def run(self):
        if self.block is not None:
            assert self.block.wait(120)
        self.log.append(self.name)


class Ends(Consequences):
    """Wakes control at every end."""

    def __init__(self, lanes):
        self.lanes = lanes

    def follow(self, operation):
        self.lanes.control.take()


class Verdicts(Gate):
    """Says by name what becomes of a copy."""

    def __init__(self, tasks):
        self.tasks = tasks
        self.of = {}

    def admit(self, operation):
        return self.of.get(getattr(self.tasks[operation.step], "name", None), START)


@pytest.fixture
def lanes():
    made = Lanes(host_profile())
    made.tasks = []
    made.make = lambda operation: made.tasks[operation.step]
    made.machine.consequences = Ends(made)
    made.machine.gate = Verdicts(made.tasks)
    made.open()
    yield made
    made.close()


def post(lanes, tasks):
    """Queue tasks with their priorities: one hand-off for all of them."""
    operations = []
    with lanes.lock:
        for task, priority in tasks:
            number = len(lanes.tasks)
            lanes.tasks.append(task)
            operations.append(
                lanes.machine.operation(task.lane, task.kind, number, 0, -1, 0.0, 0, 0)
            )
            operations[-1].priority = priority
            lanes.machine.submit(operations[-1], priority)
    return operations


def until_idle(lanes, log, count):
    """Let control wait until so many tasks have ended."""
    # The last lane of the accelerator, the lowest turn.
    done = Noted(lanes.names.index("d2h0"), "last", log)
    post(lanes, [(done, REPLACEMENT)])
    lanes.control.serve(lambda: len(log) == count + 1)
    assert log.pop() == "last"


def test_a_shared_worker_takes_turns_as_in_the_simulator(lanes):
    """While it is busy, queue up in the worst order: products first, then demand,
    prefetches, replacements.
    """
    gpu = lanes.names.index("gpu0")
    link = lanes.names.index("h2d0")
    log = []
    go = threading.Event()
    worst = [
        (Noted(link, "busy", log, go), DEMAND),
        (Noted(link, "replacement", log), REPLACEMENT),
        (Noted(link, "prefetch", log), BEHIND_DEMAND),
        (Noted(link, "demand", log), DEMAND),
        (Noted(gpu, "product 1", log), DEMAND),
        (Noted(gpu, "product 2", log), DEMAND),
    ]
    post(lanes, worst)
    go.set()
    until_idle(lanes, log, 6)
    assert log[:3] == ["busy", "product 1", "product 2"]
    assert log[3:] == ["demand", "prefetch", "replacement"]


def test_what_has_not_started_can_be_withdrawn(lanes):
    link = lanes.names.index("h2d0")
    log = []
    go = threading.Event()
    first = Noted(link, "first", log, go)
    second = Noted(link, "second", log)
    _, queued = post(lanes, [(first, BEHIND_DEMAND), (second, BEHIND_DEMAND)])
    with lanes.lock:
        lanes.machine.withdraw(queued, BEHIND_DEMAND)
    go.set()
    until_idle(lanes, log, 1)
    assert log == ["first"]


def test_admission_lets_a_copy_wait_for_a_place_start_or_be_dropped(lanes):
    """The demand copy waits, the first prefetch is dropped, the second starts; once
    there is a place the demand copy starts too.
    """
    link = lanes.names.index("h2d0")
    log = []
    verdicts = lanes.machine.gate.of
    verdicts |= {"demand": WAIT, "unlucky": DROP}
    post(
        lanes,
        [
            (Noted(link, "demand", log), DEMAND),
            (Noted(link, "unlucky", log), BEHIND_DEMAND),
            (Noted(link, "prefetch", log), BEHIND_DEMAND),
        ],
    )
    until_idle(lanes, log, 1)
    assert log == ["prefetch"]
    verdicts["demand"] = START
    with lanes.lock:
        lanes.machine.offer()
    until_idle(lanes, log, 2)
    assert log == ["prefetch", "demand"]


def test_the_control_thread_serves_the_cpu_lane_itself(lanes):
    log = []
    mine = Noted(lanes.names.index("cpu"), threading.current_thread(), log)
    post(lanes, [(mine, DEMAND)])
    lanes.control.serve(lambda: bool(log))
    assert log == [threading.current_thread()]
    ours = {t.name for t in threading.enumerate() if t.name.startswith("moesim-")}
    assert ours == {"moesim-accelerator", "moesim-ssd"}


def test_a_failure_in_a_lane_wakes_whoever_waits(lanes):
    class Broken(Task):
        __slots__ = ()

        def run(self):
            raise ZeroDivisionError("a lane died")

    post(lanes, [(Broken(lanes.names.index("ssd"), FETCH, 0, 0), DEMAND)])
    with pytest.raises(Stopped):
        lanes.control.serve(lambda: False)
    assert isinstance(lanes.failure, ZeroDivisionError)


def test_cuda_launches_are_made_by_the_control_thread():
    """On CUDA the device computes by itself: its lanes are served where launches
    happen, copies keep a thread.
    """
    lanes = Lanes(host_profile(), with_control=("gpu", "d2h"))
    assert lanes.worker("gpu0") is lanes.worker("d2h0") is lanes.control
    assert lanes.worker("h2d0") is not lanes.control


# -- trace-driven ----------------------------------------------------------------------


def test_signals_are_answered_by_the_control_thread(lanes):
    """A worker that noticed one would run the program's handler where none expects it,
    and control would go on asleep.
    """
    answered = []
    before = signal.signal(
        signal.SIGINT, lambda *_: answered.append(threading.current_thread())
    )

    class Interrupts(Noted):
        __slots__ = ()

        def run(self):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            # The main thread notes it between two of its own steps.
            for _ in range(10_000):
                if answered or lanes.interrupts._noted is not None:
                    break
                time.sleep(0.001)
            super().run()

    log = []
    try:
        with lanes.interrupts:
            post(lanes, [(Interrupts(lanes.names.index("h2d0"), "copy", log), DEMAND)])
            until_idle(lanes, log, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert answered == [threading.main_thread()]


def test_the_first_dense_part_has_its_worker_from_the_beginning_on(tmp_path):
    trace = write_trace(tmp_path / "t.parquet", float_model(), ((6, 8),))
    run = real_run(trace, "on-demand", tmp_path / "s", memory={"slots_per_layer": 3})
    columns = run.timeline.operations.columns()
    assert columns["picked_s"][columns["kind"] == DENSE][0] == 0.0


def test_a_coming_dense_part_is_computed_where_a_prefetcher_asks_for_it(tmp_path):
    """SMoE's runs the second of two layers' in each of eight decode steps; prompts are
    preloaded without it.
    """
    path = tmp_path / "t.parquet"
    trace = write_trace(path, float_model(), ((6, 8),), columns=("pred1_raw",))
    options = {"memory": {"slots_per_layer": 3}, "prefetch": "partial-hidden"}
    run = real_run(trace, "greedy", tmp_path / "s", **options)
    kinds = run.timeline.frame()["kind"]
    # Two layers and a head of nine passes.
    assert (kinds == "dense").sum() == 9 * 3 + 8


def test_slots_of_one_size_are_not_shared_by_layers_of_several():
    """They were as many as there are small experts, each as large as the largest."""
    large = CacheSize.of((8192, 16384), 6, scope=GLOBAL, total_bytes=1 << 16)
    with pytest.raises(RuntimeFault, match="8,192 to 16,384 bytes"):
        cache_slots(large, (8192, 16384))
    even = CacheSize.of((8192, 8192), 6, scope=GLOBAL, total_bytes=1 << 16)
    assert cache_slots(even, (8192, 8192)) == 8


def test_the_sizes_of_another_model_keep_the_routing_of_the_trace():
    """qwen3-30b-a3b/4: hidden 2048 / 4, intermediate 768 / 4; 3 H F weights of 4 bytes
    are 288 blocks.
    """
    found = shape_for(float_model(layers=2, experts=6), "qwen3-30b-a3b/4")
    assert (found.layers, found.experts, found.top_k) == (2, 6, 2)
    assert (found.hidden, found.expert_intermediate) == (512, 192)
    assert found.expert_bytes == (3 * 512 * 192 * 4,) * 2


def test_bytes_outside_the_experts_are_those_that_are_computed_with():
    """Two layers: qkv and output of 4 heads x 8 on 32, gate of 6; head and embedding of
    50: one not kept.
    """
    sizes = float_model(heads=4, kv_heads=2, head_dim=8, vocab=50)
    stack = DenseStack(sizes, torch.float32, torch.device("cpu"))
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 6 * 32
    assert stack.bytes == 4 * (2 * layer + 50 * 32)
    assert shape_for(sizes, None).other_bytes == 4 * (2 * layer + 2 * 50 * 32)


@pytest.mark.parametrize(
    ("tokens", "sequences", "context"), [(7, 1, 7), (7, 2, 5), (3, 3, 9), (1, 1, 1)]
)
def test_dense_layers_serve_ragged_batches(tokens, sequences, context):
    sizes = float_model(
        heads=4, kv_heads=2, head_dim=8, shared_intermediate=8, vocab=50
    )
    stack = DenseStack(sizes, torch.float32, torch.device("cpu"))
    stack.allocate_cache(sequences, context)
    out, normed = stack.layer(1, stack.embed(tokens), sequences, context)
    stack.head(out, sequences)
    assert out.shape == normed.shape == (tokens, 32)
    assert bool(torch.isfinite(out).all())
    assert torch.allclose(normed.square().mean(1), torch.ones(tokens), atol=1e-3), (
        "experts are asked about a norm"
    )


def test_a_store_of_other_sizes_is_refused(tmp_path):
    trace = write_trace(tmp_path / "t.parquet", float_model(), ((2, 2),))
    real_run(trace, None, tmp_path / "s")
    with pytest.raises(StoreError, match=r"expected 2 layers x 6 experts of 512 x 192"):
        real_run(trace, None, tmp_path / "s", shape="qwen3-30b-a3b/4")
