"""Base of caches whose every answer is a kernel."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import IN_FLIGHT, RESIDENT, CachePolicy, ExpertKey, Swap
from moesim.policies.kernels import kernel_work, own

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.base import LayerWork, MachineView, RunContext
    from moesim.policies.kernels import CacheKernels


class CompiledCache(CachePolicy):
    """Answers with the kernels that a subclass brings, in every engine.

    Attributes:
        replaces: whether it brings a kernel for copies of its own.
    """

    replaces: bool = False

    @abstractmethod
    def bring(self, context: RunContext) -> CacheKernels:
        """Make the state of one run, and name the kernels."""

    def start(self, context: RunContext) -> None:
        """Take what the subclass brings."""
        self._brought = self.bring(context)

    def kernels(self) -> CacheKernels:
        """The same in compiled runs."""
        return self._brought

    def accessed(self, work: LayerWork) -> None:
        """Ask the kernel of this name."""
        self._brought.accessed(self._brought.state, kernel_work(work))

    def admits(self, work: LayerWork, incoming: np.ndarray) -> np.ndarray:
        """Ask the kernel of this name."""
        answers = np.empty(len(incoming), np.bool_)
        known = self._brought.state
        self._brought.admits(known, kernel_work(work), own(incoming), answers)
        return answers

    def precedence(self, incoming: np.ndarray) -> np.ndarray:
        """Ask the kernel of this name."""
        ordered = incoming.copy()
        self._brought.precedence(self._brought.state, ordered)
        return ordered

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Ask the kernel of this name."""
        chosen = np.empty(len(incoming), np.int64)
        known = self._brought.state
        self._brought.victims(known, own(incoming), own(candidates), chosen)
        return chosen

    def admitted(self, keys: np.ndarray) -> None:
        """Ask the kernel of this name."""
        self._brought.admitted(self._brought.state, own(keys))

    def evicted(self, keys: np.ndarray) -> None:
        """Ask the kernel of this name."""
        self._brought.evicted(self._brought.state, own(keys))

    def replacements(self, work: LayerWork, view: MachineView) -> Sequence[Swap]:
        """Ask the kernel of this name."""
        if not self.replaces:
            return ()
        states = np.zeros((view.gpus, view.layers, view.experts), np.int8)
        for gpu in range(view.gpus):
            states[gpu, work.layer][view.in_flight(work.layer, gpu)] = IN_FLIGHT
            states[gpu, work.layer][view.resident(work.layer, gpu)] = RESIDENT
        outgoing = np.empty(view.layers * view.experts, np.int64)
        incoming = np.empty(view.layers * view.experts, np.int64)
        count = self._brought.replacements(
            self._brought.state,
            kernel_work(work),
            states.reshape(view.gpus, -1),
            outgoing,
            incoming,
        )
        pairs = zip(outgoing[:count].tolist(), incoming[:count].tolist(), strict=True)
        return [
            Swap(
                ExpertKey(*divmod(leaving, view.experts)),
                ExpertKey(*divmod(entering, view.experts)),
            )
            for leaving, entering in pairs
        ]


class AdmittingCompiledCache(CompiledCache):
    """As `CompiledCache`, of kernels that admit everything in launch order: nobody asks
    then.
    """

    admits = CachePolicy.admits
    precedence = CachePolicy.precedence
