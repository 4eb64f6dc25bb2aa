"""Can this trace be trusted? Checks of meaning, behind the checks of form that reader
and importers make.

Nothing here refuses a trace. A grave finding says that results would mislead; the
others are worth a remark.

The uneven-ness of a layer is Pearson's chi-square of its loads against equal loads,
over its expectation for routing drawn at random: K distinct experts per token, all
equally likely, give ``E - K`` (multinomial ``E - 1``, thinned by drawing without
replacement). Random routing scores 1; the medians of the real traces at hand lie
between 24 and 2085.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from moesim.traces.compilation import compiled
from moesim.traces.format.schema import Phase
from numba import types as nb

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

UNEVEN_LEAST = 2.0
"""Median chi-square over its random expectation below which routing looks drawn at
random.
"""
LOAD_LEAST = 5.0
"""Expected choices per expert and layer that the chi-square needs (Cochran's rule)."""
LOOP_LEAST = 0.8
"""Share of first choices that equal those a fixed number of tokens before: above it, a
sequence repeats itself.
"""
LOOP_TOKENS = 64
"""Generated tokens below which a sequence is not judged; longest period looked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark: `kind` for programs, `text` for people; `grave` where results would
    mislead.
    """

    kind: str
    text: str
    grave: bool = False


class Checker:
    """Folds sequences one by one. L layers, E experts, K per token."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.load = np.zeros((shape.layers, shape.experts), np.int64)
        self.sequences = 0
        self.holes: list[tuple[int, int]] = []
        self.late: list[int] = []
        self.ragged: dict[int, int] = {}
        self.loops: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.prompts = 0
        self._seen: dict[int, int] = {}

    def add(
        self, pos: np.ndarray, phase: np.ndarray, layer: np.ndarray, experts: np.ndarray
    ) -> None:
        """Fold the rows of one sequence, sorted by pos, layer, all in range: int [N],
        [N], [N] and [N, K].
        """
        number = self.sequences
        self.sequences = self.sequences + 1
        _count(
            layer.astype(np.int16, copy=False),
            np.ascontiguousarray(experts, np.uint16),
            self.load,
        )
        if pos[0] != 0 and phase[0] == Phase.PREFILL:
            self.late.append(number)
        if (jump := np.diff(pos) > 1).any():
            self.holes.append((number, int(pos[int(jump.argmax())]) + 1))
        prompt = int(np.searchsorted(phase, Phase.DECODE))
        self.prompts += prompt > 0
        held = np.bincount(layer[:prompt], minlength=self.shape.layers)
        for short in np.flatnonzero(held < held.max(initial=0)).tolist():
            self.ragged[short] = self.ragged.get(short, 0) + 1
        mark = hash((len(pos), experts.tobytes()))
        if len(pos) > self.shape.layers and mark in self._seen:
            self.copies.append((number, self._seen[mark]))
        self._seen.setdefault(mark, number)
        first = np.ascontiguousarray(experts[prompt:, 0], np.uint16)
        if _repeats(first.reshape(-1, self.shape.layers)):
            self.loops.append(number)

    def findings(self) -> list[Finding]:
        """What the sequences so far deserve, grave ones first."""
        found = [*self._uneven(), *self._positions()]
        if self.loops:
            text = (
                f"{len(self.loops)} of {self.sequences} sequences repeat themselves"
                f" ({_few(self.loops)}): a greedy loop"
            )
            found.append(
                Finding("loop", f"{text}; caches look better on them than they are")
            )
        if self.copies:
            pairs = ", ".join(f"{copy} = {first}" for copy, first in self.copies[:4])
            found.append(
                Finding(
                    "copy",
                    f"{len(self.copies)} sequences are copies of others ({pairs})",
                    grave=True,
                )
            )
        if self.ragged:
            layers = sorted(self.ragged)
            where = (
                "the last layer"
                if layers == [self.shape.layers - 1]
                else f"layers {_few(layers)}"
            )
            many = max(self.ragged.values())
            text = (
                f"{where} holds only part of the prompt in {many} sequences (ragged"
                " prefill, legal)"
            )
            found.append(
                Finding("ragged", text, grave=layers != [self.shape.layers - 1])
            )
        untouched = int((self.load.sum(axis=1) == 0).sum())
        if untouched:
            found.append(
                Finding(
                    "layers",
                    f"{untouched} of {self.shape.layers} layers never appear",
                    grave=True,
                )
            )
        if not self.prompts:
            found.append(
                Finding("prefill", "no prompt tokens: everything replays as decode")
            )
        return sorted(found, key=lambda finding: not finding.grave)

    def uneven(self) -> np.ndarray:
        """Float [L]: chi-square of each layer's loads over its expectation for random
        routing; nan without load.
        """
        expected = self.load.sum(axis=1, keepdims=True) / self.shape.experts
        with np.errstate(invalid="ignore", divide="ignore"):
            square = ((self.load - expected) ** 2 / expected).sum(axis=1)
        return square / max(1, self.shape.experts - self.shape.top_k)

    def _uneven(self) -> list[Finding]:
        if (
            self.shape.experts <= self.shape.top_k
            or self.load.sum(axis=1).min() < LOAD_LEAST * self.shape.experts
        ):
            return []
        score = float(np.median(self.uneven()))
        if score >= UNEVEN_LEAST:
            return []
        text = (
            f"routing looks drawn at random: chi-square {score:.2f} of its random"
            f" expectation, below {UNEVEN_LEAST:g}; was a non-contiguous tensor copied"
            " flat, or a model without training recorded?"
        )
        return [Finding("uniform", text, grave=True)]

    def _positions(self) -> list[Finding]:
        found = []
        if self.late:
            which = f"{len(self.late)} of {self.sequences} sequences"
            text = f"{which} begin their prompt behind position 0 ({_few(self.late)})"
            found.append(
                Finding(
                    "late",
                    f"{text}: a reused prefix is missing; record without prefix"
                    " caching",
                    grave=True,
                )
            )
        if self.holes:
            first, place = self.holes[0]
            text = (
                f"positions are missing in {len(self.holes)} sequences, first in"
                f" sequence {first} at {place}"
            )
            found.append(
                Finding("hole", f"{text}; record without prefix caching", grave=True)
            )
        return found


@compiled(
    nb.void(
        nb.Array(nb.int16, 1, "C", readonly=True),
        nb.Array(nb.uint16, 2, "C", readonly=True),
        nb.int64[:, ::1],
    )
)
def _count(layer: np.ndarray, experts: np.ndarray, load: np.ndarray) -> None:
    """Add the choices [N, K] of rows at layers [N] to `load` [L, E]."""
    for row in range(len(layer)):
        for place in range(experts.shape[1]):
            load[layer[row], experts[row, place]] += 1


def verdict(trace: Trace) -> list[Finding]:
    """Read a trace once and say what deserves a remark, grave findings first; an empty
    list is a clean bill.

    Raises:
        TraceError: the trace is damaged (ids out of range, k not constant, decode
            tokens without all layers).
    """
    checker = Checker(trace.shape)
    for rows in trace.sequences():
        checker.add(rows.pos, rows.phase, rows.layer, rows.experts)
    return checker.findings()


@compiled(nb.boolean(nb.Array(nb.uint16, 2, "C", readonly=True)))
def _repeats(first: np.ndarray) -> bool:
    """Whether first choices [T, L] equal those of some fixed number of tokens before,
    in the second half.
    """
    late = first[len(first) // 2 :]
    if len(late) < LOOP_TOKENS // 2:
        return False
    flat = late.reshape(-1)
    for lag in range(1, min(LOOP_TOKENS, len(late) // 2) + 1):
        back = lag * late.shape[1]
        equal = 0
        for place in range(back, len(flat)):
            equal += flat[place] == flat[place - back]
        if equal >= LOOP_LEAST * (len(flat) - back):
            return True
    return False


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")
