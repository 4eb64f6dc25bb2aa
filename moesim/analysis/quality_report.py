"""Lays out what policies do to a model's answers: a table, a figure, files."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from moesim.reporting.figures import save as save_figure
from moesim.reporting.tables import aligned, facts_lines
from moesim.traces.files import write_text

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from moesim.analysis.quality import Quality, Row

_HEAD = (
    "routing",
    "cache",
    "perplexity",
    "nats lost",
    "KL",
    "top-1",
    "gate mass",
    "altered",
    "stale",
    "hits",
    "used",
)
_LEAST_SHOWN_KL = 5e-5
"""Below it four decimals would show zero, which only an unaltered model has."""


def quality_text(report: Quality) -> str:
    """Lay out a report for a terminal."""
    config = report.config
    reference_nats = report.rows[0].reference_nats
    facts = {
        "model": f"{config['model']} ({config['dtype']}), batch {config['batch']}",
        "text": (
            f"{config['text']}: {config['tokens']:,} tokens of"
            f" {config['passages']:,} passages scored"
        ),
        "policy": (
            f"{config['assignment']}, {config['cache']}, prefetch {config['prefetch']}"
        ),
        "unmodified": (
            f"{reference_nats:.4f} nats per token, perplexity"
            f" {math.exp(reference_nats):.3f}"
        ),
    }
    table = [list(_HEAD), *(_cells(row) for row in report.rows)]
    # A setting is a routing policy and a cache ratio; both lead every block.
    return "\n".join([*facts_lines(facts.items()), "", *aligned(table, lead=2)])


def _cells(row: Row) -> list[str]:
    lost = f"{row.delta_nats:+.4f}"
    # A single passage has no standard error.
    if not math.isnan(row.delta_nats_se):
        lost += f" ± {row.delta_nats_se:.4f}"
    kl = f"{row.kl:.4f}"
    if 0 != row.kl < _LEAST_SHOWN_KL:
        kl = f"{row.kl:.1e}"
    shares = (
        row.agreement,
        row.gate_mass_kept,
        row.altered,
        row.stale,
        row.hit_rate_active,
    )
    return [
        row.routing,
        f"{row.cache_ratio:.3g}",
        f"{math.exp(row.nats):.3f}",
        lost,
        kl,
        *(f"{100 * share:.1f} %" for share in shares),
        f"{row.experts_used:.2f}",
    ]


def quality_figure(report: Quality, path: str | Path) -> Path:
    """Draw what is lost against what is won: KL and disagreement over the share of
    hits, one line per cache ratio.
    """
    from matplotlib.backends.backend_agg import (  # noqa: PLC0415 - half a second, for pictures only
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # noqa: PLC0415

    # No pyplot: it would look for a display, and keep figures alive.
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    panels = (
        ("KL to the unmodified model, nats per token", "kl", 1),
        ("top-1 agreement, %", "agreement", 100),
    )
    for axis, (title, name, scale) in zip(axes, panels, strict=True):
        _draw(axis, report.rows, name, scale)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("hit rate of active experts, %")
        axis.spines[["top", "right"]].set_visible(False)
    # Divergence has a natural zero; agreement lies close to 100 %.
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    return save_figure(figure, path)


def _draw(axis: Axes, rows: list[Row], name: str, scale: float) -> None:
    """Draw one figure of all rows over their hit rates, labelled by what was swept."""
    for ratio in sorted({row.cache_ratio for row in rows}):
        of_ratio = [row for row in rows if row.cache_ratio == ratio]
        hits = [100 * row.hit_rate_active for row in of_ratio]
        values = [scale * getattr(row, name) for row in of_ratio]
        axis.plot(hits, values, marker="o", label=f"cache {ratio:.3g}")
        for row, hit, value in zip(of_ratio, hits, values, strict=True):
            if row.swept is None:
                continue
            axis.annotate(
                row.swept,
                (hit, value),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=8,
            )


def _title(report: Quality) -> str:
    config = report.config
    routing = config["routing"]
    swept = ""
    if config["sweep"]:
        # The first row's specification holds its own value of the swept parameter.
        routing = routing.partition(":")[0]
        swept = f", labels: {config['sweep'].partition('=')[0]}"
    return (
        f"{config['model']}, {config['tokens']:,} tokens; {config['assignment']},"
        f" {config['cache']}, {routing}{swept}"
    )


def save_quality(report: Quality, folder: Path) -> list[Path]:
    """Write figures, configuration and the picture into a folder; return the files."""
    figures = folder / "quality.json"
    text = json.dumps(report.to_json(), indent=2)
    write_text(figures, text + "\n")
    return [figures, quality_figure(report, folder / "quality.png")]
