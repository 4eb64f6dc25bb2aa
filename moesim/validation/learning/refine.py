"""Puts what real runs show into a calibrated profile, part by part.

A part is moved towards what was measured by as much as the new measurements weigh
against the old ones. Times of experts and dense parts belong to a size: the size that
was run takes the place of the calibrated one that is nearest to it, unless it is that
one.
"""

from __future__ import annotations

from dataclasses import replace
from math import hypot, log
from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import interval_around
from moesim.hwprofiles.dense_costs import DenseCosts, dense_reference
from moesim.hwprofiles.expert_costs import expert_table
from moesim.hwprofiles.lanes import COMPUTE_KINDS
from moesim.hwprofiles.roofline import MeasuredPart
from moesim.hwprofiles.schema import Curve, ReferenceExpert
from moesim.validation.learning.factors import FIRST_OPERATION, JOIN, PLANNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import Quantity
    from moesim.traces.format.schema import ModelShape
    from moesim.validation.learning.factors import Factor, Part

MOST_REMEMBERED: Final = 4
"""Old measurements count as at most so many times the new ones: machines change, so new
ones weigh at least a fifth.
"""
_FADES: Final = log(2.0)
"""Beyond the tokens that were seen, a factor has faded at twice or half as many."""
_SOURCE: Final = "improved by real runs"


def refined(
    profile: HardwareProfile, factors: Mapping[Part, Sequence[Factor]], date: str
) -> HardwareProfile:
    """Move a calibrated profile towards what runs showed.

    Args:
        profile: calibrated through the executor.
        factors: measured over predicted, by part.
        date: day of the measurement, ISO 8601.
    """
    numbers = dict(profile.numbers)
    curves = dict(profile.curves)
    expert_lanes = {kind.name for kind in COMPUTE_KINDS}
    for part, of_part in factors.items():
        if part.name in expert_lanes or part.name in (paths.DENSE, paths.HEAD):
            assert part.shape is not None
            placed = replace(profile, curves=curves)
            curves |= _size_curves(placed, part.name, part.shape, of_part, date)
            continue

        (only,) = of_part
        if part.name.startswith(PLANNING):
            policy = part.name.removeprefix(PLANNING)
            numbers |= _planning(numbers, policy, only, date)
        elif part.name in (JOIN, FIRST_OPERATION):
            control = paths.JOIN if part.name == JOIN else paths.FIRST_OPERATION
            numbers |= _scaled(numbers, control, only, date)
        else:
            numbers |= _scaled(numbers, paths.link(part.name), only, date)
            path = paths.points(part.name)
            if path in curves:
                curves[path] = _scaled_curve(curves[path], only, date)
    return replace(profile, numbers=numbers, curves=curves, date=date)


def share_of_new(new: int, old: int | None) -> float:
    """Weight of new measurements against old ones, 0.2 to 1."""
    remembered = min(old or 0, MOST_REMEMBERED * new)
    return new / (new + remembered)


def _towards(entry: Quantity | Curve, factor: Factor) -> float:
    """Factor by which an entry moves."""
    return float(factor.factor ** share_of_new(factor.samples, entry.samples))


# Numbers.


def _scaled(
    numbers: Mapping[str, Quantity], constants: Iterable[str], factor: Factor, date: str
) -> dict[str, Quantity]:
    """Constants of one formula, all moved alike: their ratios stay as calibrated."""
    moved = {}
    for path in constants:
        quantity = numbers.get(path)
        if quantity is None:
            continue
        by = _towards(quantity, factor)
        # A rate falls where seconds grow.
        by = 1.0 / by if path.endswith("_per_s") else by
        moved[path] = _moved(quantity, by, factor.samples, date)
    return moved


def _planning(
    numbers: Mapping[str, Quantity], policy: str, factor: Factor, date: str
) -> dict[str, Quantity]:
    """Planning of one policy; what no calibration saw starts as all together do."""
    constants = paths.planning(policy)
    if constants.base_s in numbers:
        return _scaled(numbers, constants, factor, date)
    default = paths.planning(paths.DEFAULT_POLICY)
    named = {
        path: replace(numbers[general], samples=0)
        for path, general in zip(constants, default, strict=True)
        if general in numbers
    }
    return _scaled(named, constants, factor, date)


def _moved(quantity: Quantity, by: float, samples: int, date: str) -> Quantity:
    value = quantity.value * by
    interval = quantity.interval or (quantity.value, quantity.value)
    spread = 0.0 if quantity.spread is None else quantity.spread
    return replace(
        quantity,
        value=value,
        kind="measured",
        source=_source(quantity.source),
        samples=(quantity.samples or 0) + samples,
        spread=spread * by,
        date=date,
        interval=interval_around(value, interval[0] * by, interval[1] * by),
    )


