"""A cache with fixed content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from moesim.policies.base import PolicyError
from moesim.policies.cache._own_replacements import NoAdmissionCache
from moesim.policies.parameters import expect_choice
from moesim.policies.sizes import GLOBAL, fitting

if TYPE_CHECKING:
    from moesim.policies.run_context import RunContext

Fill = Literal["auto", "calibrated", "lowest", "random", "front", "last"]


class Static(NoAdmissionCache):
    """Fill the cache before the run and never change it.

    In per-layer scope every layer is filled by itself; in global scope the whole model
    is ranked at once (as Fiddler places its popular experts).

    Args:
        fill: ``calibrated`` takes the most often activated experts of the calibration
            trace, ties to the lower id (Fiddler, DAOP; kt-kernel's ``frequency`` in
            global scope); ``lowest`` the lowest ids of every layer (HybriMoE's released
            code; kt-kernel's ``uniform``); ``random`` draws with the run's seed
            (kt-kernel's own is 42); ``front`` fills the first layers whole (kt-kernel's
            ``front-loading``), ``last`` the last ones (llama.cpp's ``-ngl``): both need
            the global scope, as a layer's own slots cannot go to another. ``auto``, the
            default, is ``calibrated`` where there is a calibration, because popularity
            is what placements are published with, else ``lowest``.

    Source: named beside each fill.
    """

    def __init__(self, *, fill: Fill = "auto") -> None:
        expect_choice("fill", fill, Fill)
        self.fill = fill

    def start(self, context: RunContext) -> None:
        """Keep what ranks the experts.

        Raises:
            PolicyError: ``fill=calibrated`` without calibration counts, or whole layers
                with slots per layer.
        """
        if self.fill in {"front", "last"} and context.scope != GLOBAL:
            raise PolicyError(
                f"cache policy 'static': fill={self.fill} fills whole layers, which"
                " slots per layer do not allow; add --cache-scope global"
            )
        if self.fill == "calibrated" and context.calibration is None:
            raise PolicyError(
                "cache policy 'static': fill=calibrated needs the counts of a"
                " calibration trace; found none"
            )
        self._context = context

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Rank all experts, most wanted first, and keep what fits: int64 flat keys,
        ascending.
        """
        context = self._context
        return fitting(
            self._rank(),
            capacity_slots,
            context.scope,
            context.served,
            pool_bytes=context.pool_bytes,
            shape=context.shape,
        )

    def _rank(self) -> np.ndarray:
        """Float64 [L, E], lowest for the most wanted; stable sorting leaves ties to the
        lower key.
        """
        shape = self._context.shape
        calibration = self._context.calibration
        if self.fill in {"front", "last"}:
            layer = np.arange(shape.layers, dtype=np.float64)
            by_layer = layer if self.fill == "front" else -layer
            return np.repeat(by_layer[:, None], shape.experts, axis=1)

        # The run's seed, not a seed of our own: another seed is another placement.
        if self.fill == "random":
            random = np.random.default_rng(self._context.seed)
            return random.random((shape.layers, shape.experts))

        if self.fill == "lowest" or calibration is None:
            expert = np.arange(shape.experts, dtype=np.float64)
            return np.tile(expert, (shape.layers, 1))

        # Negated counts: the most often activated rank lowest.
        return -np.asarray(calibration, dtype=np.float64)
