"""A protocol is stated before it is measured, and judged by what it states."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.real_machine import host_profile

from benchmarks import protocol
from moesim.evidence.validation.verify import Plan, interval, judge
from moesim.hwprofiles.profile import save_profile
from moesim.hwprofiles.schema import ProfileError

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "protocol.md"


def cell(policy, measured_s, predicted_s, *, batch=1, lost=0.0):
    place = {"trace": "t", "shape": "s", "policy": policy, "batch": batch}
    ratios = {"cache_ratio": 0.4, "host_ratio": 1.0}
    measured = [{"tpot_s": each, "lost": lost} for each in measured_s]
    found = {"measured": measured, "predicted": {"tpot_s": predicted_s}}
    return place | ratios | found


def sitting(*cells, refusal=""):
    made = {"began": "2026-01-01 00:00 UTC", "seconds": 9, "load": 0.1}
    return made | {"refused": refusal, "validation": {"cells": list(cells)}}


def judged(*cells):
    return judge(ONE, [{"cells": list(cells)}])


STEADY = [1.0] * 5
ONE = Plan(sittings=1)


# By hand.


def test_the_page_states_what_the_command_does():
    text = PAGE.read_text(encoding="utf-8")
    runs = f"each run for {protocol.PLAN.steps} forward passes, {protocol.PLAN.repetitions} times"
    for words in (
        f"{protocol.PLAN.sittings} sittings",
        f"{protocol.PLAN.cells} cells, {runs}",
        f"≤ {100 * protocol.PLAN.median:.0f} %",
        f"≤ {100 * protocol.PLAN.worst:.0f} %",
        f"wider than {100 * protocol.PLAN.widest:.0f} %",
        f"more than {100 * protocol.PLAN.most_lost:.0f} %",
        f"`{protocol.PLAN.trace}`",
        *(f"`{policy}`" for policy in protocol.PLAN.policies),
        *(f"`{shape}`" for shape in (*protocol.PLAN.shapes, *protocol.PLAN.calibrated)),
        "batches of " + " and ".join(map(str, protocol.PLAN.batches)),
        *(f"cache ratio {ratio:g}" for ratio in protocol.PLAN.cache_ratios),
    ):
        assert words in text, words


def test_an_error_counts_beyond_the_interval_of_the_measurement():
    """Repetitions of 1.00 ± 0.02: 1.01 is no error, 1.20 is one of less than 20 %."""
    scattered = [0.98, 0.99, 1.0, 1.01, 1.02]
    _, low, high = interval(scattered)
    assert low < 0.99
    assert high > 1.01
    verdict = judged(cell("a", scattered, 1.01))
    assert verdict.cells["error"].tolist() == pytest.approx([0.01])
    assert verdict.counted.max() == 0.0
    verdict = judged(cell("a", scattered, 1.2))
    assert verdict.counted.max() == pytest.approx(1.2 - high)
    assert verdict.met["worst"] is False
    assert interval([2.0]) == (2.0, 2.0, 2.0)


def test_cells_that_others_disturbed_or_that_scatter_do_not_count():
    cells = (
        cell("a", STEADY, 1.02),
        cell("b", STEADY, 9.0, lost=0.2),
        cell("c", [1.0, 2.0, 3.0, 4.0, 5.0], 9.0),
    )
    verdict = judged(*cells)
    counts, disturbed, scattered = verdict.cells["excluded"]
    assert (counts, disturbed) == ("", "other programs took 20 %")
    assert scattered.startswith("repetitions differ")
    assert verdict.counted.tolist() == pytest.approx([0.02])
    assert verdict.met["median"]


def test_only_pairs_that_repetitions_order_count():
    """a and c are measured before b in each; c before and behind a."""
    unsure = [0.5, 1.5, 0.5, 1.5, 0.5]
    cells = [
        cell("a", STEADY, 1.0),
        cell("b", [4.0] * 5, 4.0),
        cell("c", unsure, 1.5),
        cell("d", [0.1] * 5, 0.1, batch=4),
    ]
    order = judged(*cells)
    assert (order.pairs, order.agreed, order.tau) == (2, 2, 1.0)
    cells[1]["predicted"]["tpot_s"] = 0.5
    wrong = judged(*cells)
    assert wrong.tau < 1.0
    assert wrong.met["order"] is False


def test_a_refused_calibration_is_a_result_and_nothing_is_met_by_nothing():
    verdict = judged()
    unknown = dict.fromkeys(("median", "worst", "order"))
    assert protocol.aims_met(ONE, verdict) == unknown | {"sittings": False}
    page = protocol.protocol_page(
        ONE, [sitting(refusal="others were busy")], verdict, "moesim x"
    )
    assert "refused: others were busy" in page
    assert "nothing counts" in page


# The command.


@pytest.fixture
def small(monkeypatch):
    """A protocol of seconds, with a calibration that is made up."""
    axes = {"policies": ("all-cpu+none", "greedy+lru"), "batches": (1,)}
    axes |= {"shapes": ("olmoe-1b-7b/32",)}
    plan = replace(protocol.PLAN, sittings=2, steps=3, repetitions=2, **axes)
    monkeypatch.setattr(protocol, "PLAN", plan)

    def calibrate(out, **options):
        assert options["shapes"] == plan.calibrated
        options["progress"]("made up", 0.5)
        profile = host_profile()
        save_profile(profile, out)
        return profile

    monkeypatch.setattr(protocol, "calibrate", calibrate)
    return plan


def test_sittings_may_lie_apart_and_are_judged_together(tmp_path, small, capsys):
    folder = tmp_path / "p"
    assert protocol.main([str(folder), "--sittings", "1"]) == 1
    assert "calibrations that were trusted" in capsys.readouterr().out
    assert protocol.main([str(folder)]) in (0, 1)
    written = (folder / "protocol.json").read_text()
    result = json.loads(written)
    assert result["met"]["sittings"]
    assert [each["sitting"] for each in result["cells"]] == [1, 1, 2, 2]
    assert all(each["lost"] >= 0.0 for each in result["cells"])
    page = (folder / "protocol.md").read_text()
    assert "python -m benchmarks.protocol" in page
    assert page.count("olmoe-1b-7b/32, greedy+lru") == 2

    # Judged once more, nothing is measured.
    protocol.main([str(folder), "--sittings", "0"])
    assert (folder / "protocol.json").read_text() == written


def test_a_refusal_ends_a_sitting_and_not_the_protocol(tmp_path, small, monkeypatch):
    def refuse(out, **_):
        raise ProfileError(
            f"{out}: not written, as its predictions cannot be trusted: x"
        )

    monkeypatch.setattr(protocol, "calibrate", refuse)
    assert protocol.main([str(tmp_path)]) == 1
    assert "nothing counts" in (tmp_path / "protocol.md").read_text()
    files = sorted(tmp_path.glob("sitting-*.json"))
    assert [json.loads(file.read_text())["refused"] for file in files] == ["x", "x"]
