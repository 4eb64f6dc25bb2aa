"""Predicts other people's rows from what lies outside them, beside simple baselines.

Whole platforms are left out (one pair of card and processor with all its rows), then
whole sources (one repository or thread with all its platforms). Baselines are fitted to
the same remaining rows. Where a case gives rows, they are rows of the machine itself
and never the predicted one. Intervals of all predictors are widened or narrowed by one
factor for each case that the *other* platforms show, so their widths can be compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from benchmarks.measured.engines import cache_runs, predict_engines
from benchmarks.measured.fit import Fit, Member
from benchmarks.measured.rows import FolderModels, runs_of
from benchmarks.measured.scores import (
    NEAREST,
    ONE_EFFICIENCY,
    OURS,
    STRAIGHT_LINE,
    TWO_CONSTANTS,
    Guess,
    Ideal,
    Prediction,
    folds_of,
    stretch,
    widened,
)
from moesim.advice.plan.bound import ByteBound, placement_bound
from moesim.advice.times.latents import Beliefs, learn
from moesim.advice.times.priors import PriorTable, priors_of, textbook_priors
from moesim.advice.times.work import DecodeWork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.measured.engines import EngineRun
    from benchmarks.measured.rows import MeasuredFolder, Run, Skipped
    from moesim.advice.times.priors import Population

MOST_CHOICES = 6
# A choice among fewer numbers of layers says little.
FEWEST_LAYERS = 2


@dataclass
class Case:
    """One question, asked of every row.

    Attributes:
        name: what is predicted from what.
        grade: key of the factor on the intervals.
        goal: what to reach, in words.
        predictions: by what was left out: ``platforms`` or ``sources``.
    """

    name: str
    grade: str
    goal: str
    predictions: dict[str, list[Prediction]] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """Everything that ``python -m benchmarks.measured DIR`` finds out.

    Attributes:
        folders: whose rows were predicted.
        cases: in the order of the page.
        runs: rows of llama.cpp and its forks.
        skipped: rows that are not predicted, with reasons.
        population: what all machines have in common, to be shipped.
    """

    folders: str
    cases: Sequence[Case]
    runs: Sequence[Run]
    skipped: Sequence[Skipped]
    population: Population

    @property
    def regrets(self) -> list[float]:
        """Share of the best measured speed that the advised layers miss, by sweep."""
        sweeps: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
        for each in self.cases[0].predictions["platforms"]:
            run = each.run
            sweeps[run.machine_name, run.session, run.model.name].append(each)
        shares = []
        for rows in sweeps.values():
            layers = {_layers(cast("Run", each.run)) for each in rows}
            if len(layers) > FEWEST_LAYERS:
                best = max(each.run.tokens_per_s for each in rows)
                advised = min(rows, key=lambda each: each.guesses[OURS].log_s)
                shares.append(1 - advised.run.tokens_per_s / best)
        return shares

    @property
    def beaten_bounds(self) -> list[Run]:
        """Decode rows that are faster than bytes over bandwidth allow."""
        return [
            run
            for run in self.runs
            if run.kind == "decode"
            and run.seconds < 0.98 * placement_bound_of(run).seconds
        ]


def placement_bound_of(run: Run) -> ByteBound:
    """Return the physical bound of a run."""
    depth = run.depth + run.tokens / 2
    return placement_bound(run.machine, run.model, run.setting, depth)


class Knowledge:
    """What the other platforms, or the other sources, say together."""

    def __init__(self, runs: Sequence[Run], left_out: str) -> None:
        self.left_out = left_out
        self.machines: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in runs:
            self.machines[run.group, run.machine_name].append(run)
        self.fit = Fit([_member(rows) for rows in self.machines.values()])
        self.folds = folds_of(runs, left_out)
        self.populations: dict[str, Population] = {}
        self.simple: dict[tuple[str, str], Baselines] = {}
        self.runs = runs

    def population(self, run: Run) -> Population:
        """Return what is known without a run's platform, or source."""
        fold = self.folds[run.machine_name]
        if fold not in self.populations:
            names = [
                rows[0].machine_name
                for rows in self.machines.values()
                if self.folds[rows[0].machine_name] == fold
            ]
            self.populations[fold] = self.fit.without(names)
        return self.populations[fold]

    def baselines(self, run: Run) -> Baselines:
        """Return the baselines, fitted without a run's platform, or source."""
        fold = self.folds[run.machine_name]
        key = (fold, run.kind)
        if key not in self.simple:
            others = [
                other
                for other in self.runs
                if self.folds[other.machine_name] != fold and other.kind == run.kind
            ]
            self.simple[key] = Baselines(others)
        return self.simple[key]

    def beliefs(self, run: Run, *, probed: bool) -> Beliefs:
        """Return what is believed of a run's machine before any row of it."""
        machine = run.machine if probed else run.specified
        return Beliefs(priors_of(machine, run.setting.threads, self.population(run)))


