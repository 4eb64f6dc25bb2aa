"""Many runs, in parallel and never twice: `sweep` over any options, with results that a
stopped sweep goes on from.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.runs.config import RunConfig, takes_options
from moesim.runs.sweeps.execution import run_tasks
from moesim.runs.sweeps.plan import (
    CONFIG_SUFFIXES,
    combined,
    configs_of_file,
    planned,
    split_options,
)
from moesim.runs.sweeps.rows import (
    ResultStore,
    as_frame,
    as_table,
    carry_out,
    read_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd
    import pyarrow as pa

    from moesim.policies.base import PolicyError
    from moesim.policies.faults import PolicyFault
    from moesim.runs.sweeps.plan import Plan
    from moesim.traces.format.reader import Trace


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        table: a row for each run that could be, in the order of the plan.
        axes: fields of the configuration that have several values.
        refusals: reasons of runs that could not be, with how many there were.
        stored: runs whose results were there already.
    """

    table: pa.Table
    axes: list[str]
    refusals: dict[str, int]
    stored: int

    def frame(self, *, details: bool = False) -> pd.DataFrame:
        """The table as a data frame, see `as_frame`."""
        return as_frame(self.table, axes=self.axes, details=details)

    def refusal_lines(self) -> list[str]:
        """Which runs were left out, and why."""
        runs = self.table.num_rows + sum(self.refusals.values())
        return [
            f"left out {count} of {runs} runs: {reason}"
            for reason, count in self.refusals.items()
        ]


@takes_options(RunConfig, without=["policy"])
def sweep(
    trace: RunConfig | str | Path | Trace | Sequence[Any] | None = None,
    policies: str | Sequence[str] | None = None,
    *,
    results: str | Path | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    details: bool = False,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Replay every combination of the values of some options.

    Every option may be a list, which makes it an axis::

        moesim.sweep("tiny", ["greedy", "fiddler"], cache_ratio=[0.1, 0.2])

    A combination that cannot be, such as a memory that is too small, is left out with a
    warning.

    Args:
        trace: a moesim trace, by path or opened; a configuration, or a TOML file in
            which lists are axes; or a list of traces or of configurations.
        policies: systems or assignment policies, in a list or separated by commas;
            ``greedy+lru+residual`` names cache and prefetch as well.
        results: folder of results. Runs that are there are not run again, others are
            added; see `results`.
        jobs: replays at the same time; None takes as many as pay.
        cluster: a Dask scheduler (``tcp://192.168.0.5:8786``).
        details: keep the columns that only statistics, pictures and pages read.
        progress: called with the share that is done.
        options: fields of `moesim.runs.config.RunConfig`, each a value or a list.

    Returns:
        One row for each run: the axes (also named by ``attrs["axes"]``), the other
        options, all metrics, and digests.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as `replay`, and
            before anything runs where possible; also if no run is possible at all.
        ChildProcessError: workers were killed time and again.
    """
    if policies is not None:
        options["policy"] = policies
    configs = configs_of(trace, options)
    swept = run_sweep(
        planned(configs), results=results, jobs=jobs, cluster=cluster, progress=progress
    )
    for line in swept.refusal_lines():
        warnings.warn(line, stacklevel=2)
    return swept.frame(details=details)


def configs_of(
    trace: RunConfig | str | Path | Trace | Sequence[Any] | None,
    options: Mapping[str, Any],
) -> list[RunConfig]:
    """Every configuration that the arguments of `sweep` describe."""
    single, axes = split_options(options)
    return [
        config
        for base in bases_of(trace, options)
        for config in combined(RunConfig.of(base, **single), axes)
    ]


def bases_of(
    trace: RunConfig | str | Path | Trace | Sequence[Any] | None,
    options: Mapping[str, Any],
) -> list[RunConfig]:
    """The configurations that the first argument of `sweep` describes, before options
    replace values of theirs.
    """
    bases: list[RunConfig] = []
    sources: Sequence[Any] = trace if isinstance(trace, list | tuple) else [trace]
    for source in sources:
        if isinstance(source, str | Path) and str(source).endswith(CONFIG_SUFFIXES):
            bases += configs_of_file(source, given=options)
        else:
            bases.append(RunConfig.of(source))
    return bases


def run_sweep(
    plan: Plan,
    *,
    results: str | Path | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> SweepResult:
    """Carry out a plan: what is not among the results yet.

    Args:
        plan: of runs.
        results, jobs, cluster, progress: as `sweep` takes them.

    Raises:
        PolicyError, PolicyFault: no run is possible.
        ConfigError, ChildProcessError: as `sweep`.
    """
    kept = None if results is None else ResultStore(results)
    digests = [point.digest for point in plan.points]
    stored = as_table([]) if kept is None else read_results(kept.folder, set(digests))
    there = set(stored.column("digest").to_pylist())
    todo = [point for point in plan.points if point.digest not in there]
    rows: list[dict[str, Any]] = []
    refusals: dict[str, list[Exception]] = {}

    def collect(_index: int, row: dict[str, Any] | PolicyError | PolicyFault) -> None:
        if not isinstance(row, dict):
            refusals.setdefault(str(row), []).append(row)
            return
        rows.append(row)
        if kept is not None:
            kept.add(row)

    try:
        run_tasks(
            carry_out,
            todo,
            collect,
            jobs=jobs,
            cluster=cluster,
            rows=plan.rows * len(todo) // max(1, len(plan.points)),
            progress=progress,
        )
    finally:
        # An interrupt too leaves behind what was finished.
        if kept is not None:
            kept.flush()

    # In the order of the plan, wherever they come from.
    by_digest = {row["digest"]: row for row in [*stored.to_pylist(), *rows]}
    table = as_table(by_digest[each] for each in digests if each in by_digest)
    if not table.num_rows and refusals:
        raise next(iter(refusals.values()))[0]
    reasons = {reason: len(errors) for reason, errors in refusals.items()}
    return SweepResult(table, plan.axes, reasons, len(plan.points) - len(todo))
