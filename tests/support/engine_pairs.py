"""One run in both engines, and whether they answer the same to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moesim.hwprofiles.lanes import lane_names
from moesim.hwprofiles.profile import Contention, HardwareProfile, load_profile
from moesim.hwprofiles.schema import Quantity
from moesim.runs.config import RunConfig
from moesim.runs.replay import simulated
from moesim.runs.setup import Setup, figures_of, trace_of, watts
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.spans import Timeline


def machine(
    *,
    gpus=1,
    slowdown=None,
    shared=(),
    workers=None,
    name="rtx3090-epyc7532",
    numbers=None,
):
    """A shipped machine with other lanes: more GPUs, contention, and one worker for all
    lanes of the kinds that are shared, or a table of workers; `numbers` states some by
    their paths.
    """
    profile = load_profile(name)
    for path, value in (numbers or {}).items():
        profile.numbers[path] = Quantity(value, "assumed", "of a test")
    workers = workers or {lane: (lane,) for lane in lane_names(gpus)}
    if shared:
        taken = [lane for lane in workers if lane.startswith(shared)]
        workers = {k: v for k, v in workers.items() if k not in taken}
        workers["shared"] = tuple(taken)
    profile = replace(profile, workers=workers)
    if slowdown:
        profile.__dict__["contention"] = Contention(slowdown)
    return profile


@dataclass
class Outcome:
    """What one engine answered."""

    result: object
    timeline: Timeline
    metrics: dict
    figures: dict


def outcome(engine, setup, trace, config):
    planner = setup.planner()
    timeline = Timeline(setup.profile.lanes)
    setup = replace(setup, config=config.replaced(engine=engine))
    result, _ = simulated(setup, trace, planner, timeline)
    timeline.close()
    metrics = summarise(timeline, power=watts(setup.profile))
    return Outcome(result, timeline, metrics, figures_of(planner))


def both(trace, policy, **options):
    """The outcomes of SimPy's clock and of the fast one."""
    config = RunConfig.of(trace, policy, **options)
    profile = config.hw if isinstance(config.hw, HardwareProfile) else None
    # Cut into the passes that a configuration, or its system, says.
    trace = trace_of(config)
    setup = Setup.of(config, trace, profile=profile)
    return tuple(outcome(clock, setup, trace, config) for clock in ("simpy", "fast"))


def assert_equal(first, second):
    """Chunks, their rows, metrics and counts of events are the same, bit by bit."""
    for table in ("chunks", "access_chunks", "step_chunks"):
        ours = list(getattr(first.timeline, table)())
        theirs = list(getattr(second.timeline, table)())
        assert len(ours) == len(theirs), table
        for one, other in zip(ours, theirs, strict=True):
            assert list(one) == list(other)
            for name in one:
                assert one[name].dtype == other[name].dtype, (table, name)
                np.testing.assert_array_equal(one[name], other[name], f"{table} {name}")
    assert first.result == second.result
    assert first.metrics == second.metrics
    assert first.figures == second.figures