def _member(rows: Sequence[Run]) -> Member:
    first = rows[0]
    priors = PriorTable(textbook_priors(first.machine, first.setting.threads))
    observations = [run.observation(probed=True) for run in rows]
    return Member(first.machine_name, priors, observations)


class Baselines:
    """Simple models with a number or three, fitted to some rows."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.roofs = np.array([roof_s(run) for run in runs])
        self.seconds = np.array([run.seconds for run in runs])
        weights: dict[str, int] = defaultdict(int)
        for run in runs:
            weights[run.group] += 1
        # Each platform counts once, however many rows it has.
        self.weights = np.array([1 / weights[run.group] for run in runs])
        self.features = np.array([_features(run) for run in runs])
        logs = np.log(self.seconds / self.roofs)
        self.efficiency = _weighted_median(logs, self.weights)
        self.constants = self._constants()

    def _constants(self) -> np.ndarray:
        """Efficiency, seconds per CPU layer and per step, by least absolute logs."""
        from scipy.optimize import least_squares  # half a second

        root = np.sqrt(self.weights)
        terms = self.features[:, :2]

        def misses(logs: np.ndarray) -> np.ndarray:
            predicted = math.exp(logs[0]) * self.roofs + terms @ np.exp(logs[1:])
            distances: np.ndarray = root * np.log(predicted / self.seconds)
            return distances

        start = np.array([self.efficiency, math.log(5e-5), math.log(1e-3)])
        solution: np.ndarray = least_squares(misses, start, loss="soft_l1").x
        return solution

    def guesses(self, run: Run) -> dict[str, float]:
        """Return the logarithm of the seconds of a run by each of them."""
        roof = roof_s(run)
        features = _features(run)
        constants = np.exp(self.constants)
        place = np.log(features + 1e-9)
        distances = ((np.log(self.features + 1e-9) - place) ** 2).sum(axis=1)
        nearest = int(np.argmin(distances))
        scaled = self.seconds[nearest] * roof / self.roofs[nearest]
        return {
            ONE_EFFICIENCY: math.log(roof) + self.efficiency,
            TWO_CONSTANTS: math.log(constants[0] * roof + features[:2] @ constants[1:]),
            NEAREST: math.log(scaled),
        }


def roof_s(run: Run) -> float:
    """Seconds of a run by specified rates alone."""
    return run.target(probed=False).seconds(Ideal(run.specified))


def _features(run: Run) -> np.ndarray:
    """CPU layers (or micro-batches x layers), 1, and the roofline's seconds."""
    work = run.target(probed=False).work
    if isinstance(work, DecodeWork):
        layers = float(work.host_expert_layers + work.host_dense_layers)
    else:
        layers = float(sum(work.chunks.values()) * work.layers)
    return np.array([layers, 1.0, roof_s(run)])


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def judge(
    folders: Sequence[MeasuredFolder],
    progress: Callable[[str, float], None] | None = None,
) -> Judgement:
    """Predict every row, with whole platforms and whole sources left out.

    Args:
        folders: with the files that `benchmarks.measured.rows` reads.
        progress: told what is being done, and which share is done.
    """
    tell = progress or (lambda _what, _share: None)
    runs, engines, skipped = _read(folders)
    cases = [Case(*words) for words in CASES]
    widths: dict[str, tuple[float, float]] = {}
    fit = None
    for at, left_out in enumerate(("platforms", "sources")):
        knowledge = Knowledge(runs, left_out)
        fit = fit or knowledge.fit
        for index, case in enumerate(cases):
            tell(case.name, (at + index / len(cases)) / 2)
            if case.grade in QUESTIONS:
                solution = QUESTIONS[case.grade](runs, knowledge)
            else:
                solution = predict_engines(engines, left_out)
            case.predictions[left_out] = widened(solution)
            # Strangers are at least as far away as another source's machines.
            widths[case.grade] = stretch(solution, OURS)
    # Whoever knows rows of another model knows more than the specification.
    surer = widths["another model"]
    widths["specification"] = max(surer, widths["specification"])
    assert fit is not None
    names = ", ".join(str(folder.path) for folder in folders)
    population = replace(fit.population(), widths=widths)
    return Judgement(names, cases, runs, skipped, population)


