"""`moesim trace info`: what a trace holds."""

import json
from typing import Any

from moesim.cli.options import AsJson, TraceFile

MOST_ENTRIES = 4
"""Entries of a list that are still worth printing."""


def info(trace: TraceFile, as_json: AsJson = False) -> None:
    """Read all rows once, check them, and say what the trace holds.

    \b
    Example:
      moesim trace info trace.parquet
    """
    from moesim.reporting.tables import facts_lines
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.statistics import info as describe

    description = describe(open_trace(trace))
    if as_json:
        print(json.dumps(description, indent=2))
        return
    # What the header does not state gets no line.
    facts = {name: text for name, text in _facts(description).items() if text}
    print("\n".join(facts_lines(facts.items())))


def _facts(trace: dict[str, Any]) -> dict[str, str]:
    from moesim.base.sizes import format_bytes, format_sizes
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
