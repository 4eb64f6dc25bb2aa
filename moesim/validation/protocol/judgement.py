"""Judges finished sittings of a protocol: which cells count, and whether aims are met.

Works on what `moesim validate` writes as JSON, so that a result can be judged again.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.validation.protocol.plan import Plan

_DRAWS: Final = 2000
_SETTING: Final = ("trace", "shape", "cache_ratio", "host_ratio", "batch")


class CellVerdict(NamedTuple):
    """What one cell of one sitting shows. Times are those of an output token.

    Attributes:
        sitting: its number, from 1.
        cell: shape, policy, cache and batch, in words.
        measured_s, low_s, high_s: median over repetitions, and its 95 % interval.
        predicted_s: before it was measured.
        error: predicted over measured, minus one.
        beyond: by how much the prediction lies outside the interval, relative to the
            measured time; 0 inside.
        lost: share of time that other programs took, median over repetitions.
        excluded: why it does not count; empty where it does.
    """

    sitting: int
    cell: str
    measured_s: float
    low_s: float
    high_s: float
    predicted_s: float
    error: float
    beyond: float
    lost: float
    excluded: str


class Order(NamedTuple):
    """Pairs of policies that two measurements order alike, and how many of them the
    prediction orders so, too.
    """

    pairs: int
    agreed: int

    @property
    def tau(self) -> float | None:
        """Kendall's; None without a pair."""
        if not self.pairs:
            return None
        return (2 * self.agreed - self.pairs) / self.pairs


class Verdict(NamedTuple):
    """The result of a protocol.

    Attributes:
        cells: of all sittings.
        order: of policies.
        refused: sittings whose calibration was refused, with the reason.
        median, worst: of `CellVerdict.beyond` over cells that count; None without one.
        met: by aim, whether it is met; None where nothing counts.
    """

    cells: list[CellVerdict]
    order: Order
    refused: dict[int, str]
    median: float | None
    worst: float | None
    met: dict[str, bool | None]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **self._asdict(),
            "cells": [cell._asdict() for cell in self.cells],
            "order": {**self.order._asdict(), "tau": self.order.tau},
        }


def judge(plan: Plan, sittings: Sequence[dict[str, Any]]) -> Verdict:
    """Judge what was measured.

    Args:
        plan: what was stated before.
        sittings: as `moesim.validation.protocol.sittings` writes them.
    """
    cells = []
    refused = {}
    orders = []
    for number, sitting in enumerate(sittings, start=1):
        if sitting.get("refused"):
            refused[number] = sitting["refused"]
            continue
        measured = sitting["validation"]["cells"]
        cells += [_cell(plan, number, cell) for cell in measured]
        orders.append(_order(measured))

    counted = [cell.beyond for cell in cells if not cell.excluded]
    median = float(np.median(counted)) if counted else None
    worst = max(counted, default=None)
    order = Order(sum(o.pairs for o in orders), sum(o.agreed for o in orders))
    met = {
        "median": None if median is None else median <= plan.median,
        "worst": None if worst is None else worst <= plan.worst,
        "order": None if order.tau is None else order.tau == 1.0,
        "sittings": len(sittings) - len(refused) >= plan.sittings,
    }
    return Verdict(cells, order, refused, median, worst, met)


def _cell(plan: Plan, sitting: int, cell: dict[str, Any]) -> CellVerdict:
    measured_s, low_s, high_s = interval([run["tpot_s"] for run in cell["measured"]])
    predicted_s = cell["predicted"]["tpot_s"]
    outside_s = max(low_s - predicted_s, predicted_s - high_s, 0.0)
    lost = float(np.median([run.get("lost", 0.0) for run in cell["measured"]]))
    half_width = 0.5 * (high_s - low_s) / measured_s
    excluded = ""
    if lost > plan.most_lost:
        excluded = f"other programs took {100 * lost:.0f} %"
    elif half_width > plan.widest:
        excluded = f"repetitions differ: ±{100 * half_width:.0f} %"
    return CellVerdict(
        sitting=sitting,
        cell=(
            f"{cell['shape']}, {cell['policy']}, cache {cell['cache_ratio']:g}, batch"
            f" {cell['batch']}"
        ),
        measured_s=measured_s,
        low_s=low_s,
        high_s=high_s,
        predicted_s=predicted_s,
        error=predicted_s / measured_s - 1.0,
        beyond=outside_s / measured_s,
        lost=lost,
        excluded=excluded,
    )


def interval(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median of repetitions with its 95 % interval, by resampling; what few of them
    hide is made up for by ``sqrt(n / (n - 1))``.
    """
    values = np.asarray(seconds, np.float64)
    median = float(np.median(values))
    count = len(values)
    if count < 2:
        return median, median, median
    # Seeded, so that the same measurements always give the same interval.
    rng = np.random.default_rng(0)
    draws = np.median(rng.choice(values, (_DRAWS, count)), axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    widening = float(np.sqrt(count / (count - 1)))
    return (
        median,
        median - widening * (median - float(low)),
        median + widening * (float(high) - median),
    )


def _order(cells: Iterable[dict[str, Any]]) -> Order:
    """Count pairs of policies with everything else equal that both halves of the
    repetitions order alike and whose intervals do not touch.
    """
    by_setting: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        setting = tuple(cell[key] for key in _SETTING)
        by_setting.setdefault(setting, []).append(cell)
    pairs = agreed = 0
    for group in by_setting.values():
        for first, second in combinations(group, 2):
            sign = _measured_order(_tpots(first), _tpots(second))
            if not sign:
                continue
            predicted_s = first["predicted"]["tpot_s"] - second["predicted"]["tpot_s"]
            pairs += 1
            agreed += int(np.sign(predicted_s) == sign)
    return Order(pairs, agreed)


def _measured_order(first_s: Sequence[float], second_s: Sequence[float]) -> int:
    """-1 where the first is faster, 1 where the second is, 0 where two measurements do
    not agree on it.
    """
    signs = {
        int(np.sign(np.median(first_s[half::2]) - np.median(second_s[half::2])))
        for half in (0, 1)
        if len(first_s) > half
    }
    _, first_low, first_high = interval(first_s)
    _, second_low, second_high = interval(second_s)
    apart = first_high < second_low or second_high < first_low
    return signs.pop() if apart and len(signs) == 1 else 0


def _tpots(cell: dict[str, Any]) -> list[float]:
    return [run["tpot_s"] for run in cell["measured"]]
