"""Engines with an expert cache, predicted from misses, copies and probes."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from moesim.advice.errors import AdviceError
from moesim.advice.measured.rows import (
    GB,
    Platforms,
    Skipped,
    collect,
    group_of,
)
from moesim.advice.measured.scores import (
    NEAREST,
    ONE_EFFICIENCY,
    OURS,
    Guess,
    Ideal,
    Prediction,
    folds_of,
)
from moesim.advice.times.cache_engine import (
    EngineTraits,
    EngineWork,
    HostRates,
    engine_latents,
    engine_priors,
    engine_seconds,
    steps_from_hits,
    traits_of,
)
from moesim.advice.times.latents import Beliefs, Observation
from moesim.advice.times.population import Fit, Member, Population
from moesim.advice.times.priors import PriorTable, priors_of, textbook_priors
from moesim.advice.times.step_times import Target, decode_target
from moesim.advice.times.work import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.advice.machine.machine import Machine
    from moesim.advice.measured.rows import FolderModels, MeasuredFolder, Row
    from moesim.advice.model.contents import ModelContents

# Repetitions of one engine on one host differ by about so much.
ENGINE_SPREAD = 0.02
# Hit rates that were rounded, simulated or taken from other text.
HIT_SPREAD = 0.04
# How many copies run ahead, and how many of them come late, no row says.
AHEAD_SPREAD = 0.20
# Copies per token of a cache that admits with a margin, where a row does not say.
# Source: 8 to 11 per token over sizes and models in the development rows.
USUAL_ADMISSIONS = 9.0
FETCH_ADMISSIONS = 1.0
# Share of a causal cache's reads that Belady with bypass does without.
# Source: `policy_reads.csv`, least-recently-used against Belady at a quarter of slots.
BELADY_SAVES = 0.35

# Engines whose tokens/s are not layer steps with misses: drafts verify several tokens
# in one pass, and a third tier is read from an SSD.
OTHER_RULES = re.compile(
    r"strata|draft|\bmtp\b|nvme|neurall|hot list|whole file|ssd", re.IGNORECASE
)

_STEPS_COLUMN = re.compile("layer_steps_per_token")


@dataclass(frozen=True)
class EngineRun:
    """One measured engine: what it did and how fast.

    Attributes:
        row: where it stands.
        machine_name: rows of one name share a machine.
        machine: with its probes.
        model: contents of the file.
        host: probed rates of host memory.
        work: misses, copies and bytes; None where whole layers are on the CPU.
        target: llama.cpp's decode in that case.
        words: policy and size in words.
        tokens_per_s: as measured.
        hits_known: the row states its hit rate or counts.
    """

    row: Row
    machine_name: str
    machine: Machine
    model: ModelContents
    host: HostRates
    work: EngineWork | None
    target: Target | None
    words: str
    tokens_per_s: float
    hits_known: bool
    kind: str = "engine"
    session: str = ""

    @property
    def latents(self) -> frozenset[str]:
        """Every latent that the token depends on."""
        if self.work is None:
            assert self.target is not None
            return self.target.latents
        return frozenset(engine_latents(self.work)) | {self.misfit}

    @property
    def misfit(self) -> str:
        """Latent that multiplies all times of this engine with one model."""
        return f"misfit:model:engine {self.model.name}"

    @property
    def group(self) -> str:
        """Name of the platform that is left out as a whole."""
        return group_of(self.machine, self.machine_name)

    @property
    def seconds(self) -> float:
        """Measured seconds of one token."""
        return 1 / self.tokens_per_s

    @property
    def roof_s(self) -> float:
        """Seconds of one token by bytes over bandwidth alone."""
        if self.work is None:
            assert self.target is not None
            return self.target.seconds(Ideal(self.machine))
        misses = sum(
            (on_cpu + copies) * count
            for (on_cpu, copies), count in self.work.steps.items()
        )
        device = sum(self.work.dense.values()) / self.machine.device_bytes_per_s
        return misses * self.work.expert_bytes / self.host.cpu + device

    def predict(self, rates: Mapping[str, float]) -> float:
        """Seconds of one token."""
        if self.work is None:
            assert self.target is not None
            return self.target.seconds(rates)
        seconds = engine_seconds(self.work, self.machine, self.host, rates)
        return seconds * rates[self.misfit]

    @property
    def row_spread(self) -> float:
        """Standard deviation of the row's logarithm."""
        if self.work is not None and self.work.traits.ahead:
            return AHEAD_SPREAD
        return ENGINE_SPREAD if self.hits_known else HIT_SPREAD

    def observed(self) -> Observation:
        """Return the measured time."""
        return Observation(
            self.seconds, self.predict, self.latents, self.row_spread, self.words
        )


