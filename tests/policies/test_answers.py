"""What other people's policies answer wrongly is said in one line that names it, in both
engines, and counts nowhere.
"""

import numpy as np
import pytest
from support.command_line import refused

import moesim
from moesim.policies import registry
from moesim.policies.assignment.daop import DAOP
from moesim.policies.base import (
    AssignmentPolicy,
    CachePolicy,
    Gate,
    MachineView,
    PolicyError,
    PrefetchPolicy,
    RoutingPolicy,
    Work,
)
from moesim.policies.cache.lru import LRU
from moesim.policies.cache.workload_window import WorkloadWindow
from moesim.policies.faults import PolicyFault, policy_faults
from moesim.policies.names import ABSENT, RESIDENT
from moesim.policies.prefetch.clairvoyant import Clairvoyant
from moesim.policies.prefetch.recall import Recall
from moesim.policies.ranked_cache import RankedCache
from moesim.policies.registry import KINDS, resolve
from moesim.policies.routing.cache_prior import CachePrior

ENGINES = pytest.mark.parametrize("engine", ["fast", "simpy"])


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


def writing(*numbers, returning=0):
    """An answer that writes into the last array it is shown, again and again, and
    returns a number.
    """

    def answer(*shown):
        for n in range(len(shown[-1])):
            shown[-1][n] = numbers[n % len(numbers)]
        return returning

    return answer


@ENGINES
@pytest.mark.parametrize(("base", "question", "answer", "expected"), [
    # Keys that no expert has crashed the process.
    (CachePolicy, "victims", writing(999_999), "not distinct members"),
    (CachePolicy, "victims", lambda _, candidates, chosen: writing(candidates[0])(chosen),
     "not distinct members"),
    (RankedCache, "admits", lambda *_: None, "expected true or false, got None"),
    (RankedCache, "replacements", lambda *_: None, "expected the number of keys"),
    (RankedCache, "replacements", writing(10**9, returning=1), "got 1000000000"),
    (AssignmentPolicy, "assign", lambda *_: None,
     "assign: expected SERIAL and WAITS, added up, or 0, got None"),
    (AssignmentPolicy, "assign", lambda *_: 4, "or 0, got 4"),
    (AssignmentPolicy, "assign", writing(0), "an order that is a permutation"),
    (AssignmentPolicy, "assign", writing(10**9), "an order that is a permutation"),
    (AssignmentPolicy, "assign", lambda _work, _view, lanes, _order: writing(9)(lanes),
     "expected a lane in 0..1"),
    (AssignmentPolicy, "assign", lambda _work, _view, lanes, _order: writing(-1)(lanes),
     "a lane in 0..1"),
    (PrefetchPolicy, "prefetch", lambda *_: None,
     "prefetch: expected the number of keys named, got None"),
    (PrefetchPolicy, "prefetch", lambda *_: 3.0, "number of keys named, got 3.0"),
    (PrefetchPolicy, "prefetch", lambda *_: -1, "keys, got -1"),
    (PrefetchPolicy, "prefetch", lambda *_: 10**9, "keys, got 1000000000"),
    (PrefetchPolicy, "prefetch", writing(10**9, returning=1), "got 1000000000"),
    (PrefetchPolicy, "prefetch", writing(-5, returning=1), "got -5"),
    # Experts that the model lacks, and tokens that were forgotten, counted as nothing.
    (RoutingPolicy, "route", lambda *_: None,
     "route: expected a number of columns, got None"),
    (RoutingPolicy, "route", lambda *_: 33, "expected 0 to 32 columns, got 33"),
    (RoutingPolicy, "route", writing(99, returning=4),
     "expected 0 to 31, or 65535 for none, got 99"),
])  # fmt: skip
def test_a_wrong_answer_is_named(said, engine, base, question, answer, expected):
    [kind] = [kind for kind, contract in KINDS.items() if issubclass(base, contract)]
    message = said(kind, answering(base, question, answer), engine=engine)
    assert message.startswith(f"{kind} policy 'mine': ")
    assert expected in message


def test_a_score_that_is_no_number_is_named(said):
    class Mine(RankedCache):
        def accessed(self, work):
            for i in range(work.active):
                self.score[work.first + work.experts[i]] = np.nan

    assert "expected a number, got nan" in said("cache", Mine)


