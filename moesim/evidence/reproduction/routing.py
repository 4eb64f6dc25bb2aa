"""Published figures that need only routing, beside the same figures of traces at hand.

Ours need not agree: other models, other prompts, often another length. What is printed
says which model and which trace each column is of, what the experiment does, and where
it departs from its source.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.base.files import ScratchFolder
from moesim.base.text import unknown
from moesim.evidence.reproduction import routing_caches as caches
from moesim.evidence.reproduction import routing_decisions as decisions
from moesim.evidence.reproduction.questions import data, records, selected
from moesim.evidence.reproduction.workloads import Excerpt
from moesim.policies.base import PolicyError
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.shipped import resolve_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moesim.evidence.reproduction.questions import Record
    from moesim.evidence.reproduction.routing_caches import Figures
    from moesim.traces.format.reader import Trace

DEFAULT_STEPS = 300
"""Forward passes of each trace that count unless stated otherwise: the shortest shared
traces have no more.
"""

FOREIGN = {
    "olmoe_1b_7b_decode299": ("olmoe-1b-7b", "bf16"),
    "qwen3_30b_a3b_top6": ("qwen3-30b-a3b", "q4_k_m"),
    "gpt_oss_20b": ("gpt-oss-20b", "mxfp4"),
    "kimi_linear_48b_a3b_decode300": ("kimi-linear-48b-a3b", "bf16"),
}
"""Other people's traces by file name: the model and weight format that their files do
not tell in our terms.
"""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Published figures, and the function that computes the same on a trace.

    Attributes:
        name: on the command line.
        summary: one line.
        rows: which published records it stands beside, and how their settings name a
            row.
        unit: of every figure, as in those records.
        needs: what a trace must have, in words.
        computes: what the function does, in one or two sentences.
        caveats: where it departs from its source, and what is not known about the
            source.
    """

    name: str
    summary: str
    rows: list[dict[str, Any]]
    unit: str
    needs: str
    computes: str
    caveats: list[str]

    @property
    def published(self) -> tuple[tuple[str, str, str], ...]:
        """Keys of the records that it stands beside."""
        return tuple(dict.fromkeys(tuple(row["of"]) for row in self.rows))

    def row(self, record: Record) -> str | None:
        """The row of a record; None for one that it does not stand beside."""
        for row in self.rows:
            if tuple(row["of"]) == record.key and selected(row, record):
                return str(row["row"]).format_map(record.setting)
        return None

    def run(self, excerpt: Excerpt) -> Figures:
        """Compute row -> figure, or row -> what the trace lacks in one line."""
        name = self.name.replace("-", "_")
        holder = caches if hasattr(caches, name) else decisions
        figures: Figures = getattr(holder, name)(excerpt)
        return figures


EXPERIMENTS = {
    name: Experiment(name, **described)
    for name, described in data("papers.yaml")["routing"].items()
}
"""Name -> experiment, in the order in which they are listed."""


@dataclass(slots=True)
class Reproduction:
    """One experiment on several traces.

    Attributes:
        experiment: what was done.
        measured: trace -> row -> figure, or what the trace lacks.
        models: trace -> its model.
        steps: forward passes looked at; None for all.
    """

    experiment: Experiment
    measured: dict[str, Figures]
    models: dict[str, str]
    steps: int | None

    @property
    def published(self) -> dict[str, dict[str, float | str]]:
        """Column (the model as the source names it) -> row -> figure."""
        return published(self.experiment)

    @property
    def rows(self) -> list[str]:
        """Published rows first, in the order of the source; then what only we have."""
        columns = [*self.published.values(), *self.measured.values()]
        # A dict keeps the order of first appearance, which a set would lose.
        return list(dict.fromkeys(row for column in columns for row in column))

    def to_json(self) -> dict[str, Any]:
        """One object; a figure that a trace cannot give is words that say why."""
        experiment = self.experiment
        return {
            "name": experiment.name,
            "summary": experiment.summary,
            "unit": experiment.unit,
            "published_records": [list(key) for key in experiment.published],
            "published": self.published,
            "measured": {
                trace: {"model": self.models[trace], "figures": figures}
                for trace, figures in self.measured.items()
            },
            "steps": self.steps,
            "needs": experiment.needs,
            "computes": experiment.computes,
            "caveats": experiment.caveats,
        }


def published(experiment: Experiment) -> dict[str, dict[str, float | str]]:
    """The published figures of an experiment: column -> row -> figure.

    A column is its model as the source names it, behind the source's name where there
    are several sources.
    """
    columns: dict[str, dict[str, float | str]] = {}
    several = len({source for source, _, _ in experiment.published}) > 1
    for record in records():
        row = experiment.row(record)
        # Some records of a table are not about what the experiment computes.
        if row is None:
            continue
        column = str(record.setting.get("model", "as stated"))
        # Two sources may have measured the same model.
        if several:
            column = f"{record.source}: {column}"
        columns.setdefault(column, {})[row] = record.value
    return columns


def find(name: str) -> Experiment:
    """An experiment by name.

    Raises:
        PolicyError: no such experiment; the message names them all.
    """
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    raise PolicyError(unknown("experiment", name, EXPERIMENTS, "experiments"))


def shared_traces() -> Path:
    """Where a checkout's neighbour has other people's traces; it may not exist."""
    return Path(__file__).resolve().parents[4] / "shared" / "traces"


def traces_at_hand() -> list[Path]:
    """The shipped trace, and other people's traces where a checkout has them in
    ``../shared/traces``.
    """
    foreign = [shared_traces() / f"{name}.parquet" for name in FOREIGN]
    return [resolve_trace("tiny"), *(path for path in foreign if path.is_file())]


def reproduce(
    name: str,
    traces: Sequence[str | Path] | None = None,
    *,
    steps: int | None = DEFAULT_STEPS,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Reproduction:
    """Compute an experiment on traces and lay the published figures beside it.

    Args:
        name: of the experiment.
        traces: moesim traces, or foreign ones that `FOREIGN` names; None takes
            `traces_at_hand`.
        steps: keep the first so many forward passes of each; None keeps all.
        seed: for policies that draw.
        progress: told which trace is being looked at.

    Raises:
        PolicyError: no such experiment.
        TraceError: a trace cannot be read.
    """
    experiment = find(name)
    measured: dict[str, Figures] = {}
    models: dict[str, str] = {}
    paths = traces_at_hand()
    if traces is not None:
        paths = [Path(trace) for trace in dict.fromkeys(traces)]
    stems = [path.stem for path in paths]
    for path in paths:
        # Two traces may have one name in different folders.
        label = path.stem if stems.count(path.stem) == 1 else str(path)
        if progress is not None:
            progress(label)
        with opened(path) as trace:
            models[label] = trace.shape.name
            measured[label] = experiment.run(Excerpt(trace, steps, seed))
    return Reproduction(experiment, measured, models, steps)


@contextmanager
def opened(path: Path) -> Iterator[Trace]:
    """Open a trace; a foreign one that is known is imported first, and forgotten
    afterwards.
    """
    # A foreign file does not tell the sizes of its model; its name stands for them.
    known = FOREIGN.get(path.stem)
    if known is None or not path.is_file() or _is_ours(path):
        yield open_trace(path)
        return
    model, weights = known
    with ScratchFolder() as folder:
        imported = import_trace(
            path, folder / path.name, shape=model_shape(model, weights)
        )
        yield open_trace(imported.path)


def _is_ours(path: Path) -> bool:
    try:
        open_trace(path)
    except TraceError:
        return False
    return True
