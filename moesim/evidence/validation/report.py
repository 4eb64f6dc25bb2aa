"""The report of a validation: one answer, its files, and its figures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.files import write_text
from moesim.base.units import NO_VALUE, number, percent
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure, names
from moesim.reporting.parts import Column, Listing, trace_words

if TYPE_CHECKING:
    from collections.abc import Callable


def validation_answer(result: dict[str, Any]) -> Answer:
    """Say how far simulated times are from measured ones, and where."""
    config = result["config"]
    traces = [trace_words(name, digest) for name, digest in config["traces"].items()]
    median, worst, noise = (
        percent(result[name])
        for name in ("tpot_error_median", "tpot_error_max", "noise_floor")
    )
    # Six columns name a cell, more than a screen can repeat beside the others: a number
    # leads every block of columns instead.
    cells = Listing(
        _cells(result),
        _CELL,
        title="Every cell",
        note="Errors are predicted over measured, minus one. measured: median over"
        " repetitions, step by step. noise: by how much that median would differ if it"
        " were measured anew. equivalent: paired steps, two one-sided tests, margin 5"
        " %. hits: equal, or why they need not be.",
    )
    shared = Listing(
        pd.DataFrame(
            {"at": f"{key.replace('_', ' ')} {value.removesuffix('.parquet')}", **part}
            for key, parts in result["by"].items()
            # A coordinate with one value tells nothing beyond the summary.
            if len(parts) > 1
            for value, part in parts.items()
        ),
        _SHARED,
        title="Errors per token of cells that share a coordinate",
    )
    terms = Listing(
        pd.DataFrame([result["terms"]]),
        [Column(term, term, "share") for term in result["terms"]],
        title="Predicted minus measured by term: share of the measured run, median of"
        " absolute values",
    )
    return Answer(
        question="simulated against measured",
        subject=config["machine"],
        setting=[("measured", setting(result))],
        facts=facts(result),
        tables=[table for table in (cells, shared, terms) if len(table.rows)],
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


def save(
    result: dict[str, Any], folder: str | Path, command: str | None = None
) -> list[Path]:
    """Write ``validation.json``, ``validation.md`` and ``validation.html``; return
    their paths.
    """
    answer = validation_answer(result)
    answer.command = command
    folder = Path(folder)
    # Figures of other kinds can be drawn later, from the JSON file.
    write_text(folder / "validation.json", json.dumps(result, indent=1))
    write_text(folder / "validation.md", answer.markdown())
    page = answer.write(folder / "validation.html")
    return [folder / "validation.json", folder / "validation.md", page]


_CELL = (
    Column("cell", "cell"),
    Column("trace", "trace"),
    Column("shape", "shape"),
    Column("policy", "policy"),
    Column("cache_ratio", "cache"),
    Column("host_ratio", "host"),
    Column("batch", "batch"),
    Column("tpot_measured_s", "per token", "s"),
    Column("predicted_s", "predicted", "s"),
    Column("tpot_error", "error", "share"),
    Column("noise_floor", "noise", "share"),
    Column("tpot_p95_error", "p95 error", "share"),
    Column("ttft_error", "first token error", "share"),
    Column("hits", "hits"),
    Column("equivalent", "equivalent"),
)
_SHARED = (
    Column("at", "coordinate"),
    Column("count", "cells"),
    Column("tpot_error_median", "median", "share"),
    Column("tpot_error_max", "worst", "share"),
    Column("tpot_error_signed_median", "signed median", "share"),
    Column("ttft_error_median", "first token, median", "share"),
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


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary: names and words of each figure."""
    at_speed = result["at_speed"]
    rows = [
        ("verdict", result.get("verdict")),
        ("per token error, median of cells", percent(result["tpot_error_median"])),
        ("per token error, worst cell", percent(result["tpot_error_max"])),
        ("per token error, signed median", percent(result["tpot_error_signed_median"])),
        ("first token error, median", percent(result["ttft_error_median"])),
    ]
    if at_speed["tpot_error_median"] is not None:
        rows += [
            (f"{_SLOWER} by", _drifts(result)),
            (f"per token {_AT_SPEED}, median", percent(at_speed["tpot_error_median"])),
            (f"per token {_AT_SPEED}, worst cell", percent(at_speed["tpot_error_max"])),
            (
                f"first token {_AT_SPEED}, median",
                percent(at_speed["ttft_error_median"]),
            ),
        ]
    hits = f"{_yes(result['hits_equal'])} ({result['hits_compared']} cells)"
    repeated = result["kendall_tau_repeated"]
    again = "noise floor: measured again, times would differ by"
    rows += [
        ("order of policies, Kendall's tau", number(result["kendall_tau"])),
        ("tau of two measurements with each other", number(repeated)),
        ("hits equal where timing decides nothing", hits),
        (again, percent(result["noise_floor"])),
        ("single repetitions differ by", percent(result["repetitions_differ"])),
        (
            "cells whose error is below their own noise",
            percent(result["below_noise_share"]),
        ),
        ("median error over noise floor", number(result["error_over_noise"])),
        ("cells equivalent within 5 %", percent(result["tost_pass_share"])),
        ("term that differs most", str(result["largest_term"])),
    ]
    # Parts of the grid that mean something, where it has any of them; no prediction can
    # be nearer than the last.
    for words, part, name in (
        ("per token error, sizes that were calibrated", "calibrated", "tpot_error"),
        ("per token error, sizes held out", "held_out", "tpot_error"),
        ("per token error, with the SSD tier", "ssd", "tpot_error"),
        (_SAME_WORK, "same_work", "tpot_differs"),
    ):
        of = result[part]
        if of["count"]:
            unit = "pairs" if part == "same_work" else "cells"
            median, worst = (percent(of[f"{name}_{end}"]) for end in ("median", "max"))
            label = f"{words} ({of['count']} {unit})"
            rows.append((label, f"median {median}, worst {worst}"))
    return [(words, figure) for words, figure in rows if figure]


