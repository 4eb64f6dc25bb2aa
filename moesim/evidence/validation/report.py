"""The report of a validation: its files, and the HTML page among them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.files import write_text
from moesim.base.units import NO_VALUE
from moesim.reporting.figures import new_figure
from moesim.reporting.pages import (
    PageTable,
    page_figure,
    page_origin,
    render,
    trace_words,
)
from moesim.reporting.tables import aligned, facts_lines, markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def page(result: dict[str, Any], command: str | None = None) -> str:
    """The whole report as HTML; nothing is loaded from elsewhere."""
    # Files of earlier versions name none.
    digests = result["config"].get("traces", {})
    traces = [trace_words(name, digest) for name, digest in digests.items()]
    return render(
        "validation.html",
        title=TITLE,
        origin=page_origin(command, traces="; ".join(traces)),
        setting=setting(result),
        facts=PageTable(["figure", "value"], facts(result)),
        figures=[
            page_figure(draw(result), caption) for caption, draw in FIGURES.items()
        ],
        cells=PageTable(CELL_HEADS, cell_rows(result)),
        shared=PageTable(SHARED_HEADS, shared_rows(result)),
        warnings=result["warnings"],
    )


def load(path: str | Path) -> dict[str, Any]:
    """Read what `save` wrote as ``validation.json``.

    Raises:
        ProfileError: it is no such file.
    """
    # pydantic takes a tenth of a second, and few commands read such a file.
    from moesim.evidence.validation.saved import read_result  # noqa: PLC0415 - as said above

    return read_result(Path(path))


def save(
    result: dict[str, Any], folder: str | Path, command: str | None = None
) -> list[Path]:
    """Write ``validation.json``, ``validation.md`` and ``validation.html``; return
    their paths.
    """
    from moesim.evidence.validation.saved import sealed  # noqa: PLC0415 - as said above

    # Figures of other kinds can be drawn later, from the JSON file.
    texts = {
        "json": json.dumps(sealed(result), indent=1),
        "md": markdown(result),
        "html": page(result, command),
    }
    paths = []
    for suffix, text in texts.items():
        path = Path(folder) / f"validation.{suffix}"
        write_text(path, text)
        paths.append(path)
    return paths


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
    lines = [f"# {TITLE}", "", setting(result), ""]
    lines += markdown_table(("", "value"), facts(result))
    for heads, rows, words in _tables(result):
        lines += ["", *markdown_table(heads, rows)]
        lines += ["", words] if words else []
    if result["warnings"]:
        lines += ["", *(f"- {warning}" for warning in result["warnings"])]
    return "\n".join(lines) + "\n"


def validation_text(result: dict[str, Any]) -> str:
    """Lay out a result for a terminal, with the figures of `markdown`."""
    lines = [TITLE, "", setting(result), ""]
    lines += facts_lines((name, value) for name, value in facts(result))
    for heads, rows, words in _tables(result):
        table = [list(heads), *rows]
        if heads is CELL_HEADS:
            # Six columns name a cell, more than a screen can repeat beside the others.
            # A number leads every block of columns instead.
            numbers = ["cell", *(str(n) for n in range(1, len(table)))]
            table = [[n, *row] for n, row in zip(numbers, table, strict=True)]
        lines += ["", *aligned(table)]
        lines += ["", words.replace("*", "")] if words else []
    return "\n".join(lines)


def _tables(
    result: dict[str, Any],
) -> list[tuple[tuple[str, ...], list[list[str]], str]]:
    """Heads and rows of the tables behind the summary, and words below each."""
    return [
        (CELL_HEADS, cell_rows(result), f"{_LEGEND}\n\n{_SHARED_TITLE}"),
        (SHARED_HEADS, shared_rows(result), _TERMS_TITLE),
        (tuple(result["terms"]), [_term_row(result)], ""),
    ]


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
    verdict = result.get("verdict")
    return [
        *([["verdict", verdict]] if verdict else []),
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


# Reports compare cells with each other, so all of them show one decimal, unlike
# `moesim.base.units`, which shows three significant digits.


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


BAND = 0.05
"""Half width of the band around equality; the margin of the equivalence test."""


def parity(result: dict[str, Any]) -> Figure:
    """Predicted against measured TPOT, one point per cell, by policy."""
    figure = new_figure(5.6, 5.0)
    axes = _axes(figure)
    for policy in _policies(result):
        cells = [cell for cell in result["cells"] if cell["policy"] == policy]
        axes.plot(
            [1e3 * cell["tpot_measured_s"] for cell in cells],
            [1e3 * cell["predicted"]["tpot_s"] for cell in cells],
            "o",
            ms=4,
            alpha=0.8,
            label=policy,
        )
    low, high = axes.get_xlim()
    # The axes become logarithmic, where nothing may be at zero.
    line = np.array([max(low, 1e-3), high])
    axes.plot(line, line, "k-", lw=0.8)
    axes.fill_between(
        line, (1 - BAND) * line, (1 + BAND) * line, color="k", alpha=0.08, lw=0
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured TPOT [ms]",
        ylabel="predicted TPOT [ms]",
    )
    axes.legend(frameon=False, fontsize=7)
    return figure


def cell_errors(result: dict[str, Any]) -> Figure:
    """Error of each cell, sorted, with its noise floor beside it."""
    figure = new_figure(7.2, 3.2)
    axes = _axes(figure)
    # A cell without decode steps has no error; it stands at zero.
    cells = sorted(result["cells"], key=lambda cell: cell["tpot_error"] or 0.0)
    positions = np.arange(len(cells))
    axes.bar(
        positions,
        [100 * (cell["tpot_error"] or 0.0) for cell in cells],
        width=0.9,
        color="tab:blue",
        label="error",
    )
    floors = np.array([100 * cell["noise_floor"] for cell in cells])
    axes.fill_between(
        positions,
        -floors,
        floors,
        step="mid",
        color="tab:orange",
        alpha=0.45,
        lw=0,
        label="noise of the measurement",
    )
    axes.set(xlabel="cells, sorted", ylabel="TPOT error [%]")
    axes.legend(frameon=False, fontsize=8)
    return figure


def token_errors(result: dict[str, Any]) -> Figure:
    """Distribution of the errors of single tokens, by policy."""
    figure = new_figure(7.2, 3.2)
    axes = _axes(figure)
    policies = _policies(result)
    samples = []
    for policy in policies:
        of_policy = [
            cell["step_errors"] for cell in result["cells"] if cell["policy"] == policy
        ]
        samples.append(100 * np.concatenate(of_policy))
    # With thousands of tokens, outliers would hide the boxes.
    axes.boxplot(samples, whis=(5, 95), showfliers=False)
    # Boxes are counted from one.
    positions = range(1, len(policies) + 1)
    axes.set_xticks(positions, policies, fontsize=7, rotation=15)
    axes.axhline(0.0, color="k", lw=0.8)
    axes.set_ylabel("error of one token [%]")
    return figure


def term_errors(result: dict[str, Any]) -> Figure:
    """Which term of the model differs, by policy: predicted minus measured, share of
    the makespan.
    """
    figure = new_figure(7.2, 3.2)
    axes = _axes(figure)
    policies = _policies(result)
    terms = result["terms"]
    # The bars of one policy fill four fifths of its place.
    width = 0.8 / len(terms)
    left_edges = np.arange(len(policies))
    for rank, term in enumerate(terms):
        medians = []
        for policy in policies:
            differences = [
                cell["terms"][term]
                for cell in result["cells"]
                if cell["policy"] == policy
            ]
            medians.append(100 * float(np.median(differences)))
        axes.bar(left_edges + rank * width, medians, width, label=term)
    axes.set_xticks(left_edges + 0.4, policies, fontsize=7, rotation=15)
    axes.axhline(0.0, color="k", lw=0.8)
    axes.set_ylabel("predicted - measured [% of run]")
    axes.legend(frameon=False, fontsize=7, ncols=5)
    return figure


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "Predicted against measured time per token; the band is 5 %": parity,
    "Error of each cell, and by how much it would differ if measured anew": cell_errors,
    "Error of single tokens; boxes are quartiles, whiskers 5 % and 95 %": token_errors,
    "Which term differs: predicted minus measured, median over cells": term_errors,
}
"""Captions of the figures of the page, and the functions that draw them."""


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _policies(result: dict[str, Any]) -> list[str]:
    """Policies in the order of the grid."""
    return list(dict.fromkeys(cell["policy"] for cell in result["cells"]))


def _axes(figure: Figure) -> Axes:
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return axes
