"""The bound of one replay: its trace, machine and memories, as commands name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.policies.base import RESIDENT, AssignmentPolicy
from moesim.runs.bound.least_time import Bound, least_seconds
from moesim.runs.setup import Setup, trace_of
from moesim.traces.format.layer_steps import layer_steps

if TYPE_CHECKING:
    from moesim.policies.planner.planner import Planner
    from moesim.runs.config import RunConfig
    from moesim.traces.format.reader import Trace

# Belady's choice takes 0.1 µs per access; more would delay an answer.
MOST_ACCESSES = 10_000_000


def replay_bound(
    setup: Setup, trace: Trace, planner: Planner | None = None
) -> Bound | None:
    """Bound what a replay of a trace can reach with its memories on its machine.

    Args:
        setup: of the replay.
        trace: that it walks through.
        planner: of the replay, before it begins; None to make one.

    Returns:
        The bound; None where the routing policy alters what is asked for, where times
        are drawn (a lucky run may be faster than mean costs allow), where requests
        arrive over time, or where the trace is too long to bound while somebody waits.
    """
    config = setup.config
    if config.noise_seed is not None or config.arrivals is not None:
        return None
    tokens = layer_steps_of(config, trace) * config.batch
    if tokens * trace.shape.top_k > MOST_ACCESSES:
        return None
    planner = setup.planner() if planner is None else planner
    policies = planner.policies
    if policies.routing.alters:
        return None
    warm = any((tier.memory.state == RESIDENT).any() for tier in planner.gpu)
    ahead = type(policies.assignment).precompute is not AssignmentPolicy.precompute
    return least_seconds(
        layer_steps(trace, batch=setup.config.batch, steps=setup.config.steps),
        planner.costs,
        setup.memory,
        gpus=setup.profile.gpus,
        # What a limited host memory begins with is not looked at: any content.
        warm=warm or planner.host is not None,
        computes_ahead=ahead,
    )


def bound_of(config: RunConfig) -> Bound | None:
    """Bound a replay by its configuration; see `replay_bound`."""
    trace = trace_of(config)
    return replay_bound(Setup.of(config, trace), trace)


def layer_steps_of(config: RunConfig, trace: Trace) -> float:
    """Layer steps of a run, about; prompts have fewer."""
    passes = trace.rows / trace.shape.layers / config.batch
    if config.steps is not None:
        passes = min(passes, config.steps)
    return passes * trace.shape.layers
