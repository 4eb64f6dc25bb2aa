"""Assignment against its optimum, and what deciding costs. Costs come from a datasheet
profile of DALI's machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from moesim.analysis.assignment_grades import Grades
from moesim.analysis.gap_mixes import MixReplays
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies.base import AssignmentPolicy
from moesim.policies.registry import resolve
from moesim.policies.systems import System
from moesim.reproduction.experiments.base import Experiment, Workload, percent
from moesim.runs.memory import MemoryOptions
from moesim.traces.format.future import RecordedFuture

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.policies.base import Assignment, LayerWork, MachineView
    from moesim.reproduction.experiments.base import Found, Setting
    from moesim.traces.format.batch import RoutedStep

MACHINE = "rtx3090-epyc7532"
DALI = System(assignment="greedy", cache="workload-window:window=4,swaps=8")
DECODED = 32
"""Decode steps behind DALI's table 4."""
SLOW_EVERY = 97
"""Of so many layer steps one is put to the slow solvers too; prime, so that all layers
have their turn.
"""


def _bench(load: Workload, batch: int, steps: int) -> MixReplays:
    """DALI's greedy and window cache at half of the experts (its figure 12) over the
    first `steps` decode steps.
    """
    profile = load_profile(MACHINE)
    memory = MemoryOptions(cache_ratio=0.5).plan(load.shape, profile, DALI)

    def passes() -> Iterable[RoutedStep]:
        for number, step in zip(range(steps), load.decode(batch=batch), strict=False):
            yield replace(step, step=number)

    return MixReplays(
        load.shape,
        profile,
        Costs(profile, load.shape),
        memory,
        DALI,
        passes,
        RecordedFuture(()),
        seed=load.seed,
    )


def dali_greedy_loss(load: Workload) -> Found:
    """Modelled time that greedy loses to the exact optimum, for the same states of the
    machine.
    """
    batches, lacks = load.batches([16, 32])
    found: Found = {
        f"loss at batch {size}, %": reason for size, reason in lacks.items()
    }
    best = 0.0
    for batch in batches or [1]:
        grades = Grades()
        _bench(load, batch, DECODED).replay_s({}, grades)
        if not grades.least_s:
            found[f"loss at batch {batch}, %"] = (
                f"lacks decode steps of {batch} sequences"
            )
            continue
        found[f"loss at batch {batch}, %"] = percent(
            grades.chosen_s - grades.least_s, grades.chosen_s
        )
        found[f"largest loss of one layer step at batch {batch}, %"] = 100 * (
            1 - 1 / max(grades.modelled)
        )
        best = max(best, percent(grades.least_s, grades.chosen_s))
    if best:
        found["best quality against the optimum, %"] = best
    return found


def _loss_row(metric: str, setting: Setting) -> str:
    if metric == "greedy_quality_vs_optimal_max":
        return "best quality against the optimum, %"
    return f"loss at batch {setting['batch_size']}, %"


@dataclass(slots=True)
class Stopwatch(AssignmentPolicy):
    """Asks greedy, and times what the others would need for the same layer step.

    Attributes:
        policies: row -> policy; the first one's answer is used.
        seldom: rows that are asked about one layer step in `SLOW_EVERY` only.
        seconds: row -> seconds of each decision.
    """

    policies: dict[str, AssignmentPolicy]
    seldom: frozenset[str]
    seconds: dict[str, list[float]]
    layer_steps: int = 0

    def assign(self, work: LayerWork, view: MachineView) -> Assignment:
        """Time all, answer with the first."""
        answers = []
        for name, policy in self.policies.items():
            if name in self.seldom and self.layer_steps % SLOW_EVERY:
                continue
            begin_s = time.perf_counter()
            answers.append(policy.assign(work, view))
            self.seconds[name].append(time.perf_counter() - begin_s)
        self.layer_steps += 1
        return answers[0]


_DECIDERS = {
    "DALI (greedy)": "greedy",
    "HybriMoE (schedule)": "hybrimoe-schedule",
    "optimal plan (ILP)": "ilp",
    "optimal plan (our exact solver)": "exact",
}


def dali_planning_share(load: Workload) -> Found:
    """Decision time measured here over (virtual time without decisions + that)."""
    batches, _ = load.batches([8])
    batch = batches[0] if batches else 1
    policies = {
        name: cast("AssignmentPolicy", resolve(spec, "assignment"))
        for name, spec in _DECIDERS.items()
    }
    watch = Stopwatch(
        policies, frozenset({"optimal plan (ILP)"}), {name: [] for name in policies}
    )
    bench = _bench(load, batch, DECODED)
    working_s = bench.replay_s(
        {"planning": bench.substitutes()["planning"][0]}, observer=watch
    )
    found: Found = {}
    for name, seconds in watch.seconds.items():
        if not seconds:
            found[name] = f"lacks decode steps of {batch} sequences"
            continue
        planning_s = float(np.median(seconds)) * watch.layer_steps
        found[name] = percent(planning_s, working_s + planning_s)
    return found


def _planning_row(metric: str, setting: Setting) -> str | None:
    method = setting["method"]
    if metric == "solve_overhead_share":
        return {"greedy": "DALI (greedy)", "opt_plan": "optimal plan (ILP)"}[method]
    names = {"DALI": "DALI (greedy)", "HybriMoE": "HybriMoE (schedule)"}
    return names[method] if setting["seq_len"] == "Average" else None


EXPERIMENTS = (
    Experiment(
        name="dali-greedy-loss",
        summary="greedy assignment against the optimum (DALI, table 4 and section 4.1)",
        published=(
            ("DALI", "Table 4", "greedy_loss_vs_opt"),
            ("DALI", "4.1", "greedy_quality_vs_optimal_max"),
        ),
        unit="%",
        needs="routing of as many sequences as the batch",
        computes=(
            "Replays 32 decode steps with greedy and the window cache at 50 %; sums the"
            " modelled time of every layer step and that of the exact optimum for the"
            " same state: 1 - optimum / greedy."
        ),
        caveats=(
            (
                "costs are a datasheet profile of DALI's machine, not its measurements;"
                " the loss depends on them"
            ),
            (
                "the paper compares whole runs, in which the optimum also changes later"
                " states"
            ),
            (
                "where sequences are too few, the largest batch there is stands in its"
                " own row"
            ),
        ),
        row=_loss_row,
        run=dali_greedy_loss,
    ),
    Experiment(
        name="dali-planning-share",
        summary="share of the time spent in decisions (DALI, table 6 and section 6.3)",
        published=(
            ("DALI", "Table 6", "scheduling_overhead_share"),
            ("DALI", "6.3", "solve_overhead_share"),
        ),
        unit="%",
        needs="routing",
        computes=(
            "Median decision time of our own policies, measured here and now, for the"
            " layer steps of one replay at batch 8 (or the largest there is), times"
            " their number, over that plus the replay's time without decisions."
        ),
        caveats=(
            (
                "decision times belong to this computer and vary from run to run; the"
                " work belongs to a datasheet profile"
            ),
            (
                "all policies decide about greedy's states; the shorter run of a better"
                " plan is not credited to it"
            ),
            (
                "for a model as small as the shipped one the work shrinks and the"
                " decisions do not"
            ),
        ),
        row=_planning_row,
        run=dali_planning_share,
    ),
)