def event_runs(
    folder: MeasuredFolder, models: FolderModels
) -> tuple[list[EngineRun], list[Skipped]]:
    """Return the rows of ``layer_events.csv`` as runs."""
    platforms = Platforms(folder)
    return collect(
        folder["layer_events.csv"],
        lambda row: [_event_run(row, folder, platforms, models)],
    )


def cache_runs(
    folder: MeasuredFolder, models: FolderModels
) -> tuple[list[EngineRun], list[Skipped]]:
    """Return the rows of ``cache_runs.csv`` as runs."""
    platforms = Platforms(folder)
    rows = folder["cache_runs.csv"]
    hits = known_hits(rows)
    return collect(rows, lambda row: [_cache_run(row, platforms, models, hits)])


def _event_run(
    row: Row, folder: MeasuredFolder, platforms: Platforms, models: FolderModels
) -> EngineRun:
    name = _platform_of(row.text("host"), folder)
    machine = platforms.machine(name, row.source)
    model = models.contents(
        row.text("model"), row.text("quant") or _quant_of(row, folder)
    )
    config = row.text("config")

    # The unit stands in the head of the column, in several spellings.
    column = next((key for key in row.cells if _STEPS_COLUMN.match(key)), None)
    if column is None or not row.text(column):
        raise AdviceError(f"{row.place}: no column layer_steps_per_token…")
    steps = _steps(row.text(column), row)
    host = HostRates.of(
        _rate(row, "B_cpu_gbs"),
        _rate(row, "B_link_gbs"),
        _rate(row, "B_both_gbs"),
        _rate(row, "concurrent_cpu_gbs"),
    )
    admissions = FETCH_ADMISSIONS if "fetch" in config else USUAL_ADMISSIONS
    stated = [
        other for other in folder["cache_runs.csv"] if _same_run(row, other, name)
    ]
    if stated and stated[0].number("admits_per_token") is not None:
        admissions = stated[0].number("admits_per_token") or 0.0

    led_share = 0.0
    if config.endswith("_pf"):
        # Beside demand fetches only some of the copies were started ahead.
        led_share = 0.5 if "fetch" in config else 1.0
    work = _work(model, steps, admissions, EngineTraits(led_share=led_share))
    return EngineRun(
        row=row,
        machine_name=name,
        machine=machine,
        model=model,
        host=host,
        work=work,
        target=None,
        words=config,
        tokens_per_s=row.number("tok_s") or 0.0,
        hits_known=True,
    )


def _platform_of(host: str, folder: MeasuredFolder) -> str:
    """Find the platform whose name ends in a host's name (``EPYC7352``: ``7352``)."""
    names = {row.text("platform") for row in folder["platforms.csv"]}
    digits = re.sub(r"^[A-Za-z]+(?=\d)", "", host)
    fitting = [name for name in sorted(names) if host in name or digits in name]
    return min(fitting, key=len) if fitting else f"5090_{host}"


def _quant_of(row: Row, folder: MeasuredFolder) -> str:
    """Return the label that the other files use for a row's model."""
    labels = Counter(
        other.text("quant")
        for other in folder["cache_runs.csv"]
        if other.text("model") == row.text("model")
    )
    if labels:
        return labels.most_common(1)[0][0]
    return "MXFP4" if row.text("model").startswith("gpt-oss") else ""


def _same_run(row: Row, other: Row, platform: str) -> bool:
    """Tell whether a row of ``cache_runs.csv`` is about the same run."""
    slots = re.match(r"C(\d+)", row.text("config"))
    return (
        other.text("platform") == platform
        and other.text("model") == row.text("model")
        and slots is not None
        and other.text("slots_per_layer") == slots.group(1)
        and abs((other.number("tok_s") or 0) - (row.number("tok_s") or 0)) < 0.02
    )


def _steps(text: str, row: Row) -> dict[tuple[int, int], float]:
    """Read ``0+0:5.1;1+0:10.2`` into (CPU misses, copies) -> count."""
    steps: dict[tuple[int, int], float] = {}
    for piece in text.split(";"):
        # A piece that is skipped silently would make a faster engine.
        match = re.fullmatch(r"\s*(\d+)\+(\d+):([\d.]+)\s*", piece)
        if match is None:
            raise AdviceError(
                f"{row.place}: layer steps: expected misses+copies:count, found"
                f" {piece!r}"
            )
        steps[int(match.group(1)), int(match.group(2))] = float(match.group(3))
    return steps


