"""By how much predictions made with a profile may be off, as its calibration shows.

The designed runs are predicted with the profile that was learned from them, and the
machine changed its speed by some percent meanwhile. Neither error cancels the other.
"""

from __future__ import annotations

from math import hypot
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile

PREDICTIONS: Final = "predictions"
DRIFT: Final = "drift"
"""Names of fits."""


def prediction_error(profile: HardwareProfile) -> float | None:
    """Largest relative error that a prediction's time may have; None where no
    calibration says so.
    """
    predictions = profile.fit.get(PREDICTIONS)
    if predictions is None:
        return None
    drift = profile.fit.get(DRIFT, {}).get("residual_median", 0.0)
    return hypot(predictions["residual_worst"], drift)


def rate_interval(rate: float, error: float) -> tuple[float, float]:
    """Lowest and highest rate whose times are within an error.

    Args:
        rate: predicted, per second.
        error: of times, relative, as `prediction_error` returns it.
    """
    longest = 1.0 + error
    shortest = max(1.0 - error, 1e-3)
    return rate / longest, rate / shortest
