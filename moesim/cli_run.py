"""`moesim run` and `moesim store build`: real experts on this machine."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim import cli_options as options

if TYPE_CHECKING:
    from moesim.runs import MeasuredRun
    from runtime.footprint import Footprint

_FOR_MODELS = ("prompt", "max_new_tokens", "temperature", "residual", "verify")
_FOR_TRACES = ("shape", "distinct", "steps", "warm")

store_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Experts on disk, ready to be read one by one."
)

ModelSpec = Annotated[str | None, typer.Option(metavar="tiny|DIR", help="The shipped model or a Hugging Face folder.")]
StoreDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Expert store; built where there is none. Default: the user's cache folder."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        parser=options.one_of("float32", "bfloat16", "float16"),
        help="float32, bfloat16 or float16; a good one if not given.",
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(metavar="NAME[/N]", help="Sizes of the experts, such as qwen3-30b-a3b/4. Default: the trace's."),
]
Distinct = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Different experts in a random store; others share them in turn.")
]


@options.with_setting
def run(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="[TRACE]", help="Routing to be forced; without it, a model runs.", show_default=False),
    ] = None,
    policy: options.Policy = "greedy",
    *,
    setting: options.Setting,
    shape: Shape = None,
    distinct: Distinct = None,
    model: ModelSpec = None,
    prompt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts separated by blank lines, one per line, or .jsonl.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens to generate per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 decodes greedily.")] = 0.0,
    residual: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Residual vectors for --prefetch residual (see: record).")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all logits with the plain model's.")] = False,
    startup: Annotated[
        bool, typer.Option("--startup", help="Also compare two ways to start: experts on demand, or all of them first.")
    ] = False,
    store: StoreDir = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the run's tables and figures there.")] = None,
    perfetto: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline for ui.perfetto.dev.")] = None,
    own_cores: Annotated[
        bool, typer.Option("--own-cores", help="Give the host accelerator a core of its own; for idle machines.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run real experts on this machine: a live model, or the routing of a trace with random weights.

    \b
    Examples:
      moesim run --model tiny --prompt prompts.txt --policy greedy --cache lru --prefetch residual --verify
      moesim run q.parquet --shape qwen3-30b-a3b/4 --policy greedy --cache-ratio 0.25 --host-memory 2GiB --out run
    """
    if (trace is None) == (model is None):
        raise typer.BadParameter("expected either a TRACE or --model, one of them", param_hint="TRACE")
    if model is not None and prompt is None:
        raise typer.BadParameter("expected a file with prompts beside --model", param_hint="--prompt")
    options.refuse(context, _FOR_TRACES if trace is None else _FOR_MODELS, "a TRACE" if trace is None else "--model")
    if residual is not None and not residual.is_file():
        raise typer.BadParameter(f"{residual}: no such file (see: moesim record --help)", param_hint="--residual")
    from moesim.progress import bar, only_ours
    from moesim.report import run_files

    options.check_places(folder=out, files=[*run_files(out), perfetto], inputs=[trace, prompt, residual])

    only_ours()
    names = ("cache", "prefetch", "routing", "host_cache", "hw", "memory", "batch", "seed", "artefacts")
    given: dict[str, Any] = setting.keywords(*names) | {"store": store, "dtype": dtype, "own_cores": own_cores}
    of_trace = {"shape": shape, "distinct": distinct, "steps": setting.steps, "warm": setting.warm}
    with bar("running") as show:
        given["progress"] = lambda info: show(info.step + 1)
        given["building"] = lambda done, _total: show(done)
        if trace is not None:
            found = _run_trace(trace, policy, given, **of_trace, out=out, perfetto=perfetto)
        else:
            assert model is not None
            assert prompt is not None
            found = _run_live(model, prompt, policy, given, max_new_tokens=max_new_tokens, temperature=temperature,
                              residual=residual, verify=verify, out=out, perfetto=perfetto)  # fmt: skip
        table = _compare_startups(trace, model, prompt, policy, given, of_trace) if startup else None
    _print(found, table, out, perfetto, as_json=as_json)
    verdict = getattr(found, "verdict", None)
    if verdict is not None and not verdict.passed:
        print("error: the logits differ by more than rounding explains", file=sys.stderr)
        raise typer.Exit(1)


