"""`moesim run`: what it says of its start, what it refuses, and
what a model may not do.
"""

import dataclasses
import json
import shutil

import pytest
from support.real_machine import host_profile
from support.small_trace import write_trace

from moesim.runs import machine
from moesim.runs import measured as runs
from moesim.runtime.models.local_model import LocalModel
from moesim.traces.format.schema import ModelShape

SHAPE = ModelShape("f", 2, 8, 2, 32, 16, (8192,) * 2, 1, dtype="f32")
LONG_S = 1e6
"""Longer than any machine takes."""


@pytest.fixture(autouse=True)
def measured_machine(monkeypatch):
    monkeypatch.setattr(
        machine,
        "default_profile",
        lambda: dataclasses.replace(host_profile(), kind="measured"),
    )


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "t.parquet", SHAPE, ((4, 6),))


def test_building_a_store_is_told_apart_from_loading(
    command, trace, tmp_path, monkeypatch
):
    """A first run takes days longer before it begins; what it then says of itself is
    what the second one says.
    """
    built = runs.open_random_store
    clock = [0.0]

    def slow(*given):
        clock[0] += LONG_S
        return built(*given)

    monkeypatch.setattr(runs, "open_random_store", slow)
    real = runs.time.perf_counter
    monkeypatch.setattr(runs.time, "perf_counter", lambda: real() + clock[0])
    code, out, _ = command("run", trace, "--store", tmp_path / "s", "--json")
    assert code == 0
    startup = json.loads(out)["startup"]
    assert startup["store_s"] > LONG_S
    assert startup["ready_s"] == startup["dense_s"] + startup["experts_s"] < LONG_S
    assert startup["ready_s"] < startup["first_token_s"] < LONG_S


def test_perfetto_shows_lanes_of_both_worlds(command, trace, tmp_path):
    """A dense span for both layers in every forward pass, and one for the head, in
    either world.
    """
    place = tmp_path / "p.json"
    words = ("run", trace, "--store", tmp_path / "s", "--perfetto", place, "--json")
    code, out, _ = command(*words)
    assert code == 0
    events = json.loads(place.read_text())["traceEvents"]
    worlds = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert worlds == ["measured", "simulated"]
    dense = [e["pid"] for e in events if e["ph"] == "X" and e.get("cat") == "dense"]
    assert [dense.count(world) for world in (1, 2)] == [
        json.loads(out)["steps"] * 3
    ] * 2


def test_a_model_may_say_anything_and_the_screen_stays_whole(
    command, tmp_path, monkeypatch
):
    """Bytes that clear a screen are spelt out; line breaks and letters are what they
    are; JSON has all of it.
    """
    monkeypatch.setattr(LocalModel, "decode", lambda *_: "a\x1b[2J\0\r\x9bé\n\tb")
    (tmp_path / "p.txt").write_text("x")
    line = f"run --model tiny --prompts {tmp_path}/p.txt --store {tmp_path}/s"
    words = line.split()
    code, out, _ = command(*words, "--new-tokens", 1)
    assert code == 0
    assert out.startswith("--- 0\na\\x1b[2J\\x00\\r\\x9bé\n\tb\n")
    code, out, _ = command(*words, "--new-tokens", 1, "--temperature", 0.5, "--json")
    told = json.loads(out)
    assert told["texts"] == ["a\x1b[2J\0\r\x9bé\n\tb"]
    assert (told["config"]["temperature"], told["config"]["residual"]) == (0.5, None)


def test_a_store_that_is_there_is_read_and_judged(command, tmp_path):
    (tmp_path / "p.txt").write_text("x")
    run = ("run", "--model", "tiny", "--prompts", tmp_path / "p.txt", "--new-tokens", 1)
    assert command(*run, "--store", tmp_path / "s")[0] == 0
    other = command(*run, "--store", tmp_path / "s", "--dtype", "bfloat16")
    assert (
        "expected no store or that of tiny, found it in float32 instead of bfloat16;"
        " choose" in other[2]
    )
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    with (tmp_path / "copy" / "experts.bin").open("r+b") as data:
        data.seek(100_000)
        data.write(b"other")
    code, out, err = command(*run, "--store", tmp_path / "copy")
    assert (code, out, err.count("error: ")) == (2, "", 1)
    assert (
        "checksum does not match: the file was altered; remove the folder and build"
        " the store again" in err
    )


def test_a_profile_of_another_machine_is_refused(command, trace, monkeypatch):
    monkeypatch.setattr(machine, "this_machine", lambda: ("host", 1))
    code, _, err = command("run", trace)
    assert (code, err.count("\n")) == (2, 1)
    assert (
        "expected this machine (accelerator host, 1 cores), found"
        " accelerator host, 2 cores" in err
    )


def test_a_run_json_repeats_a_measured_run(command, trace, tmp_path, monkeypatch):
    """The same options, decisions and hits; and the simulator takes the file too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("--policy", "on-demand", "--slots-per-layer", 3, "--cache", "lfu")
    code, _, _ = command("run", trace, *words, "--out", tmp_path / "a")
    assert code == 0
    file = tmp_path / "a" / "run.json"
    first = json.loads(file.read_text())
    assert first["config"]["policies"]["cache"]["decay"] == 1.0
    code, out, _ = command("run", "--config", file, "--json")
    again = json.loads(out)
    assert code == 0
    assert again["config"] == first["config"]
    simulated = json.loads(command("replay", "--config", file, "--json")[1])
    for run in (again, simulated):
        assert (run["hits"], run["misses"]) == (first["hits"], first["misses"])


def test_what_only_a_replay_knows_is_refused_by_a_real_run(command, trace, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'trace = "{trace}"\ngpu_split = "experts"\n')
    code, _, err = command("run", "--config", file)
    assert (code, err.count("\n")) == (2, 1)
    assert "gpu_split: moesim run has no such option" in err


def test_a_device_that_is_not_there_is_one_line(command, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("x")
    monkeypatch.setattr("moesim.runtime.accelerators.accelerator_here", lambda: None)
    words = (tmp_path / "t.parquet", "--prompts", tmp_path / "p.txt")
    code, out, err = command("record", *words, "--device", "cuda")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "torch finds no 'cuda'" in err
    assert not (tmp_path / "t.parquet").exists()
