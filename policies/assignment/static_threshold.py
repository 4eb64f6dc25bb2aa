"""The static threshold: one comparison per expert, independent of the others."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal

from moesim.policies.assignment._placing import SpreadAssignment
from moesim.policies.parameters import expect, expect_choice

if TYPE_CHECKING:
    from moesim.policies.arrays import Ints
    from moesim.policies.base import MachineView, Work

Rule = Literal["max", "sum"]


class StaticThreshold(SpreadAssignment):
    """Compute an expert on the GPU where that alone is no slower than on the CPU, ties
    to the GPU.

    Fiddler minimises the *sum* of all experts' times, which is this independent
    comparison; the lanes' loads play no part, so one lane may idle while the other is
    overloaded. With several GPUs the best GPU is compared, and the chosen experts are
    then spread by earliest finish, in ascending id.

    Args:
        rule: cost where the weights must come first: ``max`` of arriving and computing
            (they overlap across experts; the form DALI compares with, and Fiddler's own
            constant is load time alone), or their ``sum`` (Fiddler's serial issue).
        tokens: None compares times. A number replaces them by a workload threshold:
            residents and experts with at least so many tokens run on the GPU (how
            DALI's text describes Fiddler).

    Source: Fiddler, `src/fiddler/mixtral.py` (a search over 2^8 placements by the sum
    of costs).
    """

    calibrates_planning: ClassVar[bool] = True

    def __init__(self, *, rule: Rule = "max", tokens: int | None = None) -> None:
        expect_choice("rule", rule, Rule)
        expect(tokens is None or tokens >= 1, "tokens", "a number >= 1 or none", tokens)
        self.sums = rule == "sum"
        self.least_tokens = tokens or 0

    def assign(self, work: Work, view: MachineView, lanes: Ints, order: Ints) -> int:
        self.allow_all(work, False)
        for i in range(work.active):
            if self._on_gpu(work, i):
                self.allow(work, i)
        self.spread(work, lanes)
        return 0

    def _on_gpu(self, work: Work, i: int) -> bool:
        best_s = inf
        resident = False
        for gpu in range(work.gpus):
            wait_s = work.arrive_s[gpu, i]
            compute_s = work.gpu_s[gpu, i]
            best_s = min(
                best_s, wait_s + compute_s if self.sums else max(wait_s, compute_s)
            )
            resident = resident or wait_s == 0.0
        if self.least_tokens:
            return resident or work.tokens[i] >= self.least_tokens
        if self.sums:
            return best_s <= work.host_s[i] + work.cpu_s[i]
        return best_s <= max(work.host_s[i], work.cpu_s[i])
