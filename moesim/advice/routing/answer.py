"""What a trace answers: the bound of its routing, and masks for ktransformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesim.advice.errors import AdviceError
from moesim.advice.routing.bound import bound_of_routing
from moesim.advice.routing.decodes import DecodeSteps, decode_steps
from moesim.advice.routing.ktransformers import MaskPlan, mask_plans, runs_here

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.advice.plan.ranking import Forecast, Prospect
    from moesim.bound.bandwidths import RoutingBound


@dataclass(frozen=True)
class RoutingAdvice:
    """Answers that need routing.

    Attributes:
        decodes: what was asked for.
        bound: of any schedule of it.
        masks: kt-kernel's strategies, fastest first; empty where it does not run.
    """

    decodes: DecodeSteps
    bound: RoutingBound
    masks: tuple[MaskPlan, ...]


def routing_advice(forecast: Forecast, best: Prospect, trace: Path) -> RoutingAdvice:
    """Answer what routing decides.

    Args:
        forecast: of the machine.
        best: the advised setting; experts get the graphics memory that it leaves.
        trace: routing of the model.

    Raises:
        AdviceError: a machine without a card of its own memory, a trace of another
            model or without decode steps.
    """
    machine = forecast.machine
    if not machine.graphics or machine.unified:
        raise AdviceError(
            f"--trace: {machine.name} has no graphics card with memory of its own, so"
            " it is all the same which experts lie where; leave out --trace"
        )
    decodes = decode_steps(trace, forecast.model, forecast.job.sequences)
    masks = []
    if runs_here(machine):
        masks = mask_plans(forecast, best, decodes)
    bound = bound_of_routing(forecast, best, decodes)
    return RoutingAdvice(decodes, bound, tuple(masks))
