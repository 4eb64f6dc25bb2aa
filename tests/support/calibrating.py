"""The shapes and the date of calibrations whose truth is known."""

from dataclasses import replace

from moesim.evidence.validation.paired_runs import ROUTED
from moesim.traces.models import model_shape

DATE = "2026-01-01"


def sized(spec):
    sizes = model_shape(spec, "f32")
    return replace(
        sizes,
        layers=ROUTED.layers,
        experts=ROUTED.experts,
        top_k=ROUTED.top_k,
        expert_bytes=(sizes.expert_bytes[0],) * ROUTED.layers,
        other_bytes=sizes.other_bytes // 3,
    )
