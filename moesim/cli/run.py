"""`moesim run` and `moesim store build`: real experts on this machine."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.runs.measured import MeasuredRun
    from moesim.runtime.store.footprint import Footprint

_FOR_MODELS = ("prompt", "max_new_tokens", "temperature", "residual", "verify")
_FOR_TRACES = ("shape", "distinct", "steps", "warm")

store_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Experts on disk, ready to be read one by one.",
)

ModelSpec = Annotated[
    str | None,
    typer.Option(
        metavar="tiny|DIR", help="The shipped model or a Hugging Face folder."
    ),
]
StoreDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help=(
            "Expert store; built where there is none. Default: the user's cache folder."
        ),
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        parser=options.one_of("float32", "bfloat16", "float16"),
        help=(
            "float32, bfloat16 or float16. Default: the model's own; float32 for tiny"
            " and TRACE, bfloat16 on CUDA."
        ),
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[/N]",
        help="Sizes of the experts, such as qwen3-30b-a3b/4. Default: the trace's.",
    ),
]
Distinct = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Different experts in a random store; others share them in turn.",
    ),
]


@partial(options.with_setting, without=("gpu_split",), hw=options.ThisMachine)
def run(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="Routing to be forced; without it, a model runs.",
            show_default=False,
        ),
    ] = None,
    policy: options.Policy = "greedy",
    *,
    setting: options.Setting,
    shape: Shape = None,
    distinct: Distinct = None,
    model: ModelSpec = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts separated by blank lines, one per line, or .jsonl.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens to generate per prompt.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 decodes greedily.")
    ] = 0.0,
    residual: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Residual vectors for --prefetch residual (see: record).",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare all logits with the plain model's."),
    ] = False,
    startup: Annotated[
        bool,
        typer.Option(
            "--startup",
            help=(
                "Also compare two ways to start: experts on demand, or all of them"
                " first."
            ),
        ),
    ] = False,
    store: StoreDir = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the run's tables and figures there."),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Write a timeline for ui.perfetto.dev, the same run simulated below it."
            ),
        ),
    ] = None,
    own_cores: Annotated[
        bool,
        typer.Option(
            "--own-cores",
            help="Give the host accelerator a core of its own; for idle machines.",
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run real experts on this machine: a live model, or the routing of a trace with
    random weights.

    \b
    Examples:
      moesim run --model tiny --prompt prompts.txt --policy greedy --cache lru --prefetch residual --verify
      moesim run q.parquet --shape qwen3-30b-a3b/4 --policy greedy --cache-ratio 0.25 --host-memory 2GiB --out run
    """
    if (trace is None) == (model is None):
        raise typer.BadParameter(
            "expected either a TRACE or --model, one of them", param_hint="TRACE"
        )
    if model is not None and prompt is None:
        raise typer.BadParameter(
            "expected a file with prompts beside --model", param_hint="--prompt"
        )
    options.refuse(
        context,
        _FOR_TRACES if trace is None else _FOR_MODELS,
        "a TRACE" if trace is None else "--model",
    )
    if residual is not None and not residual.is_file():
        raise typer.BadParameter(
            f"{residual}: no such file (see: moesim record --help)",
            param_hint="--residual",
        )
    from moesim.cli.progress import bars, only_ours
    from moesim.runs import live as live_runs
    from moesim.runs import measured as runs
    from moesim.runs.result import run_files, save_run
    from moesim.runtime.text.datasets import read_prompts

    options.check_places(
        folder=out, files=[*run_files(out), perfetto], inputs=[trace, prompt, residual]
    )

    only_ours()
    names = (
        "cache",
        "prefetch",
        "routing",
        "host_cache",
        "hw",
        "memory",
        "batch",
        "seed",
        "artefacts",
    )
    given: dict[str, Any] = setting.keywords(*names) | {
        "store": store,
        "dtype": dtype,
        "own_cores": own_cores,
    }
    with bars("store", "running") as (building, running):
        running(0, None)
        given |= {
            "building": building,
            "progress": lambda info: running(info.step + 1, None),
        }
        begin: Callable[..., MeasuredRun]
        least: dict[str, Any]
        if trace is not None:
            given |= {
                "shape": shape,
                "distinct": distinct,
                "steps": setting.steps,
                "warm": setting.warm,
            }
            begin = partial(runs.run_trace, trace, policy)
            least = {"steps": 1}
        else:
            assert model is not None
            assert prompt is not None
            texts = read_prompts(prompt)
            given |= {
                "prompts": texts,
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
            }
            given |= {"residual": residual, "verify": verify}
            begin = partial(live_runs.run_live, model, policy=policy)
            least = {
                "prompts": texts[: setting.batch],
                "max_new_tokens": 0,
                "verify": False,
            }
        found = begin(**given, out=out, perfetto=perfetto)
        save_run(found, out)
        table = None
        if startup:
            again = lambda memory: begin(**given | least | {"memory": memory})  # noqa: E731 - ends here
            table = runs.compare_startups(found, setting.memory, again)
    _print(found, table, out, perfetto, as_json=as_json)
    verdict = getattr(found, "verdict", None)
    if verdict is not None and not verdict.passed:
        print(
            "error: the logits differ by more than rounding explains", file=sys.stderr
        )
        raise typer.Exit(1)