def test_weights_of_a_wrong_shape_are_named(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    mine = answering(RoutingPolicy, "weigh", lambda *_: np.ones((3, 2)))
    mine.route = lambda *_: 0
    moesim.register("routing", "mine", mine)
    with pytest.raises(PolicyError, match=r"weigh: expected numbers of shape \(1, 2\)"):
        resolve("mine", "routing").weigh(Gate(), np.zeros((1, 2), np.uint16))


def swapping(going, coming):
    """Swap the first expert in one state for the last in another, once both are."""

    def answer(_work, states, outgoing, incoming):
        first, last = (
            np.flatnonzero(np.asarray(states) == each) for each in (going, coming)
        )
        if not len(first) or not len(last) or first[0] == last[-1]:
            return 0
        outgoing[0], incoming[0] = first[0], last[-1]
        return 1

    return answer


@ENGINES
@pytest.mark.parametrize(("going", "coming"), [(ABSENT, ABSENT), (RESIDENT, RESIDENT)])
def test_swaps_of_experts_that_are_elsewhere_are_refused(said, engine, going, coming):
    mine = answering(RankedCache, "replacements", swapping(going, coming))
    message = said("cache", mine, engine=engine)
    assert "the first must be resident and the second must not be" in message


def written_through(*shown):
    """What of a question's arguments, and of their attributes, can be written."""
    for each in shown:
        parts = {"": each}
        if isinstance(each, Work | MachineView | Gate):
            parts = {name: getattr(each, name) for name in dir(each)}
        for name, part in parts.items():
            if getattr(part, "nbytes", 0) and not memoryview(part).readonly:
                yield f"{type(each).__name__} {name}"


@ENGINES
def test_what_policies_are_shown_they_cannot_write(monkeypatch, engine):
    """Scaled costs changed the simulation, and exchanged experts its hits. Who should
    fill an array in is shown it last.
    """
    monkeypatch.setattr(registry, "_registered", {})
    found = {}

    def watched(base, *questions, **attributes):
        """A policy that notes what it could write when it is asked something."""

        def asked(question, filled):
            def answer(self, *shown):
                given = shown[: len(shown) - filled]
                found.setdefault(question, set()).update(written_through(*given))
                return getattr(base, question)(self, *shown)

            return answer

        ways = {name: asked(name, filled) for name, filled in questions}
        return type("Mine", (base,), ways | attributes)

    everything = {"reads_tokens": True, "needs": ("scores", "weights", "pred1_raw")}
    assignment = watched(DAOP, ("assign", 2), ("precompute", 2), **everything)
    moesim.register("assignment", "mine", assignment)
    told = ("accessed", 0), ("victims", 1), ("replacements", 2)
    moesim.register("cache", "lists", watched(LRU, *told))
    moesim.register("cache", "swaps", watched(WorkloadWindow, *told))
    past = watched(Recall, ("prefetch", 1), **everything)
    moesim.register("prefetch", "past", past)
    moesim.register("prefetch", "future", watched(Clairvoyant, ("prefetch", 1)))
    routing = watched(CachePrior, ("route", 1), **everything)
    moesim.register("routing", "mine", routing)
    options = {"engine": engine, "steps": 6, "slots_per_layer": 2}
    parts = {"cache": "lists", "prefetch": "past", "routing": "mine"}
    moesim.replay("tiny", "mine", **parts, **options)
    moesim.replay("tiny", "mine", cache="swaps", prefetch="future", **options)
    assert found == {
        question: set()
        for question in (
            *("assign", "precompute", "prefetch", "route"),
            *("accessed", "victims", "replacements"),
        )
    }


@ENGINES
@pytest.mark.parametrize("number", [300, None, "cpu"])
def test_what_no_array_can_hold_fails_where_it_was_written(monkeypatch, engine, number):
    """In the policy's own line, whoever asks."""
    monkeypatch.setattr(registry, "_registered", {})

    class Mine(AssignmentPolicy):
        def assign(self, work, view, lanes, order):
            lanes[0] = number
            return 0

    moesim.register("assignment", "mine", Mine)
    with pytest.raises(PolicyFault, match="assignment policy 'mine' failed, in ") as it:
        moesim.replay("tiny", "mine", steps=2, engine=engine)
    assert "lanes[0] = number" in it.value.frames
    assert __file__ in str(it.value)


def test_our_own_policies_are_not_checked():
    assert "victims" not in vars(resolve("lru", "cache"))


def test_a_compiled_policy_is_named_by_its_frame():
    """Cython's frames have no locals; their names say module, class and method."""

    class Mine(CachePolicy):
        pass

    code = compile("{}['x']", "mine.py", "exec").replace(
        co_name="pack.mine.Mine.victims"
    )
    with (
        pytest.raises(
            PolicyFault, match=r"cache policy 'Mine' failed, in .*mine\.py, li"
        ),
        policy_faults(),
    ):
        exec(code, {"__name__": "pack.mine", "Mine": Mine})


UNFINISHED = """
from moesim.policies.base import CachePolicy

class Mine(CachePolicy):
    '''Lacks its answer.'''
"""

FAILING = """
from moesim.policies.base import CachePolicy

class Mine(CachePolicy):
    '''Fails at once.'''

    def victims(self, incoming, candidates, chosen):
        chosen[0] = {}["x"]
"""

ASSIGNING = """
from moesim.policies.base import AssignmentPolicy

class Mine(AssignmentPolicy):
    '''The first ones on the GPU.'''

    def __init__(self, *, count: int = 2) -> None:
        self.count = count

    def assign(self, work, view, lanes, order):
        for i in range(work.active):
            lanes[i] = i < self.count
        return 0
"""


def test_a_policy_without_its_answer_is_refused(command, tmp_path):
    (tmp_path / "mine.py").write_text(UNFINISHED)
    run = command("replay", "tiny", "--cache", tmp_path / "mine.py", "--steps", 2)
    assert refused(run, "expected Mine to define victims")


@pytest.mark.parametrize(
    "given",
    [("hits",), ("replay", "--engine", "fast"), ("replay", "--engine", "simpy")],
)
def test_every_command_shows_the_lines_of_a_failing_policy(command, tmp_path, given):
    """`hits` showed ours."""
    (tmp_path / "mine.py").write_text(FAILING)
    name, *options = given
    code, _, err = command(
        name, "tiny", "--cache", tmp_path / "mine.py", "--steps", 4, *options
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
