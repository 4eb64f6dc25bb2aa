"""A layer step that CPU and GPU share pays for two chains and their merge, on all
clocks.
"""

import pytest
from support.engine_pairs import assert_equal, both, machine
from support.handmade import hand_trace

from moesim.hwprofiles import paths

SPLIT_S = 0.003
ROUTING = [[[0, 1], [1, 2], [2, 3]]]
"""With experts 0 and 1 resident: all on the GPU, one each, all on the CPU."""


def joins_s(tmp_path, policy, split_s, first_s=0.0, **options):
    """Seconds of each layer's join."""
    trace = hand_trace(tmp_path / "t.parquet", ROUTING, experts=4)
    hw = machine(numbers={paths.SPLIT_S: split_s, paths.first_s("cpu"): first_s})
    runs = both(trace, policy, hw=hw, staging=1, **options)
    assert_equal(*runs)
    spans = runs[1].timeline.frame()
    joins = spans[spans["kind"] == "join"]
    return (joins["end_s"] - joins["start_s"]).to_numpy()


@pytest.mark.parametrize(("policy", "slots", "pays"), [
    # Only the second of three layers is served in two places.
    ("fixed-mapping+static:fill=lowest", 2, [0, 1, 0]),
    ("fixed-mapping+static:fill=lowest", 4, [0, 0, 0]),
    # Helpers that poll are not waited for.
    ("dfa-cache+static:fill=lowest", 2, [0, 0, 0]),
    ("all-cpu+static:fill=lowest", 2, [0, 0, 0]),
    ("on-demand+static:fill=lowest", 2, [0, 0, 0]),
    # A graph that is built once runs both chains, whether or not it misses.
    ("llama.cpp-moe-cache+static:fill=lowest", 2, [1, 1, 1]),
    ("llama.cpp-moe-cache+static:fill=lowest", 4, [0, 0, 0]),
    ("llama.cpp-moe-cache+static:fill=lowest", 0, [0, 0, 0]),
])  # fmt: skip
def test_three_layers_by_hand(tmp_path, policy, slots, pays):
    free = joins_s(tmp_path, policy, 0.0, slots_per_layer=slots)
    paid = joins_s(tmp_path, policy, SPLIT_S, slots_per_layer=slots)
    assert paid - free == pytest.approx([SPLIT_S * each for each in pays], abs=1e-12)


def test_a_fixed_graph_wakes_the_cpu_even_where_it_has_no_expert(tmp_path):
    """Two slots: the first layer has none on the CPU, which takes its first product's
    extra time all the same.
    """
    for policy, wakes in (
        ("llama.cpp-moe-cache", [1, 0, 0]),
        ("fixed-mapping", [0] * 3),
    ):
        fixed = f"{policy}+static:fill=lowest"
        free = joins_s(tmp_path, fixed, 0.0, slots_per_layer=2)
        paid = joins_s(tmp_path, fixed, 0.0, first_s=0.002, slots_per_layer=2)
        assert paid - free == pytest.approx([0.002 * each for each in wakes], abs=1e-12)
