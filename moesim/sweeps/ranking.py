"""Who is fastest, and by how much for certain: intervals from sequences and seeds, and
ties where policies differ by less.

Runs that differ only in a seed are repetitions of one. The sequences of a trace are
drawn again with replacement, the same ones for all policies, and so are the
repetitions; a policy that beats another in nearly every draw beats it.

Source: Efron & Tibshirani, *An Introduction to the Bootstrap*, percentile intervals;
draws are paired because all policies replay the same sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.base import PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

DRAWS = 1000
CONFIDENCE = 0.95
LEAST_SAMPLES = 4
"""Sequences, or repetitions, below which no interval is stated: draws from fewer say
little about others.
"""

REPETITIONS = ("seed", "noise_seed")
"""Axes whose values repeat a run."""

CHOICES = ("policy", "cache", "prefetch", "routing", "host_cache")
"""Axes whose values compete; all others say where."""


def competing_axes(axes: Sequence[str]) -> list[str]:
    """Axes whose values are ranked against each other; the policy if there is none."""
    return [name for name in axes if name in CHOICES] or ["policy"]


def cell_axes(axes: Sequence[str]) -> list[str]:
    """Axes that say where policies compete."""
    return [name for name in axes if name not in (*CHOICES, *REPETITIONS)]


def measure_of(frame: pd.DataFrame) -> str:
    """What is compared: seconds per token, or of the whole trace where no run
    generates tokens.
    """
    return "tpot_s" if frame["tpot_s"].notna().all() else "makespan_s"


def ranking(frame: pd.DataFrame) -> pd.DataFrame:
    """Rank the policies of a sweep wherever they compete.

    Args:
        frame: of `moesim.sweep` or `moesim.results`, with ``details=True``.

    Returns:
        One row for each policy in each cell, the fastest first: the axes,
        ``candidate`` (the policy in words), ``seconds`` per token or of the whole trace
        with the ends ``low_s`` and ``high_s`` of its 95 % interval (NaN where there are
        too few sequences), ``behind`` (share by which it is slower than the fastest),
        ``tied`` (not certainly slower than it), ``oracle``, ``runs`` and ``samples``.
        Policies that see the future come last and are ranked against nobody.

    Raises:
        PolicyError: a frame without details.
    """
    import pandas as pd  # noqa: PLC0415 - half a second that a plain replay need not pay

    if "batch_decode_s" not in frame.columns:
        raise PolicyError(
            "ranking: expected a frame with the times of sequences, found none; ask"
            " for it with details=True"
        )
    axes: list[str] = frame.attrs.get("axes") or axes_of(frame)
    competing = competing_axes(axes)
    cells = cell_axes(axes)
    measure = measure_of(frame)

    parts = []
    groups = frame.groupby(cells, sort=False, dropna=False) if cells else [((), frame)]
    for _, cell in groups:
        candidates = [
            _Candidate(part, competing, measure)
            for _, part in cell.groupby(competing, sort=False, dropna=False)
        ]
        parts.append(_ranked(candidates, cells, competing))
    table = pd.concat([pd.DataFrame(rows) for rows in parts], ignore_index=True)
    table.attrs |= {"axes": axes, "measure": measure, "cells": cells}
    return table


def axes_of(frame: pd.DataFrame) -> list[str]:
    """Options with several values in a frame."""
    from moesim.sweeps.rows import options_schema  # noqa: PLC0415 - pyarrow

    options = [name for name in options_schema() if name in frame.columns]
    counts = frame[options].nunique(dropna=False)
    return [name for name in options if counts[name] > 1]


class _Candidate:
    """The runs of one policy in one cell. R repetitions, B batches.

    Attributes:
        row: of the first run.
        seconds: float64 [R, B], time that is compared.
        counts: float64 [R, B], what it is divided by.
    """

    def __init__(
        self, runs: pd.DataFrame, competing: Sequence[str], measure: str
    ) -> None:
        self.row: dict[Any, Any] = runs.iloc[0].to_dict()
        self.runs = len(runs)
        self.words = "+".join(
            str(self.row[name]) for name in competing if _is_given(self.row[name])
        )
        self.oracle = bool(runs["oracle"].any())
        if measure == "tpot_s":
            self.seconds = np.stack(runs["batch_decode_s"].to_list()).astype(float)
            self.counts = np.stack(runs["batch_decode_steps"].to_list()).astype(float)
        else:
            self.seconds = np.stack(runs["batch_makespan_s"].to_list()).astype(float)
            self.counts = np.full(self.seconds.shape, 1 / self.seconds.shape[1])

    @property
    def is_repeated(self) -> bool:
        """Whether its repetitions differ: seeds that change nothing repeat no run."""
        return bool((self.seconds != self.seconds[:1]).any())

    @property
    def value_s(self) -> float:
        """Seconds per token, or of the whole trace."""
        return float(self.seconds.sum() / self.counts.sum())

    def drawn(self, repetitions: np.ndarray, batches: np.ndarray) -> np.ndarray:
        """The same in each draw, float64 [D].

        Args:
            repetitions: float64 [D, R], how often each was drawn.
            batches: float64 [D, B], how often each was drawn.
        """
        seconds = ((repetitions @ self.seconds) * batches).sum(axis=1)
        counts = ((repetitions @ self.counts) * batches).sum(axis=1)
        drawn: np.ndarray = seconds / counts
        return drawn


def _is_given(value: Any) -> bool:
    return value is not None and value == value  # noqa: PLR0124 - NaN is not itself


def _ranked(
    candidates: list[_Candidate], cells: Sequence[str], competing: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of one cell, the fastest first."""
    # A stable sort keeps equals in the order in which they were given.
    candidates = sorted(candidates, key=lambda each: (each.oracle, each.value_s))
    best = candidates[0]
    # Equal copies of one run would look like a certain lead.
    repeated = any(each.is_repeated for each in candidates)
    draws = {id(each): _draws(each, repeated=repeated) for each in candidates}
    rows = []
    for each in candidates:
        drawn_s = draws[id(each)]
        row = {name: each.row[name] for name in (*cells, *competing)}
        row |= {
            "candidate": each.words,
            "seconds": each.value_s,
            "low_s": np.nan,
            "high_s": np.nan,
            "behind": each.value_s / best.value_s - 1,
            "tied": each.value_s == best.value_s,
            "oracle": each.oracle,
            "runs": each.runs,
            "samples": each.seconds.shape[1],
        }
        if drawn_s is not None:
            row["low_s"], row["high_s"] = _interval(drawn_s)
        best_s = draws[id(best)]
        if drawn_s is not None and best_s is not None and len(best_s) == len(drawn_s):
            # Slower in all but the share of draws that chance explains.
            low, _ = _interval(drawn_s / best_s)
            row["tied"] = low <= 1.0
        # An oracle is a bound, not a rival.
        row["tied"] = row["tied"] and not each.oracle
        rows.append(row)
    return rows


def _draws(candidate: _Candidate, *, repeated: bool) -> np.ndarray | None:
    """What the candidate takes in each draw; None from too few samples."""
    repetitions, batches = candidate.seconds.shape
    if max(repetitions if repeated else 1, batches) < LEAST_SAMPLES:
        return None
    # The same seed for every candidate of equal shape: the draws are paired.
    rng = np.random.default_rng([repetitions, batches])
    return candidate.drawn(
        _counts(rng, repetitions),
        _counts(rng, batches),
    )


def _counts(rng: np.random.Generator, size: int) -> np.ndarray:
    """How often each of `size` is drawn, float64 [D, size]; each once where they are
    too few to draw from.
    """
    if size < LEAST_SAMPLES:
        return np.ones((DRAWS, size))
    counts: np.ndarray = rng.multinomial(size, np.full(size, 1 / size), DRAWS)
    return counts.astype(float)


def _interval(drawn: np.ndarray) -> tuple[float, float]:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)
