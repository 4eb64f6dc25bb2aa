"""Who is fastest, and by how much for certain: intervals from sequences and seeds, and
ties where policies differ by less.

Runs that differ only in a seed are repetitions of one. Both the batches of a trace and
the repetitions are samples, of a workload and of what chance does; a time per token is
a ratio of their sums. Its interval is Student's t on the logarithm. The variance is the
jackknife's: by how much the logarithm changes when a batch, or a repetition, is left
out. Those of batches and of repetitions are added up as in an analysis of variance with
two crossed random factors. Policies replay the same batches with the same seeds, so
they are compared by the spread of their differences.

Requests of a run with arrivals wait for each other and are no independent samples, so
such a run is one sample, and only seeds repeat it.

Source: Efron & Tibshirani, *An Introduction to the Bootstrap*, ch. 11 (jackknife);
Satterthwaite (1946), degrees of freedom of sums of variances; Bonferroni's inequality
for all pairs of rivals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.policies.base import PolicyError
from moesim.runs.config import CHOICES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

CONFIDENCE = 0.95
LEAST_LEAD = 0.01
"""Share of the time by which a run must be ahead of another to be called faster, where
the profile does not state how well it predicts.
"""
LEAST_SAMPLES = 8
"""Batches, or repetitions, below which no interval is stated: the spread of fewer says
too little about others.
"""

_SAMPLES = {
    "tpot_s": ("batch_decode_s", "batch_decode_tokens"),
    "makespan_s": ("batch_makespan_s",),
}
"""Columns with the times of batches, and their tokens, by what is compared."""

REPETITIONS = ("seed",)
"""Axes whose values repeat a run."""


def competing_axes(axes: Sequence[str]) -> list[str]:
    """Axes whose values are ranked against each other; the policy if there is none."""
    return [name for name in axes if name in CHOICES] or ["policy"]


def cell_axes(axes: Sequence[str]) -> list[str]:
    """Axes that say where policies compete."""
    return [name for name in axes if name not in (*CHOICES, *REPETITIONS)]


def measure_of(frame: pd.DataFrame) -> str:
    """Return the measure that is compared: seconds per token, or of the whole trace
    where no run generates tokens.
    """
    return "tpot_s" if frame["tpot_s"].notna().all() else "makespan_s"


def ranking(frame: pd.DataFrame) -> pd.DataFrame:
    """Rank the policies of a sweep wherever they compete.

    Args:
        frame: of `moesim.sweep` or `moesim.results`; times have intervals with
            ``details=True``, else each run is one sample.

    Returns:
        One row for each policy in each cell, the fastest first: the axes,
        ``candidate`` (the policy in words), ``seconds`` per token or of the whole trace
        with the ends ``low_s`` and ``high_s`` of its 95 % interval (NaN where there are
        too few samples), ``behind`` (share by which it is slower than the fastest),
        ``tied`` (not certainly slower than it; without intervals, exactly as fast; or
        slower by less than the profile of the machine can tell, which is 1 % where it
        states nothing), ``fastest`` (the first of those that see the past only),
        ``oracle``, ``runs``, ``samples``, and the other columns of `frame`: means over
        repetitions. Policies that see the future come last and are ranked against
        nobody.

    Raises:
        PolicyError: rows of an older moesim.
    """
    import pandas as pd  # noqa: PLC0415 - half a second that a plain replay need not pay

    axes: list[str] = frame.attrs.get("axes") or axes_of(frame)
    competing = competing_axes(axes)
    cells = cell_axes(axes)
    names = [*cells, *competing]
    measure = measure_of(frame)
    frame = frame.reset_index(drop=True)
    frame = frame.assign(run=frame.index)
    if "batch_decode_tokens" not in frame:
        alone: Any = {
            "batch_decode_s": [[seconds] for seconds in frame["tpot_s"]],
            "batch_decode_tokens": [[1]] * len(frame),
            "batch_makespan_s": [[seconds] for seconds in frame["makespan_s"]],
        }
        frame = frame.assign(**alone)
    if frame["batch_decode_tokens"].isna().any():
        raise PolicyError(
            "ranking: rows of an older moesim lack the tokens of their sequences; sweep"
            " again, which adds rows of today, and rank those"
        )

    rows = []
    for cell in _grouped(frame[[*names, "oracle", *_SAMPLES[measure]]], cells):
        runs_of = _grouped(cell, competing)
        candidates = [_Candidate(runs, competing, measure) for runs in runs_of]
        rows += _ranked(candidates, cells, competing)
    table = pd.DataFrame(rows)
    ways = {
        name: "mean" if frame[name].dtype.kind == "f" else "first"
        for name in frame.columns
        if name not in table
    }
    means = frame.groupby(names, sort=False, dropna=False).agg(ways).reset_index()
    # An axis without any value has another type in each of the two.
    kinds = frame[names].dtypes
    table = table.astype(kinds).merge(means.astype(kinds), on=names, how="left")
    if "prediction_error" in table:
        lead = table["prediction_error"].astype(float).fillna(LEAST_LEAD).clip(lower=0)
        table["tied"] |= ~table["oracle"] & (table["behind"] <= lead)
    causal = table[~table["oracle"]]
    first = causal.drop_duplicates(cells) if cells else causal.head(1)
    table["fastest"] = table.index.isin(first.index)
    table.attrs |= {"axes": axes, "measure": measure, "cells": cells}
    return table


def candidate(row: Mapping[Any, Any], competing: Sequence[str]) -> str:
    """What competes in a run, in words: ``greedy+lru``."""
    return "+".join(str(row[name]) for name in competing if _is_given(row[name]))


def axes_of(frame: pd.DataFrame) -> list[str]:
    """Options with several values in a frame; also the code and the contents of files,
    which a folder of results may hold of several ages.
    """
    from moesim.runs.sweeps.rows import options_schema  # noqa: PLC0415 - pyarrow

    known = (*options_schema(), "files_digest", "code")
    names = [name for name in known if name in frame.columns]
    counts = frame[names].nunique(dropna=False)
    axes = [name for name in names if counts[name] > 1]
    # Files that options name already tell apart need no axis of their own.
    if "files_digest" in axes:
        others = [name for name in axes if name != "files_digest"]
        held = frame.groupby(others, dropna=False)["files_digest"] if others else None
        if held is not None and held.nunique().max() == 1:
            axes = others
    return axes


def _grouped(rows: pd.DataFrame, names: Sequence[str]) -> list[pd.DataFrame]:
    """Rows that agree in some columns, in the order in which they first appear."""
    if not names:
        return [rows]
    return [group for _, group in rows.groupby(list(names), sort=False, dropna=False)]


class _Candidate:
    """The runs of one policy in one cell. R repetitions, B batches.

    Attributes:
        row: of the first run.
        words: what it is called.
        oracle: whether it sees the future.
        runs: how many there are.
        samples: batches of each.
        value_s: seconds per token, or of the whole trace.
        influence: of its batches and repetitions on the logarithm of that time.
    """

    def __init__(
        self, runs: pd.DataFrame, competing: Sequence[str], measure: str
    ) -> None:
        self.row: dict[Any, Any] = runs.iloc[0].to_dict()
        self.runs = len(runs)
        self.words = candidate(self.row, competing)
        self.oracle = bool(runs["oracle"].any())
        samples = [
            np.array(runs[name].tolist(), np.float64) for name in _SAMPLES[measure]
        ]
        seconds = samples[0]
        counts = np.full(seconds.shape, 1 / seconds.shape[1])
        if measure == "tpot_s":
            counts = samples[1]
        self.samples = seconds.shape[1]
        self.value_s = float(seconds.sum() / counts.sum())
        if (seconds == seconds[:1]).all():
            # Seeds that change nothing repeat no run.
            seconds, counts = seconds[:1], counts[:1]
        self.influence = Influence.of(seconds, counts)


def _is_given(value: Any) -> bool:
    return value is not None and value == value  # noqa: PLR0124 - NaN is not itself


def _ranked(
    candidates: list[_Candidate], cells: Sequence[str], competing: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of one cell, the fastest first."""
    # A stable sort keeps equals in the order in which they were given.
    candidates = sorted(candidates, key=lambda each: (each.oracle, each.value_s))
    best = candidates[0]
    rivals = sum(not each.oracle for each in candidates)
    # Any of them may be the fastest by chance, so all pairs compete.
    pairs = max(rivals, rivals * (rivals - 1) // 2)
    rows = []
    for each in candidates:
        width = each.influence.half_width()
        row = {name: each.row[name] for name in (*cells, *competing)}
        row |= {
            "candidate": each.words,
            "seconds": each.value_s,
            "low_s": each.value_s * np.exp(-width),
            "high_s": each.value_s * np.exp(width),
            "behind": each.value_s / best.value_s - 1 if best.value_s else 0.0,
            # An oracle is a bound, not a rival.
            "tied": not each.oracle and _is_tied(each, best, pairs),
            "oracle": each.oracle,
            "runs": each.runs,
            "samples": each.samples,
        }
        rows.append(row)
    return rows


def _is_tied(candidate: _Candidate, best: _Candidate, pairs: int) -> bool:
    """Tell whether a candidate is not certainly slower than the fastest."""
    if candidate.value_s == best.value_s:
        return True
    difference = candidate.influence.less(best.influence)
    if difference is None:
        return False
    width = difference.half_width(comparisons=pairs)
    # Without an interval nothing is known but the order on this very trace.
    return bool(np.log(candidate.value_s / best.value_s) <= width)


class Influence(NamedTuple):
    """Contributions of each sample to the logarithm of a time, or of a quotient of
    times. R repetitions, B batches.

    Attributes:
        batches: float64 [B].
        repetitions: float64 [R].
        both: float64 [R, B], what a batch adds in one repetition and not in others.
    """

    batches: np.ndarray
    repetitions: np.ndarray
    both: np.ndarray

    @classmethod
    def of(cls, seconds: np.ndarray, counts: np.ndarray) -> Influence:
        """Influence of the parts of a ratio of sums, float64 [R, B] each."""
        residual_s = seconds - seconds.sum() / counts.sum() * counts
        parts = residual_s / (seconds.mean() or 1.0)
        by_batch = parts.mean(axis=0)
        by_repetition = parts.mean(axis=1)[:, None]
        return cls(
            _left_out(seconds.sum(axis=0), counts.sum(axis=0)),
            _left_out(seconds.sum(axis=1), counts.sum(axis=1)),
            parts - by_batch - by_repetition,
        )

    def less(self, other: Influence) -> Influence | None:
        """Influence on the quotient of two times; None where their samples are not the
        same ones.
        """
        repetitions = {len(self.repetitions), len(other.repetitions)} - {1}
        if len(self.batches) != len(other.batches) or len(repetitions) > 1:
            return None
        return Influence(
            *(ours - theirs for ours, theirs in zip(self, other, strict=True))
        )

    def half_width(self, *, comparisons: int = 1) -> float:
        """By how much the logarithm may be off at a confidence of 95 %; NaN where there
        are too few samples of either kind.

        Args:
            comparisons: intervals that are to hold together.
        """
        # A third of a second that a plain replay need not pay.
        from scipy.special import stdtrit  # noqa: PLC0415

        counts = len(self.batches), len(self.repetitions)
        if max(counts) < LEAST_SAMPLES:
            return np.nan
        # Variance and degrees of freedom by what it is due to; few samples of one kind
        # add much, not nothing. Of a single one nothing is known: it is the workload.
        parts: list[tuple[float, float]] = []
        for samples in (self.batches, self.repetitions):
            if (count := len(samples)) > 1:
                variance = float((samples**2).sum()) / (count * (count - 1))
                parts.append((variance, count - 1))
        largest = max(variance for variance, _ in parts)
        if len(parts) == 2:
            # What varies by both is in either part, so once too often.
            freedom = parts[0][1] * parts[1][1]
            variance = float((self.both**2).sum()) / (freedom * self.both.size)
            parts.append((-variance, freedom))

        # A difference of estimates may come out too small.
        total = max(largest, sum(variance for variance, _ in parts))
        divisor = sum(variance**2 / freedom for variance, freedom in parts)
        least = min(freedom for _, freedom in parts)
        freedom = max(least, total**2 / divisor) if divisor else least
        tail = (1 - CONFIDENCE) / 2 / comparisons
        return float(stdtrit(freedom, 1 - tail) * np.sqrt(total))


def _left_out(seconds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """By how much each sample raises the logarithm of a ratio of sums: the jackknife's
    pseudo-values, centred, float64 [N].
    """
    if len(seconds) == 1:
        return np.zeros(1)
    # Where one sample holds everything nothing is known without it: NaN.
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.log((seconds.sum() - seconds) / (counts.sum() - counts))
    influence: np.ndarray = (len(seconds) - 1) * (without.mean() - without)
    return influence
