"""`moesim trace info`, `stats` and `import`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli import options
from moesim.cli.trace_more import ImportBatch, ImportMap, PromptTokens, import_options

FEW = 4
"""Entries of a list that are still worth printing."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look into traces, or make them of foreign files.",
)


@app.command("info", short_help="Say what a trace holds.")
def info(trace: options.TraceFile, as_json: options.AsJson = False) -> None:
    """Read all rows once, check them, and say what the trace holds.

    \b
    Example:
      moesim trace info trace.parquet
    """
    from moesim.traces.format.reader import open_trace
    from moesim.traces.sizes import format_bytes
    from moesim.traces.stats.statistics import info as found_in

    found = found_in(open_trace(trace))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    sizes = " or ".join(format_bytes(count) for count in found["expert_bytes"])
    facts = {
        "trace": (
            f"{found['path']}, {format_bytes(found['size_bytes'])}, {found['rows']:,}"
            " rows"
        ),
        "split": found["split"],
        "shape": (
            f"{found['model']}: {found['layers']} MoE layers x {found['experts']}"
            f" experts, top {found['top_k']}"
        ),
        "one expert": sizes,
        "tokens": (
            f"{found['prefill_tokens']:,} prompt, {found['decode_tokens']:,} generated,"
            f" in {found['sequences']:,} sequence{'s' * (found['sequences'] != 1)}"
        ),
        "columns": ", ".join(found["columns"]) or "only the required ones",
        "assumed": ", ".join(found["assumed"]),
    }
    facts |= {
        name: _words(value)
        for name, value in found["provenance"].items()
        if name not in facts
    }
    facts = {name: text for name, text in facts.items() if text}
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in facts.items()))


@app.command("stats", short_help="Characterise its routing, layer by layer.")
def stats(
    trace: options.TraceFile,
    batch: options.Batch = 1,
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
    as_json: options.AsJson = False,
) -> None:
    """Characterise the routing of a trace before any machine is involved, and judge
    whether to offload the model.

    \b
    Examples:
      moesim trace stats trace.parquet --batch 8
      moesim trace stats trace.parquet --html stats.html --out stats
    """
    options.check_places(folder=out, files=[html], inputs=[trace])
    from moesim.cli.progress import bar
    from moesim.reporting.trace_page import verdict_text, write_html
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.summary_tables import write_tables
    from moesim.traces.stats.trace_summary import summarise_trace

    opened = open_trace(trace)
    with bar("reading", opened.rows) as show:
        found = summarise_trace(opened, batch=batch, progress=show)
    written = [write_html(opened, found, html)] if html else []
    written += write_tables(opened, found, out) if out else []
    if as_json:
        print(json.dumps(found.figures, indent=2))
        return
    print(
        "\n".join(
            [_stats_text(found.figures), "", *verdict_text(found.figures["verdict"])]
        )
    )
    for path in written:
        print(f"wrote {path}")


@app.command("import", short_help="Make a trace of a foreign file.")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A foreign routing trace.", show_default=False
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The trace to write.", show_default=False),
    ],
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|WORDS",
            help=(
                "The model: a name (see: list models), or"
                " layers=1,experts=6,top_k=1,expert_bytes=1MiB."
            ),
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="Weight format that decides the bytes."),
    ] = "bf16",
    columns: ImportMap = None,
    prompt_tokens: PromptTokens = None,
    batch: ImportBatch = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a trace of a foreign file. The file does not tell the sizes of its model, so
    --shape does.

    A moesim trace whose rows are out of order is sorted; it needs no --shape.

    \b
    Examples:
      moesim trace import routing.parquet q.parquet --shape qwen3-30b-a3b --weights q4_k_m
      moesim trace import toy.parquet t.parquet --shape layers=1,experts=6,top_k=1,expert_bytes=1MiB
      moesim trace import unsorted.parquet sorted.parquet
    """
    options.check_places(files=[target], inputs=[source])
    from moesim.cli.progress import bar
    from moesim.traces.importers import import_trace
    from moesim.traces.models import model_shape
    from moesim.traces.sizes import format_bytes

    model = None if shape is None else model_shape(shape, weights)
    with bar("importing") as show:
        chosen = import_options(columns, prompt_tokens, batch)
        done = import_trace(source, target, shape=model, progress=show, options=chosen)
    if as_json:
        facts = {
            "trace": str(done.path),
            "importer": done.importer,
            "rows": done.rows,
            "sequences": done.sequences,
        }
        shape_facts = {
            "model": done.shape.name,
            "expert_bytes": sorted(set(done.shape.expert_bytes)),
        }
        print(
            json.dumps(
                facts | shape_facts | {"columns": done.columns, "notes": done.notes},
                indent=2,
            )
        )
        return
    sizes = " or ".join(
        format_bytes(count) for count in sorted(set(done.shape.expert_bytes))
    )
    print(
        f"{done.rows:,} rows of {done.sequences:,}"
        f" sequence{'s' * (done.sequences != 1)}; {done.shape.name}:"
        f" {done.shape.layers} MoE layers x {done.shape.experts} experts, top"
        f" {done.shape.top_k}, {sizes} each ({done.shape.dtype})"
    )
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"wrote {done.path}")


def _words(value: Any) -> str:
    """A JSON value on one line; a long list only by its length."""
    if isinstance(value, list):
        return (
            "; ".join(map(str, value))
            if len(value) <= FEW
            else f"{len(value):,} entries"
        )
    return str(value)


def _stats_text(found: dict[str, Any]) -> str:
    """One row per layer; without decode only what prefill tells."""
    columns = {
        "active": ("active", "{:.1f}"),
        "active in prefill": ("active_prefill", "{:.1f}"),
        "entropy, bits": ("entropy_bits", "{:.2f}"),
        "busiest": ("max_share", "{:.1%}"),
        "overlap": ("overlap", "{:.2f}"),
        "working set": ("working_set", "{:.1f}"),
        "touched": ("touched", "{:.0f}"),
    }
    lists = {
        title: (found[key], form)
        for title, (key, form) in columns.items()
        if found[key] is not None
    }
    lists |= {
        f"LRU {float(r):.1%}": (v, "{:.1%}")
        for r, v in found["lru"].items()
        if v is not None
    }
    layers = range(len(next(iter(lists.values()))[0]))
    rows = [
        ["layer", *lists],
        *([str(n), *(form.format(v[n]) for v, form in lists.values())] for n in layers),
    ]
    head = (
        f"{found['prefill_tokens']:,} prompt and {found['decode_tokens']:,} generated"
        f" tokens, {found['decode_steps']:,} decode steps at batch {found['batch']};"
        f" overlap by chance: {found['overlap_chance']:.2f}"
    )
    from moesim.reporting.text import aligned

    return "\n".join([head, "", *aligned(rows)])
