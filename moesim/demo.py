"""The demonstration behind `make demo`: what moesim is for, in a few minutes.

It measures this PC; records the gates of the shipped model while it reads and writes
text that it was not trained on; runs that routing for real, with real copies and
products, and simulates the same runs beside them; and compares policies for a model
that people run, on a packaged PC with a graphics card and on this one. Nothing is
downloaded and nothing is made up: routing that was drawn is called so.
"""

# ruff: noqa: T201 - a demonstration prints
from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.cli.commands.record import default_residual
from moesim.cli.errors import guarded
from moesim.cli.output import bar, print_notes, quiet_libraries
from moesim.questions.compare import compare
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.timeline.perfetto import write_perfetto

if TYPE_CHECKING:
    from moesim.runs.result import Run

REAL_POLICIES = ("all-cpu+none", "on-demand+lru", "greedy+lru")
REAL_SHAPE = "olmoe-1b-7b/4"
"""Sizes of the experts of real runs: a quarter of OLMoE's, so that work outweighs the
handing over of work.
"""
REAL_STEPS = 12
REPETITIONS = 2
POLICIES = ("all-cpu", "llama.cpp", "fiddler", "on-demand", "greedy", "greedy+belady")
MODEL = "gpt-oss-20b-like"
PACKAGED = "rtx4060ti"
PACKAGED_MEMORY = "8GiB"
PROMPTS = 4
PROMPT_BYTES = 192
NEW_TOKENS = 64
TEMPERATURE = 1.0
"""Sampled, not greedy: a small model that decodes greedily falls into loops, and loops
flatter every cache.
"""
CACHE_RATIO = 0.25


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(prog="python -m moesim.demo", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="where results go",
    )
    parser.add_argument(
        "--hw", type=Path, metavar="FILE", help="use this profile instead of measuring"
    )
    arguments = parser.parse_args()
    guarded(lambda: demonstrate(arguments.out, arguments.hw))


def demonstrate(out: Path, hw: Path | None = None) -> None:
    """Measure, record, run for real, simulate, compare, and name all results.

    Args:
        out: folder of the results.
        hw: hardware profile; None measures this machine.
    """
    begin_s = time.perf_counter()
    quiet_libraries()
    out.mkdir(parents=True, exist_ok=True)
    # Measuring takes seconds and wants a quiet machine; a profile at hand does as well.
    hw = hw or _measure(out / "hw.toml")
    trace = _record(out / "trace.parquet")
    _run_and_simulate(trace, hw)

    _title(f"4. A model that people run, {MODEL}, on a PC with an RTX 4060 Ti")
    packaged, page = _compare(out / "packaged", hw=PACKAGED, gpu_memory=PACKAGED_MEMORY)
    print("\nThe page shows why: which expert was where, and what every lane did.")

    _title("5. The same model on this PC")
    _compare(out / "own", hw=hw, cache_ratio=CACHE_RATIO)
    # Two runs side by side are what a timeline viewer can show at a time.
    timelines = {name: packaged[name].timeline for name in ("on-demand", "greedy")}
    write_perfetto(out / "packaged.json", timelines)

    _title(f"Done in {time.perf_counter() - begin_s:.0f} s")
    results = {
        hw: "this machine, measured",
        trace.path: "the routing of the shipped model",
        page: "who is fastest on the packaged PC, which expert was where, and when",
        out / "packaged.json": "two of its runs; open it in ui.perfetto.dev",
        out / "own": "this PC: timeline, accesses and steps of every run (Parquet)",
    }
    # Where everything is, is what remains of a demonstration.
    width = max(len(str(place)) for place in results)
    for place, description in results.items():
        print(f"{place!s:<{width}}  {description}")


def _run_and_simulate(trace: Trace, hw: Path) -> None:
    """Run the routing for real under three policies, simulate the same, compare."""
    # As below.
    from moesim.evidence.validation.grid import validate  # noqa: PLC0415

    _title("3. Run it for real, and simulate the same runs")
    print(
        "Real copies and products, with experts of a quarter of OLMoE's size; simulated"
        " from the quick\nmeasurement above (`moesim calibrate` learns from runs and"
        " comes closer).\n"
    )
    with bar("running", 1.0) as show:
        validation = validate(
            [trace],
            policies=REAL_POLICIES,
            cache_ratios=[CACHE_RATIO],
            batches=[1],
            hw=hw,
            shapes=[REAL_SHAPE],
            steps=REAL_STEPS,
            repetitions=REPETITIONS,
            replications=0,
            progress=lambda _cell, done: show(done),
        )
    print("policy         hits  simulated  per token  simulated   error")
    for cell in validation.cells:
        measured_s = cell.measured_value("tpot_s") or 0.0
        predicted_s = cell.predicted["tpot_s"]
        hits = cell.measured_value("hits") or 0
        print(
            f"{cell.coordinates.policy:13} {hits:5.0f} {cell.predicted['hits']:10.0f}"
            f" {1e3 * measured_s:7.2f} ms {1e3 * predicted_s:7.2f} ms"
            f" {predicted_s / measured_s - 1:+7.1%}"
        )
    # Such as that the machine had other work.
    print_notes(validation.warnings)


def _measure(path: Path) -> Path:
    """Measure this PC quickly."""
    # Importing torch takes seconds, which a demonstration with --hw need not wait for.
    from moesim.runtime.measure.profile import measure  # noqa: PLC0415

    _title("1. Measure this PC")
    with bar("measuring", 1.0) as show:
        profile = measure(
            None, path, quick=True, progress=lambda _part, done: show(done)
        )
    print(profile.description)
    return path


def _record(path: Path) -> Trace:
    """Let the shipped model read and continue text from the evaluation part of its
    corpus.
    """
    # As above.
    from moesim.runtime import text as corpus  # noqa: PLC0415
    from moesim.runtime.record.calibration import Residual  # noqa: PLC0415
    from moesim.runtime.record.record import load_model, record  # noqa: PLC0415

    _title("2. Record a routing trace from the model that ships with moesim")
    model = load_model("tiny")
    residual = Residual.load(default_residual("tiny"))
    texts = corpus.prompts("evaluation", PROMPTS, PROMPT_BYTES, seed=0)
    with bar("recording", 1.0) as show:
        recording = record(
            model,
            texts,
            path,
            new_tokens=NEW_TOKENS,
            residual=residual,
            temperature=TEMPERATURE,
            progress=lambda tokens, expected: show(tokens / expected),
            # It would run the model a second time.
        )
    print(
        f"{recording.sequences} texts it was not trained on: {recording.prompt_tokens}"
        f" prompt and {recording.decode_tokens} generated tokens,"
        f" {recording.tokens_per_s:.0f} tokens/s"
    )
    return open_trace(path)


def _compare(out: Path, **machine: Any) -> tuple[dict[str, Run], Path]:
    """Replay the model under all policies; their runs, and a page about them."""
    with bar("replaying", 1.0) as show:
        compared = compare(MODEL, POLICIES, out=out, progress=show, **machine)
    answer = compared.answer()
    print(answer.text())
    answer.figure().save(out.with_suffix(".png"))
    return compared.runs, answer.write(out.with_suffix(".html"))


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


if __name__ == "__main__":
    main()
