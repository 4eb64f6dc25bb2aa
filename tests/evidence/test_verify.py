"""Long work keeps its time limit, says what it left out, and goes on after a kill; one
command says whether the simulator holds on this PC.
"""

import json
import time

import pytest
from support.real_machine import host_profile
from support.validations import cell, result
from test_validate import TRACE

from moesim.base.files import Journal
from moesim.cli.output import PlainProgress
from moesim.evidence.validation import grid as grid_module
from moesim.evidence.validation.grid import _Budget, validate
from moesim.evidence.validation.paired_runs import simulate
from moesim.evidence.validation.verify import Plan, judge
from moesim.hwprofiles.schema import ProfileError

GRID = {"steps": 3, "repetitions": 3, "replications": 2}
GRID |= {"policies": ["all-cpu+none", "on-demand+lru"]}
GRID |= {"cache_ratios": [0.3], "batches": [1]}


class Clock:
    """Seconds that a test moves on."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_the_first_pass_leaves_time_for_repetitions():
    """Three repetitions in one minute: 20 s for the first pass, where a run takes 8."""
    clock = Clock()
    budget = _Budget(1.0, 3, clock)
    assert budget.allows(first_pass=True, expected_s=None)
    clock.now_s = 8.0
    budget.took(8.0)
    assert budget.allows(first_pass=True, expected_s=None)
    clock.now_s = 16.0
    assert not budget.allows(first_pass=True, expected_s=None)
    assert budget.allows(first_pass=False, expected_s=8.0)
    clock.now_s = 55.0
    assert not budget.allows(first_pass=False, expected_s=8.0)
    assert budget.allows(first_pass=False, expected_s=4.0)
    assert _Budget(None, 5).allows(first_pass=True, expected_s=1e9), "no limit"


def test_what_is_built_once_is_not_expected_of_every_run(monkeypatch):
    """A first run that takes 15 s of 60, as it writes memory for the first time, leaves
    out none of the cells, which take 1 s.
    """
    clock = Clock()
    seen = []

    class Runner:
        def __init__(self, shape, profile, **_options):
            self._shape, self._profile = shape, profile

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, trial, profile, *, seed):
            clock.now_s += 1.0 if seen else 15.0
            seen.append(trial)
            return simulate(trial, self._shape, profile, seed=seed)

    monkeypatch.setattr(grid_module, "TrialRunner", Runner)
    monkeypatch.setattr(time, "monotonic", clock)
    budget = _Budget(1.0, 3, clock)
    monkeypatch.setattr(grid_module, "_Budget", lambda *_: budget)
    validation = grid(minutes=1.0, cache_ratios=[0.3, 0.6], seed=1)
    assert [len(each.measured) for each in validation.cells] == [3, 3, 3, 3]
    first, second = (trial.policy for trial in seen[1:3])
    assert first != second, "each policy once before any comes again"
    assert validation.config["left_out"] == ""
    assert len(seen) == 13


def test_progress_without_a_terminal_is_a_line_in_half_a_minute(capsys):
    """Two of ten after 40 s: the rest takes 160 s."""
    clock = Clock()
    progress = PlainProgress("validating", clock)
    for second in range(0, 41, 10):
        clock.now_s = float(second)
        progress.show(0.05 * second, 10.0)
    clock.now_s = 61.0
    progress.show(9.0, 10.0)
    assert capsys.readouterr().err.splitlines() == [
        "validating: 15 %, about 3 min left",
        "validating: 90 %, about 7 s left",
    ]


def test_a_journal_drops_half_a_line_and_other_runs(tmp_path):
    path = tmp_path / "runs.jsonl"
    journal = Journal(path, "key")
    journal.add({"run": 1})
    journal.add({"run": 2})
    with path.open("a") as file:
        file.write('{"run": 3, "half')
    again = Journal(path, "key")
    assert again.lines == [{"run": 1}, {"run": 2}]
    again.add({"run": 3})
    assert Journal(path, "key").lines[-1] == {"run": 3}
    with pytest.raises(ProfileError, match="made with the same options, found others"):
        Journal(path, "other", refuse=ProfileError)
    assert Journal(path, "other").lines == []
    journal.close()
    assert not path.exists()


def grid(journal=None, **changes):
    return validate([TRACE], hw=host_profile(), journal=journal, **GRID | changes)


def test_runs_of_an_interrupted_grid_are_not_made_again(tmp_path, monkeypatch):
    """It stops after four of six runs; the next call makes two."""
    journal = tmp_path / "runs.jsonl"
    made = []

    def stop_after(count):
        def note(*_args):
            made.append(1)
            if len(made) == count:
                raise KeyboardInterrupt

        return note

    add = Journal.add
    with monkeypatch.context() as patch:
        interrupt = stop_after(4)
        patch.setattr(Journal, "add", lambda *args: (add(*args), interrupt()))
        with pytest.raises(KeyboardInterrupt):
            grid(journal)
    before = Journal(journal, _key(journal)).lines
    assert len(before) == 4

    reports = []
    validation = grid(journal, on_result=reports.append).to_json()
    kept = [line["measured"]["tpot_s"] for line in before]
    told = [run["tpot_s"] for each in validation["cells"] for run in each["measured"]]
    assert len(told) == 6
    assert set(kept) <= set(told)
    assert reports
    assert not journal.exists(), "the grid is whole"


def _key(journal):
    return json.loads(journal.read_text().splitlines()[0])["key"]


def test_what_a_limit_leaves_out_is_said(tmp_path):
    journal = tmp_path / "runs.jsonl"
    validation = grid(journal, minutes=0.0)
    assert len(validation.cells) == 1
    assert validation.config["left_out"] == "1 of 2 cells and 2 of 3 repetitions"
    assert validation.warnings[0].startswith("left out: 1 of 2 cells")
    assert journal.exists(), "the next call goes on"


STEADY = [1.0, 1.001, 0.999, 1.0005, 0.9995]


def verdict(*cells):
    return judge(Plan(), [result(*cells)])


def test_the_verdict_by_hand():
    """Beyond ± 0.1 % of the measurement: 1 % is near, 20 % is not."""
    near = verdict(cell("a", STEADY, 1.01), cell("b", [2 * s for s in STEADY], 2.0))
    assert near.holds
    assert near.words.startswith("the simulator holds on this PC: beyond what")
    assert "1 of 1 orders of policies agree" in near.words
    far = verdict(cell("a", STEADY, 1.2))
    assert far.holds is False
    assert far.words.startswith("it does not hold here: ")
    wrong = verdict(cell("a", STEADY, 1.0), cell("b", [2 * s for s in STEADY], 0.99))
    assert wrong.holds is False
    assert verdict(cell("a", STEADY, 1.0, hits=4)).holds is False, "other hits"


def test_cells_that_scatter_tell_nothing():
    loud = verdict(cell("a", [1.0, 2.0, 3.0, 4.0, 5.0], 9.0))
    assert loud.holds is None
    assert loud.words.startswith("cannot tell")
