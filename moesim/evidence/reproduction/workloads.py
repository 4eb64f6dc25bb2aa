"""Workloads of the papers: which model, how many tokens, predictions of which
accuracy.

Nobody published the routing behind the papers' tables, so it is drawn: like that of the
same model where its statistics ship, else with stated statistics. Predictions are drawn
with published accuracies; the records that state them are inputs and are never compared
(`Workload.inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from moesim.base.errors import TraceError
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.schema import Phase
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.generate import of_lengths, stated, synthesise
from moesim.traces.synthetic.predict import predict
from moesim.traces.synthetic.saved import model_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import Trace
    from moesim.traces.format.schema import ModelShape
    from moesim.traces.synthetic.draw import SynthModel

Input = tuple[str, str, str]
"""Paper, place and metric of records that feed an input."""

DEEPER = 0.9
"""Share of the recall that is left one layer further ahead; assumed, as no paper
publishes it.
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace that is drawn for the papers' experiments.

    Attributes:
        model: of the table of models.
        weights: weight format.
        prompt, generated: tokens of each sequence.
        sequences: how many.
        like: shipped statistics that routing is drawn from, of this model or of the
            nearest one (`_carried_to`); None draws with habits of other models.
        recall: of the next layer's gate on this layer's input; None draws no
            predictions and no scores.
        recall_at: experts of a token that recall is measured at; None for all.
        residual: of the same with DALI's residual; None draws none.
        inputs: records that `recall` and `residual` are taken from.
        seed: of all draws.
        recorded: another's trace of real routing, in place of a drawn one; predictions
            are drawn all the same, as none has any.
        group: which `sequences` of it.
    """

    model: str
    weights: str
    prompt: int
    generated: int
    sequences: int
    like: str | None = None
    recall: float | None = None
    recall_at: int | None = None
    residual: float | None = None
    inputs: tuple[Input, ...] = ()
    seed: int = 1
    recorded: Path | None = None
    group: int = 0

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model as it is drawn."""
        if self.like == self.model and not self.recorded:
            return model_like(self.like, self.weights).shape
        return model_shape(self.model, self.weights)

    @property
    def name(self) -> str:
        """What tells it from the other workloads, fit for a file name."""
        recall = "" if self.recall is None else f"-r{self.recall:g}"
        if self.recall_at is not None:
            recall += f"@{self.recall_at}"
        residual = "" if self.residual is None else f"-d{self.residual:g}"
        sizes = f"{self.sequences}x{self.prompt}+{self.generated}"
        stated = "" if self.like else "-stated"
        if self.like and self.like != self.model:
            stated = f"-like-{self.like}"
        if self.recorded:
            stated = f"-recorded{self.group}"
        model = f"{self.model}-{self.weights}{stated}"
        return f"{model}-{sizes}{recall}{residual}-s{self.seed}"

    @property
    def words(self) -> str:
        """What was drawn, for people."""
        routing = f"like {self.like}" if self.like else f"stated, {_STATED_WORDS}"
        if self.recorded:
            routing = f"recorded, {self.recorded.stem}"
        text = (
            f"{self.model} in {self.weights}, {self.sequences} sequences of"
            f" {self.prompt} + {self.generated} tokens, routing {routing}"
        )
        if self.recall is not None:
            at = "" if self.recall_at is None else f" at {self.recall_at}"
            text += f"; predictions of recall{at} {', '.join(map(str, self.recalls))}"
        if self.residual is not None:
            text += f", with residual {self.residual:g}"
        return text

    @property
    def recalls(self) -> tuple[float, ...]:
        """Recall one, two and three layers ahead."""
        if self.recall is None:
            return ()
        return tuple(round(self.recall * DEEPER**depth, 4) for depth in range(3))

    def calibration(self, sequences: int | None = None) -> Workload:
        """Other sequences of the same model, from which caches may be filled; of a
        recorded trace what comes before in the same text.

        Args:
            sequences: how many are drawn; None for `CALIBRATION_SEQUENCES`.
        """
        drawn = sequences or CALIBRATION_SEQUENCES
        return replace(
            self,
            sequences=self.sequences if self.recorded else drawn,
            recall=None,
            recall_at=None,
            residual=None,
            inputs=(),
            seed=self.seed + CALIBRATION_SEED,
        )

    def draw(self, folder: Path) -> Path:
        """Write the trace, unless it is there already; it appears when it is complete.

        Raises:
            TraceError: a recall that this routing does not admit.
        """
        target = folder / f"{self.name}.parquet"
        if target.exists():
            return target
        if self.recall is None:
            self._write_routing(target)
            return target
        routing = folder / f"{self.name}.routing.parquet"
        self._write_routing(routing)
        predict(
            routing,
            target,
            recall=self.recalls,
            residual=self.residual,
            at=self.recall_at,
            scores=True,
            seed=self.seed,
        )
        routing.unlink()
        return target

    def _write_routing(self, target: Path) -> None:
        if self.recorded is None:
            tokens = self.sequences * (self.prompt + self.generated)
            synthesise(self._synthetic(), target, tokens=tokens, seed=self.seed)
            return
        first = EARLIER if self.seed < CALIBRATION_SEED else 0
        last = first + self.generated if first else EARLIER
        read = ds.dataset(self.recorded)
        # Those that are long enough, in the order of the file.
        steps_of_texts = read.to_table(columns=["seq_id", "step"])
        # Threads would give the texts in another order each time.
        lengths = steps_of_texts.group_by("seq_id", use_threads=False)
        longest = lengths.aggregate([("step", "max")]).to_pylist()
        texts = [each["seq_id"] for each in longest if each["step_max"] >= last]
        begin = self.group * self.sequences
        chosen = ds.field("seq_id").isin(texts[begin : begin + self.sequences])
        steps = (ds.field("step") >= first) & (ds.field("step") < last)
        part = target.with_suffix(".part.parquet")
        # A prompt would make the first third unlike the rest.
        decode = ds.field("phase") == "decode"
        pq.write_table(read.to_table(filter=chosen & steps & decode), part)
        import_trace(part, target, shape=self.shape)
        part.unlink()

    def _synthetic(self) -> SynthModel:
        if self.like is not None:
            model = _carried_to(model_like(self.like, self.weights), self.shape)
            return of_lengths(
                model, prompt_tokens=self.prompt, new_tokens=self.generated
            )
        return stated(
            model_shape(self.model, self.weights),
            prompt_tokens=self.prompt,
            new_tokens=self.generated,
        )


