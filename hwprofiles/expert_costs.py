"""Seconds of one expert by tokens, on one compute lane, for experts of any size.

Shape legend: T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.hwprofiles.isotonic import isotonic
from moesim.hwprofiles.lanes import COMPUTE_KINDS
from moesim.hwprofiles.roofline import MeasuredPart, RooflineModel, flops_per_token

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import ReferenceExpert
    from moesim.traces.format.schema import ModelShape

_FIRST_TABLE_TOKENS = 256
"""Length of the first tables. Decode steps rarely ask for more; a prefill lets the
tables grow.
"""


def tables_by_layer(
    profile: HardwareProfile, shape: ModelShape, lane: str, most_tokens: int
) -> list[np.ndarray]:
    """Tabulate an expert's seconds for every layer, past `most_tokens`.

    Args:
        profile: the machine.
        shape: the model.
        lane: kind of the compute lane.
        most_tokens: the largest number that is looked up now.

    Returns:
        By layer, read-only float64 [T]; layers of equal expert size share one table.

    Raises:
        ProfileError: the profile has no such cost.
    """
    length = _length(most_tokens)
    tables = {
        expert_bytes: expert_table(profile, shape, lane, expert_bytes, length)
        for expert_bytes in sorted(set(shape.expert_bytes))
    }
    return [tables[expert_bytes] for expert_bytes in shape.expert_bytes]


def tables_by_size(
    profile: HardwareProfile, shape: ModelShape, lane: str, most_tokens: int
) -> np.ndarray:
    """Tabulate the same for every size of the model's experts, float64 [S, T], in the
    order of `ModelShape.expert_sizes`.
    """
    length = _length(most_tokens)
    tables = [
        expert_table(profile, shape, lane, expert_bytes, length)
        for expert_bytes in shape.expert_sizes
    ]
    return np.array(tables)


def _length(most_tokens: int) -> int:
    """Of a table that covers `most_tokens`."""
    # Twice as long as needed, so that growing prefills do not rebuild it every time.
    return max(_FIRST_TABLE_TOKENS, 2 * (most_tokens + 1))


def expert_table(
    profile: HardwareProfile,
    shape: ModelShape,
    lane: str,
    expert_bytes: int,
    length: int,
) -> np.ndarray:
    """Tabulate the seconds of one expert by tokens, read-only float64 [length].

    Source: `costs.<lane>.points` where the profile has it, carried to this size by the
    roofline; between it and `points_small`, the same for a smaller expert, linear in
    bytes; else the roofline itself (reference/algorithms.md §0: flat below saturation,
    linear above).
    """
    tokens = np.arange(length, dtype=np.float64)
    roof = RooflineModel.of(profile, lane)
    by_roofline = roof.seconds(expert_bytes, tokens * shape.expert_flops_per_token)

    # Within the two sizes that were measured, between them; outside, from the nearer.
    large = MeasuredPart.of(profile, lane)
    small = MeasuredPart.of(profile, lane, small=True)
    if large is None:
        seconds = by_roofline
    elif small is None or expert_bytes >= large.reference.bytes:
        seconds = _carried(roof, large, tokens, by_roofline)
    elif expert_bytes > small.reference.bytes:
        seconds = _between(roof, small, large, tokens, expert_bytes)
    else:
        seconds = _carried(roof, small, tokens, by_roofline)

    if large is not None:
        # Carried by a roofline, the product may dip; time must not.
        seconds = np.maximum.accumulate(seconds)
    # An expert without tokens is not computed at all.
    seconds[0] = 0.0
    # Layers share tables, and callers get views of them.
    seconds.flags.writeable = False
    return seconds


def _between(
    roof: RooflineModel,
    small: MeasuredPart,
    large: MeasuredPart,
    tokens: np.ndarray,
    expert_bytes: int,
) -> np.ndarray:
    """Interpolate between two measured sizes, linear in bytes."""
    apart_bytes = large.reference.bytes - small.reference.bytes
    share = (expert_bytes - small.reference.bytes) / apart_bytes
    seconds = (1 - share) * _at_reference(roof, small, tokens)
    seconds += share * _at_reference(roof, large, tokens)
    return seconds


def _at_reference(
    roof: RooflineModel, measured: MeasuredPart, tokens: np.ndarray
) -> np.ndarray:
    """Seconds of the expert that was measured; beyond the last of its tokens as the
    roofline goes on.
    """
    curve = measured.curve
    reference = measured.reference
    last_tokens = curve.at[-1]

    by_roofline = roof.seconds(reference.bytes, tokens * flops_per_token(reference))
    by_roofline_at_last = roof.seconds(
        reference.bytes, np.asarray(last_tokens * flops_per_token(reference))
    )
    beyond = np.where(tokens > last_tokens, by_roofline / by_roofline_at_last, 1.0)

    seconds = isotonic(np.asarray(curve.seconds))
    within = np.interp(np.minimum(tokens, last_tokens), curve.at, seconds)
    return np.asarray(within * beyond)


def _carried(
    roof: RooflineModel,
    measured: MeasuredPart,
    tokens: np.ndarray,
    by_roofline: np.ndarray,
) -> np.ndarray:
    """Seconds of this size from those of another, by the ratio of the roofline's
    answers for both.
    """
    reference = measured.reference
    at_reference = roof.seconds(reference.bytes, tokens * flops_per_token(reference))
    ratio = by_roofline / at_reference
    return np.asarray(_at_reference(roof, measured, tokens) * ratio)


def extrapolated_sizes(profile: HardwareProfile, shape: ModelShape) -> tuple[str, ...]:
    """Describe expert sizes of a model whose times follow from another, measured size
    by bytes and FLOPs.
    """
    notes = []
    for kind in COMPUTE_KINDS:
        large = MeasuredPart.of(profile, kind.name)
        if large is None:
            continue
        small = MeasuredPart.of(profile, kind.name, small=True)
        references = [large.reference]
        if small is not None:
            references.append(small.reference)
        measured_sizes = {_size(reference) for reference in references}

        for expert_bytes in shape.expert_sizes:
            size = (shape.hidden, shape.expert_intermediate, expert_bytes)
            if size not in measured_sizes:
                known = large.reference
                notes.append(
                    f"{kind.name}: experts of {size[0]} x {size[1]}, {size[2]} bytes,"
                    f" from {large.curve.kind} {known.hidden} x {known.intermediate},"
                    f" {known.bytes} bytes ({known.dtype})"
                )
    return tuple(notes)


def _size(expert: ReferenceExpert) -> tuple[int, int, int]:
    return (expert.hidden, expert.intermediate, expert.bytes)
