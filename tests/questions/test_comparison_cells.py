"""Policies on several machines with several memories: every cell is a comparison of its
own, and who wins is said.
"""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import psutil
import pytest
from support.command_line import refused
from support.small_trace import LARGE, write_small_trace

import moesim
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.policies.base import PolicyError
from moesim.questions.compare import CELL
from moesim.questions.compare_page import cells_figure
from moesim.questions.compare_text import answer_lines, winner_rows
from moesim.runs.sweeps.execution import run_tasks

POLICIES = ("all-cpu", "on-demand", "greedy", "on-demand+belady")
MACHINES = ("rtx4060ti", "rtx3080ti")
MEMORIES = [moesim.MemoryOptions(slots_per_layer=slots) for slots in (1, 3, 6)]
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
    return moesim.compare_cells(trace, POLICIES, hw=MACHINES, memory=MEMORIES)


# Cells.


def test_every_cell_is_the_comparison_on_that_machine_with_that_memory(trace, swept):
    assert len(swept.table) == len(POLICIES) * len(MACHINES) * len(MEMORIES)
    assert swept.cells == 6
    for machine in MACHINES:
        for memory in MEMORIES:
            table, _ = moesim.compare(trace, POLICIES, hw=machine, memory=memory)
            cell = swept.table[
                (swept.table["hw"] == machine)
                & (swept.table["memory"] == memory.size_words)
            ]
            pd.testing.assert_frame_equal(cell.reset_index(drop=True), table)


def test_a_lead_inside_the_interval_of_a_profile_is_a_tie(swept):
    """No policy here is ten times as fast as another; with one per mille, all leads
    count.
    """

    def answer(error):
        runs = {}
        for key, run in swept.runs.items():
            config = {**run.config, "prediction_error": error}
            runs[key] = dataclasses.replace(run, config=config)
        return answer_lines(dataclasses.replace(swept, runs=runs))[0]

    assert answer(10.0) == "fastest over the whole trace: a tie in 6 of 6"
    assert "a tie" not in answer(0.0)


def test_the_winner_of_a_cell_is_its_shortest_run_that_sees_the_past_only(swept):
    for cell, part in swept.table.groupby(CELL):
        real = part[part["policy"] != "on-demand+belady"]
        (winner,) = part.loc[part["fastest"], "policy"]
        assert winner == real.loc[real["makespan_s"].idxmin(), "policy"], cell
    assert len(swept.fastest()) == 6


def test_more_slots_hit_more(swept):
    hits = swept.table[swept.table["policy"] == "on-demand"].groupby("hw")[
        "hit_rate_active"
    ]
    assert all(
        rates.is_monotonic_increasing and rates.iloc[0] < rates.iloc[-1]
        for _, rates in hits
    )


def test_a_sweep_keeps_no_timelines_unless_told(trace, swept):
    assert all(run.timeline.frame().empty for run in swept.runs.values())
    kept = moesim.compare_cells(
        trace, ["greedy"], memory=MEMORIES[:2], keep=True, steps=3
    )
    assert all(len(run.timeline.step_frame()) == 3 for run in kept.runs.values())


def test_progress_ends_at_one(trace):
    shares = []
    moesim.compare_cells(
        trace, ["greedy", "all-cpu"], memory=MEMORIES[:2], progress=shares.append
    )
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_folders_are_named_after_what_there_is_more_than_one_of(trace, tmp_path):
    moesim.compare_cells(
        trace, ["greedy"], hw=MACHINES[:1], memory=MEMORIES[:2], steps=2, out=tmp_path
    )
    assert (tmp_path / "1_slots" / "greedy" / "run.json").is_file()
    assert (tmp_path / "3_slots" / "greedy" / "run.json").is_file()


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
    assert moesim.MemoryOptions(**options).size_words == words


# Processes.


def test_several_processes_find_what_one_finds(trace, swept, tmp_path):
    """In the same order, with tables of runs where they are asked for."""
    shares = []
    twice = moesim.compare_cells(
        trace,
        POLICIES,
        hw=MACHINES,
        memory=MEMORIES,
        jobs=2,
        out=tmp_path,
        progress=shares.append,
    )
    pd.testing.assert_frame_equal(twice.table, swept.table)
    assert list(twice.runs) == list(swept.runs)
    assert shares[-1] == pytest.approx(1.0)
    run = twice.runs["rtx4060ti", "3 slots", "greedy"]
    assert run.placement()["uses"].sum() == run.metrics["accesses"]


