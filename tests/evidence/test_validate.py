"""A validation tells the truth about what it compares: by hand, and on real runs of
experts small enough for a test.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import browser, check_page
from support.real_machine import host_profile
from support.small_trace import write_small_trace
from support.validations import cell, result
from typer.testing import CliRunner

from moesim import cli
from moesim.evidence.validation.grid import decisions, timing_free, validate
from moesim.evidence.validation.paired_runs import Trial, simulate
from moesim.evidence.validation.profile_checks import machine_differences, warnings_of
from moesim.evidence.validation.report import save, validation_answer
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.hwprofiles.schema import FIT_KEYS
from moesim.policies.base import PolicyError
from moesim.policies.systems import compose as compose_system
from moesim.questions.sensitivity import sensitivity
from moesim.runs.config import MemoryOptions
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace

TRACE = Path(__file__).parents[2] / "traces" / "data" / "tiny_evaluation.parquet"
KEYS = {
    "cells", "tpot_error_median", "tpot_error_max", "ttft_error_median", "hits_equal",
    "kendall_tau", "noise_floor",
}  # fmt: skip


def test_the_summary_by_hand():
    """Measured 1.0 (0.98 and 1.02), 2.0 and 3.0; predicted 1.1, 2.0 and 2.4: errors 10
    %, 0 and -20 %.
    """
    report = result(
        cell("a", [0.98, 1.02], 1.1),
        cell("b", [2.0, 2.0], 2.0),
        cell("c", [3.0, 3.0], 2.4),
    )
    assert report.keys() >= KEYS
    assert report["tpot_error_median"] == pytest.approx(0.1)
    assert report["tpot_error_signed_median"] == pytest.approx(0.0, abs=1e-12)
    assert report["tpot_error_max"] == pytest.approx(0.2)
    assert report["kendall_tau"] == 1.0
    assert report["noise_floor"] == 0.0
    assert report["cells"][0]["noise_floor"] > 0.0
    assert report["hits_equal"] is True


def test_only_cells_that_timing_cannot_change_must_have_equal_hits():
    timed = cell("a", [1.0, 1.0], 1.0, free=False, hits=4)
    assert result(timed, cell("b", [2.0, 2.0], 2.0))["hits_equal"] is True
    assert result(timed, cell("b", [2.0, 2.0], 2.0, hits=4))["hits_equal"] is False
    assert result(timed)["hits_equal"] is None


def test_what_was_held_out_is_told_apart():
    report = result(
        cell("a", [1.0, 1.0], 1.2, extrapolated=True), cell("b", [1.0, 1.0], 1.01)
    )
    assert (report["held_out"]["count"], report["calibrated"]["count"]) == (1, 1)
    assert report["held_out"]["tpot_error_median"] == pytest.approx(0.2)
    assert report["calibrated"]["tpot_error_median"] == pytest.approx(0.01)


def test_errors_are_told_apart_by_every_coordinate():
    report = result(
        cell("a", [1.0, 1.0], 1.2, ratio=0.1),
        cell("a", [1.0, 1.0], 1.01),
        cell("b", [1.0, 1.0], 0.97),
    )
    assert report["by"]["policy"]["a"]["tpot_error_median"] == pytest.approx(0.105)
    assert report["by"]["policy"]["b"]["tpot_error_signed_median"] == pytest.approx(
        -0.03
    )
    assert report["by"]["cache_ratio"]["0.1"]["count"] == 1
    assert "| policy b | 1 | 3.0 % |" in validation_answer(report).markdown()
    assert (
        "| batch" not in validation_answer(report).markdown().split("coordinate")[1]
    ), "all cells have one batch size"


def test_a_machine_that_changed_while_it_was_calibrated_is_named():
    """The last runs of the calibration took 22 % longer than the first: so may every
    prediction.
    """
    steady = host_profile()
    fit = {"noise_floor": dict.fromkeys(FIT_KEYS, 0.05)}
    moved = replace(steady, fit=fit | {"drift": dict.fromkeys(FIT_KEYS, 0.22)})
    said = warnings_of(moved, 0.0)
    assert any("changed its speed by 22 %" in warning for warning in said)
    kept = replace(steady, fit=fit | {"drift": dict.fromkeys(FIT_KEYS, 0.02)})
    assert not any("speed" in warning for warning in warnings_of(kept, 0.0))


@pytest.mark.parametrize(("policy", "free"), [
    ("greedy+lru", True),
    ("greedy+lru+random", False),
    ("greedy+workload-window", False),
    ("all-cpu+none", True),
])  # fmt: skip
def test_timing_is_free_where_nothing_lands_between_layers(policy, free):
    assert timing_free(compose_system(policy).build(gpus=1, host_cache=None)) is free


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Real runs: three policies, two cache ratios, a batch, the SSD; experts of the
    tiny model.
    """
    return validate(
        [TRACE],
        policies=["all-cpu+none", "on-demand+lru", "greedy+lfu"],
        cache_ratios=[0.2, 0.5],
        batches=[2],
        host_ratios=[1.0, 0.5],
        hw=host_profile(),
        steps=5,
        repetitions=3,
        replications=1,
        stores=tmp_path_factory.mktemp("stores"),
    ).to_json()


