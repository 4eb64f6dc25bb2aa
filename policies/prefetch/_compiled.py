"""Base of prefetch policies whose answer is a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from moesim.policies.assignment._gpu_choice import first_cpu_s, gpu_state
from moesim.policies.base import IN_FLIGHT, RESIDENT, ExpertKey, PrefetchPolicy
from moesim.policies.kernels import KernelView, kernel_work
from moesim.traces.predictions import tallies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import Future, LayerWork, MachineView, RunContext
    from moesim.policies.kernels import PrefetchKernels, Work

_NO_ROUTING = np.empty((0, 0), np.uint16)
_NO_TABLE = np.empty((0, 0))


class CompiledPrefetch(PrefetchPolicy):
    """Answers with the kernel that a subclass brings, in every engine.

    A subclass sets `brought` when it knows all of the kernel's state: in `__init__`, or
    in `start`.

    Attributes:
        brought: the kernel and its state.
        ahead: coming layers whose experts' states the kernel reads.
        weighs_costs: whether it reads seconds: of the machine, and of the layer step on
            each of several GPUs.
    """

    brought: PrefetchKernels
    ahead: int = 1
    weighs_costs: ClassVar[bool] = False
    _future: Future | None = None
    _last: LayerWork | None = None

    def start(self, context: RunContext) -> None:
        """Keep the future, which only oracles are given."""
        self._future = context.future

    def kernels(self) -> PrefetchKernels | None:
        """The same in compiled runs."""
        return self.brought

    def prefetch(self, work: LayerWork, view: MachineView) -> Sequence[ExpertKey]:
        """Ask the kernel."""
        named = np.empty(view.layers * view.experts, np.int64)
        count = self.brought.prefetch(
            self.brought.state,
            self._work(work, view),
            self._view(work, view),
            named,
        )
        keys = named[:count].tolist()
        return [ExpertKey(*divmod(key, view.experts)) for key in keys]

    def _work(self, work: LayerWork, view: MachineView) -> Work:
        kernel = kernel_work(work)
        if not self.weighs_costs:
            return kernel
        return kernel._replace(
            # A copy, as shared arrays are read-only.
            gpu_state=gpu_state(work, view).copy(),
            first_cpu_s=first_cpu_s(view),
        )

    def _view(self, work: LayerWork, view: MachineView) -> KernelView:
        end = min(view.layers, work.layer + 1 + self.ahead)
        # Copies of masks, layer by layer: a view has no flat array to give.
        states = np.zeros((view.gpus, view.layers, view.experts), np.int8)
        for gpu in range(view.gpus):
            for layer in range(work.layer + 1, end):
                states[gpu, layer][view.in_flight(layer, gpu)] = IN_FLIGHT
                states[gpu, layer][view.resident(layer, gpu)] = RESIDENT
        workload, score_sums = tallies(
            work.predicted, self.needs, work.routing.shape[1], view.experts
        )

        routing = before = _NO_ROUTING
        if self.reads_routing:
            routing, before = self._routing(work)
        coming, edges = self._coming(work, view.layers)
        copy_s = np.empty(0)
        cpu_s = gpu_s = _NO_TABLE
        if self.weighs_costs:
            layers = range(view.layers)
            tokens = np.arange(1 + int(workload.max(initial=0)))
            copy_s = np.array([view.copy_s(layer) for layer in layers])
            cpu_s = np.zeros((view.layers, len(tokens)))
            gpu_s = np.zeros((view.layers, len(tokens)))
            for layer in range(work.layer + 1, end):
                cpu_s[layer] = view.cpu_s(layer, tokens)
                gpu_s[layer] = view.gpu_s(layer, tokens)
        return KernelView(
            states.reshape(view.gpus, -1),
            routing,
            before,
            workload,
            score_sums,
            coming,
            edges,
            copy_s,
            cpu_s,
            gpu_s,
            view.link_wait_s() if self.weighs_costs else 0.0,
            view.gap_s if self.weighs_costs else 0.0,
        )

    def _routing(self, work: LayerWork) -> tuple[np.ndarray, np.ndarray]:
        """Experts of every token, in this layer and the one before in its pass."""
        last = self._last
        self._last = work
        routing = np.array(work.routing, np.uint16)
        follows = (
            last is not None and last.step == work.step and last.layer + 1 == work.layer
        )
        if not follows:
            return routing, _NO_ROUTING
        assert last is not None
        return routing, np.array(last.routing, np.uint16)

    def _coming(self, work: LayerWork, layers: int) -> tuple[np.ndarray, np.ndarray]:
        """Active experts of the coming layers of this pass, and where each begins."""
        following = layers - 1 - work.layer
        edges = np.zeros(following + 1, np.int64)
        if self._future is None or not following:
            return np.empty(0, np.int32), edges
        active = [
            self._future.active(work.step, work.layer + 1 + n) for n in range(following)
        ]
        edges[1:] = np.cumsum([len(experts) for experts in active])
        return np.concatenate(active).astype(np.int32), edges
