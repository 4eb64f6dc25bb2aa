"""The papers' headline ratios on other people's recordings of real routing.

    python -m benchmarks.recorded --shared DIR

One sequence at a time, or as many as the record's batch where a recording has enough:
48 decode steps behind the 64 that calibrations see. Predictions are drawn with the
papers' accuracies, as no recording has any. In brackets 95 % of the mean over
sequences, or batches of them, where there are several; what is drawn in the place of
these recordings, `moesim reproduce --all` tells.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
from scipy import stats

from moesim.evidence.reproduction.questions import questions, selected
from moesim.evidence.reproduction.workloads import CALIBRATION_SEED, Workload
from moesim.traces.importers import import_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.evidence.reproduction.questions import Question
    from moesim.evidence.reproduction.runs import RunSpec

EARLIER = 64
"""Tokens of a recorded text that only calibrations see."""
GENERATED = 48
"""Tokens of it behind these that runs decode."""

RECORDINGS = {
    "gpt_oss_20b": ("gpt_oss_20b", "gpt-oss-20b", "mxfp4", 8, 1),
    "gpt_oss_20b, batch 8": ("gpt_oss_20b", "gpt-oss-20b", "mxfp4", 4, 8),
    "qwen3_30b_a3b_top6": ("qwen3_30b_a3b_top6", "qwen3-30b-a3b", "q4_k_m", 1, 1),
    "olmoe_1b_7b_decode299": ("olmoe_1b_7b_decode299", "olmoe-1b-7b", "q4_k_m", 1, 1),
    "kimi_linear_48b_a3b_decode300": (
        *("kimi_linear_48b_a3b_decode300", "kimi-linear-48b-a3b", "q4_k_m"),
        *(1, 1),
    ),
}
"""Name -> file, model, weight format, groups of sequences, and sequences of each."""

_DALI = ["DALI", "abstract / 6.2", "speedup_avg"]
HEADLINES: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"of": _DALI, "where": {"phase": "decode", "baseline": name}},
            "qwen3-30b-a3b",
        )
        for name in ("llama.cpp", "KTransformers", "MoE-Lightning", "HybriMoE")
    ),
    (
        {
            "of": ["HybriMoE", "VI-B", "speedup_vs_kTransformers_avg"],
            "where": {"phase": "decode"},
        },
        "deepseek-v2-lite",
    ),
    ({"of": ["DAOP", "V-B/Fig10", "speedup_vs_Fiddler_avg"]}, "mixtral-8x7b"),
    (
        {
            "of": ["SMoE", "6.2/6.3", "tpot_reduction_vs_best_baseline"],
            "where": {"batch": 1, "setting": "S1"},
        },
        "deepseek-v2-lite",
    ),
]
"""Records, each with the model whose parameters the paper's system takes."""


@dataclass(frozen=True, slots=True)
class RecordedTexts(Workload):
    """Decode steps of recorded texts, in the place of drawn routing.

    Attributes:
        recorded: another's trace.
        group: which `sequences` of it, of those that are long enough.
    """

    recorded: Path = field(kw_only=True)
    group: int = field(default=0, kw_only=True)

    def calibration(self, sequences: int = 0) -> Workload:
        """What comes before in the same texts."""
        del sequences
        return replace(self.routing, seed=self.seed + CALIBRATION_SEED)

    def write_routing(self, target: Path) -> None:
        """Cut the texts out, in the order of the file."""
        calibrates = self.seed >= CALIBRATION_SEED
        first = 0 if calibrates else EARLIER
        last = EARLIER if calibrates else EARLIER + self.generated
        recording = ds.dataset(self.recorded)
        # Threads would give the texts in another order each time.
        texts = recording.to_table(columns=["seq_id", "step"]).group_by(
            "seq_id", use_threads=False
        )
        lengths = texts.aggregate([("step", "max")]).to_pylist()
        long = [each["seq_id"] for each in lengths if each["step_max"] >= last]
        begin = self.group * self.sequences
        step = ds.field("step")
        chosen = ds.field("seq_id").isin(long[begin : begin + self.sequences])
        # A prompt would make the first third unlike the rest.
        chosen &= (step >= first) & (step < last) & (ds.field("phase") == "decode")
        part = target.with_suffix(".part.parquet")
        pq.write_table(recording.to_table(filter=chosen), part)
        import_trace(part, target, shape=self.shape)
        part.unlink()


def on_recording(name: str, shared: Path, group: int, run: RunSpec) -> RunSpec:
    """The same run on recorded texts, with the predictions that its workload draws."""
    file, model, weights, _, sequences = RECORDINGS[name]
    drawn = run.workload
    texts = RecordedTexts(
        *(model, weights, 0, GENERATED, sequences),
        recall=drawn.recall,
        recall_at=drawn.recall_at,
        residual=drawn.residual,
        seed=drawn.seed,
        recorded=shared / f"{file}.parquet",
        group=group,
    )
    options = dict(run.options)
    if "batch" in options:
        options["batch"] = min(sequences, options["batch"])
    return replace(run, workload=texts, options=tuple(sorted(options.items())))


def headlines(shared: Path, name: str) -> list[list[Question]]:
    """Each headline asked of every group of a recording."""
    asked = questions()
    groups = range(RECORDINGS[name][3])
    found = []
    for described, model in HEADLINES:
        question = next(each for each in asked if selected(described, each.record))
        case = next(c for c in question.cases if c.run.workload.model == model)
        changes = [partial(on_recording, name, shared, group) for group in groups]
        cases = [
            replace(case, run=change(case.run), others=tuple(map(change, case.others)))
            for change in changes
        ]
        found.append([replace(question, cases=(each,)) for each in cases])
    return found


def mean_with_interval(figures: Sequence[float]) -> str:
    """The mean, with its 95 % interval in brackets where there are three or more."""
    text = f"{fmean(figures):.4g}"
    if len(figures) < 3:
        return text
    low, high = stats.t.interval(
        0.95, len(figures) - 1, fmean(figures), stats.sem(figures)
    )
    return f"{text} [{low:.4g}, {high:.4g}]"


def figures_on(shared: Path, name: str) -> dict[str, list[float]]:
    """By record, ours of each group of a recording."""
    with tempfile.TemporaryDirectory() as folder:
        asked = headlines(shared, name)
        runs = {run for of in asked for question in of for run in question.runs}
        outcomes = {run: run.do(Path(folder)) for run in sorted(runs, key=repr)}
        return {
            of[0].record.label: [
                figure
                for question in of
                if (figure := question.figure(outcomes)) is not None
            ]
            for of in asked
        }


def main() -> None:
    """Print a table with a column for each recording."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorded")
    parser.add_argument("--shared", type=Path, required=True, metavar="DIR")
    shared: Path = parser.parse_args().shared
    columns = {
        name: figures_on(shared, name)
        for name, (file, *_) in RECORDINGS.items()
        if (shared / f"{file}.parquet").is_file()
    }
    for question in questions():
        label = question.record.label
        for name, column in columns.items():
            if label in column:
                ours = mean_with_interval(column[label])
                print(f"{label}: published {question.record.value}; {name} {ours}")


if __name__ == "__main__":
    main()
