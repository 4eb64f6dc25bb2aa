"""The bound of one replay: its trace, machine and memories, as commands name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.bound.least_time import Bound, least_seconds
from moesim.policies.base import RESIDENT, AssignmentPolicy
from moesim.runs.setup import Setup, trace_of
from moesim.traces.format.batch import compose

if TYPE_CHECKING:
    from moesim.runs.config import RunConfig
    from moesim.traces.format.reader import Trace

# Belady's choice takes microseconds per access in Python; more would delay an answer.
MOST_ACCESSES = 1_000_000


def replay_bound(setup: Setup, trace: Trace) -> Bound | None:
    """Bound what a replay of a trace can reach with its memories on its machine.

    Args:
        setup: of the replay.
        trace: that it walks through.

    Returns:
        The bound; None where the routing policy alters what is asked for.
    """
    policies = setup.policies()
    if policies.routing.alters:
        return None
    planner = setup.planner()
    warm = any((tier.memory.state == RESIDENT).any() for tier in planner.gpu)
    ahead = type(policies.assignment).precompute is not AssignmentPolicy.precompute
    return least_seconds(
        compose(trace, batch=setup.config.batch, steps=setup.config.steps),
        planner.costs,
        setup.memory,
        gpus=setup.profile.gpus,
        # What a limited host memory begins with is not looked at: any content.
        warm=warm or planner.host is not None,
        computes_ahead=ahead,
    )


def bound_of(config: RunConfig) -> Bound | None:
    """Bound a replay by its configuration.

    Returns:
        The bound; None where routing is altered, where times are drawn (a lucky run may
        be faster than mean costs allow), or where the trace is too long to bound while
        somebody waits.
    """
    trace = trace_of(config)
    shape = trace.shape
    tokens = trace.rows / shape.layers
    if config.steps is not None:
        tokens = min(tokens, config.steps * config.batch)
    accesses = tokens * shape.layers * shape.top_k
    too_long = accesses > MOST_ACCESSES
    # It holds for a batch that is there from the beginning.
    is_other = config.noise_seed is not None or config.arrivals is not None
    if too_long or is_other:
        return None
    return replay_bound(Setup.of(config, trace), trace)
