"""Predictions held against measured rows: none sees its own row, any folder with the
columns is read, and what cannot be predicted is set aside with a reason.
"""

import csv
import json

import pytest
from browser import browser, check_page
from command_line import refused, runner

from moesim.advice.errors import AdviceError
from moesim.advice.machine.machine import describe_machine
from moesim.advice.measured.bound_shares import decode_shares
from moesim.advice.measured.decode_cases import blind, two_rows_same_model
from moesim.advice.measured.folder import read_folder
from moesim.advice.measured.priors import StrictPriors
from moesim.advice.measured.rows import runs_of
from moesim.advice.measured.scores import Prediction, quantile, score_of
from moesim.advice.model.catalogue import named_contents
from moesim.advice.times.latents import Beliefs
from moesim.advice.times.predictor import decode_target
from moesim.advice.times.priors import priors_of
from moesim.advice.times.setting import Setting

MODELS = ("gpt-oss-20b", "gpt-oss-120b")
MACHINES = {
    "one": {"cpu": "Ryzen 9 9950X", "gpu": "RTX 5090", "factor": 0.8},
    "two": {"cpu": "Ryzen 7 5700X", "gpu": "RTX 3090", "factor": 1.1},
}
COUNTS = (0, 8, 16, 24)


def write(folder, name, rows):
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def true_speed(machine, model, count):
    """What a machine would show that is slower than its priors by one factor."""
    words = {name: machine[name] for name in ("cpu", "gpu")}
    described = describe_machine(**words)
    contents = named_contents(model, "MXFP4").renamed(f"{model} MXFP4")
    target = decode_target(described, contents, Setting(cpu_layers=count), 32.0)
    seconds = target.predicted(Beliefs(priors_of(described))).value
    return machine["factor"] / seconds


def make(folder, changes=()):
    """Write two machines with two models each; `changes` replace single speeds."""
    decode = []
    platforms = []
    for name, machine in MACHINES.items():
        for kind, mode, value in (("cpu_read", "8", 50), ("gpu_device_read", "", 700)):
            platforms.append(
                {
                    "platform": name,
                    "job": "1",
                    "gpu": machine["gpu"],
                    "cpu": machine["cpu"],
                    "kind": kind,
                    "threads_or_mode": mode,
                    "value_gbs": value,
                    "source": "test",
                }
            )
        for model in MODELS:
            for count in COUNTS:
                speed = true_speed(machine, model, count)
                speed = dict(changes).get((name, model, count), speed)
                decode.append(
                    {
                        "platform": name,
                        "model": model,
                        "quant": "MXFP4",
                        "threads": "",
                        "n_cpu_moe": count,
                        "moe_layers_on_cpu": count,
                        "tok_s": f"{speed:.4f}",
                        "sd": "",
                        "repeats": "",
                        "noise_note": "",
                        "source": "test",
                    }
                )
    folder.mkdir(exist_ok=True)
    write(folder, "decode.csv", decode)
    write(folder, "platforms.csv", platforms)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("measured"))
    found, skipped = runs_of(read_folder(folder))
    assert skipped == []
    return found


def predicted(predictions):
    return {
        (each.machine, each.model, each.flags, each.given): each.predicted
        for each in predictions
    }


def test_every_row_becomes_a_run(runs):
    assert len(runs) == len(MACHINES) * len(MODELS) * len(COUNTS)
    assert {run.machine_name for run in runs} == set(MACHINES)


def test_no_blind_prediction_sees_a_row_of_its_machine(runs, tmp_path):
    """All rows of one machine are made three times as fast: its own predictions stay."""
    changes = {
        ("one", model, count): 3 * true_speed(MACHINES["one"], model, count)
        for model in MODELS
        for count in COUNTS
    }
    other, _ = runs_of(read_folder(make(tmp_path / "m", changes)))
    before = predicted(blind(runs, StrictPriors(runs, probed=False)))
    after = predicted(blind(other, StrictPriors(other, probed=False)))
    own = [key for key in before if key[0] == "one"]
    assert own
    assert all(after[key] == pytest.approx(before[key]) for key in own)


def test_two_rows_predict_the_others_of_a_machine_that_is_slower_throughout(runs):
    score = score_of(two_rows_same_model(runs, StrictPriors(runs, probed=False)))
    assert score.median < 0.02
    # Two neighbours say little about the far end, so single ones may be further off.
    assert score.p90 < 0.05


def test_two_rows_never_predict_themselves(runs):
    for each in two_rows_same_model(runs, StrictPriors(runs, probed=False)):
        assert each.flags not in each.given.split(" and ")


def test_no_row_beats_its_bound(runs):
    shares = [bound.share for bound in decode_shares(runs)]
    assert len(shares) == len(runs)
    assert 0 < max(shares) < 1


def test_scores_by_hand():
    def one(measured, predicted, low, high):
        numbers = {"low": low, "high": high, "group": "g"}
        return Prediction(
            "m", "x", "w", "g", f"f:{measured}", measured, predicted, **numbers
        )

    score = score_of([one(10, 11, 9, 12), one(20, 10, 9, 11), one(40, 40, 39, 41)])
    assert score.median == pytest.approx(0.1)
    assert score.worst == pytest.approx(0.5)
    assert score.coverage == pytest.approx(2 / 3)
    assert score.within_40 == pytest.approx(2 / 3)
    assert quantile([0.0, 1.0, 2.0], 0.9) == pytest.approx(1.8)


def test_rows_that_say_too_little_are_set_aside_by_place(tmp_path):
    folder = make(tmp_path / "m")
    text = (folder / "decode.csv").read_text().splitlines()
    text[1] = text[1].replace("gpt-oss-20b", "nothing-9b")
    text[2] = text[2].replace(",8,8,", ",many,8,")
    (folder / "decode.csv").write_text("\n".join(text) + "\n")
    found, skipped = runs_of(read_folder(folder))
    assert len(found) == 14
    assert [skip.place for skip in skipped] == ["decode.csv:2", "decode.csv:3"]
    assert "n_cpu_moe: expected a number" in skipped[1].reason


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (None, "", "expected a folder with"),
        ("notes.txt", "hello", "found none of"),
        ("decode.csv", "platform,model\na,b\n", "decode.csv"),
    ],
)
def test_a_folder_of_something_else_is_one_line(tmp_path, name, text, expected):
    folder = tmp_path / "m"
    if name is not None:
        folder.mkdir()
        (folder / name).write_text(text)
    with pytest.raises(AdviceError) as caught:
        read_folder(folder)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return runner(capsys, monkeypatch, tmp_path)


def test_the_command_prints_the_table_and_writes_the_page(command, tmp_path):
    folder = make(tmp_path / "m")
    out = tmp_path / "report"
    code, text, _ = command("validate", "--machines", folder, "--out", out)
    assert code == 0
    for words in ("decode, from spec alone", "regret", "coverage", "physical bound: 0"):
        assert words in text
    page = (out / "machines.md").read_text()
    assert "| one | gpt-oss-20b MXFP4 | 4 |" in page
    printed = json.loads((out / "machines.json").read_text())
    assert printed["rows"] == 16
    assert (out / "predictions.csv").read_text().count("\n") > 100
    assert "<svg" in (out / "machines.html").read_text()
    with browser(tmp_path / "browser") as driver:
        check_page(driver, out / "machines.html")


def test_without_traces_and_machines_validate_says_what_it_wants(command, tmp_path):
    assert command("validate")[0] == 2
    result = command("validate", "--machines", tmp_path / "nothing")
    assert refused(result, "expected a folder with")
