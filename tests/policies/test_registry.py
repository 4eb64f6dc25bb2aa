"""Names, parameters and outsiders: how a policy is found and told what to do."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from typing import Any, Literal

import pytest
from support.cache_driver import drive, one_by_one
from support.processes import ROOT, output_of

from moesim.policies import registry
from moesim.policies.base import CachePolicy, PolicyError, PrefetchPolicy
from moesim.policies.cache.lfu import LFU
from moesim.policies.cache.lru import LRU
from moesim.policies.registry import (
    describe,
    find,
    name_of,
    names,
    names_with,
    references,
    register,
    resolve,
    settings,
)

DOC = ROOT / "docs" / "how-to" / "add-a-policy.md"


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def error(call, *args, **kwargs):
    with pytest.raises(PolicyError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def doc_examples():
    return [
        block.partition("```")[0]
        for block in DOC.read_text(encoding="utf-8").split("```python\n")[1:]
    ]


def test_a_name_is_its_file():
    for kind in registry.KINDS:
        folder = ROOT / "policies" / kind
        files = {
            p.stem.replace("_", "-")
            for p in folder.glob("*.py")
            if not p.stem.startswith("_")
        }
        assert set(names(kind)) == files


def test_only_what_is_asked_for_is_imported():
    """A cache needs no ILP solver."""
    script = (
        "import sys; from moesim.policies.registry import names, resolve;"
        "names('assignment');"
        "resolve('lru', 'cache'); assert 'pulp' not in sys.modules; "
        "assert 'moesim.policies.cache.belady' not in sys.modules"
    )
    output_of("-c", script)


def test_parameters_are_read_from_text():
    policy = resolve("lfu:decay=0.9,variant=perfect", kind="cache")
    assert isinstance(policy, LFU)
    assert policy.decay == 0.9
    assert resolve("belady:must-admit=true", "cache").must_admit is True
    assert settings("greedy:staging=none", "assignment")["staging"] is None
    assert resolve("greedy:staging=3", "assignment").limit == 3


def test_parameters_from_toml_are_checked_and_text_wins():
    assert resolve("lfu", "cache", {"decay": 1, "tie": "lru"}).decay == 1.0
    assert resolve("lfu:decay=0.5", "cache", {"decay": 0.9}).decay == 0.5
    assert (
        error(resolve, "beam", "assignment", {"width": 2.5})
        == "assignment policy 'beam': width: expected int, got 2.5"
    )
    assert "width: expected int, got True" in error(
        resolve, "beam", "assignment", {"width": True}
    )


def test_parameters_may_be_texts_or_anything(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})

    class Mine(CachePolicy):
        def __init__(self, *, word: str = "", thing: Any = None):
            self.named = word, thing

        def victims(self, incoming, candidates, chosen):
            """Nobody leaves."""

    registry.register("cache", "mine", Mine)
    assert resolve("mine:word=some,thing=3", "cache").named == ("some", "3")


def test_settings_are_the_effective_configuration():
    assert settings("lfu:decay=0.9", "cache") == {
        "name": "lfu",
        "variant": "in-cache",
        "decay": 0.9,
        "tie": "id",
    }
    assert settings("lru", "cache") == {"name": "lru"}


@pytest.mark.parametrize(("spec", "kind", "expected"), [
    ("lru:x=1", "cache", "cache policy 'lru': unknown parameter 'x'; known: none"),
    ("lfu:decoy=1", "cache",
     "cache policy 'lfu': unknown parameter 'decoy'; known: variant, decay, tie"),
    ("lfu:decay=fast", "cache",
     "cache policy 'lfu': decay: expected float, got 'fast'"),
    ("lfu:decay=1.5", "cache",
     "cache policy 'lfu': decay: expected 0 < decay <= 1, got 1.5"),
    ("lfu:decay=nan", "cache",
     "cache policy 'lfu': decay: expected 0 < decay <= 1, got nan"),
    ("lfu:tie=luck", "cache",
     "cache policy 'lfu': tie: expected id, fifo or lru, got 'luck'"),
    ("lfu:decay", "cache", "cache policy 'lfu': expected name=value, got 'decay'"),
    ("lfu:decay=1,decay=1", "cache", "cache policy 'lfu': decay: given twice"),
    ("belady:must_admit=7", "cache",
     "cache policy 'belady': must_admit: expected true or false, got '7'"),
    ("greedy:staging=x", "assignment",
     "assignment policy 'greedy': staging: expected none or int, got 'x'"),
    ("lru", "caches",
     ("unknown kind of policy 'caches'; known: assignment, cache, prefetch," " routing")),
])  # fmt: skip
def test_a_wrong_spec_gets_one_clear_line(spec, kind, expected):
    assert error(resolve, spec, kind) == expected


BEYOND = """
assignment beam:width=0 exact:objective=measured fetch-split:fraction=1.5
assignment fetch-split:cpu_slowdown=0 ik-break-even:min_batch=0 moe-lightning:tokens=0
cache lecar:discount=0 least-stale-interval:weight=0 mrs:alpha=0 pinned-lru:share=1.5
cache prefill-swap:share=0 s3-fifo:small=1 score-window:window=0 slru:segments=0
prefetch clairvoyant:depth=0 impact:depth=4 impact:discount=0 next-gate:depth=4
prefetch noisy-oracle:accuracy=1.5
routing expert-cache-router:alpha=1
"""


def test_where_a_range_ends_is_refused():
    for line in BEYOND.strip().splitlines():
        kind, *specs = line.split()
        for spec in specs:
            name, parameter, _ = re.split("[:=]", spec)
            refused = f"{kind} policy {name!r}: {parameter}: expected"
            assert error(resolve, spec, kind).startswith(refused)


def test_an_unknown_name_lists_the_known_and_guesses():
    """The nearest first; where there are many, the command that lists them."""
    assert error(resolve, "lruu", "cache") == (
        "unknown cache policy 'lruu' (did you mean 'lru'?); `moesim list cache` prints"
        " all"
    )
    known = ", ".join(names("routing"))
    assert (
        error(resolve, "zzz", "routing")
        == f"unknown routing policy 'zzz'; known: {known}"
    )


def test_describe_says_what_a_newcomer_asks():
    entry = {info.name: info for info in describe("cache")}
    assert entry["lfu"].summary == "Evict the expert with the fewest uses."
    assert entry["least-stale-interval"].summary == (
        "Evict the expert whose next use is expected last, from its mean interval"
        " between uses."
    ), "a sentence of two lines is printed as one, and without what follows"
    labels = [(p.name, p.default, p.type_label) for p in entry["lfu"].parameters]
    assert labels[:2] == [
        ("variant", "in-cache", "in-cache or perfect"),
        ("decay", 1.0, "float"),
    ]
    assert entry["belady"].oracle
    assert not entry["lru"].oracle
    assert {info.name: info.needs for info in describe("prefetch")}["residual"] == (
        "pred1_res",
    )
    assert all(info.summary for kind in registry.KINDS for info in describe(kind))


class Mine(LRU):
    """Mine."""

    def __init__(
        self, *, size: int | None = None, how: Literal["a", "b"] = "a", loose=2
    ):
        self.size = size
        self.how = how
        self.loose = loose


def test_a_notebook_registers_and_may_run_the_cell_again():
    register("cache", "mine", Mine)
    register("cache", "mine", Mine)
    assert name_of(Mine) == "mine"
    assert "mine" in names("cache")
    policy = resolve("mine:size=4,how=b,loose=3", "cache")
    assert (policy.size, policy.how, policy.loose) == (4, "b", 3)
    assert (
        error(register, "cache", "lru", Mine)
        == "cache policy 'lru' exists already; choose another name"
    )
    assert "expected a subclass of PrefetchPolicy" in error(
        register, "prefetch", "mine", Mine
    )
    assert "expected lower-case letters" in error(register, "cache", "a:b", Mine)


def test_properties_of_policies_are_listed_not_their_names():
    """What used to be lists of names elsewhere is read off the classes."""
    assert names_with("prefetch", "oracle") == [
        "clairvoyant",
        "foresight",
        "moe-speq",
        "noisy-oracle",
        "pre-gated",
        "sp-moe",
    ]
    assert set(names("prefetch")) - set(names_with("prefetch", "prefetches")) == {
        "none"
    }
    assert "beam" in names_with("assignment", "calibrates_planning")
    assert {"lru", "lfu", "lfu:variant=perfect", "arc"} <= set(references("cache"))
    register("cache", "mine", Mine)
    assert "mine" not in references("cache"), "LRU's property is not inherited"
    for spec in references("cache"):
        cache = resolve(spec, "cache")
        assert not cache.oracle
        assert not cache.replaces
        assert type(cache).admits is CachePolicy.admits, "it admits every miss"
    assert resolve("workload-window", "cache").replaces


def test_another_package_adds_one_by_entry_point(monkeypatch):
    points = [
        EntryPoint("cache.theirs", "test_registry:Mine", registry.GROUP),
        EntryPoint("cache.broken", "test_registry:Absent", registry.GROUP),
        EntryPoint("prefetch.theirs", "test_registry:Mine", registry.GROUP),
        EntryPoint("cache.lru", "test_registry:Mine", registry.GROUP),
    ]
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda *, group: points if group == registry.GROUP else [],
    )
    assert {"theirs", "broken"} <= set(names("cache"))
    assert find("theirs", "cache").__name__ == "Mine"
    assert find("lru", "cache") is LRU, "a name of ours stays ours"
    assert error(find, "broken", "cache").startswith(
        "entry point 'cache.broken' (test_registry:Absent): AttributeError"
    )
    assert "expected a subclass of PrefetchPolicy" in error(find, "theirs", "prefetch")


def test_a_file_from_outside_the_package(tmp_path):
    path = tmp_path / "mru.py"
    path.write_text(doc_examples()[0], encoding="utf-8")
    policy = resolve(f"{path}:spare=1", "cache")
    assert isinstance(policy, CachePolicy)
    assert (type(policy).__name__, policy.spare) == ("MRU", 1)
    assert error(resolve, f"{path}:spare=-1", "cache").endswith(
        "spare: expected a number >= 0, got -1"
    )
    assert (
        error(resolve, str(path), "prefetch")
        == f"{path}: expected one public subclass of PrefetchPolicy, found none"
    )
    assert "no such file" in error(resolve, str(tmp_path / "absent.py"), "cache")
    path.write_text("import nowhere_to_be_found\n", encoding="utf-8")
    assert error(resolve, str(path), "cache").startswith(f"{path}: ModuleNotFoundError")
    assert issubclass(find("none", "prefetch"), PrefetchPolicy)


def test_the_documented_example_works():
    """On a cycle of four in three slots MRU hits where LRU never does: 2 of 3 after the
    first round, by hand.
    """
    module = {"__name__": "add_a_policy"}
    examples = doc_examples()
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, str(DOC), "exec"), module)
    cycle = one_by_one([0, 1, 2, 3] * 3)
    # 0 1 2 | 3 out 2 | 0 1 hit, 2 out 1 | 3 0 hit, 1 out 0 | 2 3 hit
    run = drive(resolve("mru", "cache"), cycle, 3)
    assert (run.hits, run.evicted) == (6, [2, 1, 0])
    assert drive(LRU(), cycle, 3).hits == 0
    assert drive(resolve("mru:spare=1", "cache"), cycle, 3).evicted[0] == 1
