"""The report of a validation: its files, and the HTML page among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.files import write_text
from moesim.base.units import NO_VALUE
from moesim.reporting.charts import (
    GPU,
    QUIET,
    Chart,
    Styles,
    channel,
    layer,
    records,
    rule,
    shown,
)
from moesim.reporting.pages import Facts, Page, PageTable, page_origin, trace_words
from moesim.reporting.tables import aligned, facts_lines, markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable


def page(result: dict[str, Any], command: str | None = None) -> str:
    """The whole report as HTML; nothing is loaded from elsewhere."""
    # Files of earlier versions name none.
    digests = result["config"].get("traces", {})
    traces = [trace_words(name, digest) for name, digest in digests.items()]
    config = result["config"]
    report = Page(
        f"{config['machine']}: simulated against measured",
        page_origin(command, traces="; ".join(traces)),
        setting=[setting(result)],
        answer=_answer(result),
    )
    names, values = zip(*facts(result), strict=True)
    report.add("", Facts("", names, {"": values}))
    report.add("Where is it off?", *(draw(result) for draw in FIGURES))
    cells = PageTable(CELL_HEADS, cell_rows(result), "Every cell")
    report.add("Every cell", cells, note=_LEGEND.replace("*", ""))
    shared = PageTable(SHARED_HEADS, shared_rows(result), _SHARED_TITLE)
    if shared.rows:
        report.add("Cells that share a coordinate", shared, note="TPOT errors.")
    return report.add_warnings(result["warnings"]).html()


def _answer(result: dict[str, Any]) -> str:
    median = _percent(result["tpot_error_median"])
    worst = _percent(result["tpot_error_max"])
    noise = _percent(result["noise_floor"])
    return (
        f"time per token off by {median} in the median, {worst} at worst; measured"
        f" again it would differ by {noise}"
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


def parity(result: dict[str, Any]) -> Chart:
    """Predicted against measured TPOT, one point per cell, by policy."""
    rows = [
        {
            "policy": cell["policy"],
            "measured": 1e3 * cell["tpot_measured_s"],
            "predicted": 1e3 * cell["predicted"]["tpot_s"],
            "shape": cell["shape"],
            "cache": cell["cache_ratio"],
            "batch": cell["batch"],
        }
        for cell in result["cells"]
    ]
    # Without a decode step there is no time, and no place on such an axis.
    rows = [row for row in rows if row["measured"] > 0 and row["predicted"] > 0]
    times = [row[name] for row in rows for name in ("measured", "predicted")] or [1.0]
    line = [{"at": min(times)}, {"at": max(times)}]
    band = [
        each | {"low": 0.95 * each["at"], "high": 1.05 * each["at"]} for each in line
    ]
    at = channel("at", None, scale={"type": "log"})
    low = {"field": "low", "type": "quantitative"}
    area = {"type": "area", "color": QUIET, "opacity": 0.3}
    styles = Styles(_policies(result))
    points = layer(
        "point",
        x=channel("measured", "measured TPOT, ms", scale={"type": "log"}),
        y=channel("predicted", "predicted TPOT, ms", scale={"type": "log"}),
        color=styles.colour(),
        shape=styles.mark(),
        tooltip=shown(
            ("policy", "policy"),
            ("shape", "shape"),
            ("cache", "cache"),
            ("batch", "batch"),
            ("measured", "measured, ms", ".4g"),
            ("predicted", "predicted, ms", ".4g"),
        ),
    )
    shade = layer(area, data="band", x=at, y=low, y2={"field": "high"})
    label = "Predicted against measured time per token; the band is 5 %"
    data = {"cells": records(rows), "band": records(band)}
    return _chart([shade, points], data, label, height=360)


def cell_errors(result: dict[str, Any]) -> Chart:
    """Error of each cell, sorted, with its noise floor beside it."""
    # A cell without decode steps has no error; it stands at zero.
    cells = sorted(result["cells"], key=lambda cell: cell["tpot_error"] or 0.0)
    rows = [
        {
            "cell": place,
            "error": cell["tpot_error"] or 0.0,
            "low": -cell["noise_floor"],
            "high": cell["noise_floor"],
            "policy": cell["policy"],
        }
        for place, cell in enumerate(cells)
    ]
    x = channel("cell", "cells, sorted", "O", axis={"labels": False, "ticks": False})
    y = channel("error", "TPOT error", axis={"format": "+.0%"})
    hover = shown(
        ("policy", "policy"), ("error", "error", "+.1%"), ("high", "noise", ".1%")
    )
    low = {"field": "low", "type": "quantitative"}
    noise = {"type": "bar", "color": "#E69F00", "opacity": 0.5}
    bars = layer({"type": "bar", "color": GPU}, x=x, y=y, tooltip=hover)
    floors = layer(noise, x=x, y=low, y2={"field": "high"}, tooltip=hover)
    label = "Error of each cell; orange: by how much it would differ if measured anew"
    return _chart([bars, floors], {"cells": records(rows)}, label)


def token_errors(result: dict[str, Any]) -> Chart:
    """Distribution of the errors of single tokens, by policy."""
    rows = []
    for policy in _policies(result):
        of_policy = [
            cell["step_errors"] for cell in result["cells"] if cell["policy"] == policy
        ]
        errors = np.concatenate(of_policy) if of_policy else np.zeros(0)
        if len(errors):
            # With thousands of tokens, outliers would hide the boxes.
            shares = np.percentile(errors, (5, 25, 50, 75, 95)).tolist()
            names = ("p5", "p25", "p50", "p75", "p95")
            rows.append({"policy": policy, **dict(zip(names, shares, strict=True))})
    x = channel("policy", None, "N", sort=None, axis={"labelAngle": -15})
    title = {"title": "error of one token", "axis": {"format": "+.0%"}}
    hover = shown(
        *((name, name, "+.1%") for name in ("p5", "p25", "p50", "p75", "p95"))
    )

    def between(mark: dict[str, Any], low: str, high: str) -> dict[str, Any]:
        y = {"field": low, "type": "quantitative", **title}
        return layer(mark, x=x, y=y, y2={"field": high}, tooltip=hover)

    middle = channel("p50", "error of one token", axis={"format": "+.0%"})
    layers = [
        between({"type": "rule"}, "p5", "p95"),
        between({"type": "bar", "size": 24}, "p25", "p75"),
        layer({"type": "tick", "color": "white", "size": 24}, x=x, y=middle),
        rule(0.0),
    ]
    label = "Error of single tokens; boxes are quartiles, lines 5 % to 95 %"
    return _chart(layers, {"cells": records(rows)}, label)


def term_errors(result: dict[str, Any]) -> Chart:
    """Which term of the model differs, by policy: predicted minus measured, share of
    the makespan.
    """
    rows = []
    for policy in _policies(result):
        cells = [cell for cell in result["cells"] if cell["policy"] == policy]
        for term in result["terms"]:
            share = float(np.median([cell["terms"][term] for cell in cells]))
            rows.append({"policy": policy, "term": term, "share": share})
    bars = layer(
        "bar",
        x=channel("policy", None, "N", sort=None, axis={"labelAngle": -15}),
        xOffset=channel("term", None, "N", sort=None),
        y=channel("share", "predicted - measured, of the run", axis={"format": "+.0%"}),
        color=channel("term", None, "N", sort=None),
        tooltip=shown(
            ("policy", "policy"), ("term", "term"), ("share", "off by", "+.1%")
        ),
    )
    label = "Which term differs: predicted minus measured, median over cells"
    return _chart([bars, rule(0.0)], {"cells": records(rows)}, label)


FIGURES: tuple[Callable[[dict[str, Any]], Chart], ...] = (
    parity,
    cell_errors,
    token_errors,
    term_errors,
)
"""The functions that draw the figures of the page."""


def _chart(
    layers: list[dict[str, Any]],
    data: dict[str, dict[str, list[Any]]],
    label: str,
    height: int = 240,
) -> Chart:
    size = {"width": 700, "height": height}
    return Chart({"data": {"name": "cells"}, **size, "layer": layers}, data, label)


def _policies(result: dict[str, Any]) -> list[str]:
    """Policies in the order of the grid."""
    return list(dict.fromkeys(cell["policy"] for cell in result["cells"]))
