"""The whole comparison: every case, its goal, what was reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING

from moesim.advice.measured.bound_shares import BoundShare, decode_shares, engine_shares
from moesim.advice.measured.decode_cases import (
    blind,
    two_micro_batches,
    two_rows_other_model,
    two_rows_same_model,
)
from moesim.advice.measured.engine_cases import (
    EngineRun,
    cache_runs,
    event_runs,
    predict_engines,
)
from moesim.advice.measured.models import FolderModels
from moesim.advice.measured.priors import StrictPriors
from moesim.advice.measured.regret import Regret, regrets
from moesim.advice.measured.rows import Skipped, runs_of
from moesim.advice.measured.scores import Prediction, Score, score_of
from moesim.advice.measured.targets import spills

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.advice.measured.folder import MeasuredFolder
    from moesim.advice.measured.rows import Run

Check = Callable[[Score], bool]


@dataclass(frozen=True)
class Case:
    """One row of the table with all its predictions.

    Attributes:
        name: what is predicted from what.
        goal: what to reach, in words.
        best: best known elsewhere, in words; empty where this is only a variant.
        check: tells whether a score reaches the goal; None for variants.
        predictions: all of them.
    """

    name: str
    goal: str = ""
    best: str = ""
    check: Check | None = None
    predictions: Sequence[Prediction] = ()

    @property
    def score(self) -> Score | None:
        """Summary of the predictions."""
        return score_of(self.predictions)

    @property
    def reached(self) -> bool | None:
        """Tell whether the goal is met; None where there is nothing to tell."""
        score = self.score
        if score is None or self.check is None:
            return None
        return self.check(score)


@dataclass(frozen=True)
class Comparison:
    """Everything that ``moesim validate --machines DIR`` finds out.

    Attributes:
        folder: whose rows were predicted.
        cases: in the order of the table.
        regrets: one per sweep, from specification and from probes.
        skipped: rows that could not be predicted.
        bounds: measured runs beside their physical bounds.
        row_count: rows that could.
    """

    folder: str
    cases: Sequence[Case]
    regrets: dict[str, list[Regret]] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    bounds: Sequence[BoundShare] = ()
    row_count: int = 0

    @property
    def coverage(self) -> float | None:
        """Coverage of 90 % intervals, as the mean over the cases with a goal."""
        # Variants repeat the rows of their case and would count twice.
        scores = [case.score for case in self.cases if case.check is not None]
        covered = [score.coverage for score in scores if score is not None]
        return mean(covered) if covered else None

    def median_regret(self, grade: str) -> float | None:
        """Median share of speed that the advised settings miss."""
        shares = [regret.share for regret in self.regrets.get(grade, [])]
        return median(shares) if shares else None


def compare(
    folder: MeasuredFolder, progress: Callable[[str, float], None] | None = None
) -> Comparison:
    """Predict every row of a folder blind, case by case.

    Args:
        folder: with the files that `moesim.advice.measured.folder` reads.
        progress: told what is being done, and which share is done.
    """
    tell = progress or (lambda _what, _share: None)
    runs, skipped = runs_of(folder)
    models = FolderModels(folder)
    # Each grade learns its own populations, without the other's knowledge.
    spec = StrictPriors(runs, probed=False)
    probes = StrictPriors(runs, probed=True)

    cases: list[Case] = []
    for share, (name, make) in enumerate(_decode_cases(runs, spec, probes)):
        tell(name, share / 14)
        cases.append(make())

    events, no_events = event_runs(folder, models)
    engines, no_engines = cache_runs(folder, models)
    for share, (name, make) in enumerate(_engine_cases(events, engines), start=10):
        tell(name, share / 14)
        cases.append(make())

    return Comparison(
        folder=str(folder.path),
        cases=cases,
        regrets={"specification": regrets(runs, spec), "probes": regrets(runs, probes)},
        bounds=[*decode_shares(runs), *engine_shares([*events, *_known(engines)])],
        skipped=[*skipped, *_beyond_cliff(runs), *no_events, *no_engines],
        row_count=len(runs) + len(events) + len(engines),
    )


def _beyond_cliff(runs: Sequence[Run]) -> list[Skipped]:
    # Named, so that nobody thinks the row was overlooked.
    reason = "beyond the cliff: the bill exceeds the card's memory, no speed promised"
    return [
        Skipped(run.row.place, reason)
        for run in runs
        if run.kind == "decode" and spills(run)
    ]


Maker = tuple[str, Callable[[], Case]]


def _decode_cases(
    runs: Sequence[Run], spec: StrictPriors, probes: StrictPriors
) -> list[Maker]:
    """Cases of llama.cpp: with a goal, each followed by its variants."""
    return [
        _maker(
            "decode, from spec alone",
            lambda: blind(runs, spec),
            "median <= 20 %, 90 % of rows within +-40 %",
            "none",
            lambda score: score.median <= 0.20 and score.within_40 >= 0.90,
        ),
        _maker(
            "… leaving out the model instead of the machine",
            lambda: blind(runs, spec, leave_out="model"),
        ),
        _maker(
            "decode, from probes alone",
            lambda: blind(runs, probes),
            "median <= 12 %, worst <= 40 %",
            "24-34 % median, worst 38-252 %",
            lambda score: score.median <= 0.12 and score.worst <= 0.40,
        ),
        _maker(
            "… leaving out the model instead of the machine",
            lambda: blind(runs, probes, leave_out="model"),
        ),
        _maker(
            "decode, two rows of the same model and machine",
            lambda: two_rows_same_model(runs, probes),
            "median <= 2 %, p90 <= 5 %",
            "1.65 / 5.8 % (straight lines)",
            lambda score: score.median <= 0.02 and score.p90 <= 0.05,
        ),
        _maker(
            "… the two rows that advise asks for",
            lambda: two_rows_same_model(runs, probes, extremes=True),
        ),
        _maker(
            "decode, two rows of another model on the machine",
            lambda: two_rows_other_model(runs, probes),
            "median <= 5 %, worst <= 15 %",
            "4.9 / 25.6 %",
            lambda score: score.median <= 0.05 and score.worst <= 0.15,
        ),
        _maker(
            "… the two rows that advise asks for",
            lambda: two_rows_other_model(runs, probes, extremes=True),
        ),
        _maker(
            "prefill, two micro-batch sizes given",
            lambda: two_micro_batches(runs, probes),
            "median <= 5 %",
            "none",
            lambda score: score.median <= 0.05,
        ),
        _maker(
            "… the smallest and the largest given",
            lambda: two_micro_batches(runs, probes, extremes=True),
        ),
    ]


def _engine_cases(
    events: Sequence[EngineRun], engines: Sequence[EngineRun]
) -> list[Maker]:
    """Cases of engines with an expert cache."""
    known = _known(engines)
    # Counted and stated hit rates teach; interpolated ones would teach guesses.
    learners = [*events, *known]
    return [
        _maker(
            "tokens/s from misses and copies by layer step, probes only",
            lambda: predict_engines(events, learners),
            "median <= 3 %, p90 <= 6 %",
            "3.1 / 6.3 %",
            lambda score: score.median <= 0.03 and score.p90 <= 0.06,
        ),
        _maker(
            "expert-cache engine, from slots, policy and hit rate",
            lambda: predict_engines(known, learners),
            "median <= 8 %",
            "5.6 % on later hosts, fitted",
            lambda score: score.median <= 0.08,
        ),
        _maker(
            "… rows without a hit rate too, interpolated",
            lambda: predict_engines(engines, learners),
        ),
    ]


def _known(engines: Sequence[EngineRun]) -> list[EngineRun]:
    """Runs whose rows state a hit rate or counts."""
    return [run for run in engines if run.hits_known]


def _maker(
    name: str,
    predict: Callable[[], list[Prediction]],
    goal: str = "",
    best: str = "",
    check: Check | None = None,
) -> Maker:
    return name, lambda: Case(name, goal, best, check, predict())
