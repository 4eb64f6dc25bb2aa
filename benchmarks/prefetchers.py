"""Every system with and without its prefetcher: who gains, who loses, and by what.

Traces without predictions get drawn ones of stated accuracy first (`moesim trace
predict`). Cells that are already in the results are not computed again, so a run may be
stopped and taken up::

    python -m benchmarks.prefetchers prepare INPUTS --shared DIR
    python -m benchmarks.prefetchers run INPUTS cells.jsonl --hw PROFILE
    python -m benchmarks.prefetchers page cells.jsonl PAGE --commit REV
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.policies.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

    from moesim.runs.result import Run

PREFETCHERS = {
    "dali": "residual:size=4",
    "dali-hybrimoe": "next-gate:size=4",
    "hybrimoe": "impact",
    "hybrimoe-released": "hybrimoe-released",
    "smoe": "partial-hidden",
    "mixtral-offloading": "next-gate:size=2",
    "pre-gated": "pre-gated",
    "moe-infinity": "activation-matrix",
    "adapmoe": "first-missing",
    "edgemoe": "statistical:preceding=2",
    "moe-lightning": "moe-lightning",
    "krasis": "whole-layer:phase=prefill",
    "deepspeed": "whole-layer",
}
"""Of systems that have one: their own, or the one that their note names."""

TRACES = {
    "mixtral_8x7b_like": None,
    "qwen3_30b_a3b_top6": ("qwen3-30b-a3b", "q4_k_m"),
    "olmoe_1b_7b_decode299": ("olmoe-1b-7b", "bf16"),
    "kimi_linear_48b_a3b_decode300": ("kimi-linear-48b-a3b", "bf16"),
    "deepseek_v2_lite_like": None,
    "gpt_oss_20b": ("gpt-oss-20b", "mxfp4"),
}
"""Shared traces; of foreign ones the model and weight format."""

SINGLE = {
    "qwen3_30b_a3b_top6",
    "olmoe_1b_7b_decode299",
    "kimi_linear_48b_a3b_decode300",
}
"""Traces with too few sequences for batches."""

LONGER = {"moe-infinity": 6}
"""Systems that learn from sequences that have ended, and how many times as many forward
passes they get.
"""

RECALL = (0.8, 0.7, 0.62)
RESIDUAL = 0.86
RATIOS = (0.25, 0.5, 0.75)
BATCHES = (1, 8, 32)
SLOWER = 0.02
"""Share by which a run must take longer with its prefetcher to need a reason."""


class Cell(NamedTuple):
    """One replay."""

    trace: str
    system: str
    prefetch: str
    ratio: float
    batch: int


def prepare(inputs: Path, shared: Path) -> None:
    """Write every trace with predictions of the stated accuracy, and scores."""
    from moesim.traces.importers import import_trace
    from moesim.traces.models import model_shape
    from moesim.traces.synthetic.predict import predict

    inputs.mkdir(parents=True, exist_ok=True)
    for name, model in TRACES.items():
        source = shared / f"{name}.parquet"
        target = inputs / f"{name}.parquet"
        if target.exists() or not source.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            if model is not None:
                ours = Path(folder) / "ours.parquet"
                shape = model_shape(model[0], weights=model[1])
                source = import_trace(source, ours, shape=shape).path
            predict(source, target, recall=RECALL, residual=RESIDUAL, scores=True)


def cells(inputs: Path) -> Iterable[Cell]:
    """All replays for which there is a trace, those of one trace together."""
    for trace in TRACES:
        if not (inputs / f"{trace}.parquet").exists():
            continue
        batches = BATCHES[:1] if trace in SINGLE else BATCHES
        for system, batch, ratio in product(PREFETCHERS, batches, RATIOS):
            for prefetch in (PREFETCHERS[system], "none"):
                yield Cell(trace, system, prefetch, ratio, batch)


def measured(cell: Cell, inputs: Path, hw: str, steps: int) -> dict[str, Any]:
    """Replay one cell and return its times and their parts, or why it cannot run."""
    from moesim import replay
    from moesim.base.errors import TraceError

    try:
        run = replay(
            inputs / f"{cell.trace}.parquet",
            cell.system,
            prefetch=cell.prefetch,
            hw=hw,
            cache_ratio=cell.ratio,
            batch=cell.batch,
            steps=steps * LONGER.get(cell.system, 1),
        )
    except TraceError as error:
        return {**cell._asdict(), "hw": Path(hw).stem, "refused": str(error)}
    keys = ("ttft_s", "tpot_s", "makespan_s", "hit_rate_active", "prefetch_accuracy")
    return {
        **cell._asdict(),
        "hw": Path(hw).stem,
        "steps": run.metrics["steps"],
        **{key: run.metrics[key] for key in keys},
        **parts(run),
    }


def parts(run: Run) -> dict[str, float]:
    """Seconds per forward pass that explain a run: of links, lanes and waits."""
    metrics = run.metrics
    frame: pd.DataFrame = run.timeline.frame()
    frame["seconds"] = frame["end_s"] - frame["start_s"]
    by_kind = frame.groupby("kind", observed=True)["seconds"].sum()
    seconds = {
        "fetch": by_kind.get("fetch", 0.0),
        "guesses": by_kind.get("prefetch", 0.0),
        "replace": by_kind.get("replace", 0.0),
        "dense": by_kind.get("dense", 0.0),
        "cpu": metrics["busy_s"]["cpu"],
        "waits": sum(metrics["stall_s"].values()),
    }
    accuracy = metrics["prefetch_accuracy"]
    seconds["wrong"] = seconds["guesses"] * (1 - (1 if accuracy is None else accuracy))
    return {name: float(value) / metrics["steps"] for name, value in seconds.items()}


def run(inputs: Path, results: Path, hw: str, steps: int, jobs: int) -> None:
    """Replay what the results lack, and append it cell by cell."""
    done = {key(row) for row in rows(results)} if results.exists() else set()
    todo = [cell for cell in cells(inputs) if cell not in done]
    print(f"{len(done)} cells are there, {len(todo)} to do")
    with ProcessPoolExecutor(jobs) as pool, results.open("a") as file:
        pending = [pool.submit(measured, cell, inputs, hw, steps) for cell in todo]
        for future in as_completed(pending):
            file.write(json.dumps(future.result()) + "\n")
            file.flush()


def rows(results: Path) -> list[dict[str, Any]]:
    """The cells of a results file."""
    return [json.loads(line) for line in results.read_text().splitlines()]


def key(row: dict[str, Any]) -> Cell:
    """Which cell a row is of."""
    return Cell(*(row[name] for name in Cell._fields))


# -- the page --------------------------------------------------------------------------

HEAD = """# Systems with and without their prefetchers