def test_hits_of_real_and_simulated_runs_are_equal(grid):
    assert grid["hits_equal"] is True
    assert grid["hits_compared"] == len(grid["cells"]) == 12
    assert any(cell["predicted"]["hits"] for cell in grid["cells"])
    for row in grid["cells"]:
        assert row["decisions_equal"]
        assert [len(run["steps_s"]) for run in row["measured"]] == [4, 4, 4]
        assert row["tpot_error"] is not None
        assert row["ttft_error"] is not None


def test_another_cache_makes_other_copies_and_another_lane_other_products():
    trace = open_trace(TRACE)
    steps = list(compose(trace, steps=6))
    lru, static, cpu = (
        decisions(
            simulate(
                Trial(policy, MemoryOptions(cache_ratio=0.3), steps),
                trace.shape,
                load_profile("two-core-host"),
            )
        )
        for policy in ("on-demand+lru", "on-demand+static", "all-cpu+none")
    )
    assert lru[1] != static[1]
    assert lru[0] != cpu[0]


def test_a_foreign_profile_is_recognised(grid):
    assert any("not calibrated" in warning for warning in grid["warnings"])
    assert any("another machine's" in warning for warning in grid["warnings"])
    assert any(
        difference.startswith("cores")
        for difference in machine_differences(load_profile("a6000-i9-10980xe"))
    )


def test_the_report_is_whole(grid, tmp_path):
    assert json.loads(json.dumps(grid)) == grid
    text = validation_answer(grid).markdown()
    assert text.count("| greedy+lfu |") == 4
    assert "greedy+lfu" in validation_answer(grid).text()
    assert validation_answer(grid).html().count("<figure>") == 1
    written = [path.suffix for path in save(grid, tmp_path)]
    assert written == [".json", ".md", ".html"]


def test_axe_finds_nothing_on_the_page(grid, tmp_path, screenshots):
    save(grid, tmp_path)
    with browser(tmp_path / "browser") as driver:
        check_page(driver, tmp_path / "validation.html", screenshots)


def test_an_oracle_is_refused():
    axes = {"policies": ["on-demand+belady"], "cache_ratios": [0.2], "batches": [1]}
    with pytest.raises(PolicyError, match="oracle"):
        validate([TRACE], **axes, hw=host_profile(), steps=3)


# -- sensitivity -----------------------------------------------------------------------


def test_a_constant_that_decides_the_winner_is_named():
    """All-CPU wins by a hair; a slower CPU within its interval lets on-demand win, and
    nothing else is blamed first.
    """
    profile = host_profile()
    report = sensitivity(
        TRACE, policies=("all-cpu+none", "on-demand+lru"), hw=profile, steps=6
    ).to_json()
    assert report["winner"] == min(report["baseline_s"], key=report["baseline_s"].get)
    effects = [constant["effect"] for constant in report["constants"]]
    assert effects == sorted(effects, reverse=True)
    named = {constant["path"]: constant for constant in report["constants"]}
    assert "costs.cpu.bytes_per_s" in named
    assert all(
        constant["changes_winner"]
        == any(w != report["winner"] for w in constant["winners"])
        for constant in named.values()
    )
    assert all(path.startswith(("costs.", "contention.")) for path in named)


# -- commands --------------------------------------------------------------------------


def test_validate_prints_json_and_writes_the_report(tmp_path):
    """Also of a trace with fewer experts than a store has records."""
    write_small_trace(tmp_path / "small.parquet")
    save_profile(host_profile(), tmp_path / "here.toml")
    words = (
        f"validate {tmp_path}/small.parquet --policy all-cpu+none,on-demand+lru"
        " --cache-ratio 0.3 --batch 1 --steps 3 --repetitions 1 --json"
        f" --hw {tmp_path}/here.toml --out {tmp_path}/out"
    )
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout).keys() >= KEYS
    assert (tmp_path / "out" / "validation.html").is_file()


def test_sensitivity_prints_the_winner():
    """Of a stated memory, and says that a few steps were replayed."""
    words = f"sensitivity {TRACE} --hw two-core-host --steps 3 --cache-ratio 0.25"
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    for part in ("25.0 %", "the first 3 forward passes", "the fastest"):
        assert part in done.stdout
