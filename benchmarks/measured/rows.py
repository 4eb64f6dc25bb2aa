"""Reads a folder of other people's measurements, row by row, as what the row says.

The files are those of ``python -m benchmarks.measured DIR``; `docs/how-to/advise.md`
lists their columns. Any of them may be missing. A *run* is one machine, one model, one
setting and one measured speed of llama.cpp or ik_llama.cpp. Rows that say too little,
or that are about something else, are skipped with the reason.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from moesim.advice.machine import Machine, Probes, describe_machine
from moesim.advice.model.catalogue import named_contents, shape_named
from moesim.advice.model.contents import LayerContents, ModelContents
from moesim.advice.plan.commands import overridden_layers
from moesim.advice.plan.memory import Job, bill_of
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
    NEVER,
    Setting,
    has_iqk_products,
)
from moesim.base.errors import AdviceError
from moesim.base.inputs import read_text
from moesim.traces.weight_formats import recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from moesim.advice.times.latents import Observation

Found = TypeVar("Found")

# File -> columns that its rows cannot do without.
FILES = {
    "platforms.csv": ("platform", "kind", "threads_or_mode", "value_gbs"),
    "models.csv": ("model", "quant", "n_layers", "n_moe_layers", "n_experts", "top_k"),
    "decode.csv": ("platform", "model", "quant", "n_cpu_moe", "tok_s"),
    "cache_runs.csv": ("platform", "model", "quant", "policy", "slots_per_layer"),
    "llama_bench.csv": ("id", "model", "quant", "cpu", "gpu", "flags"),
    "layer_events.csv": ("host", "model", "config", "tok_s"),
}
UNSTATED = {"", "n/s", "n/a", "none stated", "not stated", "?", "unknown", "nan"}
GB = 1e9
# Words for weights that are read into buffers, by age, and for buffers that are pinned.
UNMAPPED = r"no-mmap|-mmp 0|--mmap 0|(?:-lm|load-mode) (?:none|dio)|\+ pin|pinned"
# Rows that do not say decode a few hundred tokens after a short prompt.
SHORT_CONTEXT = 128
# STREAM's triad also writes, and a cache that fetches the line before it is written
# moves four bytes where the triad counts three. Xeons since Ice Lake spare that fetch;
# both were probed on one's host, 152 and 166 GB/s.
READ_OVER_TRIAD = {"amd": 4 / 3, "intel": 1.05}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: cells by column, and where it stands."""

    file: str
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a cell; empty where the row does not state it."""
        value = (self.cells.get(column) or "").strip()
        return "" if value.lower() in UNSTATED else value

    def number(self, column: str) -> float | None:
        """Return a cell as a number; None where it states none.

        Raises:
            AdviceError: something else than a number stands there.
        """
        text = self.text(column).replace(",", "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise AdviceError(
                f"{self.place}: {column}: expected a number, found {text!r}"
            ) from None
        if not abs(value) < float("inf"):
            raise AdviceError(
                f"{self.place}: {column}: expected a number, found {text}"
            )
        return value

    def count(self, column: str) -> int | None:
        """Return a cell as a whole number; None for words such as ``short``."""
        text = self.text(column).replace(",", "")
        return int(text) if text.isdecimal() else None

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.line}"

    @property
    def source(self) -> str:
        """Return who published the row: a repository, a thread, or an index file."""
        text = self.text("source")
        owner = re.match(r"[\w.-]+/[\w.-]+", text)
        index = re.search(r"index file \d+", text)
        if "prereg/" in text or ("results/" in text and not owner):
            return "harshithkantamneni/moe-speed-of-light"
        if text.startswith(("prereg", "results", "paper", "data/")):
            return "harshithkantamneni/moe-speed-of-light"
        if owner:
            return owner.group()
        return index.group() if index else text[:40]


@dataclass(frozen=True)
class MeasuredFolder:
    """All rows of a folder by file name."""

    path: Path
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> tuple[Row, ...]:
        """Return the rows of one file; none where the folder lacks it."""
        return self.rows.get(name, ())


def read_folder(path: Path) -> MeasuredFolder:
    """Read every known file of a folder.

    Raises:
        AdviceError: no such folder, none of the files in it, or a file without a column
            that its rows need.
    """
    if not path.is_dir():
        raise AdviceError(f"{path}: expected a folder with {', '.join(FILES)}")
    rows = {
        name: tuple(_rows(path / name, needed))
        for name, needed in FILES.items()
        if (path / name).is_file()
    }
    if not rows:
        raise AdviceError(
            f"{path}: found none of {', '.join(FILES)};"
            " docs/how-to/advise.md shows the columns"
        )
    return MeasuredFolder(path, rows)


def _rows(path: Path, needed: Iterable[str]) -> Iterable[Row]:
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
        columns = reader.fieldnames or []
        missing = [name for name in needed if name not in columns]
        if missing:
            raise AdviceError(
                f"{path}: expected the columns {', '.join(needed)}; missing:"
                f" {', '.join(missing)}"
            )
        for cells in reader:
            yield Row(path.name, reader.line_num, cells)
    except (UnicodeDecodeError, csv.Error) as error:
        raise AdviceError(f"{path}: not a CSV file in UTF-8: {error}") from None


class FolderModels:
    """Contents of every model that rows of a folder name, exact bytes first."""

    def __init__(self, folder: MeasuredFolder) -> None:
        self.exact = folder["models.csv"]
        self.known: dict[tuple[str, str], ModelContents] = {}

    def contents(self, model: str, quant: str) -> ModelContents:
        """Return what the file of a row holds.

        Args:
            model: as the row names it.
            quant: its label, possibly with the file's size.

        Raises:
            AdviceError: the model is neither in ``models.csv`` nor known by name.
        """
        key = (model, quant)
        if key not in self.known:
            self.known[key] = self._contents(model, quant)
        return self.known[key]

    def _contents(self, model: str, quant: str) -> ModelContents:
        label = re.sub(r"\s*[(;].*", "", quant)
        if not label or label == "n/s":
            raise AdviceError(f"model {model!r}: no label of its file, so no bytes")
        row = self._exact_row(model, label)
        # Exact bytes first; the table of shapes is good to a few per cent.
        if row is not None:
            contents = _from_row(row)
        else:
            contents = named_contents(model, label, _size_in_label(quant))
        return replace(contents, name=f"{_plain(model)} {label}")

    def _exact_row(self, model: str, quant: str) -> Row | None:
        """Find the row whose model name equals or continues the given one."""
        fitting = [
            row
            for row in self.exact
            if row.text("quant").lower() == quant.lower()
            and _plain(row.text("model")).startswith(_plain(model))
        ]
        # "gpt-oss-20b" also begins longer names; the shortest is meant.
        return min(fitting, key=lambda row: len(row.text("model")), default=None)


def _size_in_label(text: str) -> int | None:
    """Read the size out of ``UD-Q4_K_M (20.61 GiB)``, in bytes."""
    match = re.search(r"\(([\d.]+)\s*(GiB|GB)\b(?! layers)", text)
    if match is None:
        return None
    unit = 1024**3 if match.group(2) == "GiB" else 10**9
    return round(float(match.group(1)) * unit)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def _from_row(row: Row) -> ModelContents:
    """Spread one row's sums over layers, keeping which layers have larger experts."""
    total = _whole(row, "n_layers")
    moe = _whole(row, "n_moe_layers")
    experts = _whole(row, "n_experts")
    smallest = _whole(row, "expert_bytes_min")
    largest = _whole(row, "expert_bytes_max")
    if not 0 < moe <= total:
        raise AdviceError(
            f"{row.place}: n_moe_layers: expected 1 to {total}, got {moe}"
        )

    larger = _layers_in_words(row.text("note"), moe)
    count_larger = _whole(row, "layers_with_max")
    if not larger or len(larger) != count_larger:
        # The row does not say which; spread the larger ones evenly.
        stride = moe / max(1, count_larger)
        larger = {int(index * stride) for index in range(count_larger)}

    # The row has sums only, so all layers share one attention.
    template = _template(row, total)
    formats = recipe(row.text("quant"))
    layers = []
    for at in range(total):
        layer = template
        # Dense layers come first in every architecture that has some.
        index = at - (total - moe)
        if index >= 0:
            stored = experts * (largest if index in larger else smallest)
            layer = replace(
                layer,
                experts=experts,
                top_k=_whole(row, "top_k"),
                expert_bytes=stored,
                expert_weights=experts * _whole(row, "expert_params"),
                expert_formats={formats.up if formats else "f16": stored},
            )
        layers.append(layer)
    head_weights = _whole(row, "lm_head_params")
    named = shape_named(row.text("model"))
    return ModelContents(
        name=row.text("model"),
        architecture=row.text("model"),
        layers=tuple(layers),
        embed_bytes=_whole(row, "embed_bytes"),
        head_bytes=_whole(row, "head_bytes"),
        head_weights=head_weights,
        head_format=formats.head if formats else "f16",
        hidden=named["hidden"] if named else 0,
        source="models.csv",
        quant=row.text("quant"),
    )