def _rate(row: Row, column: str) -> float:
    value = row.number(column)
    if value is None or value <= 0:
        raise AdviceError(f"{row.place}: {column}: expected GB/s above 0, found none")
    return value * GB


def _work(
    model: ModelContents,
    steps: Mapping[tuple[int, int], float],
    admissions: float,
    traits: EngineTraits,
) -> EngineWork:
    layer = model.layers[model.moe_layers[0]]
    size = layer.expert_bytes / layer.experts
    dense: Counter[str] = Counter({model.head_format: model.head_bytes})
    for each in model.layers:
        dense.update(each.dense_formats)
    return EngineWork(
        steps=steps,
        expert_bytes=size,
        expert_format=model.main_format,
        top_k=layer.top_k,
        layers=len(model.layers),
        dense=dict(dense),
        background_bytes=admissions * size,
        traits=traits,
    )


Hits = dict[tuple[str, str], list[tuple[float, float, str]]]


def known_hits(rows: Sequence[Row]) -> Hits:
    """Collect stated hit rates of causal caches: (model, quant) -> (share of experts in
    slots, hit rate, platform).
    """
    hits: Hits = defaultdict(list)
    # These hit rates are not those of a cache that only knows the past.
    unusual = re.compile("static|oracle|no expert|prefetch|all experts|MIN|ahead")
    for row in rows:
        rate = row.number("hit_rate")
        share = row.number("capacity_share")
        if rate is None or share is None or unusual.search(row.text("policy")):
            continue
        key = (row.text("model"), row.text("quant"))
        hits[key].append((share, rate, row.text("platform")))
    return hits


