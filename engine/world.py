"""What the engine asks of a world: operations, their starts and ends, and a clock.

There are two worlds, virtual (`moesim.sim`) and real (`moesim.runtime.executor`). What
follows from a plan stands in this package once; a world only makes operations, starts
them, takes back those that have not started, and reports ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from moesim.engine.lanes import Admission, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from moesim.policies.planner.plan import Copies, Plan


class World(Protocol[Op]):
    """A clock with lanes. What a wait is, its driver knows."""

    @property
    def admission(self) -> Admission:
        """The gate that copies and reads pass when they could start."""

    @property
    def lanes(self) -> Sequence[str]:
        """Names of the lanes, by index."""

    # -- operations -------------------------------------------------------------------

    def submit(self, operation: Op, priority: int = ..., /) -> None:
        """Queue an operation; it starts at once if its worker is idle."""

    def withdraw(self, operation: Op, priority: int, /) -> None:
        """Take back an operation that has not started."""

    def offer(self) -> None:
        """Let workers look again at operations that waited for a place."""

    def read(self, step: int, layer: int, expert: int, *, demanded: bool) -> Op:
        """Make the read of an expert from the SSD into host memory."""

    def copy(self, copies: Copies, position: int, step: int, /) -> Op:
        """Make the copy of ``copies.experts[position]`` from host memory to a GPU."""

    def computes(self, plan: Plan, /) -> Iterable[Op]:
        """Make the products of a layer step, in launch order.

        What was computed ahead of its gate for all of its tokens is left out.
        """

    def precomputes(self, plan: Plan, /) -> Iterable[Op]:
        """Make the products of the next layer's experts that the CPU starts now."""

    def predictions(self, plan: Plan, /) -> Iterable[Op]:
        """Make what the GPU evaluates of coming layers in order to predict them.

        A world whose predictions are part of the model's own work makes nothing.
        """

    # -- what the engine reports ------------------------------------------------------

    def placed(self, operation: Op, gpu: int, /) -> None:
        """Note that a copy or (GPU -1) a read has taken its place and starts now."""

    def write_back(self, operation: Op, layer: int, expert: int, /) -> None:
        """Copy an expert to host memory that has left for a copy that starts now."""

    def computed(self, operation: Op | None, /) -> None:
        """Note that the last product of a layer step has ended; None if it had none."""

    # -- one layer step ---------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the run began."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Nothing starts or ends in the block."""

    def planned(self, plan: Plan, /) -> Iterable[Any]:
        """Note every access and spend the planning time; yields waits."""

    def launching(self, plan: Plan, /) -> None:
        """Make ready for the products of a plan, before anything of it is queued."""

    def all_computed(self) -> Any:
        """Wait for the last product of the layer step."""

    def joined(self, plan: Plan, /, *, cpu_used: bool) -> Iterable[Any]:
        """Bring results together; yields waits."""

    def end_layer(self) -> None:
        """Let the model go on; in the engine's exclusive block."""
