"""Reads what ``llama-bench`` prints, learns from it, and names rows that do not fit.

A row is one test: so many prompt tokens (``pp512``) or generated tokens (``tg128``) at
a depth, with the flags, the mean speed and the spread of repetitions. Tests that mix
both are left out, because their time cannot be told apart.

A row of another model on the same machine teaches about the machine; what is particular
to one file stays with that file. A row is doubted only against other rows of the same
machine, never against what machines do in general: what the user measured outweighs
every prior, and where it lies far from it, the likely reasons are named.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.advice.machine import LINUX, WINDOWS, WSL
from moesim.advice.model.catalogue import model_contents, named_contents
from moesim.advice.plan.commands import overridden_layers
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
from moesim.advice.times.work import (
    ALL_LAYERS,
    DEFAULT_BATCH,
    DEFAULT_MICRO_BATCH,
    DecodeWork,
    Setting,
)
from moesim.base.errors import AdviceError
from moesim.base.inputs import InputError, load_json, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents

_TEST = re.compile(r"^(pp|tg)\s*(\d+)(?:\s*@\s*d\s*(\d+))?$")
_SPEED = re.compile(r"([\d.]+)\s*(?:±|\+-|\+/-)?\s*([\d.]+)?")
_NUMBER_KEYS = ("avg_ts", "n_prompt", "n_gen")

# Markdown prints short column names.
_SHORT = {
    "ngl": "n_gpu_layers",
    "ncmoe": "n_cpu_moe",
    "threads": "n_threads",
    "ub": "n_ubatch",
    "fa": "flash_attn",
    "mmap": "use_mmap",
    "lm": "load_mode",
    "ot": "tensor_buft_overrides",
    "model": "model_type",
}


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test of llama-bench.

    Attributes:
        kind: ``prefill`` or ``decode``.
        tokens: of the prompt, or generated.
        depth: context tokens in front.
        tokens_per_s: mean over repetitions.
        spread: their standard deviation over the mean; 0 unknown.
        values: everything else of the row, by llama-bench's names.
        place: file and number of the row, for messages.
    """

    kind: str
    tokens: int
    depth: int
    tokens_per_s: float
    spread: float
    values: Mapping[str, str]
    place: str

    def text(self, key: str) -> str:
        """Return a value as text; empty where the row lacks it."""
        return str(self.values.get(key) or "").strip()

    def whole(self, key: str, default: int) -> int:
        """Return a value as a whole number.

        Raises:
            AdviceError: something else stands there.
        """
        text = self.text(key)
        if not text:
            return default
        try:
            return int(float(text))
        except (ValueError, OverflowError):
            raise AdviceError(
                f"{self.place}: {key}: expected a number, found {text!r}"
            ) from None

    @property
    def made(self) -> int:
        """Tokens that `seconds` are for: the prompt's, or one."""
        return self.tokens if self.kind == "prefill" else 1

    @property
    def seconds(self) -> float:
        """Seconds per token (decode) or of the prompt (prefill)."""
        return self.made / self.tokens_per_s


def read_bench(path: Path) -> list[BenchRow]:
    """Read what llama-bench wrote with ``-o json``, ``jsonl``, ``csv`` or ``md``.

    Raises:
        AdviceError: nothing of the kind, or no row that says a speed.
    """
    try:
        text = read_text(path, "utf-8-sig").strip()
    except OSError as error:
        raise AdviceError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise AdviceError(f"{path}: not text in UTF-8") from None

    records = _records(text, path)
    rows = []
    for number, record in enumerate(records, start=1):
        row = _row(record, f"{path}, row {number}")
        if row is not None:
            rows.append(row)
    if not rows:
        raise AdviceError(
            f"{path}: no row with a speed; expected the output of `llama-bench … -o"
            " json` (jsonl, csv and md work too)"
        )
    return rows


def _records(text: str, path: Path) -> list[dict[str, Any]]:
    if text.startswith(("[", "{")):
        return _json_records(text, path)
    # The table may be pasted without its first lines.
    if "|" in text.partition("\n")[0]:
        return _markdown_records(text)
    if text.splitlines() and "avg_ts" in text.splitlines()[0]:
        return list(csv.DictReader(io.StringIO(text)))

    # llama-bench may print its table below lines about the devices it found.
    tables = [line for line in text.splitlines() if line.startswith("|")]
    if tables:
        return _markdown_records("\n".join(tables))
    raise AdviceError(
        f"{path}: expected the output of `llama-bench … -o json` (jsonl, csv and md"
        f" work too), found {text[:40]!r}"
    )


def _json_records(text: str, path: Path) -> list[dict[str, Any]]:
    try:
        decoded = load_json(text)
        records = decoded if isinstance(decoded, list) else [decoded]
    except InputError as error:
        raise AdviceError(f"{path}: {error}") from None
    except ValueError:
        records = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                records.append(load_json(line))
            except ValueError as error:
                raise AdviceError(
                    f"{path}, line {number}: not JSON: {error}; let llama-bench write"
                    " it again with -o json"
                ) from None
    if not all(isinstance(record, dict) for record in records):
        raise AdviceError(f"{path}: expected a list of objects, found something else")
    return records


