"""The report of a validation: one answer, its files, and its figures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from moesim.base.files import write_text
from moesim.base.units import NO_VALUE, number, percent
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure
from moesim.reporting.parts import Column, Listing, trace_words


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
        " were measured anew. hits: equal, or why they need not be.",
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
    return Answer(
        question="simulated against measured",
        subject=config["machine"],
        setting=[("measured", setting(result))],
        facts=facts(result),
        tables=[table for table in (cells, shared) if len(table.rows)],
        sentences=[
            (
                f"time per token off by {median} in the median, {worst} at worst;"
                f" measured again it would differ by {noise}"
            )
        ],
        figures={"parity": partial(parity, result)},
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
    Column("ttft_error", "first token error", "share"),
    Column("hits", "hits"),
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
    hits = f"{_yes(result['hits_equal'])} ({result['hits_compared']} cells)"
    repeated = result["kendall_tau_repeated"]
    again = "noise floor: measured again, times would differ by"
    rows = [
        ("verdict", result.get("verdict")),
        ("per token error, median of cells", percent(result["tpot_error_median"])),
        ("per token error, worst cell", percent(result["tpot_error_max"])),
        ("per token error, signed median", percent(result["tpot_error_signed_median"])),
        ("first token error, median", percent(result["ttft_error_median"])),
        ("order of policies, Kendall's tau", number(result["kendall_tau"])),
        ("tau of two measurements with each other", number(repeated)),
        ("hits equal where timing decides nothing", hits),
        (again, percent(result["noise_floor"])),
        ("median error over noise floor", number(result["error_over_noise"])),
    ]
    for words, part in (
        ("that were calibrated", "calibrated"),
        ("held out", "held_out"),
    ):
        of = result[part]
        if of["count"]:
            label = f"per token error, sizes {words} ({of['count']} cells)"
            median, worst = (
                percent(of["tpot_error_median"]),
                percent(of["tpot_error_max"]),
            )
            rows.append((label, f"median {median}, worst {worst}"))
    return [(words, figure) for words, figure in rows if figure]


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