def _interpolated(hits: Hits, row: Row) -> float | None:
    """Hit rate of a model at a size, from rows of other platforms if there are any."""
    points = hits.get((row.text("model"), row.text("quant")), [])
    # Its own platform's rate would come from the engine that is predicted.
    others = [point for point in points if point[2] != row.text("platform")]
    points = others or points
    share = row.number("capacity_share")
    if not points or share is None:
        return None

    sizes = sorted({point[0] for point in points})
    rates = [mean(rate for at, rate, _ in points if at == size) for size in sizes]
    if share <= sizes[0]:
        return rates[0] * share / sizes[0]
    for at in range(1, len(sizes)):
        if share <= sizes[at]:
            part = (share - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            return rates[at - 1] + part * (rates[at] - rates[at - 1])
    # Beyond the largest known size, towards all experts in slots.
    part = (share - sizes[-1]) / (1 - sizes[-1])
    return rates[-1] + part * (1 - rates[-1])


def _cache_run(
    row: Row, platforms: Platforms, models: FolderModels, hits: Hits
) -> EngineRun:
    name = row.text("platform")
    machine = platforms.machine(name, row.source)
    model = models.contents(row.text("model"), row.text("quant"))
    policy = row.text("policy")
    if OTHER_RULES.search(f"{policy} {row.text('extra')}"):
        raise AdviceError("drafts, several tiers or a schedule that is not modelled")
    traits = traits_of(policy)
    speed = row.number("tok_s")
    if speed is None or speed <= 0:
        raise AdviceError(f"{row.place}: tok_s: expected a speed above 0, found none")

    stated = row.number("hit_rate")
    words = f"{policy}, {row.text('slots_per_layer')} slots"
    host = host_rates(machine)
    work: EngineWork | None = None
    target = None
    if traits.whole_layers:
        share = row.number("capacity_share") or 0.0
        # Whole layers stand for a share of experts.
        moved = round(len(model.moe_layers) * (1 - share))
        target = decode_target(machine, model, Setting(cpu_layers=moved), 0)
    else:
        rate = stated if stated is not None else _interpolated(hits, row)
        if rate is None:
            raise AdviceError(f"{row.place}: no hit rate, and none of this model known")
        table = _fetch_table(row, model)
        steps = steps_from_hits(model, rate, traits, table)
        usual = _interpolated(hits, row)
        admissions = _admissions(row, model, rate, usual, traits)
        work = _work(model, steps, admissions, traits)

    return EngineRun(
        row=row,
        machine_name=name,
        machine=machine,
        model=model,
        host=host,
        work=work,
        target=target,
        words=words,
        tokens_per_s=speed,
        hits_known=stated is not None,
    )


def _fetch_table(row: Row, model: ModelContents) -> tuple[int, ...]:
    """Read ``fetch table 0,1,1,2,3``: of n misses, entry n is copied instead.

    A row may state several tables; the one for this model has top-k + 1 entries.
    """
    top_k = model.layers[model.moe_layers[0]].top_k
    for text in (row.text("policy"), row.text("extra")):
        for match in re.finditer(r"\d(?:,\d)+", text):
            table = tuple(int(digit) for digit in match.group().split(","))
            # Tables of other models stand in the same cell.
            if len(table) == top_k + 1:
                return table
    return ()


def _admissions(
    row: Row,
    model: ModelContents,
    hit_rate: float,
    usual_rate: float | None,
    traits: EngineTraits,
) -> float:
    """Experts copied per token without being awaited.

    Args:
        row: may state them.
        model: for its experts per token.
        hit_rate: of this engine.
        usual_rate: of a causal cache of the same size, if known. A prefetch that makes
            a hit of a miss still copies the expert.
        traits: of the engine.
    """
    stated = row.number("admits_per_token")
    copied = re.search(r"link copies ([\d.]+) per token", row.text("extra"))
    if copied:
        # A counted figure beats every estimate below.
        return float(copied.group(1)) + (stated or 0.0)

    layer = model.layers[model.moe_layers[0]]
    asked = layer.top_k * len(model.moe_layers)
    ahead = 0.0
    if traits.ahead and usual_rate is not None:
        # Foresight also saves reads: Belady with bypass misses a third less.
        saved = BELADY_SAVES if traits.one_read else 0.0
        ahead = max(0.0, (1 - usual_rate) * (1 - saved) - (1 - hit_rate)) * asked
    if stated is not None:
        return max(stated, ahead)
    if traits.one_read:
        return ahead
    if traits.admit_all and not traits.fetch:
        return (1 - hit_rate) * asked
    return ahead + (FETCH_ADMISSIONS if traits.fetch else USUAL_ADMISSIONS)


def host_rates(machine: Machine) -> HostRates:
    """Return a machine's rates of host memory, expected ones where none was probed."""
    probes = machine.probes
    priors = priors_of(machine)
    cpu = max(probes.host_read.values(), default=priors["host_read"].value)
    link = probes.link or priors["upload"].value
    both = probes.both
    if probes.host_beside_link and probes.link_beside_host:
        both = probes.host_beside_link + probes.link_beside_host
    return HostRates.of(cpu, link, both, probes.host_beside_link)


def predict_engines(
    runs: Sequence[EngineRun], learners: Sequence[EngineRun], left_out: str
) -> list[Prediction]:
    """Predict every run from the rows of other platforms, or of other sources.

    Args:
        runs: to predict.
        learners: rows that teach; those of a run's own fold are left out.
        left_out: ``platforms`` or ``sources``.
    """
    machines: dict[str, list[EngineRun]] = defaultdict(list)
    for run in learners:
        machines[run.machine_name].append(run)
    fit = Fit(
        [
            Member(name, _priors(rows[0]), [row.observed() for row in rows])
            for name, rows in machines.items()
        ]
    )
    folds = folds_of([*learners, *runs], left_out)
    populations: dict[str, Population] = {}
    predictions = []
    for run in runs:
        fold = folds[run.machine_name]
        if fold not in populations:
            populations[fold] = fit.without(
                [name for name in machines if folds[name] == fold]
            )
        population = populations[fold]
        table = PriorTable(
            {
                name: population.applied(name, prior)
                for name, prior in _priors(run).items()
            },
            population,
        )
        interval = Beliefs(table).predict(
            run.predict, sorted(run.latents), run.row_spread
        )
        others = [other for other in learners if folds[other.machine_name] != fold]
        guesses = {OURS: Guess(math.log(interval.value), interval.spread)}
        guesses |= _simple(run, others)
        given = "hit rate stated" if run.hits_known else "hit rate interpolated"
        predictions.append(Prediction(run, fold, given, guesses))
    return predictions


def _simple(run: EngineRun, others: Sequence[EngineRun]) -> dict[str, Guess]:
    """Bytes over bandwidth with one efficiency, and the most similar row."""
    if not others:
        return {}
    roof = math.log(run.roof_s)
    ratios = sorted(math.log(other.seconds / other.roof_s) for other in others)
    nearest = min(others, key=lambda other: abs(math.log(other.roof_s) - roof))
    scaled = math.log(nearest.seconds / nearest.roof_s) + roof
    return {
        ONE_EFFICIENCY: Guess(roof + ratios[len(ratios) // 2], 0.1),
        NEAREST: Guess(scaled, 0.1),
    }


def _priors(run: EngineRun) -> PriorTable:
    return PriorTable({**textbook_priors(run.machine), **engine_priors(run.machine)})