def _carried_to(model: SynthModel, shape: ModelShape) -> SynthModel:
    """The statistics of a model for another one, whose layers and experts beyond those
    of the first have the weights of the first ones again.
    """
    layers = np.arange(shape.layers) % model.shape.layers
    experts = np.arange(shape.experts) % model.shape.experts
    weights = (..., layers[:, None], experts)
    kinds = model.kinds
    if kinds is not None:
        kinds = replace(
            kinds,
            weights=kinds.weights[weights],
            character=kinds.character[layers],
        )
    return replace(
        model,
        shape=shape,
        popularity=model.popularity[weights],
        reuse=model.reuse[layers],
        topics=model.topics[weights],
        kinds=kinds,
        # Known of the first model only.
        likeness=model.likeness if shape == model.shape else None,
    )


_STATED_WORDS = "habits of other models"
EARLIER = 64
"""Tokens of a recorded text that only calibrations see."""
CALIBRATION_SEQUENCES = 8
CALIBRATION_SEED = 1000


# -- the part of any trace that an experiment sees -------------------------------------


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The first forward passes of a trace, which is what an experiment sees.

    Attributes:
        trace: opened.
        most_steps: forward passes seen; None for all.
        seed: for policies that draw.
    """

    trace: Trace
    most_steps: int | None = None
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.trace.shape

    def sequences(self) -> int:
        """Sequences of the whole trace."""
        return sum(1 for _ in self.trace.sequences())

    def has(self, *columns: str) -> bool:
        """Whether the trace has all of these optional columns."""
        return set(columns) <= self.trace.columns

    def lacking(self, *columns: str) -> str:
        """One line that names the columns that are missing."""
        missing = [name for name in columns if name not in self.trace.columns]
        return f"lacks column {', '.join(missing)}"

    def passes(self, *columns: str, batch: int = 1) -> Iterator[RoutedStep]:
        """Forward passes with these optional columns."""
        return compose(self.trace, batch=batch, steps=self.most_steps, columns=columns)

    def decode(self, *columns: str, batch: int = 1) -> Iterator[RoutedStep]:
        """Decode steps in which all `batch` sequences take part."""
        for step in self.passes(*columns, batch=batch):
            # Sequences end one after another; a step of fewer is another batch size.
            if step.phase == Phase.DECODE and step.sequences == batch:
                yield step

    def future(self, batch: int = 1) -> RecordedFuture:
        """What oracles see of the same forward passes."""
        return RecordedFuture.of(self.trace, batch=batch, steps=self.most_steps)

    def batches(self, sizes: Iterable[int]) -> tuple[list[int], dict[int, str]]:
        """Which batch sizes the trace has sequences for; for the others, what it lacks
        in one line.

        Where none fits, the whole trace is one batch, if that is two sequences at
        least.
        """
        # A trace is recorded per sequence; batches are composed when it is replayed.
        available = self.sequences()
        published = list(sizes)
        fitting = [size for size in published if size <= available]
        if not fitting and available > 1:
            fitting = [available]
        lacks = {
            size: f"lacks sequences: {size} wanted, {available} there"
            for size in published
            if size > available
        }
        return fitting, lacks

    def batch_near(self, size: int) -> int:
        """That batch size, or the largest that the trace has sequences for."""
        fitting, _ = self.batches([size])
        return fitting[0] if fitting else 1


def percent(part: float, total: float) -> float:
    """Part of total in %.

    Raises:
        TraceError: total is 0: the trace holds nothing of what is counted.
    """
    if not total:
        raise TraceError(
            "nothing to count in the forward passes looked at; look at more with"
            " --steps"
        )
    return 100.0 * part / total
