"""Decode and prefill of other people's machines, predicted from less and less.

No prediction sees the row that it is held against: priors come from specification or
probes, and where rows are given they are other rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING

from moesim.advice.measured.targets import (
    named_gpu,
    observation_of,
    predict_run,
    spills,
    words_of,
)
from moesim.advice.times.latents import Beliefs, learn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moesim.advice.measured.priors import StrictPriors
    from moesim.advice.measured.rows import Run
    from moesim.advice.measured.scores import Prediction

PREFILL_THRESHOLD = 32


def blind(
    runs: Iterable[Run], priors: StrictPriors, *, leave_out: str = "machine"
) -> list[Prediction]:
    """Predict decode without any row of the machine.

    Args:
        runs: of which those with a known GPU, and with probes where the test is about
            probes, are predicted.
        priors: at the grade under test.
        leave_out: ``machine`` or ``model``.
    """
    given = "probes" if priors.probed else "specification"
    predictions = []
    for run in runs:
        # Beyond the cliff no speed is promised, so none is scored.
        if run.kind != "decode" or not named_gpu(run) or spills(run):
            continue
        if priors.probed and not run.probes.host_read:
            continue
        # Who is left out decides which population the priors come from.
        if leave_out == "machine":
            beliefs = priors.without_machine(run)
        else:
            beliefs = priors.without_model(run)
        predictions.append(predict_run(run, priors.machine(run), beliefs, given))
    return predictions


def two_rows_same_model(
    runs: Iterable[Run], priors: StrictPriors, *, extremes: bool = False
) -> list[Prediction]:
    """Predict every row of a sweep over ``-ncmoe`` from pairs of its other rows.

    Args:
        runs: all of them.
        priors: with probes where there are any.
        extremes: use only the pair with the fewest and the most layers on the CPU,
            which is what `advise` asks its users for.
    """
    predictions = []
    for sweep in _only_cpu_layers_differ(runs):
        for pair in _pairs(sweep, _condition, extremes=extremes):
            beliefs = _learned(pair, priors)
            given = " and ".join(words_of(run) for run in pair)
            predictions += [
                predict_run(run, priors.machine(run), beliefs, given)
                for run in sweep
                # A repetition of a given row would be no prediction.
                if all(_condition(run) != _condition(row) for row in pair)
            ]
    return predictions


def two_rows_other_model(
    runs: Iterable[Run], priors: StrictPriors, *, extremes: bool = False
) -> list[Prediction]:
    """Predict every row of a model from pairs of rows of another model.

    Args:
        runs: all of them.
        priors: with probes where there are any.
        extremes: use only the pair with the fewest and the most layers on the CPU.
    """
    machines: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for (machine, session, model), group in _sweeps(runs).items():
        machines.setdefault((machine, session), {})[model] = group

    predictions = []
    for models in machines.values():
        # Both directions: a small model may teach about a large one or not.
        for known, asked in permutations(models, 2):
            for pair in _pairs(models[known], _condition, extremes=extremes):
                beliefs = _learned(pair, priors)
                words = " and ".join(words_of(run) for run in pair)
                predictions += [
                    predict_run(run, priors.machine(run), beliefs, f"{known}: {words}")
                    for run in models[asked]
                ]
    return predictions


def two_micro_batches(
    runs: Iterable[Run], priors: StrictPriors, *, extremes: bool = False
) -> list[Prediction]:
    """Predict prompts at a micro-batch size from pairs of two other sizes.

    Args:
        runs: all of them.
        priors: with probes where there are any.
        extremes: use only the pair of the smallest and the largest size.
    """
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        # Below the threshold the CPU computes: another regime, not another size.
        threshold = run.setting.gpu_from_tokens or PREFILL_THRESHOLD
        if run.kind == "prefill" and _size(run) >= threshold and not spills(run):
            fixed = replace(run.setting, micro_batch=0, batch=0)
            groups[*run.group, fixed, run.depth].append(run)

    predictions = []
    for group in groups.values():
        for pair in _pairs(group, _size, extremes=extremes):
            beliefs = _learned(pair, priors)
            given = " and ".join(f"-ub {_size(run)}" for run in pair)
            predictions += [
                predict_run(run, priors.machine(run), beliefs, given)
                for run in group
                if all(_size(run) != _size(row) for row in pair)
            ]
    return predictions


def _pairs(
    runs: Sequence[Run], key: Callable[[Run], object], *, extremes: bool
) -> list[tuple[Run, Run]]:
    """Pairs of runs under different conditions."""
    if not extremes:
        pairs = combinations(runs, 2)
        return [pair for pair in pairs if key(pair[0]) != key(pair[1])]

    # The outermost rows differ most, so their difference says most.
    ordered = sorted(runs, key=key)  # type: ignore[arg-type] # keys are numbers or tuples of such
    return [(ordered[0], ordered[-1])] if key(ordered[0]) != key(ordered[-1]) else []


def _learned(pair: Sequence[Run], priors: StrictPriors) -> Beliefs:
    beliefs = priors.without_machine(pair[0])
    machine = priors.machine(pair[0])
    return learn(beliefs.priors, [observation_of(run, machine) for run in pair])


def _only_cpu_layers_differ(runs: Iterable[Run]) -> Iterable[list[Run]]:
    """Yield groups of runs that differ only in the number of layers on the CPU."""
    for group in _sweeps(runs).values():
        sweeps: dict[tuple[object, ...], list[Run]] = defaultdict(list)
        for run in group:
            fixed = replace(run.setting, cpu_layers=0, micro_batch=0, batch=0)
            sweeps[fixed, run.depth].append(run)
        yield from sweeps.values()


def _sweeps(runs: Iterable[Run]) -> dict[tuple[str, str, str], list[Run]]:
    """Decode runs of one machine, session and model, without the all-CPU rows and those
    beyond the cliff.
    """
    groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.kind != "decode" or not run.setting.gpu_layers or not named_gpu(run):
            continue
        if not spills(run):
            groups[run.group].append(run)
    return groups


def _condition(run: Run) -> tuple[int, int, int]:
    """What distinguishes rows of one sweep; equal ones are repetitions."""
    setting = run.setting
    return (len(setting.on_host(run.model)), setting.threads or 0, run.depth)


def _size(run: Run) -> int:
    return min(run.setting.micro_batch, run.tokens)
