"""The decision and the whole planning of one layer step, in microseconds of CPU
time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.at_once import carry_out
from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies.delegating import DelegatingAssignment
from moesim.policies.registry import names
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import compose
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import Phase
from moesim.traces.models import model_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work

REPEATS = 2000


def best_s(
    function: Callable[[], object], repeats: int = REPEATS, rounds: int = 7
) -> float:
    """Median over rounds of the mean CPU seconds of one call."""
    means = []
    for _ in range(rounds):
        begin_s = time.process_time()
        for _ in range(repeats):
            function()
        means.append((time.process_time() - begin_s) / repeats)
    return float(np.median(means))


def planner(assignment: str, slots: int = 32) -> Planner:
    """A planner for Qwen3-30B-A3B on the default machine."""
    shape = model_shape("qwen3-30b-a3b")
    size = CacheSize.of(shape.expert_bytes, shape.experts, slots_per_layer=slots)
    policies = compose(assignment, cache="lru").build(gpus=1, host_cache=None)
    return Planner(
        shape,
        Costs(load_profile("rtx3090-epyc7532"), shape),
        policies,
        MemoryPlan(size),
    )


def forward_passes(active: int, count: int, seed: int = 0) -> list[RoutedStep]:
    """Random decode passes of 48 layers with `active` active experts each."""
    layers = layer_steps(active, 48 * count, seed)
    return [
        RoutedStep(i, Phase.DECODE, 0, 1, i + 1, 1, layers[48 * i : 48 * (i + 1)])
        for i in range(count)
    ]


def layer_steps(active: int, count: int, seed: int) -> list[RoutedLayer]:
    """Random layer steps, layer after layer."""
    draw = np.random.default_rng(seed)
    found = []
    for i in range(count):
        experts = np.sort(draw.choice(128, active, replace=False)).astype(np.int32)
        tokens = draw.integers(1, 2 if active == 8 else 12, active).astype(np.int32)
        predicted = {"pred1_raw": draw.random((1, 128)).astype(np.float16)}
        found.append(
            RoutedLayer(
                i % 48,
                experts,
                tokens,
                experts.astype(np.uint16)[None],
                None,
                None,
                predicted,
            )
        )
    return found


class KeepingQuestion(DelegatingAssignment):
    """Keeps what the policy was asked last."""

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        """Keep and pass on."""
        self.question = (work, view, lanes, order)
        return super().assign(*self.question)


def decision_s(assignment: str, active: int, *, slow: bool = False) -> float:
    """One `assign` of an assignment policy at so many active experts."""
    book = planner(assignment)
    rule = book.assignment
    kept = KeepingQuestion(rule)
    book.assignment = kept
    book.put(book.block_of(forward_passes(active, 1)[0]))
    book.plan(0, 0.0)
    question = kept.question
    repeats = 2 if slow else REPEATS // (4 if active > 8 else 1)
    if active > 8 and assignment.startswith("exact"):
        repeats = 40
    return best_s(lambda: rule.assign(*question), repeats, rounds=3 if slow else 7)


def planning_s(assignment: str, active: int) -> float:
    """Median CPU seconds of `Planner.plan` alone, over layer steps with misses, victims
    and landings.
    """
    book = planner(assignment)
    passes = forward_passes(active, 20 if active <= 8 else 5)
    spent: list[float] = []
    for round_ in range(4):
        total = 0.0
        for step in passes:
            book.put(book.block_of(step))
            for layer in range(48):
                begin_s = time.process_time()
                book.plan(layer, 0.0)
                total += time.process_time() - begin_s
                carry_out(book, 0.0)
        if round_:
            spent.append(total / (48 * len(passes)))
    return float(np.median(spent))


SLOW = {"ilp"}
"""Solvers that take milliseconds: fewer repeats."""


def every_assignment() -> None:
    """Print the decision of each registered assignment policy, microseconds at 8, 32
    and 128 active experts.
    """
    print(
        "one decision of every assignment policy, microseconds (HiGHS and CBC:"
        " milliseconds' worth)"
    )
    specs = [name for name in names("assignment") if name != "ilp"] + [
        "ilp:solver=highs",
        "ilp:solver=cbc",
    ]
    for spec in specs:
        slow = spec.partition(":")[0] in SLOW
        cells = [decision_s(spec, active, slow=slow) * 1e6 for active in (8, 32, 128)]
        print(f"  {spec:24}" + "".join(f"{cell:11.1f}" for cell in cells))


def report() -> None:
    """Print the figures beside their targets."""
    print("planning (Qwen3-30B-A3B shape, 32 slots per layer; microseconds)")
    for active, limit in ((8, 3), (128, 10)):
        print(
            f"  greedy decision alone, {active:3} active:"
            f" {decision_s('greedy', active) * 1e6:6.2f}  (target {limit})"
        )
    for assignment in ("greedy", "on-demand"):
        for active, limit in ((8, 25), (128, 120)):
            spent_us = planning_s(assignment, active) * 1e6
            print(
                f"  whole planning, {assignment:9}, {active:3} active: {spent_us:6.1f} "
                f" (target {limit})"
            )
    every_assignment()
