"""One layer step after its dense part: plan, launch, compute, join.

The order is a contract. It is written as a generator: each wait that it yields ends
before it goes on, in virtual or in real seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from moesim.engine.lanes import Op, gpu_of_lane
from moesim.engine.transfers import Transfers
from moesim.hwprofiles.lanes import CPU as CPU_LANE
from moesim.policies.names import RESIDENT

if TYPE_CHECKING:
    from collections.abc import Generator

    from moesim.engine.lanes import World
    from moesim.policies.planner.plan import Plan
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


class Dispatch(Generic[Op]):
    """Hands the experts of a plan to their lanes and counts those that have ended.

    Attributes:
        pending: products of the layer step that have not ended.
        fetched: fetched experts that the CPU of a serial plan still waits for.
    """

    def __init__(
        self, world: World[Op], transfers: Transfers[Op], planner: Planner
    ) -> None:
        self.pending = 0
        self.fetched = 0
        self._world = world
        self._planner = planner
        self._transfers = transfers
        self._report = transfers.report
        self._cpu = world.lanes.index(CPU_LANE.lane())
        self._gpu_of = [gpu_of_lane(lane) for lane in world.lanes]
        self._gpu_memory = [level.memory for level in planner.gpu]
        self._limited_host = planner.host is not None
        # Where host memory holds everything, its products have nothing to let go of.
        self._computed_on_cpu = self._computed if self._limited_host else self._count
        # GPU products that wait until every copy of the layer has landed.
        self._barred: list[Op] | None = None
        self._held: list[Op] = []  # what the CPU of a serial plan will start with
        # (layer, expert) -> product that nobody awaits yet: ahead of its gate, or one
        # whose result joins in the next layer step.
        self._unawaited: dict[tuple[int, int], Op] = {}
        self._deferred: list[tuple[int, int]] = []  # what the next layer step awaits

    def begin(self, plan: Plan) -> bool:
        """Queue what can be computed now; the rest follows its landing.

        Returns:
            Whether the CPU has a part in this layer step.
        """
        work = plan.work
        awaited = self._deferred
        self._deferred = [(work.layer, expert) for expert in plan.deferred]
        if work.precomputed is not None:
            experts = work.experts[work.precomputed].tolist()
            awaited += [(work.layer, expert) for expert in experts]
        for place in awaited:
            self._await(place)
        # They are the CPU's, ended or not.
        cpu_used = bool(awaited)
        if plan.waits:
            self._barred = []
        cpu_used |= self._queue_products(plan)
        if not self._barred:
            # Nobody waits, so the layer step may end before its copies have landed.
            self._barred = None
        else:
            self._transfers.when_all_on_gpu(work.layer, self._open)
        if self._held and not self.fetched:
            self._release_held()
        if plan.precompute is not None:
            self._begin_precomputes(plan)
        if plan.dense_parts:
            self._begin_predictions(plan)
        if not self.pending:
            self._world.computed(None)
        return cpu_used

    def _queue_products(self, plan: Plan) -> bool:
        """Queue the layer step's products in launch order; whether the CPU has one."""
        # Nothing lands or ends while products are queued. So they may be counted
        # afterwards, and where nothing is on its way none of them waits.
        count = 0
        cpu_used = False
        cpu = self._cpu
        transfers = self._transfers
        submit = self._world.submit
        start_on_cpu = submit if transfers.all_read else transfers.when_in_host_memory
        start_on_gpu = transfers.when_on_gpu
        gpu_of = self._gpu_of
        # A serial plan counts what the planner has not heard of yet as fetched.
        waits = plan.serial or self._barred is not None
        deferred = plan.deferred
        all_on_gpu = transfers.all_copied and not waits
        for product in self._world.computes(plan):
            count += 1
            if product.lane == cpu:
                cpu_used = True
                product.on_end = self._computed_on_cpu
                if deferred and product.expert in deferred:
                    count -= 1
                    self._leave_unawaited(product)
                if plan.serial:
                    self._held.append(product)
                else:
                    start_on_cpu(product)
                continue
            product.on_end = self._computed
            if all_on_gpu:
                submit(product)
            elif waits:
                self._hold_back(product, serial=plan.serial)
            else:
                start_on_gpu(gpu_of[product.lane], product)
        self.pending += count
        return cpu_used

    def _hold_back(self, product: Op, *, serial: bool) -> None:
        """Start a product once its expert is there, or all experts of its layer are.

        The CPU of a serial plan waits for those that are fetched.
        """
        gpu = self._gpu_of[product.lane]
        if (
            serial
            and self._gpu_memory[gpu].state[product.layer, product.expert] != RESIDENT
        ):
            self.fetched += 1
            product.on_end = self._fetched_computed
        if self._barred is None:
            self._transfers.when_on_gpu(gpu, product)
        else:
            self._barred.append(product)

    def _open(self) -> None:
        """Start the GPU products that waited for all copies of their layer."""
        barred = self._barred or []
        self._barred = None
        for product in barred:
            self._transfers.when_on_gpu(self._gpu_of[product.lane], product)

    def _begin_predictions(self, plan: Plan) -> None:
        """Queue what predicts, on the GPU's lane behind the products of residents."""
        for prediction in self._world.predictions(plan):
            self.pending += 1
            prediction.on_end = self._predicted
            self._transfers.begin_prediction()
            self._world.submit(prediction)

    def _begin_precomputes(self, plan: Plan) -> None:
        """Queue products of the next layer's experts, after this layer's own."""
        for product in self._world.precomputes(plan):
            self._leave_unawaited(product)
            self._world.submit(product)

    def _leave_unawaited(self, product: Op) -> None:
        """Let a product go on by itself until a later layer step awaits it."""
        product.on_end = self._unawaited_ended
        self._unawaited[product.layer, product.expert] = product

    def _await(self, place: tuple[int, int]) -> None:
        """Count a product of an earlier layer step, unless it has ended."""
        product = self._unawaited.pop(place, None)
        if product is not None:
            product.on_end = self._awaited_ended
            self.pending += 1

    def _unawaited_ended(self, product: Op) -> None:
        """Let go of a product that nobody has awaited yet."""
        # A wrong guess of an earlier step may end after its successor has begun.
        place = product.layer, product.expert
        if self._unawaited.get(place) is product:
            del self._unawaited[place]
        self._report(self._planner.unawaited_ended, *place)

    def _awaited_ended(self, product: Op) -> None:
        place = product.layer, product.expert
        self._report(self._planner.unawaited_ended, *place)
        self._count(product)

    def _predicted(self, prediction: Op) -> None:
        """Let prefetches start, now that the prediction they follow is there."""
        self._transfers.end_prediction()
        self._count(prediction)

    def _computed(self, product: Op) -> None:
        """Let go of the weights, then count the product."""
        gpu = self._gpu_of[product.lane]
        # Where nothing is staged there is nothing to let go of.
        if self._gpu_memory[gpu].staged_total if gpu >= 0 else self._limited_host:
            self._report(self._planner.computed, gpu, product.layer, product.expert)
        # As `_count`, whose call would be made for every product.
        self.pending -= 1
        if not self.pending:
            self._world.computed(product)

    def _fetched_computed(self, product: Op) -> None:
        self.fetched -= 1
        if not self.fetched:
            self._release_held()
        self._computed(product)

    def _count(self, product: Op) -> None:
        """Count a product that has ended; the last one ends the lanes' work."""
        self.pending -= 1
        if not self.pending:
            self._world.computed(product)

    def _release_held(self) -> None:
        """Let the CPU of a serial plan begin."""
        held = self._held
        self._held = []
        for product in held:
            self._transfers.when_in_host_memory(product)
