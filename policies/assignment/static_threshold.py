"""The static threshold: one comparison per expert, independent of the others."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from moesim.machine_code import types as nb
from moesim.machine_code.functions import compiled
from moesim.policies.assignment._kernels import ascending, launch, spread
from moesim.policies.compiled import CompiledAssignment
from moesim.policies.kernels import (
    ASSIGN,
    EXPERT_IDS,
    SECONDS,
    SECONDS_BY_GPU,
    AssignmentKernels,
    State,
    Work,
    state,
)
from moesim.policies.parameters import expect, expect_choice

Rule = Literal["max", "sum"]


@compiled(
    nb.boolean[::1](
        EXPERT_IDS,
        SECONDS,
        SECONDS,
        SECONDS_BY_GPU,
        SECONDS_BY_GPU,
        nb.boolean,
        nb.int64,
    )
)
def _on_gpu(
    loads: np.ndarray,
    cpu_s: np.ndarray,
    host_s: np.ndarray,
    gpu_s: np.ndarray,
    arrive_s: np.ndarray,
    sums: bool,
    threshold: int,
) -> np.ndarray:
    """Which experts run on a GPU, bool [A]; a negative threshold compares times."""
    result = np.zeros(len(loads), np.bool_)
    for i in range(len(loads)):
        best_s = np.inf
        resident = False
        for g in range(len(gpu_s)):
            wait_s = arrive_s[g, i]
            seconds = wait_s + gpu_s[g, i] if sums else max(wait_s, gpu_s[g, i])
            best_s = min(best_s, seconds)
            resident |= wait_s == 0.0
        if threshold >= 0:
            result[i] = loads[i] >= threshold or resident
        elif sums:
            result[i] = best_s <= host_s[i] + cpu_s[i]
        else:
            result[i] = best_s <= max(host_s[i], cpu_s[i])
    return result


@compiled(ASSIGN)
def _assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> bool:
    chosen = _on_gpu(
        work.tokens,
        work.cpu_s,
        work.host_s,
        work.gpu_s,
        work.arrive_s,
        state.integers[0] != 0,
        state.integers[1],
    )
    anywhere = np.ones((0, 0), np.bool_)
    result = spread(chosen, anywhere, work.gpu_s, work.arrive_s, work.link_s)
    launch(lanes, order, result, ascending(len(lanes)))
    return False


class StaticThreshold(CompiledAssignment):
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
        self._rules = (rule == "sum", -1 if tokens is None else tokens)
        rules = [rule == "sum", -1 if tokens is None else tokens]
        self.brought = AssignmentKernels(_assign, state(integers=rules))
