"""`moesim trace stats`: the routing of a trace, layer by layer."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, Batch, TraceFile

COLUMNS = {
    "active": ("active", "{:.1f}"),
    "active in prefill": ("active_prefill", "{:.1f}"),
    "entropy, bits": ("entropy_bits", "{:.2f}"),
    "busiest": ("max_share", "{:.1%}"),
    "overlap": ("overlap", "{:.2f}"),
    "working set": ("working_set", "{:.1f}"),
    "touched": ("touched", "{:.0f}"),
}
"""Head of a column -> the figure below it, and how it is written."""


def stats(
    trace: TraceFile,
    batch: Batch = 1,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write a page with pictures.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write the figures as Parquet.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Characterise the routing of a trace before any machine is involved, and judge
    whether to offload the model.

    \b
    Examples:
      moesim trace stats trace.parquet --batch 8
      moesim trace stats trace.parquet --html stats.html --out stats
    """
    check_places(folder=out, files=[html], inputs=[trace])
    from moesim.cli.output import bar
    from moesim.questions.trace_page import verdict_text, write_html
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.trace_summary import summarise_trace, write_tables

    opened = open_trace(trace)
    with bar("reading", opened.rows) as show:
        summary = summarise_trace(opened, batch=batch, progress=show)
    written = []
    if html is not None:
        written.append(write_html(opened, summary, html, output.command_line()))
    if out is not None:
        written += write_tables(opened, summary, out)
    figures = summary.figures
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    # The judgement stands last, where a terminal shows it.
    lines = [_stats_text(figures), "", *verdict_text(figures["verdict"])]
    print("\n".join(lines))
    output.print_written(written)


def _stats_text(figures: dict[str, Any]) -> str:
    """One row per layer; without decode only what prefill tells."""
    from moesim.reporting.tables import aligned

    columns = {
        head: [form.format(value) for value in figures[key]]
        for head, (key, form) in COLUMNS.items()
        # Without decode there is no overlap of adjacent tokens, for one.
        if figures[key] is not None
    }
    for ratio, rates in figures["lru"].items():
        # A cache that a trace without decode steps cannot fill has no rates.
        if rates is not None:
            columns[f"LRU {float(ratio):.1%}"] = [f"{rate:.1%}" for rate in rates]

    rows = [["layer", *columns]]
    for layer, cells in enumerate(zip(*columns.values(), strict=True)):
        rows.append([str(layer), *cells])
    head = (
        f"{figures['prefill_tokens']:,} prompt and {figures['decode_tokens']:,}"
        f" generated tokens, {figures['decode_steps']:,} decode steps at batch"
        f" {figures['batch']}; overlap by chance: {figures['overlap_chance']:.2f}"
    )
    return "\n".join([head, "", *aligned(rows)])
