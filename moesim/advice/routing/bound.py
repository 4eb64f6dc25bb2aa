"""The physical bound of a trace's decode steps on an advised machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from moesim.advice.times.byte_bound import (
    most_device_bytes_per_s,
    most_host_bytes_per_s,
    most_link_bytes_per_s,
)
from moesim.advice.times.setting import ALL_LAYERS
from moesim.advice.times.work import decode_work
from moesim.bound.bandwidths import Bandwidths, RoutingBound, routing_bound
from moesim.bound.least_reads import least_reads

if TYPE_CHECKING:
    from moesim.advice.plan.ranking import Forecast, Prospect
    from moesim.advice.routing.decodes import DecodeSteps


def bound_of_routing(
    forecast: Forecast, best: Prospect, decodes: DecodeSteps
) -> RoutingBound:
    """Bound any schedule of a routing in the memories that a setting leaves to experts.

    Args:
        forecast: for machine and model; the machine has a card of its own memory.
        best: the setting.
        decodes: what is asked for.
    """
    model = forecast.model
    sizes = [
        model.layers[at].expert_bytes // model.layers[at].experts
        for at in model.moe_layers
    ]
    accesses = [
        size
        for layers in decodes.steps
        for size, experts in zip(sizes, layers, strict=True)
        for _ in experts
    ]
    uses = [
        (layer, experts.tolist())
        for layers in decodes.steps
        for layer, experts in enumerate(layers)
    ]

    # Any content at the beginning: the prompt may have left the best one.
    room = expert_room(best)
    slots = np.array([int(room // min(sizes))])
    reads = least_reads(uses, slots, shared=True, warm=True)

    # Without experts on the card only what every token reads there is left.
    bare = replace(best.candidate.setting, cpu_layers=ALL_LAYERS, gpu_layers=ALL_LAYERS)
    work = decode_work(model, replace(bare, chosen_layers=None))
    machine = forecast.machine
    rates = Bandwidths(
        host=most_host_bytes_per_s(machine),
        link=most_link_bytes_per_s(machine),
        device=most_device_bytes_per_s(machine),
    )
    return routing_bound(accesses, reads, len(decodes.steps), work.device_bytes, rates)


def expert_room(best: Prospect) -> float:
    """Bytes of graphics memory that a setting leaves to experts."""
    bill = best.candidate.bill
    return bill.gpu["experts"] + max(0.0, bill.gpu_left)