Simulated on `{hw}` at commit {commit} by `python -m benchmarks.prefetchers`: {pairs}
pairs of replays of the shared traces, prompt and decode steps, {steps} forward passes
at most; cache ratios {ratios}; batches {batches}, and 1 alone where a trace has few
sequences. Scores and predictions are drawn: recall {recall} one, two and three layers
ahead, {residual} with residuals ([how](../how-to/synthetic-traces.md)). A ratio is the
time with the prefetcher over that without; below 1 it helps. Replays by trace:
{traces}.

| system | prefetcher | pairs | median | best | worst | slower by > 2 % |
|---|---|--:|--:|--:|--:|--:|
"""

REFUSED = "refused, as the trace has no combine weights."

LEARNS = """\
{system} learns from sequences that have ended, so it got up to {steps} forward passes.
It prefetched in {busy} of {pairs} pairs; a trace of one sequence teaches it nothing."""

LOSSES = """
## Where it is slower by more than 2 %: {slower} of {pairs}

Milliseconds per forward pass, with minus without: *waits* of compute lanes for copies,
*fetches* on demand on the link, the *CPU*, and *dense* parts and gates that predictions
compute. *Wrong*: the link's milliseconds for prefetches that nobody used. *Hits*:
points of hit rate gained.

| system | trace | batch | cache | ratio | ms without | ms more | waits \
| fetches | CPU | dense | wrong | hits | reason |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|
"""


class Pair(NamedTuple):
    """A cell with its prefetcher, and the same without."""

    cell: Cell
    given: dict[str, Any]
    without: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Makespan with the prefetcher over that without."""
        return float(self.given["makespan_s"] / self.without["makespan_s"])

    def more(self, part: str) -> float:
        """Milliseconds per forward pass that a part takes more with the prefetcher."""
        return 1e3 * float(self.given[part] - self.without[part])

    def reason(self) -> str:
        """What the measured parts say about a loss."""
        added_ms = 1e3 * (self.given["makespan_s"] - self.without["makespan_s"])
        added_ms /= self.given["steps"]
        lost_hits = self.without["hit_rate_active"] - self.given["hit_rate_active"]
        found = []
        if 1e3 * self.given["wrong"] > added_ms / 4:
            found.append("link busy with wrong guesses")
        # What was evicted for a right guess may be missed as soon.
        used_ms = 1e3 * (self.given["guesses"] - self.given["wrong"])
        if used_ms + self.more("fetch") > added_ms / 4:
            found.append("right guesses save fewer fetches than they take")
        if lost_hits > 0.01:
            found.append("hits evicted")
        if self.more("waits") > added_ms / 4:
            found.append("waits for copies")
        if self.more("dense") > added_ms / 4:
            found.append("predictions computed")
        if self.more("cpu") > added_ms / 4:
            found.append("more on the CPU")
        if resolve(self.cell.prefetch, "prefetch").late == "wait":
            found.append("layers wait for all their copies")
        return ", ".join(found) or "no part stands out"


