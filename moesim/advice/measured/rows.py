"""Turns rows of ``decode.csv`` and ``llama_bench.csv`` into runs that can be predicted.

A *run* is one machine, one model, one setting and one measured speed. Rows that say
too little (no GPU named, an unknown model) are set aside; the page lists them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moesim.advice.errors import AdviceError
from moesim.advice.machine.machine import Machine, Probes, describe_machine
from moesim.advice.measured.models import FolderModels
from moesim.advice.times.cache_engine import EVEN_SHARE
from moesim.advice.times.setting import (
    ALL_LAYERS,
    DEFAULT_BATCH,
    DEFAULT_MICRO_BATCH,
    Setting,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from moesim.advice.measured.folder import MeasuredFolder, Row
    from moesim.advice.model.contents import ModelContents

# Rows of a cache engine's study decode a few hundred tokens after a short prompt.
SHORT_CONTEXT = 128
GB = 1e9


@dataclass(frozen=True)
class Run:
    """One measured speed.

    Attributes:
        row: where it stands.
        machine_name: rows of one name share a machine.
        session: rows of one session share build, clocks and prompts.
        model: contents of the file.
        machine: its specification, without probes.
        probes: of the machine; empty where it has none.
        setting: flags.
        kind: ``decode`` or ``prefill``.
        tokens: of the test: made, or of the prompt.
        depth: context tokens in front of them.
        tokens_per_s: as measured.
        spread: standard deviation of repetitions over their mean; None unknown.
    """

    row: Row
    machine_name: str
    session: str
    model: ModelContents
    machine: Machine
    probes: Probes
    setting: Setting
    kind: str
    tokens: int
    depth: int
    tokens_per_s: float
    spread: float | None = None

    @property
    def seconds(self) -> float:
        """Measured seconds per token (decode) or per prompt (prefill)."""
        if self.kind == "decode":
            return 1 / self.tokens_per_s
        return self.tokens / self.tokens_per_s

    @property
    def model_name(self) -> str:
        """Model with its label."""
        return self.model.name

    @property
    def group(self) -> tuple[str, str, str]:
        """Machine, session and model: what a user would sweep over."""
        return (self.machine_name, self.session, self.model_name)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that cannot be predicted, and why."""

    place: str
    reason: str


def runs_of(folder: MeasuredFolder) -> tuple[list[Run], list[Skipped]]:
    """Return all runs of a folder, and the rows that are none."""
    models = FolderModels(folder)
    machines = Platforms(folder)
    decode, not_decode = _collect(
        folder["decode.csv"], lambda row: [_decode_run(row, machines, models)]
    )
    bench, not_bench = _collect(
        folder["llama_bench.csv"], lambda row: _bench_runs(row, models)
    )
    return [*decode, *bench], [*not_decode, *not_bench]


def _collect(
    rows: Iterable[Row], build: Callable[[Row], Sequence[Run]]
) -> tuple[list[Run], list[Skipped]]:
    """Build the runs of every row; rows that say too little are set aside."""
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            runs += build(row)
        except AdviceError as error:
            skipped.append(Skipped(row.place, str(error)))
    return runs, skipped


