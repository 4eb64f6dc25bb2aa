"""The result of a protocol as a Markdown page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.validation.protocol.judgement import CellVerdict, Verdict
    from moesim.validation.protocol.plan import Plan

_INTRODUCTION = (
    "What [the protocol](protocol.md) states was measured by this command, which also"
    " wrote this page:"
)
_SITTING_HEADS = (
    "sitting",
    "began",
    "seconds",
    "calibration",
    "identical runs differed by",
    "drift",
    "load before",
    "verdict",
)
_CELL_HEADS = (
    "sitting",
    "cell",
    "measured",
    "95 %",
    "predicted",
    "error",
    "beyond the interval",
    "lost",
    "counts",
)
_LEGEND = (
    "Times are those of an output token. *beyond the interval*: what of the error the"
    " measurement's own interval does not cover. *lost*: share of the time that other"
    " programs took."
)
_MET = {True: "**met**", False: "**not met**", None: "nothing counts"}


def protocol_page(
    plan: Plan, sittings: Sequence[dict[str, Any]], verdict: Verdict, command: str
) -> str:
    """Lay out a result: aims, sittings, every cell.

    Args:
        plan: what was stated before.
        sittings: what was measured.
        verdict: on it.
        command: that measured it.
    """
    sitting_rows = [
        _sitting_row(number, sitting) for number, sitting in enumerate(sittings, 1)
    ]
    lines = [
        "# Protocol: result",
        "",
        _INTRODUCTION,
        "",
        f"    {command}",
        "",
        *_table(("aim", "stated", "result", ""), aim_rows(plan, verdict)),
        "",
        *_table(_SITTING_HEADS, sitting_rows),
        "",
        *_table(_CELL_HEADS, [_cell_row(cell) for cell in verdict.cells]),
        "",
        _LEGEND,
    ]
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = (heads, ["---"] * len(heads), *rows)
    return [f"| {' | '.join(row)} |" for row in body]


def aim_rows(plan: Plan, verdict: Verdict) -> list[list[str]]:
    """Aim, what was stated, what came out, and whether it is met."""
    counted = [cell for cell in verdict.cells if not cell.excluded]
    errors = sorted(abs(cell.error) for cell in counted)
    raw = ""
    if errors:
        middle = errors[len(errors) // 2]
        raw = f" (whole error: {_percent(middle)}, {_percent(errors[-1])})"
    tau = verdict.order.tau
    return [
        [
            "error, median of cells",
            f"≤ {_percent(plan.median)}",
            _percent(verdict.median),
            _MET[verdict.met["median"]],
        ],
        [
            "error, worst cell",
            f"≤ {_percent(plan.worst)}",
            _percent(verdict.worst) + raw,
            _MET[verdict.met["worst"]],
        ],
        [
            "order of policies, tau",
            "1",
            "none" if tau is None else f"{tau:.2f} ({verdict.order.pairs} pairs)",
            _MET[verdict.met["order"]],
        ],
        [
            "calibrations that were trusted",
            str(plan.sittings),
            str(len({cell.sitting for cell in verdict.cells})),
            _MET[verdict.met["sittings"]],
        ],
        [
            "cells that count",
            "",
            f"{len(counted)} of {len(verdict.cells)}",
            "",
        ],
    ]


def _sitting_row(number: int, sitting: dict[str, Any]) -> list[str]:
    fit = sitting.get("fit", {})
    refused = sitting["refused"]
    return [
        str(number),
        sitting["began"],
        str(sitting["seconds"]),
        f"{sitting['calibration_s']} s" if "calibration_s" in sitting else "",
        _percent(fit.get("noise_floor", {}).get("residual_median")),
        _percent(fit.get("drift", {}).get("residual_median")),
        f"{sitting['load']:.1f}",
        f"refused: {refused}" if refused else "trusted",
    ]


def _cell_row(cell: CellVerdict) -> list[str]:
    return [
        str(cell.sitting),
        cell.cell,
        f"{1e3 * cell.measured_s:.1f} ms",
        f"{1e3 * cell.low_s:.1f} to {1e3 * cell.high_s:.1f}",
        f"{1e3 * cell.predicted_s:.1f} ms",
        f"{100 * cell.error:+.1f} %",
        _percent(cell.beyond),
        _percent(cell.lost),
        cell.excluded or "yes",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
