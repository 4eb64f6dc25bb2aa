"""The measurement really works through memory, disk and threads, and says plausible
things about this machine.
"""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.fake_accelerator import FakeAccelerator

from moesim.hwprofiles.profile import load_profile
from moesim.traces.format.schema import ModelShape

torch = pytest.importorskip("torch", reason="the runtime extra is not installed")

from moesim.base.errors import RuntimeFault  # noqa: E402
from moesim.runtime import accelerators  # noqa: E402
from moesim.runtime.measure import copies as measure_disk  # noqa: E402
from moesim.runtime.measure import neighbours  # noqa: E402
from moesim.runtime.measure import profile as profile_module  # noqa: E402
from moesim.runtime.measure.control import measure_dispatch  # noqa: E402
from moesim.runtime.measure.copies import link_memories  # noqa: E402
from moesim.runtime.measure.experts import (  # noqa: E402
    DenseWidth,
    ExpertPool,
    Size,
)
from moesim.runtime.measure.neighbours import LaneWork, measure_contention  # noqa: E402
from moesim.runtime.measure.profile import measure, workers_of  # noqa: E402
from moesim.runtime.measure.sampling import (  # noqa: E402
    MOST,
    Measurements,
    pool_bytes,
    sample,
)
from moesim.runtime.models.dense import DenseStack  # noqa: E402
from moesim.runtime.store.memory import DirectFile  # noqa: E402

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape(
    "small", 4, 16, 4, 512, 512, (3 * 512 * 512 * 4,) * 4, 1 << 20, heads=8, kv_heads=8,
    head_dim=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    told = []
    with pytest.MonkeyPatch.context() as patch:
        extent = profile_module._QUICK._replace(seconds=1.0)
        patch.setattr(profile_module, "_QUICK", extent)
        noting = {"progress": lambda *step: told.append(step)}
        profile = measure(SHAPE, folder / "hw.toml", quick=True, **noting)
    return profile, folder, told


def test_a_measurement_says_what_it_does(measured):
    _, _, told = measured
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert told[-1] == ("done", 1.0)


def test_a_card_is_measured_as_it_is_used(tmp_path, monkeypatch):
    """Both lanes in the type that runs use, and what card and processor cost each
    other.
    """
    card = FakeAccelerator()
    monkeypatch.setattr(profile_module, "accelerator_here", lambda: card)
    monkeypatch.setattr(profile_module, "available_cores", lambda: 4)
    monkeypatch.setattr(neighbours, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(neighbours, "DEVICE_READ_BYTES", 1 << 20)
    extent = profile_module._QUICK._replace(seconds=1.0)
    monkeypatch.setattr(profile_module, "_QUICK", extent)
    profile = measure(SHAPE, tmp_path / "hw.toml", quick=True)
    assert (profile.accelerator, profile.gpus) == ("cuda", 1)
    for lane in ("cpu", "gpu"):
        curve = profile.curves[f"costs.{lane}.points"]
        assert curve.reference.dtype == "bfloat16"
    assert {
        f"contention.{pair}" for pair in ("cpu.gpu", "gpu.cpu", "cpu.h2d", "h2d.cpu")
    } <= set(profile.numbers)


def test_the_file_is_the_profile_and_nothing_else_is_left_behind(measured):
    profile, folder, _ = measured
    assert load_profile(folder / "hw.toml") == profile
    assert [path.name for path in folder.iterdir()] == ["hw.toml"]


def test_busy_workers_never_exceed_cores():
    cpu = ("control", "cpu", "gpu0", "h2d0", "d2h0")
    assert workers_of(1, 0, reads_share=False) == {"cpu": cpu, "ssd": ("ssd",)}
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
        record = pool.slots.record(slot)[: pool.layout.expert_bytes]
        assert record.view(torch.float32).ne(0).any(), slot
    for memory in link_memories(accelerators.HOST, 1 << 20, page_locked=True):
        assert memory.ne(0).all()


def processor_of(folder, slices, cores_each, kib):
    """Write what a kernel says of a processor whose last cache comes in slices."""
    for core in range(slices * cores_each):
        first = core // cores_each * cores_each
        for index, (level, kind, size, sharing) in enumerate(
            (
                (1, "Data", 32, core),
                (1, "Instruction", 32, core),
                (2, "Unified", 512, core),
                (3, "Unified", kib, f"{first}-{first + cores_each - 1}"),
            )
        ):
            cache = folder / f"cpu{core}" / "cache" / f"index{index}"
            cache.mkdir(parents=True)
            for name, value in (
                ("level", level),
                ("type", kind),
                ("size", f"{size}K"),
                ("shared_cpu_list", sharing),
            ):
                (cache / name).write_text(f"{value}\n")
    return folder


def test_a_pool_holds_four_times_all_caches(tmp_path, monkeypatch):
    """An EPYC 7532: 16 slices of 16 MiB for two cores each, beside 32 small ones. Cores
    that this process may not use do not count.
    """
    host = accelerators.HOST
    monkeypatch.setattr(
        accelerators, "_CPU_FOLDER", processor_of(tmp_path, 16, 2, 16384)
    )
    monkeypatch.setattr(accelerators, "available_memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    assert pool_bytes(host) == 4 * (16 * 16384 + 32 * (512 + 32)) * 1024
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    assert pool_bytes(host) == 4 * (16384 + 2 * (512 + 32)) * 1024
    assert pool_bytes(host, 10 << 30) == 20 << 30
    monkeypatch.setattr(accelerators, "available_memory_bytes", lambda: 1 << 20)
    assert pool_bytes(host) == 1 << 17


def test_caches_without_sizes_are_unknown(tmp_path, monkeypatch):
    """As in some containers: nothing is raised, and the pool takes a guess."""
    (tmp_path / "cpu0" / "cache" / "index0").mkdir(parents=True)
    (tmp_path / "cpu0" / "cache" / "index0" / "level").write_text("3\n")
    monkeypatch.setattr(accelerators, "_CPU_FOLDER", tmp_path)
    assert accelerators.all_caches_bytes() is None
    assert accelerators.caches_bytes() >= 128 << 20


def test_a_card_has_pools_of_its_own_caches():
    """Not of the host's."""
    card = SimpleNamespace(cache_bytes=50 << 20, total_bytes=80 << 30)
    assert pool_bytes(card) == 200 << 20
    small = SimpleNamespace(cache_bytes=50 << 20, total_bytes=1 << 30)
    assert pool_bytes(small) == 128 << 20


def test_each_run_takes_the_next_expert_and_computes_it():
    pool = ExpertPool(Size(32, 16), torch.float32, total_bytes=1 << 16)
    up, down, *_ = pool.slots.weights(0, pool.layout)
    work = pool.work(2)
    first = work(0)
    assert torch.equal(work(pool.slots.slots), first)
    pool.slots.record(1).zero_()
    assert work(1).abs().max() == 0
    assert (up.shape, down.shape, first.shape) == ((32, 32), (32, 16), (2, 32))


def test_sampling_counts_only_what_follows_the_warm_up():
    seen = []
    times = sample(seen.append, 0.0, fewest=5)
    assert (len(times), seen) == (5, [0, 1, 2, 3, 4, 5, 6])
    assert (times >= 0).all()
    assert len(sample(lambda _: None, 60.0)) == MOST


def test_a_dense_layer_counts_its_bytes_and_flops():
    """H 128: 4 H H + 64 H weights; 2 heads x 128 keys x 64 twice; float32. The layer that
    is computed has as many.
    """
    width = DenseWidth(128)
    assert width.params == 4 * 128 * 128 + 64 * 128
    assert width.bytes(torch.float32) == 4 * (width.params + 2 * 128 * 128)
    assert width.flops(3) == 2 * 3 * width.params + 4 * 3 * 128 * 128
    stack = DenseStack(width.shape(3), torch.float32, torch.device("cpu"))
    assert stack.bytes == 3 * 4 * width.params


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
    names = [thread.name for thread in threading.enumerate()]
    assert "measured-neighbour" not in names


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


def test_an_interval_of_contention_covers_the_truth(monkeypatch):
    """Rounds that scatter by 25 % around 1.8: 300 measurements, 95 % said."""
    draws = np.random.default_rng(0)
    monkeypatch.setattr(
        neighbours, "slowdown", lambda *_: 1.8 * draws.lognormal(0.0, 0.25)
    )
    work = LaneWork(1, lambda _: None)
    covered = []
    values = []
    for _ in range(300):
        findings = Measurements("2026-01-01")
        lanes = {"cpu": work, "gpu": work}
        measure_contention(findings, lanes, [("cpu", "gpu")], seconds=0.0)
        number = findings.numbers["contention.cpu.gpu"]
        low, high = number.interval
        covered.append(low <= 1.8 <= high)
        values.append(number.value)
    assert 0.93 <= np.mean(covered) <= 0.99
    assert np.median(values) == pytest.approx(1.8, rel=0.02)


def test_dispatch_leaves_no_thread_behind():
    findings = Measurements("2026-01-01")
    measure_dispatch(findings, seconds=0.05)
    assert set(findings.numbers) == {
        f"costs.dispatch.{key}" for key in ("first_op_s", "per_op_s", "join_s")
    }
    assert all(number.value > 0 for number in findings.numbers.values())
    assert not [
        thread for thread in threading.enumerate() if thread.name == "measured-lane"
    ]
