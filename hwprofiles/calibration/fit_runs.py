"""Fits costs to designed runs: what operations take *in place*, beside everything else
that a run does.

An operation in a run is slower than the same one alone: others use the memory, the
caches are cold, a thread must be woken. So costs are taken from runs: the time of an
operation with the slowdown of what overlapped it divided out, and the gaps that belong
to no operation as terms of their own. Nothing here knows of any run that a prediction
will be compared with.

Means, not medians: a run is a sum of operations, and its tail is part of the sum. Both
ends are clipped at 10 %.

Source: issue 4's table of terms that mattered, from trials on a machine with two cores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    Resampled,
    clipped_mean,
    fit_plane,
    interquartile_range,
    quantiles_around_one,
)
from moesim.hwprofiles.calibration.fit_curves import (
    LEAST_SAMPLES,
    Entries,
    Points,
    fit_roofline,
)
from moesim.hwprofiles.calibration.fit_operations import SPAN_KINDS, OperationFit
from moesim.hwprofiles.calibration.observations import (
    DesignedRun,
    Gaps,
    Spans,
    units_of,
)
from moesim.hwprofiles.dense_costs import dense_reference, dense_work
from moesim.hwprofiles.lanes import COMPUTE_KINDS, LANE_KINDS, SSD
from moesim.hwprofiles.paths import DENSE, HEAD
from moesim.hwprofiles.roofline import flops_per_token
from moesim.hwprofiles.schema import is_in_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.hwprofiles.paths import ControlPaths
    from moesim.hwprofiles.schema import Quantity


def calibrate(runs: Sequence[DesignedRun], *, date: str, seed: int = 0) -> Entries:
    """Fit costs, contention, dispatch terms and distributions to designed runs.

    Args:
        runs: timelines of this machine, warm; at least one product on each lane.
        date: day of the measurement, ISO 8601.
        seed: of the resampling behind intervals.

    Returns:
        Entries for whatever the runs exercised; what they did not is left to the
        profile they are put into.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("calibration needs at least one run")

    spans = Spans(runs)
    gaps = spans.gaps()
    # The order of these parts is the order of their draws.
    entries = Entries(date, seed)
    follow_s = _fit_hand_over(gaps, entries)
    operations = OperationFit(spans, entries)
    for lane_kind in (*COMPUTE_KINDS, *SPAN_KINDS):
        operations.fit(lane_kind, follow_s.get(lane_kind.name, 0.0))
    fit_dispatch(gaps, operations.first_excess, entries)
    fit_dense(spans, operations, entries)
    fit_planning(spans, entries)
    return entries


def _fit_hand_over(gaps: Gaps, entries: Entries) -> dict[str, float]:
    """Enter what lies between operations of one worker; return by what it is more on
    each kind of lane than on the fastest.
    """
    follow = gaps.follow
    if not follow:
        return {}
    # One number serves all lanes; what slower ones need beyond it joins their costs.
    mean_s = {name: _mean(times) for name, times in follow.items()}
    fastest = min(mean_s, key=lambda name: mean_s[name])
    entries.put_mean(
        paths.PER_OPERATION_S,
        follow[fastest]["seconds"].to_numpy(),
        units_of(follow[fastest]),
        f"between operations of one worker, {fastest} lane",
    )
    return {name: seconds - mean_s[fastest] for name, seconds in mean_s.items()}


def _mean(table: pd.DataFrame) -> float:
    return clipped_mean(table["seconds"].to_numpy())


_SLOPES = ["active", "copies", "tiered", "shared"]
"""Columns of a plane beside its bases: active experts, copies, the SSD, and where CPU
and GPU share the experts.
"""
_TINY_S = 1e-9


