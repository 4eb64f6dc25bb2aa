"""Routing traces of real models; here the options of a recording, which the command
and the recorder share, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesim.base.options import Options, option

CALIBRATION = "calibration"
EVALUATION = "evaluation"


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    """Length, sampling and columns of a recording."""

    new_tokens: int = option(64, "Tokens to generate per prompt.", minimum=0)
    batch: int = option(1, "Sequences run together.", minimum=1)
    temperature: float = option(
        0.0,
        "0 decodes greedily; small models then fall into loops.",
        minimum=0,
    )
    seed: int = option(0, "Of the draws.", minimum=0)
    scores: bool = option(True, "Record the gates' scores of all experts.")
    predictions: bool = option(
        True,
        "Record what the gates of the next three layers would say already now.",
    )
    split: str | None = option(
        None,
        "What the texts are. Default: evaluation, or calibration beside --calibration.",
        choices=(CALIBRATION, EVALUATION),
    )
