"""The constants of the cache network's training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Labels = Literal["distance", "masked"]

HORIZONS: Final = {64: 48, 128: 98}
"""CECAR's horizon K by experts per layer."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The constants of the training.

    Attributes:
        labels: ``distance`` regresses the steps until the next use and needs no cache;
            ``masked`` marks, at each miss of a Belady cache, the victims among the
            candidates. The paper says "masked" and its formula is lost; the first is
            what CECAR's training code does, and our default because it serves every
            cache size.
        hidden: h; 128 is the paper's table, 64 gives its 113 KB per layer.
        horizon: K, distances beyond it look the same; none takes 48 for 64 experts and
            98 for 128 (CECAR), else 3N/4; but no more than the validation steps, which
            could not show a longer distance.
        learning_rate, weight_decay: of AdamW; the paper's "learning rate decay 1e-2" is
            read as weight decay.
        epochs: at most so many.
        batch: layer steps per gradient step (CECAR); fewer where an epoch would have
            less than eight of them.
        patience: epochs without any layer improving by a thousandth before training
            stops (ours; CECAR waits 5).
        validation: share of the training steps, the last ones, that only decide when to
            stop.

    Source: FlashMoE and CECAR as read in algorithms §5.4.
    """

    labels: Labels = "distance"
    hidden: int = 128
    horizon: int | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    epochs: int = 200
    batch: int = 256
    patience: int = 10
    validation: float = 0.2

    def validation_steps(self, steps: int) -> int:
        """How many of so many training steps only decide when to stop."""
        return max(1, round(self.validation * steps))

    def horizon_for(self, experts: int, steps: int) -> int:
        """K, >= 2, for so many experts per layer and training steps."""
        if self.horizon is not None:
            return self.horizon
        usual = HORIZONS.get(experts, round(0.75 * experts))
        # At least 2: the scaled distance divides by K - 1.
        return max(2, min(usual, self.validation_steps(steps)))