@store_app.command("build", short_help="Write a model's experts into a store.")
def build(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="tiny, or a Hugging Face folder.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The store's folder.", show_default=False),
    ],
    dtype: Dtype = None,
) -> None:
    """Write every expert of a model into one file, aligned and checksummed. A build
    that was stopped continues; a store that is there already is read and compared with
    its checksums.

    \b
    Example:
      moesim store build ~/models/olmoe --out /mnt/nvme/olmoe
    """
    options.check_places(folder=out)
    from moesim.cli.progress import bar
    from moesim.runtime.models.tiny import tiny_dir
    from moesim.runtime.store.build import build_store
    from moesim.runtime.store.index import INDEX_NAME
    from moesim.traces.sizes import format_bytes

    folder, dtype = (
        (tiny_dir(), dtype or "float32") if model == "tiny" else (Path(model), dtype)
    )
    was_there = (out / INDEX_NAME).is_file()
    with bar("checking" if was_there else "building", 1.0) as show:
        tell = lambda done: show(done.done_bytes / done.total_bytes)  # noqa: E731 - told twice
        store = build_store(folder, out, dtype=dtype, progress=tell)
        if was_there:
            store.verify(tell)
    with store:
        print(
            f"{len(store.index.offsets):,} experts of {store.index.model},"
            f" {format_bytes(store.index.data_bytes)}"
        )
        print(f"direct reads: {'yes' if store.direct else f'no: {store.reason}'}")
    print(f"{out} was there; every checksum is right" if was_there else f"wrote {out}")


def add_commands(app: typer.Typer) -> None:
    """Make `run` and `store` known to the command line."""
    app.command("run", short_help="Run real experts on this machine.")(run)
    app.add_typer(store_app, name="store", short_help="Build expert stores.")


def _print(
    found: "MeasuredRun",
    table: dict[str, Any] | None,
    out: Path | None,
    perfetto: Path | None,
    *,
    as_json: bool,
) -> None:
    from moesim.reporting import text as report
    from moesim.traces.sizes import format_bytes

    if as_json:
        print(
            json.dumps(
                found.to_json() | ({} if table is None else {"startups": table}),
                indent=2,
            )
        )
        return
    for one, text in enumerate(getattr(found, "texts", [])):
        print(f"--- {one}\n{_harmless(text)}")
    print(report.run_text(found))
    ready = found.startup
    first = (
        f", first token after {ready['first_token_s']:.2f} s"
        if "first_token_s" in ready
        else ""
    )
    print(
        f"\nstart-up: non-expert weights {ready['dense_s']:.2f} s, experts"
        f" {ready['experts_s']:.2f} s ({format_bytes(ready['experts_bytes'])}"
        f" read){first}; before that the store took {ready['store_s']:.2f} s"
    )
    if found.footprint is not None:
        print(_memory_words(found.footprint))
    for name, row in (table or {}).items():
        when = "ready after {ready_s:.2f} s, first token after {first_token_s:.2f} s".format
        print(
            f"start-up, {name}:"
            f" {'impossible here' if row['ready_s'] is None else when(**row)}"
        )
    verdict = getattr(found, "verdict", None)
    if verdict is not None:
        words = "equal" if verdict.passed else "DIFFERENT"
        print(
            f"verify: {words}: largest difference of {verdict.logits:,} logits"
            f" {verdict.largest:.3g}, tolerance {verdict.tolerance:.3g}"
        )
    for place in [*([out] if out else []), *([perfetto] if perfetto else [])]:
        print(f"wrote {place}")
    for warning in found.warnings:
        print(f"note: {warning}", file=sys.stderr)


def _harmless(text: str) -> str:
    """Spell out what would control a terminal: a model may say anything."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text
    )


def _memory_words(took: "Footprint") -> str:
    from moesim.traces.sizes import format_bytes

    parts = {
        "experts in host memory": took.host_slots,
        "slots": took.device_slots,
        "non-expert weights": took.dense,
        "keys and values": took.kept,
        "before the run": took.before,
        "to work with": took.working,
    }
    bill = ", ".join(
        f"{name} {format_bytes(count)}" for name, count in parts.items() if count
    )
    return (
        f"memory: {format_bytes(took.peak)} at most, budget {format_bytes(took.budget)}"
        f" ({bill})"
    )
