"""The checker that runs every policy on real routing must itself be able to fail."""

import sys

import pytest
from support.small_trace import write_trace

from benchmarks.every_policy import Bench, main
from moesim.policies import registry
from moesim.policies.cache.lru import LRU
from moesim.policies.routing.adaptive_gating import AdaptiveGating
from moesim.runtime.executor.memories import HostSlotMap, SlotMap
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape

SHAPE = ModelShape("small", 3, 16, 2, 32, 16, (8192,) * 3, 1, dtype="f32")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A trace with combine weights only, so that policies which read scores or
    predictions are refused.
    """
    folder = tmp_path_factory.mktemp("bench")
    trace = open_trace(
        write_trace(folder / "t.parquet", SHAPE, ((4, 30),), columns=("weights",))
    )
    with Bench(trace, folder, scale=1, steps=6, hw="two-core-host") as made:
        yield made


@pytest.mark.parametrize("tiering", ["gpu", "ssd"])
@pytest.mark.parametrize(("kind", "name"), [
    ("system", "flashmoe"),
    ("assignment", "ilp"),
    ("cache", "belady"),
    ("routing", "adaptive-gating"),
])  # fmt: skip
def test_a_policy_that_keeps_its_promises_is_not_blamed(bench, kind, name, tiering):
    row = bench.row(kind, name, tiering)
    assert (row.outcome, row.wrong) == ("ran", [])
    assert row.hits == row.simulated > 0


def test_a_missing_column_is_a_refusal_by_name(bench):
    row = bench.row("system", "dali", "gpu")
    assert (row.outcome, row.wrong) == ("refused", [])
    assert "'residual:size=4' needs column 'pred1_res'" in row.why


def test_an_exchanged_expert_is_found_by_its_answer(bench, monkeypatch):
    straight = SlotMap.weights
    monkeypatch.setattr(
        SlotMap,
        "weights",
        lambda self, key: straight(
            self, key ^ 1 if self._slot_of[key ^ 1] >= 0 else key
        ),
    )
    assert any(
        "answers of step" in one
        for one in bench.row("assignment", "on-demand", "gpu").wrong
    )


def test_memory_beyond_the_budget_is_found(bench, monkeypatch):
    straight = HostSlotMap.__init__

    def roomy(self, *given, **named):
        straight(self, *given, **named)
        self.slots = type(self.slots)(self.slots.slots + 1, self.slots.slot_bytes)

    monkeypatch.setattr(HostSlotMap, "__init__", roomy)
    assert any(
        one.startswith("host: ")
        for one in bench.row("assignment", "all-cpu", "ssd").wrong
    )


def exchange(monkeypatch, cls, **answers):
    """Put a subclass in the place of a policy of ours; a compiled one keeps what it
    has.
    """
    named = {"__module__": cls.__module__, **answers}
    other = type(cls.__name__, (cls,), named)
    monkeypatch.setattr(sys.modules[cls.__module__], cls.__name__, other)
    # It remembers the classes of files.
    monkeypatch.setattr(registry, "_only_policy", registry._only_policy.__wrapped__)


def test_a_planner_that_decides_otherwise_is_found(bench, monkeypatch):
    """A cache that turns sulky in its second life, and admits nothing."""
    lives = []

    def moody(self, incoming, candidates, chosen):
        if self not in lives:
            lives.append(self)
        if len(lives) == 1:
            LRU.victims(self, incoming, candidates, chosen)

    exchange(monkeypatch, LRU, victims=moody)
    wrong = bench.row("assignment", "on-demand", "gpu").wrong
    assert any(one.startswith("plans: decision log") for one in wrong)
    assert "accesses differ from the simulator's" in wrong


def test_an_unexpected_error_belongs_into_the_table_and_makes_the_program_fail(
    bench, monkeypatch, capsys
):
    def bug(*_):
        raise ZeroDivisionError("in a lane")

    line = f"every_policy {bench.trace.path} --scale 1 --steps 2"
    monkeypatch.setattr("sys.argv", f"{line} --kinds routing --tierings gpu".split())
    assert main() == 0
    assert "2 ran, 3 refused by name, 0 wrong" in capsys.readouterr().out
    exchange(monkeypatch, AdaptiveGating, route=bug)
    assert main() == 1
    assert "WRONG: ZeroDivisionError: in a lane" in capsys.readouterr().out
