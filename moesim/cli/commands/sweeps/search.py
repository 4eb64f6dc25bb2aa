"""`moesim search`: the best run, where a grid is too large."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from moesim.base.options import option
from moesim.cli import output
from moesim.cli.commands.sweeps.sweep import ManyRunsOptions, sources
from moesim.cli.options import from_dataclass

SHOWN = 12
"""Proposals that a terminal shows; the table has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(ManyRunsOptions):
    """What is sought, and how long."""

    objectives: tuple[str, ...] = option(
        ("tpot_s",),
        "What is to be best; several metrics give a Pareto front.",
        metavar="METRIC",
        many=True,
    )
    trials: int = option(
        60, "Runs that are proposed.", kind=int, metavar="N", minimum=1
    )
    halving: bool = option(
        False, "Replay few steps first, and the best third for longer.", kind=bool
    )
    minutes: float | None = option(
        None,
        "A limit: proposals that do not fit are left out; with --store the next call"
        " goes on.",
        kind=float,
        metavar="M",
        minimum=0.0,
    )


@from_dataclass()
def search(
    axes: dict[str, Any],
    options: SearchOptions,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW:HIGH",
            help="Choose a number, such as cache_ratio=0.05:0.5, or a parameter of a"
            " policy, such as cache.decay=0.5:0.99. May be repeated.",
        ),
    ] = None,
) -> None:
    """Search for the best policy parameters, memory and machine with Optuna.

    Options with several values are choices, --over gives ranges.

    \b
    Examples:
      moesim search q.parquet --policies greedy,fiddler --over cache_ratio=0.05:0.5 --objectives tpot_s,gpu_bytes
      moesim search q.parquet --policy on-demand --cache lfu --over cache.decay=0.5:0.99 --halving
    """
    from moesim.cli.output import bar
    from moesim.questions.search import search as search_for
    from moesim.reporting.tables import aligned, save_table

    (trace,) = _single(sources(options.source, axes))
    with bar("searching", 1.0) as show:
        searched = search_for(
            trace,
            over=dict(map(_range, over or [])),
            objectives=options.objectives,
            trials=options.trials,
            halving=options.halving,
            minutes=options.minutes,
            store=options.store,
            jobs=options.jobs,
            cluster=options.cluster,
            progress=show,
            **{name: _value(values) for name, values in axes.items()},
        )
    if options.table is not None:
        save_table(searched, options.table)
    if options.as_json:
        print(searched.to_json(orient="records", indent=2))
        return
    shown = searched.drop(columns="digest").head(SHOWN).round(6)
    rows = [list(map(str, row)) for row in shown.itertuples(index=False, name=None)]
    print("\n".join(aligned([list(map(str, shown.columns)), *rows])))
    best = int(searched["best"].sum())
    print(f"\nbest: {best} of {len(searched)} runs that were replayed in full")
    if left_out := searched.attrs["left_out"]:
        print(f"left out: {left_out} of {options.trials} proposals")
    output.print_written([options.store, options.table])


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