def fit_dispatch(
    gaps: Gaps, first_excess: Sequence[pd.DataFrame], entries: Entries
) -> None:
    """Fit first operations, the join, and the lane that is noticed later: what passes
    once per layer step.

    Args:
        gaps: of all runs.
        first_excess: what first products take beyond later ones.
        entries: where results go.
    """
    first, join = gaps.first, gaps.join
    # Charged as one number: the gap before the first operation of a layer step, and
    # what that operation takes beyond later ones.
    tables = [first]
    if first_excess:
        tables.append(pd.concat(first_excess))

    first_later_s = _beyond_least(
        fit_control_plane(
            paths.FIRST_OPERATION,
            tables,
            "from plan to first operation and what it takes longer, by active experts"
            " and copies",
            entries,
        )
    )
    join_later_s = _beyond_least(
        fit_control_plane(
            paths.JOIN,
            [join],
            "per layer step: from dense part to planning, last operation to join, join,"
            " to the next dense part",
            entries,
            shared=paths.SPLIT_S,
        )
    )

    for lane_kind in COMPUTE_KINDS:
        number = LANE_KINDS.index(lane_kind)
        if number not in first_later_s:
            continue
        of_kind = first[first["lane_kind"] == number]
        later_s = first_later_s[number] + join_later_s.get(number, 0.0)
        # The samples give the scatter; their mean is that of the planes.
        entries.put_mean(
            paths.first_s(lane_kind.name),
            of_kind["seconds"].to_numpy() - _mean(of_kind) + later_s,
            units_of(of_kind),
            f"by what the first {lane_kind.name} operation begins, takes and is noticed"
            " later than the other lane's",
        )

    read = gaps.read
    if len(read) >= LEAST_SAMPLES:
        entries.put_mean(
            paths.first_s(SSD.name),
            read["seconds"].to_numpy(),
            units_of(read),
            "from plan to the first read of a layer step",
        )


def fit_planning(spans: Spans, entries: Entries) -> None:
    """Fit planning in place, by policy; all together stand in for those that were not
    run.
    """
    planning = spans.planning()
    policies = np.array([run.assignment for run in spans.runs])
    by_policy = planning.groupby(policies[planning["run"]], sort=False)
    # All together last, since entries are drawn in this order.
    tables = {str(policy): table for policy, table in by_policy}
    tables[paths.DEFAULT_POLICY] = planning
    for policy, table in tables.items():
        fit_control_plane(
            paths.planning(policy),
            [table],
            "planning of designed runs, by active experts and copies",
            entries,
        )


def fit_control_plane(
    constants: ControlPaths,
    tables: Sequence[pd.DataFrame],
    source: str,
    entries: Entries,
    shared: str | None = None,
) -> dict[int, float]:
    """Enter base, slopes by active experts and copies, and what the SSD tier adds;
    intervals are resampled.

    Args:
        constants: where the results go.
        tables: fitted one by one and summed.
        source: the procedure, in words.
        entries: where results go.
        shared: where goes what a layer step takes more that CPU and GPU share; None
            does not tell that apart.

    Returns:
        The base by number of the kind of lane; the least of them is entered.
    """
    if shared is None:
        tables = [table.assign(shared=0.0) for table in tables]
    lane_kinds = np.unique(np.concatenate([table["lane_kind"] for table in tables]))

    def columns(table: pd.DataFrame) -> np.ndarray:
        """A column of ones by kind of lane, then the slopes."""
        of_kind = table["lane_kind"].to_numpy()[:, None] == lane_kinds
        return np.hstack((of_kind, table[_SLOPES]))

    def plane_of(table: pd.DataFrame) -> Resampled:
        rows_of, seconds = columns(table), table["seconds"].to_numpy()
        return Resampled.of(
            # Amounts and seconds of a layer step stay together.
            lambda rows: fit_plane(rows_of[rows], seconds[rows]),
            units_of(table),
            entries.rng,
        )

    fits = [plane_of(table) for table in tables]
    plane = Resampled(
        np.sum([fit.value for fit in fits], axis=0),
        np.sum([fit.draws for fit in fits], axis=0),
        min(fit.units for fit in fits),
    )
    seconds = tables[0]["seconds"].to_numpy()
    ratios = seconds / np.maximum(columns(tables[0]) @ plane.value, _TINY_S)
    # Scatter belongs to the whole; it is kept with the base.
    spread = interquartile_range(seconds)
    seen = {
        path: any(table[column].any() for table in tables)
        for path, column in ((constants.with_ssd_s, "tiered"), (shared, "shared"))
    }
    bases = len(lane_kinds)
    for path, estimate in zip(
        (*constants, shared),
        # The least base, and the slopes.
        plane.mapped(lambda of: np.append(of[:bases].min(), of[bases:])).estimates(),
        strict=True,
    ):
        # Where no run had an SSD, or a shared layer, nothing is known of what it adds.
        if path is None or not seen.get(path, True):
            continue
        is_base = path == constants.base_s and ratios.any()
        entries.put(
            path,
            estimate._replace(spread=spread),
            source,
            samples=len(seconds),
            quantiles=quantiles_around_one(ratios) if is_base else (),
        )
    return dict(zip(lane_kinds.tolist(), plane.value[:bases].tolist(), strict=True))