def _markdown_records(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    if not lines:
        return []
    head = [cell.strip() for cell in lines[0].strip("| ").split("|")]
    records = []
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        # The line below the heads, and lines that somebody cut.
        ruler = all(set(cell) <= set("-: ") for cell in cells)
        if ruler or len(cells) != len(head):
            continue
        records.append(_unfolded(dict(zip(head, cells, strict=True))))
    return records


def _unfolded(record: dict[str, str]) -> dict[str, Any]:
    """Take a Markdown row's test and speed apart, as the other formats write them."""
    values: dict[str, Any] = {_SHORT.get(key, key): v for key, v in record.items()}
    test = _TEST.match(record.get("test", ""))
    speed = _SPEED.match(record.get("t/s", ""))
    if test is not None:
        kind, tokens, depth = test.groups()
        values["n_prompt"], values["n_gen"] = (
            (tokens, 0) if kind == "pp" else (0, tokens)
        )
        values["n_depth"] = depth or 0
    elif "test" in record:
        # Of several kinds at once, which have one time for all.
        values["n_prompt"] = values["n_gen"] = 1
    if "t/s" in record:
        mean, deviation = speed.groups() if speed else (record["t/s"], None)
        values |= {"avg_ts": mean, "stddev_ts": deviation}
    return values


def _row(record: Mapping[str, Any], place: str) -> BenchRow | None:
    """Turn a record into a row; None for a test that mixes prompt and answer."""
    missing = [key for key in _NUMBER_KEYS if key not in record]
    if missing:
        raise AdviceError(
            f"{place}: expected llama-bench's {', '.join(missing)}; let llama-bench"
            " write it again with -o json"
        )
    prompt = _number(record, "n_prompt", place)
    generated = _number(record, "n_gen", place)
    # They would count as none, and the row as a test of the other kind.
    if min(prompt, generated) < 0:
        raise AdviceError(
            f"{place}: n_prompt and n_gen: expected tokens from 0, found {prompt:g} and"
            f" {generated:g}"
        )
    # A mixed test has one time for two kinds of work.
    if (prompt > 0) == (generated > 0):
        return None

    speed = _number(record, "avg_ts", place)
    if speed <= 0:
        raise AdviceError(f"{place}: avg_ts: expected a speed above 0, found {speed:g}")
    # Older versions print no deviation.
    deviation = _number(record, "stddev_ts", place) if record.get("stddev_ts") else 0.0
    if deviation < 0:
        raise AdviceError(
            f"{place}: stddev_ts: expected a deviation from 0, found {deviation:g}"
        )
    return BenchRow(
        kind="prefill" if prompt else "decode",
        tokens=int(prompt or generated),
        depth=int(_number(record, "n_depth", place)) if "n_depth" in record else 0,
        tokens_per_s=speed,
        spread=deviation / speed,
        values={key: str(value) for key, value in record.items()},
        place=place,
    )


def _number(record: Mapping[str, Any], key: str, place: str) -> float:
    try:
        value = float(record[key])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise AdviceError(f"{place}: {key}: expected a number, found {record[key]!r}")
    return value


def setting_of(row: BenchRow) -> Setting:
    """Read the flags of a row."""
    micro = row.whole("n_ubatch", DEFAULT_MICRO_BATCH)
    batch = row.whole("n_batch", DEFAULT_BATCH)
    kv_format = row.text("type_k") or "f16"
    overrides = row.text("tensor_buft_overrides")
    # Zero stands for the engine's own default.
    threads = row.whole("n_threads", 0)
    return Setting(
        cpu_layers=row.whole("n_cpu_moe", 0),
        gpu_layers=row.whole("n_gpu_layers", ALL_LAYERS),
        threads=threads or None,
        micro_batch=min(micro, batch),
        batch=batch,
        flash=row.text("flash_attn").lower() not in {"0", "false", "off"},
        kv_format=kv_format,
        # Mapped files lie in ordinary memory, which copies go through a buffer for.
        page_locked=row.text("use_mmap").lower() in {"0", "false"}
        or row.text("load_mode").lower() in {"none", "dio"},
        chosen_layers=overridden_layers(overrides) if overrides else None,
    )


def check_one_machine(rows: Sequence[BenchRow]) -> None:
    """Refuse rows of several machines: their times cannot say one thing.

    Raises:
        AdviceError: naming both.
    """
    # Names alone: two machines of one kind cannot be told apart.
    for key in ("gpu_info", "cpu_info"):
        seen = _distinct(row.text(key) for row in rows)
        if len(seen) > 1:
            raise AdviceError(
                f"the rows come from different machines ({seen[0]!r} and {seen[1]!r});"
                " give the rows of one machine"
            )


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, values)))


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
