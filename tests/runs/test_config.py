"""One description of a run: options, arguments, files and ``run.json`` say the same."""

import dataclasses
import inspect
import json
import re

import numpy as np
import pytest
from support.command_line import refused
from support.small_trace import SHAPE, write_small_trace

import moesim
from moesim.base.options import ConfigError
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.runs.config import RunConfig, in_order
from moesim.runs.config_file import toml_template

ROOM = SHAPE.other_bytes + 12 * SHAPE.max_expert_bytes
HOST_ROOM = 14 * SHAPE.max_expert_bytes
TABLES = ("timeline.parquet", "accesses.parquet", "steps.parquet")


@pytest.fixture
def command(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return command


def tables(folder):
    return [(folder / name).read_bytes() for name in TABLES]


def recorded(folder):
    return json.loads((folder / "run.json").read_text())["config"]


# A run that is repeated.


@pytest.mark.parametrize("options", [
    ("--policy", "greedy", "--cache", "lfu:decay=0.9", "--slots-per-layer", 3),
    ("--policy", "hybrimoe-released", "--batch", 2, "--hw", "rtx4060ti"),
    ("--policy", "on-demand+static:fill=random", "--seed", 5, "--steps", 9),
    ("--policy", "dali", "--prefetch", "none", "--staging", 3),
    ("--hw", "two-core-host", "--gpu-memory", ROOM, "--host-memory", HOST_ROOM),
], ids=lambda options: " ".join(map(str, options[:2])))  # fmt: skip
def test_a_run_json_repeats_its_run_to_the_byte(
    command, trace, tmp_path, monkeypatch, options
):
    """From another folder, where another profile would be the default."""
    first = tmp_path / "first"
    assert command("replay", trace, *options, "--out", first)[0] == 0

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_profile(load_profile("rtx3080ti"), elsewhere / "hw.toml")
    monkeypatch.chdir(elsewhere)
    command("replay", "--config", first / "run.json", "--out", tmp_path / "second")
    assert tables(tmp_path / "second") == tables(first)
    assert recorded(tmp_path / "second") == recorded(first)


def test_caches_filled_from_a_trace_are_repeated_too(command, trace, tmp_path):
    warm = write_small_trace(tmp_path / "warm.parquet", seed=8)
    words = ("replay", trace, "--cache", "static", "--warm", warm)
    assert command(*words, "--out", "a")[0] == 0
    assert command("replay", "--config", "a/run.json", "--out", "b")[0] == 0
    assert tables(tmp_path / "b") == tables(tmp_path / "a")
    assert recorded(tmp_path / "b")["options"]["warm"] == str(warm)


def test_the_command_line_overrides_the_file(command, trace, tmp_path):
    """What was given goes; what belongs to it goes too, and nothing else."""
    words = ("--cache-ratio", 0.5, "--batch", 2, "--steps", 4)
    command("replay", trace, *words, "--out", "a")
    code, out, _ = command(
        "replay",
        "--config",
        "a/run.json",
        "--slots-per-layer",
        3,
        "--batch",
        1,
        "--json",
    )
    options = json.loads(out)["config"]["options"]
    assert code == 0
    assert (options["cache_ratio"], options["slots_per_layer"]) == (None, 3)
    assert (options["batch"], options["steps"]) == (1, 4)


def test_a_changed_trace_or_profile_is_refused_unless_it_is_named(
    command, trace, tmp_path
):
    save_profile(load_profile("rtx4060ti"), tmp_path / "mine.toml")
    command("replay", trace, "--hw", "mine.toml", "--out", "a")
    write_small_trace(trace, seed=9)
    again = ("replay", "--config", "a/run.json")
    assert refused(command(*again), str(trace), "expected a file with SHA-256")
    assert command(*again, trace)[0] == 0
    write_small_trace(trace)
    save_profile(load_profile("rtx3080ti"), tmp_path / "mine.toml")
    assert refused(command(*again), "mine.toml", "expected digest", "--hw")
    assert command(*again, "--hw", "mine.toml")[0] == 0


def test_a_run_json_holds_the_whole_effective_configuration(trace, tmp_path):
    """Parameters that nobody named, digests, seed, version; and the keys of old."""
    moesim.replay(trace, "greedy", cache="lfu:decay=0.9", out=tmp_path / "a")
    found = recorded(tmp_path / "a")
    lfu = {"name": "lfu", "variant": "in-cache", "decay": 0.9, "tie": "id"}
    assert found["policies"]["cache"] | lfu == found["policies"]["cache"]
    assert found["version"] == moesim.__version__
    assert found["options"]["trace_digest"] == found["trace_digest"]
    assert found["options"]["hw_digest"] == found["hw_digest"]
    assert set(found["options"]) == {
        field.name for field in dataclasses.fields(RunConfig)
    }
    for key in ("trace", "hw", "assignment", "cache_slots", "seed", "git_commit"):
        assert key in found


# Files by hand.


def write(folder, text, name="exp.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


GOOD = """
trace = "small.parquet"
policy = "greedy"
cache = "lfu:decay=0.9"
prefetch = "random"
gpu_memory_bytes = "8GiB"
batch = 2
"""


def test_a_toml_file_is_a_run(command, trace, tmp_path):
    write(tmp_path, GOOD)
    code, out, _ = command("replay", "--config", "exp.toml", "--json")
    words = ("--gpu-memory", "8GiB", "--batch", 2, "--cache", "lfu:decay=0.9")
    by_hand = command("replay", trace, *words, "--prefetch", "random", "--json")[1]
    assert code == 0
    first, second = (json.loads(text) for text in (out, by_hand))
    for run in (first, second):
        del (
            run["wall_s"],
            run["answer"],
            run["config"]["git_commit"],
            run["config"]["trace"],
        )
    assert first == second


@pytest.mark.parametrize(("before", "after", "parts"), [
    ("batch = 2", "bach = 2", ("bach: unknown key", "did you mean 'batch'")),
    ("batch = 2", "batch = 0", ("batch: expected a whole number >= 1, got 0",)),
    ("batch = 2", 'batch = "x"', ("batch: expected a whole number",)),
    ("batch = 2", "batch = true", ("batch: expected a whole number",)),
    ("batch = 2", "cache_ratio = nan", ("cache_ratio: expected a number between",)),
    ("batch = 2", "batch = ", ("not TOML",)),
    ("batch = 2", 'shape = "x"', ("shape: moesim replay has no such option",)),
    ("8GiB", "8Q", ("gpu_memory_bytes: unknown unit 'Q'",)),
    ('"greedy"', '"greedi"', ("greedi", "did you mean 'greedy'")),
    ("lfu", "lfuu", ("did you mean 'lfu'",)),
    ("decay", "deacy", ("cache policy 'lfu'", "'deacy'; known: variant")),
    ("0.9", "1.5", ("cache policy 'lfu'", "expected 0 < decay <= 1, got 1.5")),
])  # fmt: skip
def test_what_is_wrong_in_a_file_is_named_with_it(
    command, trace, tmp_path, before, after, parts
):
    assert before in GOOD
    write(tmp_path, GOOD.replace(before, after, 1))
    assert refused(command("replay", "--config", "exp.toml"), "exp.toml: ", *parts)


@pytest.mark.parametrize(("name", "text", "part"), [
    ("none.toml", None, "cannot be read: No such file"),
    ("a.json", "{", "not JSON"),
    ("a.json", "[]", "expected keys and values"),
    ("a.json", '{"config": {"cache": "lru"}}', "config.options: expected"),
])  # fmt: skip
def test_what_is_no_configuration_is_refused(command, tmp_path, name, text, part):
    if text is not None:
        write(tmp_path, text, name)
    assert refused(command("replay", "--config", name), f"{name}: ", part)


def test_without_a_trace_nothing_runs(command, tmp_path):
    write(tmp_path, "batch = 2\n")
    assert refused(command("replay", "--config", "exp.toml"), "TRACE", "--help")
    assert refused(command("gap"), "TRACE")
    with pytest.raises(ConfigError, match="expected a trace"):
        moesim.replay(RunConfig())


def test_the_template_is_the_defaults(command, tmp_path):
    """What `moesim config` prints is a file that changes nothing."""
    template = toml_template()
    assert command("config")[1] == template
    assert moesim.load_config(write(tmp_path, template)) == RunConfig()
    keys = re.findall(r"^# (\w+) = ", template, flags=re.MULTILINE)
    assert keys == in_order([field.name for field in dataclasses.fields(RunConfig)])


def test_other_commands_take_the_file_too(command, trace, tmp_path):
    write(tmp_path, GOOD.replace('policy = "greedy"', ""))
    words = ("--config", "exp.toml", "--steps", 3, "--json")
    gap = json.loads(command("gap", *words)[1])
    assert (gap["config"]["cache"], gap["config"]["batch"]) == ("lfu:decay=0.9", 2)
    both = ("compare", "--policy", "greedy,all-cpu", "--gpu-memory", "4GiB,6GiB")
    runs = json.loads(command(*both, *words)[1])["runs"]
    assert {run["gpu_memory_bytes"] for run in runs} == {"4.0 GiB", "6.0 GiB"}
    assert {run["config"]["cache"] for run in runs} == {"lfu:decay=0.9"}
    write(tmp_path, GOOD.replace('"greedy"', '["on-demand", "all-cpu"]'))
    runs = json.loads(command("compare", *words)[1])["runs"]
    assert {run["policy"] for run in runs} == {"on-demand", "all-cpu"}
    write(tmp_path, GOOD.replace("greedy", "on-demand"))
    assert refused(command("hits", trace, "--config", "exp.toml"), "--config")


# Arguments.


def test_an_argument_that_does_not_exist_is_named(trace):
    with pytest.raises(TypeError, match=r"unknown option 'cach'.*mean 'cache'"):
        moesim.replay(trace, cach="lru")


def test_numbers_of_numpy_are_numbers(trace, tmp_path):
    run = moesim.replay(
        trace, batch=np.int64(2), cache_ratio=np.float64(0.5), out=tmp_path / "a"
    )
    assert run.config["options"]["batch"] == 2
    assert recorded(tmp_path / "a")["options"]["cache_ratio"] == 0.5


@pytest.mark.parametrize(
    "function",
    [moesim.replay, moesim.sweep, moesim.gap, moesim.quality, moesim.replay_cache],
)
def test_help_shows_every_option_of_a_function(function):
    shown = inspect.signature(function).parameters
    assert shown["batch"].default == 1
    assert shown["host_memory_bytes"].default is None


# A new option.


# The page, whose examples run in test_docs.py.
