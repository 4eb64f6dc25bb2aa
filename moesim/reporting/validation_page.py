"""The result of a validation as Markdown, and as one HTML file with its figures inside.

Everything is made from the JSON object, so a report can be drawn again from a stored
result.
"""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hwprofiles.errors import ProfileError
from moesim.traces.files import written_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

_COLUMNS = (
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


def markdown(result: dict[str, Any]) -> str:
    """Lay out a result: verdict, every cell, terms."""
    config = result["config"]
    lines = [
        "# Simulated against measured",
        "",
        (
            f"{config['date']}, {config['machine']}, profile `{config['hw']}` of"
            f" {config['hw_date']}; {len(result['cells'])} cells of {config['steps']}"
            f" steps, each run {config['repetitions']} times in {config['seconds']} s;"
            f" load average {config['load_before']} before, {config['load_after']}"
            " after."
        ),
        "",
        *_table(("", "value"), facts(result)),
        "",
        *_table(_COLUMNS, [_row(cell) for cell in result["cells"]]),
        "",
        (
            "Errors are predicted over measured, minus one. measured: median over"
            " repetitions, step by step. *noise*: by how much that median would differ"
            " if it were measured anew. *equivalent*: paired steps, two one-sided"
            " tests, margin 5 %. *hits*: equal, or why they need not be."
        ),
        "",
        "TPOT errors of the cells that share a coordinate:",
        "",
        *_table(
            ("coordinate", "cells", "median", "worst", "signed median", "TTFT, median"),
            _shared(result),
        ),
        "",
        (
            "Which term differs, predicted minus measured, share of the measured"
            " makespan, median of absolute values:"
        ),
        "",
        *_table(
            tuple(result["terms"]),
            [[_percent(value) for value in result["terms"].values()]],
        ),
    ]
    if result["warnings"]:
        lines += ["", *(f"- {warning}" for warning in result["warnings"])]
    return "\n".join(lines) + "\n"


def facts(result: dict[str, Any]) -> list[list[str]]:
    """The summary, one figure per row, in words."""
    held = result["held_out"]
    known = result["calibrated"]
    ssd = result["ssd"]
    times = result["error_over_noise"]
    rows = [
        ["TPOT error, median of cells", _percent(result["tpot_error_median"])],
        ["TPOT error, worst cell", _percent(result["tpot_error_max"])],
        [
            "TPOT error, signed median",
            _percent(result["tpot_error_signed_median"], signed=True),
        ],
        ["TTFT error, median", _percent(result["ttft_error_median"])],
        *_at_speed(result),
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
        ["median error over noise floor", "-" if times is None else f"{times:.1f}"],
        ["cells equivalent within 5 %", _percent(result["tost_pass_share"])],
        ["term that differs most", str(result["largest_term"])],
    ]
    for words, part in (
        ("sizes that were calibrated", known),
        ("sizes held out", held),
        ("with the SSD tier", ssd),
    ):
        if part["count"]:
            rows.append(
                [
                    f"TPOT error, {words} ({part['count']} cells)",
                    (
                        f"median {_percent(part['tpot_error_median'])}, worst"
                        f" {_percent(part['tpot_error_max'])}"
                    ),
                ]
            )
    if (alike := result["same_work"])["count"]:
        rows.append(
            [
                (
                    "cells that do the same work differ from each other"
                    f" ({alike['count']} pairs)"
                ),
                (
                    f"median {_percent(alike['tpot_differs_median'])}, worst"
                    f" {_percent(alike['tpot_differs_max'])}"
                ),
            ]
        )
    return rows


def _at_speed(result: dict[str, Any]) -> list[list[str]]:
    """What the machine's drift since the calibration was, and the errors without it;
    nothing where it is unknown.
    """
    part = result["at_speed"]
    if part["tpot_error_median"] is None:
        return []
    drifts = dict.fromkeys(
        ", ".join(
            f"{name} {_percent(value, signed=True)}"
            for name, value in cell["drift"].items()
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


def _shared(result: dict[str, Any]) -> list[list[str]]:
    """A row for each value of each coordinate that has several."""
    return [
        [
            f"{key.replace('_', ' ')} {value.removesuffix('.parquet')}",
            str(part["count"]),
            _percent(part["tpot_error_median"]),
            _percent(part["tpot_error_max"]),
            _percent(part["tpot_error_signed_median"], signed=True),
            _percent(part["ttft_error_median"]),
        ]
        for key, parts in result["by"].items()
        if len(parts) > 1
        for value, part in parts.items()
    ]


def _row(cell: dict[str, Any]) -> list[str]:
    measured = cell["tpot_measured_s"]
    tost = cell["tost"]
    hits = (
        "equal"
        if cell["hits_equal"]
        else ("DIFFERENT" if cell["timing_free"] else "timing")
    )
    return [
        cell["trace"].removesuffix(".parquet"),
        cell["shape"],
        cell["policy"],
        f"{cell['cache_ratio']:g}",
        f"{cell['host_ratio']:g}",
        str(cell["batch"]),
        _ms(measured),
        _ms(cell["predicted"]["tpot_s"]),
        _percent(cell["tpot_error"], signed=True),
        _percent(cell["noise_floor"]),
        _percent(cell["tpot_p95_error"], signed=True),
        _percent(cell["ttft_error"], signed=True),
        hits,
        "-" if tost is None else _yes(tost["equivalent"]),
    ]


def page(result: dict[str, Any]) -> str:
    """The whole report as HTML; figures are embedded, nothing is loaded from
    anywhere.
    """
    figures = "".join(
        f'<figure><img alt="{html.escape(words)}"'
        f' src="data:image/png;base64,{_in_text(draw(result))}">'
        f"<figcaption>{html.escape(words)}</figcaption></figure>"
        for words, draw in FIGURES.items()
    )
    config = result["config"]
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in _row(c)) + "</tr>"
        for c in result["cells"]
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
    summary = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>"
        for k, v in facts(result)
    )
    notes = "".join(
        f"<li>{html.escape(warning)}</li>" for warning in result["warnings"]
    )
    return (
        "<!doctype html><meta charset=utf-8><title>Simulated against measured</title>"
        "<style>body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em"
        " auto;padding:0 1em}"
        "table{border-collapse:collapse;font-size:13px}td,th{padding:.2em"
        " .6em;border-bottom:1px solid #ddd;"
        "text-align:left}img{max-width:100%}figure{margin:1.5em 0}</style>"
        f"<h1>Simulated against measured</h1><p>{html.escape(config['date'])},"
        f" {html.escape(str(config['machine']))},"
        f" profile {html.escape(config['hw'])} of {html.escape(config['hw_date'])};"
        " load average"
        f" {config['load_before']} before, {config['load_after']}"
        f" after.</p><table>{summary}</table>"
        f"{figures}<table><tr>{head}</tr>{rows}</table><ul>{notes}</ul>"
    )


def load(place: str | Path) -> dict[str, Any]:
    """Read what `save` wrote as ``validation.json``.

    Raises:
        ProfileError: it is no such file.
    """
    import json  # noqa: PLC0415 - with the file it reads

    wanted = "expected a validation.json that `moesim validate --out` wrote"
    try:
        found = json.loads(Path(place).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{place}: {wanted}, found {error}") from None
    if (
        not isinstance(found, dict)
        or not {"cells", "config", "warnings"} <= found.keys()
    ):
        raise ProfileError(f"{place}: {wanted}, found other JSON")
    return found


def save(result: dict[str, Any], folder: str | Path) -> list[Path]:
    """Write ``validation.json``, ``validation.md`` and ``validation.html``; return
    their places.
    """
    import json  # noqa: PLC0415 - with the file it writes

    texts = {
        "json": json.dumps(result, indent=1),
        "md": markdown(result),
        "html": page(result),
    }
    places = []
    for suffix, text in texts.items():
        place = Path(folder) / f"validation.{suffix}"
        with written_beside(place) as part:
            part.write_text(text, encoding="utf-8")
        places.append(place)
    return places


# -- figures ---------------------------------------------------------------------------


def parity(result: dict[str, Any]) -> Figure:
    """Predicted against measured TPOT, one point per cell, by policy."""
    figure, axes = _figure(5.6, 5.0)
    for policy in dict.fromkeys(cell["policy"] for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if cell["policy"] == policy]
        measured = [1e3 * cell["tpot_measured_s"] for cell in cells]
        axes.plot(
            measured,
            [1e3 * cell["predicted"]["tpot_s"] for cell in cells],
            "o",
            ms=4,
            alpha=0.8,
            label=policy,
        )
    low, high = axes.get_xlim()
    line = np.array([max(low, 1e-3), high])
    axes.plot(line, line, "k-", lw=0.8)
    axes.fill_between(line, 0.95 * line, 1.05 * line, color="k", alpha=0.08, lw=0)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured TPOT [ms]",
        ylabel="predicted TPOT [ms]",
    )
    axes.legend(fontsize=7)
    return figure


def errors(result: dict[str, Any]) -> Figure:
    """Error of each cell, sorted, with its noise floor beside it."""
    figure, axes = _figure(7.2, 3.2)
    cells = sorted(result["cells"], key=lambda cell: cell["tpot_error"] or 0.0)
    x = np.arange(len(cells))
    axes.bar(
        x,
        [100 * (cell["tpot_error"] or 0.0) for cell in cells],
        width=0.9,
        color="tab:blue",
        label="error",
    )
    floors = np.array([100 * cell["noise_floor"] for cell in cells])
    axes.fill_between(
        x,
        -floors,
        floors,
        step="mid",
        color="tab:orange",
        alpha=0.45,
        lw=0,
        label="noise of the measurement",
    )
    axes.set(xlabel="cells, sorted", ylabel="TPOT error [%]")
    axes.legend(fontsize=8)
    return figure


def per_token(result: dict[str, Any]) -> Figure:
    """Distribution of the errors of single tokens, by policy."""
    figure, axes = _figure(7.2, 3.2)
    policies = list(dict.fromkeys(cell["policy"] for cell in result["cells"]))
    samples = [
        100
        * np.concatenate(
            [cell["step_errors"] for cell in result["cells"] if cell["policy"] == name]
        )
        for name in policies
    ]
    axes.boxplot(samples, whis=(5, 95), showfliers=False)
    axes.set_xticks(range(1, len(policies) + 1), policies, fontsize=7, rotation=15)
    axes.axhline(0.0, color="k", lw=0.8)
    axes.set_ylabel("error of one token [%]")
    return figure


def blame(result: dict[str, Any]) -> Figure:
    """Which term of the model differs, by policy: predicted minus measured, share of
    the makespan.
    """
    figure, axes = _figure(7.2, 3.2)
    policies = list(dict.fromkeys(cell["policy"] for cell in result["cells"]))
    width = 0.8 / len(result["terms"])
    for number, name in enumerate(result["terms"]):
        heights = [
            100
            * float(
                np.median(
                    [
                        cell["terms"][name]
                        for cell in result["cells"]
                        if cell["policy"] == policy
                    ]
                )
            )
            for policy in policies
        ]
        axes.bar(np.arange(len(policies)) + number * width, heights, width, label=name)
    axes.set_xticks(np.arange(len(policies)) + 0.4, policies, fontsize=7, rotation=15)
    axes.axhline(0.0, color="k", lw=0.8)
    axes.set_ylabel("predicted - measured [% of run]")
    axes.legend(fontsize=7, ncols=5)
    return figure


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "Predicted against measured time per token; the band is 5 %": parity,
    "Error of each cell, and by how much it would differ if measured anew": errors,
    "Error of single tokens; boxes are quartiles, whiskers 5 % and 95 %": per_token,
    "Which term differs: predicted minus measured, median over cells": blame,
}


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import (  # noqa: PLC0415 - half a second that a printed summary need not pay
        Figure,
    )

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _in_text(figure: Figure) -> str:
    return base64.b64encode(png(figure)).decode()


# -- words -----------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return "-"
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
