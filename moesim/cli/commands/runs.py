"""`moesim replay` and `run`: one trace, one policy, one machine, simulated or real."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moesim.base.options import (
    PAGES,
    PICTURES,
    TIMELINES,
    JsonOptions,
    PageOptions,
    file_option,
    folder_option,
    input_option,
)
from moesim.base.text import visible_lines
from moesim.cli import output
from moesim.cli.options import check_installed, from_dataclass
from moesim.runs.config import MeasuredConfig, RunConfig
from moesim.runs.result import FILES

if TYPE_CHECKING:
    from moesim.runs.measured import MeasuredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(PageOptions):
    """What `moesim replay` is asked beside the run itself."""

    out: Path | None = folder_option(
        "Write the run's tables and figures there.", *FILES
    )
    png: Path | None = file_option(
        "Draw what every lane did in a step in the middle.", *PICTURES
    )
    html: Path | None = file_option(
        "Write a page: every lane at any moment, which expert was where.", *PAGES
    )
    perfetto: Path | None = file_option(
        "Write a timeline, with every run, for ui.perfetto.dev.", *TIMELINES
    )


@from_dataclass()
def replay(config: RunConfig, options: ReplayOptions) -> None:
    """Replay a trace through a policy on a machine, and say what it was worth.

    \b
    Examples:
      moesim replay q.parquet --policy greedy
      moesim replay q.parquet --policy greedy --cache lfu:decay=0.9 --gpu-memory 8GiB
      moesim replay q.parquet --policy fiddler --hw hw.toml --html run.html --perfetto run.json.gz
      moesim replay --config run/run.json --batch 4
    """
    from moesim.questions.replay import run_answer
    from moesim.runs.replay import replay as replay_trace
    from moesim.runs.replay import share_of
    from moesim.runs.setup import opened

    # Opened once, for the bar and for the replay.
    config, _ = opened(config)
    with output.bar(config.policy, 1.0) as show:
        run = replay_trace(
            config,
            out=options.out,
            perfetto=options.perfetto,
            # A page is drawn from the timeline; figures alone need none in memory.
            keep=options.html is not None or options.png is not None,
            bounded=True,
            progress=share_of(config, show),
        )
    written = [options.out, options.perfetto]
    output.present(run_answer(run), options, more=written)


NOT_VERIFIED = 1
"""Exit code for logits that differ from the plain model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(JsonOptions):
    """What `moesim run` is asked beside the run itself."""

    prompts: Path | None = input_option(
        "Texts separated by blank lines, or one per line; or a data set, .jsonl, .csv,"
        " .tsv or .parquet.",
        needs=("model",),
    )
    out: Path | None = folder_option(
        "Write the run's tables and figures there.", *FILES
    )
    perfetto: Path | None = file_option(
        "Write a timeline for ui.perfetto.dev, the same run simulated below it.",
        *TIMELINES,
    )


@from_dataclass(
    MeasuredConfig,
    # One accelerator is not split, and nothing simulates.
    without=["gpu_split", "engine", "arrivals", "slo"],
)
def run(config: MeasuredConfig, options: RunOptions) -> None:
    """Run real experts on this machine: a live model, or the routing of a trace with
    random weights.

    \b
    Examples:
      moesim run --model tiny --prompts prompts.txt --policy greedy --cache lru --prefetch residual --verify
      moesim run q.parquet --shape qwen3-30b-a3b/4 --policy greedy --cache-ratio 0.25 --host-memory 2GiB --out run
      moesim run q.parquet --policy greedy --cache-ratio 0.25 --out monday
    """
    # Importing torch takes seconds, and an error should not.
    check_installed("torch")
    _check(config, options)

    output.quiet_libraries()
    measured = _measured(config, options)
    if options.as_json:
        print(json.dumps(measured.to_json(), indent=2))
    else:
        _print(measured)
        output.print_written([options.out, options.perfetto])
        output.print_notes(measured.warnings)
    # The results are printed all the same: they show what differs.
    verification = measured.verification
    if verification is not None and not verification.passed:
        print(
            "error: the logits differ by more than rounding explains", file=sys.stderr
        )
        raise typer.Exit(NOT_VERIFIED)


def _measured(config: MeasuredConfig, options: RunOptions) -> "MeasuredRun":
    """Run the trace of a configuration, or its model on texts."""
    from moesim.runs import live, measured
    from moesim.runtime.text import read_prompts

    with output.bars("store", "running") as (building, running):
        # How many forward passes there will be is unknown: texts end when they end.
        running(0, None)
        keywords: dict[str, Any] = {
            "out": options.out,
            "perfetto": options.perfetto,
            "building": lambda done: building(done.records, done.total_records),
            "progress": lambda info: running(info.step + 1, None),
        }
        if config.model is None:
            return measured.run_trace(config, **keywords)
        texts = read_prompts(options.prompts or "")
        return live.run_live(config, texts, **keywords)


def _check(config: MeasuredConfig, options: RunOptions) -> None:
    """Refuse what cannot be run, before torch is imported.

    Raises:
        typer.BadParameter: naming the option.
    """
    if (config.trace is None) == (config.model is None):
        raise typer.BadParameter(
            "expected either a TRACE or --model, one of them", param_hint="TRACE"
        )
    if config.model is not None and options.prompts is None:
        raise typer.BadParameter(
            "expected a file with prompts beside --model", param_hint="--prompts"
        )
    # Without the hint a user would not know where such a file comes from.
    residual = config.residual
    if isinstance(residual, str | Path) and not Path(residual).is_file():
        raise typer.BadParameter(
            f"{residual}: no such file (see: moesim record --help)",
            param_hint="--residual",
        )


def _print(measured: "MeasuredRun") -> None:
    from moesim.base.units import format_bytes
    from moesim.questions.replay import run_answer

    # The routing of a trace makes no texts.
    for number, text in enumerate(measured.texts or []):
        # A model may say anything, to the terminal too.
        print(f"--- {number}\n{visible_lines(text)}")
    print(run_answer(measured).text())

    startup = measured.startup
    print(
        f"\nstart-up: ready after {startup['ready_s']:.2f} s: non-expert weights"
        f" {startup['dense_s']:.2f} s, experts {startup['experts_s']:.2f} s"
        f" ({format_bytes(startup['experts_bytes'])} read); before that the store took"
        f" {startup['store_s']:.2f} s"
    )
    # A trace without prefill has no first token.
    if "first_token_s" in startup:
        prompt_s = startup["first_token_s"] - startup["ready_s"]
        print(
            f"first token: after {startup['first_token_s']:.2f} s, {prompt_s:.2f} s of"
            " them the prompt"
        )
    if "steady_token_s" in startup:
        print(
            f"steady state: {1e3 * startup['steady_token_s']:.1f} ms for a decode step"
            " (median of the second half); the first half took"
            f" {startup['settling_s']:.2f} s longer"
        )
    if measured.peak_bytes is not None:
        print(f"memory: {format_bytes(measured.peak_bytes)} at most")

    verification = measured.verification
    if verification is not None:
        result = "equal" if verification.passed else "DIFFERENT"
        print(
            f"verify: {result}: largest difference of {verification.logits:,} logits"
            f" {verification.largest:.3g}, tolerance {verification.tolerance:.3g}"
        )