def _template(row: Row, total: int) -> LayerContents:
    """Return one layer without experts; attention as the named shape has it."""
    formats = recipe(row.text("quant"))
    dense_bytes = _whole(row, "dense_bytes") // total
    dense_weights = _whole(row, "dense_params_per_token")
    layer = LayerContents(
        dense_bytes=dense_bytes,
        dense_weights=(dense_weights - _whole(row, "lm_head_params")) // total,
        dense_formats={formats.dense if formats else "f16": dense_bytes},
        kv_bytes_per_token=_whole(row, "kv_bytes_per_token_ctx") // total,
    )
    if shape_named(row.text("model")) is None:
        return layer
    named = named_contents(row.text("model"), row.text("quant")).layers
    # Attention costs FLOPs and kernels that bytes do not tell.
    return replace(
        layer,
        attention_width=sum(other.attention_width for other in named) // len(named),
        query_group=max(other.query_group for other in named),
        latent_values=named[-1].latent_values,
    )


def _whole(row: Row, column: str) -> int:
    value = row.number(column)
    if value is None or value < 0:
        raise AdviceError(f"{row.place}: {column}: expected a number >= 0, found none")
    return round(value)


def _layers_in_words(note: str, moe: int) -> set[int]:
    """Read ``max at layers 0-5,8,11`` into layer numbers."""
    match = re.search(r"layers ([\d,\- ]+)", note)
    if match is None:
        return set(range(moe))
    layers: set[int] = set()
    for piece in match.group(1).replace(" ", "").strip(",").split(","):
        first, _, last = piece.partition("-")
        layers |= set(range(int(first), int(last or first) + 1))
    return layers


