"""Probes of memories: by threads, in the profile, and from there in advice."""

import pytest

from moesim.advice.machine import Grade, machine_of_profile
from moesim.hwprofiles.profile import load_profile, save_profile

pytest.importorskip("torch", reason="the runtime extra is not installed")

from moesim.runtime.accelerators import HOST
from moesim.runtime.measure import neighbours as probes
from moesim.runtime.measure.sampling import Measurements


def test_threads_double_up_to_the_cores():
    assert probes.thread_counts(1) == [1]
    assert probes.thread_counts(6) == [1, 2, 4, 6]
    assert probes.thread_counts(8) == [1, 2, 4, 8]


def test_reads_are_measured_and_reach_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "READ_BYTES", 16 << 20)
    found = Measurements(date="2026-11-22")
    probes.measure_probes(found, 2, HOST, seconds=0.2)
    rates = {
        path: quantity.value
        for path, quantity in found.numbers.items()
        if path.startswith("probes.host_read")
    }
    assert list(rates) == [
        "probes.host_read.1.bytes_per_s",
        "probes.host_read.2.bytes_per_s",
    ]
    # No memory of today is slower than 0.1 or faster than 10,000 GB/s.
    assert all(1e8 < rate < 1e13 for rate in rates.values())

    profile = load_profile("two-core-host")
    profile.numbers.update(found.numbers)
    save_profile(profile, tmp_path / "hw.toml")
    machine = machine_of_profile(tmp_path / "hw.toml")
    assert machine.grade is Grade.PROBED
    assert machine.probes.host_read == pytest.approx(
        {
            1: rates["probes.host_read.1.bytes_per_s"],
            2: rates["probes.host_read.2.bytes_per_s"],
        }
    )
