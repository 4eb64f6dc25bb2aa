"""Workloads of the papers: which model, how many tokens, predictions of which accuracy.

Nobody published the routing behind the papers' tables, so it is drawn: like that of the
same model where its statistics ship, else with stated statistics. Predictions are drawn
with published accuracies; the records that state them are inputs and are never compared
(`Workload.inputs`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.traces.models import model_shape
from moesim.traces.synthetic.generate import of_lengths, stated, synthesise
from moesim.traces.synthetic.predict import predict
from moesim.traces.synthetic.saved import model_like

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.synthetic.draw import SynthModel

Input = tuple[str, str, str]
"""Paper, place and metric of records that feed an input."""

DEEPER = 0.9
"""Share of the recall that is left one layer further ahead; assumed, as no paper
publishes it.
"""
CALIBRATION_SEQUENCES = 8
CALIBRATION_SEED = 1000


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

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model as it is drawn."""
        if self.like == self.model:
            return model_like(self.like, self.weights).shape
        return model_shape(self.model, self.weights)

    @property
    def name(self) -> str:
        """What tells it from the other workloads, fit for a file name."""
        # What its accuracies are taken from changes nothing.
        drawn = repr(replace(self, inputs=()))
        digest = hashlib.sha256(drawn.encode()).hexdigest()
        sizes = f"{self.sequences}x{self.prompt}+{self.generated}"
        return f"{self.model}-{self.weights}-{sizes}-{digest[:8]}"

    @property
    def words(self) -> str:
        """What was drawn, for people."""
        routing = f"like {self.like}" if self.like else "of stated habits"
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

    def calibration(self, sequences: int = CALIBRATION_SEQUENCES) -> Workload:
        """Other sequences of the same model, from which caches may be filled."""
        seed = self.seed + CALIBRATION_SEED
        return replace(self.routing, sequences=sequences, seed=seed)

    @property
    def routing(self) -> Workload:
        """The same without predictions."""
        return replace(self, recall=None, recall_at=None, residual=None, inputs=())

    def draw(self, folder: Path) -> Path:
        """Write the trace, unless it is there already; it appears when it is complete.

        Raises:
            TraceError: a recall that this routing does not admit.
        """
        target = folder / f"{self.name}.parquet"
        if target.exists():
            return target
        if self.recall is None:
            self.write_routing(target)
        else:
            predict(
                # Shared by all predictions of it.
                self.routing.draw(folder),
                target,
                recall=self.recalls,
                residual=self.residual,
                at=self.recall_at,
                scores=True,
                seed=self.seed,
            )
        return target

    def write_routing(self, target: Path) -> None:
        """Write the trace without predictions."""
        tokens = self.sequences * (self.prompt + self.generated)
        synthesise(self._synthetic(), target, tokens=tokens, seed=self.seed)

    def _synthetic(self) -> SynthModel:
        lengths = {"prompt_tokens": self.prompt, "new_tokens": self.generated}
        if self.like is None:
            return stated(model_shape(self.model, self.weights), **lengths)
        known = model_like(self.like, self.weights)
        return of_lengths(_carried_to(known, self.shape), **lengths)


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
