"""`moesim trace widths`: bit-widths of their own for the experts of one layer."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import parsers
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, DrawSeed, TraceFile


def widths(
    trace: TraceFile,
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The trace to write.", show_default=False),
    ],
    bits: Annotated[
        str | None,
        typer.Option(
            metavar="B1,B2,…",
            parser=parsers.numbers,
            help="Bits per weight, scales included; the first experts get the first.",
        ),
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(
            metavar="S1,S2,…",
            parser=parsers.numbers,
            help="Share of each layer's experts with each width. Default: equal shares.",
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help=(
                "Which experts of a layer come first: random, popularity (used most"
                " often in this trace), or a CSV file with the columns layer, expert,"
                " score, highest first."
            ),
        ),
    ] = "random",
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of --bits: a CSV file with the columns layer, expert, bits.",
        ),
    ] = None,
    seed: DrawSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Give the experts of one layer bit-widths, and so sizes, of their own.

    Routing stays. The header says how widths were given, and so does every result of a
    replay.

    \b
    Examples:
      moesim trace widths q.parquet w.parquet --bits 8,4,2 --shares 0.25,0.5,0.25
      moesim trace widths q.parquet w.parquet --bits 8,4 --by popularity
      moesim trace widths q.parquet w.parquet --bits 8,4 --by sensitivity.csv
      moesim trace widths q.parquet w.parquet --table widths.csv
    """
    scores = [] if by in {"random", "popularity"} else [Path(by)]
    tables = [] if table is None else [table]
    check_places(files=[target], inputs=[trace, *scores, *tables])
    from moesim.base.sizes import format_sizes
    from moesim.traces.synthetic.marks import WIDTHS, widths_text
    from moesim.traces.synthetic.widths import set_widths

    widened = set_widths(
        trace,
        target,
        bits=[float(width) for width in bits or ()],
        shares=None if shares is None else [float(share) for share in shares],
        by=by,
        table=table,
        seed=seed,
    )
    mean_bits = float(widened.bits.mean())
    if as_json:
        facts = {
            "trace": str(widened.path),
            "rows": widened.rows,
            "mean_bits": mean_bits,
            "expert_bytes": list(widened.shape.expert_sizes),
            WIDTHS: widened.mark,
        }
        print(json.dumps(facts, indent=2))
        return
    print(f"{widths_text(widened.mark)}; {mean_bits:.3g} bits in the mean")
    print(f"one expert: {format_sizes(widened.shape.expert_sizes)}")
    print(
        f"wrote {target}: {widened.rows:,} rows; widths are stated (marked in its header)"
    )
