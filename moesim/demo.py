"""`make demo`: from this very PC to a comparison of policies, in one go and on real
input.

Measures the machine, records what the shipped model's gates say while it reads and
writes text it was not trained on, and replays that routing on the model of the machine.
Nothing is downloaded; nothing is made up: where experts are given another model's size,
the text says so.
"""

# ruff: noqa: T201 - a demonstration prints
from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from moesim.cli import guarded
from moesim.cli.measure import default_residual
from moesim.cli.progress import bar, only_ours
from moesim.reporting import text as report
from moesim.reporting.comparison_page import write_comparison
from moesim.reporting.figures import comparison_figure, save
from moesim.runs.replay import MemoryOptions
from moesim.runs.sweep import compare
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
    """Profile, record, replay twice, and say where everything is."""
    begin_s = time.perf_counter()
    only_ours()
    out.mkdir(parents=True, exist_ok=True)
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
    write_perfetto(
        out / "grown.json",
        {name: runs[name].timeline for name in ("greedy", "greedy+lru+residual")},
    )

    _title(f"Done in {time.perf_counter() - begin_s:.0f} s")
    found = [
        (hw, "this machine, measured"),
        (trace.path, "the routing of the shipped model"),
        (
            out / "grown",
            "timeline, accesses and steps of every run (Parquet), run.json beside them",
        ),
        (out / "tiny.png", "the first comparison as a picture"),
        (
            page,
            "the second as a page: who is fastest, which expert was where, and when",
        ),
        (out / "grown.json", "two runs as a timeline; open it in ui.perfetto.dev"),
    ]
    width = max(len(str(place)) for place, _ in found)
    for place, what in found:
        print(f"{place!s:<{width}}  {what}")


def _measure(path: Path) -> Path:
    """Measure this PC quickly."""
    from moesim.runtime.measure.profile import (  # noqa: PLC0415 - torch takes seconds, and --hw can do without
        measure,
    )

    _title("1. Measure this PC")
    with bar("measuring", 1.0) as show:
        profile = measure(
            None, path, quick=True, progress=lambda _what, done: show(done)
        )
    print(profile.description)
    return path


def _record(path: Path) -> Trace:
    """Let the shipped model read and continue text from the evaluation part of its
    corpus.
    """
    from moesim.runtime.record.record import load_model, record  # noqa: PLC0415
    from moesim.runtime.record.residual import Residual  # noqa: PLC0415
    from moesim.runtime.text import corpus  # noqa: PLC0415 - as above

    _title("2. Record a routing trace from the model that ships with moesim")
    model = load_model("tiny")
    residual = Residual.load(default_residual("tiny"))
    texts = corpus.prompts("evaluation", PROMPTS, PROMPT_BYTES, seed=0)
    with bar("recording", 1.0) as show:
        done = record(
            model,
            texts,
            path,
            max_new_tokens=NEW_TOKENS,
            residual=residual,
            temperature=TEMPERATURE,
            progress=lambda tokens, expected: show(tokens / expected),
            measure_overhead=False,
        )
    print(
        f"{done.sequences} texts it was not trained on: {done.prompt_tokens} prompt and"
        f" {done.decode_tokens} generated tokens, {done.tokens_per_s:.0f} tokens/s"
    )
    return open_trace(path)


def _compare(trace: Trace, out: Path, hw: Path) -> tuple[pd.DataFrame, dict[str, Run]]:
    """Replay under all policies."""
    memory = MemoryOptions(cache_ratio=CACHE_RATIO)
    with bar("replaying", 1.0) as show:
        return compare(trace, POLICIES, out=out, hw=hw, memory=memory, progress=show)


def _grown(trace: Trace, path: Path) -> Trace:
    """The same rows under a header that borrows another model's sizes."""
    own = trace.shape
    large = model_shape(BORROWED)
    shape = dataclasses.replace(
        large,
        name=f"tiny with {BORROWED} experts",
        layers=own.layers,
        experts=own.experts,
        top_k=own.top_k,
        expert_bytes=large.expert_bytes[: own.layers],
        other_bytes=large.other_bytes * own.layers // large.layers,
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
