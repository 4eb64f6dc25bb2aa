"""Kinds of lanes: one table tells profile, simulator and runtime the same."""

import pytest

from moesim.hwprofiles import lanes
from moesim.hwprofiles.schema import CURVES, is_number


def test_a_machine_with_two_gpus_has_two_of_each_lane_that_belongs_to_a_gpu():
    names = "control cpu gpu0 gpu1 h2d0 h2d1 d2h0 d2h1 ssd"
    assert lanes.lane_names(2) == tuple(names.split())


@pytest.mark.parametrize("lane", lanes.lane_names(12))
def test_a_lane_is_named_by_its_kind_and_its_gpu(lane):
    kind = lanes.kind_of(lane)
    assert kind.includes(lane)
    assert kind.lane(lanes.gpu_of(lane)) == lane
    assert sum(other.includes(lane) for other in lanes.LANE_KINDS) == 1


def test_a_kind_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match=r"lane 'tpu0': expected one of .*d2h, ssd"):
        lanes.kind_of("tpu0")


def test_at_the_same_instant_reads_end_before_copies_before_products_before_control():
    ranked = sorted(lanes.LANE_KINDS, key=lambda kind: kind.end_rank)
    assert [kind.name for kind in ranked] == [
        "ssd",
        "h2d",
        "d2h",
        "gpu",
        "cpu",
        "control",
    ]
    assert sorted(kind.end_rank for kind in lanes.LANE_KINDS) == list(
        range(len(lanes.LANE_KINDS))
    )


@pytest.mark.parametrize("kind", lanes.LANE_KINDS, ids=lambda kind: kind.name)
def test_what_a_kind_scatters_by_is_an_entry_that_profiles_can_have(kind):
    assert kind.noise_paths
    for path in kind.noise_paths:
        assert path in CURVES or is_number(path)
