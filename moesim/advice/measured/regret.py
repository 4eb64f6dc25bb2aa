"""What the advised ``--n-cpu-moe`` costs against the best measured one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING

from moesim.advice.measured.targets import named_gpu, predict_run
from moesim.advice.plan.memory import memory_bill

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.advice.measured.priors import StrictPriors
    from moesim.advice.measured.rows import Run


@dataclass(frozen=True, slots=True)
class Regret:
    """One sweep over ``--n-cpu-moe`` and the choice among its settings.

    Attributes:
        machine: on which it was measured.
        model: with its label.
        settings: numbers of layers that were measured.
        advised: the number that the prediction prefers.
        best: the fastest measured one.
        share: of the best speed that the advised setting misses.
    """

    machine: str
    model: str
    settings: tuple[int, ...]
    advised: int
    best: int
    share: float


def regrets(runs: Iterable[Run], priors: StrictPriors) -> list[Regret]:
    """Choose a setting of every measured sweep without having seen its speeds.

    Settings whose bill of memory exceeds the machine's are not chosen. Repetitions of
    one setting count as their mean.
    """
    sweeps: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if run.kind == "decode" and run.setting.gpu_layers and named_gpu(run):
            # Speeds of decode do not depend on micro-batches, flash attention little.
            fixed = replace(run.setting, cpu_layers=0, micro_batch=0, batch=0)
            fixed = replace(fixed, flash=True, page_locked=True)
            sweeps[*run.group, fixed, run.depth].append(run)

    sweep_regrets = []
    for sweep in sweeps.values():
        by_count: dict[int, list[Run]] = defaultdict(list)
        for run in sweep:
            by_count[len(run.setting.on_host(run.model))].append(run)
        # With one setting there is nothing to choose.
        if len(by_count) > 1:
            sweep_regrets.append(_regret(by_count, priors))
    return sweep_regrets


def _regret(by_count: dict[int, list[Run]], priors: StrictPriors) -> Regret:
    measured = {
        count: mean(run.tokens_per_s for run in rows)
        for count, rows in by_count.items()
    }
    predicted = {}
    for count, rows in by_count.items():
        # Nobody is advised to go beyond the cliff.
        if any(_fits(run) for run in rows):
            beliefs = priors.without_machine(rows[0])
            machine = priors.machine(rows[0])
            predicted[count] = predict_run(rows[0], machine, beliefs, "").predicted

    first = next(iter(by_count.values()))[0]
    # Where nothing fits on paper, the smallest need is the safest advice.
    advised = max(predicted, key=lambda count: predicted[count], default=max(by_count))
    best = max(measured, key=lambda count: measured[count])
    return Regret(
        machine=first.machine_name,
        model=first.model_name,
        settings=tuple(sorted(by_count)),
        advised=advised,
        best=best,
        share=1 - measured[advised] / measured[best],
    )


def _fits(run: Run) -> bool:
    return (
        memory_bill(
            run.model, run.machine, run.setting, run.depth + run.tokens
        ).gpu_left
        >= 0
    )
