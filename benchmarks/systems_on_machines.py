"""Two systems replayed on other people's machines, beside what was measured there:
llama.cpp as it is, and the hot-expert cache on llama.cpp (`dfa-cache`), whose layer
steps some rows count one by one (`layer_events.csv`).

    python -m benchmarks.systems_on_machines ../shared/reference/machines
        ../shared/reference/machines_wide --out out/systems-on-machines.md

A machine is what its row, its probes and the other platforms say, as `moesim advise`
reads them; rows of the platform itself are left out. Beside a replay of llama.cpp
stand `moesim advise` and two baselines that are fitted to the same other platforms:
bytes over specified bandwidth with one efficiency, and a straight line over the layers
on the CPU beside them (two constants). The routing of llama.cpp's rows is drawn, as its
time hardly depends on it, and rows that do not fit the card are left out. That of the
cache is the model's own, of `../shared/traces`, on other texts, generated tokens alone.
Layer steps are replayed as they were counted, with products, link and what both cost
each other as the row states them.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import numpy as np

from benchmarks.hot_sets import write_generated
from benchmarks.measured.judge import Knowledge
from benchmarks.measured.rows import (
    FolderModels,
    Platforms,
    read_folder,
    runs_of,
)
from benchmarks.measured.scores import ONE_EFFICIENCY, TWO_CONSTANTS
from benchmarks.replay_speed import SHARED
from moesim.advice.plan.memory import Candidate, Job, bill_of
from moesim.advice.plan.ranking import Forecast
from moesim.advice.plan.saved_profile import cache_ratio, profile_of_advice
from moesim.advice.plan.what_if import shape_of
from moesim.advice.times.latents import Beliefs
from moesim.advice.times.priors import priors_of
from moesim.advice.times.work import Setting
from moesim.base.errors import AdviceError
from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import CPU, H2D
from moesim.hwprofiles.schema import Quantity
from moesim.policies.systems import SYSTEMS
from moesim.runs.replay import replay
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.importers import import_trace
from moesim.traces.synthetic.generate import stated, synthesise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.measured.rows import MeasuredFolder, Row, Run
    from moesim.advice.answer import Advice
    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.hwprofiles.profile import HardwareProfile

DECODED = 24
"""Tokens that are decoded of a drawn sequence."""

PROMPT_MOST = 4096
"""Tokens of the longest prompt that is replayed."""

CACHE_STEPS = 4000
"""Forward passes of real routing: some eleven sequences."""

CACHE_ROUTING = {
    "gpt-oss-20b": "gpt_oss_20b",
    "qwen3-30b-a3b": "qwen3_30b_a3b_top6",
}
"""Recorded routing of models that engines with a cache were measured with."""

COUNTED_TOKENS = 200
EVENTS = "layer_steps_per_token cpu+link:count"
Events = dict[tuple[int, int], float]
"""Misses on the CPU and copied ones of a layer step -> layer steps of a token."""
EVENT_HOSTS = {
    "270K": "5090_270K",
    "EPYC7352": "5090_7352",
    "7900": "5090_7900",
    "7950X": "5090_7950X",
    "9950X": "5090_hostS_9950X",
}

WHOLE = "whole layers"
ENGINES = {
    "mailbox": SYSTEMS["dfa-cache"],
    # Both processors wait to hand a layer over, in every layer.
    "split graph": replace(SYSTEMS["dfa-cache"], polls=False, fixed_graph=True),
    WHOLE: SYSTEMS["llama.cpp"],
}
"""Words of a row's policy -> the system that is replayed."""

ADVICE = "advise"
PREDICTORS = (ADVICE, ONE_EFFICIENCY, TWO_CONSTANTS)