def _beyond_least(bases_s: dict[int, float]) -> dict[int, float]:
    least_s = min(bases_s.values())
    return {number: base_s - least_s for number, base_s in bases_s.items()}


_KEYS = ("base_s", "per_expert_s")
"""Of the constants of planning, those that are measured in isolation, too."""


def profile_entries(
    calibrated: Mapping[str, Quantity], base: Mapping[str, Quantity]
) -> dict[str, Quantity]:
    """Return the numbers of a profile with the calibrated ones put in.

    What the runs did not show of what they take beyond operations in isolation is
    dropped: the figure of another calibration does not fit this one, and an isolated
    one would be counted twice. Policies that were not run plan as all that were run do
    together, and what theirs took in isolation beyond the default's.

    Args:
        calibrated: what the runs showed, by dotted path.
        base: numbers of the profile that the calibration started from.
    """
    kept = {path: quantity for path, quantity in base.items() if not is_in_place(path)}
    entries = {**kept, **calibrated}
    default = paths.planning(paths.DEFAULT_POLICY)

    for path in kept:
        policy = _planning_policy(path)
        key = path.rpartition(".")[2]
        if policy is None or path in calibrated or key not in _KEYS:
            continue
        default_path = getattr(default, key)
        in_place = calibrated.get(default_path)
        in_isolation = base.get(default_path)
        if in_place is None or in_isolation is None:
            continue
        # A solver is as much slower in a run as it is alone; what a run adds to any
        # decision is the same.
        beyond_s = base[path].value - in_isolation.value
        entries[path] = _beyond(in_place, beyond_s, policy)

        per_copy = calibrated.get(default.per_copy_s)
        if per_copy is not None:
            entries[paths.planning(policy).per_copy_s] = per_copy
    return entries


def _planning_policy(path: str) -> str | None:
    """Return the policy that a path of planning constants belongs to; None for any
    other path.
    """
    table = path.rpartition(".")[0]
    policy = table.rpartition(".")[2]
    return policy if path in paths.planning(policy) else None


def _beyond(default: Quantity, beyond_s: float, policy: str) -> Quantity:
    """Return the default in place, and `beyond_s` on top of it."""
    interval = None
    if default.interval is not None:
        interval = (
            max(0.0, default.interval[0] + beyond_s),
            max(0.0, default.interval[1] + beyond_s),
        )
    return replace(
        default,
        value=max(0.0, default.value + beyond_s),
        source=(
            f"all policies together in designed runs, and what {policy} took in"
            " isolation beyond the default"
        ),
        interval=interval,
        # How single plannings of a policy scatter that was not run is not known.
        quantiles=(),
    )


# -- dense parts and heads: the rate at which attention reads keys and values, one
# roofline through all the rest, and of each a curve over tokens by shape

_WORK = ["weight_bytes", "kept_bytes", "flops"]
_CELL = ["head", "shape", "tokens"]
"""Dense parts of one cell differ in what attention reads only."""


