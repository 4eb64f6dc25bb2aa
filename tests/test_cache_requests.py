"""Caches defined one request at a time: worked examples, plain-list models, libCacheSim."""

from __future__ import annotations

import itertools

import pytest
from cache_driver import drive, one_by_one

from policies.cache.arc import ARC
from policies.cache.fifo import FIFO
from policies.cache.lecar import LeCaR
from policies.cache.lifo import LIFO

UNIT_STRING = [5, 2, 4, 2, 1, 3, 1, 5, 3, 5, 1, 3, 1, 4, 3, 5, 1, 4]


class AlternatingLeCaR(LeCaR):
    """The draws of the worked example: .25, .75, .25, ..."""

    def start(self, context):
        super().start(context)
        self.draw = itertools.cycle((0.25, 0.75)).__next__


@pytest.mark.parametrize(
    ("policy", "hits", "evicted"),
    [
        (FIFO(), 10, None),
        (LIFO(), 4, [4, 1, 3, 1, 3, 1, 3, 1, 4, 3, 1]),
        (ARC(), 7, [5, 4, 3, 2, 5, 1, 4, 3]),
        (AlternatingLeCaR(), 6, [5, 1, 4, 3, 2, 5, 1, 4, 3]),
    ],
    ids=["fifo", "lifo", "arc", "lecar"],
)
def test_section_5_5_unit_string(policy, hits, evicted):
    run = drive(policy, one_by_one(UNIT_STRING), 3)
    assert run.hits == hits
    if evicted is not None:
        assert run.evicted == evicted
    if isinstance(policy, ARC):
        assert policy._pools[0].target == 0
    if isinstance(policy, LeCaR):
        assert policy._pools[0].weight_lru == pytest.approx(0.5192, abs=5e-5)
