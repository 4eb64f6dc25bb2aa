"""A profile learns from real runs, whatever they were made for.

Where the truth must be known the machine is simulated: the shipped one with some parts
slower by known factors.
"""

import shutil
from dataclasses import replace

import pytest
from support.calibrating import sized
from support.command_line import refused
from support.real_machine import host_profile
from support.small_trace import write_trace

from moesim.evidence.validation import learning
from moesim.evidence.validation.learning import FinishedRun
from moesim.evidence.validation.paired_runs import drawn_steps
from moesim.hwprofiles import paths
from moesim.hwprofiles.profile import load_profile, prediction_error, save_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.policies.systems import compose
from moesim.runs.config import RunConfig
from moesim.runs.setup import Setup
from moesim.traces.format.schema import ModelShape
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.operations import OperationTable, Part
from moesim.traces.timeline.spans import COMPUTE

SLOWER = {"cpu": 1.3, "gpu": 0.8, "dense": 1.25, "h2d": 1.4}
"""The machine's true factors on what the shipped profile states."""
SMALL = ModelShape(
    "f", 2, 8, 2, hidden=32, expert_intermediate=16, expert_bytes=(6144,) * 2,
    other_bytes=1, dtype="f32",
)  # fmt: skip


@pytest.fixture(scope="module")
def shipped():
    return load_profile("two-core-host")


@pytest.fixture(scope="module")
def truth(shipped):
    """The shipped machine, with other curves and rates."""
    curves = dict(shipped.curves)
    numbers = dict(shipped.numbers)
    for part, factor in SLOWER.items():
        for path in (paths.points(part), paths.points(part, small=True)):
            if path in curves:
                seconds = tuple(factor * each for each in curves[path].seconds)
                curves[path] = replace(curves[path], seconds=seconds)
    for path in paths.planning("greedy"):
        numbers[path] = replace(
            numbers[path], value=2 * numbers[path].value, interval=None
        )
    return replace(shipped, curves=curves, numbers=numbers)


def run_on(
    machine, seen_by, spec="olmoe-1b-7b/2", *, batch=1, ratio=0.3, seed=5, decode=14
):
    """A run that took as long as `machine` says, of a user whose profile is
    `seen_by`.
    """
    policy = compose("greedy+lru")
    config = RunConfig.of(
        policy=policy.assignment, cache=policy.cache, cache_ratio=ratio
    )
    setup = Setup(config, sized(spec), seen_by, config.system)
    steps = drawn_steps(batch=batch, prompt=24, decode=decode, seed=seed)
    blank = FinishedRun("made", setup, steps, None)
    return blank._replace(timeline=learning.simulated(blank, machine))


def error(run, profile):
    predicted = summarise(learning.simulated(run, profile))["tpot_s"]
    return predicted / summarise(run.timeline)["tpot_s"] - 1.0


# A machine whose truth is known.


def test_a_run_of_one_cache_and_several_batches_predicts_others(truth, shipped):
    run = run_on(truth, shipped, batch=(1, 2, 4), decode=40)
    others = [
        run_on(truth, shipped, batch=batch, ratio=ratio, seed=9)
        for batch, ratio in ((1, 0.6), (2, 0.0))
    ]
    assert min(abs(error(run, shipped)) for run in others) > 0.08
    learned = learning.learn_runs([run], shipped, name="learned")
    assert not learned.doubts
    profile = learned.profile
    assert max(abs(error(run, profile)) for run in others) < 0.03
    assert profile.description.endswith("; learned from 1 real runs")
    assert profile.fit["predictions"]["samples"] == 1
    assert profile.fit["predictions"]["residual_worst"] == abs(learned.runs[0].after)
    assert prediction_error(profile) > abs(learned.runs[0].after), "and its drift"
    assert learned.to_json()["runs"][0]["name"] == "made"


