"""One layer step after its dense part: plan, launch, compute, join (design §5).

The order is a contract. It is written as a generator: each wait that it yields ends
before it goes on, in virtual or in real seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from moesim.engine.dispatch import Dispatch
from moesim.engine.lanes import Op
from moesim.engine.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Generator

    from moesim.engine.world import World
    from moesim.policies.planner.planner import Planner
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.schema import Phase


class LayerStep(Generic[Op]):
    """Walks through layer steps in one world, asking one planner.

    Attributes:
        transfers: copies and reads under way.
        dispatch: products under way.
    """

    def __init__(self, world: World[Op], planner: Planner) -> None:
        self._world = world
        self._planner = planner
        self.transfers = Transfers(world, planner)
        self.dispatch = Dispatch(world, self.transfers, planner)

    def run(
        self, routed: RoutedLayer, step: int, phase: Phase, batch: int
    ) -> Generator[Any, None, None]:
        """Run one layer step.

        Args:
            routed: what the gate chose.
            step: forward pass.
            phase: prefill or decode.
            batch: group of sequences.

        Yields:
            What must end before the layer step goes on.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        world = self._world
        planner = self._planner
        transfers = self.transfers

        # Routing and planning. Nothing starts meanwhile: what the plan saw must hold.
        with world.exclusive():
            transfers.begin_decisions(routed.layer, routed.experts)
            now_s = world.now_s()
        plan = planner.plan(routed, step, phase, now_s, batch)
        yield from world.planned(plan)

        # Lanes work.
        world.launching(plan)
        with world.exclusive():
            for gpu, expert in plan.promoted:
                transfers.promote(gpu, routed.layer, expert)
            for copies in plan.copies:
                transfers.enqueue(copies, step)
            cpu_used = self.dispatch.begin(plan)
            transfers.end_decisions()
        yield world.all_computed()

        # Results join, holds are released, and the cache may replace what it likes.
        yield from world.joined(plan, cpu_used=cpu_used)
        with world.exclusive():
            for copies in planner.complete(plan, world.now_s()):
                transfers.enqueue(copies, step)
            world.offer()
            world.end_layer()

    def foretell(self, step: RoutedStep, token: int, draft_s: float) -> None:
        """Queue what a token that was just drafted makes a policy prefetch.

        Args:
            step: the forward pass that will verify it.
            token: that the draft has read, counted from the first of the pass.
            draft_s: seconds that a drafted token takes.
        """
        world = self._world
        experts = np.stack([routed.routing[token] for routed in step.layers])
        with world.exclusive():
            for copies in self._planner.foretell(experts, draft_s, world.now_s()):
                self.transfers.enqueue(copies, step.step)
            world.offer()
