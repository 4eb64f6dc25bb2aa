"""What the lanes compute in one layer step: now, when the weights land, after the GPU,
or ahead of the gate.

The counterpart of `sim/dispatch.py`. Two things exist only here. Products ahead of the
gate are made for certain tokens: a token that needs a started expert without having
been predicted for it is served in the expert's own layer, on its own input. And weights
have a place: before the planner's word gives a place away, whoever still computes with
what lies there finishes, even if nobody will use the product.

Between two layer steps products ahead run where the CPU lane has a thread that is free:
its own, or the control thread, which waits. Where that thread also runs the model (one
core for everything), they begin with the next layer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from moesim.policies.base import CPU, RESIDENT
from moesim.policies.planner.plan import FETCH
from moesim.runtime.executor.operations import Compute, Early, Share

if TYPE_CHECKING:
    from moesim.policies.planner.plan import Copies, Plan
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.executor.executor import Executor
    from moesim.runtime.executor.operations import Job
    from moesim.runtime.executor.transfers import Transfers


class Computes:
    """Hands the experts of a plan to their lanes.

    Args:
        owner: whose run it is.
        planner: whose books say what is where.
        transfers: know what is on its way.
        cpu: index of the CPU lane.
        gpu: index of the GPU lane.

    Attributes:
        running: products ahead of the gate that are queued or being made; changed with
            the lanes' lock held.
    """

    def __init__(
        self,
        owner: Executor,
        planner: Planner,
        transfers: Transfers,
        cpu: int,
        gpu: int,
    ) -> None:
        self.running: list[Early] = []
        self._owner = owner
        self._planner = planner
        self._transfers = transfers
        self._cpu = cpu
        self._gpu = gpu
        self._begun: dict[
            int, Early
        ] = {}  # key -> made ahead for the layer step to come
        self._now: list[Early] = []  # made ahead for the layer step under way
        self._held: list[Compute] = []  # what a serial plan's CPU will begin with

    def dispatch(self, job: Job, plan: Plan) -> None:
        """Queue copies, then what can be computed now; the rest follows its landing.
        One hand-off for all of it.
        """
        owner = self._owner
        work = plan.work
        lanes = owner.lanes
        layer = work.layer
        job.results = [None] * len(work.experts)
        computes = self._computes(job, plan)
        if plan.ahead is not None or any(compute.on_cpu for compute in computes):
            owner.hand_to_cpu(job, layer)
        early = self._ahead(job, plan)
        self.make_way(plan.copies)
        on_gpu = self._planner.gpu[0].memory.state[layer]
        owner.job = job
        with lanes.lock:
            owner.places.free_staging = plan.staging_slots[0]
            self._transfers.vacate(plan.copies)
            for copies in plan.copies:
                self._transfers.enqueue(copies, work.step)
            job.pending = len(computes)
            for share in job.shares:
                if not share.early.done:
                    share.early.awaited = job
                    job.pending += 1
            for compute in computes:
                if compute.on_cpu:
                    owner.host.use(compute.key)
                    self._held.append(compute)
                else:
                    compute.fetched = plan.serial and on_gpu[compute.expert] != RESIDENT
                    job.fetched += compute.fetched
                    self._transfers.when_landed(compute.key, compute)
            if not job.fetched:
                self._release()
            for one in early:
                owner.host.use(one.key)
                self.running.append(one)
                lanes.submit(one)
            owner.host.thaw()

    def make_way(self, copies: list[Copies]) -> None:
        """Before anything is read, wait for products in vain whose weights have left
        host memory by the books.
        """
        host = self._planner.host
        if (
            host is None
            or not self.running
            or not any(True in one.read for one in copies)
        ):
            return
        state = host.memory.state.reshape(-1)
        leaving = [one for one in self.running if state[one.key] != RESIDENT]
        self._owner.lanes.control.serve(lambda: all(one.done for one in leaving))

    def complete(self) -> None:
        """Note that the layer step has joined: what was computed ahead for it is over.
        With the lock held.
        """
        for one in self._now:
            one.over = True
            if one.done:
                self._owner.host.unuse(one.key)
        self._now.clear()

    def fetched_computed(self) -> None:
        """Count a fetched expert home; the last one lets the CPU of a serial plan
        begin. With the lock held.
        """
        job = self._owner.job
        job.fetched -= 1
        if not job.fetched:
            self._release()

    def _release(self) -> None:
        """Let the CPU begin, with each expert once it is in host memory."""
        for compute in self._held:
            self._transfers.when_read(compute.key, compute)
        self._held.clear()

    def _computes(self, job: Job, plan: Plan) -> list[Compute]:
        """One product per active expert, in launch order, but for what has been
        computed ahead.
        """
        work = plan.work
        experts = work.experts.tolist()
        codes = plan.lanes.tolist()
        staged = {
            expert
            for c in plan.copies
            if c.kind == FETCH
            for expert, yes in zip(c.experts, c.staged, strict=True)
            if yes
        }
        started = None if work.started is None else work.started.tolist()
        begun = self._begun
        self._begun = {}
        self._now = list(begun.values())
        found = []
        for place in plan.order:
            expert = experts[place]
            on_cpu = codes[place] == CPU
            only = None
            if started is not None and started[place]:
                missing = _share(
                    job, place, begun[work.layer * self._owner.experts + expert]
                )
                if not len(missing):
                    continue
                only = torch.from_numpy(missing)
            lane = self._cpu if on_cpu else self._gpu
            compute = Compute(
                self._owner,
                lane,
                work.step,
                work.layer,
                expert,
                place,
                on_cpu=on_cpu,
                staged=expert in staged,
            )
            compute.only = only
            found.append(compute)
        return found

    def _ahead(self, job: Job, plan: Plan) -> list[Early]:
        """Products of the next layer's experts, for the tokens that were predicted to
        need them.
        """
        ahead = plan.ahead
        work = plan.work
        if ahead is None:
            return []
        found = []
        for expert, tokens in zip(
            ahead.experts.tolist(), ahead.tokens.tolist(), strict=True
        ):
            if ahead.routing is None:
                rows = np.arange(min(tokens, len(job.hidden)))
            else:
                rows = np.flatnonzero((ahead.routing == expert).any(axis=1))
            one = Early(
                self._owner,
                self._cpu,
                work.step,
                work.layer + 1,
                expert,
                job.hidden_cpu,
                rows,
            )
            self._begun[one.key] = one
            found.append(one)
        return found


def _share(job: Job, place: int, early: Early) -> np.ndarray:
    """Note what a product made ahead has for the tokens routed to its expert.

    Returns:
        The tokens for which it has nothing, int64, ascending.
    """
    tokens = job.tokens_of(place)
    from_end = tokens - len(job.hidden)
    at = np.searchsorted(early.tokens, from_end)
    have = np.isin(from_end, early.tokens)
    if have.any():
        job.shares.append(Share(place, early, at, have))
    return tokens[~have]
