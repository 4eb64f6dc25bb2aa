"""Decode steps of a trace of the model that is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.advice.errors import AdviceError
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.advice.model.contents import ModelContents
    from moesim.traces.format.reader import Trace

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
            " answers too, with moesim record --max-new-tokens"
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
