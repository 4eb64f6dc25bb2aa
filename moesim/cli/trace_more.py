"""`moesim trace check`, `export`, `synth` and `check-residency`; hooked into the
command line by `add_commands`.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import options

ImportMap = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="OURS=THEIRS,…",
        help="Columns of a plain table, such as pos=position,experts=e*.",
        show_default=False,
    ),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help=(
            "First tokens of every sequence that are prompt, where the file does not"
            " say."
        ),
    ),
]
ImportBatch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="B",
        min=1,
        help="Sequences behind each other in router logits.",
    ),
]


def import_options(
    columns: str | None, prompt_tokens: int | None, batch: int | None
) -> dict[str, str]:
    """What `moesim.traces.importers.import_trace` takes as options, of what was
    given.
    """
    given = {"map": columns, "prompt_tokens": prompt_tokens, "batch": batch}
    return {name: str(value) for name, value in given.items() if value is not None}


def add_commands(app: typer.Typer) -> None:
    """Register the commands with the ``trace`` group; those it has already are left
    alone.
    """
    known = {command.name for command in app.registered_commands}
    for name, function, text in (
        ("check", check, "Say whether a trace can be trusted."),
        ("export", export, "Write a trace in another layout."),
        ("synth", synth, "Draw a synthetic trace."),
        (
            "check-residency",
            check_residency,
            "Compare a replay with the residency an engine recorded.",
        ),
    ):
        if name not in known:
            app.command(name, short_help=text)(function)


def check(trace: options.TraceFile, as_json: options.AsJson = False) -> None:
    """Say in plain words what speaks against trusting a trace; exit code 1 if results
    would mislead.

    \b
    Example:
      moesim trace check trace.parquet
    """
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.quality_checks import check_quality

    found = check_quality(open_trace(trace))
    grave = any(finding.grave for finding in found)
    if as_json:
        rows = [
            {"kind": one.kind, "grave": one.grave, "text": one.text} for one in found
        ]
        print(
            json.dumps(
                {"trace": str(trace), "trusted": not grave, "findings": rows}, indent=2
            )
        )
    else:
        for one in found:
            print(f"{'warning' if one.grave else 'note'}: {one.text}")
        print(
            "do not trust results of this trace"
            if grave
            else "nothing speaks against this trace"
        )
    if grave:
        raise typer.Exit(1)


def export(
    trace: options.TraceFile,
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The file to write.", show_default=False),
    ],
    layout: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help="csv, oracle-general (libCacheSim) or statistics.",
            show_default=False,
        ),
    ],
) -> None:
    """Write a trace in the layout of another tool.

    \b
    Examples:
      moesim trace export trace.parquet trace.oracleGeneral --to oracle-general
      moesim trace export trace.parquet trace.csv --to csv
    """
    options.check_places(files=[target], inputs=[trace])
    from moesim.cli.progress import bar
    from moesim.traces.exporters import export_trace
    from moesim.traces.format.reader import open_trace

    with bar("exporting") as show:
        count = export_trace(open_trace(trace), target, layout, progress=show)
    print(f"wrote {target}: {count:,} records")


def synth(
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The trace to write.", show_default=False),
    ],
    tokens: Annotated[
        float,
        typer.Option(
            metavar="N",
            min=1,
            max=1e12,
            help="Tokens in all, such as 1e6.",
            show_default=False,
        ),
    ],
    like: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="A real trace to resemble.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME|WORDS", help="A model instead (see: list models)."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="With --shape: weight format. Default: bf16."
        ),
    ] = None,
    skew: Annotated[
        float | None,
        typer.Option(min=0, max=5, help="With --shape: Zipf exponent. Default: 0.8."),
    ] = None,
    reuse: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.99,
            help="With --shape: overlap of adjacent tokens. Default: 0.3.",
        ),
    ] = None,
    dependence: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="With --shape: of adjacent layers. Default: 0."
        ),
    ] = None,
    drift: Annotated[
        float | None,
        typer.Option(
            min=0, max=5, help="With --shape: wandering popularity. Default: 0."
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --shape: prompt tokens per sequence. Default: 0."
        ),
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=0, help="With --shape: generated tokens. Default: 512."),
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Draw a trace with the statistics of a real one (--like), or with stated ones
    (--shape).

    \b
    Examples:
      moesim trace synth long.parquet --like real.parquet --tokens 1e6
      moesim trace synth new.parquet --shape qwen3-235b-a22b --tokens 1e4 --skew 1 --reuse 0.4
    """
    stated_words = {
        "skew": skew,
        "reuse": reuse,
        "dependence": dependence,
        "drift": drift,
        "prompt": prompt,
        "generated": generated,
    }
    stated_words = {
        name: value for name, value in stated_words.items() if value is not None
    }
    if (like is None) == (shape is None):
        raise typer.BadParameter("expected either --like TRACE or --shape MODEL")
    if like is not None and (
        doubled := [*stated_words, *(["weights"] if weights else [])]
    ):
        raise typer.BadParameter(
            f"--{doubled[0]} states what --like measures; drop one of them"
        )
    options.check_places(files=[target], inputs=[like])
    from moesim.cli.progress import bar
    from moesim.traces.format.reader import open_trace
    from moesim.traces.models import model_shape
    from moesim.traces.synthetic import generate as synthetic

    if like is not None:
        from moesim.traces.synthetic.fit import fit

        model = fit(open_trace(like))
    else:
        model = synthetic.stated(
            model_shape(str(shape), weights or "bf16"),
            seed=seed,
            **stated_words,  # type: ignore[arg-type]
        )
    with bar("drawing") as show:
        rows = synthetic.synthesise(
            model, target, tokens=int(tokens), seed=seed, progress=show
        )
    print(
        f"wrote {target}: {rows:,} rows, {int(tokens):,} tokens; synthetic, and it"
        " says so"
    )


def check_residency(
    trace: options.TraceFile,
    cache_bytes: Annotated[
        int,
        typer.Option(
            "--cache",
            metavar="SIZE",
            parser=options.size_bytes,
            help="The engine's expert cache.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        str, typer.Option(help="Cache policy to compare with (see: list cache).")
    ] = "lru",
    as_json: options.AsJson = False,
) -> None:
    """Replay a trace imported from route_trace v1 and compare every access with the
    residency its engine recorded.

    \b
    Example:
      moesim trace check-residency trace.parquet --cache 3000MiB
    """
    from moesim.analysis.residency import check_residency as compare

    found = compare(trace, cache_bytes=cache_bytes, cache=policy)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    for name, counts in found.phases.items():
        if not counts.accesses:
            continue
        print(
            f"{name}: {counts.accesses:,} accesses, {counts.share:.2%} agree;"
            f" hits {counts.engine_hits / counts.accesses:.1%} in the engine,"
            f" {counts.replay_hits / counts.accesses:.1%} in the replay"
        )
        if counts.only_engine or counts.only_replay:
            print(
                f"  resident in the engine only: {counts.only_engine:,}, of which"
                f" {counts.prefetched:,} prefetched; in the replay only:"
                f" {counts.only_replay:,}"
            )
        if counts.dropped:
            print(
                f"note: {counts.dropped:,} accesses that the engine dropped are"
                " left out",
                file=sys.stderr,
            )
    print(f"first difference: {found.first}" if found.first else "no difference")