NOISE = 0.05
"""Speeds that differ by less are in no order: repetitions differ as much."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One measured speed and its replay."""

    system: str
    host: str
    what: str
    words: str
    measured: float
    replayed: float
    probed: bool
    hits: str = ""
    others: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second by predictors that replay nothing."""

    @property
    def error(self) -> float:
        """Replayed less measured, as a share of the measured."""
        return self.replayed / self.measured - 1.0


class Machines:
    """Profiles of measured machines, and traces of their models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._traces: dict[tuple[str, int], Trace] = {}

    def profile(
        self,
        machine: Machine,
        model: ModelContents,
        setting: Setting,
        beliefs: Beliefs,
    ) -> HardwareProfile:
        """What a replay takes on a machine of which so much is believed."""
        job = Job(context=PROMPT_MOST, prompt=512, answer=128)
        forecast = Forecast(model, machine, job, beliefs)
        bill = bill_of(model, machine, setting, job)
        advice = SimpleNamespace(
            model=model,
            machine=machine,
            job=job,
            grade=machine.grade,
            best=SimpleNamespace(candidate=Candidate(setting, bill)),
            forecast=forecast,
            observed=SimpleNamespace(used=()),
        )
        profile = profile_of_advice(cast("Advice", advice))
        # What a row says fits has fitted: the share of experts is stated below.
        every = replace(profile.numbers[paths.GPU_BYTES], value=1 << 40)
        return replace(profile, numbers={**profile.numbers, paths.GPU_BYTES: every})

    def imported(self, source: Path, model: ModelContents) -> Trace:
        """Recorded routing of a model, without prompts: hits are those of generated
        tokens.
        """
        path = self._folder / f"{source.stem}_{model.expert_bytes}.parquet"
        if not path.exists():
            whole = path.with_suffix(".whole")
            import_trace(source, whole, shape=shape_of(model))
            trace = open_trace(whole)
            with TraceWriter(path, trace.header) as writer:
                for number, rows in enumerate(trace.sequences()):
                    write_generated(writer, number, rows)
        return open_trace(path)

    def counted(self, model: ModelContents, slots: int, events: Events) -> Trace:
        """A trace whose layer steps miss as often as they were counted, in drawn order,
        where each layer holds the experts with the lowest numbers.
        """
        shape = shape_of(model)
        path = self._folder / f"{len(list(self._folder.iterdir()))}.parquet"
        misses = np.array([cpu + link for cpu, link in events])
        shares = np.array(list(events.values()))
        steps = COUNTED_TOKENS * shape.layers
        ends = np.round(steps * np.cumsum(shares) / shares.sum()).astype(int)
        rng = np.random.default_rng(0)
        missed = rng.permutation(np.repeat(misses, np.diff(ends, prepend=0)))
        held = shape.top_k - missed
        experts = np.array(
            [
                np.append(
                    rng.choice(slots, there, replace=False),
                    slots + rng.choice(shape.experts - slots, absent, replace=False),
                )
                for there, absent in zip(held, missed, strict=True)
            ]
        )
        token, layer = np.divmod(np.arange(steps), shape.layers)
        with TraceWriter(path, TraceHeader(shape)) as writer:
            phase = np.full(steps, int(Phase.DECODE))
            writer.write(0, token, phase, layer, experts)
        return open_trace(path)

    def trace(self, model: ModelContents, prompt: int) -> Trace:
        """Drawn routing of a model: a prompt, then some tokens."""
        key = (f"{model.name}{model.expert_bytes}", prompt)
        if key not in self._traces:
            path = self._folder / f"{len(self._traces)}.parquet"
            drawn = stated(shape_of(model), prompt_tokens=prompt, new_tokens=DECODED)
            synthesise(drawn, path, tokens=prompt + DECODED)
            self._traces[key] = open_trace(path)
        return self._traces[key]


def llama_cpp(knowledge: Knowledge, machines: Machines) -> list[Judged]:
    """Replay every row of llama.cpp on a machine with one card."""
    return [
        _replayed(run, knowledge, machines)
        for run in knowledge.runs
        if not run.fork and _is_plain(run) and _fits(run)
    ]


def _is_plain(run: Run) -> bool:
    """Whether it is what a replay has: one card, all layers offered to it, an empty
    context, and a prompt that is not too long.
    """
    machine = run.machine
    graphics = machine.graphics
    one_card = len(graphics) == 1 and not machine.unified
    whole = run.setting.gpu_layers >= len(run.model.layers)
    short = run.kind == "decode" or run.tokens <= PROMPT_MOST
    return one_card and whole and short and not run.depth


