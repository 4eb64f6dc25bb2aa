"""What the planner passes on about a layer step, as plain arrays.

Shape legend: A active experts, G GPUs, E routed experts per layer, K experts per token,
T tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from moesim.traces.format.schema import Phase


class ExpertKey(NamedTuple):
    """One routed expert of the model."""

    layer: int
    expert: int


class Swap(NamedTuple):
    """A copy that a cache asks for by itself: `incoming` takes the slot of
    `outgoing`.
    """

    outgoing: ExpertKey
    incoming: ExpertKey


@dataclass(slots=True)
class LayerWork:
    """The work of one MoE layer in one step; policies see it as a `Work`.

    Attributes:
        step, layer, phase, batch: as in `moesim.policies.base.Work`.
        experts: int32 [A], ascending; tokens: int32 [A].
        state: int8 [A]; cpu_s, host_s: float64 [A].
        gpu_s, arrive_s: float64 [G, A].
        routing: uint16 [T, K], experts of every token, best first.
        weights: float16 [T, K] combine weights, or None where the trace has none.
        scores: float16 [T, E] gate scores before top-k, or None.
        predicted: predictor name (``pred1_raw`` …) -> float16 [T, E] scores for a
            coming layer.
        precomputed: bool [A], experts that the CPU began to compute one layer ahead;
            None where there are none. They stay on the CPU.
        link_s: float64 [G], until each link has ended the copy under way; None where
            all links are idle.
    """

    step: int
    layer: int
    phase: Phase
    experts: np.ndarray
    tokens: np.ndarray
    state: np.ndarray
    cpu_s: np.ndarray
    host_s: np.ndarray
    gpu_s: np.ndarray
    arrive_s: np.ndarray
    routing: np.ndarray
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    predicted: Mapping[str, np.ndarray] = field(default_factory=dict)
    batch: int = 0
    precomputed: np.ndarray | None = None
    link_s: np.ndarray | None = None
    # What `moesim.policies.planner.questions` shows policies of it; nobody else's.
    shown: Any = field(default=None, init=False, repr=False, compare=False)


class Assignment(NamedTuple):
    """Where each active expert is computed, and in which order they are launched.

    Attributes:
        lanes: int8 [A]; order: int64 [A]; see `AssignmentPolicy.assign`.
        serial: the CPU begins only when every fetched expert has been computed.
        waits: GPU products wait for every copy of the layer.
    """

    lanes: np.ndarray
    order: np.ndarray
    serial: bool = False
    waits: bool = False


class Precompute(NamedTuple):
    """Experts of the next layer that the CPU starts on this layer's hidden state.

    `experts` int32 [B] ascending, `tokens` int32 [B] predicted for each. Those that the
    next layer really uses are joined there; the others were in vain. `routing` uint16
    [T, K], the experts predicted for each token, tells which tokens those are: where
    experts really work, an expert that was not predicted for a token is computed in its
    own layer.
    """

    experts: np.ndarray
    tokens: np.ndarray
    routing: np.ndarray


class GateOutputs(NamedTuple):
    """Outputs of a layer's gate for the tokens of this step.

    `experts` uint16 [T, K] as recorded, best first; `weights` float16 [T, K] or None;
    `scores` float16 [T, E] or None; `predicted` float16 [T, E]: this gate's scores on
    the input of the layer before (``pred1_raw``), or None.
    """

    step: int
    layer: int
    phase: Phase
    experts: np.ndarray
    weights: np.ndarray | None
    scores: np.ndarray | None
    predicted: np.ndarray | None = None


class Routing(NamedTuple):
    """Experts that really serve the tokens: `experts` uint16 [T, K], `weights` float
    [T, K] or None. Unused columns have weight 0 and expert 65535.
    """

    experts: np.ndarray
    weights: np.ndarray | None
