"""What other people's policies answer wrongly is said in one line that names it, in both
engines, and counts nowhere.
"""

import numpy as np
import pytest
from support.command_line import refused

import moesim
from moesim.policies import registry
from moesim.policies.base import (
    Assignment,
    AssignmentPolicy,
    CachePolicy,
    ExpertKey,
    PolicyError,
    PrefetchPolicy,
    Routing,
    RoutingPolicy,
)
from moesim.policies.cache._score_based import ScoreBasedCache
from moesim.policies.registry import resolve


@pytest.fixture
def said(monkeypatch):
    """What is said when `tiny` is replayed under a policy of one's own."""
    monkeypatch.setattr(registry, "_registered", {})

    def replayed(kind, cls, **options):
        moesim.register(kind, "mine", cls)
        policy = "mine" if kind == "assignment" else "greedy"
        part = {} if kind == "assignment" else {kind: "mine"}
        with pytest.raises(PolicyError) as caught:
            moesim.replay("tiny", policy, steps=4, **part, **options)
        return str(caught.value)

    return replayed


def answering(base, question, answer):
    """A policy class that answers one question with a function of its arguments."""
    return type("Mine", (base,), {question: lambda _self, *shown: answer(*shown)})


@pytest.mark.parametrize("engine", ["auto", "simpy"])
@pytest.mark.parametrize(("answer", "expected"), [
    (lambda *_: None, "got None (does it end with `return`?)"),
    (lambda i, _: np.arange(len(i)) + 999_999, "not distinct members"),
    (lambda i, c: np.repeat(c[:1], len(i)), "not distinct members"),
    (lambda _, c: c[:0], "integers, got an array of int64, shape (0,)"),
    (lambda i, c: c[: len(i)].astype(float), "an array of float64"),
    (lambda i, c: c[None, : len(i)], "integers, got an array of int64, shape (1, "),
])  # fmt: skip
def test_wrong_victims_are_named(said, engine, answer, expected):
    """Keys that no expert has crashed the process."""
    mine = answering(CachePolicy, "victims", answer)
    message = said("cache", mine, engine=engine)
    assert message.startswith("cache policy 'mine': victims: ")
    assert expected in message


def test_a_score_that_is_no_number_is_named(said):
    class Mine(ScoreBasedCache):
        def accessed(self, work):
            self.score[work.layer * self.experts + work.experts] = np.nan

    assert "expected a number, got nan" in said("cache", Mine)


@pytest.mark.parametrize(("answer", "expected"), [
    (lambda _: None, "expected an Assignment, got None"),
    (lambda n: Assignment(np.zeros(n)), "lanes: expected an array of 32 integers"),
    (lambda n: Assignment(np.zeros(n, int), [0.5]), "order: expected an array"),
])  # fmt: skip
def test_wrong_lanes_are_named(said, answer, expected):
    mine = answering(
        AssignmentPolicy, "assign", lambda work, _: answer(len(work.experts))
    )
    for engine in ("simpy", "auto"):
        assert expected in said("assignment", mine, engine=engine)


@pytest.mark.parametrize(("answer", "expected"), [
    (None, "expected ExpertKeys, got None"),
    ([1, 2], "expected ExpertKey(layer, expert), got 1"),
    ([ExpertKey(1, 3.5)], "expected integers in ExpertKey"),
])  # fmt: skip
def test_wrong_prefetches_are_named(said, answer, expected):
    mine = answering(PrefetchPolicy, "prefetch", lambda *_: answer)
    assert expected in said("prefetch", mine)


@pytest.mark.parametrize(("answer", "expected"), [
    (lambda _: None, "expected a Routing, got None"),
    (lambda gate: gate.experts, "expected a Routing, got an array of uint16"),
    (lambda gate: Routing(gate.experts + 100, None), "expected 0 to 31, or 65535"),
    (lambda gate: Routing(gate.experts[:1], None), "shape (96, 4)"),
    (lambda gate: Routing(gate.experts[:, :2], np.ones(gate.experts.shape)),
     "weights: expected numbers of shape (96, 2)"),
])  # fmt: skip
def test_wrong_routing_is_named(said, answer, expected):
    """Experts that the model lacks, and tokens that were forgotten, counted as
    nothing.
    """
    mine = answering(RoutingPolicy, "route", lambda gate, _: answer(gate))
    message = said("routing", mine)
    assert message.startswith("routing policy 'mine': route: ")
    assert expected in message


@pytest.mark.parametrize(("question", "answer", "expected"), [
    ("admits", lambda _, incoming: incoming, "bool, got an array of int64"),
    ("precedence", lambda _: None, "integers, got None"),
    ("replacements", lambda *_: [(0, 1)], "expected Swap(outgoing, incoming)"),
])  # fmt: skip
def test_wrong_answers_about_entering_are_named(said, question, answer, expected):
    assert expected in said("cache", answering(ScoreBasedCache, question, answer))


def test_lists_serve_as_arrays_in_both_engines(monkeypatch):
    """SimPy's replays wanted arrays, compiled ones did not mind."""
    monkeypatch.setattr(registry, "_registered", {})
    moesim.register(
        "assignment",
        "mine",
        answering(
            AssignmentPolicy,
            "assign",
            lambda work, _: Assignment([1] * len(work.experts)),
        ),
    )
    moesim.register(
        "cache",
        "mine",
        answering(
            CachePolicy,
            "victims",
            lambda incoming, candidates: candidates[: len(incoming)].tolist(),
        ),
    )
    simulated, compiled = (
        moesim.replay("tiny", "mine", cache="mine", steps=4, engine=engine)
        for engine in ("simpy", "fast")
    )
    assert simulated.metrics["hits"] == compiled.metrics["hits"] > 0


def test_our_own_policies_are_not_checked():
    assert "victims" not in vars(resolve("lru", "cache"))


UNFINISHED = """
from moesim.policies.base import CachePolicy

class Mine(CachePolicy):
    '''Lacks its answer.'''
"""

FAILING = """
from moesim.policies.base import CachePolicy

class Mine(CachePolicy):
    '''Fails at once.'''

    def victims(self, incoming, candidates):
        return {}["x"]
"""

ASSIGNING = """
import numpy as np
from moesim.policies.base import Assignment, AssignmentPolicy

class Mine(AssignmentPolicy):
    '''The first ones on the GPU.'''

    def __init__(self, *, count: int = 2) -> None:
        self.count = count

    def assign(self, work, view):
        return Assignment((np.arange(len(work.experts)) < self.count).astype(np.int8))
"""


def test_a_policy_without_its_answer_is_refused(command, tmp_path):
    (tmp_path / "mine.py").write_text(UNFINISHED)
    run = command("replay", "tiny", "--cache", tmp_path / "mine.py", "--steps", 2)
    assert refused(run, "expected Mine to define victims")


def test_every_command_shows_the_lines_of_a_failing_policy(command, tmp_path):
    """`hits` showed ours."""
    (tmp_path / "mine.py").write_text(FAILING)
    code, _, err = command(
        "hits", "tiny", "--cache", tmp_path / "mine.py", "--steps", 4
    )
    assert code == 2
    assert "line 8: KeyError: 'x'" in err.splitlines()[-1]
    assert "moesim/cli" not in err


def test_a_file_of_an_assignment_policy_takes_parameters(command, tmp_path):
    """It was unknown as soon as it had some."""
    (tmp_path / "mine.py").write_text(ASSIGNING)
    code, out, _ = command(
        "replay", "tiny", "--policy", f"{tmp_path / 'mine.py'}:count=3", "--steps", 2
    )
    assert code == 0
    assert "count=3" in "".join(out.split())
