"""Policies of all kinds together: nothing left out that a trace serves, no pair missing
from the small design.
"""

from itertools import combinations, product

import pytest
from support.small_trace import write_trace

from benchmarks.combinations import PARTS, pairwise, served
from benchmarks.every_policy import Bench
from moesim.policies.registry import names
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape

SHAPE = ModelShape("small", 3, 16, 2, 32, 16, (8192,) * 3, 1, dtype="f32")


def test_three_kinds_of_two_need_four_combinations_for_all_pairs_instead_of_eight():
    found = pairwise([["a", "b"], ["x", "y"], ["1", "2"]])
    assert len(found) == 4
    assert {tuple(one.split("+")[1:]) for one in found} == {
        ("x", "1"),
        ("x", "2"),
        ("y", "1"),
        ("y", "2"),
    }


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), (3, 2, 4, 1), (2, 2, 5, 4), (5, 7, 3, 2), (1, 1, 1, 1)]
)
def test_any_two_of_different_kinds_meet(sizes):
    choices = [
        [f"{kind}{one}" for one in range(size)]
        for kind, size in zip("abcd", sizes, strict=False)
    ]
    found = {
        frozenset(pair)
        for one in pairwise(choices)
        for pair in combinations(one.split("+"), 2)
    }
    wanted = {
        frozenset(pair) for a, b in combinations(choices, 2) for pair in product(a, b)
    }
    assert found == wanted


def test_a_policy_is_offered_exactly_where_its_columns_are():
    few, missing = served(("weights",))
    every, none = served(
        ("weights", "scores", "pred1_raw", "pred2_raw", "pred3_raw", "pred1_res")
    )
    assert none == []
    assert every == [names(kind) for kind in PARTS]
    assert "mrs" in missing
    assert "mrs" not in few[1]
    assert [
        [one for one in kind if one not in missing or one in mine]
        for kind, mine in zip(every, few, strict=True)
    ] == few


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A trace with combine weights."""
    return write_trace(
        tmp_path_factory.mktemp("combined") / "t.parquet",
        SHAPE,
        ((4, 30),),
        columns=("weights",),
    )


@pytest.fixture(scope="module")
def bench(path, tmp_path_factory):
    """The same, made ready."""
    with Bench(
        open_trace(path),
        tmp_path_factory.mktemp("b"),
        scale=1,
        steps=2,
        hw="two-core-host",
    ) as made:
        yield made


@pytest.mark.parametrize("tiering", ["gpu", "ssd"])
@pytest.mark.parametrize(
    "name",
    [
        "beam+belady+clairvoyant+adaptive-gating",
        "fetch-split+workload-window+random+as-recorded",
    ],
)
def test_any_combination_runs_and_is_held_to_its_promises(bench, name, tiering):
    row = bench.row("product", name, tiering)
    assert (row.outcome, row.wrong) == ("ran", [])
