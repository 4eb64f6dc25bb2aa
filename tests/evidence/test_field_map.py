"""The map of the field: every cell's figures are those of its runs, nothing is run twice,
no causal policy beats the ceiling.
"""

import json
import re
import shlex

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from benchmarks.field_map import (
    CELL,
    FIELD,
    FieldTrace,
    field_map,
    field_traces,
    map_answer,
    write_map,
)
from moesim import cli
from moesim.evidence.reproduction.workloads import Workload
from moesim.policies.systems import compose

SMALL = FieldTrace(
    Workload(*("olmoe-1b-7b", "q4_k_m", 4, 12, 8), like="olmoe-1b-7b", recall=0.75),
    (1, 4),
)
FEW = (
    "llama.cpp",
    "recall",
    "fetch-split+static",
    *(
        f"{assignment}+decayed-frequency{prefetch}"
        for assignment in ("fetch-split", "hybrimoe-schedule")
        for prefetch in ("", "+next-gate", "+statistical")
    ),
    "clairvoyant",
)


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    out = tmp_path_factory.mktemp("map")
    given = {"traces": [SMALL], "policies": FEW, "machines": ["rtx4060ti"]}
    found = field_map(out, ratios=[0.1, 0.5], jobs=1, **given)
    again = field_map(out, ratios=[0.1, 0.5], jobs=1, **given)
    return out, found, again


def test_the_field_has_25_causal_policies_and_one_that_knows_the_future():
    causal = [policy for policy in FIELD["policies"] if policy != "clairvoyant"]
    assert len(causal) >= 25
    for policy in FIELD["policies"]:
        policies = compose(policy).build(gpus=1, host_cache=None)
        sees_future = any(part.oracle for part in policies.all())
        assert sees_future is (policy == "clairvoyant")
        assert not policies.routing.alters


def test_drawn_traces_make_a_map_where_nobody_has_others():
    assert [each.batches for each in field_traces()] == [(1, 4, 16)] * 3


def test_cells_say_what_their_runs_took(mapped):
    _, found, _ = mapped
    assert len(found.runs) == 4 * len(FEW)
    for cell in found.cells.to_dict("records"):
        runs = found.runs
        for name in CELL:
            runs = runs[runs[name] == cell[name]]
        causal = runs[~runs["oracle"]]
        assert cell["best_s"] == causal["makespan_s"].min()
        assert cell["bound_s"] <= cell["ceiling_s"] <= cell["best_s"]
        assert 1 <= cell["tied"] <= len(causal)


def test_a_fixed_choice_is_compared_with_the_best_in_hindsight(mapped):
    behind = mapped[1].behind
    causal = behind.drop(columns="clairvoyant")
    assert (causal.min(axis=1) == 0.0).all()
    assert (behind["clairvoyant"] <= 0.0).all()


def test_drafts_and_warm_starts_are_compared_with_the_same_runs_without(mapped):
    _, found, _ = mapped
    table = next(t for t in map_answer(found).tables if "warm start" in t.title)
    gains = {row[0]: row[1:] for row in table.rows}
    mean = gains["fetch-split+static, warm over fetch-split+static"][0]
    static = found.runs[found.runs["policy"] == "fetch-split+static"]
    warm = found.changed[found.changed["warm"].notna()]
    warm = warm[warm["policy"] == "fetch-split+static"]
    merged = static.merge(warm, on=CELL)
    ratios = merged["tpot_s_x"] / merged["tpot_s_y"]
    assert mean == f"{100 * (np.exp(np.log(ratios).mean()) - 1):.1f} %"
    assert len(merged) == len(found.cells)
    assert "recall++moe-speq, 4 tokens drafted over recall, 4 tokens drafted" in gains


def test_what_is_there_is_not_run_again(mapped):
    out, found, again = mapped
    files = list((out / "runs").glob("*.parquet"))
    stored = sum(len(pd.read_parquet(file)) for file in files)
    assert stored == len(found.runs) + len(found.changed)
    pd.testing.assert_frame_equal(found.runs, again.runs)


def test_the_page_links_each_cell_to_its_command(mapped):
    out, found, _ = mapped
    html, text, figures = write_map(out, found, map_answer(found))
    commands = re.findall(r"moesim (compare [^|]*) \|", text.read_text())
    assert len(commands) == len(found.cells)
    assert all(command in html.read_text() for command in commands)
    cell, command = found.cells.iloc[-1], commands[-1]
    assert found.cells["favourite_behind"].is_monotonic_decreasing
    done = CliRunner().invoke(cli.app, [*shlex.split(command), "--json"])
    assert done.exit_code == 0, done.output
    tpot_s = {run["policy"]: run["tpot_s"] for run in json.loads(done.stdout)["runs"]}
    assert tpot_s[cell["best"]] == cell["tpot_s"]
    read = pd.read_csv(figures)
    assert np.allclose(read["best_s"], found.cells["best_s"])