class Platforms:
    """The probed machines of ``platforms.csv``."""

    def __init__(self, folder: MeasuredFolder) -> None:
        self.rows: dict[str, list[Row]] = {}
        for row in folder["platforms.csv"]:
            self.rows.setdefault(row.text("platform"), []).append(row)
        self.known: dict[str, tuple[Machine, Probes]] = {}

    def machine(self, name: str) -> tuple[Machine, Probes]:
        """Return specification and probes of a platform."""
        if name not in self.known:
            self.known[name] = self._machine(name)
        return self.known[name]

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
        begun = [other for other in self.rows if name.startswith(other)]
        return self.rows[max(begun, key=len)] if begun else []

    def _machine(self, name: str) -> tuple[Machine, Probes]:
        rows = self._rows_of(name)
        probes = _probes(rows)
        cpu = rows[0].text("cpu") if rows else name.replace("_", " ")
        gpu = rows[0].text("gpu") if rows else name.replace("_", " ")
        ram = None
        for row in rows:
            # A datasheet's rate of the filled channels is specification, not a probe.
            if row.text("kind").startswith("dram_datasheet"):
                ram = f"{row.text('value_gbs')} GB/s"

        machine = describe_machine(
            cpu=_spelled(cpu), gpu=_spelled(gpu), ram=ram, name=name, lenient=True
        )
        if not machine.graphics and rows:
            raise AdviceError(f"GPU {gpu!r} is not in the table of devices")
        threads = max(probes.host_read, default=0)
        if not machine.processor.known and threads > 1:
            # Probes run up to all hyperthreads, two per core.
            processor = replace(machine.processor, cores=max(1, threads // 2))
            machine = replace(machine, processor=processor)
        return machine, probes


def _spelled(text: str) -> str:
    """Write ``9950X`` as the devices' tables do: ``Ryzen 9 9950X``."""
    text = re.sub(r"\b(9950X3D|9950X|7950X3D|7950X|7900X?)\b", r"Ryzen 9 \1", text)
    text = re.sub(r"\b(7352)\b", r"EPYC \1", text)
    return re.sub(r"(Ryzen 9|EPYC) (?:Ryzen 9|EPYC) ", r"\1 ", text)


def _probes(rows: Iterable[Row]) -> Probes:  # noqa: C901 # one branch per kind of row
    host_read: dict[int, float] = {}
    best: dict[str, float] = {}
    beside: dict[str, tuple[float, float]] = {}

    for row in rows:
        kind = row.text("kind")
        value = (row.number("value_gbs") or 0.0) * GB
        mode = row.text("threads_or_mode")
        if kind.startswith("cpu_read"):
            stated = re.match(r"\d+", mode)
            # Read at the engine's own number of threads: usable for any number.
            host_read[int(stated.group()) if stated else 1] = value
        elif kind in {"h2d_pinned", "pcie_copyengine", "pcie_zerocopy"}:
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
            best["triad"] = max(best.get("triad", 0.0), value)

    if not host_read and "triad" in best:
        # Writes cost a read of the line first, so bare reads are a third faster.
        host_read[1] = 1.3 * best["triad"]
    # Of several ways to copy, the one that moves most in sum.
    host, link = max(beside.values(), key=sum, default=(None, None))
    if host is None and "both" in best:
        # The memory controller shares about evenly between the two.
        host = EVEN_SHARE * best["both"]
        link = best["both"] - host
    return Probes(
        host_read=host_read,
        link=best.get("link"),
        device_read=best.get("device"),
        host_beside_link=host,
        link_beside_host=link,
    )


def _decode_run(row: Row, machines: Platforms, models: FolderModels) -> Run:
    name = row.text("platform")
    machine, probes = machines.machine(name)
    count = row.text("n_cpu_moe").lower()
    threads = row.number("threads")
    setting = Setting(threads=int(threads) if threads else None)

    if count == "cpu":
        setting = replace(setting, gpu_layers=0)
    elif not count.isdecimal():
        raise AdviceError(f"{row.place}: n_cpu_moe: expected a number, found {count!r}")
    else:
        setting = replace(setting, cpu_layers=int(count))

    speed = _speed(row, "tok_s")
    deviation = row.number("sd")
    return Run(
        row=row,
        machine_name=name,
        session=row.text("source"),
        model=models.contents(row.text("model"), row.text("quant")),
        machine=machine,
        probes=probes,
        setting=setting,
        kind="decode",
        tokens=SHORT_CONTEXT,
        depth=0,
        tokens_per_s=speed,
        spread=deviation / speed if deviation else None,
    )


def _speed(row: Row, column: str) -> float:
    value = row.number(column)
    if value is None or value <= 0:
        raise AdviceError(
            f"{row.place}: {column}: expected a speed above 0, found none"
        )
    return value


def _bench_runs(row: Row, models: FolderModels) -> list[Run]:
    flags = row.text("flags")
    gpu = row.text("gpu") or "unknown GPU"
    backend = re.search(r"\b(SYCL|ROCm|Vulkan|CUDA|HIP|Metal)\b", flags, re.IGNORECASE)
    if backend and backend.group(1).lower() not in gpu.lower():
        word = backend.group(1).lower().replace("hip", "rocm")
        gpu = f"{gpu} ({word})"
    windows = bool(re.search(r"\bWin(?:dows|1[01])\b", flags + row.text("cpu")))
    machine = describe_machine(
        cpu=row.text("cpu") or None,
        ram=row.text("ram") or None,
        gpu=gpu,
        pcie=row.text("pcie") or None,
        lenient=True,
        name=_machine_name(row),
    )
    machine = replace(machine, windows=windows)

    model = models.contents(row.text("model"), row.text("quant"))
    setting = bench_setting(row, model)
    if not machine.graphics:
        setting = replace(setting, gpu_layers=0)
    depth = _flag_number(flags, "d") or 0
    runs = []
    for kind, tokens_column, speed_column in (
        ("prefill", "pp_tokens", "pp_tps"),
        ("decode", "tg_tokens", "tg_tps"),
    ):
        if row.number(speed_column) is None:
            continue
        runs.append(
            Run(
                row=row,
                machine_name=machine.name,
                session=row.text("source"),
                model=model,
                machine=machine,
                probes=Probes(),
                setting=setting,
                kind=kind,
                tokens=int(row.number(tokens_column) or SHORT_CONTEXT),
                depth=int(depth),
                tokens_per_s=_speed(row, speed_column),
            )
        )
    return runs


def _machine_name(row: Row) -> str:
    link = row.text("pcie").split(";")[0]
    parts = [row.text("gpu"), row.text("cpu"), row.text("ram"), link]
    return " / ".join(part for part in parts if part)


def _flag_number(flags: str, name: str) -> int | None:
    match = re.search(rf"(?:^|\s)-{{1,2}}{name}[ =]+(\d+)", flags)
    return int(match.group(1)) if match else None


def bench_setting(row: Row, model: ModelContents) -> Setting:
    """Read the flags of a row."""
    flags = row.text("flags")
    count = row.text("n_cpu_moe")
    threads = row.number("threads") if row.text("threads").isdecimal() else None
    micro = _flag_number(flags, "ub") or DEFAULT_MICRO_BATCH
    lowered = flags.lower()

    if count.isdecimal():
        cpu_layers = int(count)
    elif re.search(r"exps=cpu|--cpu-moe|-cmoe|experts on cpu", lowered):
        cpu_layers = ALL_LAYERS
    else:
        # Rows about uploads to the GPU keep all experts in host memory.
        cpu_layers = ALL_LAYERS if "ik_llama" in row.text("source") else 0

    gpu_layers = _flag_number(flags, "ngl")
    setting = Setting(
        cpu_layers=cpu_layers,
        gpu_layers=ALL_LAYERS if gpu_layers is None else gpu_layers,
        threads=int(threads) if threads else None,
        micro_batch=micro,
        batch=max(_flag_number(flags, "b") or DEFAULT_BATCH, micro),
        flash=_flag_number(flags, "fa") != 0,
        kv_format=_kv_format(lowered),
        page_locked="pageable" not in lowered and "mmap page" not in lowered,
        used_only="copies all" not in lowered,
        overlapped="overlap" in lowered,
    )
    rules: dict[str, Any] = dict(_fork_rules(row, model))
    return replace(setting, **rules)


def _kv_format(flags: str) -> str:
    match = re.search(r"-ctk[ =]+(\w+)", flags)
    return match.group(1) if match else "f16"


def _fork_rules(row: Row, model: ModelContents) -> Mapping[str, object]:
    """What ik_llama.cpp does otherwise: it uploads all experts, from more tokens on.

    Source: ik_llama.cpp#520, which compares its main branch with the new rule.
    """
    source = row.text("source") + row.text("flags")
    if "ik_llama" not in source:
        return {}
    layer = model.layers[model.moe_layers[0]]
    before = re.search(r"-main\b", row.text("id"))
    threshold = 32 if before else 32 * layer.experts // layer.top_k
    return {"used_only": False, "gpu_from_tokens": threshold}
