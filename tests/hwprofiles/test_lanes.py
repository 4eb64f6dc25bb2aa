"""Kinds of lanes: one table tells profile, simulator and runtime the same."""

import pytest

from moesim.hwprofiles import lanes


@pytest.mark.parametrize("lane", lanes.lane_names(12))
def test_a_lane_is_named_by_its_kind_and_its_gpu(lane):
    kind = lanes.kind_of(lane)
    assert kind.lane(lanes.gpu_of(lane)) == lane
    assert sum(other.includes(lane) for other in lanes.LANE_KINDS) == 1


def test_a_kind_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match=r"lane 'tpu0': expected one of .*d2h, ssd"):
        lanes.kind_of("tpu0")


def test_at_the_same_instant_reads_end_before_copies_before_products_before_control():
    ranked = sorted(lanes.LANE_KINDS, key=lambda kind: kind.end_rank)
    names = "ssd h2d d2h gpu cpu control"
    assert [kind.name for kind in ranked] == names.split()
    assert [kind.end_rank for kind in ranked] == list(range(6))
