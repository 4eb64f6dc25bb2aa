"""What a trace answers: the bound of its routing, and masks for ktransformers."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.advice.plan.commands import model_file
from moesim.advice.times.latents import Prior
from moesim.advice.times.priors import PriorTable
from moesim.advice.times.step_times import (
    decode_terms,
    device_seconds,
    host_seconds,
    latents_of,
    misfits_of,
)
from moesim.advice.times.work import (
    ALL_LAYERS,
    decode_work,
    most_device_bytes_per_s,
    most_host_bytes_per_s,
    most_link_bytes_per_s,
)
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.ranking import Forecast, Prospect
    from moesim.advice.times.latents import Interval
    from moesim.runs.bound import RoutingBound
    from moesim.traces.format.reader import Trace


@dataclass(frozen=True)
class RoutingAdvice:
    """Answers that need routing.

    Attributes:
        decodes: what was asked for.
        bound: of any schedule of it.
        masks: kt-kernel's strategies, fastest first; empty where it does not run.
    """

    decodes: DecodeSteps
    bound: RoutingBound
    masks: tuple[MaskPlan, ...]


def routing_advice(forecast: Forecast, best: Prospect, trace: Path) -> RoutingAdvice:
    """Answer what routing decides.

    Args:
        forecast: of the machine.
        best: the advised setting; experts get the graphics memory that it leaves.
        trace: routing of the model.

    Raises:
        AdviceError: a machine without a card of its own memory, a trace of another
            model or without decode steps.
    """
    machine = forecast.machine
    if not machine.graphics or machine.unified:
        raise AdviceError(
            f"--trace: {machine.name} has no graphics card with memory of its own, so"
            " it is all the same which experts lie where; leave out --trace"
        )
    decodes = decode_steps(trace, forecast.model, forecast.job.sequences)
    masks = []
    if runs_here(machine):
        masks = mask_plans(forecast, best, decodes)
    bound = bound_of_routing(forecast, best, decodes)
    return RoutingAdvice(decodes, bound, tuple(masks))


def bound_of_routing(
    forecast: Forecast, best: Prospect, decodes: DecodeSteps
) -> RoutingBound:
    """Bound any schedule of a routing in the memories that a setting leaves to experts.

    Args:
        forecast: for machine and model; the machine has a card of its own memory.
        best: the setting.
        decodes: what is asked for.
    """
    # Answers without a trace need not load what reads one.
    from moesim.runs.bound import (  # noqa: PLC0415  # noqa: PLC0415
        Bandwidths,
        flattened,
        least_reads,
        routing_bound,
    )

    model = forecast.model
    sizes = [
        model.layers[at].expert_bytes // model.layers[at].experts
        for at in model.moe_layers
    ]
    accesses = [
        size
        for layers in decodes.steps
        for size, experts in zip(sizes, layers, strict=True)
        for _ in experts
    ]
    uses = [
        (layer, experts.tolist())
        for layers in decodes.steps
        for layer, experts in enumerate(layers)
    ]

    # Any content at the beginning: the prompt may have left the best one.
    room = expert_room(best)
    slots = np.array([int(room // min(sizes))])
    reads = least_reads(*flattened(uses), slots, shared=True, warm=True)

    # Without experts on the card only what every token reads there is left.
    bare = replace(best.candidate.setting, cpu_layers=ALL_LAYERS, gpu_layers=ALL_LAYERS)
    work = decode_work(model, replace(bare, chosen_layers=None))
    machine = forecast.machine
    rates = Bandwidths(
        host=most_host_bytes_per_s(machine),
        link=most_link_bytes_per_s(machine),
        device=most_device_bytes_per_s(machine),
    )
    return routing_bound(accesses, reads, len(decodes.steps), work.device_bytes, rates)


def expert_room(best: Prospect) -> float:
    """Bytes of graphics memory that a setting leaves to experts."""
    bill = best.candidate.bill
    return bill.gpu["experts"] + max(0.0, bill.gpu_left)


# Belady's choice takes microseconds per access; more would delay an answer.
MOST_ACCESSES = 200_000


@dataclass(frozen=True)
class DecodeSteps:
    """Experts that decode steps asked for. T steps of B sequences, K experts each.

    Attributes:
        name: of the trace.
        steps: by step and MoE layer: experts, int [A], each once.
        sequence: number of the batch that each step belongs to, [T].
    """

    name: str
    steps: tuple[tuple[np.ndarray, ...], ...]
    sequence: tuple[int, ...]

    @property
    def accesses(self) -> int:
        """Experts used, of all layers and steps."""
        return sum(len(experts) for layers in self.steps for experts in layers)

    def counts(self, experts: int) -> np.ndarray:
        """Count how often each expert was used, int64 [L, E]."""
        counts = np.zeros((len(self.steps[0]), experts), np.int64)
        for layers in self.steps:
            for layer, chosen in enumerate(layers):
                counts[layer, chosen] += 1
        return counts

    def halves(self) -> tuple[DecodeSteps, DecodeSteps]:
        """Cut in two without a text in both, or by time if there is one text only."""
        several = len(set(self.sequence)) > 1
        numbers = self.sequence if several else range(len(self.steps))
        middle = sorted(numbers)[len(self.steps) // 2]
        early = [number < middle for number in numbers]
        # All steps of one text may lie on one side.
        if not any(early):
            early = [number <= middle for number in numbers]
        return self._part(early), self._part([not each for each in early])

    def _part(self, kept: list[bool]) -> DecodeSteps:
        chosen = [at for at, keep in enumerate(kept) if keep]
        return DecodeSteps(
            self.name,
            tuple(self.steps[at] for at in chosen),
            tuple(self.sequence[at] for at in chosen),
        )


def decode_steps(path: Path, model: ModelContents, sequences: int = 1) -> DecodeSteps:
    """Read a trace's decode steps, as many as an answer has time for.

    Args:
        path: a moesim trace, or the name of one that ships.
        model: whose routing it must be.
        sequences: decoded together.

    Raises:
        AdviceError: a trace of another model, or without decode steps.
        TraceError: a broken trace.
    """
    # As above.
    from moesim.traces.format.batch import compose  # noqa: PLC0415
    from moesim.traces.format.reader import open_trace  # noqa: PLC0415
    from moesim.traces.format.schema import Phase  # noqa: PLC0415

    trace = open_trace(path)
    _check_shape(trace, model)
    steps = []
    numbers = []
    accesses = 0
    for step in compose(trace, batch=sequences):
        if step.phase != Phase.DECODE:
            continue
        steps.append(tuple(routed.experts for routed in step.layers))
        numbers.append(step.batch)
        accesses += sum(len(routed.experts) for routed in step.layers)
        if accesses >= MOST_ACCESSES:
            break
    if len(steps) < 2:
        raise AdviceError(
            f"{path}: expected at least two decode steps, found {len(steps)}; record"
            " answers too, with moesim record --new-tokens"
        )
    return DecodeSteps(str(path), tuple(steps), tuple(numbers))


def _check_shape(trace: Trace, model: ModelContents) -> None:
    layer = model.layers[model.moe_layers[0]]
    expected = (len(model.moe_layers), layer.experts, layer.top_k)
    shape = trace.shape
    if (shape.layers, shape.experts, shape.top_k) != expected:
        raise AdviceError(
            f"--trace {trace.path}: expected routing of {model.name}, {expected[0]} MoE"
            f" layers of {expected[1]} experts, {expected[2]} per token, found"
            f" {shape.layers} of {shape.experts}, {shape.top_k} per token; record it"
            " from that model"
        )


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

    engine = Prior(1.0, ENGINE_SPREAD, "no row of kt-kernel was seen")
    priors = PriorTable({**forecast.beliefs.priors, ENGINE: engine})
    known = replace(forecast.beliefs, priors=priors)
    step = known.predict(seconds, sorted(latents_of(seconds)))
    return step.per(setting.sequences)


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


FREQUENCY = "frequency"
UNIFORM = "uniform"
FRONT_LOADING = "front-loading"
STRATEGIES = (FREQUENCY, UNIFORM, FRONT_LOADING)


def expert_mask(strategy: str, per_layer: int, counts: np.ndarray) -> np.ndarray:
    """Return the experts that lie on the card, bool [L, E].

    Args:
        strategy: one of `STRATEGIES`.
        per_layer: ``--kt-num-gpu-experts``.
        counts: uses of each expert, int [L, E]; only ``frequency`` looks at them.
    """
    layers, experts = counts.shape
    total = per_layer * layers
    mask = np.zeros(counts.size, np.bool_)
    if strategy == FREQUENCY:
        # The most used ones of the whole model, not of each layer.
        busiest = np.argsort(-counts.ravel(), kind="stable")
        mask[busiest[:total]] = True
    elif strategy == FRONT_LOADING:
        mask[:total] = True
    else:
        mask = np.tile(np.arange(experts) < per_layer, layers)
    return mask.reshape(layers, experts)
