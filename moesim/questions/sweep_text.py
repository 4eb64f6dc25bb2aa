"""A sweep as text: who is fastest where, by how much for certain, and how often."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.units import format_bytes, ms, percent
from moesim.questions.compare_text import LEAST_LEAD, alike_line
from moesim.reporting.tables import aligned
from moesim.runs.sweeps.ranking import LEAST_SAMPLES, axes_of, ranking

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

MOST_CELLS = 40
"""Cells that a terminal shows one by one; a page and the table hold all of them."""

NO_INTERVAL = f"no interval: expected {LEAST_SAMPLES} batches or seeds"


def sweep_text(frame: pd.DataFrame) -> str:
    """Lay out a sweep.

    Args:
        frame: of `moesim.sweep`, with ``details=True``.
    """
    ranked = ranking(frame)
    lines = [setting_line(frame), ""]
    cells = ranked.attrs["cells"]
    if cells and _cell_count(ranked) <= MOST_CELLS:
        lines += [*aligned(winner_rows(ranked), lead=len(cells)), ""]
    lines += [*aligned(candidate_rows(ranked)), "", *note_lines(ranked)]
    lines += alike_lines(frame, ranked)
    return "\n".join(lines)


def setting_line(frame: pd.DataFrame) -> str:
    """How many runs there are, over which axes, of which model."""
    axes: list[str] = frame.attrs.get("axes") or axes_of(frame)
    counts = [
        f"{frame[name].nunique(dropna=False)} x {axis_head(name)}" for name in axes
    ]
    models = ", ".join(frame["model"].unique())
    over = f" over {', '.join(counts)}" if counts else ""
    return f"{models}: {len(frame)} runs{over}"


def winner_rows(ranked: pd.DataFrame) -> list[list[str]]:
    """Heads of columns, and a row for each cell: who is fastest there."""
    cells: list[str] = ranked.attrs["cells"]
    heads = [
        *map(axis_head, cells),
        "fastest",
        time_words(ranked),
        "95 %",
        "ahead by",
        "of",
    ]
    rows = [heads]
    for _, cell in ranked.groupby(cells, sort=False, dropna=False):
        best, *others = cell.to_dict("records")
        rivals = [row for row in others if not row["oracle"]]
        slower = [row for row in rivals if not row["tied"]]
        names = [row["candidate"] for row in (best, *rivals) if row["tied"]]
        rows.append(
            [
                *(axis_value(name, best[name]) for name in cells),
                # In the order of their times, which is no order for certain.
                " = ".join(names) or best["candidate"],
                ms(best["seconds"]),
                interval(best),
                percent(slower[0]["behind"]) if slower else "",
                slower[0]["candidate"] if slower else "",
            ]
        )
    return rows


def interval(row: Mapping[Any, Any]) -> str:
    """The 95 % interval of a row of a ranking; empty where there is none."""
    if row["low_s"] != row["low_s"]:
        return ""
    return f"{ms(row['low_s'])} to {ms(row['high_s'])}"


def candidate_rows(ranked: pd.DataFrame) -> list[list[str]]:
    """Heads of columns, and a row for each policy: how often it wins, and how far it is
    behind where it does not.
    """
    rows = [["policy", "fastest", "tied", "behind, median", "behind, worst"]]
    count = _cell_count(ranked)
    order = ranked.groupby("candidate", sort=False)["behind"].median().sort_values()
    for candidate in order.index:
        part = ranked[ranked["candidate"] == candidate]
        alone = _wins_alone(ranked, part)
        tied = int(part["tied"].sum()) - alone
        is_oracle = part["oracle"].any()
        rows.append(
            [
                str(candidate),
                "sees the future" if is_oracle else f"{alone} of {count}",
                "" if is_oracle else str(tied),
                percent(part["behind"].median()),
                percent(part["behind"].max()),
            ]
        )
    return rows


def _wins_alone(ranked: pd.DataFrame, part: pd.DataFrame) -> int:
    """Count the cells that a policy wins without a tie."""
    cells: list[str] = ranked.attrs["cells"]
    causal = ranked[ranked["tied"]]
    if not cells:
        return int(len(causal) == 1 and part["tied"].any())
    tied = causal.groupby(cells, dropna=False)["tied"].transform("sum")
    return int((tied.reindex(part.index[part["tied"]]) == 1).sum())


def note_lines(ranked: pd.DataFrame) -> list[str]:
    """What a reader must know before believing the ranking."""
    samples = int(ranked["samples"].min())
    runs = int(ranked["runs"].max())
    if ranked["low_s"].isna().any():
        counts = f"{samples} and {runs}"
        # Such seeds repeat one run.
        if max(samples, runs) >= LEAST_SAMPLES:
            counts += ", which change nothing"
        return [f"{NO_INTERVAL}, got {counts}; a tie is the same time exactly"]
    sizes = f"{samples} batches and {runs} seeds"
    return [f"95 % intervals from {sizes}; a tie differs by less than they tell apart"]


def alike_lines(frame: pd.DataFrame, ranked: pd.DataFrame) -> list[str]:
    """Why all policies take the same time, where they do everywhere; else nothing."""
    causal = ranked[~ranked["oracle"]]
    if "busiest" not in frame:
        return []
    if causal["candidate"].nunique() < 2 or causal["behind"].max() >= LEAST_LEAD:
        return []
    lane = str(frame["busiest"].mode().iloc[0])
    share = float(frame.loc[frame["busiest"] == lane, "busiest_share"].median())
    return [alike_line(lane, share)]


def time_words(ranked: pd.DataFrame) -> str:
    """What is compared, in words."""
    return "per token" if ranked.attrs["measure"] == "tpot_s" else "whole trace"


def _cell_count(ranked: pd.DataFrame) -> int:
    cells: list[str] = ranked.attrs["cells"]
    return len(ranked[cells].drop_duplicates()) if cells else 1


HEADS = {
    "trace": "trace",
    "hw": "machine",
    "cache_ratio": "GPU cache",
    "slots_per_layer": "per layer",
    "gpu_memory_bytes": "GPU memory",
    "host_memory_bytes": "host memory",
    "files_digest": "other files",
}
"""Heads of columns; other options are called by their names."""


def axis_head(name: str) -> str:
    """What a report calls an axis."""
    return HEADS.get(name, name.removesuffix("_bytes").replace("_", " "))


def axis_value(name: str, value: Any) -> str:
    """What a report calls a value of an axis: ``8.0 GiB``, ``12.5 %``, ``default``."""
    if value is None or value != value:  # noqa: PLR0124 - NaN is not itself
        return "default"
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if name == "cache_ratio":
        return f"{100 * value:.6g} %"
    # Pandas turns whole numbers beside gaps into floats.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    if name in ("code", "files_digest"):
        return text[:6]
    return Path(text).stem if name == "trace" else text
