"""Systems as wholes, by hand arithmetic: a few layers, few experts, round seconds."""

from __future__ import annotations

import numpy as np
import pytest
from moesim.hwprofiles.profile import load_profile
from moesim.policies.planner.planner import Planner
from moesim.policies.planner.residency import CacheSize
from moesim.policies.systems import SYSTEMS, compose

from moesim.runs.memory import MemoryOptions
from tests.cache_driver import ListFuture
from tests.handmade import HandCosts, plan_of, routed, run, shape, spans, steps
from tests.learned_network import Artefacts

PROFILE = load_profile("two-core-host")
UNEQUAL = {
    "equal": (100,) * 5,
    "growing": (60, 70, 100, 110, 130),
    "one large": (40, 40, 90, 40, 40),
}


def held_bytes(memory):
    """Bytes of everything in the cache."""
    by_layer = (memory.state > 0).sum(axis=1)
    return int(by_layer @ np.array(memory.expert_bytes))


# -- equal memory -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 1 / 3, 0.469, 0.5, 0.75, 0.97, 1.0])
def test_at_one_ratio_every_system_holds_the_same_bytes(ratio, sizes):
    """Both scopes, slots divided by use or not, and filled by a calibration: less than
    one expert below the ratio of all bytes, never above. `none` alone holds nothing.
    """
    experts = 6
    model = shape(layers=5, experts=experts, top_k=2, expert_bytes=sizes)
    wanted = round(ratio * experts * sum(sizes))
    by_use = {
        "single_share": np.full(5, 0.2),
        "prefetch_accuracy": np.linspace(0, 1, 5),
    }
    counts = np.arange(5.0 * experts).reshape(5, experts)
    for name, system in SYSTEMS.items():
        # Every layer has a slot where slots are divided by use: too few give none.
        can_divide = ratio * experts >= 2
        memory = MemoryOptions(cache_ratio=ratio).plan(
            model, PROFILE, system, by_use if can_divide else None
        )
        assert 0 <= wanted - memory.gpu.total_bytes < max(sizes), name
        planner = Planner(
            model,
            HandCosts(),
            system.build(gpus=1, host_cache=None),
            memory,
            calibration=counts,
            future=ListFuture([]),
            extras=Artefacts(5, experts),
        )
        held = held_bytes(planner.gpu[0].memory)
        if system.cache == "none":
            assert held == 0
        else:
            assert 0 <= wanted - held < max(sizes), name


def test_a_ratio_that_does_not_divide_is_spread_over_the_layers():
    """120 of 256 slots are 46.875 %: 3.75 for each of 32 layers of 8, so every fourth
    layer has 3 of them and the others 4.
    """
    size = CacheSize.of((100,) * 32, 8, ratio=120 / 256)
    assert size.slots.tolist() == [3, 4, 4, 4] * 8
    # 0.3 of 10 are 3, though binary numbers say 2.9999….
    assert CacheSize.of((7,) * 3, 10, ratio=0.3).slots.tolist() == [3, 3, 3]


def test_none_is_none():
    """A calibration fills nothing, so every visit of an expert is a miss."""
    system = compose("on-demand", cache="none")
    planner = plan_of(shape(), system, slots=4, calibration=np.ones((1, 4)))
    _, timeline = run(planner, steps([routed(0, 1)], [routed(0, 1)]))
    # Dense part 0-2, copy 2-6, product 6-7; then the same again.
    assert spans(timeline, "fetch") == [("h2d0", 1, 2, 6), ("h2d0", 1, 9, 13)]
