"""Can this trace be trusted? Checks of meaning, behind the checks of form that reader
and importers make.

Nothing here refuses a trace. A grave finding says that results would mislead; the
others are worth a remark.

The unevenness of a layer is Pearson's chi-square of its loads against equal loads, over
its expectation for routing drawn at random: K distinct experts per token, all equally
likely, give ``E - K`` (multinomial ``E - 1``, thinned by drawing without replacement).
Random routing scores 1; the medians of the real traces at hand lie between 24 and 2085.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.format.schema import Phase
from moesim.traces.stats.statistics import expert_uses

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape

# Median chi-square over its random expectation below which routing looks drawn at
# random.
UNEVEN_LEAST = 2.0
# Expected choices per expert and layer that the chi-square needs (Cochran's rule).
LOAD_LEAST = 5.0
# Share of first choices that equal those a fixed number of tokens before: above it, a
# sequence repeats itself.
LOOP_LEAST = 0.8
# Generated tokens below which a sequence is not judged; longest period looked for.
LOOP_TOKENS = 64
# Tokens in a row that have the same experts at all their layers, above which they are
# an engine's profiling run and not routing: unlike loops, nothing at all differs.
ALIKE_TOKENS = 32
# A finding names no more sequences or layers than this.
_NAMED = 4
_KINDS = {
    "late": (
        "{count} of {all} sequences begin their prompt behind position 0 ({listed}): a"
        " reused prefix is missing; record without prefix caching"
    ),
    "hole": (
        "positions are missing in {count} sequences, first in sequence {first} at"
        " {number}; record without prefix caching"
    ),
    "profiling": (
        "{number:,} tokens in a row have the same experts at every layer, first in"
        " sequence {first}: an engine's profiling run, no routing; `trace import"
        " --drop-profiling` leaves it out"
    ),
    "loop": (
        "{count} of {all} sequences repeat themselves ({listed}): a greedy loop; caches"
        " look better on them than they are"
    ),
    "copy": "{count} sequences are copies of others ({pairs})",
}
"""Findings about sequences: what is said of all that deserve one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark: `kind` for programs, `text` for people; `grave` where results would
    mislead.
    """

    kind: str
    text: str
    grave: bool = False


class QualityChecker:
    """Looks at sequences one by one. L layers, E experts, K per token.

    Attributes:
        shape: the model.
        load: int64 [L, E], choices so far.
        sequences: how many there were.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.load = np.zeros((shape.layers, shape.experts), np.int64)
        self.sequences = 0
        self._prompts = 0
        # Kind of finding -> sequences that deserve it, each with a number to name.
        self._found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in _KINDS}
        # Layer -> sequences in which it holds only part of the prompt.
        self._ragged: Counter[int] = Counter()
        # Digest -> the first sequence with it.
        self._digests: dict[int, int] = {}

    def add(
        self, pos: np.ndarray, phase: np.ndarray, layer: np.ndarray, experts: np.ndarray
    ) -> None:
        """Look at one sequence. N rows, sorted by pos and layer, all in range.

        Args:
            pos: int [N].
            phase: int [N], codes of `Phase`.
            layer: int [N].
            experts: int [N, K].
        """
        number = self.sequences
        self.sequences += 1
        self.load += expert_uses(layer, experts, self.shape)

        if pos[0] != 0 and phase[0] == Phase.PREFILL:
            self._found["late"].append((number, int(pos[0])))
        jump = np.diff(pos) > 1
        if jump.any():
            self._found["hole"].append((number, int(pos[int(jump.argmax())]) + 1))

        prompt = int(np.searchsorted(phase, Phase.DECODE))
        self._prompts += prompt > 0
        prompt_rows = np.bincount(layer[:prompt], minlength=self.shape.layers)
        short = np.flatnonzero(prompt_rows < prompt_rows.max(initial=0))
        self._ragged.update(short.tolist())

        first = self._digests.setdefault(hash((len(pos), experts.tobytes())), number)
        # A single token may well be routed as another was.
        if len(pos) > self.shape.layers and first != number:
            self._found["copy"].append((number, first))

        alike = alike_rows(pos, layer, experts)
        if alike.any():
            self._found["profiling"].append((number, len(np.unique(pos[alike]))))

        first_choice = np.ascontiguousarray(experts[prompt:, 0], np.uint16)
        if _repeats(first_choice.reshape(-1, self.shape.layers)):
            self._found["loop"].append((number, 0))

    def findings(self) -> list[Finding]:
        """Return what the sequences so far deserve, grave findings first."""
        findings = [
            *self._of_load(),
            *self._of_sequences(),
            *self._of_layers(),
        ]
        if not self._prompts:
            text = "no prompt tokens: everything replays as decode"
            findings.append(Finding("prefill", text))

        return sorted(findings, key=lambda finding: not finding.grave)

    def uneven(self) -> np.ndarray:
        """Return the chi-square of each layer's loads over its expectation for random
        routing: float [L], nan without load.
        """
        expected = self.load.sum(axis=1, keepdims=True) / self.shape.experts
        with np.errstate(invalid="ignore", divide="ignore"):
            square = ((self.load - expected) ** 2 / expected).sum(axis=1)

        return square / max(1, self.shape.experts - self.shape.top_k)

    def _of_load(self) -> list[Finding]:
        least_load = self.load.sum(axis=1).min()
        too_few = least_load < LOAD_LEAST * self.shape.experts
        # Where every expert is always chosen, loads are even by nature.
        if self.shape.experts <= self.shape.top_k or too_few:
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

    def _of_sequences(self) -> list[Finding]:
        findings = []
        for kind, cases in self._found.items():
            if not cases:
                continue
            first, number = cases[0]
            listed = _listed([sequence for sequence, _ in cases])
            pairs = ", ".join(f"{copy} = {other}" for copy, other in cases[:_NAMED])
            text = _KINDS[kind].format(
                count=len(cases),
                all=self.sequences,
                first=first,
                number=number,
                listed=listed,
                pairs=pairs,
            )
            findings.append(Finding(kind, text, grave=kind != "loop"))
        return findings

    def _of_layers(self) -> list[Finding]:
        findings = []

        if self._ragged:
            layers = sorted(self._ragged)
            # Some engines compute the last layer only where logits are wanted.
            only_last = layers == [self.shape.layers - 1]
            where = "the last layer" if only_last else f"layers {_listed(layers)}"
            text = (
                f"{where} holds only part of the prompt in"
                f" {max(self._ragged.values())} sequences (ragged prefill, legal)"
            )
            findings.append(Finding("ragged", text, grave=not only_last))

        untouched = int((self.load.sum(axis=1) == 0).sum())
        if untouched:
            text = f"{untouched} of {self.shape.layers} layers never appear"
            findings.append(Finding("layers", text, grave=True))

        return findings


