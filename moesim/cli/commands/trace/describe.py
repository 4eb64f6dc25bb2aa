"""`moesim trace info`, `check` and `stats` look into traces."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from moesim.base.options import (
    JsonOptions,
    PageOptions,
    folder_option,
    trace_argument,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import of_run

MISLEADING = 1
"""Exit code for a trace whose results would mislead."""

MOST_ENTRIES = 4
"""Entries of a list that are still worth printing."""

TABLES = ("layers.parquet", "load.parquet", "curves.parquet")
"""What `trace stats` writes into a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions(JsonOptions):
    """Which trace is looked into."""

    trace: Path = trace_argument()


@from_dataclass(from_file=False)
def info(options: LookOptions) -> None:
    """Read all rows once, check them, and say what the trace holds.

    \b
    Example:
      moesim trace info trace.parquet
    """
    from moesim.reporting.tables import facts_lines
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.statistics import info as describe

    description = describe(open_trace(options.trace))
    # What the header does not state gets no line.
    facts = {name: text for name, text in _facts(description).items() if text}
    output.tell(options, description, facts_lines(facts.items()))


def _facts(trace: dict[str, Any]) -> dict[str, str]:
    from moesim.base.units import format_bytes, format_sizes
    from moesim.traces.synthetic.marks import (
        PREDICTIONS,
        WIDTHS,
        predictions_text,
        widths_text,
    )

    provenance = dict(trace["provenance"])
    drawn = provenance.pop(PREDICTIONS, None)
    widths = provenance.pop(WIDTHS, None)
    facts = {
        "trace": (
            f"{trace['path']}, {format_bytes(trace['size_bytes'])}, {trace['rows']:,}"
            " rows"
        ),
        "split": trace["split"],
        "shape": (
            f"{trace['model']}: {trace['layers']} MoE layers x {trace['experts']}"
            f" experts, top {trace['top_k']}"
        ),
        # Layers of mixed quantisation have experts of several sizes.
        "one expert": format_sizes(trace["expert_bytes"]),
        "widths of experts": widths_text(widths) if widths else "",
        "tokens": (
            f"{trace['prefill_tokens']:,} prompt, {trace['decode_tokens']:,} generated,"
            f" in {trace['sequences']:,} sequence{'s' * (trace['sequences'] != 1)}"
        ),
        "columns": ", ".join(trace["columns"]) or "only the required ones",
        "assumed": ", ".join(trace["assumed"]),
        # Beside the columns, so that nobody takes them for recorded ones.
        "synthetic predictions": predictions_text(drawn) if drawn else "",
    }
    # Provenance is free text; it may not replace what was read from the rows.
    for name, value in provenance.items():
        facts.setdefault(name, _text(value))
    return facts


def _text(value: Any) -> str:
    """A JSON value on one line; a long list only by its length."""
    if not isinstance(value, list):
        return str(value)
    if len(value) <= MOST_ENTRIES:
        return "; ".join(map(str, value))
    return f"{len(value):,} entries"


@from_dataclass(from_file=False)
def check(options: LookOptions) -> None:
    """Say in plain words what speaks against trusting a trace; exit code 1 if results
    would mislead.

    \b
    Example:
      moesim trace check trace.parquet
    """
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.quality_checks import check_quality

    findings = check_quality(open_trace(options.trace))
    is_misleading = any(finding.grave for finding in findings)
    facts = {
        "trace": str(options.trace),
        "trusted": not is_misleading,
        "findings": [
            {"kind": finding.kind, "grave": finding.grave, "text": finding.text}
            for finding in findings
        ],
    }
    lines = [
        f"{'warning' if finding.grave else 'note'}: {finding.text}"
        for finding in findings
    ]
    verdict = "nothing speaks against this trace"
    if is_misleading:
        verdict = "do not trust results of this trace"
    output.tell(options, facts, [*lines, verdict])
    # Scripts look at the exit code, whatever was printed.
    if is_misleading:
        raise typer.Exit(MISLEADING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions(PageOptions):
    """How a trace is walked through, and what is written of it."""

    trace: Path = trace_argument()
    batch: int = of_run("batch")
    out: Path | None = folder_option("Also write the figures as Parquet.", *TABLES)


@from_dataclass(from_file=False)
def stats(options: StatsOptions) -> None:
    """Characterise the routing of a trace before any machine is involved, and judge
    whether to offload the model.

    \b
    Examples:
      moesim trace stats trace.parquet --batch 8
      moesim trace stats trace.parquet --html stats.html --out stats
    """
    from moesim.questions.trace_stats import stats_answer
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.trace_summary import summarise_trace, write_tables

    opened = open_trace(options.trace)
    with output.bar("reading", opened.rows) as show:
        summary = summarise_trace(opened, batch=options.batch, progress=show)
    tables: list[Path] = []
    if options.out is not None:
        tables = write_tables(opened, summary, options.out)
    output.present(stats_answer(opened, summary), options, more=tables)
