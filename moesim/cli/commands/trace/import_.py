"""`moesim trace import`: a trace of a foreign file.

The module is not called ``import``, which is a keyword.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson

if TYPE_CHECKING:
    from moesim.traces.importers import ImportSummary


def import_(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC…",
            help="A foreign routing trace; or tables, one for each MoE layer.",
            show_default=False,
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
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Weight format that decides the bytes. Default: bf16.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="OURS=THEIRS,…",
            help=(
                "Columns of a table, or keys of JSON lines, such as"
                " pos=position,experts=e*."
            ),
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help=(
                "First tokens of every sequence that are prompt, where the file does"
                " not say."
            ),
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="B",
            min=1,
            help="Sequences behind each other in router logits.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What else the importer of this layout asks for; may be repeated.",
            show_default=False,
        ),
    ] = None,
    drop_incomplete: Annotated[
        bool,
        typer.Option(
            "--drop-incomplete",
            help="Leave out a last line or token that was cut off.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a trace of a foreign file. The file does not tell the sizes of its model, so
    --shape does.

    A moesim trace whose rows are out of order is sorted; it needs no --shape.

    \b
    Examples:
      moesim trace import routing.parquet q.parquet --shape qwen3-30b-a3b --weights q4_k_m
      moesim trace import toy.parquet t.parquet --shape layers=1,experts=6,top_k=1,expert_bytes=1MiB
      moesim trace import layer*.parquet q.parquet --shape qwen3-30b-a3b --map experts=topk
      moesim trace import unsorted.parquet sorted.parquet
    """
    check_places(files=[target], inputs=sources)
    if weights is not None and "expert_bytes" in (shape or ""):
        raise typer.BadParameter(
            f"expected one of both, got {weights} beside expert_bytes in --shape, which"
            " says the bytes already",
            param_hint="--weights",
        )
    from moesim.cli.output import bar
    from moesim.traces.importers import import_trace
    from moesim.traces.models import model_shape

    # A sorted moesim trace keeps its own shape.
    model = None if shape is None else model_shape(shape, weights or "bf16")
    options = import_options(columns, prompt_tokens, batch, option or [])
    with bar("importing") as show:
        imported = import_trace(
            sources,
            target,
            shape=model,
            progress=show,
            options=options,
            drop_incomplete=drop_incomplete,
        )
    if as_json:
        facts = {
            "trace": str(imported.path),
            "importer": imported.importer,
            "rows": imported.rows,
            "sequences": imported.sequences,
            "model": imported.shape.name,
            "expert_bytes": list(imported.shape.expert_sizes),
            "columns": imported.columns,
            "notes": imported.notes,
        }
        print(json.dumps(facts, indent=2))
        return
    # Bytes that the file or the shape itself tells are of no format.
    is_own = model is None or imported.shape.expert_bytes != model.expert_bytes
    is_own = is_own or "expert_bytes" in str(shape)
    assumed = "; taken as bf16, --weights says otherwise" if weights is None else ""
    _print(imported, "" if is_own else assumed or f" ({imported.shape.dtype})")


def import_options(
    columns: str | None,
    prompt_tokens: int | None,
    batch: int | None,
    others: list[str],
) -> dict[str, str]:
    """The options that `moesim.traces.importers.import_trace` takes, without those that
    were not given.

    Raises:
        typer.BadParameter: another option that is not NAME=VALUE.
    """
    named = dict(word.partition("=")[::2] for word in others)
    if not all(named) or not all(named.values()):
        raise typer.BadParameter(
            f"expected NAME=VALUE, got {', '.join(others)}", param_hint="--option"
        )
    options = {"map": columns, "prompt_tokens": prompt_tokens, "batch": batch}
    # Importers read options as texts, since files name some of them too.
    given = {name: str(value) for name, value in options.items() if value is not None}
    return given | named


def _print(imported: "ImportSummary", weights: str) -> None:
    """Print what was made.

    Args:
        imported: the summary.
        weights: what is to be said of the weight format.
    """
    from moesim.base.sizes import format_sizes

    shape = imported.shape
    # Layers of mixed quantisation have experts of several sizes.
    sizes = format_sizes(shape.expert_sizes)
    print(
        f"{imported.rows:,} rows of {imported.sequences:,}"
        f" sequence{'s' * (imported.sequences != 1)}; {shape.name}: {shape.layers} MoE"
        f" layers x {shape.experts} experts, top {shape.top_k}, {sizes} each{weights}"
    )
    output.print_notes(imported.notes)
    output.print_written([imported.path])