def _fits(run: Run) -> bool:
    """Whether the card has room: what spills takes the card's driver to predict."""
    context = run.tokens + PROMPT_MOST // 8
    job = Job(context=context, prompt=run.tokens, answer=128)
    return bill_of(run.model, run.machine, run.setting, job).gpu_left >= 0


def _replayed(run: Run, knowledge: Knowledge, machines: Machines) -> Judged:
    setting = run.setting
    beliefs = knowledge.beliefs(run, probed=True)
    profile = machines.profile(run.machine, run.model, setting, beliefs)
    decodes = run.kind == "decode"
    trace = machines.trace(run.model, 0 if decodes else run.tokens)
    result = replay(
        trace,
        "llama.cpp" if not setting.page_locked else "llama.cpp-no-mmap",
        hw=profile,
        cache_ratio=cache_ratio(run.model, setting),
        micro_batch=setting.micro_batch,
        steps=None if decodes else math.ceil(run.tokens / setting.micro_batch),
        keep=False,
    )
    speed = "decode_tokens_per_s" if decodes else "prefill_tokens_per_s"
    seconds = {ADVICE: run.target(probed=True).predicted(beliefs).value}
    for name, log_s in knowledge.baselines(run).guesses(run).items():
        seconds[name] = math.exp(log_s)
    tokens = 1 if decodes else run.tokens
    return Judged(
        system="llama.cpp",
        host=run.machine_name,
        what=f"{run.model.name}, {run.kind}",
        words=run.words,
        measured=run.tokens_per_s,
        replayed=result.metrics[speed],
        probed=bool(run.machine.probes.host_read),
        others={name: tokens / each_s for name, each_s in seconds.items()},
    )


def hot_expert_cache(
    folders: Sequence[MeasuredFolder],
    knowledge: Knowledge,
    machines: Machines,
) -> list[Judged]:
    """Replay every row of a decayed-frequency cache, or of whole layers beside it, of
    the models whose routing was recorded.
    """
    judged = []
    populations = {run.machine_name: run for run in knowledge.runs}
    for folder in folders:
        models = FolderModels(folder)
        platforms = Platforms(folder)
        for row in folder["cache_runs.csv"]:
            policy = row.text("policy")
            slots = row.number("slots_per_layer")
            speed = row.number("tok_s")
            source = SHARED / f"{CACHE_ROUTING.get(row.text('model'))}.parquet"
            engine = next((name for name in ENGINES if name in policy), None)
            if not (slots and speed and engine and source.is_file()):
                continue
            if row.text("hit_source") == "simulated":
                continue
            name = row.text("platform")
            machine = platforms.machine(name, row.source)
            model = models.contents(row.text("model"), row.text("quant"))
            others = knowledge.population(populations[name])
            beliefs = Beliefs(priors_of(machine, population=others))
            options: dict[str, Any] = {"slots_per_layer": int(slots)}
            if engine == WHOLE:
                options = {"cache_ratio": slots / shape_of(model).experts}
            elif margin := re.search(r"kappa (\d+)", policy):
                options["cache"] = f"decayed-frequency:margin={margin[1]}"
            with patch.dict(SYSTEMS, ENGINES):
                result = replay(
                    # Experts of the weights that were measured, not of the trace's.
                    machines.imported(source, model),
                    engine,
                    hw=machines.profile(machine, model, Setting(), beliefs),
                    steps=CACHE_STEPS,
                    keep=False,
                    **options,
                )
            stated_rate = row.number("hit_rate")
            ours = result.metrics["hit_rate_active"]
            judged.append(
                Judged(
                    system="hot-expert cache",
                    host=name,
                    what=f"{model.name}, decode",
                    words=f"{policy}, {int(slots)} slots",
                    measured=speed,
                    replayed=result.metrics["decode_tokens_per_s"],
                    probed=bool(machine.probes.host_read),
                    hits=(
                        ""
                        if engine == WHOLE or stated_rate is None
                        else f"{stated_rate:.3f} / {ours:.3f}"
                    ),
                )
            )
    return judged


