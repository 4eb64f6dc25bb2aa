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
from moesim.evidence.reproduction.questions import (
    anchors,
    data,
    filled,
    records,
    selected,
)
from moesim.evidence.reproduction.routing_figures import Excerpt, LacksError, figure
from moesim.policies.base import PolicyError
from moesim.reporting.answers import Answer
from moesim.reporting.parts import Listing
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.shipped import resolve_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moesim.evidence.reproduction.questions import Record
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
    """Published figures, and what computes the same on a trace.

    Attributes:
        name: on the command line.
        summary: one line.
        rows: which published records it stands beside, how their settings name a row,
            and which of the `routing_figures` it is.
        unit: of every figure, as in those records.
        needs: what a trace must have, in words.
        computes: what the functions do, in one or two sentences.
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
    def keys(self) -> tuple[tuple[str, str, str], ...]:
        """Keys of the records that it stands beside."""
        return tuple(
            dict.fromkeys(tuple(row["of"]) for row in self.rows if "of" in row)
        )

    def row(self, record: Record) -> str | None:
        """The row of a record; None for one that it does not stand beside."""
        for row in self.rows:
            if "of" in row and selected(row, record):
                return str(row["row"]).format_map(record.setting)
        return None

    def figures(self, excerpt: Excerpt) -> dict[str, float | str]:
        """Row -> figure, or what the trace lacks."""
        table: dict[str, float | str] = {}
        for row in self.rows:
            least, most = row.get("spare", (0, excerpt.sequences))
            settings: list[dict[str, Any]] = [{}] * (least <= excerpt.sequences <= most)
            if "of" in row:
                settings = [each.setting for each in records() if selected(row, each)]
            for setting in settings:
                values = setting | {"sequences": excerpt.sequences}
                label = str(row["row"]).format_map(values)
                # Several models have it.
                if label not in table:
                    try:
                        table[label] = figure(excerpt, filled(row["figure"], values))
                    except LacksError as lack:
                        table[label] = str(lack)
        return table

    @property
    def published(self) -> dict[str, dict[str, float | str]]:
        """The published figures: column (the model as the source names it, behind the
        source's name where there are several) -> row -> figure.
        """
        columns: dict[str, dict[str, float | str]] = {}
        several = len({source for source, _, _ in self.keys}) > 1
        for record in records():
            row = self.row(record)
            # Some records of a table are not about what the experiment computes.
            if row is not None:
                column = str(record.setting.get("model", "as stated"))
                column = f"{record.source}: {column}" if several else column
                columns.setdefault(column, {})[row] = record.value
        return columns

    @property
    def remarks(self) -> list[str]:
        """Its caveats; and where its records made the drawn predictions, that."""
        if anchors().isdisjoint(self.keys):
            return self.caveats
        return [
            *self.caveats,
            (
                "its records made the predictions of drawn traces (--all), so they are"
                " not counted; the figures here are of other traces"
            ),
        ]


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
    measured: dict[str, dict[str, float | str]]
    models: dict[str, str]
    steps: int | None

    def listing(self, title: str = "") -> Listing:
        """A row per setting: published columns first, then ours. Rows that were
        published come first; what a trace lacks is said in the note.
        """
        published = self.experiment.published
        sources = {source for source, _, _ in self.experiment.keys}
        # One source is named in every head; several name themselves in their columns.
        prefix = f"{sources.pop()}: " if len(sources) == 1 else ""
        columns = [*published.values(), *self.measured.values()]
        lacks: dict[str, int] = {}

        def cell(figure: float | str | None) -> str:
            if isinstance(figure, str) and figure.startswith("lacks"):
                return f"[{lacks.setdefault(figure, len(lacks) + 1)}]"
            if isinstance(figure, int | float):
                return f"{figure:.4g}"
            return figure or "-"

        # A dict keeps the order of first appearance, which a set would lose.
        rows = [
            [row, *(cell(column.get(row)) for column in columns)]
            for row in dict.fromkeys(row for column in columns for row in column)
        ]
        heads = [f"{prefix}{column}" for column in published]
        heads += [f"ours: {self.models[trace]}" for trace in self.measured]
        notes = [f"[{number}] {lack}" for lack, number in lacks.items()]
        notes += [f"note: {remark}" for remark in self.experiment.remarks]
        return Listing.of(
            [self.experiment.unit, *heads], rows, title=title, note="\n".join(notes)
        )

    def answer(self) -> Answer:
        """Published figures beside ours."""
        experiment = self.experiment
        passes = "all forward passes"
        if self.steps is not None:
            passes = f"at most {self.steps} forward passes"
        origins = (f"{model} from {trace}" for trace, model in self.models.items())
        return Answer(
            question=experiment.summary,
            subject=experiment.name,
            setting=[
                (experiment.name, experiment.summary),
                ("computes", experiment.computes),
                ("ours", f"{', '.join(origins)}; {passes} of each"),
            ],
            tables=[self.listing()],
            data=self.to_json(),
        )

    def to_json(self) -> dict[str, Any]:
        """One object; a figure that a trace cannot give is words that say why."""
        experiment = self.experiment
        return {
            "name": experiment.name,
            "summary": experiment.summary,
            "unit": experiment.unit,
            "published_records": [list(key) for key in experiment.keys],
            "published": experiment.published,
            "measured": {
                trace: {"model": self.models[trace], "figures": figures}
                for trace, figures in self.measured.items()
            },
            "steps": self.steps,
            "needs": experiment.needs,
            "computes": experiment.computes,
            "caveats": experiment.caveats,
        }


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
) -> Reproduction:
    """Compute an experiment on traces and lay the published figures beside it.

    Args:
        name: of the experiment.
        traces: moesim traces, or foreign ones that `FOREIGN` names; None takes
            `traces_at_hand`.
        steps: keep the first so many forward passes of each; None keeps all.
        seed: for policies that draw.

    Raises:
        PolicyError: no such experiment.
        TraceError: a trace cannot be read.
    """
    if name not in EXPERIMENTS:
        raise PolicyError(unknown("experiment", name, EXPERIMENTS, "reproduce"))
    paths = traces_at_hand()
    if traces is not None:
        paths = [Path(trace) for trace in dict.fromkeys(traces)]
    stems = [path.stem for path in paths]
    reproduction = Reproduction(EXPERIMENTS[name], {}, {}, steps)
    for path in paths:
        # Two traces may have one name in different folders.
        label = path.stem if stems.count(path.stem) == 1 else str(path)
        with opened(path) as trace:
            figures = EXPERIMENTS[name].figures(Excerpt(trace, steps, seed))
            reproduction.models[label] = trace.shape.name
        reproduction.measured[label] = figures
    return reproduction


@contextmanager
def opened(path: Path) -> Iterator[Trace]:
    """Open a trace; a foreign one that is known is imported first, and forgotten
    afterwards.
    """
    with ScratchFolder() as folder:
        try:
            trace = open_trace(path)
        except TraceError:
            # A foreign file does not tell the sizes of its model; its name does.
            known = FOREIGN.get(path.stem)
            if known is None or not path.is_file():
                raise
            imported = import_trace(path, folder / path.name, shape=model_shape(*known))
            trace = open_trace(imported.path)
        yield trace