def test_processes_see_the_folder_that_the_caller_is_in(tmp_path, monkeypatch):
    """Processes of an earlier sweep, in another folder, would not find the trace."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_small_trace(Path(f"{name}.parquet"))
        found = moesim.compare_cells(
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
    memory = [
        moesim.MemoryOptions(gpu_memory_bytes=size) for size in (1 << 20, 1 << 30)
    ]
    with pytest.raises(
        PolicyError, match=r"on rtx4060ti with 1.0 MiB: .*no room to stage"
    ):
        moesim.compare_cells(
            trace, ["greedy"], hw=MACHINES, memory=memory, out=tmp_path / "o"
        )
    assert not (tmp_path / "o").exists()


def test_machines_of_one_name_are_told_apart_by_their_place(trace, tmp_path):
    profile = load_profile("rtx4060ti")
    slow = dataclasses.replace(profile, description="another one")
    places = [
        save_profile(one, tmp_path / name)
        for one, name in ((profile, "a.toml"), (slow, "b.toml"))
    ]
    found = moesim.compare_cells(trace, ["greedy"], hw=places, steps=2)
    assert found.table["hw"].tolist() == [str(place) for place in places]
    with pytest.raises(PolicyError, match="several profiles are named 'rtx4060ti'"):
        moesim.compare_cells(trace, ["greedy"], hw=[profile, slow], steps=2)


def test_memories_lie_on_one_axis(trace):
    with pytest.raises(PolicyError, match="mix none"):
        moesim.compare_cells(
            trace,
            ["greedy"],
            memory=[MEMORIES[0], moesim.MemoryOptions(cache_ratio=0.5)],
        )


def test_no_memory_is_lost_because_it_is_called_like_another(trace):
    """8 and 8.01 GiB are two cells; what no words would tell apart is refused, not left
    out.
    """
    sizes = [
        moesim.MemoryOptions(gpu_memory_bytes=round(gib * (1 << 30)))
        for gib in (8, 8.01)
    ]
    assert moesim.compare_cells(trace, ["greedy"], memory=sizes, steps=1).table[
        "memory"
    ].tolist() == ["8.0 GiB", "8.01 GiB"]
    with pytest.raises(PolicyError, match="both be called '3 slots'"):
        moesim.compare_cells(
            trace,
            ["greedy"],
            memory=[
                MEMORIES[1],
                dataclasses.replace(MEMORIES[1], cache_scope="global"),
            ],
        )


@pytest.mark.parametrize(
    ("what", "given"),
    [("policy", {}), ("machine", {"hw": []}), ("memory", {"memory": []})],
)
def test_nothing_to_compare_is_said(trace, what, given):
    with pytest.raises(PolicyError, match=f"at least one {what}"):
        moesim.compare_cells(trace, [] if what == "policy" else ["greedy"], **given)


@pytest.mark.parametrize(("option", "value", "part"), [
    ("--gpu-memory", "4GiB,much", "much"),
    ("--cache-ratio", "0.1,2", "between 0 and 1"),
    ("--slots-per-layer", "1,-2", "whole numbers"),
    ("--hw", ",", "names separated by commas"),
    ("--hw", "rtx4060ti,rtx4060tii", "did you mean 'rtx4060ti'"),
])  # fmt: skip
def test_lists_are_refused_in_one_line(command, trace, option, value, part):
    assert refused(command("compare", trace, option, value), part)


# Words, pictures, the page, the command.


def test_winners_are_counted_and_listed(swept):
    answer, *notes = answer_lines(swept)
    wins = swept.fastest()["policy"].value_counts()
    assert answer == "fastest over the whole trace: " + ", ".join(
        f"{name} in {n} of 6" for name, n in wins.items()
    )
    assert "on-demand+belady: sees the future (cache belady), so no rival" in notes
    head, rows = winner_rows(swept)
    assert head[:3] == ["machine", "per layer", "fastest"]
    assert [row[:3] for row in rows] == swept.fastest()[
        [*CELL, "policy"]
    ].to_numpy().tolist()


def test_the_picture_has_a_panel_per_machine_and_a_line_per_policy(swept):
    chart = cells_figure(swept)
    shown = pd.DataFrame(chart.data["runs"])
    assert chart.spec["facet"]["sort"] == list(MACHINES)
    assert set(shown["policy"]) == set(POLICIES)
    mine = shown[(shown["hw"] == MACHINES[1]) & (shown["policy"] == "greedy")]
    assert sorted(mine["size"]) == [1, 3, 6]
    # What the headline compares.
    of_table = swept.table.set_index(["hw", "policy", "memory"])["makespan_s"]
    for row in mine.to_dict("records"):
        at = (row["hw"], row["policy"], row["memory"])
        assert row["makespan_s"] == of_table[at]
    dashes = chart.spec["spec"]["layer"][0]["encoding"]["strokeDash"]["scale"]
    place = dashes["domain"].index("on-demand+belady")
    assert list(dashes["range"]).count(dashes["range"][place]) == 1


def test_with_one_memory_machines_stand_on_the_axis(trace):
    found = moesim.compare_cells(trace, ["greedy", "all-cpu"], hw=MACHINES, steps=4)
    x = cells_figure(found).spec["layer"][0]["encoding"]["x"]
    assert (x["field"], x["sort"]) == ("hw", list(MACHINES))


def test_the_command_says_shows_and_writes_a_sweep(command, trace, tmp_path):
    line = f"compare {trace} --policy all-cpu,greedy --hw rtx4060ti,rtx3080ti"
    words = f"{line} --cache-ratio 0.25,0.5".split()
    table = tmp_path / "t.parquet"
    page = tmp_path / "p.html"
    code, out, _ = command(
        *words,
        "--steps",
        6,
        "--png",
        tmp_path / "p.png",
        "--table",
        table,
        "--html",
        page,
    )
    assert code == 0
    assert "2 policies on 2 machines with 2 memory sizes" in out
    assert "fastest over the whole trace: " in out
    found = pd.read_parquet(table)
    assert found[[*CELL, "policy"]].drop_duplicates().shape == (8, 3)
    assert found["fastest"].sum() == 4
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert all(
        words in text for words in ("rtx3080ti", "50 %", "fastest over the whole trace")
    )
    told = json.loads(command(*words, "--steps", 6, "--json")[1])
    assert told["fastest"] == found.loc[found["fastest"], [*CELL, "policy"]].to_dict(
        "records"
    )
    assert {(run["hw"], run["memory"], run["policy"]) for run in told["runs"]} == set(
        found[[*CELL, "policy"]].itertuples(index=False, name=None)
    )
