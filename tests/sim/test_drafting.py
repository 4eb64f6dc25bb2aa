"""What a drafted token takes, by hand."""

import numpy as np
from support.handmade import HandCosts, plan_of, shape

from moesim.policies.systems import System
from moesim.sim.results import draft_seconds


def test_a_drafted_token_passes_the_head_and_each_layers_dense_part_and_experts():
    """Head 0.5; three layers of 2 and as many experts of 1 as a token chooses, or as the
    system says.
    """
    costs = HandCosts(gpu=1.0, dense=2.0, head=0.5)
    for named, token_s in ((0, 12.5), (1, 9.5)):
        system = System("on-demand", draft_experts=named)
        planner = plan_of(shape(layers=3, top_k=2), system, costs, slots=2)
        drafted = draft_seconds(costs, planner, np.array([4, 9]))
        assert drafted.tolist() == [token_s, token_s]