def layer_events(
    folders: Sequence[MeasuredFolder], knowledge: Knowledge, machines: Machines
) -> list[Judged]:
    """Replay every row of counted layer steps but those with prefetches, whose copies
    were not counted with the layer that they were for.
    """
    judged = []
    products_s: dict[str, np.ndarray] = {}
    for folder in folders:
        models = FolderModels(folder)
        platforms = Platforms(folder)
        for row in folder["layer_events.csv"]:
            config = row.text("config")
            name = EVENT_HOSTS[row.text("host")]
            if config.endswith("_pf"):
                continue
            model = models.contents(row.text("model"), "MXFP4")
            machine = platforms.machine(name, row.source)
            others = knowledge.fit.without([name])
            beliefs = Beliefs(priors_of(machine, population=others))
            profile = machines.profile(machine, model, Setting(), beliefs)
            fetches = "fetch" in config
            if not fetches:
                keys = ("cpu_us_1_miss", "cpu_us_2", "cpu_us_3", "cpu_us_4")
                products_s[name] = 1e-6 * np.array([row.number(key) for key in keys])
            # Beside copies products are slower: that is to be predicted.
            stated = _as_counted(row, model, products_s[name])
            numbers = {**profile.numbers}
            for path, value in stated.items():
                numbers[path] = Quantity(float(value), "published", "of the row")
            slots = int(config.removeprefix("C").partition("_")[0])
            events = _events(row.text(EVENTS))
            result = replay(
                machines.counted(model, slots, events),
                f"{'fetch-split:table=0/1/1/2/3' if fetches else 'fixed-mapping'}"
                "+static:fill=lowest",
                hw=replace(profile, numbers=numbers),
                slots_per_layer=slots,
                keep=False,
            )
            hits = sum(
                count * (1 - sum(event) / shape_of(model).top_k)
                for event, count in events.items()
            ) / sum(events.values())
            judged.append(
                Judged(
                    system="counted layer steps",
                    host=name,
                    what=f"{model.name}, decode",
                    words=config,
                    measured=float(row.text("tok_s")),
                    replayed=result.metrics["decode_tokens_per_s"],
                    probed=True,
                    hits=f"{hits:.3f} / {result.metrics['hit_rate_active']:.3f}",
                )
            )
    return judged


def _events(text: str) -> Events:
    """``1+2:0.5``: one miss on the CPU and two copied, in half a layer step a token."""
    events = {}
    for part in text.split(";"):
        kind, _, count = part.partition(":")
        cpu, _, link = kind.partition("+")
        events[int(cpu), int(link)] = float(count)
    return events


def _as_counted(
    row: Row, model: ModelContents, products_s: np.ndarray
) -> dict[str, float]:
    """What a row states of its machine, by path in a profile."""
    each_s, first_s = np.polyfit(np.arange(1, 5), products_s, 1)
    expert_bytes = shape_of(model).max_expert_bytes
    alone, beside = (
        [1e9 * float(row.text(f"{prefix}_{lane}_gbs")) for lane in ("cpu", "link")]
        for prefix in ("B", "concurrent")
    )
    return {
        paths.roofline(CPU.name).bytes_per_s: expert_bytes / each_s,
        paths.first_s(CPU.name): max(1e-9, first_s),
        paths.link(H2D.name).bytes_per_s: alone[1],
        paths.contention(CPU.name, H2D.name): max(1.0, alone[0] / beside[0]),
        paths.contention(H2D.name, CPU.name): max(1.0, alone[1] / beside[1]),
        # Helpers poll: nothing is submitted, nothing awaited.
        paths.SPLIT_S: 0.0,
    }


def _median_error(judged: Sequence[Judged], predictor: str) -> str:
    """Median error of another predictor; empty where it has no answer."""
    known = [each for each in judged if predictor in each.others]
    if not known:
        return ""
    errors = [abs(each.others[predictor] / each.measured - 1.0) for each in known]
    return f"{np.median(errors):.1%}"