def pairs(table: Sequence[dict[str, Any]]) -> list[Pair]:
    """Cells that have been replayed both ways."""
    by_cell = {key(row): row for row in table}
    found = []
    for cell, row in by_cell.items():
        other = by_cell.get(cell._replace(prefetch="none"))
        if cell.prefetch == "none" or other is None:
            continue
        if "refused" not in row and "refused" not in other:
            found.append(Pair(cell, row, other))
    order = {trace: n for n, trace in enumerate(TRACES)}
    systems = list(PREFETCHERS)
    return sorted(
        found,
        key=lambda pair: (
            systems.index(pair.cell.system),
            order[pair.cell.trace],
            pair.cell.batch,
            pair.cell.ratio,
        ),
    )


def page(results: Path, target: Path, commit: str) -> None:
    """Write the page: one row per system, then every loss with its parts."""
    table = rows(results)
    found = pairs(table)
    slower = [pair for pair in found if pair.ratio > 1 + SLOWER]
    counts = Counter(row["trace"] for row in table)
    lines = HEAD.format(
        hw=table[0]["hw"],
        commit=commit,
        pairs=len(found),
        steps=max(row.get("steps", 0) for row in table if row["system"] not in LONGER),
        ratios=", ".join(map(str, RATIOS)),
        batches=", ".join(map(str, BATCHES)),
        recall=", ".join(map(str, RECALL)),
        residual=RESIDUAL,
        traces=", ".join(f"{name} {count}" for name, count in counts.items()),
    ).splitlines()
    for system, prefetch in PREFETCHERS.items():
        ratios = [pair.ratio for pair in found if pair.cell.system == system]
        if not ratios:
            continue
        losses = sum(ratio > 1 + SLOWER for ratio in ratios)
        lines.append(
            f"| {system} | `{prefetch}` | {len(ratios)} |"
            f" {statistics.median(ratios):.3f} | {min(ratios):.3f} |"
            f" {max(ratios):.3f} | {losses} |"
        )
    for system in PREFETCHERS:
        refused = [row for row in table if row["system"] == system and "refused" in row]
        if refused:
            lines.append("")
            lines.append(f"{len(refused)} replays of {system}: {REFUSED}")
    for system in LONGER:
        given = [pair.given for pair in found if pair.cell.system == system]
        words = LEARNS.format(
            system=system,
            steps=max(row["steps"] for row in given),
            busy=sum(row["guesses"] > 0 for row in given),
            pairs=len(given),
        )
        lines += ["", *words.splitlines()]
    lines += LOSSES.format(slower=len(slower), pairs=len(found)).splitlines()
    for pair in slower:
        cell = pair.cell
        without_ms = 1e3 * pair.without["makespan_s"] / pair.without["steps"]
        hits = pair.given["hit_rate_active"] - pair.without["hit_rate_active"]
        lines.append(
            f"| {cell.system} | {cell.trace} | {cell.batch} | {cell.ratio} |"
            f" {pair.ratio:.2f} | {without_ms:.1f} |"
            f" {without_ms * (pair.ratio - 1):+.1f} | {pair.more('waits'):+.1f} |"
            f" {pair.more('fetch'):+.1f} | {pair.more('cpu'):+.1f} |"
            f" {pair.more('dense'):+.1f} | {1e3 * pair.given['wrong']:.1f} |"
            f" {100 * hits:+.1f} | {pair.reason()} |"
        )
    target.write_text("\n".join(lines) + "\n")
    print(f"wrote {target}: {len(slower)} of {len(found)} pairs are slower")


def main() -> None:
    """Prepare traces, replay the grid, or write its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("prepare")
    making.add_argument("inputs", type=Path)
    making.add_argument("--shared", type=Path, required=True)
    running = verbs.add_parser("run")
    running.add_argument("inputs", type=Path)
    running.add_argument("results", type=Path)
    running.add_argument("--hw", default="rtx3090-epyc7532")
    running.add_argument("--steps", type=int, default=24)
    running.add_argument("--jobs", type=int, default=2)
    writing = verbs.add_parser("page")
    writing.add_argument("results", type=Path)
    writing.add_argument("target", type=Path)
    writing.add_argument("--commit", required=True, help="that of the replays")
    chosen = parser.parse_args()
    if chosen.verb == "prepare":
        prepare(chosen.inputs, chosen.shared)
    elif chosen.verb == "run":
        run(chosen.inputs, chosen.results, chosen.hw, chosen.steps, chosen.jobs)
    else:
        page(chosen.results, chosen.target, chosen.commit)


if __name__ == "__main__":
    main()
