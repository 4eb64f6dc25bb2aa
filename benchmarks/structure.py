"""The structure of every system and of every pair of policies: real runs, replayed with
their own measured times.

    python -m benchmarks.structure t.parquet --hw hw.toml --steps 6 --pairs

Each system, and with ``--pairs`` combinations that show every two policies of different
kinds together, runs with batches of 1 and 4, all experts in host memory or a part of
them, and a drawn size of cache. It ends with code 1 when a structure differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.combinations import pairwise, served
from moesim.base.errors import TraceError
from moesim.evidence.validation.structure import Structure, compare_structure
from moesim.policies.base import PolicyError
from moesim.policies.systems import SYSTEMS
from moesim.runs.config import MemoryOptions, RunConfig
from moesim.runs.machine import machine_profile, open_random_store
from moesim.runs.measured import columns_of, run_trace
from moesim.runs.setup import Setup
from moesim.runtime.executor.trace_driven import shape_for
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.reader import Trace

BATCHES = (1, 4)
_DISTINCT = 64


class Cells:
    """Runs cells of one trace and compares their structures.

    Args:
        trace: routing.
        profile: of this machine.
        spec: sizes of the experts.
        store: the experts.
        steps: forward passes of each run.
    """

    def __init__(
        self,
        trace: Trace,
        profile: HardwareProfile,
        spec: str | None,
        store: ExpertStore,
        steps: int,
    ) -> None:
        self._trace = trace
        self._profile = profile
        self._spec = spec
        self._store = store
        self._steps = steps
        self._draws = np.random.default_rng(1)

    def structure(self, name: str, batch: int, *, reads: bool) -> Structure:
        """Run a system or a combination, and compare.

        Raises:
            PolicyError, TraceError: it cannot run here.
        """
        trace = self._trace
        shape = shape_for(trace.shape, self._spec)
        host_bytes = None
        if reads:
            experts = shape.experts * shape.layers
            host_bytes = max(40, experts // 2) * shape.max_expert_bytes
        assignment, *parts = name.split("+")
        kinds = ("cache", "prefetch", "routing")
        options: dict[str, Any] = dict(zip(kinds, parts, strict=False))
        options |= {
            "batch": batch,
            "steps": self._steps,
            "memory": MemoryOptions(
                slots_per_layer=int(self._draws.integers(0, shape.experts)),
                host_memory_bytes=host_bytes,
            ),
        }
        run = run_trace(
            trace,
            assignment,
            shape=self._spec,
            hw=self._profile,
            store=self._store,
            dtype="float32",
            **options,
        )
        config = RunConfig.of(trace, assignment, **options)
        setup = Setup.of(config, trace, profile=self._profile, shape=run.shape)
        walk = compose(
            trace,
            batch=batch,
            steps=self._steps,
            columns=columns_of(trace, setup.policies()),
        )
        return compare_structure(name, setup, walk, run.timeline)


def names_of(trace: Trace, systems: list[str], *, pairs: bool) -> Iterator[str]:
    """Systems, and combinations of policies."""
    yield from systems or SYSTEMS
    if pairs:
        yield from pairwise(served(trace.columns)[0])


def main() -> int:
    """Print one row per cell that differs, and how many do not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--hw", default=None, help="profile of this machine")
    parser.add_argument("--shape", default=None, help="sizes of the experts")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--systems", nargs="*", default=[], help="some, not all")
    parser.add_argument("--minutes", type=float, default=1e9, help="ends in good time")
    arguments = parser.parse_args()
    trace = open_trace(arguments.trace)
    profile = machine_profile(arguments.hw)
    shape = shape_for(trace.shape, arguments.shape)
    until_s = time.monotonic() + 60.0 * arguments.minutes

    refused: Counter[str] = Counter()
    structures: list[Structure] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_random_store(shape, Path(folder), "float32", _DISTINCT) as store,
    ):
        cells = Cells(trace, profile, arguments.shape, store, arguments.steps)
        for name in names_of(trace, arguments.systems, pairs=arguments.pairs):
            for batch in BATCHES:
                for reads in (False, True):
                    if time.monotonic() > until_s:
                        break
                    try:
                        structure = cells.structure(name, batch, reads=reads)
                    except (PolicyError, TraceError) as error:
                        refused[str(error)] += 1
                        continue
                    structures.append(structure)
                    if not structure.is_equal:
                        place = f"batch {batch}{', reads' * reads}"
                        worst = f"worst step {structure.worst:.2%}"
                        print(name, place, worst, *structure.findings(), sep="; ")
    _sum_up(structures, refused)
    return int(not all(structure.is_equal for structure in structures))


def _sum_up(structures: list[Structure], refused: Counter[str]) -> None:
    errors = np.abs(np.concatenate([one.step_errors for one in structures]))
    accesses = sum(one.accesses for one in structures)
    others = sum(sum(one.other_states.values()) for one in structures)
    equal = sum(one.is_equal for one in structures)
    print(f"{equal} of {len(structures)} runs equal, {len(errors)} steps")
    print(
        f"step times: median {np.median(errors):.2g}, 99 %"
        f" {np.quantile(errors, 0.99):.2g}, worst {errors.max():.2g}"
    )
    print(f"access states: {accesses - others:,} of {accesses:,} equal")
    shares: Counter[str] = Counter()
    for one in structures:
        shares.update(one.shares)
    for part, share in shares.most_common():
        print(f"  {part}: {share / len(structures):.1%} of the workers' time")
    for reason, count in refused.most_common():
        print(f"refused {count}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