def _source(source: str) -> str:
    # Once is enough, however often it is improved.
    return source if source.endswith(_SOURCE) else f"{source}; {_SOURCE}"


# Curves.


def _scaled_curve(curve: Curve, factor: Factor, date: str) -> Curve:
    by = _towards(curve, factor)
    return replace(
        curve,
        seconds=tuple(seconds * by for seconds in curve.seconds),
        kind="measured",
        source=_source(curve.source),
        samples=(curve.samples or 0) + factor.samples,
        spread=tuple(seconds * by for seconds in curve.spread),
        date=date,
    )


def _size_curves(
    profile: HardwareProfile,
    part: str,
    shape: ModelShape,
    factors: Sequence[Factor],
    date: str,
) -> dict[str, Curve]:
    """Curves over tokens with that of a model's size among them, by path."""
    reference = _reference(part, shape)
    calibrated = {
        small: measured
        for small in (False, True)
        if (measured := MeasuredPart.of(profile, part, small=small)) is not None
    }
    if not calibrated:
        return {}
    nearest = min(
        calibrated, key=lambda small: _distance(calibrated[small].reference, reference)
    )
    old = calibrated[nearest]
    known = _size(old.reference) == _size(reference)
    if known:
        curve = _improved(old.curve, factors, date)
    else:
        predicted = _predicted(profile, part, shape, old.curve, factors)
        curve = _improved(replace(predicted, reference=reference), factors, date)

    places = {small: measured.curve for small, measured in calibrated.items()}
    if known or len(places) == 2:
        places[nearest] = curve
    elif reference.bytes < old.reference.bytes:
        places[True] = curve
    else:
        places = {True: old.curve, False: curve}
    return {paths.points(part, small=small): each for small, each in places.items()}


def _improved(curve: Curve, factors: Sequence[Factor], date: str) -> Curve:
    """Move each point by the factor of its tokens: between two that were seen by both.

    Beyond them a size that was calibrated stays as it is; any other follows the nearer
    factor.
    """
    seen_at = [log(factor.tokens) for factor in factors]
    logs = [log(_towards(curve, factor)) for factor in factors]
    if curve.samples:
        seen_at = [seen_at[0] - _FADES, *seen_at, seen_at[-1] + _FADES]
        logs = [0.0, *logs, 0.0]
    by = np.exp(np.interp(np.log(curve.at), seen_at, logs))
    return replace(
        curve,
        seconds=tuple((by * curve.seconds).tolist()),
        kind="measured",
        source=_source(curve.source),
        samples=(curve.samples or 0) + min(factor.samples for factor in factors),
        spread=tuple((by * curve.spread).tolist()) if curve.spread else (),
        date=date,
    )


def _predicted(
    profile: HardwareProfile,
    part: str,
    shape: ModelShape,
    nearest: Curve,
    factors: Sequence[Factor],
) -> Curve:
    """The curve of a size that was not calibrated, as the profile predicts it; nothing
    of it is measured yet.
    """
    at = sorted({*nearest.at, *(round(factor.tokens, 3) for factor in factors)})
    tokens = np.array(at)
    if part in (paths.DENSE, paths.HEAD):
        costs = DenseCosts(profile, shape)
        head = part == paths.HEAD
        seconds = np.array([costs.reference_s(each, head=head) for each in at])
    else:
        length = int(tokens.max()) + 2
        table = expert_table(profile, shape, part, shape.max_expert_bytes, length)
        seconds = np.interp(tokens, np.arange(length), table)
    return replace(
        nearest,
        at=tuple(at),
        seconds=tuple(seconds.tolist()),
        source="real runs over what was calibrated with another size",
        samples=0,
        spread=tuple(np.zeros(len(at)).tolist()),
    )


def _reference(part: str, shape: ModelShape) -> ReferenceExpert:
    if part in (paths.DENSE, paths.HEAD):
        return dense_reference(shape, head=part == paths.HEAD)
    return ReferenceExpert(
        hidden=shape.hidden,
        intermediate=shape.expert_intermediate,
        bytes=shape.max_expert_bytes,
        dtype=shape.dtype,
    )


def _size(reference: ReferenceExpert) -> tuple[int, int, int]:
    return reference.hidden, reference.intermediate, reference.bytes


def _distance(first: ReferenceExpert, second: ReferenceExpert) -> float:
    # Ratios: twice as large is as far away as half as large.
    return hypot(
        log(first.hidden / second.hidden),
        log(max(first.bytes, 1) / max(second.bytes, 1)),
    )
