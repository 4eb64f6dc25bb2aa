"""DAOP's assignment, with the CPU's pre-calculation of the next layer."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from moesim.policies.assignment._gpu_choice import allowed_lanes, gpu_lanes
from moesim.policies.base import (
    IN_FLIGHT,
    Assignment,
    AssignmentPolicy,
    LayerWork,
    MachineView,
    Precompute,
)
from moesim.policies.parameters import expect, expect_choice
from moesim.policies.ranking import present, ranked
from moesim.policies.routing._substitute import keep_one_absent
from moesim.traces.format.schema import Phase

Overlap = Literal["parallel", "serial"]
Prefill = Literal["in-place", "cheapest"]
Ahead = Literal["kept", "predicted"]


class DAOP(AssignmentPolicy):
    """Compute experts where their weights are; in decode, let the CPU start on the
    experts predicted for the next layer.

    The next gate, evaluated on this layer's input, predicts each token's top-k. Those
    that no GPU holds start on the CPU at once, behind this layer's own CPU experts; GPU
    experts of the next layer run there, on their own input. A wrong guess keeps the CPU
    busy and joins nothing. What was started is computed on the layer before's input: an
    approximation; a token for which an expert was not predicted gets it on its own
    input.

    Args:
        first_layer: first layer that is predicted; layers below it run on demand (the
            code's ``first_predict_layer`` is 5, so the first prediction is made at
            layer 4).
        before_first: ``parallel`` lets CPU and GPU experts of on-demand layers overlap,
            as the paper draws it; ``serial`` runs the CPU's after the GPU's fetched
            ones, as the code does where it fetches.
        prefill: ``in-place`` computes every expert of a prompt where its weights are,
            as the paper says; ``cheapest`` is the code's search over 2^N placements for
            the least *sum* of latencies, in which a resident costs nothing on the GPU
            and an absent one its load: each by itself, ties to the GPU. What is loaded
            so is not kept.

        ahead: ``kept`` starts only those of the predicted experts that degradation
            keeps, one absent expert per token; ``predicted`` starts all of them, for a
            routing that does not degrade.

    Source: DAOP, predictive pre-calculation; algorithms §2.2 to §2.4.
    """

    approximates: ClassVar[bool] = True
    needs = ("pred1_raw",)

    def __init__(
        self,
        *,
        first_layer: int = 5,
        before_first: Overlap = "parallel",
        prefill: Prefill = "in-place",
        ahead: Ahead = "kept",
    ) -> None:
        expect(first_layer >= 1, "first_layer", "a number >= 1", first_layer)
        expect_choice("before_first", before_first, Overlap)
        expect_choice("prefill", prefill, Prefill)
        self.first_layer = first_layer
        self.serial = before_first == "serial"
        expect_choice("ahead", ahead, Ahead)
        self.prefill = prefill
        self.ahead = ahead

    def assign(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Assignment:
        """Place by residency, in ascending expert id."""
        del view
        serial = self.serial and work.layer < self.first_layer
        if self.prefill == "cheapest" and work.phase == Phase.PREFILL:
            # The smallest sum of costs is found expert by expert, without a search.
            cpu_s = np.maximum(work.host_s, work.cpu_s)
            loaded = work.arrive_s.min(axis=0) <= cpu_s
            return Assignment(gpu_lanes(work, loaded), None, serial)

        resident = work.arrive_s == 0.0
        if work.phase == Phase.PREFILL:
            # What is being swapped in is awaited: the prompt runs on the new placement.
            resident |= np.isfinite(work.arrive_s) & (work.state == IN_FLIGHT)
        return Assignment(allowed_lanes(work, resident), None, serial)

    def precompute(
        self,
        work: LayerWork,
        view: MachineView,
    ) -> Precompute | None:
        """Predict the next layer's experts and name those that no GPU holds."""
        layer = work.layer + 1
        if work.phase != Phase.DECODE or layer < self.first_layer:
            return None

        # Experts in flight count as absent: the CPU need not wait for them.
        resident = present(view, layer, in_flight=False)
        scores = work.predicted["pred1_raw"].astype(np.float64)
        predicted = ranked(scores)[:, : work.routing.shape[1]]
        if self.ahead == "kept":
            predicted = keep_one_absent(predicted, scores, resident)

        workload = np.bincount(predicted.ravel(), minlength=scores.shape[1])
        experts = np.flatnonzero((workload > 0) & ~resident).astype(np.int32)
        tokens = workload[experts].astype(np.int32)
        return Precompute(experts, tokens, predicted.astype(np.uint16))
