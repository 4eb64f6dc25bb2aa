"""Observers see every answer and change none."""

import numpy as np
import pytest
from support.cache_driver import context

from moesim.engine.observers import observed_policy
from moesim.policies.registry import resolve


class Heard:
    """Keeps what it is told."""

    def __init__(self):
        self.calls = []

    def reported(self, call, arguments, answer):
        self.calls.append((call, *[list(each) for each in arguments]))


def test_an_observer_is_told_question_and_answer():
    heard = Heard()
    plain = resolve("random", "cache")
    policy = observed_policy(plain, heard, ("victims",))
    policy.start(context([], 2))
    incoming, candidates, chosen = np.array([9]), np.array([4, 2]), np.array([-1])
    policy.victims(incoming, candidates, chosen)
    assert chosen[0] in (4, 2)
    assert heard.calls == [("victims", [9], [4, 2], chosen.tolist())]


def test_the_policy_itself_is_not_observed():
    heard = Heard()
    plain = resolve("random", "cache")
    observed_policy(plain, heard, ("victims",))
    plain.start(context([], 2))
    plain.victims(np.array([9]), np.array([4, 2]), np.array([-1]))
    assert heard.calls == []


@pytest.mark.parametrize("spec", ["lru", "lfu:decay=0.9", "belady", "workload-window"])
def test_an_observed_policy_looks_like_the_policy(spec):
    """Planners ask for its properties, and whether it has an answer of its own."""
    plain = resolve(spec, "cache")
    watched = observed_policy(plain, Heard(), ("victims",))
    for name in ("needs", "oracle", "admits_all", "in_launch_order", "replaces"):
        assert getattr(watched, name) == getattr(plain, name)
