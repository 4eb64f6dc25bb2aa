"""The report of a validation: one answer, its files, and its figures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.files import write_text
from moesim.base.units import NO_VALUE
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure, names
from moesim.reporting.parts import Listing, trace_words

if TYPE_CHECKING:
    from collections.abc import Callable


def validation_answer(result: dict[str, Any]) -> Answer:
    """Say how far simulated times are from measured ones, and where."""
    config = result["config"]
    # Files of earlier versions name none.
    digests = config.get("traces", {})
    traces = [trace_words(name, digest) for name, digest in digests.items()]
    median = _percent(result["tpot_error_median"])
    worst = _percent(result["tpot_error_max"])
    noise = _percent(result["noise_floor"])
    # Six columns name a cell, more than a screen can repeat beside the others: a number
    # leads every block of columns instead.
    rows = [[str(n), *row] for n, row in enumerate(cell_rows(result), start=1)]
    cells = Listing.of(["cell", *CELL_HEADS], rows, title="Every cell", note=_LEGEND)
    shared = Listing.of(SHARED_HEADS, shared_rows(result), title=_SHARED_TITLE)
    terms = Listing.of(list(result["terms"]), [_term_row(result)], title=_TERMS_TITLE)
    return Answer(
        question="simulated against measured",
        subject=config["machine"],
        setting=[("measured", setting(result))],
        facts=[(name, value) for name, value in facts(result)],
        tables=[cells, shared, terms],
        sentences=[
            (
                f"time per token off by {median} in the median, {worst} at worst;"
                f" measured again it would differ by {noise}"
            )
        ],
        figures={draw.__name__: partial(draw, result) for draw in FIGURES},
        data=result,
        sources={"traces": "; ".join(traces)},
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

    answer = validation_answer(result)
    answer.command = command
    folder = Path(folder)
    # Figures of other kinds can be drawn later, from the JSON file.
    write_text(folder / "validation.json", json.dumps(sealed(result), indent=1))
    write_text(folder / "validation.md", answer.markdown())
    page = answer.write(folder / "validation.html")
    return [folder / "validation.json", folder / "validation.md", page]


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
    " step by step. noise: by how much that median would differ if it were measured"
    " anew. equivalent: paired steps, two one-sided tests, margin 5 %. hits: equal,"
    " or why they need not be."
)
_SHARED_TITLE = "TPOT errors of cells that share a coordinate"
_TERMS_TITLE = (
    "Predicted minus measured by term: share of the measured run, median of absolute"
    " values"
)


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


def parity(result: dict[str, Any]) -> Figure:
    """Predicted against measured TPOT, one point per cell, by policy."""
    rows = pd.DataFrame(
        [
            (
                cell["policy"],
                1e3 * cell["tpot_measured_s"],
                1e3 * cell["predicted"]["tpot_s"],
                f"{cell['shape']}, cache {cell['cache_ratio']}, batch {cell['batch']}",
            )
            for cell in result["cells"]
        ],
        columns=["policy", "measured", "predicted", "cell"],
    )
    # Without a decode step there is no time, and no place on such an axis.
    rows = rows[(rows["measured"] > 0) & (rows["predicted"] > 0)]
    ends = rows[["measured", "predicted"]].to_numpy()
    line = [float(ends.min()), float(ends.max())] if len(rows) else [1.0, 2.0]
    return Figure(
        rows,
        Axis("measured", "measured time per token, ms", log=True),
        Axis("predicted", "predicted, ms", log=True),
        "Predicted against measured time per token",
        mark="point",
        series="policy",
        hover=[("cell", "cell", "")],
        lines=[
            (line, [factor * end for end in line], words)
            for factor, words in (
                (1.0, "equal"),
                (0.95, "5 % less"),
                (1.05, "5 % more"),
            )
        ],
    )


def cell_errors(result: dict[str, Any]) -> Figure:
    """Error of each cell, sorted, with the noise of its measurement."""
    # A cell without decode steps has no error; it stands at zero.
    cells = sorted(result["cells"], key=lambda cell: cell["tpot_error"] or 0.0)
    rows = pd.DataFrame(
        {
            "cell": range(len(cells)),
            "error": [cell["tpot_error"] or 0.0 for cell in cells],
            "noise": [cell["noise_floor"] for cell in cells],
            "policy": [cell["policy"] for cell in cells],
        }
    )
    rows = rows.assign(
        low=rows["error"] - rows["noise"], high=rows["error"] + rows["noise"]
    )
    return Figure(
        rows,
        Axis("cell", "cells, sorted"),
        Axis("error", "error of the time per token", "+.0%"),
        "Error of each cell; lines: by how much it would differ if measured anew",
        mark="bar",
        low="low",
        high="high",
        hover=[("policy", "policy", "")],
    )


def token_errors(result: dict[str, Any]) -> Figure:
    """Distribution of the errors of single tokens, by policy."""
    rows = []
    for policy in _policies(result):
        of_policy = [
            cell["step_errors"] for cell in result["cells"] if cell["policy"] == policy
        ]
        errors = np.concatenate(of_policy) if of_policy else np.zeros(0)
        if len(errors):
            low, middle, high = np.percentile(errors, (5, 50, 95)).tolist()
            rows.append((policy, low, middle, high))
    frame = pd.DataFrame(rows, columns=["policy", "low", "error", "high"])
    return Figure(
        frame,
        Axis("error", "error of one token", "+.0%"),
        names("policy", "", frame["policy"]),
        "Error of single tokens: median, and the middle nine tenths",
        mark="point",
        low="low",
        high="high",
        rules=[("x", 0.0, "equal")],
    )


def term_errors(result: dict[str, Any]) -> Figure:
    """Which term of the model differs, by policy."""
    rows = [
        (
            policy,
            term,
            float(
                np.median(
                    [c["terms"][term] for c in result["cells"] if c["policy"] == policy]
                )
            ),
        )
        for policy in _policies(result)
        for term in result["terms"]
    ]
    frame = pd.DataFrame(rows, columns=["policy", "term", "share"])
    return Figure(
        frame,
        Axis("share", "predicted minus measured, of the run", "+.0%"),
        names("policy", "", frame["policy"]),
        "Which term differs: predicted minus measured, median over cells",
        mark="point",
        series="term",
        rules=[("x", 0.0, "equal")],
    )


FIGURES: tuple[Callable[[dict[str, Any]], Figure], ...] = (
    parity,
    cell_errors,
    token_errors,
    term_errors,
)
"""The functions that describe the figures of a validation."""


def _policies(result: dict[str, Any]) -> list[str]:
    """Policies in the order of the grid."""
    return list(dict.fromkeys(cell["policy"] for cell in result["cells"]))
