"""Assignment against its optimum, and what decisions cost.

Costs of operations come from a datasheet profile of DALI's machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moesim.analysis.assignment_grades import Grades
from moesim.analysis.gap_mixes import MixReplays
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies.registry import resolve
from moesim.policies.systems import System
from moesim.reproduction.experiments.base import Excerpt, Experiment, percent
from moesim.runs.memory import MemoryOptions
from moesim.traces.format.future import RecordedFuture

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.policies.base import AssignmentPolicy
    from moesim.reproduction.experiments.base import Figures, Setting
    from moesim.traces.format.batch import RoutedStep

MACHINE = "rtx3090-epyc7532"
DALI = System(assignment="greedy", cache="workload-window:window=4,swaps=8")
DECODED = 32
"""Decode steps behind DALI's table 4."""
SLOW_EVERY = 97
"""One of so many layer steps is put to the slow solvers too; a prime, so that all
layers have their turn.
"""


def _bench(excerpt: Excerpt, batch: int, steps: int) -> MixReplays:
    """DALI's greedy and window cache at half of the experts (its figure 12) over the
    first `steps` decode steps.
    """
    profile = load_profile(MACHINE)
    memory = MemoryOptions(cache_ratio=0.5).plan(excerpt.shape, profile, DALI)

    def passes() -> Iterable[RoutedStep]:
        decode = excerpt.decode(batch=batch)
        for number, step in zip(range(steps), decode, strict=False):
            # Prefill steps are left out, so steps are numbered anew.
            yield replace(step, step=number)

    return MixReplays(
        shape=excerpt.shape,
        profile=profile,
        costs=Costs(profile, excerpt.shape),
        memory=memory,
        system=DALI,
        passes=passes,
        # Neither policy looks ahead.
        future=RecordedFuture(()),
        seed=excerpt.seed,
    )


def dali_greedy_loss(excerpt: Excerpt) -> Figures:
    """Modelled time that greedy loses to the exact optimum, for the same states of the
    machine.
    """
    batches, lacks = excerpt.batches([16, 32])
    figures: Figures = {_loss_label(size): reason for size, reason in lacks.items()}
    best_quality = 0.0
    # A trace of one sequence is judged at batch 1, in a row of its own.
    for batch in batches or [1]:
        # Both costs are for one and the same state of the machine.
        grades = Grades()
        _bench(excerpt, batch, DECODED).replay_s({}, grades)
        if not grades.least_s:
            figures[_loss_label(batch)] = f"lacks decode steps of {batch} sequences"
            continue
        lost_s = grades.chosen_s - grades.least_s
        figures[_loss_label(batch)] = percent(lost_s, grades.chosen_s)
        # Grades are ratios to the optimum: 1.25 means that a fifth is lost.
        largest = 100 * (1 - 1 / max(grades.modelled))
        figures[f"largest loss of one layer step at batch {batch}, %"] = largest
        best_quality = max(best_quality, percent(grades.least_s, grades.chosen_s))
    if best_quality:
        figures[BEST_QUALITY] = best_quality
    return figures


BEST_QUALITY = "best quality against the optimum, %"


def _loss_label(batch: int) -> str:
    return f"loss at batch {batch}, %"


def _loss_row(metric: str, setting: Setting) -> str:
    if metric == "greedy_quality_vs_optimal_max":
        return BEST_QUALITY
    return _loss_label(setting["batch_size"])


@dataclass(slots=True)
class Stopwatch:
    """Times what policies would need for the layer steps of a replay.

    An observer of `AssignmentPolicy.assign` (`moesim.policies.planner.observers`).

    Attributes:
        policies: row -> policy.
        seldom: rows that are asked about one layer step in `SLOW_EVERY` only.
        seconds: row -> seconds of each decision.
    """

    policies: dict[str, AssignmentPolicy]
    seldom: frozenset[str]
    seconds: dict[str, list[float]]
    # Every decision counts, also those that the slow solvers are not asked for.
    layer_steps: int = 0

    def reported(self, call: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Ask all policies for the same layer step, and time them."""
        del call, answer
        work, view = arguments
        for name, policy in self.policies.items():
            # Slow solvers are asked seldom, or they would take most of the time.
            if name in self.seldom and self.layer_steps % SLOW_EVERY:
                continue
            begin_s = time.perf_counter()
            policy.assign(work, view)
            self.seconds[name].append(time.perf_counter() - begin_s)
        self.layer_steps += 1


_DECIDERS = {
    "DALI (greedy)": "greedy",
    "HybriMoE (schedule)": "hybrimoe-schedule",
    "optimal plan (ILP)": "ilp",
    "optimal plan (our exact solver)": "exact",
}


def dali_planning_share(excerpt: Excerpt) -> Figures:
    """Decision time measured here over (virtual time without decisions + that)."""
    batch = excerpt.batch_near(8)
    policies = {
        name: cast("AssignmentPolicy", resolve(spec, "assignment"))
        for name, spec in _DECIDERS.items()
    }
    watch = Stopwatch(
        policies, frozenset({"optimal plan (ILP)"}), {name: [] for name in policies}
    )
    bench = _bench(excerpt, batch, DECODED)
    # Planning that costs nothing, so that the measured decisions can be added.
    free_planning = bench.substitutes()["planning"][0]
    working_s = bench.replay_s({"planning": free_planning}, observer=watch)
    figures: Figures = {}
    for name, seconds in watch.seconds.items():
        if not seconds:
            figures[name] = f"lacks decode steps of {batch} sequences"
            continue
        # The median, because a decision may be interrupted by other programs.
        planning_s = float(np.median(seconds)) * watch.layer_steps
        figures[name] = percent(planning_s, working_s + planning_s)
    return figures


def _planning_row(metric: str, setting: Setting) -> str | None:
    method = setting["method"]
    if metric == "solve_overhead_share":
        return {"greedy": "DALI (greedy)", "opt_plan": "optimal plan (ILP)"}[method]
    # Table 6 also has single sequence lengths, which a trace mixes.
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
