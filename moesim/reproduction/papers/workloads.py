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


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace that is drawn for the papers' experiments.

    Attributes:
        model: of the table of models.
        weights: weight format.
        prompt, generated: tokens of each sequence.
        sequences: how many.
        like: shipped statistics that routing is drawn from; None draws with `SKEW` and
            `REUSE`.
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
        return self._synthetic().shape

    @property
    def name(self) -> str:
        """What tells it from the other workloads, fit for a file name."""
        recall = "" if self.recall is None else f"-r{self.recall:g}"
        if self.recall_at is not None:
            recall += f"@{self.recall_at}"
        residual = "" if self.residual is None else f"-d{self.residual:g}"
        sizes = f"{self.sequences}x{self.prompt}+{self.generated}"
        return f"{self.model}-{self.weights}-{sizes}{recall}{residual}-s{self.seed}"

    @property
    def words(self) -> str:
        """What was drawn, for people."""
        routing = f"like {self.like}" if self.like else f"stated, {_STATED_WORDS}"
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

    def calibration(self) -> Workload:
        """Other sequences of the same model, from which caches may be filled."""
        return replace(
            self,
            sequences=CALIBRATION_SEQUENCES,
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
        tokens = self.sequences * (self.prompt + self.generated)
        if self.recall is None:
            synthesise(self._synthetic(), target, tokens=tokens, seed=self.seed)
            return target
        routing = folder / f"{self.name}.routing.parquet"
        synthesise(self._synthetic(), routing, tokens=tokens, seed=self.seed)
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

    def _synthetic(self) -> SynthModel:
        if self.like is not None:
            model = model_like(self.like, self.weights)
            return of_lengths(model, prompt=self.prompt, generated=self.generated)
        return stated(
            model_shape(self.model, self.weights),
            skew=SKEW,
            reuse=REUSE,
            dependence=DEPENDENCE,
            prompt=self.prompt,
            generated=self.generated,
        )


SKEW = 0.6
REUSE = 0.4
DEPENDENCE = 0.3
"""Stated statistics of models that no statistics ship of: about those of the models
that do (overlap of adjacent tokens 0.34 to 0.45).
"""
_STATED_WORDS = f"skew {SKEW}, reuse {REUSE}, dependence {DEPENDENCE}"
CALIBRATION_SEQUENCES = 8
CALIBRATION_SEED = 1000