def ordered(judged: Sequence[Judged]) -> tuple[int, int]:
    """Of two settings of one host and model whose speeds differ by more than the noise:
    how many pairs are in the measured order, and how many there are.
    """
    groups = defaultdict(list)
    for each in judged:
        groups[each.system, each.host, each.what].append(each)
    right = total = 0
    for rows in groups.values():
        for one, other in combinations(rows, 2):
            gap = math.log(one.measured / other.measured)
            if abs(gap) > NOISE:
                total += 1
                right += gap * math.log(one.replayed / other.replayed) > 0.0
    return right, total


def summary(judged: Sequence[Judged]) -> list[str]:
    """A table of median errors and orders, by system and kind of row."""
    names = ["rows", "hosts", "rows", "median error", "within 25 %", "pairs in order"]
    names += ["advise", "one efficiency", "two constants"]
    lines = [f"| {' | '.join(names)} |", "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    kinds = defaultdict(list)
    for each in judged:
        kind = each.what.rpartition(", ")[2]
        kinds[f"{each.system}, {kind}"].append(each)
        if each.probed:
            kinds[f"{each.system}, {kind}, with probes"].append(each)
    for name, rows in sorted(kinds.items()):
        errors = np.abs([each.error for each in rows])
        right, total = ordered(rows)
        pairs = f"{right} of {total} ({right / total:.0%})" if total else "none"
        others = [_median_error(rows, each) for each in PREDICTORS]
        lines.append(
            f"| {name} | {len({each.host for each in rows})} | {len(rows)} |"
            f" {np.median(errors):.1%} | {np.mean(errors < 0.25):.0%} | {pairs} |"
            f" {' | '.join(others)} |"
        )
    return lines


def by_host(judged: Sequence[Judged]) -> list[str]:
    """A table with every host."""
    lines = [
        "| host | system | model | rows | median error | least, most | advise |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    groups = defaultdict(list)
    for each in judged:
        groups[each.host, each.system, each.what].append(each)
    for (host, system, what), rows in sorted(groups.items()):
        errors = np.array([each.error for each in rows])
        lines.append(
            f"| {host}{' (probed)' if rows[0].probed else ''} | {system} | {what} |"
            f" {len(rows)} | {np.median(np.abs(errors)):.1%} |"
            f" {errors.min():+.0%}, {errors.max():+.0%} |"
            f" {_median_error(rows, ADVICE)} |"
        )
    return lines


def hit_rows(judged: Sequence[Judged]) -> list[str]:
    """Hit rates and speeds of the cache, measured and replayed."""
    lines = [
        "| host | run | hits, measured / replayed | tokens/s, measured | replayed |",
        "|---|---|--:|--:|--:|",
    ]
    return lines + [
        f"| {each.host} | {each.words} | {each.hits} | {each.measured:.1f} |"
        f" {each.replayed:.1f} |"
        for each in judged
        if each.system != "llama.cpp"
    ]


def main() -> None:
    """Replay, print, and write a page if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.systems_on_machines",
        description="Replay llama.cpp and a hot-expert cache on measured machines.",
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="a page to write")
    parser.add_argument("--cache-only", action="store_true", help="leave llama.cpp out")
    arguments = parser.parse_args()
    folders = [read_folder(path) for path in arguments.folders]
    runs = [run for folder in folders for run in runs_of(folder)[0]]
    knowledge = Knowledge(runs, "platforms")
    with tempfile.TemporaryDirectory() as name:
        machines = Machines(Path(name))
        judged = hot_expert_cache(folders, knowledge, machines)
        judged += layer_events(folders, knowledge, machines)
        if not arguments.cache_only:
            judged += llama_cpp(knowledge, machines)
    text = "\n".join(
        [
            "# Systems on other people's machines",
            "",
            str(__doc__).partition("\n    python")[0].strip(),
            "",
            str(__doc__).rpartition(".md\n")[2].strip(),
            "",
            *summary(judged),
            "",
            "## The hot-expert cache",
            "",
            *hit_rows(judged),
            "",
            "## Every host",
            "",
            *by_host(judged),
            "",
        ]
    )
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except AdviceError as error:
        raise SystemExit(str(error)) from None