def fit_dense(spans: Spans, operations: OperationFit, entries: Entries) -> None:
    """Fit dense parts of all runs.

    Args:
        spans: of the runs.
        operations: fits by what dense parts differ after a read.
        entries: where results go.
    """
    parts = _parts_of(spans)
    # Taken out first: the roofline is that of dense parts whose caches are their own.
    _take_out_reads(parts, operations)
    _take_out_attention(parts, entries)

    # A trace may tell nothing of its model's head, which then reads nothing.
    known = parts[parts["weight_bytes"] > 0]
    known = known[known.groupby(_WORK)["seconds"].transform("size") >= LEAST_SAMPLES]
    works = known.groupby(_WORK)
    # Three constants need three points.
    if works.ngroups < 3:
        return
    points = Points(
        known["seconds"].to_numpy(), works.ngroup().to_numpy(), units_of(known)
    )
    weight_bytes, kept_bytes, flops = np.array(list(works.groups)).T
    roof = fit_roofline(weight_bytes + kept_bytes, flops, points)
    entries.put_fit(
        paths.roofline(DENSE), roof, "roofline through dense parts in designed runs"
    )
    entries.fit[DENSE] = roof.report.as_table()

    for name, head in ((DENSE, False), (HEAD, True)):
        references = [dense_reference(shape, head=head) for shape in spans.shapes]
        # By bytes of the dense part, which need not order models as their experts do.
        by_size = sorted(
            range(len(references)), key=lambda number: -references[number].bytes
        )
        for small, number in zip((False, True), by_size, strict=False):
            reference = references[number]
            of = parts[(parts["head"] == head) & (parts["shape"] == number)]
            # A curve needs fewer parts at each size than the roofline, which carries
            # each from its own bytes and FLOPs to the reference's.
            of = of[
                of.groupby("tokens")["seconds"].transform("size") >= LEAST_SAMPLES // 2
            ]
            if of.empty:
                continue
            reference_flops = flops_per_token(reference) * of["tokens"]
            carried = roof.seconds(reference.bytes, reference_flops) / roof.seconds(
                of["weight_bytes"] + of["kept_bytes"], of["flops"]
            )
            entries.put_curve(
                paths.points(name, small=small),
                of["seconds"] * carried,
                of["tokens"],
                "tokens",
                "dense parts of designed runs over the roofline's, times the roofline"
                " of the reference",
                rising=False,
                reference=reference,
            )


def _parts_of(spans: Spans) -> pd.DataFrame:
    """The dense parts and heads of all runs, with their work; ``tokens`` of a head are
    the positions whose output is wanted.
    """
    parts = spans.dense_parts()
    parts = parts.assign(head=parts["layer"] < 0)
    rows: Iterable[Any] = parts.itertuples()
    works = [
        dense_work(
            spans.shapes[row.shape],
            row.tokens,
            int(spans.runs[row.run].context_tokens[row.step]),
            row.sequences,
            head=row.head,
        )
        for row in rows
    ]
    return parts.assign(
        decode=parts["tokens"] == parts["sequences"],
        tokens=parts["tokens"].where(~parts["head"], parts["sequences"]),
        **{name: [float(getattr(work, name)) for work in works] for name in _WORK},
    )


def _take_out_reads(parts: pd.DataFrame, operations: OperationFit) -> None:
    """Enter by what a dense part is slower after a layer step that read from the SSD,
    by shape, and divide it out.
    """
    # Heads have a length of their own, and the first layer follows no layer step.
    later = parts[(parts["layer"] > 0) & (parts["seconds"] > 0)]
    factors = operations.after_read(
        DENSE, later["seconds"], later["after_read"], later, ["run", "tokens", "layer"]
    )
    for number, factor in factors.items():
        slower = parts["after_read"] & (parts["shape"] == number)
        parts.loc[slower, "seconds"] /= factor


def _take_out_attention(parts: pd.DataFrame, entries: Entries) -> None:
    """Enter the rate at which attention reads keys and values, and take its seconds
    out of all parts; as they are where no part shows that rate.

    Only decoded tokens count: a prompt computes with keys more than it reads them.
    """
    decoded = parts[parts["decode"] & ~parts["head"]]
    if decoded.empty:
        return
    kept_bytes, seconds = (
        (
            of - of.groupby([decoded[name] for name in _CELL]).transform(_clipped)
        ).to_numpy()
        for of in (decoded["kept_bytes"], decoded["seconds"])
    )

    def slope(rows: np.ndarray) -> np.ndarray:
        return fit_plane(kept_bytes[rows, None], seconds[rows])

    (per_byte,) = Resampled.of(slope, units_of(decoded), entries.rng).estimates(-np.inf)
    # Contexts of one length, or a slope within its own noise, show no rate.
    if per_byte.interval[0] <= 0.0:
        return
    entries.put(
        paths.ATTENTION_BYTES_PER_S,
        per_byte,
        "dense parts of decoded tokens in designed runs, over their contexts",
        samples=len(seconds),
    )
    parts["seconds"] -= per_byte.value * parts["kept_bytes"]
    parts["kept_bytes"] = 0.0


def _clipped(values: pd.Series) -> float:
    return clipped_mean(values.to_numpy())
