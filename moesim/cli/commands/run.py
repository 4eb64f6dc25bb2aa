"""`moesim run`: real experts on this machine."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli import output
from moesim.cli.checks import check_installed, check_places, refuse_options
from moesim.cli.options import AsJson, RunFolder, from_dataclass
from moesim.runs.config import MeasuredConfig

if TYPE_CHECKING:
    from moesim.runs.measured import MeasuredRun
    from moesim.runtime.executor.trace_driven import Footprint

FOR_MODELS = ("prompt", "max_new_tokens", "temperature", "residual", "verify")
FOR_TRACES = ("shape", "distinct", "steps", "warm")
"""Options that mean something only in one of the two ways to run."""

NOT_VERIFIED = 1
"""Exit code for logits that differ from the plain model's."""


@from_dataclass(
    MeasuredConfig,
    # One accelerator is not split, real times need no noise, and nothing simulates.
    without=["gpu_split", "noise_seed", "engine", "arrivals", "slo"],
)
def run(
    context: typer.Context,
    *,
    config: MeasuredConfig,
    prompt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts separated by blank lines, one per line, or .jsonl.",
        ),
    ] = None,
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
    out: RunFolder = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Write a timeline for ui.perfetto.dev, the same run simulated below it."
            ),
        ),
    ] = None,
    learn: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Improve this profile by the run. It is the run's own where it is"
                " there and --hw names none; else it is written anew."
            ),
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="With --learn: also write a profile that is not trusted."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run real experts on this machine: a live model, or the routing of a trace with
    random weights.

    \b
    Examples:
      moesim run --model tiny --prompt prompts.txt --policy greedy --cache lru --prefetch residual --verify
      moesim run q.parquet --shape qwen3-30b-a3b/4 --policy greedy --cache-ratio 0.25 --host-memory 2GiB --out run
      moesim run q.parquet --policy greedy --cache-ratio 0.25 --learn hw.toml
    """
    # Importing torch takes seconds, and an error should not.
    check_installed("torch")
    _check_options(context, config, prompt)
    if force and learn is None:
        raise typer.BadParameter("it is meant for --learn", param_hint="--force")
    if learn is not None and config.hw is None and learn.is_file():
        config = config.replaced(hw=learn)
    from moesim.base.files import ScratchFolder
    from moesim.cli.output import bars, quiet_libraries
    from moesim.runs.measured import compare_startups
    from moesim.runs.result import run_files, save_run
    from moesim.runtime.text import read_prompts

    check_places(
        folder=out,
        files=[*run_files(out), perfetto, learn],
        inputs=[config.trace, prompt, config.residual],
    )
    quiet_libraries()
    # What is learned from a run is read from its folder.
    with ExitStack() as scratch:
        folder = out
        if learn is not None and out is None:
            folder = scratch.enter_context(ScratchFolder())
        with bars("store", "running") as (building, running):
            # How many forward passes there will be is unknown: texts end when they end.
            running(0, None)
            texts = [] if prompt is None else read_prompts(prompt)
            progress = {
                "building": building,
                "progress": lambda info: running(info.step + 1, None),
            }
            # Only this run is written; those of --startup are for their times.
            measured = _run(config, texts, out=folder, perfetto=perfetto, **progress)
            save_run(measured, folder)
            startups = None
            if startup:
                # One forward pass tells when the first token comes; one batch is one
                # pass.
                least = config.replaced(steps=1)
                if config.model is not None:
                    least = config.replaced(max_new_tokens=0, verify=False)
                startups = compare_startups(
                    measured,
                    least,
                    lambda each: _run(each, texts[: config.batch], **progress),
                )

        if as_json:
            facts = measured.to_json()
            if startups is not None:
                facts["startups"] = startups
            print(json.dumps(facts, indent=2))
        else:
            _print(measured, startups)
            output.print_written([out, perfetto])
            output.print_notes(measured.warnings)
        # The results are printed all the same: they show what differs.
        verification = getattr(measured, "verification", None)
        if verification is not None and not verification.passed:
            print(
                "error: the logits differ by more than rounding explains",
                file=sys.stderr,
            )
            raise typer.Exit(NOT_VERIFIED)
        if learn is not None:
            assert folder is not None
            _learn(folder, learn, force=force, quiet=as_json)


def _learn(folder: Path, profile: Path, *, force: bool, quiet: bool) -> None:
    """Improve a profile by the run in a folder.

    Args:
        folder: of the run.
        profile: is improved, or written anew.
        force: write it also if it cannot be trusted.
        quiet: print nothing but errors.

    Raises:
        ProfileError: it cannot be trusted.
    """
    from moesim.evidence.validation.learning import learn_from

    learned = learn_from([folder], profile, force=force)
    if not quiet:
        print("\n".join(["", *learned.lines()]))
        output.print_written([profile])


def _check_options(
    context: typer.Context, config: MeasuredConfig, prompt: Path | None
) -> None:
    """Refuse options that contradict each other, before torch is imported.

    Raises:
        typer.BadParameter: naming one of them.
    """
    if (config.trace is None) == (config.model is None):
        raise typer.BadParameter(
            "expected either a TRACE or --model, one of them", param_hint="TRACE"
        )
    if config.model is not None and prompt is None:
        raise typer.BadParameter(
            "expected a file with prompts beside --model", param_hint="--prompt"
        )
    if config.trace is None:
        refuse_options(context, FOR_TRACES, "a TRACE")
    else:
        refuse_options(context, FOR_MODELS, "--model")
    # Without the hint a user would not know where such a file comes from.
    residual = config.residual
    if isinstance(residual, str | Path) and not Path(residual).is_file():
        raise typer.BadParameter(
            f"{residual}: no such file (see: moesim record --help)",
            param_hint="--residual",
        )


def _run(
    config: MeasuredConfig, texts: Sequence[str | bytes], **keywords: Any
) -> "MeasuredRun":
    """Run the trace of a configuration, or its model on texts."""
    from moesim.runs import live, measured

    if config.model is None:
        return measured.run_trace(config, **keywords)
    return live.run_live(config, texts, **keywords)


def _print(measured: "MeasuredRun", startups: dict[str, Any] | None) -> None:
    from moesim.base.sizes import format_bytes
    from moesim.questions import replay as report

    # The routing of a trace makes no texts.
    for number, text in enumerate(getattr(measured, "texts", [])):
        print(f"--- {number}\n{_without_controls(text)}")
    print(report.run_text(measured))
    if measured.bound is not None:
        print(f"bound: {measured.bound.words(measured.metrics['makespan_s'])}")

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
    if measured.footprint is not None:
        print(_memory_text(measured.footprint))
    for name, times in (startups or {}).items():
        print(f"start-up, {name}: {_startup_text(times)}")

    verification = getattr(measured, "verification", None)
    if verification is not None:
        result = "equal" if verification.passed else "DIFFERENT"
        print(
            f"verify: {result}: largest difference of {verification.logits:,} logits"
            f" {verification.largest:.3g}, tolerance {verification.tolerance:.3g}"
        )


def _startup_text(times: dict[str, float | None]) -> str:
    if times["ready_s"] is None:
        return "impossible here"
    return (
        f"ready after {times['ready_s']:.2f} s, first token after"
        f" {times['first_token_s']:.2f} s"
    )


def _without_controls(text: str) -> str:
    """Spell out what would control a terminal: a model may generate anything."""
    # Tabs and line feeds stay: texts are laid out with them.
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text
    )


def _memory_text(footprint: "Footprint") -> str:
    from moesim.base.sizes import format_bytes

    parts = {
        "experts in host memory": footprint.host_slots,
        "slots": footprint.device_slots,
        "non-expert weights": footprint.dense,
        "keys and values": footprint.kept,
        "before the run": footprint.before,
        "to work with": footprint.working,
    }
    summands = ", ".join(
        f"{name} {format_bytes(count)}" for name, count in parts.items() if count
    )
    return (
        f"memory: {format_bytes(footprint.peak)} at most, budget"
        f" {format_bytes(footprint.budget)} ({summands})"
    )