class Platforms:
    """The machines of ``platforms.csv``, by name."""

    def __init__(self, folder: MeasuredFolder) -> None:
        self.rows: dict[str, list[Row]] = {}
        for row in folder["platforms.csv"]:
            self.rows.setdefault(row.text("platform"), []).append(row)
        # Rows about speeds describe machines that no row of probes does.
        self.described: dict[str, Row] = {}
        self.nameless: list[Row] = []
        for row in folder["llama_bench.csv"]:
            if row.text("platform"):
                self.described.setdefault(row.text("platform"), row)
            else:
                self.nameless.append(row)
        self.known: dict[str, Machine] = {}

    def machine(self, name: str, source: str = "") -> Machine:
        """Return a platform as specified, with its probes."""
        if name not in self.known:
            self.known[name] = self._machine(name, source)
        return self.known[name]

    def _machine(self, name: str, source: str) -> Machine:
        rows = self._rows_of(name)
        probes = _probes(rows)
        if name in self.described:
            machine = machine_of_row(self.described[name], name)
        else:
            machine = self._specified(name, rows)
        if not machine.processor.known:
            machine = self._named_elsewhere(machine, source)
        threads = max(probes.host_read, default=0)
        if not machine.processor.known and threads > 1:
            # Probes run up to all hyperthreads, two per core.
            processor = replace(machine.processor, cores=max(1, threads // 2))
            machine = replace(machine, processor=processor)
        if not any((probes.host_read, probes.link, probes.device_read)):
            return machine
        return replace(machine, probes=_joined(probes, machine.probes))

    def _specified(self, name: str, rows: Sequence[Row]) -> Machine:
        cpu = rows[0].text("cpu") if rows else name.replace("_", " ")
        gpu = rows[0].text("gpu") if rows else name.replace("_", " ")
        ram = None
        for row in rows:
            # A datasheet's rate of the filled channels is specification, not a probe.
            if row.text("kind").startswith("dram_datasheet"):
                ram = f"{row.text('value_gbs')} GB/s"
        return describe_machine(
            cpu=_spelled(cpu), gpu=_spelled(gpu), ram=ram, name=name, lenient=True
        )

    def _named_elsewhere(self, machine: Machine, source: str) -> Machine:
        """Find a machine without a processor's name among its source's other rows."""
        for row in self.nameless:
            if row.source == source:
                other = machine_of_row(row, machine.name)
                cards = [card.name for card in other.graphics]
                if cards == [card.name for card in machine.graphics]:
                    return other
        return machine

    def _rows_of(self, name: str) -> list[Row]:
        """Rows of a platform, or of the one that its name points to.

        A name may carry the job that probed it (``5090_099e_9950X``: job 099e), or
        continue another one (``9950X3D_A4``: the host of ``9950X3D_A``, rented again).
        """
        if name in self.rows:
            return self.rows[name]
        words = set(name.split("_"))
        for rows in self.rows.values():
            if rows[0].text("job") in words:
                return rows
        # The host of "9950X3D_A2" was rented again as "9950X3D_A3".
        base = name.rpartition("_")[0]
        same = [other for other in self.rows if base and other.startswith(f"{base}_")]
        begun = [other for other in self.rows if other and name.startswith(other)]
        nearest = max(same or begun, key=len, default="")
        return self.rows[nearest] if nearest else []


def _joined(first: Probes, second: Probes) -> Probes:
    return replace(
        first,
        host_read=first.host_read or second.host_read,
        link=first.link or second.link,
        device_read=first.device_read or second.device_read,
    )


def _spelled(text: str) -> str:
    """Write ``9950X`` as the devices' tables do: ``Ryzen 9 9950X``."""
    text = re.sub(r"\b(99[05]0X3?D?2?|79[05]0X?3?D?)\b", r"Ryzen 9 \1", text)
    text = re.sub(r"\b([79]800X3D)\b", r"Ryzen 7 \1", text)
    text = re.sub(r"\b(285K)\b", r"Core Ultra 9 \1", text)
    text = re.sub(r"\b(270K)\b", r"Core Ultra 7 \1 Plus", text)
    text = re.sub(r"\b(265K)\b", r"Core Ultra 7 \1", text)
    text = re.sub(r"\b(1[1-4]\d00KF?)\b", r"Core i9-\1", text)
    text = re.sub(r"\b(7352)\b", r"EPYC \1", text)
    return re.sub(r"((?:Ryzen|Core)[^,+]*? )(?:Ryzen \d|Core \w+ ?\d?) ", r"\1", text)


def _read_rate(triad: float, cpu: str) -> float:
    """Return what bare reads reach where STREAM's triad reaches so much."""
    amd = re.search(r"epyc|ryzen|threadripper", cpu, re.IGNORECASE)
    return triad * READ_OVER_TRIAD["amd" if amd else "intel"]


def _probes(rows: Iterable[Row]) -> Probes:  # one branch per kind of row
    host_read: dict[int, float] = {}
    triads: dict[int, float] = {}
    best: dict[str, float] = {}
    beside: dict[str, tuple[float, float]] = {}

    for row in rows:
        kind = row.text("kind")
        value = (row.number("value_gbs") or 0.0) * GB
        mode = row.text("threads_or_mode")
        if kind.startswith(("cpu_read", "mem_read")):
            stated = re.match(r"\d+", mode)
            # Read at the engine's own number of threads: usable for any number.
            host_read[int(stated.group()) if stated else 1] = value
        elif kind in {"h2d_pinned", "h2d", "pcie_copyengine", "pcie_zerocopy"}:
            best["link"] = max(best.get("link", 0.0), value)
        elif kind == "gpu_device_read":
            best["device"] = value
        elif kind == "concurrent_cpu":
            beside[mode] = (value, beside.get(mode, (0.0, 0.0))[1])
        elif kind == "concurrent_pcie":
            beside[mode] = (beside.get(mode, (0.0, 0.0))[0], value)
        elif kind == "concurrent_sum":
            best["both"] = value
        elif kind == "stream_triad" and mode:
            threads = int(mode) if mode.isdecimal() else 1
            triads[threads] = _read_rate(value, row.text("cpu"))
        elif kind == "memcpy_payload":
            # Every byte is read and written, so memory moves twice the payload.
            best["moved"] = 2 * value

    if not host_read:
        host_read = triads
    host_read = {
        count: max(rate, best.get("moved", 0.0)) for count, rate in host_read.items()
    }
    # Of several ways to copy, the one that moves most in sum.
    host, link = max(beside.values(), key=sum, default=(None, None))
    return Probes(
        host_read=host_read,
        link=best.get("link"),
        device_read=best.get("device"),
        host_beside_link=host,
        link_beside_host=link,
        both=best.get("both"),
    )


@dataclass(frozen=True)
class Run:
    """One measured speed.

    Attributes:
        row: where it stands.
        machine_name: rows of one name share a machine.
        group: rows of one group are left out together: one pair of card and processor,
            or one machine whose parts are not known.
        session: rows of one session share build, clocks and prompts.
        model: contents of the file.
        machine: its specification, with its probes.
        setting: flags.
        kind: ``decode`` or ``prefill``.
        tokens: of the test: made, or of the prompt.
        depth: context tokens in front of them.
        tokens_per_s: as measured.
        spread: standard deviation of repetitions over their mean; None unknown.
        fork: of llama.cpp; empty for itself.
    """

    row: Row
    machine_name: str
    group: str
    session: str
    model: ModelContents
    machine: Machine
    setting: Setting
    kind: str
    tokens: int
    depth: int
    tokens_per_s: float
    spread: float | None = None
    fork: str = ""

    @property
    def seconds(self) -> float:
        """Measured seconds per token (decode) or per prompt (prefill)."""
        tokens = 1 if self.kind == "decode" else self.tokens
        return tokens / self.tokens_per_s

    @property
    def specified(self) -> Machine:
        """The machine without its probes."""
        return replace(self.machine, probes=Probes())

    def target(self, *, probed: bool) -> Target:
        """Describe the run as something to predict, with or without probes."""
        machine = self.machine if probed else self.specified
        if self.kind == "decode":
            depth = self.depth + self.tokens / 2
            return decode_target(
                machine, self.model, self.setting, depth, self.session, self.fork
            )
        return prefill_target(
            machine,
            self.model,
            self.setting,
            self.tokens,
            depth_tokens=self.depth,
            session=self.session,
            fork=self.fork,
        )

    @cached_property
    def row_spread(self) -> float:
        """Standard deviation of the run's logarithm, repetitions included if known."""
        # Rows without repetitions still differ from run to run.
        floor = REPEAT_SPREAD if self.kind == "decode" else PREFILL_SPREAD
        return max(floor, self.spread or 0.0)

    def observation(self, *, probed: bool) -> Observation:
        """Return the measured time."""
        target = self.target(probed=probed)
        return target.observed(self.seconds, self.row_spread, self.words)

    @cached_property
    def words(self) -> str:
        """The run's flags in words."""
        setting = self.setting
        words = [f"-ncmoe {min(setting.cpu_layers, len(self.model.layers))}"]
        if setting.chosen_layers is not None:
            words = [f"-ot {len(setting.chosen_layers)} layers"]
        if not setting.gpu_layers:
            # The number of layers means nothing then.
            words = ["all on the CPU"]
        elif setting.gpu_layers < len(self.model.layers):
            words.append(f"-ngl {setting.gpu_layers}")
        if self.kind == "prefill":
            words.append(f"-ub {setting.micro_batch}, {self.tokens} tokens")
        if setting.threads:
            words.append(f"-t {setting.threads}")
        if self.depth:
            words.append(f"depth {self.depth}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that cannot be predicted, and why."""

    place: str
    reason: str


def runs_of(folder: MeasuredFolder) -> tuple[list[Run], list[Skipped]]:
    """Return all runs of a folder, and the rows that are none."""
    models = FolderModels(folder)
    machines = Platforms(folder)
    decode, skipped = collect(
        folder["decode.csv"], lambda row: _decode_runs(row, machines, models)
    )
    bench, more = collect(
        folder["llama_bench.csv"], lambda row: _bench_runs(row, machines, models)
    )
    known = {_same_measurement(run) for run in decode}
    runs = list(decode)
    for run in bench:
        if _same_measurement(run) in known:
            more.append(Skipped(run.row.place, "the same measurement as in decode.csv"))
        else:
            runs.append(run)
    return runs, [*skipped, *more]


def _same_measurement(run: Run) -> tuple[object, ...]:
    on_host = len(run.setting.on_host(run.model))
    return (run.group, run.kind, on_host, f"{run.tokens_per_s:.3g}")


def collect(
    rows: Iterable[Row], build: Callable[[Row], Sequence[Found]]
) -> tuple[list[Found], list[Skipped]]:
    """Build the runs of every row; rows that say too little are skipped."""
    runs: list[Found] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            runs += build(row)
        except AdviceError as error:
            reason = str(error).removeprefix(f"{row.place}: ")
            skipped.append(Skipped(row.place, reason))
    return runs, skipped


def _decode_runs(row: Row, machines: Platforms, models: FolderModels) -> list[Run]:
    name = row.text("platform")
    machine = machines.machine(name, row.source)
    model = models.contents(row.text("model"), row.text("quant"))
    speed = speed_of(row, "tok_s")
    note = row.text("noise_note")
    deviation = (row.number("sd") or 0.0) / speed
    # The largest of some differences between two sittings: two standard deviations.
    if drift := re.search(r"drift of repeats\D*([\d.]+)%", note):
        deviation = max(deviation, float(drift.group(1)) / 200)
    setting = _setting(row, model, machine, note)
    run = Run(
        row=row,
        machine_name=name,
        group=group_of(machine, name),
        session=row.text("source"),
        model=model,
        machine=machine,
        setting=setting,
        kind="decode",
        tokens=SHORT_CONTEXT,
        depth=0,
        tokens_per_s=speed,
        spread=deviation or None,
    )
    _check_memory(run)
    return [run]


def speed_of(row: Row, column: str) -> float:
    """Return a speed.

    Raises:
        AdviceError: the row has none above 0.
    """
    value = row.number(column)
    if value is None or value <= 0:
        raise AdviceError(
            f"{row.place}: {column}: expected a speed above 0, found none"
        )
    return value


def machine_of_row(row: Row, name: str) -> Machine:
    """Describe the machine of a row of speeds."""
    flags = f"{row.text('flags')} {row.text('engine')} {row.text('os')}"
    gpu = row.text("gpu") or "unknown GPU"
    backend = re.search(
        r"\b(SYCL|ROCm|Vulkan|CUDA|HIP|Metal)(?=\b|[-_])", flags, re.IGNORECASE
    )
    if backend and backend.group(1).lower() not in gpu.lower():
        word = backend.group(1).lower().replace("hip", "rocm")
        gpu = f"{gpu} ({word})"
    machine = describe_machine(
        cpu=row.text("cpu") or None,
        ram=row.text("ram") or None,
        gpu=None if gpu.lower().startswith("none") else gpu,
        pcie=row.text("pcie") or None,
        lenient=True,
        name=name,
    )
    windows = re.search(r"\bWin(?:dows|1[01])?\b|WDDM", flags + row.text("cpu"))
    device = re.search(r"read ([\d.]+) measured|\(([\d.]+) GB/s measured", gpu)
    host_read = dict(machine.probes.host_read)
    for rate, count in re.findall(r"([\d.]+)@(\d+)t", row.text("ram")):
        host_read[int(count)] = _read_rate(float(rate) * GB, row.text("cpu"))
    probes = Probes(
        host_read=host_read,
        link=machine.link_bytes_per_s if machine.link_measured else None,
        device_read=float(device.group(1) or device.group(2)) * GB if device else None,
    )
    if machine.link_measured:
        # The specification is what the words say besides the measured rate.
        stated = re.sub(r"[\d.]+ GB/s[^,;)]*", "", row.text("pcie"))
        again = describe_machine(
            cpu=row.text("cpu") or None, gpu=gpu, pcie=stated or None, lenient=True
        )
        machine = replace(
            machine, link_bytes_per_s=again.link_bytes_per_s, link_measured=False
        )
    system = "windows" if windows else "linux"
    return replace(machine, system=system, probes=probes)


def group_of(machine: Machine, name: str) -> str:
    """Name what is left out together: one pair of card and processor.

    Hosts without a processor's name may be one host if their cards are the same.
    """
    cards = [f"{card.count}x {card.name}" for card in machine.graphics]
    if not all(card.known for card in machine.graphics):
        return name
    if machine.processor.known:
        return " + ".join([machine.processor.name, *cards])
    return " + ".join(["unknown", *sorted({card.name for card in machine.graphics})])


# Engines with schedules of their own; their rows stand in ``cache_runs.csv`` as well.
OTHER_ENGINES = re.compile(
    r"strata|freetoken|mosl|kt-kernel|sglang|ktransformers|authors engine|ollama|"
    r"\bds4\b|neurall|uvm|edge0|expert.cache|moe-cache|soft cache|slot cache|cache\b|"
    r"overlap|prefetch|hot_n|hot list|hot copies|chonk|early issue|weights duplicated|"
    r"[12] sockets?",
    re.IGNORECASE,
)
DRAFTS = re.compile(
    r"--spec|drafter|draft |draft-|\bmtp\b(?! layer)|dflash|eagle|n_max", re.IGNORECASE
)
# Notes by which a source says itself that the row shows something else.
NOT_THE_MODEL = re.compile(
    r"thrash|spills|vram cliff$|paging|pages from disk|ram-starved|ram smaller|"
    r"outlier|implausibly|ssd streams|over 8 gb|; spill|depth.* unclear",
    re.IGNORECASE,
)


def _bench_runs(  # one branch per reason to skip
    row: Row, machines: Platforms, models: FolderModels
) -> list[Run]:
    words = f"{row.text('engine')} {row.text('flags')}"
    notes = row.text("notes")
    if OTHER_ENGINES.search(words.replace("no cache", "")):
        raise AdviceError("another engine than llama.cpp or ik_llama.cpp")
    if DRAFTS.search(f"{words} {row.text('quant')}"):
        raise AdviceError("tokens are drafted, so tokens/s are not steps/s")
    if NOT_THE_MODEL.search(notes):
        raise AdviceError(f"the source says: {notes[:60]}")
    if "-sm row" in words:
        raise AdviceError("every matrix is parted among the cards")

    name = row.text("platform") or _machine_name(row)
    machine = machine_of_row(row, name)
    group = group_of(machine, name)
    if row.text("platform"):
        probed = machines.machine(name)
        machine = replace(machine, probes=_joined(probed.probes, machine.probes))
    model = models.contents(row.text("model"), row.text("quant"))
    setting = _setting(row, model, machine, row.text("flags"))
    if machine.backend not in {"cuda", "none"}:
        # Each backend's kernels are another machine's.
        name = f"{name} ({machine.backend})"
    if "-sm none" in words:
        machine = machine.with_cards((0,))
        name = f"{name}, one card"
    depth = row.count("ctx_depth") or _flag_number(row.text("flags"), "d") or 0
    session = row.text("source") + (notes if "session" in notes else "")
    fork = _fork(row)
    runs = []
    for kind, tokens_column, speed_column in (
        ("prefill", "pp_tokens", "pp_tps"),
        ("decode", "tg_tokens", "tg_tps"),
    ):
        if not row.text(speed_column):
            continue
        tokens = row.count(tokens_column)
        if kind == "prefill" and tokens is None:
            # A prompt of unknown length has unknown micro-batches.
            continue
        if kind == "prefill" and not _computed_where(row, machine, fork):
            # Their size decides whether processor or card computes it.
            continue
        before = depth
        if kind == "prefill" and depth == tokens:
            # The server's depth of a decode row is the prompt that came before.
            before = 0
        run = Run(
            row=row,
            machine_name=name,
            group=group,
            session=session,
            model=model,
            machine=machine,
            setting=setting,
            kind=kind,
            tokens=tokens or SHORT_CONTEXT,
            depth=before,
            tokens_per_s=speed_of(row, speed_column),
            spread=_deviation(row, kind),
            fork=fork,
        )
        _check_memory(run)
        runs.append(run)
    if not runs:
        raise AdviceError("no speed, or a prompt of unknown length")
    return runs


def _fork(row: Row) -> str:
    """Name the fork that made a row; a folder "ik-against-llama.cpp" is none.

    What a thread of the fork says of llama.cpp itself begins with that name.
    """
    words = row.text("engine") or f"{row.text('flags')} {row.text('source')}"
    if words.startswith("llama.cpp"):
        return ""
    return "ik_llama.cpp" if re.search(r"\bik_?", words) else ""


def _deviation(row: Row, kind: str) -> float | None:
    """Read ``sd pp 8.4 tg 0.05`` of the notes as a share of the speed."""
    column, mark = ("pp_tps", "pp") if kind == "prefill" else ("tg_tps", "tg")
    match = re.search(rf"\bsd\b[^;]*\b{mark} ([\d.]+)", row.text("notes"))
    return float(match.group(1)) / speed_of(row, column) if match else None


def _machine_name(row: Row) -> str:
    parts = (row.text("gpu"), row.text("cpu"), row.text("ram"), row.text("pcie"))
    return " / ".join(part for part in parts if part) or row.source


def _flag_number(flags: str, name: str) -> int | None:
    match = re.search(rf"(?:^|\s)-{{1,2}}{name}[ =]+(\d+)", flags)
    return int(match.group(1)) if match else None


def _computed_where(row: Row, machine: Machine, fork: str) -> bool:
    """Tell whether a row says who computes its prompt: in the fork, by ``-ub``."""
    flags = row.text("flags")
    stated = row.count("ubatch") or _flag_number(flags, "ub")
    return not (fork and machine.graphics) or bool(stated) or "-rtr" in flags


def _setting(row: Row, model: ModelContents, machine: Machine, flags: str) -> Setting:
    """Read the flags of a row.

    Raises:
        AdviceError: the row does not say where the experts lie.
    """
    lowered = flags.lower()
    micro = row.count("ubatch") or _flag_number(flags, "ub") or 512
    batch = row.count("batch") or _flag_number(flags, "b") or DEFAULT_BATCH
    threads = row.count("threads") or _flag_number(flags, "t")
    gpu_layers = _flag_number(flags, "ngl")
    setting = Setting(
        gpu_layers=ALL_LAYERS if gpu_layers is None else gpu_layers,
        threads=threads or None,
        micro_batch=micro,
        batch=max(batch, micro),
        flash=not re.search(r"-fa[ =]+(0|off)", lowered),
        kv_format=_kv_format(f"{flags} {row.text('quant')}"),
        page_locked=bool(re.search(UNMAPPED, lowered)),
        used_only="copies all" not in lowered,
    )
    setting = _placed(row, model, machine, lowered, setting)
    return _of_the_fork(row, model, setting) if _fork(row) else setting


# From this pull request on ik_llama.cpp uploads the used experts alone.
USED_ONLY_SINCE = 842


def _of_the_fork(row: Row, model: ModelContents, setting: Setting) -> Setting:
    """Say who computes a prompt in ik_llama.cpp, and what is uploaded for it.

    Source: ik_llama.cpp#520, which compares its main branch with the new rule, and
    #842; run-time repacked experts stay on the processor.
    """
    layer = model.layers[model.moe_layers[0]]
    before = re.search(r"-main\b", row.text("id"))
    many = 32 if before else 32 * layer.experts // layer.top_k
    if "-rtr" in row.text("flags"):
        many = NEVER
    thread = re.search(r"ik_llama\.cpp/\w+/(\d+)", row.text("source"))
    used_only = thread is not None and int(thread.group(1)) >= USED_ONLY_SINCE
    return replace(
        setting, iqk=has_iqk_products(model), used_only=used_only, gpu_from_tokens=many
    )


def _placed(  # noqa: PLR0911 # one branch per way to say it
    row: Row, model: ModelContents, machine: Machine, flags: str, setting: Setting
) -> Setting:
    """Read where the experts lie, in the words of the row."""
    count = row.text("n_cpu_moe").lower()
    if not machine.graphics or count in {"cpu", "all (ngl 0)"} or "cpu only" in flags:
        return replace(setting, gpu_layers=0)
    if match := re.match(r"ngl ?(\d+)", count):
        return replace(setting, gpu_layers=int(match.group(1)))
    if "up only" in flags or "ffn_up_exps" in flags:
        raise AdviceError("single matrices of an expert are on the CPU")
    if "-fitt" in flags and count == "all":
        raise AdviceError("-fitt undoes a part of --n-cpu-moe; which part is not said")
    if match := re.match(r"~?(\d+)", count):
        return replace(setting, cpu_layers=int(match.group(1)))
    if match := re.search(r"([\d.]+) % of experts on gpu", flags):
        layers = round(len(model.moe_layers) * (1 - float(match.group(1)) / 100))
        return replace(setting, cpu_layers=layers)
    everything = r"(?:-ot|tensor) +'?exps=cpu|(?<!n)--?cpu-?moe|-cmoe|experts on cpu"
    if count == "all" or re.search(everything, flags):
        return replace(setting, cpu_layers=ALL_LAYERS)
    if match := re.search(r"-(?:ot|override-tensor) +'?([^' ]+=\w+)", flags):
        return replace(setting, chosen_layers=overridden_layers(match.group(1)))
    if match := re.search(r"n-?cpu-?moe[ =]+(\d+)|-ncmoe[ =]+(\d+)", flags):
        return replace(setting, cpu_layers=int(match.group(1) or match.group(2)))
    if "ik_llama" in row.text("source") and not count:
        # Rows about uploads to the GPU keep all experts in host memory.
        return replace(setting, cpu_layers=ALL_LAYERS)
    if machine.unified:
        return setting
    raise AdviceError("the row does not say where the experts lie")


def _kv_format(flags: str) -> str:
    match = re.search(r"(?:-ctk|\bKV)[ =]+(q\d\w*|f16|int8)", flags, re.IGNORECASE)
    word = match.group(1).lower() if match else "f16"
    return {"q4": "q4_0", "q8": "q8_0", "int8": "q8_0"}.get(word, word)


# Beyond these shares of its memories a machine pages or spills.
MOST_OF_VRAM = 1.02
MOST_OF_ALL = 0.97


def _check_memory(run: Run) -> None:
    """Refuse a run that cannot have lain in the machine's memories as it says.

    Raises:
        AdviceError: no speed is promised there.
    """
    machine = run.machine
    allocated = _flag_number(run.row.text("flags"), "c") or 0
    context = max(allocated, run.depth + run.tokens)
    job = Job(context=context, keep_vram_bytes=0)
    bill = bill_of(run.model, machine, run.setting, job)
    cards_known = all(card.known for card in machine.graphics)
    if machine.graphics and cards_known and not machine.unified:
        # Windows moves buffers into host memory behind a program's back.
        if machine.windows and bill.gpu_bytes > machine.vram_bytes:
            raise AdviceError("spills: more graphics memory than the card has")
        weights = bill.gpu["dense weights"] + bill.gpu["experts"]
        if weights > MOST_OF_VRAM * machine.vram_bytes:
            raise AdviceError("spills: more weights than the cards hold")
    size = machine.memory.size_bytes
    if size and not machine.unified:
        host = bill.host["experts"] + bill.host["dense weights"]
        if host > MOST_OF_ALL * size:
            raise AdviceError("pages: more host weights than host memory")
