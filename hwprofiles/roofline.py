"""The roofline: seconds of work that reads weights and computes with them.

An expert's weights must be read once, however many tokens they serve, so its time is
flat while reading dominates and linear once arithmetic does. That model is all a
datasheet can give. Where a curve was measured, the roofline only carries it to experts
of other sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import COMPUTE_KINDS, CPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import Curve, ReferenceExpert
    from moesim.traces.format.schema import ModelShape


class RooflineModel(NamedTuple):
    """``overhead + max(bytes / bytes_per_s, flops / flops_per_s)``, in seconds."""

    overhead_s: float
    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, profile: HardwareProfile, part: str) -> RooflineModel:
        """Look up the constants of a compute lane or of the dense part.

        Raises:
            ProfileError: the profile lacks one of them.
        """
        return cls(*(profile.number(path) for path in paths.roofline(part)))

    def seconds(
        self, read_bytes: float | np.ndarray, flops: float | np.ndarray
    ) -> np.ndarray:
        """Return float64 seconds, same shape as `flops`."""
        reading_s = read_bytes / self.bytes_per_s
        computing_s = flops / self.flops_per_s
        # Both proceed at once, so the slower one decides.
        return self.overhead_s + np.maximum(reading_s, computing_s)


class MeasuredPart(NamedTuple):
    """A curve over tokens and the expert that it was measured with."""

    curve: Curve
    reference: ReferenceExpert

    @classmethod
    def of(
        cls, profile: HardwareProfile, part: str, *, small: bool = False
    ) -> MeasuredPart | None:
        """Look up a curve; None where the profile has none."""
        curve = profile.curves.get(paths.points(part, small=small))
        # Without the expert that was measured, the FLOPs of a token are not known.
        if curve is None or curve.reference is None:
            return None
        return cls(curve, curve.reference)


def flops_per_token(expert: ReferenceExpert) -> int:
    """Gate, up and down projections, multiply-adds counted twice: ``6 H F``."""
    return 6 * expert.hidden * expert.intermediate


def isotonic(values: np.ndarray) -> np.ndarray:
    """Return the non-decreasing sequence closest to `values` in the least-squares
    sense.

    More tokens never take less time; a table in which they do holds noise.

    Args:
        values: [N].

    Returns:
        float64 [N].

    Source: pool adjacent violators.
    """
    # Blocks of pooled values; their means are strictly ascending.
    means: list[float] = []
    lengths: list[int] = []
    for value in np.asarray(values, dtype=np.float64):
        means.append(float(value))
        lengths.append(1)

        # A value below its predecessors is pooled with them, as far back as needed.
        while len(means) > 1 and means[-2] >= means[-1]:
            mean = means.pop()
            length = lengths.pop()
            total = lengths[-1] + length
            weighted = means[-1] * lengths[-1] + mean * length
            means[-1] = weighted / total
            lengths[-1] = total
    return np.repeat(means, lengths)


_TINY_S = 1e-15


def expert_table(
    profile: HardwareProfile,
    shape: ModelShape,
    lane: str,
    expert_bytes: int,
    length: int,
) -> np.ndarray:
    """Tabulate the seconds of one expert by tokens, read-only float64 [length].

    Where experts were measured, their seconds at the same tokens are carried to this
    one by the roofline: linear in roofline seconds between two that were measured, in
    proportion outside. So time never falls with tokens, bytes or FLOPs, and never
    below what the best rates allow that the profile states or a measurement reached.

    A rate on the CPU that was measured with few tokens is not carried to many: beyond
    `costs.cpu.few_tokens` time stays until `costs.cpu.many_flops_per_s` takes longer.

    Source: `costs.<lane>.points` and `points_small` where the profile has them; else
    the roofline itself (flat below saturation, linear above).
    """
    tokens = np.arange(length, dtype=np.float64)
    roof = RooflineModel.of(profile, lane)
    flops = tokens * shape.expert_flops_per_token
    seconds = roof.seconds(expert_bytes, flops)
    many = profile.numbers.get(paths.MANY_FLOPS_PER_S)
    if many is not None and lane == CPU.name:
        few_tokens = min(int(profile.number(paths.FEW_TOKENS)), length - 1)
        beyond = roof._replace(flops_per_s=many.value).seconds(expert_bytes, flops)
        few = np.minimum(seconds, seconds[few_tokens])
        seconds = np.maximum(few, beyond)

    measured = [
        part
        for small in (False, True)
        if (part := MeasuredPart.of(profile, lane, small=small)) is not None
    ]
    if measured:
        seconds = _carried(roof, measured, tokens, seconds)
        least_s = _fastest(roof, measured).seconds(expert_bytes, flops)
        seconds = np.maximum.accumulate(np.maximum(seconds, least_s))
    # An expert without tokens is not computed at all.
    seconds[0] = 0.0
    # Layers share tables, and callers get views of them.
    seconds.flags.writeable = False
    return seconds


def _carried(
    roof: RooflineModel,
    measured: Sequence[MeasuredPart],
    tokens: np.ndarray,
    by_roofline: np.ndarray,
) -> np.ndarray:
    """Carry the seconds of measured experts to one of other bytes and FLOPs.

    Args:
        roof: of the lane.
        measured: one expert or two.
        tokens: float64 [T].
        by_roofline: seconds of the wanted expert by the roofline, float64 [T].
    """
    ends = []
    for part in measured:
        flops = tokens * flops_per_token(part.reference)
        at_reference = roof.seconds(part.reference.bytes, flops)
        ends.append((at_reference, _at_reference(roof, part, tokens)))

    # By roofline seconds, not by bytes: a larger expert in fewer bits has more FLOPs
    # and fewer bytes than a measured one, and which of both counts depends on tokens.
    (first_roof, first_s), (last_roof, last_s) = ends[0], ends[-1]
    first_is_less = first_roof <= last_roof
    low_roof = np.minimum(first_roof, last_roof)
    high_roof = np.maximum(first_roof, last_roof)
    low_s = np.where(first_is_less, first_s, last_s)
    # More work does not take less time; where it did, that was noise.
    high_s = np.maximum(np.where(first_is_less, last_s, first_s), low_s)

    apart = np.maximum(high_roof - low_roof, _TINY_S)
    share = np.clip((by_roofline - low_roof) / apart, 0.0, 1.0)
    between = low_s + share * (high_s - low_s)
    below = low_s * np.minimum(by_roofline / low_roof, 1.0)
    above = high_s * np.maximum(by_roofline / high_roof, 1.0)
    outside = np.where(by_roofline < low_roof, below, above)
    inside = (by_roofline >= low_roof) & (by_roofline <= high_roof)
    return np.where(inside, between, outside)


def _fastest(roof: RooflineModel, measured: Sequence[MeasuredPart]) -> RooflineModel:
    """Return the highest rates that are stated or that a measured expert reached."""
    bytes_per_s = roof.bytes_per_s
    flops_per_s = roof.flops_per_s
    for part in measured:
        seconds = isotonic(np.asarray(part.curve.seconds))
        flops = np.asarray(part.curve.at) * flops_per_token(part.reference)
        bytes_per_s = max(bytes_per_s, part.reference.bytes / float(seconds[0]))
        flops_per_s = max(flops_per_s, float(np.max(flops / seconds)))
    return RooflineModel(0.0, bytes_per_s, flops_per_s)


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
