"""Policies on several machines with several memories: every cell is a comparison of its
own, and who wins is said.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pandas as pd
import psutil
import pytest
from support.command_line import refused
from support.small_trace import LARGE, write_small_trace

import moesim
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.policies.base import PolicyError
from moesim.runs.config import MemoryOptions
from moesim.runs.sweeps.execution import run_tasks

POLICIES = ("all-cpu", "on-demand", "greedy", "on-demand+belady")
MACHINES = ("rtx4060ti", "rtx3080ti")
CELL = ["hw", "slots_per_layer"]
SLOTS = [1, 3, 6]
SAME = [
    "tpot_s", "ttft_s", "hit_rate_active", "makespan_s", "h2d_bytes", "gpu_bytes",
    "busiest",
]  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "small.parquet"
    return write_small_trace(path, shape=LARGE)


@pytest.fixture(scope="module")
def swept(trace):
    return moesim.compare(
        trace, POLICIES, hw=MACHINES, slots_per_layer=SLOTS, keep=False
    )


# Cells.


def test_every_cell_is_the_comparison_on_that_machine_with_that_memory(trace, swept):
    assert len(swept.table) == len(POLICIES) * len(MACHINES) * len(SLOTS)
    for machine in MACHINES:
        for slots in SLOTS:
            table, _ = moesim.compare(
                trace, POLICIES, hw=machine, slots_per_layer=slots, keep=False
            )
            cell = swept.table[
                (swept.table["hw"] == machine)
                & (swept.table["slots_per_layer"] == slots)
            ].reset_index(drop=True)
            assert cell["candidate"].tolist() == table["candidate"].tolist()
            pd.testing.assert_frame_equal(cell[SAME], table[SAME])
            assert cell["fastest"].tolist() == table["fastest"].tolist()


def test_a_sweep_keeps_no_timelines_unless_told(trace, swept):
    assert all(run.timeline.frame().empty for run in swept.runs.values())
    kept = moesim.compare(trace, ["greedy"], slots_per_layer=SLOTS[:2], steps=3)
    assert all(len(run.timeline.step_frame()) == 3 for run in kept.runs.values())


def test_folders_are_named_after_what_there_is_more_than_one_of(trace, tmp_path):
    moesim.compare(
        trace,
        ["greedy"],
        hw=MACHINES[:1],
        slots_per_layer=SLOTS[:2],
        steps=2,
        out=tmp_path,
    )
    assert (tmp_path / "1" / "greedy" / "run.json").is_file()
    assert (tmp_path / "3" / "greedy" / "run.json").is_file()


@pytest.mark.parametrize(("options", "words"), [
    ({"gpu_memory_bytes": 8 << 30}, "8.0 GiB"),
    ({"slots_per_layer": 16}, "16 slots"),
    ({"gpu_memory_bytes": 801 * (1 << 30) // 100}, "8.01 GiB"),
    ({"gpu_memory_bytes": 8_000_000_000}, "7.451 GiB"),
    ({"cache_ratio": 0.125}, "12.5 %"),
    ({"cache_ratio": 0.10001}, "10.001 %"),
    ({}, "default"),
])  # fmt: skip
def test_a_memory_is_called_what_was_said_of_it(options, words):
    assert MemoryOptions(**options).size_words == words


# Processes.


def test_several_processes_find_what_one_finds(trace, swept, tmp_path):
    """In the same order, with tables of runs where they are asked for."""
    shares = []
    twice = moesim.compare(
        trace,
        POLICIES,
        hw=MACHINES,
        slots_per_layer=SLOTS,
        jobs=2,
        out=tmp_path,
        progress=shares.append,
    )
    pd.testing.assert_frame_equal(twice.table, swept.table)
    assert list(twice.runs) == list(swept.runs)
    assert shares[-1] == pytest.approx(1.0)
    run = twice.runs["rtx4060ti", "3", "greedy"]
    assert run.placement()["uses"].sum() == run.metrics["accesses"]


def test_processes_see_the_folder_that_the_caller_is_in(tmp_path, monkeypatch):
    """Processes of an earlier sweep, in another folder, would not find the trace."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_small_trace(Path(f"{name}.parquet"))
        found = moesim.compare(
            f"{name}.parquet", ["greedy", "all-cpu"], jobs=2, steps=2
        )
        assert len(found.runs) == 2
    # Those that watch over shared resources stay until the end.
    left = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert all("resource_tracker" in command for command in left)


def test_small_work_stays_in_this_process():
    """What cannot travel between processes shows that none was started."""
    results = []
    run_tasks(
        lambda task, tell: tell(1) or task * 2,
        [1, 2, 3],
        lambda index, result: results.append((index, result)),
        jobs=None,
        rows=3,
    )
    assert results == [(0, 2), (1, 4), (2, 6)]


# What cannot be.


def test_a_cell_that_cannot_be_is_named_before_anything_runs(trace, tmp_path):
    with pytest.raises(PolicyError, match=r"rtx4060ti, 1.0 MiB.*no room to stage"):
        moesim.compare(
            trace,
            ["greedy"],
            hw=MACHINES,
            gpu_memory=[1 << 20, 1 << 30],
            out=tmp_path / "o",
        )
    assert not (tmp_path / "o").exists()


