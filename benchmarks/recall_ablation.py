"""What each part of routing recall is worth, on the traces that it was tuned on::

    python -m benchmarks.recall_ablation --shared DIR

Prints the mean difference of the logarithm of time, over two machines, to
`hybrimoe-schedule+decayed-frequency`; of runs that verify four drafted tokens each, to
`hybrimoe-schedule+lfru`. Below 0 is faster. ``--change PART`` takes some of the rows.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.judge_recall import HELD_BACK
from benchmarks.recorded import RecordedTexts

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace

MACHINES = ("rtx4060ti", "rtx5060ti-ryzen9900x")
RATIOS = (0.1, 0.25, 0.5)
LOW = 2
"""So many of the ratios are summed up as memory that is short."""

CHANGES = {
    "nothing": {},
    "no streams": {"prefetch": "none"},
    **{
        part: {"cache": f"recall:{part}"}
        for part in ("history=1", "recall=0", "recall=1", "margin=9", "margin=0")
    },
    **{part: {"cache": f"recall:{part}"} for part in ("short=0", "short=1")},
    "planning free": {
        "cache": "recall:planning_us=0,expert_ns=0",
        "prefetch": "recall:planning_us=0,expert_ns=0",
    },
}
"""Parts of the system in place of its own. With drafts, what they name is streamed."""

STEPS = {0: 260, 4: 120}
"""Forward passes, by drafted tokens."""

RIVALS = {
    0: "hybrimoe-schedule+decayed-frequency",
    4: "hybrimoe-schedule+lfru",
}


def tuned_on(shared: Path, folder: Path) -> dict[str, Trace]:
    """The traces: two recorded ones and eight texts in a row, and two drawn ones."""
    from moesim.traces.format.reader import open_trace
    from moesim.traces.importers import import_trace
    from moesim.traces.models import model_shape

    files = {name: HELD_BACK[name] for name in ("olmoe-1b-7b", "gpt-oss-20b")}
    files["mixtral-8x7b"] = ("mixtral_8x7b_like", "q4_k_m")
    files["deepseek-v2-lite"] = ("deepseek_v2_lite_like", "q4_k_m")
    traces = {}
    for name, (file, weights) in files.items():
        target = folder / f"{name}.parquet"
        shape = model_shape(name, weights=weights)
        import_trace(shared / f"{file}.parquet", target, shape=shape)
        traces[name] = open_trace(target)
    recorded = shared / "gpt_oss_20b.parquet"
    texts = RecordedTexts("gpt-oss-20b", "mxfp4", 0, 64, 8, recorded=recorded)
    traces["texts"] = open_trace(texts.draw(folder))
    return traces


def logarithms(
    trace: Trace, policy: str, drafted: int, parts: dict[str, str]
) -> list[float]:
    """Of the run's time, by machine and ratio."""
    import moesim

    return [
        float(
            np.log(
                moesim.replay(
                    trace,
                    policy,
                    hw=hw,
                    cache_ratio=ratio,
                    keep=False,
                    draft_tokens=drafted,
                    steps=STEPS[drafted],
                    **parts,
                ).metrics["makespan_s"]
            )
        )
        for hw in MACHINES
        for ratio in RATIOS
    ]


def main() -> None:
    """Read the command line, and print a row of a Markdown table for each change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--change", choices=[*CHANGES], action="append")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        traces = tuned_on(given.shared, Path(folder))
        # What is drafted for was not tuned on drawn routing.
        of_drafts = {name: traces[name] for name in ("olmoe-1b-7b", "gpt-oss-20b")}
        of_drafts["texts"] = traces["texts"]
        among = {0: traces, 4: of_drafts}
        rivals = {
            (drafted, name): logarithms(trace, RIVALS[drafted], drafted, {})
            for drafted, chosen in among.items()
            for name, trace in chosen.items()
        }
        print("| changed | 10 and 25 % | 50 % | drafts, 10 and 25 % | 50 % |")
        print("|---|--:|--:|--:|--:|")
        for change in given.change or CHANGES:
            texts = []
            for drafted, chosen in among.items():
                parts = CHANGES[change]
                if drafted and parts.get("prefetch") != "none":
                    parts = parts | {"prefetch": "moe-speq"}
                gains = [
                    np.subtract(
                        logarithms(trace, "recall", drafted, parts),
                        rivals[drafted, name],
                    ).reshape(len(MACHINES), len(RATIOS))
                    for name, trace in chosen.items()
                ]
                mean = np.mean(gains, axis=(0, 1))
                texts += [f"{mean[:LOW].mean():.1%}", f"{mean[LOW:].mean():.1%}"]
            print(f"| {change} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
