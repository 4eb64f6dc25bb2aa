"""The measurement really works through memory, disk and threads, and says plausible
things about this machine.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.traces.format.schema import ModelShape

torch = pytest.importorskip("torch", reason="the runtime extra is not installed")

from moesim.runtime.errors import RuntimeFault  # noqa: E402
from moesim.runtime.measure import disk as measure_disk  # noqa: E402
from moesim.runtime.measure.contention import LaneWork, measure_contention  # noqa: E402
from moesim.runtime.measure.copies import CopyPool  # noqa: E402
from moesim.runtime.measure.dense import DenseLayer  # noqa: E402
from moesim.runtime.measure.dispatch import measure_dispatch  # noqa: E402
from moesim.runtime.measure.experts import ExpertPool, Size  # noqa: E402
from moesim.runtime.measure.measurements import Measurements  # noqa: E402
from moesim.runtime.measure.pool_size import last_level_cache_bytes, pool_bytes  # noqa: E402
from moesim.runtime.measure.profile import measure, workers_of  # noqa: E402
from moesim.runtime.measure.timing import sample  # noqa: E402
from moesim.runtime.store.direct_io import DirectFile  # noqa: E402

ROOT = Path(__file__).parents[1]
SHAPE = ModelShape(
    "small",
    4,
    16,
    4,
    512,
    512,
    (3 * 512 * 512 * 4,) * 4,
    1 << 20,
    heads=8,
    kv_heads=8,
    head_dim=64,
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    told = []
    begin = time.perf_counter()
    profile = measure(
        SHAPE,
        folder / "hw.toml",
        quick=True,
        progress=lambda what, done: told.append((what, done)),
    )
    return profile, folder, told, time.perf_counter() - begin


def test_a_quick_measurement_is_quick_and_says_what_it_does(measured):
    _, _, told, seconds = measured
    assert seconds < 120, "some ten seconds where nobody else works"
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert told[-1] == ("done", 1.0)


def test_the_file_is_the_profile_and_nothing_else_is_left_behind(measured):
    profile, folder, _, _ = measured
    assert load_profile(folder / "hw.toml") == profile
    assert [path.name for path in folder.iterdir()] == ["hw.toml"]


def test_rates_are_those_of_a_machine_that_exists(measured):
    profile, _, _, _ = measured
    for path in (
        "costs.cpu.bytes_per_s",
        "costs.h2d.bytes_per_s",
        "costs.gpu.bytes_per_s",
    ):
        assert 0.5e9 < profile.number(path) < 5000e9, path
    assert 1e9 < profile.number("costs.cpu.flops_per_s") < 1e15
    for path, quantity in profile.numbers.items():
        if path.startswith("contention."):
            assert 1.0 <= quantity.value < 20, path
        if path.endswith("_s") and not path.endswith("_per_s"):
            assert 0 <= quantity.value < 0.1, path


def test_the_costs_of_a_model_follow_and_nothing_is_extrapolated_at_its_own_size(
    measured,
):
    profile, _, _, _ = measured
    costs = Costs(profile, SHAPE)
    seconds = costs.cpu_s(0, np.array([1, 4, 16, 64]))
    assert (np.diff(seconds) >= 0).all()
    assert 1e-5 < seconds[0] < 0.1
    assert 0 < costs.planning_s("greedy", 8) < 0.01
    assert costs.planning_s("ilp", 8) > 5 * costs.planning_s("greedy", 8)
    assert (
        not any(text.startswith("cpu") for text in costs.extrapolated)
        or profile.curves["costs.cpu.points"].reference.dtype == "bfloat16"
    )


def test_busy_workers_never_exceed_cores():
    assert workers_of(1, 0, reads_share=False) == {
        "cpu": ("control", "cpu", "gpu0", "h2d0", "d2h0"),
        "ssd": ("ssd",),
    }
    assert workers_of(2, 0, reads_share=False)["cpu"] == ("control", "cpu")
    assert workers_of(2, 0, reads_share=True)["cpu"] == ("control", "ssd", "cpu")
    assert workers_of(16, 2, reads_share=False)["control"] == ("control",)
    assert set(workers_of(16, 2, reads_share=False)) >= {"gpu1", "h2d1", "d2h1", "ssd"}


def test_every_byte_that_is_read_was_written_before():
    """Memory that was never written maps to one zero page, which reads three times too
    fast.
    """
    pool = ExpertPool(Size(64, 32), torch.float32, total_bytes=1 << 20)
    for slot in range(pool.slots.slots):
        assert (
            pool.slots.record(slot)[: pool.layout.expert_bytes]
            .view(torch.float32)
            .ne(0)
            .any()
        ), slot
    copies = CopyPool(1 << 20)
    assert copies.source.ne(0).all()
    assert copies.target.ne(0).all()


GROWTH = """
import psutil
from moesim.runtime.measure.copies import CopyPool
resident_bytes = lambda: psutil.Process().memory_info().rss
before = resident_bytes()
copies = CopyPool(64 << 20)
print((resident_bytes() - before) / len(copies.source))
"""


def test_written_memory_is_really_there():
    """A process of its own, where no other test frees memory meanwhile, grows by what
    the pools hold: 128 MiB.
    """
    done = subprocess.run(
        [sys.executable, "-c", GROWTH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1.9 < float(done.stdout) < 2.5


def test_the_pool_does_not_fit_the_cache():
    assert pool_bytes() > 2 * last_level_cache_bytes()
    assert pool_bytes(10 << 30) >= 20 << 30


def test_each_run_takes_the_next_expert_and_computes_it():
    pool = ExpertPool(Size(32, 16), torch.float32, total_bytes=1 << 16)
    up, down, *_ = pool.slots.weights(0, pool.layout)
    work = pool.work(2)
    first = work(0)
    assert torch.equal(work(pool.slots.slots), first)
    pool.slots.record(1).zero_()
    assert work(1).abs().max() == 0
    assert (up.shape, down.shape, first.shape) == ((32, 32), (32, 16), (2, 32))


def test_copies_move_what_they_say():
    pool = CopyPool(1 << 12)
    pool.work(1 << 10)(1)
    assert (pool.target == 1).nonzero().flatten().tolist() == list(
        range(1 << 10, 2 << 10)
    )


def test_sampling_counts_only_what_follows_the_warm_up():
    seen = []
    times = sample(seen.append, 0.0, fewest=5)
    assert (len(times), seen) == (5, [0, 1, 2, 3, 4, 5, 6])
    assert (times >= 0).all()
    assert len(sample(lambda _: None, 60.0, most=9)) == 9


def test_a_dense_layer_counts_its_bytes_and_flops():
    """H 128: 4 H H + 64 H weights; 2 heads x 128 keys x 64 twice; float32."""
    layer = DenseLayer.of(128, torch.float32, torch.device("cpu"))
    assert layer.params == 4 * 128 * 128 + 64 * 128
    assert layer.bytes == 4 * (layer.params + 2 * 128 * 128)
    assert layer.flops(3) == 2 * 3 * layer.params + 4 * 3 * 128 * 128
    assert layer.forward(torch.ones(3, 128)).shape == (3, 128)


def test_a_memory_file_system_is_said_and_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_disk, "_file_system", lambda _: "tmpfs")
    findings = Measurements("2026-01-01")
    report = measure_disk.measure_disk(
        findings, tmp_path, file_bytes=1 << 20, seconds=0.01
    )
    assert "tmpfs" in report.summary
    assert report.core_share is None
    assert findings.numbers == {}


def test_reads_through_the_page_cache_are_called_so(tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure_disk, "DirectFile", lambda path: DirectFile(path, direct=False)
    )
    findings = Measurements("2026-01-01")
    report = measure_disk.measure_disk(
        findings, tmp_path, file_bytes=16 << 20, seconds=0.05
    )
    assert "page cache" in report.summary
    assert "page cache" in findings.numbers["costs.ssd.bytes_per_s"].source
    assert list(tmp_path.iterdir()) == []


def test_a_full_or_missing_disk_is_one_line(tmp_path):
    with pytest.raises(RuntimeFault, match=r"fewer than .* MiB are free"):
        measure_disk.measure_disk(
            Measurements("2026-01-01"), tmp_path, file_bytes=1 << 60, seconds=0.01
        )
    with pytest.raises(RuntimeFault, match="cannot measure reads: No such file"):
        measure_disk.measure_disk(
            Measurements("2026-01-01"),
            tmp_path / "absent",
            file_bytes=1 << 20,
            seconds=0.01,
        )


def test_a_neighbour_that_fails_is_reported_and_not_waited_for():
    def fail(_):
        raise RuntimeFault("the neighbour broke")

    lanes = {"cpu": LaneWork(1, lambda _: None), "gpu": LaneWork(1, fail)}
    with pytest.raises(RuntimeFault, match="the neighbour broke"):
        measure_contention(
            Measurements("2026-01-01"), lanes, [("cpu", "gpu")], seconds=0.01
        )
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name == "measured-neighbour"
    ]


def test_contention_is_the_ratio_beside_over_alone():
    """A neighbour that mostly holds the one lock makes its victim wait; it does so
    asleep, so load changes little.
    """
    lock = threading.Lock()

    def hold(asleep_s, away_s):
        with lock:
            time.sleep(asleep_s)
        time.sleep(away_s)

    findings = Measurements("2026-01-01")
    lanes = {
        "cpu": LaneWork(1, lambda _: hold(1e-4, 0)),
        "gpu": LaneWork(1, lambda _: hold(8e-3, 1e-3)),
    }
    measure_contention(findings, lanes, [("cpu", "gpu")], seconds=0.3)
    assert findings.numbers["contention.cpu.gpu"].value > 1.2


def test_dispatch_leaves_no_thread_behind():
    findings = Measurements("2026-01-01")
    measure_dispatch(findings, seconds=0.05)
    assert set(findings.numbers) == {
        f"costs.dispatch.{key}" for key in ("first_op_s", "per_op_s", "join_s")
    }
    assert all(0 < number.value < 1 for number in findings.numbers.values())
    assert not [
        thread for thread in threading.enumerate() if thread.name == "measured-lane"
    ]
