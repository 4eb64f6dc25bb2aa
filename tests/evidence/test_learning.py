"""A profile learns from real runs, whatever they were made for.

Where the truth must be known the machine is simulated: the shipped one with some parts
slower by known factors.
"""

from dataclasses import replace

import numpy as np
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


def run_on(machine, seen_by, spec="olmoe-1b-7b/2", *, batch=1, ratio=0.3, seed=5):
    """A run that took as long as `machine` says, of a user whose profile is
    `seen_by`.
    """
    policy = compose("greedy+lru")
    config = RunConfig.of(
        policy=policy.assignment, cache=policy.cache, cache_ratio=ratio
    )
    setup = Setup(config, sized(spec), seen_by, config.system)
    steps = drawn_steps(batch=batch, prompt=24, decode=14, seed=seed)
    blank = FinishedRun("made", setup, steps, None)
    return blank._replace(timeline=learning.simulated(blank, machine))


def error(run, profile):
    predicted = summarise(learning.simulated(run, profile))["tpot_s"]
    return predicted / summarise(run.timeline)["tpot_s"] - 1.0


# By hand.


def test_old_measurements_weigh_by_their_number_and_are_forgotten():
    assert learning.share_of_new(10, None) == 1.0
    assert learning.share_of_new(10, 10) == 0.5
    assert learning.share_of_new(10, 10_000) == 0.2


def test_a_factor_moves_its_part_alone_and_rates_the_other_way(shipped):
    """A link whose copies took twice as long, seen as often as calibrated: by √2."""
    samples = shipped.numbers[paths.link("h2d").bytes_per_s].samples
    factors = {"h2d": [learning.Factor(0.0, 2.0, samples)]}
    moved = learning.refined(shipped, factors, "2026-01-01")
    path = paths.link("h2d").bytes_per_s
    ratio = moved.numbers[path].value / shipped.numbers[path].value
    assert ratio == pytest.approx(2.0**-0.5)
    low, high = moved.numbers[path].interval
    assert low <= moved.numbers[path].value <= high
    changed = {
        path for path, each in moved.numbers.items() if shipped.numbers[path] != each
    }
    assert changed == set(paths.link("h2d"))
    assert {p for p in moved.curves if moved.curves[p] != shipped.curves[p]} == {
        paths.points("h2d")
    }


def test_a_curve_keeps_what_was_not_seen(shipped):
    """One token took twice as long; many tokens stay as they were calibrated."""
    curve = shipped.curves[paths.points("cpu")]
    factors = {"cpu": [learning.Factor(1.0, 2.0, 100 * curve.samples)]}
    moved = learning.refined(shipped, factors, "2026-01-01").curves[paths.points("cpu")]
    by = np.array(moved.seconds) / np.array(curve.seconds)
    assert by[0] == pytest.approx(2.0, rel=0.02)
    far = np.array(curve.at) >= 8
    assert far.sum() > 1
    assert by[far].tolist() == pytest.approx([1.0] * far.sum())
    assert moved.at == curve.at


# A machine whose truth is known.


def test_a_profile_moves_to_the_machine_it_is_used_on(truth, shipped):
    """Runs of one batch and cache are learned from; others are predicted."""
    other = [
        run_on(truth, shipped, batch=batch, ratio=ratio, seed=9)
        for batch, ratio in ((1, 0.6), (2, 0.0))
    ]
    before = [abs(error(run, shipped)) for run in other]
    assert min(before) > 0.08
    profile = shipped
    for seed in range(6):
        run = run_on(truth, profile, batch=1 + seed % 2, seed=seed)
        profile = learning.learn_runs([run], profile, name="learned").profile
    assert max(abs(error(run, profile)) for run in other) < 0.03
    assert profile.description.endswith("; learned from 6 real runs")


def test_a_size_that_was_not_calibrated_is_learned_by_those_that_were(truth, shipped):
    spec = "qwen3-30b-a3b/4"
    run = run_on(truth, shipped, spec)
    learned = learning.learn_runs([run], shipped, name="learned")
    assert not learned.doubts
    assert abs(error(run, learned.profile)) < 0.02 < abs(error(run, shipped))
    other = run_on(truth, shipped, spec, ratio=0.6, seed=8)
    assert abs(error(other, learned.profile)) < 0.04
    calibrated = run_on(truth, shipped)
    assert abs(error(calibrated, learned.profile)) < abs(error(calibrated, shipped))


def test_predictions_carry_the_worst_of_earlier_ones(truth, shipped):
    worst = {"samples": 9.0, "held_out": 9.0, "residual_median": 0.01}
    base = replace(
        shipped, fit=shipped.fit | {"predictions": worst | {"residual_worst": 0.2}}
    )
    learned = learning.learn_runs([run_on(truth, base)], base, name="learned")
    assert learned.profile.fit["predictions"]["residual_worst"] == 0.2
    assert prediction_error(learned.profile) >= 0.2
    assert learned.to_json()["runs"][0]["name"] == "made"


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
    wrong = {"dense": [learning.Factor(1.0, 9.0, 10_000)]}
    monkeypatch.setattr(learning, "factors_of", lambda *_: wrong)
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


def test_a_profile_is_learned_from_a_real_run_and_improved_as_others_are_made(
    command, tmp_path, monkeypatch
):
    """Forced, and of all its steps, since what else runs here is not known."""
    monkeypatch.setattr(learning, "MOST_LOST", float("inf"))
    folder = tmp_path / "run"
    assert real_run(command, tmp_path, "--out", folder)[0] == 0
    place = tmp_path / "learned.toml"
    code, out, err = command("calibrate", place, "--from", folder, "--force")
    assert code == 0, err
    assert "learned from 1 real runs" in out
    assert "run  predicted" in out
    first = load_profile(place)
    assert first.kind == "measured"
    assert first.fit["predictions"]["samples"] == 1

    second = tmp_path / "second"
    assert real_run(command, tmp_path, "--hw", place, "--out", second)[0] == 0
    code, out, err = command("calibrate", place, "--from", second, "--force")
    assert code == 0, err
    assert f"wrote {place}" in out
    second = load_profile(place)
    assert second.fit["predictions"]["samples"] == 2
    assert second.description.endswith("learned from 2 real runs")
    joins = [each.numbers[paths.JOIN.base_s].samples for each in (first, second)]
    assert joins[1] > joins[0]


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
