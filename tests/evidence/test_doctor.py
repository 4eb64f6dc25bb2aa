"""The doctor: a verdict and a way out for everything that a machine may lack."""

import json
import os

import pytest
from support.real_machine import host_profile

from moesim.base import host
from moesim.base.errors import RuntimeFault
from moesim.base.host import fails, holds, limited
from moesim.evidence import doctor
from moesim.runtime import accelerators
from moesim.runtime.store import memory as direct_io


def test_graphics_that_torch_does_not_find_fail_with_a_way_out(monkeypatch):
    monkeypatch.setattr(accelerators, "accelerator_here", lambda: None)
    found = doctor.check_torch(["NVIDIA"])
    assert found.verdict == "fails"
    assert "the system has NVIDIA graphics" in found.outcome
    assert "pytorch.org" in found.way_out
    assert doctor.check_torch([]).verdict == "ok"


def test_without_torch_the_rest_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    told = {check.name: check.finding for check in doctor.diagnose().checks}
    assert told["torch"].way_out == "pip install 'moesim[runtime]'"
    assert {"compiled", "memory", "cores"} < told.keys()
    assert not {"disk", "exact output"} & told.keys()


@pytest.mark.parametrize(
    ("why", "way_out"),
    [("nothing was compiled", "C compiler"), ("MOESIM_PLAIN is set", "unset")],
)
def test_what_runs_uncompiled_is_a_limit_with_a_way_out(why, way_out):
    found = host.check_extensions(("plain", why))
    assert found.verdict == "limited"
    assert why in found.outcome
    assert way_out in found.way_out
    assert host.check_extensions(("compiled", "")).verdict == "ok"


class Card:
    """An accelerator that locks no memory."""

    kind = "cuda"
    page_locks = True
    unified = False
    driver = "CUDA 12"
    name = "a card"
    total_bytes = 8 << 30

    def page_lock(self, memory):
        raise RuntimeFault("cannot page-lock 0.06 GiB of host memory: CUDA error 2")


def test_memory_that_cannot_be_page_locked_fails(monkeypatch):
    monkeypatch.setattr(accelerators, "accelerator_here", Card)
    assert doctor.check_torch().outcome.endswith("CUDA 12: a card, 8.0 GiB")
    found = doctor.check_page_lock()
    assert found.verdict == "fails"
    assert "ulimit -l" in found.way_out


def test_without_shared_memory_sweeps_take_one_process(monkeypatch, tmp_path):
    found = host.check_shared_memory(tmp_path / "shm")
    assert (found.verdict, "--jobs 1" in found.way_out) == ("limited", True)

    class NoSemaphores:
        def Semaphore(self):  # noqa: N802 - the library's name
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(host.multiprocessing, "get_context", lambda _: NoSemaphores())
    found = host.check_shared_memory()
    assert found.verdict == "limited"
    assert "No such file" in found.outcome


def test_without_direct_io_reads_may_come_from_memory(monkeypatch, tmp_path):
    """As on a file system that refuses the flag."""
    straight = os.open

    def refusing(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return straight(path, flags, *more, **named)

    monkeypatch.setattr(direct_io.os, "open", refusing)
    checked = dict(doctor.check_disk(tmp_path))
    found = checked["direct I/O"]
    assert found.verdict == "limited"
    assert "page cache" in found.outcome
    assert "--store DIR" in found.way_out
    assert checked["disk"].verdict == "ok"
    assert list(tmp_path.iterdir()) == []


def test_one_core_overlaps_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0})
    found = host.check_cores(tmp_path)
    assert found.verdict == "limited"
    assert "one core" in found.outcome


@pytest.mark.parametrize(("quota", "load", "words"), [
    ("150000 100000", 0.0, "a quota of 1.5"),
    ("max 100000", 7.0, "other programs keep 7.0 busy"),
    ("max 100000", 0.0, "siblings on 1 physical"),
])  # fmt: skip
def test_quotas_siblings_and_other_programs_are_named(
    monkeypatch, tmp_path, quota, load, words
):
    cores = (0, 1, 2, 3)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(host, "load_average", lambda: load)
    for core in cores:
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0-3\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(host, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_GROUPS", tmp_path)
    assert words in host.check_cores(tmp_path).outcome


@pytest.mark.parametrize(("setting", "verdict"), [
    ("always [madvise] never", "ok"),
    ("always madvise [never]", "limited"),
    (None, "limited"),
])  # fmt: skip
def test_huge_pages_that_are_off_say_how_to_switch_them_on(tmp_path, setting, verdict):
    place = tmp_path / "enabled"
    if setting is not None:
        place.write_text(setting)
    found = host.check_huge_pages(place)
    assert found.verdict == verdict
    assert (f"echo madvise > {place}" in found.way_out) == (verdict != "ok")


def test_the_verdict_names_what_fails_before_what_is_limited():
    diagnosis = doctor.Diagnosis({})
    assert diagnosis.verdict == "everything works"
    diagnosis.checks.append(doctor.Checked("cores", limited("one", "two"), 0.1))
    assert diagnosis.verdict == "everything works, within limits: cores"
    diagnosis.checks.append(doctor.Checked("disk", fails("broken", "mend it"), 0.1))
    assert diagnosis.verdict == "disk: does not work here; mend it"
    assert diagnosis.lines()[0] == "cores  limited  one"
    assert diagnosis.lines()[-1].startswith("verdict: disk")


def test_no_check_can_end_the_others():
    def broken():
        raise ZeroDivisionError("by zero\nand more")

    (one,) = doctor._checked("lanes", broken)
    assert one.finding.outcome == "ZeroDivisionError: by zero"
    assert "--json" in one.finding.way_out


def test_a_wrong_expert_is_found_by_the_doctor(monkeypatch):
    from moesim.runtime.executor.memories import HostSlotMap

    monkeypatch.setattr(doctor, "rough_profile", host_profile)
    assert doctor.check_exact_output().verdict == "ok"
    straight = HostSlotMap.weights
    monkeypatch.setattr(
        HostSlotMap, "weights", lambda self, key: straight(self, key ^ 1)
    )
    assert doctor.check_exact_output().verdict == "fails"


@pytest.mark.parametrize("disk", [fails("broken", "mend it"), holds("fast")])
def test_a_report_is_complete_and_the_code_says_whether_something_fails(
    monkeypatch, tmp_path, command, disk
):
    def diagnosis(folder, progress):
        assert folder == tmp_path
        checks = {"torch": holds("torch 2"), "disk": disk}
        made = [doctor.Checked(name, one, 0.1) for name, one in checks.items()]
        return doctor.Diagnosis({"torch": "2"}, made)

    monkeypatch.setattr(doctor, "diagnose", diagnosis)
    code, printed, _ = command("doctor", "--disk", tmp_path, "--json")
    report = json.loads(printed)
    assert code == (disk.verdict == "fails")
    assert [one["check"] for one in report["checks"]] == ["torch", "disk"]
    assert report["versions"] == {"torch": "2"}
