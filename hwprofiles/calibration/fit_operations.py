"""Fits what operations of a lane take: expert products, copies and reads.

The slowdown by whatever overlapped an operation is divided out first: it is found by
regressing the logarithm of an operation's duration on who else was busy for which
share of its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from moesim.hwprofiles import paths
from moesim.hwprofiles.calibration.estimates import (
    Resampled,
    clipped_mean,
    comparable,
    contrast,
    fit_slowdowns,
    quantiles_around_one,
    renumbered,
)
from moesim.hwprofiles.calibration.fit_curves import (
    LEAST_SAMPLES,
    Points,
    fit_roofline,
    groups_with_enough,
)
from moesim.hwprofiles.calibration.observations import units_of
from moesim.hwprofiles.lanes import (
    COMPUTE_KINDS,
    CPU,
    H2D,
    LANE_KINDS,
    SSD,
    LaneKind,
)
from moesim.hwprofiles.schema import ReferenceExpert
from moesim.traces.timeline.spans import COMPUTE, FETCH, PREFETCH, READ, REPLACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.hwprofiles.calibration.fit_curves import Entries
    from moesim.hwprofiles.calibration.observations import Operations, Spans

LEAST_OVERLAPPED = 40
"""Operations with an overlap of a tenth or more that a slowdown is worth being read
from.
"""
_OVERLAPPED = 0.1
_BLOCKS = 4
"""Of a run, that are resampled. Source: machines with known factors,
`benchmarks/calibration_coverage.py`.
"""

_QUARTERS = np.round(2.0 ** np.arange(0.0, 14.0, 0.25))
_SIZE_EDGES = np.unique(_QUARTERS.astype(np.int64))
"""Borders between groups of products by tokens: four to a doubling."""

SPAN_KINDS = {H2D: (FETCH, PREFETCH, REPLACE), SSD: (READ,)}
"""Links that are calibrated by runs, and their operations. Copies back to the host keep
the costs that were measured in isolation.
"""


class OperationFit:
    """Fits products and copies of all runs.

    Args:
        spans: of the runs.
        entries: where results go.

    Attributes:
        first_excess: what first products of layer steps take beyond later ones.
    """

    def __init__(self, spans: Spans, entries: Entries) -> None:
        self._spans = spans
        self._shapes = spans.shapes
        self._entries = entries
        self.first_excess: list[pd.DataFrame] = []

    def alone(self, lane_kind: LaneKind) -> pd.DataFrame | None:
        """Enter what others cost operations of a kind of lane.

        Returns:
            The table of the operations, with ``group``, a number for equal work, and
            the seconds that they would have taken ``alone``; None where they are too
            few.
        """
        kinds = SPAN_KINDS.get(lane_kind, (COMPUTE,))
        operations = self._spans.operations(lane_kind, kinds)
        ops = operations.table
        if len(ops) < LEAST_SAMPLES:
            return None
        # Experts of a model have few sizes, so equal bytes are equal work; products are
        # it by experts and by about as many tokens.
        group = ops["size"]
        if lane_kind in COMPUTE_KINDS:
            group = ops["shape"] * len(_SIZE_EDGES) + np.searchsorted(
                _SIZE_EDGES, ops["size"], side="right"
            )
        # The first step may be a prefill, whose operations have other neighbours.
        ops["part"] = 2 * ops["run"] + (ops["step"] == 0)
        ops["group"] = renumbered(group.to_numpy())
        ops["alone"] = self._divide_out_contention(lane_kind, operations)
        return ops

    def fit(self, lane_kind: LaneKind, extra_s: float) -> None:
        """Fit products, copies or reads: contention, seconds by tokens or bytes,
        roofline or rate, distribution.

        Args:
            lane_kind: a compute lane, or one of `SPAN_KINDS`.
            extra_s: by what the next operation begins later here than on the lane that
                is handed work the fastest.
        """
        ops = self.alone(lane_kind)
        if ops is None:
            return
        computes = lane_kind in COMPUTE_KINDS
        ops["seconds"] = ops["alone"] + extra_s
        usual = _usual(lane_kind, ops)
        usable = usual
        if computes:
            later = usual & ~ops["first"] & ~ops["late"]
            enough = later.sum() >= LEAST_SAMPLES
            usable = later if enough else pd.Series(data=True, index=ops.index)
        chosen = ops[usable]
        chosen = chosen[groups_with_enough(chosen["group"])]
        by_group = chosen.groupby("group")
        mean_s = by_group["seconds"].apply(lambda of: clipped_mean(of.to_numpy()))
        # Groups too small for a point have no expected time to be compared with.
        expected_s = ops["group"].map(mean_s)
        ratios = (ops["seconds"] / expected_s)[usable].dropna()
        if computes:
            firsts = ops[ops["first"] & usual & expected_s.notna()]
            self.first_excess.append(
                firsts.assign(
                    seconds=firsts["seconds"] - expected_s,
                    # Who shares a layer step is charged once as well, where it joins;
                    # the SSD in the gap before the operation.
                    shared=0.0,
                    tiered=0.0,
                )
            )
        if lane_kind in (CPU, H2D):
            # First products have an excess of their own, which is noted above.
            rows = ops[~ops["first"] | (lane_kind is H2D)]
            self.after_read(
                lane_kind.name,
                rows["alone"] if computes else rows["seconds"],
                rows["fresh"],
                rows,
                # Within runs, so that what the machine did meanwhile hits both alike.
                ["group", "part"],
            )
        self._points(lane_kind, chosen, quantiles_around_one(ratios.to_numpy()))
        self._entries.put_held_out(
            lane_kind.name,
            ops[usable]["alone" if computes else "seconds"],
            ops[usable]["group"],
            ops[usable]["step"] % 2 == 1,
        )

    def _points(
        self, lane_kind: LaneKind, ops: pd.DataFrame, quantiles: tuple[float, ...]
    ) -> None:
        """Enter a roofline over all shapes, and a curve over tokens of two; of a link
        latency and bandwidth, and a curve over bytes.
        """
        of_point = renumbered(ops["group"].to_numpy())
        points = Points(ops["seconds"].to_numpy(), of_point, units_of(ops))
        # Rounded, since tokens within a group differ and a file should be readable.
        sizes = ops["size"].groupby(of_point).mean().round(3)
        source = (
            "{} of designed runs through the executor, contention divided out, mean"
        )
        name = lane_kind.name
        if lane_kind not in COMPUTE_KINDS:
            source = source.format("copies")
            line = fit_roofline(sizes.to_numpy(), np.zeros(len(sizes)), points)
            self._entries.put_fit(paths.link(name), line, source)
            at = sizes.loc[of_point].set_axis(ops.index)
            self._entries.put_curve(
                paths.points(name),
                ops["seconds"],
                at,
                "bytes",
                source,
                quantiles=quantiles,
            )
            return
        numbers = ops["shape"].groupby(of_point).first()
        shapes = [self._shapes[number] for number in numbers]
        # Three constants need three points.
        if len(sizes) >= 3:
            flops = [shape.expert_flops_per_token for shape in shapes]
            roof = fit_roofline(
                [float(shape.max_expert_bytes) for shape in shapes],
                sizes.to_numpy() * np.array(flops, np.float64),
                points,
            )
            self._entries.put_fit(
                paths.roofline(name),
                roof,
                "roofline through the means of products by shape and tokens",
            )
        # A profile has room for two sizes; `by_size` lists the largest first.
        for small, number in zip((False, True), self.by_size(), strict=False):
            of_shape = (ops["shape"] == number).to_numpy()
            if of_shape.any():
                shape = self._shapes[number]
                at = sizes.loc[of_point[of_shape]].set_axis(ops.index[of_shape])
                self._entries.put_curve(
                    paths.points(name, small=small),
                    ops["seconds"][of_shape],
                    at,
                    "tokens",
                    source.format("products"),
                    reference=ReferenceExpert(
                        hidden=shape.hidden,
                        intermediate=shape.expert_intermediate,
                        bytes=shape.max_expert_bytes,
                        dtype=shape.dtype,
                    ),
                    quantiles=quantiles,
                )

    def _divide_out_contention(
        self, lane_kind: LaneKind, ops: Operations
    ) -> np.ndarray:
        """Fit what others cost operations of one kind of lane; return the seconds that
        these would have taken alone, float64 [N].
        """
        table = ops.table
        seconds = table["seconds"].to_numpy()
        # By kind of lane, which operations it worked beside for a tenth of their time.
        every = _busy(np.arange(ops.states.shape[1]), range(len(LANE_KINDS)))
        overlapped = ops.states @ every > _OVERLAPPED
        others = [
            column
            for column, other in enumerate(LANE_KINDS)
            if other is not lane_kind
            and overlapped[:, column].sum() >= LEAST_OVERLAPPED
        ]
        if not others:
            return seconds
        # States that differ only in lanes which are not told apart become one.
        busy, merged = np.unique(every[:, others], axis=0, return_inverse=True)
        merge = np.eye(len(busy))[merged.ravel()]
        shares = ops.states @ merge

        # First products take longer the more copies there are, whether or not these run
        # beside them, which would count as being slowed.
        told_by = np.ones(len(table), np.bool_)
        if lane_kind in COMPUTE_KINDS:
            later = ~(table["first"] | table["late"]).to_numpy()
            if overlapped[later][:, others].sum(axis=0).min() >= LEAST_OVERLAPPED:
                told_by = later
        chosen = table[told_by]
        slowed = fit_slowdowns(
            np.log(seconds[told_by]),
            shares[told_by],
            (ops.expected @ merge)[told_by],
            busy,
            # Unlike in time, and unlike in what runs beside them.
            chosen.groupby(["group", "fresh", "first"]).ngroup().to_numpy(),
        )
        redrawn = slowed.redrawn(
            units := units_of(chosen, _BLOCKS),
            renumbered(chosen["run"].to_numpy()),
            self._entries.rng,
        )
        factors = slowed.factors
        estimates = Resampled(factors, redrawn, units.count).estimates(1.0)
        for estimate, column in zip(estimates, others, strict=True):
            self._entries.put(
                paths.contention(lane_kind.name, LANE_KINDS[column].name),
                estimate,
                "log duration of designed runs' operations regressed on who else was"
                " busy for which share; what was expected from their start is the"
                " instrument",
                samples=int(overlapped[told_by, column].sum()),
            )
        return np.asarray(seconds * (shares @ (factors**-busy).prod(axis=1)))

    def after_read(
        self,
        part: str,
        seconds: pd.Series,
        fresh: pd.Series,
        table: pd.DataFrame,
        alike: list[str],
    ) -> dict[int, float]:
        """Enter by what operations differ that follow a read from the SSD from those of
        the same group that do not.

        Args:
            part: of the profile's costs.
            seconds: of each operation.
            fresh: whether it follows a read.
            table: its ``shape``, ``run`` and ``step``, in the same order.
            alike: columns that agree in operations of equal work of the same run.

        Returns:
            The factor by number of shape; none where too few can be compared.
        """
        groups = table.groupby(alike).ngroup().to_numpy()
        columns = np.log(seconds.to_numpy()), fresh.to_numpy(), groups
        factors = {}
        for small, number in zip((False, True), self.by_size(), strict=False):
            # Caches hold more of a small expert than of a large one.
            rows = np.flatnonzero(table["shape"] == number)
            rows = rows[comparable(fresh.to_numpy()[rows], groups[rows])]
            if fresh.to_numpy()[rows].sum() < LEAST_OVERLAPPED:
                continue

            def slower(drawn: np.ndarray, rows: np.ndarray = rows) -> float:
                return contrast(*(column[rows[drawn]] for column in columns))

            (factor,) = Resampled.of(
                slower, units_of(table.iloc[rows]), self._entries.rng
            ).estimates()
            self._entries.put(
                paths.after_read(part, small=small),
                factor,
                "what follows a read in designed runs over the same that does not, in"
                " the same run",
                samples=len(rows),
            )
            factors[number] = factor.value
        return factors

    def by_size(self) -> list[int]:
        """Numbers of the shapes, the largest experts first."""
        return sorted(
            range(len(self._shapes)),
            key=lambda number: -self._shapes[number].max_expert_bytes,
        )


def _busy(states: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    """Which kinds of lanes are busy in a state, float64 [K, C]."""
    return (states[:, None] >> np.array(columns) & 1).astype(np.float64)


def _usual(lane_kind: LaneKind, ops: pd.DataFrame) -> pd.Series:
    """Operations that do not follow a read of their expert, bool [N]: it may lie in
    caches, which matters where host memory is read.
    """
    reads_host = lane_kind in (CPU, H2D) and not ops["fresh"].all()
    return ~ops["fresh"] if reads_host else pd.Series(data=True, index=ops.index)
