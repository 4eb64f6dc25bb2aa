"""Learns from rows measured on the machine, and names rows that do not fit.

A row of another model on the same machine teaches about the machine; what is particular
to one file stays with that file. A row is doubted only against other rows of the same
machine, never against what machines do in general: what the user measured outweighs
every prior, and where it lies far from it, the likely reasons are named.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.advice.bench_rows import BenchRow, check_one_machine, setting_of
from moesim.advice.machine import LINUX, WINDOWS, WSL
from moesim.advice.model.catalogue import model_contents, named_contents
from moesim.advice.plan.ranking import Grades
from moesim.advice.tables import table
from moesim.advice.times.latents import Beliefs, Observation, learn, standardised
from moesim.advice.times.priors import PriorTable
from moesim.advice.times.step_times import (
    PREFILL_SPREAD,
    REPEAT_SPREAD,
    Target,
    decode_target,
    prefill_target,
)
from moesim.advice.times.work import DecodeWork
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.work import Setting

# The weight formats end a file's name, as in Qwen3-30B-A3B-UD-Q4_K_XL.
_LABEL = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|MXFP4|BF16|F16))$", re.IGNORECASE)

# A row so many spreads away from what the others say is set aside.
CONTRADICTION = 3.5
FEWEST_WITNESSES = 3
WIDENED = 5.0
# A row so many spreads slower than expected is explained.
SURPRISE = 1.5
# States that come so near (in logarithms) explain a row equally well.
AS_GOOD = 0.25
MOST_EXPLANATIONS = 3
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
        explanations: states that come closest to it, best first, where it is far from
            what was expected.
    """

    row: BenchRow
    words: str
    expected: float
    target: Target
    explanations: tuple[Explanation, ...] = ()


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
    def surprises(self) -> list[ObservedRow]:
        """Rows that were learned from, though far from what was expected."""
        return [row for row in self.used if row.explanations]

    @property
    def observations(self) -> list[Observation]:
        """Measured times of the rows that were learned from."""
        return [_observation(row) for row in self.used]

    def grades(self, model: ModelContents, machine: Machine) -> Grades:
        """Return what predictions rest on with these rows."""
        targets = [row.target for row in self.used if row.target.model == model.name]
        steps = [target for target in targets if isinstance(target.work, DecodeWork)]
        decode = "probes" if machine.probes.host_read else "specification"
        if steps:
            decode = "one row" if len(steps) == 1 else "two rows"
        elif self.used:
            decode = "another model"
        prompts = len(targets) > len(steps)
        return Grades(decode, "prompt one row" if prompts else "prompt specification")

    @property
    def devices(self) -> tuple[str | None, str | None]:
        """CPU and GPU as llama-bench names them; None where no row does."""
        cpu = next((row.text("cpu_info") for row in self.rows), "")
        gpu = next((row.text("gpu_info") for row in self.rows), "")
        return cpu or None, gpu or None


def observe(
    rows: ObservedRows, model: ModelContents, machine: Machine, priors: PriorTable
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
    before = Beliefs(priors)
    used = [
        replace(each, explanations=_explained(each, machine, before))
        for each in known
        if each not in aside
    ]
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
    row: BenchRow, contents: ModelContents, machine: Machine, priors: PriorTable
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

    expected = target.predicted(Beliefs(priors)).per(row.made).value
    words = _words(row, setting.cpu_layers)
    return ObservedRow(row, words, expected, target)


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
    rows: Sequence[ObservedRow], priors: PriorTable
) -> list[tuple[ObservedRow, str]]:
    """Find rows that the other rows of the machine speak against.

    What is believed of machines in general doubts no row: priors are widened until only
    rows count. One at a time, the worst first, because a gross error makes its
    neighbours look wrong too; two rows alone cannot tell which of them is wrong.
    """
    left = list(rows)
    contradicting: list[tuple[ObservedRow, str]] = []
    # What is particular to a file stays small, or it would explain every row.
    wide = {
        name: replace(prior, spread=WIDENED * prior.spread)
        for name, prior in priors.items()
        if not name.startswith("misfit:")
    }
    open_minded = PriorTable(wide, priors.population)

    while len(left) >= FEWEST_WITNESSES:
        worst = None
        for each in left:
            # A row may not testify for itself.
            others = [_observation(other) for other in left if other is not each]
            beliefs = learn(open_minded, others, robust=True)
            distance = standardised(beliefs, _observation(each))
            if worst is None or abs(distance) > abs(worst[1]):
                worst = (each, distance, beliefs)
        assert worst is not None
        each, distance, beliefs = worst
        if abs(distance) < CONTRADICTION:
            break

        expected = each.target.predicted(beliefs).per(each.row.made)
        reason = (
            f"measured {each.row.tokens_per_s:.4g} tokens/s, the other rows say"
            f" {expected.low:.4g} to {expected.high:.4g}"
        )
        contradicting.append((each, reason))
        left.remove(each)
    return contradicting


