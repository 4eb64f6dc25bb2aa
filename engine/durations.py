"""How long operations take, and on which lanes, as a machine's costs say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moesim.engine.transfers import Durations
from moesim.hwprofiles import lanes
from moesim.policies.arrays import view_of

if TYPE_CHECKING:
    from moesim.engine.planner import Planner
    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import HardwareProfile


def durations_of(
    profile: HardwareProfile, planner: Planner, costs: Costs | None = None
) -> Durations:
    """Seconds of operations of a planner's model on a machine, by its costs or others.

    Raises:
        ProfileError: the machine does not say what something takes that may happen.
    """
    costs = costs or planner.costs
    gpus = planner.gpus
    tiered = planner.host is not None
    made = Durations()
    index = profile.lanes.index
    made.control = index(lanes.CONTROL.lane())
    made.ssd = index(lanes.SSD.lane())
    for name, kinds in (
        ("compute", [lanes.CPU.lane(), *lanes.GPU.lanes(gpus)]),
        ("link", lanes.H2D.lanes(gpus)),
        ("back", lanes.D2H.lanes(gpus)),
        ("predicts", lanes.GPU.lanes(gpus)),
    ):
        numbers = np.array([index(lane) for lane in kinds], np.int32)
        setattr(made, name, numbers.data)
    # Planning and products take what decisions see of them.
    plan_s = planner.costs.planning_terms(
        planner.assignment_name, tiered=tiered, own_s=planner.own_planning_s
    )
    made.plan_s = view_of(plan_s, np.float64)
    made.first_op_s = view_of(costs.first_op_terms(tiered=tiered), np.float64)
    made.join_s = view_of(costs.join_terms(tiered=tiered), np.float64)
    made.split_s = costs.split_s
    made.always_split = view_of(planner.always_split, np.uint8)
    made.dispatch_s = costs.dispatch_s
    made.cpu_first_s = costs.cpu_first_s
    made.gpu_first_s = costs.gpu_first_s
    # Where all memory is shared, results need no way back.
    made.moves_activations = not profile.shares_memory
    made.copy_s = np.array(
        [planner.by_key(partial(costs.copy_s, gpu=gpu)) for gpu in range(gpus)]
    ).data
    made.writes_back = planner.policies.writes_back
    if made.writes_back:
        back_s = [
            planner.by_key(partial(costs.writeback_s, gpu=gpu)) for gpu in range(gpus)
        ]
        made.back_s = np.array(back_s).data
    if tiered:
        made.read_s = planner.by_key(costs.read_s).data
        made.first_read_s = costs.ssd_first_s
        made.dense_after_read = costs.after_read("dense")
        made.copy_after_read = costs.after_read("h2d")
        made.compute_after_read = costs.after_read("cpu")
    return made