@store_app.command("build", short_help="Write a model's experts into a store.")
def build(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="tiny, or a Hugging Face folder.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The store's folder.", show_default=False)],
    dtype: Dtype = None,
) -> None:
    """Write every expert of a model into one file, aligned and checksummed. A build that was stopped continues.

    \b
    Example:
      moesim store build ~/models/olmoe --out /mnt/nvme/olmoe
    """
    options.check_places(folder=out)
    from moesim.progress import bar
    from runtime.store_build import build_store
    from runtime.tiny import tiny_dir
    from traces.sizes import format_bytes

    folder = tiny_dir() if model == "tiny" else Path(model)
    with bar("building", 1.0) as show:
        store = build_store(folder, out, dtype=dtype, progress=lambda done: show(done.done_bytes / done.total_bytes))
    with store:
        print(f"{len(store.index.offsets):,} experts of {store.index.model}, {format_bytes(store.index.data_bytes)}")
        print(f"direct reads: {'yes' if store.direct else f'no: {store.reason}'}")
    print(f"wrote {out}")


def add_commands(app: typer.Typer) -> None:
    """Make `run` and `store` known to the command line."""
    app.command("run", short_help="Run real experts on this machine.")(run)
    app.add_typer(store_app, name="store", short_help="Build expert stores.")


def _run_trace(trace: Path, policy: str, given: dict[str, Any], **more: Any) -> "MeasuredRun":
    from moesim import report, runs

    found = runs.run_trace(trace, policy, **given, **more)
    report.save_run(found, more["out"])
    return found


def _run_live(model: str, prompt: Path, policy: str, given: dict[str, Any], **more: Any) -> "MeasuredRun":
    from moesim import live_runs, report
    from runtime.record import read_prompts

    found = live_runs.run_live(model, read_prompts(prompt), policy, **given, **more)
    report.save_run(found, more["out"])
    return found


def _compare_startups(
    trace: Path | None,
    model: str | None,
    prompt: Path | None,
    policy: str,
    given: dict[str, Any],
    more: dict[str, Any],
) -> dict[str, Any]:
    from moesim import live_runs, runs
    from runtime.record import read_prompts

    if trace is not None:
        return runs.compare_startups(lambda **changed: runs.run_trace(trace, policy, **{**given, **more, **changed}))
    assert model is not None
    assert prompt is not None
    texts = read_prompts(prompt)[:1]
    return runs.compare_startups(
        lambda **changed: live_runs.run_live(model, texts, policy, max_new_tokens=0, **{**given, **changed})
    )


def _print(
    found: "MeasuredRun", table: dict[str, Any] | None, out: Path | None, perfetto: Path | None, *, as_json: bool
) -> None:
    from moesim import report

    if as_json:
        print(json.dumps(found.to_json() | ({} if table is None else {"startups": table}), indent=2))
        return
    for one, text in enumerate(getattr(found, "texts", [])):
        print(f"--- {one}\n{text}")
    print(report.run_text(found))
    ready = found.startup
    first = f", first token after {ready['first_token_s']:.2f} s" if "first_token_s" in ready else ""
    print(
        f"\nstart-up: non-expert weights {ready['dense_s']:.2f} s, experts {ready['experts_s']:.2f} s"
        f" ({ready['experts_bytes'] / 2**20:,.0f} MiB read){first}"
    )
    if found.footprint is not None:
        print(_memory_words(found.footprint))
    for name, row in (table or {}).items():
        print(f"start-up, {name}: ready after {row['ready_s']:.2f} s, first token after {row['first_token_s']:.2f} s")
    verdict = getattr(found, "verdict", None)
    if verdict is not None:
        words = "equal" if verdict.passed else "DIFFERENT"
        print(
            f"verify: {words}: largest difference of {verdict.logits:,} logits {verdict.largest:.3g},"
            f" tolerance {verdict.tolerance:.3g}"
        )
    for place in [*([out] if out else []), *([perfetto] if perfetto else [])]:
        print(f"wrote {place}")
    for warning in found.warnings:
        print(f"note: {warning}", file=sys.stderr)


def _memory_words(took: "Footprint") -> str:
    from traces.sizes import format_bytes

    parts = {
        "experts in host memory": took.host_slots, "slots": took.device_slots, "non-expert weights": took.dense,
        "keys and values": took.kept, "before the run": took.before, "to work with": took.working,
    }  # fmt: skip
    bill = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
    return f"memory: {format_bytes(took.peak)} at most, budget {format_bytes(took.budget)} ({bill})"