_SLOWER = "reference runs took longer than when it was calibrated"
_AT_SPEED = "error without that drift"
_SAME_WORK = "cells that do the same work differ from each other"


def _drifts(result: dict[str, Any]) -> str:
    """The machine's drift since the calibration, by term; cells with the same reference
    runs share it.
    """
    drifts = dict.fromkeys(
        ", ".join(f"{name} {percent(value)}" for name, value in cell["drift"].items())
        for cell in result["cells"]
        if cell["drift"] is not None
    )
    return "; ".join(drifts)


def _hits(cell: dict[str, Any]) -> str:
    if cell["hits_equal"]:
        return "equal"
    # Where timing decides what is resident, hits may differ.
    return "DIFFERENT" if cell["timing_free"] else "timing"


def _yes(value: bool | None) -> str:
    return NO_VALUE if value is None else "yes" if value else "no"


# -- figures ---------------------------------------------------------------------------


def _cells(result: dict[str, Any]) -> pd.DataFrame:
    """A row for each cell, with a number and what tables and figures say of it."""
    frame = pd.DataFrame(result["cells"])
    return frame.assign(
        cell=range(1, len(frame) + 1),
        trace=frame["trace"].str.removesuffix(".parquet"),
        tpot_measured_s=frame["tpot_measured_s"].astype(float),
        predicted_s=pd.Series(
            [each["tpot_s"] for each in frame["predicted"]], dtype=float
        ),
        hits=[_hits(cell) for cell in result["cells"]],
        equivalent=[_yes(test and test["equivalent"]) for test in frame["tost"]],
        # Without a decode step it has no error, and stands at zero.
        error=frame["tpot_error"].astype(float).fillna(0.0),
    )


def parity(result: dict[str, Any]) -> Figure:
    """Predicted against measured TPOT, one point per cell, by policy."""
    frame = _cells(result)
    place = frame[["shape", "cache_ratio", "batch"]].astype(str)
    frame["cell"] = [
        f"{shape}, cache {ratio}, batch {batch}"
        for shape, ratio, batch in place.itertuples(index=False)
    ]
    frame["measured"] = 1e3 * frame["tpot_measured_s"]
    frame["predicted"] = 1e3 * frame["predicted_s"]
    rows = frame[["policy", "measured", "predicted", "cell"]]
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
    rows = _cells(result).sort_values("error", kind="stable", ignore_index=True)
    rows = rows[["policy", "error"]].assign(
        cell=rows.index,
        low=rows["error"] - rows["noise_floor"],
        high=rows["error"] + rows["noise_floor"],
    )
    return Figure(
        rows,
        Axis("cell", "cells, sorted", integer=True),
        Axis("error", "error of the time per token", "+.0%"),
        "Error of each cell; lines: by how much it would differ if measured anew",
        mark="bar",
        low="low",
        high="high",
        hover=[("policy", "policy", "")],
    )


def token_errors(result: dict[str, Any]) -> Figure:
    """Distribution of the errors of single tokens, by policy."""
    single = _cells(result)[["policy", "step_errors"]].explode("step_errors").dropna()
    errors = single["step_errors"].astype(float).groupby(single["policy"], sort=False)
    ends = {"low": 0.05, "error": 0.5, "high": 0.95}
    quantiles = {name: errors.quantile(share) for name, share in ends.items()}
    frame = pd.DataFrame(quantiles).reset_index()
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
    cells = [{"policy": cell["policy"]} | cell["terms"] for cell in result["cells"]]
    medians = pd.DataFrame(cells).groupby("policy", sort=False).median()
    frame = medians.reset_index().melt("policy", var_name="term", value_name="share")
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
