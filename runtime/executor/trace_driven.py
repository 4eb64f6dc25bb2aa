"""Any model's offloading without its weights: routing comes from a trace, everything
else is really done.

Experts have the shape (or a stated fraction) of the model and random weights; the dense
part is computed at its real widths (`runtime/models/dense.py`), products come from
slots and host memory, misses are copied and read. Only the answers mean nothing. The
future is in the trace, so oracles may run.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from moesim.base.errors import StoreError, TraceError
from moesim.hwprofiles.dense_costs import DenseSizes
from moesim.runtime.models.expert_layout import group_tokens, swiglu_layout, torch_dtype
from moesim.runtime.store.store import record_stride
from moesim.traces.models import model_shape
from moesim.traces.weight_formats import FLOAT_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.runtime.executor.executor import Executor
    from moesim.runtime.models.dense import DenseStack
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.schema import ModelShape


def shape_for(
    routed: ModelShape, spec: str | None, dtype: str = "float32"
) -> ModelShape:
    """Give a trace's routing the sizes of a model.

    Args:
        routed: shape in the trace's header: layers, experts and top-k are kept, since
            routing has them.
        spec: whose sizes, e.g. ``qwen3-30b-a3b/4``; the trace's own model when None.
        dtype: of the weights: it decides the bytes, which are those of whole records,
            as slots and reads have them.

    Raises:
        TraceError: no such model, or experts of one layer differ in size.
        ValueError: no such dtype.
    """
    if routed.bytes_by_expert:
        raise TraceError(
            f"{routed.name}: experts of one layer differ in size, and the records of a"
            " store do not; simulate this trace (moesim replay), or run the one it was"
            " made of"
        )
    sizes = routed if spec is None else model_shape(spec, FLOAT_FORMATS[dtype])
    kind = torch_dtype(dtype)
    layout = swiglu_layout(sizes.hidden, sizes.expert_intermediate, kind)
    named = replace(
        sizes,
        name=sizes.name if spec is None else spec,
        layers=routed.layers,
        experts=routed.experts,
        top_k=routed.top_k,
        expert_bytes=(record_stride(layout),) * routed.layers,
        dtype=FLOAT_FORMATS[dtype],
    )
    return replace(named, other_bytes=DenseSizes.of(named).all_params * kind.itemsize)


def check_store(
    store: ExpertStore, shape: ModelShape, distinct: int | None = None
) -> None:
    """Make sure that a store has experts of this shape.

    Args:
        store: open.
        shape: whose experts it should have.
        distinct: different records that it should have; None for any number.

    Raises:
        StoreError: it has others.
    """
    layout = store.layout(0)
    stored = (
        store.layers,
        store.experts(0),
        layout.tensors[0].shape[1],
        layout.tensors[1].shape[1],
        store.record_bytes(0),
    )
    expected = (
        shape.layers,
        shape.experts,
        shape.hidden,
        shape.expert_intermediate,
        shape.expert_bytes[0],
    )
    if stored != expected:
        words = "{} layers x {} experts of {} x {}, {} bytes"
        raise StoreError(
            f"{store.directory}: expected {words.format(*expected)} ({shape.name}),"
            f" found {words.format(*stored)}; name another directory"
        )
    there = store.index.distinct
    if distinct not in (None, there):
        raise StoreError(
            f"{store.directory}: expected {distinct} different records (--distinct),"
            f" found {there or 'one for each expert'}; name another directory, or drop"
            " --distinct"
        )


class ForcedRouting:
    """Walks a trace through the device: dense parts, and requests for the experts that
    the trace names.

    Args:
        executor: answers the requests.
        dense: the dense part, on the executor's device.
        steps: forward passes of composed batches.
    """

    def __init__(
        self, executor: Executor, dense: DenseStack, steps: Iterable[RoutedStep]
    ) -> None:
        self._executor = executor
        self._dense = dense
        # Cutting a trace into steps is no part of a run, nor is memory for keys and
        # values.
        self._steps = list(steps)
        self._blocks = [executor.planner.block_of(step) for step in self._steps]
        self._hidden = torch.empty(0)
        self._extent = (1, 1)  # sequences and context of the step under way
        executor.layer_step.predict_by(self._dense_ahead)
        dense.allocate_cache(
            max((step.sequences for step in self._steps), default=1),
            max((step.context_tokens for step in self._steps), default=1),
        )
        # No library initialises itself inside the first step.
        with torch.inference_mode():
            dense.head(dense.layer(0, dense.embed(1), 1, 1)[0], 1)

    def __call__(self) -> None:
        """Run it; pass this to `Executor.run`."""
        planner = self._executor.planner
        for step, block in zip(self._steps, self._blocks, strict=True):
            hidden = self._dense.embed(step.tokens)
            self._extent = step.sequences, step.context_tokens
            self._executor.begin_step(step.step, step.phase, step.batch, block)
            for routed in step.layers:
                hidden, normed = self._dense.layer(routed.layer, hidden, *self._extent)
                # What predicts coming layers is part of this one's dense part.
                ahead = planner.evaluations(routed.layer, step.phase)
                self._dense.gates(routed.layer, ahead.gates, normed)
                self._hidden = hidden
                hidden = self._experts(routed, hidden, normed)
            self._dense.head(hidden, step.sequences)
            self._executor.end_step(step.tokens, step.sequences)

    def _dense_ahead(self, layer: int, parts: int) -> None:
        """Compute coming layers' dense parts, one on the other's result."""
        hidden = self._hidden
        for coming in range(layer + 1, layer + 1 + parts):
            # Keys and values that it writes are overwritten in the layer's own turn.
            hidden, _ = self._dense.layer(coming, hidden, *self._extent)

    def _experts(
        self, routed: RoutedLayer, hidden: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        """Add the experts' answers; in a ragged prefill the last tokens only are asked
        about.
        """
        asked = len(routed.routing)
        rows = normed if asked == len(hidden) else normed[-asked:]
        if routed.weights is None:
            weights = torch.full(
                routed.routing.shape,
                1 / routed.routing.shape[1],
                dtype=rows.dtype,
                device=rows.device,
            )
        else:
            recorded = torch.from_numpy(
                np.ascontiguousarray(routed.weights, np.float32)
            )
            weights = self._executor.device.send(recorded.to(rows.dtype))
        answer = self._executor.layer(
            routed, rows, weights, group_tokens(routed.routing)
        )
        if asked == len(hidden):
            return hidden + answer
        hidden = hidden.clone()
        hidden[-asked:] += answer
        return hidden


_PROC: Final = Path("/proc/self")

# proc(5): writing 5 to clear_refs sets the highest mark back to what is resident.
_RESET_PEAK: Final = "5"


def forget_peak() -> None:
    """Set the highest mark of this process's memory back, where the system can."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def peak_bytes() -> int:
    """Most host memory that this process held since the mark was set back; since its
    start where it cannot be.
    """
    try:
        status = (_PROC / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _peak_since_start()

    for line in status.splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10  # the kernel writes kB
    return _peak_since_start()


def _peak_since_start() -> int:
    """Ask the system for the highest mark since the process began."""
    import resource  # noqa: PLC0415 - not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, all others KiB.
    return most if sys.platform == "darwin" else most << 10
