"""Answers: which flags, how fast, how sure, what limits, what to measure next.

`advise` is what the command line and notebooks call (`moesim.advise`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.advice.answer import Advice
from moesim.advice.devices import check_memory
from moesim.advice.machine import (
    Grade,
    Machine,
    describe_machine,
    machine_of_profile,
)
from moesim.advice.model.catalogue import model_contents
from moesim.advice.model.contents import ModelContents
from moesim.advice.observed import ObservedRows, observe, read_bench
from moesim.advice.plan.bound import bound_of_routing, placement_bound
from moesim.advice.plan.memory import Candidate, Job, advisable, bill_of, candidates
from moesim.advice.plan.ranking import Forecast, Prospect, next_questions
from moesim.advice.plan.what_if import WhatIf, expert_cache, what_ifs
from moesim.advice.times.priors import priors_of
from moesim.advice.times.work import ALL_LAYERS, LAZY, Setting
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence


SHOWN = 5


def advise(
    model: str | os.PathLike[str] | ModelContents,
    *,
    cpu: str | None = None,
    ram: str | None = None,
    gpu: str | None = None,
    pcie: str | None = None,
    system: str | None = None,
    hw: str | os.PathLike[str] | None = None,
    bench: str | os.PathLike[str] | None = None,
    quant: str = "",
    job: Job | None = None,
    trace: str | os.PathLike[str] | None = None,
    replay_cache: bool = False,
) -> Advice:
    """Say which settings are fastest for a model on a machine, how fast and how sure.

    Args:
        model: a GGUF file, a Hugging Face folder, a name, or contents read before.
        cpu: its name, or numbers as in ``cores=8,ghz=3.6``.
        ram: such as ``2x16GB DDR4-3600``.
        gpu: its name, ``2x NAME``, ``none``, or numbers as in
            ``vram=16GB,bandwidth=448GB/s,tflops=47``.
        pcie: such as ``4.0x8``.
        system: ``linux``, ``windows`` or ``wsl``, with its memory as in ``wsl 24GB``.
        hw: a profile that `moesim profile` wrote here, for its probes.
        bench: what llama-bench wrote here.
        quant: weight formats of a model that is given by name.
        job: context, prompt and answer; default: `Job`.
        trace: routing of this model, for the bound of any schedule and for an expert
            cache.
        replay_cache: also replay an expert cache; takes some seconds.

    Raises:
        AdviceError: bad input, in one line; also where nothing fits.
        TraceError, ProfileError: a broken trace or profile.
    """
    # Notebooks read a file once and ask about it many times.
    if isinstance(model, ModelContents):
        contents = model
    else:
        contents = model_contents(str(model), quant)
    wanted = _checked(job or Job())
    # Without rows the beliefs below are the priors.
    rows = ObservedRows()
    if bench is not None:
        rows = ObservedRows(rows=tuple(read_bench(Path(bench))))

    words = {"cpu": cpu, "ram": ram, "gpu": gpu, "pcie": pcie, "system": system}
    machine = machine_in_words(words, hw, rows)
    beliefs, rows = observe(rows, contents, machine, priors_of(machine))
    grades = rows.grades(contents, machine)
    forecast = Forecast(contents, machine, wanted, beliefs, grades)
    forecast, fitting, changes = _with_the_best_cards(forecast)
    # An empty list has no best entry, and users need to know what is missing.
    if not fitting:
        raise _nothing_fits(contents, machine, wanted)
    machine = forecast.machine
    safe = [each for each in fitting if each.bill.safe] or fitting
    prospects = forecast.ranked(advisable(fitting), SHOWN)
    best = prospects[0]
    bound = placement_bound(
        machine, contents, best.candidate.setting, wanted.mean_depth
    )

    # First: it refuses a trace of another model.
    routing = None
    file = None if trace is None else Path(trace)
    if file is not None:
        routing = bound_of_routing(forecast, best, file)
    changes += what_ifs(forecast, best)
    if replay_cache or file is not None:
        changes.insert(0, expert_cache(forecast, best, file))
    # Rows that were all set aside leave the grade of the machine.
    grade = Grade.OBSERVED if rows.used else machine.grade
    return Advice(
        model=contents,
        machine=machine,
        grade=grade,
        job=wanted,
        prospects=tuple(prospects),
        curve=tuple(_curve(forecast, best)),
        questions=tuple(next_questions(forecast, best.candidate, rows.observations)),
        what_ifs=tuple(changes),
        observed=rows,
        bound=bound,
        rounded=_if_faster(forecast, best, safe, "q8_0"),
        faster=_if_faster(forecast, best, fitting, "f16"),
        routing=routing,
        forecast=forecast,
    )


# Fewer per cent are not worth a trade.
WORTH_A_TRADE = 0.03


def _if_faster(
    forecast: Forecast, best: Prospect, fitting: Sequence[Candidate], kv_format: str
) -> Prospect | None:
    """Return the fastest setting with a format of keys and values, if it buys speed."""
    others = [each for each in fitting if each.setting.kv_format == kv_format]
    if not others:
        return None
    fastest = forecast.ranked(others, 1)[0]
    gain = best.job.value / fastest.job.value - 1
    return fastest if gain > WORTH_A_TRADE else None


def _with_the_best_cards(
    forecast: Forecast,
) -> tuple[Forecast, list[Candidate], list[WhatIf]]:
    """Choose the cards that serve the job best: a slow one may cost more than it gives.

    Returns:
        The forecast with these cards, its settings that fit, and what all cards, or
        the fastest other choice, would give instead.
    """
    machine = forecast.machine
    everything = candidates(forecast.model, machine, forecast.job)
    if machine.gpu_count < 2:
        return forecast, everything, []
    numbers = range(machine.gpu_count)
    choices = [tuple(numbers)]
    choices += [tuple(at for at in numbers if at != left) for left in numbers]
    choices += [(at,) for at in numbers]
    trials: list[tuple[Prospect, Forecast, list[Candidate]]] = []
    seen: set[tuple[str, ...]] = set()
    for devices in choices:
        partial = machine.with_cards(devices)
        names = tuple(card.name for card in partial.graphics)
        fitting = candidates(forecast.model, partial, forecast.job)
        if names in seen or not fitting:
            continue
        seen.add(names)
        again = forecast.on(partial)
        trials.append((again.ranked(advisable(fitting), 1)[0], again, fitting))
    if not trials:
        return forecast, everything, []
    trials.sort(key=lambda trial: trial[0].job.value)
    best, chosen, fitting = trials[0]
    changes = [
        WhatIf(
            ("with only " if other.machine.devices else "with ")
            + " + ".join(card.name for card in other.machine.graphics),
            prospect.decode,
            prospect.decode.value / best.decode.value,
            f"the job {prospect.job.value:.3g} s instead of {best.job.value:.3g} s",
        )
        for prospect, other, _ in trials[1:3]
    ]
    return chosen, fitting, changes


def _checked(job: Job) -> Job:
    """Refuse jobs that nobody can do.

    Raises:
        AdviceError: a length below 1, or a context that does not hold the rest.
    """
    # The command line checks these too; notebooks call this directly.
    for name in ("context", "prompt", "answer", "sequences"):
        if getattr(job, name) < 1:
            raise AdviceError(f"{name}: expected at least 1, got {getattr(job, name)}")
    if job.prompt + job.answer > job.context:
        raise AdviceError(
            f"context: {job.context} tokens do not hold a prompt of {job.prompt} and an"
            f" answer of {job.answer}; give at least {job.prompt + job.answer}"
        )
    if job.micro_batch is not None and job.micro_batch < 1:
        raise AdviceError(f"micro_batch: expected at least 1, got {job.micro_batch}")
    return job


def machine_in_words(
    words: Mapping[str, str | None],
    hw: str | os.PathLike[str] | None,
    rows: ObservedRows,
) -> Machine:
    """Describe the machine from words, a profile, or what llama-bench saw of it.

    Args:
        words: ``cpu``, ``ram``, ``gpu``, ``pcie`` and ``system``, as in `advise`.
        hw: a profile that `moesim profile` wrote here.
        rows: of llama-bench.

    Raises:
        AdviceError: no machine, or words that say none.
    """
    if words["ram"] is not None:
        check_memory(words["ram"])
    if hw is not None:
        return machine_of_profile(Path(hw), **words)
    described = [words[name] for name in ("cpu", "ram", "gpu", "pcie")]
    if not any(described) and not rows.rows:
        raise AdviceError(
            "which machine? give --cpu, --ram and --gpu (any device of the table, or"
            " numbers), --hw FILE of `moesim profile`, or --bench FILE of llama-bench"
        )

    # llama-bench names the devices itself; words of the user win.
    seen_cpu, seen_gpu = rows.devices
    cpu, gpu = words["cpu"], words["gpu"]
    machine = describe_machine(
        cpu=cpu or seen_cpu,
        ram=words["ram"],
        gpu=gpu or seen_gpu,
        pcie=words["pcie"],
        system=words["system"],
        lenient=cpu is None and seen_cpu is not None,
    )
    if gpu is None and seen_gpu is None and not machine.unified:
        assumed = (*machine.assumed, "no graphics card")
        return replace(machine, assumed=assumed)
    return machine


def _nothing_fits(model: ModelContents, machine: Machine, job: Job) -> AdviceError:
    # The smallest need of all: what it lacks, every setting lacks.
    leanest = Setting(
        cpu_layers=ALL_LAYERS, gpu_layers=ALL_LAYERS, micro_batch=512, tables=LAZY
    )
    if not machine.graphics:
        leanest = replace(leanest, gpu_layers=0)
    bill = bill_of(model, machine, leanest, job)
    has = "unknown RAM"
    if machine.memory.size_bytes is not None:
        has = f"{machine.memory.size_bytes / 1024**3:.0f} GiB of RAM"
    if machine.graphics and not machine.unified:
        has += f" and {machine.vram_bytes / 1024**3:.0f} GiB of GPU memory"
    usual = Job()
    kept = ""
    if job.keep_vram_bytes > usual.keep_vram_bytes:
        kept += ", a smaller --keep-gpu-memory"
    if job.keep_ram_bytes > usual.keep_ram_bytes:
        kept += ", a smaller --keep-host-memory"
    return AdviceError(
        f"{model.name} does not fit: it needs {model.file_bytes / 1024**3:.1f} GiB of"
        f" weights and {model.kv_bytes(job.context) / 1024**3:.1f} GiB of keys and"
        f" values at {job.context} tokens; {machine.name} has {has}, and"
        f" {(bill.host_free or 0) / 1024**3:.1f} GiB of RAM are free for weights;"
        f" take a smaller quantisation, smaller --context-tokens{kept}, or more memory"
    )


def _curve(forecast: Forecast, best: Prospect) -> list[Prospect]:
    """Predict every number of layers on the CPU at the best micro-batch."""
    machine = forecast.machine
    if not machine.graphics or machine.unified:
        return []

    points = []
    last = max(forecast.model.moe_layers, default=-1) + 1
    # Long models get every second layer: a curve needs no more points.
    stride = 1 if last <= 64 else 2
    for count in range(0, last + 1, stride):
        setting = replace(
            best.candidate.setting,
            cpu_layers=count,
            chosen_layers=None,
            gpu_layers=ALL_LAYERS,
        )
        bill = bill_of(forecast.model, machine, setting, forecast.job)
        points.append(forecast.prospect(Candidate(setting, bill)))
    return points