@dataclass(frozen=True, slots=True)
class Explanation:
    """A state of the machine that would give what a row measured.

    Attributes:
        words: the state.
        command: that tells whether it is so.
        tokens_per_s: predicted in that state.
    """

    words: str
    command: str
    tokens_per_s: float


def _explained(
    row: ObservedRow, machine: Machine, beliefs: Beliefs
) -> tuple[Explanation, ...]:
    """Explain a row that is slower than what was expected of the machine."""
    # Faster than expected needs no excuse.
    if standardised(beliefs, _observation(row)) < SURPRISE:
        return ()
    causes = states(machine, row.target.setting)
    measured = row.row.tokens_per_s
    return explanations(row.target, row.row.made, measured, beliefs, causes)


def explanations(
    target: Target,
    tokens: int,
    measured: float,
    beliefs: Beliefs,
    causes: Iterable[State],
) -> tuple[Explanation, ...]:
    """Predict a measured speed in every state that slows machines down.

    Args:
        target: what was measured.
        tokens: that its seconds are for.
        measured: tokens per second.
        beliefs: of the machine.
        causes: states to try.

    Returns:
        The likeliest first, of those that come near; of all if none does.
    """
    rates = {name: beliefs.median(name) for name in target.latents}
    expected = tokens / target.seconds(rates)
    options = []
    for state in causes:
        slowed = {
            name: value * state.factors.get(name.partition(":")[0], 1.0)
            for name, value in rates.items()
        }
        speed = tokens / target.seconds(slowed)
        if speed < 0.97 * expected:
            distance = abs(math.log(speed / measured))
            # What is met often may be somewhat further off.
            distance -= AS_GOOD * math.log(state.odds)
            options.append((distance, Explanation(state.words, state.command, speed)))
    options.sort(key=lambda option: option[0])
    near = [option for option in options if option[0] < AS_GOOD]
    # One suspect alone would hide what else is likely.
    if len(near) < MOST_EXPLANATIONS - 1:
        near = options
    return tuple(explanation for _, explanation in near[:MOST_EXPLANATIONS])


@dataclass(frozen=True, slots=True)
class State:
    """What slows a machine down.

    Attributes:
        words: the state.
        command: that tells whether it is so.
        factors: of latents, in it.
        odds: how often it is met, against the others.
    """

    words: str
    command: str
    factors: Mapping[str, float]
    odds: float


def states(machine: Machine, setting: Setting) -> list[State]:
    """Return what slows a machine down that runs with a setting."""
    processor = machine.processor
    channels = machine.memory.channels or processor.channels
    facts = {
        "always": True,
        "two channels": channels > 1 and not machine.unified,
        "four channels": channels > 2,
        "two generations": len(processor.memory_generations) > 1,
        "crowded": (setting.threads or 0) > processor.cores,
        "mapped": setting.mapped,
        "Linux": machine.system == LINUX,
        "WSL": machine.system == WSL,
        "a driver of Windows": machine.windows,
        "Windows": machine.system == WINDOWS,
        "card": bool(machine.graphics),
        "card with memory": bool(machine.graphics) and not machine.unified,
        "cuda": machine.backend == "cuda",
    }

    def first(values: Mapping[str, Any]) -> Any:
        return next(value for fact, value in values.items() if facts[fact])

    known = table("states")
    # A single channel's share is this machine's own.
    shares = {"one channel": 1 / channels}
    return [
        State(
            words=row["words"].format(channels=channels),
            command=first(known["commands"][row["tells"]]),
            factors={
                latent: shares.get(factor, factor)
                for latent, factor in row["factors"].items()
            },
            odds=first(row.get("odds", {"always": 1.0})),
        )
        for row in known["states"]
        if facts[row.get("where", "always")]
    ]
