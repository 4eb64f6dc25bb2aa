"""AdapMoE's division of slots: its formula by hand, its table against all divisions."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import shape

from moesim.hwprofiles.profile import load_profile
from moesim.policies.base import PolicyError
from moesim.policies.cache._slot_shares import (
    divided,
    expected_misses,
    front_first,
    kept_alone,
)
from moesim.policies.systems import SYSTEMS
from moesim.runs.config import MemoryOptions
from moesim.runs.memory import plan_memory


def test_section_6_8_the_ends_of_the_formula():
    """Nothing cached and nothing foreseen: two misses, or one if one expert is kept;
    everything cached: none.
    """
    assert expected_misses(np.array([0, 8]), 8, 2, 0.0, 0.0).tolist() == [2.0, 0.0]
    assert expected_misses(np.array([0, 8]), 8, 2, 1.0, 0.0).tolist() == [1.0, 0.0]
    # One of both is prefetched.
    assert expected_misses(np.array(0), 8, 2, 0.0, 1.0) == 1.0


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_expected_misses_are_the_mean_over_all_sets_of_experts(top_k):
    """Five experts, two cached; a right prefetch spares one miss if there is any."""
    for accuracy in (0.0, 0.4, 1.0):
        missed = [
            len(set(chosen) - {0, 1})
            for chosen in itertools.combinations(range(5), top_k)
        ]
        mean = np.mean([accuracy * max(0, m - 1) + (1 - accuracy) * m for m in missed])
        assert expected_misses(np.array(2), 5, top_k, 0.0, accuracy) == pytest.approx(
            mean
        )


def test_who_is_kept_alone():
    """Shares of .9 and .1, .6 and .4: below a threshold of .2 the first token's second
    expert goes.
    """
    assert kept_alone(np.array([[0.9, 0.1], [0.6, 0.4]]), 0.2) == 0.5
    assert kept_alone(np.array([[0.45, 0.05]]), 0.2) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(2, 5))
def test_no_division_misses_less(data, layers, experts):
    top_k = data.draw(st.integers(1, experts))
    shares = st.lists(
        st.integers(0, 10).map(lambda n: n / 10), min_size=layers, max_size=layers
    )
    single = np.array(data.draw(shares))
    accuracy = np.array(data.draw(shares))
    total = data.draw(st.integers(layers, layers * experts))

    def misses(slots):
        return sum(
            float(expected_misses(np.array(s), experts, top_k, a, b))
            for s, a, b in zip(slots, single, accuracy, strict=True)
        )

    division = divided(total, experts, top_k, single, accuracy)
    assert division.sum() == total
    assert 1 <= division.min() <= division.max() <= experts
    everybody = itertools.product(range(1, experts + 1), repeat=layers)
    assert misses(division) == pytest.approx(
        min(misses(slots) for slots in everybody if sum(slots) == total)
    )


def test_what_cannot_be_divided_is_refused():
    for total, single, accuracy, message in (
        (2, [0.0] * 3, [0.5] * 3, "expected 3 to 24 slots, got 2"),
        (9, [0.0] * 3, [0.5] * 2, "for every layer"),
        (9, [0.0] * 3, [0.5, 0.5, 1.5], "between 0 and 1"),
    ):
        with pytest.raises(PolicyError, match=message):
            divided(total, 8, 2, np.array(single), np.array(accuracy))


def test_section_6_8_adapmoe_divides_its_slots_where_a_calibration_says_how():
    """Twelve slots of three layers: equal without artefacts, in a global pool and in
    other systems.
    """
    model = shape(3, 8, 2)
    machine = load_profile("rtx3090-epyc7532")
    sizes = MemoryOptions(slots_per_layer=4)
    artefacts = {
        "single_share": np.zeros(3),
        "prefetch_accuracy": np.array([0.9, 0.1, 0.9]),
    }
    uneven = plan_memory(sizes, model, machine, SYSTEMS["adapmoe"], artefacts).gpu
    assert uneven.slots.tolist() == [2, 8, 2]
    assert uneven.pool_bytes.tolist() == [200, 800, 200]
    for system, known in (
        ("adapmoe", {}),
        ("adapmoe", None),
        ("mixtral-offloading", artefacts),
    ):
        assert plan_memory(
            sizes, model, machine, SYSTEMS[system], known
        ).gpu.slots.tolist() == [4, 4, 4]
    pooled = MemoryOptions(slots_per_layer=4, cache_scope="global")
    assert plan_memory(
        pooled, model, machine, SYSTEMS["adapmoe"], artefacts
    ).gpu.slots.tolist() == [12]
    with pytest.raises(
        PolicyError, match="expected 3 numbers, one for each MoE layer, found 2"
    ):
        plan_memory(
            sizes,
            model,
            machine,
            SYSTEMS["adapmoe"],
            {"single_share": [0, 0], "prefetch_accuracy": [0, 0]},
        )


@pytest.mark.parametrize(("total", "division"), [
    (11, [8, 3, 0, 0, 0]),
    (16, [8, 8, 0, 0, 0]),
    (21, [8, 8, 2, 2, 1]),
    (40, [8, 8, 8, 8, 8]),
])  # fmt: skip
def test_fate_fills_its_first_two_layers_before_the_others(total, division):
    assert front_first(total, layers=5, experts=8, whole_layers=2).tolist() == division
    all_whole = np.clip(total - 8 * np.arange(5), 0, 8)
    assert front_first(total, 5, 8, whole_layers=9).tolist() == all_whole.tolist()
