"""Observers see every answer and change none."""

import numpy as np
import pytest

from moesim.policies.base import CachePolicy
from moesim.policies.planner.observers import observed_policy
from moesim.policies.registry import resolve


class Heard:
    """Keeps what it is told."""

    def __init__(self):
        self.calls = []

    def reported(self, call, arguments, answer):
        self.calls.append((call, *[list(each) for each in (*arguments, answer)]))


def test_an_observer_is_told_question_and_answer():
    heard = Heard()
    policy = observed_policy(resolve("random", "cache"), heard, ("precedence",))
    answer = policy.precedence(np.array([4, 2]))
    assert heard.calls == [("precedence", [4, 2], list(answer))]


def test_the_policy_itself_is_not_observed():
    heard = Heard()
    plain = resolve("random", "cache")
    observed_policy(plain, heard, ("precedence",))
    plain.precedence(np.array([4, 2]))
    assert heard.calls == []


@pytest.mark.parametrize("spec", ["lru", "lfu:decay=0.9", "belady", "workload-window"])
def test_an_observed_policy_looks_like_the_policy(spec):
    """Planners ask for properties, and for what a class overrides."""
    plain = resolve(spec, "cache")
    watched = observed_policy(plain, Heard(), ("victims",))
    assert isinstance(watched, type(plain))
    assert (watched.needs, watched.oracle) == (plain.needs, plain.oracle)
    for name in ("admits", "precedence"):
        overrides = getattr(type(plain), name) is not getattr(CachePolicy, name)
        assert overrides == (
            getattr(type(watched), name) is not getattr(CachePolicy, name)
        )
