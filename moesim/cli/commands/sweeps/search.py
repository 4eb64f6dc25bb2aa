"""`moesim search`: the best run, where a grid is too large."""

from typing import Annotated, Any

import typer

from moesim.cli import output
from moesim.cli.axes import with_axes
from moesim.cli.checks import check_places
from moesim.cli.commands.sweeps.sweep import (
    Cluster,
    Jobs,
    Source,
    Store,
    Table,
    sources,
)
from moesim.cli.options import AsJson

SHOWN = 12
"""Proposals that a terminal shows; the table has all of them."""


@with_axes()
def search(
    source: Source = None,
    *,
    axes: dict[str, Any],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW:HIGH",
            help="Choose a number, such as cache_ratio=0.05:0.5, or a parameter of a"
            " policy, such as cache.decay=0.5:0.99. May be repeated.",
        ),
    ] = None,
    objectives: Annotated[
        str,
        typer.Option(
            "--objective",
            "--objectives",
            metavar="METRIC,…",
            help="What is to be best; several metrics give a Pareto front.",
        ),
    ] = "tpot_s",
    trials: Annotated[
        int, typer.Option(metavar="N", min=1, help="Runs that are proposed.")
    ] = 60,
    halving: Annotated[
        bool,
        typer.Option(
            "--halving", help="Replay few steps first, and the best third for longer."
        ),
    ] = False,
    store: Store = None,
    jobs: Jobs = None,
    cluster: Cluster = None,
    table: Table = None,
    as_json: AsJson = False,
) -> None:
    """Search for the best policy parameters, memory and machine with Optuna.

    Options with several values are choices, --over gives ranges.

    \b
    Examples:
      moesim search q.parquet --policies greedy,fiddler --over cache_ratio=0.05:0.5 --objectives tpot_s,gpu_bytes
      moesim search q.parquet --policy on-demand --cache lfu --over cache.decay=0.5:0.99 --halving
    """
    from moesim.cli.progress import bar
    from moesim.reporting.tables import aligned
    from moesim.reporting.text import save_table
    from moesim.sweeps.search import search as search_for

    check_places(folder=store, files=[table], inputs=[source])
    (trace,) = _single(sources(source, axes))
    with bar("searching", 1.0) as show:
        searched = search_for(
            trace,
            over=dict(map(_range, over or [])),
            objectives=objectives.split(","),
            trials=trials,
            halving=halving,
            store=store,
            jobs=jobs,
            cluster=cluster,
            progress=show,
            **{name: _value(values) for name, values in axes.items()},
        )
    if table is not None:
        save_table(searched, table)
    if as_json:
        print(searched.to_json(orient="records", indent=2))
        return
    shown = searched.drop(columns="digest").head(SHOWN).round(6)
    rows = [list(map(str, row)) for row in shown.itertuples(index=False, name=None)]
    print("\n".join(aligned([list(map(str, shown.columns)), *rows])))
    best = int(searched["best"].sum())
    print(f"\nbest: {best} of {len(searched)} runs that were replayed in full")
    output.print_written([store, table])


def _single(source: Any) -> list[Any]:
    """The one trace or file to search on.

    Raises:
        typer.BadParameter: several.
    """
    named = source if isinstance(source, list) else [source]
    if len(named) != 1:
        raise typer.BadParameter("expected one trace", param_hint="--traces")
    return named


def _value(values: Any) -> Any:
    """A single value is no choice."""
    return values[0] if len(values) == 1 else list(values)


def _range(text: str) -> tuple[str, tuple[float, float]]:
    """Parse ``cache_ratio=0.05:0.5``; whole numbers stay whole.

    Raises:
        typer.BadParameter: it is no range.
    """
    name, _, ends = text.partition("=")
    low, _, high = ends.partition(":")
    try:
        return name.strip().replace("-", "_"), (_number(low), _number(high))
    except ValueError:
        raise typer.BadParameter(
            f"expected NAME=LOW:HIGH such as cache_ratio=0.05:0.5, got {text!r}",
            param_hint="--over",
        ) from None


def _number(text: str) -> float:
    return int(text) if text.strip().isdecimal() else float(text)