def test_machines_of_one_name_are_told_apart_by_their_place(trace, tmp_path):
    profile = load_profile("rtx4060ti")
    slow = dataclasses.replace(profile, description="another one")
    places = [
        save_profile(one, tmp_path / name)
        for one, name in ((profile, "a.toml"), (slow, "b.toml"))
    ]
    out = tmp_path / "out"
    found = moesim.compare(trace, ["greedy"], hw=places, steps=2, out=out)
    assert len(set(found.table["hw"])) == 2
    assert all(name.startswith("rtx4060ti (") for name in found.table["hw"])
    assert len(list(out.glob("*/greedy/run.json"))) == 2


def test_no_memory_is_lost_because_it_is_called_like_another(trace):
    """8 and 8.01 GiB are two settings, and so are three slots of a layer and of all."""
    sizes = ["8GiB", "8.01GiB"]
    found = moesim.compare(trace, ["greedy"], gpu_memory=sizes, steps=1)
    assert [key[0] for key in found.runs] == ["8.0 GiB", "8.01 GiB"]
    scopes = {"slots_per_layer": 3, "cache_scope": ["layer", "global"]}
    found = moesim.compare(trace, ["greedy"], steps=1, **scopes)
    assert len(found.table) == 2


@pytest.mark.parametrize(
    ("what", "given"),
    [("policy", {}), ("hw", {"hw": []}), ("gpu_memory", {"gpu_memory": []})],
)
def test_nothing_to_compare_is_said(trace, what, given):
    with pytest.raises(PolicyError, match=f"{what}: expected at least one"):
        moesim.compare(trace, [] if what == "policy" else ["greedy"], **given)


@pytest.mark.parametrize(("option", "value", "part"), [
    ("--gpu-memory", "4GiB,much", "much"),
    ("--cache-ratio", "0.1,2", "between 0 and 1"),
    ("--slots-per-layer", "1,-2", "a whole number >= 0, got -2"),
    ("--hw", ",", "expected values, found only commas"),
    ("--hw", "rtx4060ti,rtx4060tii", "did you mean 'rtx4060ti'"),
])  # fmt: skip
def test_lists_are_refused_in_one_line(command, trace, option, value, part):
    assert refused(command("compare", trace, option, value), part)


# Words, pictures, the page, the command.


def test_winners_are_counted_and_listed(swept):
    answer = swept.answer()
    tied = swept.table[swept.table["tied"]].groupby(CELL, sort=False)["candidate"]
    wins = Counter(tied.agg(" = ".join))
    assert answer.sentences == [
        "fastest per token: "
        + ", ".join(f"{name} in {n} of 6" for name, n in wins.most_common())
    ]
    words = "on-demand+belady: sees the future, so it is a bound"
    assert any(note.startswith(words) for note in answer.notes)
    winners = answer.tables[0]
    assert winners.heads()[:3] == ["machine", "experts per layer", "fastest"]
    assert [row[2] for row in winners.cells()] == tied.agg(" = ".join).tolist()


def test_the_picture_has_a_panel_per_machine_and_a_line_per_policy(swept):
    axes = moesim.answer(swept).plot("times")
    assert [each.get_title() for each in axes] == [f"machine {n}" for n in MACHINES]
    lines = {line.get_label(): line for line in axes[1].get_lines()}
    assert set(lines) == set(POLICIES)
    mine = swept.table.set_index(["hw", "candidate", "slots_per_layer"])["seconds"]
    across, up = lines["greedy"].get_data()
    assert across.tolist() == [1, 3, 6]
    expected = [1e3 * mine[MACHINES[1], "greedy", slots] for slots in (1, 3, 6)]
    assert up.tolist() == pytest.approx(expected)
    styles = {name: line.get_linestyle() for name, line in lines.items()}
    assert [name for name, each in styles.items() if each == "--"] == [
        "on-demand+belady"
    ]


def test_with_one_memory_machines_stand_on_the_axis(trace):
    found = moesim.compare(trace, ["greedy", "all-cpu"], hw=MACHINES, steps=4)
    axes = moesim.answer(found).plot("times")
    assert [label.get_text() for label in axes.get_xticklabels()] == list(MACHINES)


def test_memory_stands_on_a_true_axis(trace):
    """1, 2 and 6 GiB are no three equal steps."""
    sizes = ["1GiB", "2GiB", "6GiB"]
    found = moesim.compare(trace, ["greedy"], gpu_memory=sizes, steps=2, hw="rtx4060ti")
    axes = moesim.answer(found).plot("times")
    assert axes.get_lines()[0].get_xdata().tolist() == [1, 2, 6]
    assert axes.get_xlabel() == "GPU memory, GiB"


def test_the_command_says_shows_and_writes_a_sweep(command, trace, tmp_path):
    line = f"compare {trace} --policy all-cpu,greedy --hw rtx4060ti,rtx3080ti"
    words = f"{line} --cache-ratio 0.25,0.5 --steps 6".split()
    table, page, picture = (
        tmp_path / name for name in ("t.parquet", "p.html", "p.png")
    )
    code, out, _ = command(*words, "--png", picture, "--table", table, "--html", page)
    assert code == 0
    assert "8 over 2 x policy, 2 x machine, 2 x GPU cache" in out
    assert "fastest per token: " in out
    found = pd.read_parquet(table)
    cell = ["hw", "cache_ratio"]
    assert found[[*cell, "policy"]].drop_duplicates().shape == (8, 3)
    assert found["fastest"].sum() == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert all(words in text for words in ("rtx3080ti", "50 %", "fastest per token"))
    told = json.loads(command(*words, "--json")[1])
    best = found.loc[found["fastest"], [*cell, "policy"]]
    assert told["fastest"] == best.to_dict("records")
    assert len(told["runs"]) == 8
