"""The demonstration behind `make demo`: from this PC to a comparison of policies.

It measures the machine, records the gates of the shipped model while it reads and
writes text that it was not trained on, and replays that routing on the model of the
machine. Nothing is downloaded and nothing is made up: where experts are given another
model's size, the text says so.
"""

# ruff: noqa: T201 - a demonstration prints
from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from moesim.cli.commands.record import default_residual
from moesim.cli.errors import guarded
from moesim.cli.progress import bar, quiet_libraries
from moesim.reporting import text as report
from moesim.reporting.comparison_page import write_comparison
from moesim.reporting.figures import comparison_figure, save
from moesim.sweeps.comparison import compare
from moesim.traces.files import written_beside
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import METADATA_KEY
from moesim.traces.models import model_shape
from moesim.traces.timeline.perfetto import write_perfetto

if TYPE_CHECKING:
    import pandas as pd

    from moesim.runs.result import Run

POLICIES = (
    "all-cpu",
    "on-demand",
    "static-threshold",
    "greedy",
    "greedy+lfu",
    "greedy+lru+residual",
    "greedy+belady",
)
PROMPTS = 4
PROMPT_BYTES = 192
NEW_TOKENS = 64
TEMPERATURE = 1.0
"""Sampled, not greedy: a small model that decodes greedily falls into loops, and loops
flatter every cache.
"""
CACHE_RATIO = 0.25
BORROWED = "qwen3-30b-a3b"
"""The model whose expert sizes the second comparison takes."""


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
    """Profile, record, replay twice, and name all results.

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

    _title(f"3. Replay it under {len(POLICIES)} policies: the tiny model as it is")
    print(
        "Its experts are so small that handing work over costs more than the work;"
        " caches hardly matter.\n"
    )
    table, runs = _compare(trace, out / "tiny", hw)
    print(report.comparison_text(table, runs))
    save(comparison_figure(table, runs), out / "tiny.png")

    _title(
        f"4. The same routing, as if its experts were as large as those of {BORROWED}"
    )
    print(
        "Routing is the tiny model's, sizes are borrowed: what offloading feels like on"
        " this PC.\n"
    )
    grown = _grown(trace, out / "grown.parquet")
    table, runs = _compare(grown, out / "grown", hw)
    print(report.comparison_text(table, runs))
    page = write_comparison(table, runs, out / "grown.html")
    # Two runs side by side are what a timeline viewer can show at a time.
    timelines = {
        name: runs[name].timeline for name in ("greedy", "greedy+lru+residual")
    }
    write_perfetto(out / "grown.json", timelines)

    _title(f"Done in {time.perf_counter() - begin_s:.0f} s")
    results = {
        hw: "this machine, measured",
        trace.path: "the routing of the shipped model",
        out / "grown": (
            "timeline, accesses and steps of every run (Parquet), run.json beside them"
        ),
        out / "tiny.png": "the first comparison as a picture",
        page: (
            "the second as a page: who is fastest, which expert was where, and when"
        ),
        out / "grown.json": "two runs as a timeline; open it in ui.perfetto.dev",
    }
    # Where everything is, is what remains of a demonstration.
    width = max(len(str(place)) for place in results)
    for place, description in results.items():
        print(f"{place!s:<{width}}  {description}")


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
    from moesim.runtime.record.record import load_model, record  # noqa: PLC0415
    from moesim.runtime.record.residual import Residual  # noqa: PLC0415
    from moesim.runtime.text import corpus  # noqa: PLC0415

    _title("2. Record a routing trace from the model that ships with moesim")
    model = load_model("tiny")
    residual = Residual.load(default_residual("tiny"))
    texts = corpus.prompts("evaluation", PROMPTS, PROMPT_BYTES, seed=0)
    with bar("recording", 1.0) as show:
        recording = record(
            model,
            texts,
            path,
            max_new_tokens=NEW_TOKENS,
            residual=residual,
            temperature=TEMPERATURE,
            progress=lambda tokens, expected: show(tokens / expected),
            # It would run the model a second time.
            measure_overhead=False,
        )
    print(
        f"{recording.sequences} texts it was not trained on: {recording.prompt_tokens}"
        f" prompt and {recording.decode_tokens} generated tokens,"
        f" {recording.tokens_per_s:.0f} tokens/s"
    )
    return open_trace(path)


def _compare(trace: Trace, out: Path, hw: Path) -> tuple[pd.DataFrame, dict[str, Run]]:
    """Replay under all policies."""
    with bar("replaying", 1.0) as show:
        return compare(
            trace, POLICIES, out=out, hw=hw, cache_ratio=CACHE_RATIO, progress=show
        )


def _grown(trace: Trace, path: Path) -> Trace:
    """Write the same rows under a header that borrows another model's sizes."""
    small = trace.shape
    large = model_shape(BORROWED)
    shape = dataclasses.replace(
        large,
        name=f"tiny with {BORROWED} experts",
        layers=small.layers,
        experts=small.experts,
        top_k=small.top_k,
        expert_bytes=large.expert_bytes[: small.layers],
        # Fewer layers have fewer non-expert weights.
        other_bytes=large.other_bytes * small.layers // large.layers,
    )
    header = dataclasses.replace(trace.header, shape=shape)
    table = pq.read_table(trace.path).replace_schema_metadata(
        {METADATA_KEY: header.to_json()}
    )
    with written_beside(path) as part:
        pq.write_table(table, part, compression="zstd")
    return open_trace(path)


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


if __name__ == "__main__":
    main()