def alike_rows(pos: np.ndarray, layer: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Return the rows of at least `ALIKE_TOKENS` tokens in a row whose experts are the
    same at all their layers: bool [N], of a sequence sorted by pos and layer.
    """
    by_layer = np.argsort(layer, kind="stable")
    same = np.zeros(len(pos), bool)
    at_layer = layer[by_layer]
    chosen = experts[by_layer]
    follows = (at_layer[1:] == at_layer[:-1]) & (chosen[1:] == chosen[:-1]).all(axis=1)
    same[by_layer[1:]] = follows

    starts = np.flatnonzero(np.diff(pos, prepend=pos[0] - 1))
    tokens = np.minimum.reduceat(same, starts)
    edges = np.diff(np.concatenate(([0], tokens.astype(np.int8), [0])))
    alike = np.zeros(len(tokens), bool)
    # The first token of a run is like the ones behind it.
    for first, end in zip(
        np.flatnonzero(edges > 0) - 1, np.flatnonzero(edges < 0), strict=True
    ):
        alike[first:end] = end - first >= ALIKE_TOKENS
    return np.repeat(alike, np.diff(np.append(starts, len(pos))))


def check_quality(trace: Trace) -> list[Finding]:
    """Read a trace once and return what deserves a remark, grave findings first; an
    empty list means that nothing does.

    Raises:
        TraceError: the trace is damaged (ids out of range, k not constant, decode
            tokens without all layers).
    """
    checker = QualityChecker(trace.shape)
    for rows in trace.sequences():
        checker.add(rows.pos, rows.phase, rows.layer, rows.experts)

    return checker.findings()


def _listed(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers[:_NAMED]))
    return f"{listed}, …" if len(numbers) > _NAMED else listed


def _repeats(first_choice: np.ndarray) -> bool:
    """Tell whether first choices [T, L] equal those of some fixed number of tokens
    before, in the second half: a greedy loop sets in late and never ends.
    """
    second_half = first_choice[len(first_choice) // 2 :]
    tokens = len(second_half)
    if tokens < LOOP_TOKENS // 2:
        return False

    for period in range(1, min(LOOP_TOKENS, tokens // 2) + 1):
        equal = second_half[period:] == second_half[:-period]
        if np.count_nonzero(equal) >= LOOP_LEAST * equal.size:
            return True

    return False
