"""`moesim train-cache`: a network that decides who leaves a cache."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.base.options import (
    REQUIRED,
    JsonOptions,
    folder_option,
    input_option,
    option,
    seed_option,
    trace_argument,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import of_run

if TYPE_CHECKING:
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace

LEARNED = ("flashmoe.safetensors", "report.json", "report.md")
"""What `train-cache` writes into its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCacheOptions(JsonOptions):
    """What the cache network learns from, and how."""

    trace: Path = trace_argument()
    out: Path = folder_option(
        "Folder for network and report.", *LEARNED, default=REQUIRED
    )
    held_out: Path | None = input_option(
        "Judge on this trace. Default: the last quarter of TRACE, never learned from.",
        metavar="TRACE",
    )
    hidden: int = option(
        128, "Hidden units: 128 (the paper's table) or 64.", metavar="H", minimum=1
    )
    epochs: int = option(200, "At most so many.", minimum=1)
    batch: int = of_run("batch")
    steps: int | None = of_run("steps")
    seed: int = seed_option()


@from_dataclass(from_file=False)
def train_cache(options: TrainCacheOptions) -> None:
    """Train FlashMoE's cache policy on one part of a trace and judge it on another.

    The network goes to DIR/flashmoe.safetensors; use it with --cache flashmoe
    --artefacts DIR. The report compares it with LRU, LFU, LFRU, ARC, LeCaR and Belady
    at several cache sizes: DIR/report.md and DIR/report.json.

    \b
    Examples:
      moesim train-cache q.parquet --out learned
      moesim train-cache calibration.parquet --held-out evaluation.parquet --out learned --hidden 64
      moesim replay q.parquet --policy on-demand --cache flashmoe --artefacts learned
    """
    from moesim.base.files import write_text
    from moesim.questions import learned_cache as learned
    from moesim.runtime.train_cache import train
    from moesim.traces.format.reader import open_trace

    opened = open_trace(options.trace)
    training, judging, judged_on = _parts(options, opened)
    with output.bar("training", options.epochs) as show:
        trained = train(
            training,
            opened.shape,
            hidden=options.hidden,
            epochs=options.epochs,
            seed=options.seed,
            progress=show,
        )
    facts = trained.facts | {
        # A network says what it was trained on, wherever it is copied to.
        "trace": opened.path.name,
        "trace_digest": opened.digest(),
        "batch": options.batch,
    }
    sizes = learned.cache_sizes(opened.shape)
    with output.bar("judging on the held-out part"):
        report = learned.report(
            judged_on,
            judging,
            trained.network,
            facts,
            sizes,
            start=len(training) if judged_on is opened else 0,
        )

    answer = learned.learned_answer(report)
    # The network comes first: a report without its network would promise too much.
    trained.save(options.out / LEARNED[0])
    write_text(options.out / LEARNED[1], json.dumps(report, indent=2) + "\n")
    write_text(options.out / LEARNED[2], answer.markdown())
    output.present(answer, options, more=[options.out])


def _parts(
    options: TrainCacheOptions, opened: "Trace"
) -> tuple["list[RoutedStep]", "list[RoutedStep]", "Trace"]:
    """Forward passes to learn from, and others to judge on, with their trace.

    Raises:
        PolicyError: another model's trace, or the same sequences.
    """
    from moesim.questions.learned_cache import check_held_out, split
    from moesim.runs.setup import of_model
    from moesim.traces.format.batch import compose

    batch = options.batch
    steps = options.steps
    if options.held_out is None:
        return *split(opened, batch=batch, steps=steps), opened
    where = f"in {options.trace}"
    judged_on = of_model("--held-out", options.held_out, opened.shape, where)
    check_held_out(opened, judged_on)
    learned_from, judging = (
        list(compose(trace, batch=batch, steps=steps)) for trace in (opened, judged_on)
    )
    return learned_from, judging, judged_on
