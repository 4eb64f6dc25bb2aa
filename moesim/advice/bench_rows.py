"""Reads what ``llama-bench`` prints: JSON, JSON lines, CSV or its Markdown table.

A row is one test: so many prompt tokens (``pp512``) or generated tokens (``tg128``) at
a depth, with the flags, the mean speed and the spread of repetitions. Tests that mix
both are left out, because their time cannot be told apart.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.advice.times.work import (
    ALL_LAYERS,
    DEFAULT_BATCH,
    DEFAULT_MICRO_BATCH,
    Setting,
)
from moesim.base.errors import AdviceError
from moesim.base.inputs import InputError, load_json, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

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


def overridden_layers(text: str) -> frozenset[int] | None:
    r"""Read ``-ot`` patterns: which layers' experts stay on the CPU.

    llama.cpp gives a tensor the place of the first pattern that matches its name.

    Args:
        text: such as ``blk\.(1|2)\.ffn_.*_exps.*=CPU``, several separated by commas or
            semicolons.

    Returns:
        Layer numbers below 1,000; None where no pattern is about experts.

    Raises:
        AdviceError: no expression, or one that parts the matrices of a layer's experts.
    """
    rules = []
    for pattern in re.split(r"[;,](?=[^=]*=)", text):
        expression, equals, place = pattern.rpartition("=")
        if not equals:
            continue
        try:
            rules.append((re.compile(expression), place.strip().upper()))
        except re.error:
            raise AdviceError(
                f"-ot {pattern!r}: not a regular expression; is it cut off?"
            ) from None

    layers: set[int] = set()
    named = False
    # Which layers a pattern means depends on the model; more than 1,000 has none.
    for at in range(1000):
        places = [
            _first_place(rules, f"blk.{at}.ffn_{part}_exps.weight")
            for part in ("up", "gate", "down")
        ]
        named = named or any(places)
        on_cpu = [place.startswith("CPU") for place in places]
        if all(on_cpu):
            layers.add(at)
        elif any(on_cpu):
            raise AdviceError(
                f"-ot {text!r}: puts a part of an expert's three matrices on the CPU;"
                " moesim predicts whole layers of experts"
            )
    return frozenset(layers) if named else None


def _first_place(rules: Sequence[tuple[re.Pattern[str], str]], name: str) -> str:
    return next((place for rule, place in rules if rule.search(name)), "")


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
