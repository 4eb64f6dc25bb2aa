"""A measured run as something to predict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moesim.advice.measured.scores import Prediction
from moesim.advice.plan.memory import memory_bill
from moesim.advice.times.predictor import (
    PREFILL_SPREAD,
    REPEAT_SPREAD,
    Target,
    decode_target,
    prefill_target,
)

if TYPE_CHECKING:
    from moesim.advice.machine.machine import Machine
    from moesim.advice.measured.rows import Run
    from moesim.advice.times.latents import Beliefs, Observation


def machine_of(run: Run, *, probed: bool) -> Machine:
    """Return the run's machine at one grade."""
    return replace(run.machine, probes=run.probes) if probed else run.machine


def target_of(run: Run, machine: Machine) -> Target:
    """Describe a run on a machine with or without its probes."""
    if run.kind == "decode":
        depth = run.depth + run.tokens / 2
        return decode_target(machine, run.model, run.setting, depth, run.session)
    return prefill_target(
        machine, run.model, run.setting, run.tokens, run.depth, run.session
    )


def row_spread(run: Run) -> float:
    """Standard deviation of the run's logarithm, repetitions included if known."""
    # Rows without repetitions still differ from run to run.
    floor = REPEAT_SPREAD if run.kind == "decode" else PREFILL_SPREAD
    return max(floor, run.spread or 0.0)


def observation_of(run: Run, machine: Machine) -> Observation:
    """Return the measured time of a run."""
    target = target_of(run, machine)
    return target.observed(run.seconds, row_spread(run), words_of(run))


def predict_run(run: Run, machine: Machine, beliefs: Beliefs, given: str) -> Prediction:
    """Predict one run from what is believed of its machine."""
    target = target_of(run, machine)
    seconds = target.predicted(beliefs, row_spread(run))
    # A prompt's speed counts its tokens; a decode step makes one.
    tokens = run.tokens if run.kind == "prefill" else 1
    return Prediction(
        machine=run.machine_name,
        model=run.model_name,
        flags=words_of(run),
        given=given,
        place=run.row.place,
        measured=run.tokens_per_s,
        predicted=tokens / seconds.value,
        low=tokens / seconds.high,
        high=tokens / seconds.low,
        group=" / ".join(run.group),
        cause=_oddity(run),
    )


def _oddity(run: Run) -> str:
    words = run.row.text("noise_note") or run.row.text("notes")
    if spills(run):
        return "beyond the cliff: more graphics memory than the card has"
    return words


def words_of(run: Run) -> str:
    """Put a run's flags in words."""
    setting = run.setting
    words = [f"-ncmoe {setting.cpu_layers}"]
    if not setting.gpu_layers:
        # The number of layers means nothing then.
        words = ["all on the CPU"]
    if run.kind == "prefill":
        words.append(f"-ub {setting.micro_batch}, {run.tokens} tokens")
    if setting.threads:
        words.append(f"-t {setting.threads}")
    if run.depth:
        words.append(f"depth {run.depth}")
    return ", ".join(words)


def spills(run: Run) -> bool:
    """Tell whether a run needs more graphics memory than its machine has.

    Only Windows moves buffers into host memory behind a program's back; elsewhere such
    a run ends with an error, so a measured row proves that it fitted.
    """
    context = run.depth + run.tokens
    bill = memory_bill(run.model, run.machine, run.setting, context)
    return run.machine.windows and bill.gpu_left < 0


def named_gpu(run: Run) -> bool:
    """Tell whether the table has the row's cards; a machine may also have none."""
    return all(card.known for card in run.machine.graphics)
