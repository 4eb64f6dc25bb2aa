"""The static threshold: one comparison per expert, independent of the others."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from moesim.policies.assignment._gpu_choice import gpu_lanes
from moesim.policies.base import Assignment, AssignmentPolicy, LayerWork, MachineView
from moesim.policies.parameters import expect, expect_choice

Rule = Literal["max", "sum"]


class StaticThreshold(AssignmentPolicy):
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
        self.rule = rule
        self.tokens = tokens

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place each expert by its own comparison, in ascending expert id."""
        del view
        if self.tokens is None:
            combine = np.maximum if self.rule == "max" else np.add
            gpu_s = combine(work.arrive_s, work.gpu_s).min(axis=0)
            on_gpu = gpu_s <= combine(work.host_s, work.cpu_s)
        else:
            resident = (work.arrive_s == 0.0).any(axis=0)
            on_gpu = (work.tokens >= self.tokens) | resident
        return Assignment(gpu_lanes(work, on_gpu))
