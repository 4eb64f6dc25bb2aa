"""Learns from rows measured on the machine, and names rows that do not fit.

A row of another model on the same machine teaches about the machine; what is particular
to one file stays with that file. A row that contradicts all others is set aside by
name instead of being averaged in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.advice.bench.rows import BenchRow, check_one_machine, setting_of
from moesim.advice.errors import AdviceError
from moesim.advice.model.catalogue import named_contents
from moesim.advice.model.resolve import model_contents
from moesim.advice.times.latents import Beliefs, Observation, learn, standardised
from moesim.advice.times.predictor import (
    PREFILL_SPREAD,
    REPEAT_SPREAD,
    Target,
    decode_target,
    prefill_target,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.advice.machine.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.latents import Priors

# The weight formats end a file's name, as in Qwen3-30B-A3B-UD-Q4_K_XL.
_LABEL = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|MXFP4|BF16|F16))$", re.IGNORECASE)

# A row this many spreads away from what the others and the machine say is named.
CONTRADICTION = 3.5
# Files of one model in one format differ by less than this in size.
SAME_FILE = 0.02


@dataclass(frozen=True)
class ObservedRow:
    """A row with what was predicted for it before it was read.

    Attributes:
        row: as measured.
        words: its flags.
        expected: tokens per second expected without it.
        target: what was predicted.
    """

    row: BenchRow
    words: str
    expected: float
    target: Target


@dataclass(frozen=True)
class ObservedRows:
    """Rows of llama-bench and what became of them.

    Attributes:
        rows: as read.
        used: learned from.
        contradicting: set aside, each with a reason in words.
        foreign: of a model that is not at hand.
    """

    rows: tuple[BenchRow, ...] = ()
    used: tuple[ObservedRow, ...] = ()
    contradicting: tuple[tuple[ObservedRow, str], ...] = ()
    foreign: tuple[BenchRow, ...] = ()

    @property
    def observations(self) -> list[Observation]:
        """Measured times of the rows that were learned from."""
        return [_observation(row) for row in self.used]

    @property
    def devices(self) -> tuple[str | None, str | None]:
        """CPU and GPU as llama-bench names them; None where no row does."""
        cpu = next((row.text("cpu_info") for row in self.rows), "")
        gpu = next((row.text("gpu_info") for row in self.rows), "")
        return cpu or None, gpu or None


def observe(
    rows: ObservedRows, model: ModelContents, machine: Machine, priors: Priors
) -> tuple[Beliefs, ObservedRows]:
    """Learn from rows.

    Args:
        rows: as read; may hold none.
        model: that is asked about.
        machine: that they were measured on.
        priors: of its latents.

    Raises:
        AdviceError: rows of several machines.
    """
    # The common case: nobody has measured yet.
    if not rows.rows:
        return Beliefs(priors), rows
    check_one_machine(rows.rows)

    known: list[ObservedRow] = []
    foreign: list[BenchRow] = []
    # What is not at hand has unknown bytes, so its times say nothing.
    for row in rows.rows:
        contents = _model_of(row, model)
        if contents is None:
            foreign.append(row)
        else:
            known.append(_observed(row, contents, machine, priors))

    contradicting = _contradictions(known, priors)
    aside = [each for each, _ in contradicting]
    used = [each for each in known if each not in aside]
    beliefs = learn(priors, [_observation(each) for each in used])
    return beliefs, replace(
        rows,
        used=tuple(used),
        contradicting=tuple(contradicting),
        foreign=tuple(foreign),
    )


def _model_of(row: BenchRow, model: ModelContents) -> ModelContents | None:
    """Return the contents of the row's file, if they are at hand."""
    size = row.text("model_size")
    name = Path(row.text("model_filename")).name
    if size.isdecimal() and abs(int(size) / model.file_bytes - 1) < SAME_FILE:
        return model
    if not size.isdecimal() and (not name or name == model.name):
        # Markdown states no exact size; take the user's word that it is this model.
        return model
    named = _named(Path(name).stem)
    if named is not None and named.name == model.name and named.quant == model.quant:
        return model
    try:
        return model_contents(row.text("model_filename"))
    except (AdviceError, OSError):
        return named


def _named(stem: str) -> ModelContents | None:
    """Compute a model from a file name such as ``Qwen3-30B-A3B-Q4_K_M``."""
    label = _LABEL.search(stem)
    if label is None:
        return None
    try:
        return named_contents(stem, label.group(1))
    except AdviceError:
        return None


def _observed(
    row: BenchRow, contents: ModelContents, machine: Machine, priors: Priors
) -> ObservedRow:
    setting = setting_of(row)
    if not machine.graphics:
        # llama-bench prints its default of 99 layers even where there is no GPU.
        setting = replace(setting, gpu_layers=0)
    if row.kind == "decode":
        depth = row.depth + row.tokens / 2
        target = decode_target(machine, contents, setting, depth)
    else:
        target = prefill_target(machine, contents, setting, row.tokens, row.depth)

    seconds = target.predicted(Beliefs(priors)).value
    tokens = row.tokens if row.kind == "prefill" else 1
    words = _words(row, setting.cpu_layers)
    return ObservedRow(row, words, tokens / seconds, target)


def _words(row: BenchRow, cpu_layers: int) -> str:
    test = "pp" if row.kind == "prefill" else "tg"
    words = [f"{test}{row.tokens}", f"-ncmoe {cpu_layers}"]
    if row.kind == "prefill":
        words.append(f"-ub {row.whole('n_ubatch', 512)}")
    if row.depth:
        words.append(f"depth {row.depth}")
    return " ".join(words)


def _observation(each: ObservedRow) -> Observation:
    # Repetitions within one launch agree better than launches do.
    floor = REPEAT_SPREAD if each.row.kind == "decode" else PREFILL_SPREAD
    spread = max(floor, each.row.spread)
    return each.target.observed(each.row.seconds, spread, each.words)


def _contradictions(
    rows: Sequence[ObservedRow], priors: Priors
) -> list[tuple[ObservedRow, str]]:
    """Find rows that all others, or the machine itself, speak against.

    One at a time, the worst first: a gross error makes its neighbours look wrong too.
    """
    left = list(rows)
    contradicting: list[tuple[ObservedRow, str]] = []

    while left:
        worst = None
        for each in left:
            # A row may not testify for itself.
            others = [_observation(other) for other in left if other is not each]
            beliefs = learn(priors, others)
            distance = standardised(beliefs, _observation(each))
            if worst is None or abs(distance) > abs(worst[1]):
                worst = (each, distance, beliefs)
        assert worst is not None
        each, distance, beliefs = worst
        if abs(distance) < CONTRADICTION:
            break

        expected = each.target.predicted(beliefs).inverse()
        tokens = each.row.tokens if each.row.kind == "prefill" else 1
        reason = (
            f"measured {each.row.tokens_per_s:.4g} tokens/s, the rest says"
            f" {tokens * expected.low:.4g} to {tokens * expected.high:.4g}"
        )
        contradicting.append((each, reason))
        left.remove(each)
    return contradicting
