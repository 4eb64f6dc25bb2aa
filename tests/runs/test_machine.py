"""A run takes this machine as it may be used: its share of cores and memory, one GPU,
the disk that will hold the experts.
"""

import datetime as dt
from dataclasses import replace
from pathlib import Path

import pytest
from support.real_machine import host_profile

from moesim import hwprofiles
from moesim.base import host
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.hwprofiles.schema import Curve, ProfileError, Quantity, ReferenceExpert
from moesim.runs import machine
from moesim.runtime.measure.profile import workers_of
from moesim.traces.weight_formats import FLOAT_FORMATS


def test_of_several_gpus_a_run_takes_the_first(monkeypatch):
    """`moesim profile` writes the lanes of all that are visible."""
    monkeypatch.setattr(machine, "this_machine", lambda: ("cuda", 16))
    measured = host_profile(
        workers_of(16, 2, reads_share=False), accelerator="cuda", cores=16
    )
    watts = Quantity(300.0, "assumed", "a test")
    measured.numbers.update({"power.gpu0.busy_w": watts, "power.gpu1.busy_w": watts})
    assert measured.gpus == 2
    taken = machine.machine_profile(measured)
    assert taken.gpus == 1
    assert taken.lanes == ("control", "cpu", "gpu0", "h2d0", "d2h0", "ssd")
    assert {path for path in taken.numbers if "power" in path} == {"power.gpu0.busy_w"}


def test_another_machine_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "this_machine", lambda: ("host", 2))
    with pytest.raises(ProfileError, match=r"accelerator host, 2 cores\), found"):
        machine.machine_profile(host_profile(cores=4))


@pytest.mark.parametrize(("accelerator", "kind", "dtype"), [
    ("host", "measured", "bfloat16"),
    ("cuda", "measured", "bfloat16"),
    ("host", "published", "float32"),
])  # fmt: skip
def test_a_run_computes_in_the_type_that_was_measured(accelerator, kind, dtype):
    """Costs of another type would say nothing about it."""
    expert = ReferenceExpert(64, 32, 12288, "bfloat16")
    curve = Curve("tokens", (1,), (1e-3,), kind, "a test", reference=expert)
    profile = host_profile(accelerator=accelerator)
    profile = replace(profile, curves={"costs.cpu.points": curve})
    assert machine.experts_dtype(profile) == dtype


def test_a_run_knows_the_type_of_every_profile_that_ships():
    """Some name a weight format, ``f32``; a run needs torch's name."""
    shipped = sorted((Path(hwprofiles.__file__).parent / "data").glob("*.toml"))
    types = {path.stem: machine.experts_dtype(load_profile(path)) for path in shipped}
    assert types["two-core-host"] == "float32"
    assert set(types.values()) <= set(FLOAT_FORMATS)


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Folder of the control group that holds this process."""
    own = tmp_path / "cgroup"
    own.write_text("0::/docker/one\n")
    folder = tmp_path / "groups" / "docker" / "one"
    folder.mkdir(parents=True)
    monkeypatch.setattr(host, "_OWN_GROUPS", own)
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")
    return folder


def test_a_container_has_its_share_of_cores_and_memory(group, monkeypatch):
    """Limits of outer groups count too; file pages that nobody needs are free."""
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(16)))
    (group / "cpu.max").write_text("350000 100000\n")
    assert host.available_cores() == 3
    (group.parent / "cpu.max").write_text("50000 100000\n")
    assert host.available_cores() == 1
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("900000\n")
    (group / "memory.stat").write_text("anon 500000\ninactive_file 400000\n")
    assert host.total_memory_bytes() == 1_000_000
    assert host.available_memory_bytes() == 500_000


def test_without_limits_everything_is_there(group, monkeypatch):
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(16)))
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    assert host.available_cores() == 16
    assert host.total_memory_bytes() > 1 << 30


def test_older_control_groups_are_read_too(tmp_path, group, monkeypatch):
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(16)))
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/docker/one\n")
    folder = tmp_path / "groups" / "cpu,cpuacct"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert host.available_cores() == 2


@pytest.fixture
def measurements(tmp_path, monkeypatch):
    """Disks that were measured, one for each measurement of this machine."""
    asked = []

    def measure(_shape, out, *, quick, disk_dir):
        assert quick
        asked.append(disk_dir)
        date = dt.datetime.now(tz=dt.UTC).date() - dt.timedelta(days=3)
        profile = replace(host_profile(), name=out.stem, date=str(date))
        save_profile(profile, out)
        return profile

    monkeypatch.setattr("moesim.runtime.measure.profile.measure", measure)
    monkeypatch.setattr(machine, "default_profile", host_profile)
    monkeypatch.setattr(machine, "this_machine", lambda: ("host", 2))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def test_the_disk_of_the_experts_is_measured(tmp_path, measurements):
    """Temporary folders may lie in memory, which would leave a profile without disk."""
    machine.machine_profile(None, store=tmp_path / "not" / "yet")
    assert measurements == [tmp_path]


def test_a_machine_is_measured_once_and_says_how_long_ago(tmp_path, measurements):
    """Anew where a user asks, where the kept file is damaged, and on another machine."""
    first = machine.machine_profile(None, store=tmp_path)
    assert machine.machine_profile(None, store=tmp_path) == first
    assert len(measurements) == 1
    (note,) = machine.measurement_notes(first)
    assert "measured 3 days ago" in note
    assert machine.measurement_notes(host_profile()) == []

    machine.machine_profile(None, store=tmp_path, measure_again=True)
    assert len(measurements) == 2
    (kept,) = (tmp_path / "cache").rglob("*.toml")
    kept.write_text("torn off")
    machine.machine_profile(None, store=tmp_path)
    assert len(measurements) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.platform, "node", lambda: "another")
        machine.machine_profile(None, store=tmp_path)
    assert len(measurements) == 4
