"""A trace's statistics as text, and as an HTML page: the answer first, then figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.reporting.figures import new_figure, save
from moesim.reporting.pages import (
    PageFigure,
    PageTable,
    page_figure,
    page_origin,
    trace_words,
    write_page,
)
from moesim.reporting.tables import aligned
from moesim.reporting.trace_figures import PANELS, draw_curves
from moesim.traces.sizes import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.traces.format.reader import Trace
    from moesim.traces.stats.trace_summary import TraceSummary

_ANSWERS = {
    "yes": "Worth offloading.",
    "hardly": "Hardly worth a cache.",
    "no": "Not worth offloading.",
    "unknown": "No verdict.",
}
_SIZE_HEADS = [
    "LRU cache of",
    "experts per layer",
    "memory",
    "LRU",
    "Belady",
    "missing per step",
]


class PagePanel(NamedTuple):
    """A figure of the page under its own heading."""

    title: str
    note: str
    figure: PageFigure


def verdict_text(judgement: dict[str, Any]) -> list[str]:
    """The verdict on offloading as lines for a terminal.

    Args:
        judgement: as under ``verdict`` in a summary's figures.
    """
    lines = [_ANSWERS[judgement["answer"]], *judgement["why"]]
    if judgement["sizes"]:
        lines += ["", *aligned([_SIZE_HEADS, *_size_rows(judgement)])]
    return lines


def write_html(
    trace: Trace, summary: TraceSummary, path: Path, command: str | None = None
) -> Path:
    """Write the page of a trace, and return its path.

    Args:
        trace: opened.
        summary: its statistics.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    judgement = summary.figures["verdict"]
    # A trace without generated tokens has no curve, and so no sizes.
    sizes = PageTable(_SIZE_HEADS, _size_rows(judgement))
    return write_page(
        path,
        "trace.html",
        title=trace.path.name,
        origin=page_origin(command, trace=trace_words(trace.path.name, trace.digest())),
        summary=_summary_line(summary),
        answer=_ANSWERS[judgement["answer"]],
        reasons=judgement["why"],
        sizes=sizes if sizes.rows else None,
        panels=_drawn_panels(summary),
        # Names of models, files and people stay as they are written.
        provenance=json.dumps(trace.header.provenance, ensure_ascii=False, indent=1),
    )


def curve_picture(summary: TraceSummary, path: Path) -> Path:
    """Draw the hit-rate curves alone, as PNG or SVG by the end of the name.

    Raises:
        ValueError: the trace has no generated tokens.
    """
    figure = new_figure()
    if not draw_curves(figure.subplots(), summary):
        raise ValueError("no generated tokens: there is no curve to draw")
    return save(figure, path)


def _summary_line(summary: TraceSummary) -> str:
    figures = summary.figures
    shape = summary.shape
    return (
        f"{shape.name}: {shape.layers} MoE layers x {shape.experts} experts, top"
        f" {shape.top_k}; {figures['prefill_tokens']:,} prompt and"
        f" {figures['decode_tokens']:,} generated tokens, {figures['decode_steps']:,}"
        f" decode steps at batch {figures['batch']}."
    )


def _size_rows(judgement: dict[str, Any]) -> list[list[str]]:
    rows = []
    for size in judgement["sizes"]:
        at_knee = size["at"] == "knee"
        rows.append(
            [
                "the knee" if at_knee else f"{size['at']} hits",
                str(size["slots"]),
                format_bytes(size["bytes"]),
                f"{size['lru']:.1%}",
                f"{size['belady']:.1%}",
                format_bytes(round(size["copied_bytes_per_step"])),
            ]
        )
    return rows


def _drawn_panels(summary: TraceSummary) -> list[PagePanel]:
    """All panels for which the trace has data."""
    panels = []
    for title, note, draw in PANELS:
        figure = new_figure()
        axis = figure.subplots()
        if not draw(axis, summary):
            continue
        # A map of cells needs its frame; curves and bars do not.
        if not axis.images:
            axis.spines[["top", "right"]].set_visible(False)
        panels.append(PagePanel(title, note, page_figure(figure, title)))
    return panels