def _read(
    folders: Sequence[MeasuredFolder],
) -> tuple[list[Run], list[EngineRun], list[Skipped]]:
    """Return runs of llama.cpp and of engines with expert caches."""
    runs: list[Run] = []
    engines: list[EngineRun] = []
    skipped: list[Skipped] = []
    for folder in folders:
        models = FolderModels(folder)
        llama, no_llama = runs_of(folder)
        by_hits, no_hits = cache_runs(folder, models)
        runs += llama
        engines += by_hits
        skipped += [*no_llama, *no_hits]
    return runs, engines, skipped


def _predicted(
    run: Run,
    knowledge: Knowledge,
    beliefs: Beliefs,
    simple: Mapping[str, float],
    *,
    probed: bool,
    given: str,
) -> Prediction:
    interval = run.target(probed=probed).predicted(beliefs, run.row_spread)
    guesses = {OURS: Guess(math.log(interval.value), interval.spread)}
    for name, log_s in simple.items():
        # One number for all rows; the factor on it comes from the other folds.
        guesses[name] = Guess(log_s, 0.1)
    fold = knowledge.folds[run.machine_name]
    return Prediction(run, fold, given, guesses)


def _blind(kind: str, *, probed: bool) -> Question:
    """Predict rows of one kind without any row of their machine."""

    def ask(runs: Sequence[Run], knowledge: Knowledge) -> list[Prediction]:
        given = "probes" if probed else "specification"
        predictions = []
        for run in runs:
            if run.kind != kind or (probed and not run.machine.probes.host_read):
                continue
            beliefs = knowledge.beliefs(run, probed=probed)
            simple = knowledge.baselines(run).guesses(run)
            predictions.append(
                _predicted(run, knowledge, beliefs, simple, probed=probed, given=given)
            )
        return predictions

    return ask


def _from_rows(kind: str, count: int) -> Question:
    """Predict rows of a sweep from `count` other rows of it."""

    def ask(runs: Sequence[Run], knowledge: Knowledge) -> list[Prediction]:
        predictions = []
        for sweep in _sweeps(runs, kind):
            for given in _choices(sweep, count):
                conditions = [_condition(row) for row in given]
                asked = [run for run in sweep if _condition(run) not in conditions]
                predictions += _asked(given, asked, knowledge)
        return predictions

    return ask


def _from_another_model(runs: Sequence[Run], knowledge: Knowledge) -> list[Prediction]:
    """Predict rows of a model from two rows of another one on the same machine."""
    machines: dict[tuple[str, str], list[list[Run]]] = defaultdict(list)
    for sweep in _sweeps(runs, "decode"):
        machines[sweep[0].machine_name, sweep[0].session].append(sweep)
    predictions = []
    for sweeps in machines.values():
        for known in sweeps:
            for other in sweeps:
                if known[0].model.name == other[0].model.name:
                    continue
                for given in _choices(known, 2):
                    predictions += _asked(given, other, knowledge)
    return predictions


def _asked(
    given: Sequence[Run], asked: Sequence[Run], knowledge: Knowledge
) -> list[Prediction]:
    """Predict some rows of a machine from others of it."""
    if not asked:
        return []
    start = knowledge.beliefs(given[0], probed=True)
    rows = [row.observation(probed=True) for row in given]
    beliefs = learn(start.priors, rows)
    words = f"{given[0].model.name}: " + " and ".join(row.words for row in given)
    return [
        _predicted(
            run,
            knowledge,
            beliefs,
            _simple_from(given, run, knowledge),
            probed=True,
            given=words,
        )
        for run in asked
    ]


