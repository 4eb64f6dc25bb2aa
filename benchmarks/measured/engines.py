"""Engines with an expert cache, predicted from hit rates and probes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import TYPE_CHECKING

from benchmarks.measured.fit import Fit, Member
from benchmarks.measured.rows import (
    Platforms,
    Skipped,
    collect,
    group_of,
)
from benchmarks.measured.scores import (
    NEAREST,
    ONE_EFFICIENCY,
    OURS,
    Guess,
    Prediction,
    folds_of,
)
from moesim.advice.times.cache_engine import (
    EngineTraits,
    EngineWork,
    HostRates,
    engine_priors,
    engine_seconds,
    engine_work,
    steps_from_hits,
)
from moesim.advice.times.latents import Beliefs, Observation
from moesim.advice.times.priors import PriorTable, priors_of, textbook_priors
from moesim.advice.times.step_times import latents_of
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.measured.rows import FolderModels, MeasuredFolder, Row
    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.priors import Population

# Repetitions of one engine on one host differ by about so much.
ENGINE_SPREAD = 0.02
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
    r"strata|draft|\bmtp\b|nvme|neurall|hot list|whole file|whole layers|ssd",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class EngineRun:
    """One measured engine: what it did and how fast.

    Attributes:
        row: where it stands.
        machine_name: rows of one name share a machine.
        machine: with its probes.
        model: contents of the file.
        host: probed rates of host memory.
        work: misses, copies and bytes.
        words: policy and size in words.
        tokens_per_s: as measured.
    """

    row: Row
    machine_name: str
    machine: Machine
    model: ModelContents
    host: HostRates
    work: EngineWork
    words: str
    tokens_per_s: float
    kind: str = "engine"
    session: str = ""

    @cached_property
    def latents(self) -> frozenset[str]:
        """Every latent that the token depends on."""
        return latents_of(self.predict)

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
        misses = sum(
            (on_cpu + copies) * count
            for (on_cpu, copies), count in self.work.steps.items()
        )
        device = sum(self.work.dense.values()) / self.machine.device_bytes_per_s
        return misses * self.work.expert_bytes / self.host.cpu + device

    def predict(self, rates: Mapping[str, float]) -> float:
        """Seconds of one token."""
        seconds = engine_seconds(self.work, self.machine, self.host, rates)
        return seconds * rates[self.misfit]

    @property
    def row_spread(self) -> float:
        """Standard deviation of the row's logarithm."""
        return AHEAD_SPREAD if self.work.traits.ahead else ENGINE_SPREAD

    def observed(self) -> Observation:
        """Return the measured time."""
        return Observation(
            self.seconds, self.predict, self.latents, self.row_spread, self.words
        )


def _says(policy: str, *parts: str) -> bool:
    return any(part in policy.lower() for part in parts)


def traits_of(policy: str) -> EngineTraits:
    """Read the traits out of a policy's name, as tables of measurements write it."""
    return EngineTraits(
        split=_says(
            policy, "split", "memcpy", "copy-engine adm", "zero-copy adm", "hot set"
        ),
        ahead=_says(policy, "prefetch", "read-ahead", "hit-optimal", "scheduled"),
    )


def fetches(policy: str) -> bool:
    """Tell whether a policy shares misses between CPU and link."""
    oracle = _says(policy, "oracle", "read-ahead", "min set", "scheduled")
    return oracle or _says(policy, "deployed", "+ fetch", "+fetch", "fetch table")


def with_fetches(
    steps: Mapping[tuple[int, int], float], table: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Copy some misses of each layer step instead of computing them.

    Args:
        steps: (CPU misses, 0) -> layer steps per token.
        table: of n misses in one step, entry n is copied.
    """
    shared: dict[tuple[int, int], float] = defaultdict(float)
    for (misses, _), count in steps.items():
        # Usual tables send about half of several misses over the link.
        copies = (misses + 1) // 2 if misses > 1 else 0
        if misses < len(table):
            copies = min(misses, table[misses])
        shared[misses - copies, copies] += count
    return dict(shared)


def cache_runs(
    folder: MeasuredFolder, models: FolderModels
) -> tuple[list[EngineRun], list[Skipped]]:
    """Return the rows of ``cache_runs.csv`` as runs."""
    platforms = Platforms(folder)
    rows = folder["cache_runs.csv"]
    hits = known_hits(rows)
    return collect(rows, lambda row: [_cache_run(row, platforms, models, hits)])


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

    rate = row.number("hit_rate")
    if rate is None:
        raise AdviceError("no hit rate")

    steps = steps_from_hits(model, rate)
    if fetches(policy):
        steps = with_fetches(steps, _fetch_table(row, model))
    admissions = _admissions(row, model, rate, _interpolated(hits, row), traits)
    return EngineRun(
        row=row,
        machine_name=name,
        machine=machine,
        model=model,
        host=host_rates(machine),
        work=engine_work(model, steps, admissions, traits),
        words=f"{policy}, {row.text('slots_per_layer')} slots",
        tokens_per_s=speed,
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

    policy = row.text("policy")
    # A miss that is admitted is read once for both.
    one_read = _says(policy, "1 read", "scheduled", "paced")
    layer = model.layers[model.moe_layers[0]]
    asked = layer.top_k * len(model.moe_layers)
    ahead = 0.0
    if traits.ahead and usual_rate is not None:
        # Foresight also saves reads: Belady with bypass misses a third less.
        saved = BELADY_SAVES if one_read else 0.0
        ahead = max(0.0, (1 - usual_rate) * (1 - saved) - (1 - hit_rate)) * asked
    if stated is not None:
        return max(stated, ahead)
    if one_read:
        return ahead
    if _says(policy, "lru", "hit-optimal") and not fetches(policy):
        return (1 - hit_rate) * asked
    return ahead + (FETCH_ADMISSIONS if fetches(policy) else USUAL_ADMISSIONS)


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


def predict_engines(runs: Sequence[EngineRun], left_out: str) -> list[Prediction]:
    """Predict every run from the rows of other platforms, or of other sources.

    Args:
        runs: to predict.
        left_out: ``platforms`` or ``sources``.
    """
    machines: dict[str, list[EngineRun]] = defaultdict(list)
    for run in runs:
        machines[run.machine_name].append(run)
    fit = Fit(
        [
            Member(name, _priors(rows[0]), [row.observed() for row in rows])
            for name, rows in machines.items()
        ]
    )
    folds = folds_of(runs, left_out)
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
        others = [other for other in runs if folds[other.machine_name] != fold]
        guesses = {OURS: Guess(math.log(interval.value), interval.spread)}
        guesses |= _simple(run, others)
        predictions.append(Prediction(run, fold, "hit rate", guesses))
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
