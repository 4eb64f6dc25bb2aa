"""The result of a validation as Markdown, and as text for a terminal.

Everything is made from the JSON object, so a report can be made again from a stored
result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.reporting.tables import aligned, facts_lines
from moesim.reporting.units import NO_VALUE

if TYPE_CHECKING:
    from collections.abc import Sequence

TITLE = "Simulated against measured"
CELL_HEADS = (
    "trace",
    "shape",
    "policy",
    "cache",
    "host",
    "batch",
    "TPOT measured",
    "predicted",
    "error",
    "noise",
    "p95 error",
    "TTFT error",
    "hits",
    "equivalent",
)
SHARED_HEADS = (
    "coordinate",
    "cells",
    "median",
    "worst",
    "signed median",
    "TTFT, median",
)
_LEGEND = (
    "Errors are predicted over measured, minus one. measured: median over repetitions,"
    " step by step. *noise*: by how much that median would differ if it were measured"
    " anew. *equivalent*: paired steps, two one-sided tests, margin 5 %. *hits*: equal,"
    " or why they need not be."
)
_SHARED_TITLE = "TPOT errors of the cells that share a coordinate:"
_TERMS_TITLE = (
    "Which term differs, predicted minus measured, share of the measured makespan,"
    " median of absolute values:"
)


def markdown(result: dict[str, Any]) -> str:
    """Lay out a result as a Markdown page: summary, every cell, terms."""
    lines = [
        f"# {TITLE}",
        "",
        setting(result),
        "",
        *_markdown_table(("", "value"), facts(result)),
        "",
        *_markdown_table(CELL_HEADS, cell_rows(result)),
        "",
        _LEGEND,
        "",
        _SHARED_TITLE,
        "",
        *_markdown_table(SHARED_HEADS, shared_rows(result)),
        "",
        _TERMS_TITLE,
        "",
        *_markdown_table(tuple(result["terms"]), [_term_row(result)]),
    ]
    if result["warnings"]:
        lines += ["", *(f"- {warning}" for warning in result["warnings"])]
    return "\n".join(lines) + "\n"


def validation_text(result: dict[str, Any]) -> str:
    """Lay out a result for a terminal, with the figures of `markdown`."""
    rows = cell_rows(result)
    # Six columns name a cell, more than a screen can repeat beside the others. A number
    # leads every block of columns instead.
    numbered = [[str(n), *row] for n, row in enumerate(rows, start=1)]
    lines = [
        TITLE,
        "",
        setting(result),
        "",
        *facts_lines((name, value) for name, value in facts(result)),
        "",
        *aligned([["cell", *CELL_HEADS], *numbered]),
        "",
        _LEGEND.replace("*", ""),
        "",
        _SHARED_TITLE,
        "",
        *aligned([SHARED_HEADS, *shared_rows(result)]),
        "",
        _TERMS_TITLE,
        "",
        *aligned([tuple(result["terms"]), _term_row(result)]),
    ]
    return "\n".join(lines)


def setting(result: dict[str, Any]) -> str:
    """When and where it was measured, and how much."""
    config = result["config"]
    return (
        f"{config['date']}, {config['machine']}, profile `{config['hw']}` of"
        f" {config['hw_date']}; {len(result['cells'])} cells of {config['steps']}"
        f" steps, each run {config['repetitions']} times in {config['seconds']} s;"
        f" load average {config['load_before']} before, {config['load_after']}"
        " after."
    )


def facts(result: dict[str, Any]) -> list[list[str]]:
    """The summary: names and values, one figure per row."""
    over_noise = result["error_over_noise"]
    return [
        ["TPOT error, median of cells", _percent(result["tpot_error_median"])],
        ["TPOT error, worst cell", _percent(result["tpot_error_max"])],
        [
            "TPOT error, signed median",
            _signed_percent(result["tpot_error_signed_median"]),
        ],
        ["TTFT error, median", _percent(result["ttft_error_median"])],
        *_drift_facts(result),
        ["order of policies, Kendall's tau", _plain(result["kendall_tau"])],
        [
            "tau of two measurements with each other",
            _plain(result["kendall_tau_repeated"]),
        ],
        [
            "hits equal where timing decides nothing",
            f"{_yes(result['hits_equal'])} ({result['hits_compared']} cells)",
        ],
        [
            "noise floor: measured again, TPOT would differ by",
            _percent(result["noise_floor"]),
        ],
        ["single repetitions differ by", _percent(result["repetitions_differ"])],
        [
            "cells whose error is below their own noise",
            _percent(result["below_noise_share"]),
        ],
        [
            "median error over noise floor",
            NO_VALUE if over_noise is None else f"{over_noise:.1f}",
        ],
        ["cells equivalent within 5 %", _percent(result["tost_pass_share"])],
        ["term that differs most", str(result["largest_term"])],
        *_part_facts(result),
        *_same_work_facts(result),
    ]


def _part_facts(result: dict[str, Any]) -> list[list[str]]:
    """Errors of the parts of the grid that mean something; empty parts are left out."""
    parts = {
        "sizes that were calibrated": result["calibrated"],
        "sizes held out": result["held_out"],
        "with the SSD tier": result["ssd"],
    }
    rows = []
    for name, part in parts.items():
        if not part["count"]:
            continue
        median = _percent(part["tpot_error_median"])
        worst = _percent(part["tpot_error_max"])
        rows.append(
            [
                f"TPOT error, {name} ({part['count']} cells)",
                f"median {median}, worst {worst}",
            ]
        )
    return rows


def _same_work_facts(result: dict[str, Any]) -> list[list[str]]:
    """By how much cells differ that do the same work: no prediction can be nearer."""
    pairs = result["same_work"]
    if not pairs["count"]:
        return []
    median = _percent(pairs["tpot_differs_median"])
    worst = _percent(pairs["tpot_differs_max"])
    return [
        [
            (
                "cells that do the same work differ from each other"
                f" ({pairs['count']} pairs)"
            ),
            f"median {median}, worst {worst}",
        ]
    ]


def _drift_facts(result: dict[str, Any]) -> list[list[str]]:
    """The machine's drift since the calibration, and the errors without it; nothing
    where it is unknown.
    """
    part = result["at_speed"]
    if part["tpot_error_median"] is None:
        return []
    # Cells with the same reference runs have the same drift, which is told once.
    drifts = dict.fromkeys(
        ", ".join(
            f"{name} {_signed_percent(value)}" for name, value in cell["drift"].items()
        )
        for cell in result["cells"]
        if cell.get("drift") is not None
    )
    return [
        [
            "reference runs took longer than when it was calibrated by",
            "; ".join(drifts),
        ],
        ["TPOT error without that drift, median", _percent(part["tpot_error_median"])],
        ["TPOT error without that drift, worst cell", _percent(part["tpot_error_max"])],
        ["TTFT error without that drift, median", _percent(part["ttft_error_median"])],
    ]


def shared_rows(result: dict[str, Any]) -> list[list[str]]:
    """A row for each value of each coordinate that has several."""
    return [
        [
            f"{key.replace('_', ' ')} {value.removesuffix('.parquet')}",
            str(part["count"]),
            _percent(part["tpot_error_median"]),
            _percent(part["tpot_error_max"]),
            _signed_percent(part["tpot_error_signed_median"]),
            _percent(part["ttft_error_median"]),
        ]
        for key, parts in result["by"].items()
        # A coordinate with one value tells nothing beyond the summary.
        if len(parts) > 1
        for value, part in parts.items()
    ]


def cell_rows(result: dict[str, Any]) -> list[list[str]]:
    """A row for each cell of the grid, as `CELL_HEADS` names its columns."""
    return [_cell_row(cell) for cell in result["cells"]]


def _cell_row(cell: dict[str, Any]) -> list[str]:
    tost = cell["tost"]
    hits = "equal"
    if not cell["hits_equal"]:
        # Where timing decides what is resident, hits may differ.
        hits = "DIFFERENT" if cell["timing_free"] else "timing"
    return [
        cell["trace"].removesuffix(".parquet"),
        cell["shape"],
        cell["policy"],
        f"{cell['cache_ratio']:g}",
        f"{cell['host_ratio']:g}",
        str(cell["batch"]),
        _ms(cell["tpot_measured_s"]),
        _ms(cell["predicted"]["tpot_s"]),
        _signed_percent(cell["tpot_error"]),
        _percent(cell["noise_floor"]),
        _signed_percent(cell["tpot_p95_error"]),
        _signed_percent(cell["ttft_error"]),
        hits,
        NO_VALUE if tost is None else _yes(tost["equivalent"]),
    ]


def _term_row(result: dict[str, Any]) -> list[str]:
    return [_percent(value) for value in result["terms"].values()]


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(heads)
    return [f"| {' | '.join(row)} |" for row in (heads, rule, *rows)]


# Reports compare cells with each other, so all of them show one decimal, unlike
# `moesim.reporting.units`, which shows three significant digits.


def _percent(share: float | None) -> str:
    return NO_VALUE if share is None else f"{100 * share:.1f} %"


def _signed_percent(share: float | None) -> str:
    return NO_VALUE if share is None else f"{100 * share:+.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _plain(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.2f}"


def _yes(value: bool | None) -> str:
    if value is None:
        return NO_VALUE
    return "yes" if value else "no"