def _simple_from(
    given: Sequence[Run], run: Run, knowledge: Knowledge
) -> dict[str, float]:
    """Baselines that know the given rows as well."""
    simple = knowledge.baselines(run)
    ratios = [math.log(row.seconds / roof_s(row)) for row in given]
    guesses = {ONE_EFFICIENCY: math.log(roof_s(run)) + float(np.mean(ratios))}
    known = [simple.guesses(row)[TWO_CONSTANTS] for row in given]
    misses = [
        math.log(row.seconds) - log_s for row, log_s in zip(given, known, strict=True)
    ]
    guesses[TWO_CONSTANTS] = simple.guesses(run)[TWO_CONSTANTS] + float(np.mean(misses))
    if any(row.model.name != run.model.name for row in given):
        return guesses

    nearest = min(given, key=lambda row: abs(_layers(row) - _layers(run)))
    guesses[NEAREST] = math.log(nearest.seconds / _tokens(nearest) * _tokens(run))
    if len(given) == 2 and _layers(given[0]) != _layers(given[1]):
        first, second = given
        part = (_layers(run) - _layers(first)) / (_layers(second) - _layers(first))
        line = first.seconds + part * (second.seconds - first.seconds)
        shortest = 0.2 * min(first.seconds, second.seconds)
        guesses[STRAIGHT_LINE] = math.log(max(line, shortest))
    return guesses


def _layers(run: Run) -> int:
    return len(run.setting.on_host(run.model))


def _tokens(run: Run) -> int:
    return run.tokens if run.kind == "prefill" else 1


def _sweeps(runs: Sequence[Run], kind: str) -> list[list[Run]]:
    """Rows of one machine, session and model, those wholly on the CPU aside."""
    groups: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if run.kind == kind and (run.setting.gpu_layers or not run.machine.graphics):
            key = (run.machine_name, run.session, run.model.name, run.fork)
            groups[key].append(run)
    return list(groups.values())


def _condition(run: Run) -> tuple[object, ...]:
    """What distinguishes rows of one sweep; equal ones are repetitions."""
    setting = run.setting
    micro = setting.micro_batch if run.kind == "prefill" else 0
    tokens = run.tokens if run.kind == "prefill" else 0
    return (_layers(run), setting.gpu_layers, setting.threads, run.depth, micro, tokens)


def _choices(sweep: Sequence[Run], count: int) -> list[tuple[Run, ...]]:
    """Choose rows to give, the outermost first, at most `MOST_CHOICES` times."""
    ordered = sorted(sweep, key=lambda run: (_layers(run), run.tokens, run.depth))
    choices: list[tuple[Run, ...]] = [(run,) for run in ordered]
    if count > 1:
        choices = [
            (first, second)
            for at, first in enumerate(ordered)
            for second in ordered[at + 1 :]
            if _condition(first) != _condition(second)
        ]
        choices.sort(key=lambda pair: _layers(pair[0]) - _layers(pair[-1]))
    stride = max(1, len(choices) / MOST_CHOICES)
    return [choices[int(at * stride)] for at in range(int(len(choices) / stride))]


Question = Callable[["Sequence[Run]", Knowledge], "list[Prediction]"]
QUESTIONS: dict[str, Question] = {
    "specification": _blind("decode", probed=False),
    "probes": _blind("decode", probed=True),
    "one row": _from_rows("decode", 1),
    "two rows": _from_rows("decode", 2),
    "another model": _from_another_model,
    "prompt specification": _blind("prefill", probed=False),
    "prompt one row": _from_rows("prefill", 1),
}
CASES = (
    ("decode, specification", "specification", "<= 25 %, desktops <= 18 %"),
    ("decode, probes", "probes", "<= 10 %"),
    ("decode, one row of the model", "one row", "<= 6 %"),
    ("decode, two rows of the model", "two rows", "<= 1.2 %, p90 <= 6 %"),
    ("decode, two rows of another model", "another model", "<= 8 %"),
    ("prompts, specification", "prompt specification", "<= 35 %"),
    ("prompts, one row of the model", "prompt one row", "<= 12 %"),
    ("expert-cache engines, hit rate given", "engine", "<= 7 %"),
)
