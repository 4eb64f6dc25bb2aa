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

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import Curve, ReferenceExpert


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

    def seconds(self, read_bytes: float, flops: np.ndarray) -> np.ndarray:
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
