"""Advice for ktransformers: how many experts on the card, which ones, how fast.

kt-kernel computes a layer's experts on CPU and card at the same time, each where its
mask says, so a layer step takes the longer of both. How many of a token's experts are
on either side follows from routing: the masks are chosen on one half of a trace and
judged on the other.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesim.advice.plan.commands import model_file
from moesim.advice.routing.bound import expert_room
from moesim.advice.routing.expert_masks import FREQUENCY, STRATEGIES, expert_mask
from moesim.advice.times.latents import Beliefs, Interval, Prior
from moesim.advice.times.predictor import misfits_of
from moesim.advice.times.priors import PriorTable
from moesim.advice.times.setting import ALL_LAYERS
from moesim.advice.times.step_times import (
    decode_latents,
    decode_terms,
    device_seconds,
    family,
    host_seconds,
)
from moesim.advice.times.work import decode_work

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from moesim.advice.machine.machine import Machine
    from moesim.advice.plan.ranking import Forecast, Prospect
    from moesim.advice.routing.decodes import DecodeSteps

ENGINE = "engine:ktransformers"
# No row of kt-kernel was seen: its kernels are taken to be as good as llama.cpp's, give
# or take what two engines on one machine differ by.
ENGINE_SPREAD = 0.25
COUNTS_FILE = "expert-counts.pt"

# Formats of kt-kernel by that of the experts; all GGUF quantisations are LLAMAFILE's.
METHODS = {"bf16": "BF16", "f16": "BF16", "mxfp4": "MXFP4", "fp8": "FP8"}
GGUF_METHOD = "LLAMAFILE"


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """One placement strategy of kt-kernel with what it would bring.

    Attributes:
        strategy: its name there.
        per_layer: experts of each layer on the card, on average.
        decode: tokens per second of all sequences together.
        on_card: share of accesses that the card serves.
    """

    strategy: str
    per_layer: int
    decode: Interval
    on_card: float


def runs_here(machine: Machine) -> bool:
    """Tell whether kt-kernel computes on the machine's cards."""
    return machine.backend == "cuda" and not machine.unified


def mask_plans(
    forecast: Forecast,
    best: Prospect,
    decodes: DecodeSteps,
) -> list[MaskPlan]:
    """Return kt-kernel's strategies, fastest first.

    Args:
        forecast: for machine, model and beliefs.
        best: the advised setting of llama.cpp; experts get the memory it leaves.
        decodes: routing of the model.
    """
    model = forecast.model
    experts = model.layers[model.moe_layers[0]].experts
    # One expert of every layer.
    column_bytes = model.expert_bytes / experts
    per_layer = min(experts, int(expert_room(best) / column_bytes))

    chosen_on, judged_on = decodes.halves()
    counts = chosen_on.counts(experts)
    plans = []
    for strategy in STRATEGIES:
        mask = expert_mask(strategy, per_layer, counts)
        sides = _sides(mask, judged_on)
        plans.append(
            MaskPlan(
                strategy=strategy,
                per_layer=per_layer,
                decode=_speed(forecast, best, sides, len(judged_on.steps)),
                on_card=_share_on_card(sides),
            )
        )
    return sorted(plans, key=lambda plan: -plan.decode.value)


Sides = Counter[tuple[int, int]]
"""(experts on the CPU, experts on the card) -> layer steps."""


def _sides(mask: np.ndarray, decodes: DecodeSteps) -> Sides:
    sides: Sides = Counter()
    for layers in decodes.steps:
        for layer, experts in enumerate(layers):
            on_card = int(mask[layer, experts].sum())
            sides[len(experts) - on_card, on_card] += 1
    return sides


def _share_on_card(sides: Sides) -> float:
    on_card = sum(count * card for (_, card), count in sides.items())
    both = sum(count * (host + card) for (host, card), count in sides.items())
    return on_card / both


def _speed(forecast: Forecast, best: Prospect, sides: Sides, steps: int) -> Interval:
    """Tokens per second: everything but experts as usual, experts side by side."""
    model = forecast.model
    machine = forecast.machine
    setting = best.candidate.setting
    # Everything on the card but the experts, whose time is that of the sides.
    bare = replace(
        setting, cpu_layers=ALL_LAYERS, gpu_layers=ALL_LAYERS, chosen_layers=None
    )
    work = decode_work(model, bare, forecast.job.mean_depth)
    other = replace(work, host_experts={}, host_expert_layers=0)

    # Mean bytes of one expert by weight format.
    formats: Counter[str] = Counter()
    number = 0
    for at in model.moe_layers:
        formats.update(model.layers[at].expert_formats)
        number += model.layers[at].experts
    each = {name: stored / number for name, stored in formats.items()}
    misfit = misfits_of(model)[0]

    def seconds(rates: Mapping[str, float]) -> float:
        host_s = host_seconds(each, machine, setting, rates)
        card_s = device_seconds(each, rates)
        floor_s = rates["floor_s"]
        experts_s = sum(
            count * max(card * card_s, host * host_s + floor_s * (host > 0))
            for (host, card), count in sides.items()
        )
        rest_s = sum(decode_terms(other, machine, setting, rates).values())
        return (rest_s + experts_s / steps) * rates[misfit] * rates[ENGINE]

    beliefs = forecast.beliefs
    priors = {name: beliefs.priors[name] for name in beliefs.priors}
    priors[ENGINE] = Prior(1.0, ENGINE_SPREAD, "no row of kt-kernel was seen")
    known = Beliefs(PriorTable(priors), beliefs.names, beliefs.mean, beliefs.covariance)
    latents = decode_latents(work) | {misfit, ENGINE, "floor_s"}
    latents |= {f"{part}:{family(name)}" for part in ("reach", "core") for name in each}
    step = known.predict(seconds, sorted(latents))
    return Interval(setting.sequences / step.value, step.spread)


def server_command(
    forecast: Forecast, plan: MaskPlan, counts_file: str = COUNTS_FILE
) -> str:
    """Return the line that starts SGLang with kt-kernel and a plan's masks.

    Args:
        forecast: for model, machine and context.
        plan: strategy and number of experts.
        counts_file: that ``frequency`` reads.

    Source of the flags: `server_args.py` of kvcache-ai/sglang.
    """
    model = forecast.model
    processor = forecast.machine.processor
    folder = model.name.split()[0]
    method = METHODS.get(model.main_format, GGUF_METHOD)
    # Other formats are read from the model's own folder.
    weights = model_file(model) if method == GGUF_METHOD else folder
    words = ["python", "-m", "sglang.launch_server", "--model-path", folder]
    words += ["--kt-weight-path", weights, "--kt-method", method]
    words += ["--kt-cpuinfer", str(processor.cores)]
    words += ["--kt-threadpool-count", str(processor.sockets)]
    words += ["--kt-num-gpu-experts", str(plan.per_layer)]
    words += ["--kt-expert-placement-strategy", plan.strategy]
    if plan.strategy == FREQUENCY:
        words += ["--init-expert-location", counts_file]
    words += ["--context-length", str(forecast.job.context)]
    return shlex.join(words)