def test_of_two_sizes_that_were_calibrated_the_one_less_like_that_of_the_runs_is_kept(
    truth, shipped
):
    learned = learning.learn_runs(
        [run_on(truth, shipped, "qwen3-30b-a3b/4")], shipped, name="learned"
    )
    kept = learned.profile.curves[paths.points("cpu", small=True)]
    assert kept.seconds == shipped.curves[paths.points("cpu")].seconds


# Refusals.


def test_a_disturbed_run_is_doubted(truth, shipped):
    run = run_on(truth, shipped)
    table = OperationTable()
    steps = run.timeline.step_frame()
    for step, lasted_s in enumerate(steps["end_s"] - steps["start_s"]):
        table.add(
            Part(1, COMPUTE, step, 0, 1, 0.0, 0.0, 1.0, 1.0, 0.5, lasted_s / 5, 0)
        )
    run.timeline.operations = table
    (doubt,) = learning.learn_runs([run], shipped, name="learned").doubts
    assert "other programs took 20 % of half of the steps" in doubt


def test_a_profile_that_predicts_the_runs_worse_is_doubted(truth, shipped, monkeypatch):
    run = run_on(truth, shipped)
    wrong = load_profile("a6000-i9-10980xe")
    monkeypatch.setattr(learning, "learn", lambda *_, **__: wrong)
    learned = learning.learn_runs([run], shipped, name="learned")
    assert any("worse than before" in doubt for doubt in learned.doubts)
    assert any("doubtful" in line for line in learned.lines())


def test_runs_of_another_machine_are_refused(truth, shipped):
    run = run_on(truth, shipped)
    other = replace(shipped, versions={**shipped.versions, "cpu": "another"})
    with pytest.raises(ProfileError, match=r"cpu: another\), found .*--hw"):
        learning.learn_runs([run], other, name="learned")


# The commands, on this machine.


def real_run(command, tmp_path, *more):
    trace = tmp_path / "t.parquet"
    if not trace.is_file():
        write_trace(trace, SMALL, ((4, 14), (4, 14)))
        save_profile(host_profile(), tmp_path / "machine.toml")
    words = ["run", trace, "--dtype", "float32", "--cache-ratio", 0.3, *more]
    if "--hw" not in more:
        words += ["--hw", tmp_path / "machine.toml"]
    return command(*words)


def test_a_profile_is_learned_from_real_runs(command, tmp_path):
    """Forced, since what else runs here is not known; the file that is there is what it
    starts from.
    """
    folder, place = tmp_path / "run", tmp_path / "learned.toml"
    assert real_run(command, tmp_path, "--out", folder)[0] == 0
    second = shutil.copytree(folder, tmp_path / "second")
    for runs in ([folder], [folder, second]):
        names = ",".join(map(str, runs))
        code, out, err = command("calibrate", place, "--from", names, "--force")
        assert code == 0, err
        assert out.count("% before, ") == len(runs)
        assert f"wrote {place}" in out
        learned = load_profile(place)
        assert learned.kind == "measured"
        assert learned.fit["predictions"]["samples"] == len(runs)
        assert learned.description.endswith(f"; learned from {len(runs)} real runs")
    assert "last operation to join" in learned.numbers[paths.JOIN.base_s].source


def test_what_cannot_be_trusted_is_refused_in_a_line(command, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert real_run(command, tmp_path, "--out", folder)[0] == 0
    monkeypatch.setattr(learning, "doubts_of", lambda _: ["others were busy"])
    place = tmp_path / "learned.toml"
    told = command("calibrate", place, "--from", folder)
    assert refused(told, "learned.toml: not written", "others were busy", "--force")
    assert not place.exists()


def test_words_that_do_not_go_together_are_refused(command, tmp_path):
    assert command("calibrate", "--from")[0] == 2
    assert command("calibrate", tmp_path)[0] == 2
    both = command("calibrate", "--from", tmp_path, "--quick")
    assert refused(both, "--quick: expected none beside --from")
    told = command("calibrate", tmp_path / "hw.toml", "--from", tmp_path)
    assert refused(told, "hw.toml: it would replace what is read")
