"""Which policy is fastest: on one machine with one memory, or on each of several.

Every policy is replayed on every machine with every memory: a small sweep whose runs
are kept whole, for reports on what each of them did. `moesim.sweep` takes more axes and
keeps a row of each run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.options import ConfigError, as_list, is_list
from moesim.base.units import bandwidth, format_bytes, ms, number, percent
from moesim.policies.base import PolicyError
from moesim.policies.parameters import split_policies
from moesim.runs.config import MemoryOptions, RunConfig, takes_options
from moesim.runs.replay import replay, share_of
from moesim.runs.result import busiest, remove_parts, small_table
from moesim.runs.setup import Setup, opened, profile_of
from moesim.runs.sweeps.execution import run_tasks
from moesim.runs.sweeps.rows import bytes_per_s, moved_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runs.config import MemorySize
    from moesim.runs.result import Run
    from moesim.traces.format.reader import Trace

    Machine = str | Path | HardwareProfile

FIGURES = (
    "tpot_s",
    "tpot_p95_s",
    "decode_tokens_per_s",
    "ttft_s",
    "prefill_tokens_per_s",
    "hit_rate_active",
    "makespan_s",
    "energy_j",
)
CELL = ["hw", "memory"]
"""Columns of a comparison's table that say where a policy ran."""


@dataclass(slots=True, repr=False)
class Comparison:
    """The runs of every policy on every machine with every memory.

    Attributes:
        table: one row per run; machines and memories in the order in which they were
            given, the shortest run first in each.
        runs: by machine, memory and policy, named as in the table.
        memories: sizes, by the names that the table gives them.
    """

    table: pd.DataFrame
    runs: dict[tuple[str, str, str], Run]
    memories: dict[str, MemoryOptions]

    @property
    def axis(self) -> str:
        """In which way the sizes of memories are stated, as an attribute of
        `MemoryOptions`.
        """
        return next(iter(self.memories.values())).size[0]

    @property
    def cells(self) -> int:
        """Machines times memories."""
        return len(self.table[CELL].drop_duplicates())

    def by_policy(self) -> dict[str, Run]:
        """One run of each policy; all runs of a comparison on one machine with one
        memory.
        """
        return {policy: run for (_, _, policy), run in self.runs.items()}

    def fastest(self) -> pd.DataFrame:
        """The rows that win their cell; a cell in which every policy sees the future
        has none.
        """
        return self.table[self.table["fastest"]].reset_index(drop=True)

    def __repr__(self) -> str:
        """How much was compared."""
        policies = len(self.by_policy())
        return f"<Comparison of {policies} policies, {len(self.runs)} runs>"

    def _repr_html_(self) -> str:
        """A small table, which notebooks show."""
        heads, rows = comparison_rows(self.table)
        cells = self.table[CELL].to_numpy().tolist()
        return small_table(
            [cell + row for cell, row in zip(cells, rows, strict=True)],
            heads=["machine", "memory", *heads],
        )

    def to_json(self) -> dict[str, Any]:
        """Winners and runs, each with its machine, memory and policy."""
        key_names = [*CELL, "policy"]
        fastest = self.fastest()[key_names].to_dict("records")
        runs = [
            dict(zip(key_names, key, strict=True)) | run.to_json()
            for key, run in self.runs.items()
        ]
        return {"fastest": fastest, "runs": runs}


@takes_options(RunConfig, without=["policy"])
def compare(
    trace: RunConfig | str | Path | Trace,
    policies: Sequence[str] | str,
    *,
    hw: str | Path | HardwareProfile | None = None,
    memory: MemorySize | None = None,
    **options: Any,
) -> tuple[pd.DataFrame, dict[str, Run]]:
    """Replay one trace under several policies on one machine with one memory.

    Returns:
        A table with one row per policy (shortest run first), and the runs by policy.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as
            `compare_cells`; also for several machines or memories, which it takes.
    """
    for name, value in (("hw", hw), ("memory", memory)):
        if is_list(value):
            raise ConfigError(
                f"{name}: expected one value, got {value!r}; moesim.sweep takes several"
            )
    compared = compare_cells(
        trace,
        policies,
        hw=None if hw is None else [hw],
        memory=None if memory is None else [memory],
        keep=True,
        **options,
    )
    return compared.table, compared.by_policy()


@takes_options(RunConfig, without=["policy"])
def compare_cells(
    trace: RunConfig | str | Path | Trace,
    policies: Sequence[str] | str,
    *,
    hw: Sequence[Machine | None] | Machine | None = None,
    memory: Sequence[MemorySize] | MemorySize | None = None,
    out: str | Path | None = None,
    keep: bool = False,
    jobs: int | None = 1,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Comparison:
    """Replay one trace under several policies on several machines with several
    memories.

    A policy may be written ``greedy+lru+residual``: assignment or system, then cache,
    then prefetch.

    Args:
        trace: a moesim trace, by path or opened; or a configuration, whose options
            those given here replace.
        policies: systems or assignment policies, in a list or separated by commas.
        hw: hardware profiles, each by name, path or itself; None takes one, that of the
            configuration.
        memory: sizes of memories, as objects or texts such as ``8GiB``; sizes of the
            GPU cache all stated in the same way. None takes one, that of the
            configuration.
        out: each run has a folder below it, named after its policy, in folders for
            machine and memory where there are several.
        keep: keep the timelines of all runs in memory; without it and without `out`
            they are empty.
        jobs: replays at the same time, in processes of their own where it is more than
            1; None takes as many as pay.
        progress: called with the share that is done.
        options: fields of `moesim.runs.config.RunConfig`.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as `replay`, and
            before anything runs; also for nothing to compare, and for memories that the
            table could not tell apart.
        ChildProcessError: processes were killed time and again.
    """
    config, open_trace = opened(RunConfig.of(trace, **options))
    # Twice the same policy would make two equal rows.
    listed = split_policies(policies) if isinstance(policies, str) else policies
    names = list(dict.fromkeys(listed))
    machines = _machines([config.hw] if hw is None else as_list(hw))
    stated = [config.memory] if memory is None else as_list(memory)
    memories = _memories([MemoryOptions.parse(size) for size in stated])
    for axis, values in (
        ("policy", names),
        ("machine", machines),
        ("memory", memories),
    ):
        if not values:
            raise PolicyError(f"compare: expected at least one {axis}, got none")

    # The digest of a profile belongs to the machine of the configuration only.
    digest = config.hw_digest if hw is None else None
    cells = {
        (machine, size): RunConfig.of(
            config,
            memory=memories[size],
            hw=machines[machine],
            hw_digest=digest,
        )
        for machine, size in product(machines, memories)
    }
    # All of them before the first replay: an hour later an error costs an hour.
    for (machine, size), cell in cells.items():
        try:
            check_each(cell, open_trace, names)
        except ValueError as error:
            if len(cells) == 1:
                raise
            raise type(error)(f"on {machine} with {size}: {error}") from None

    tasks = {}
    for machine, size, policy in product(machines, memories, names):
        # Folders are named after what there is more than one of.
        folders = [
            *([machine] if len(machines) > 1 else []),
            *([size] if len(memories) > 1 else []),
            policy,
        ]
        tasks[machine, size, policy] = _Task(
            cells[machine, size].replaced(policy=policy),
            None if out is None else Path(out, *map(folder_name, folders)),
            keep,
        )

    rows = open_trace.rows * len(tasks)
    results = _all_results(list(tasks.values()), jobs, rows, progress)
    runs = dict(zip(tasks, results, strict=True))
    return Comparison(_table(runs), runs, memories)


def _all_results(
    tasks: Sequence[_Task],
    jobs: int | None,
    rows: int,
    progress: Callable[[float], None] | None,
) -> list[Run]:
    """Replay each; the runs in the order of the tasks."""
    results: dict[int, Run] = {}
    try:
        run_tasks(
            _carry_out,
            tasks,
            results.__setitem__,
            jobs=jobs,
            rows=rows,
            progress=progress,
        )
    except BaseException:
        # Processes that were killed could not clear up after themselves.
        for task in tasks:
            if task.out is not None:
                remove_parts(task.out)
        raise
    return [results[place] for place in range(len(tasks))]


@dataclass(frozen=True, slots=True)
class _Task:
    """One replay of a comparison."""

    config: RunConfig
    out: Path | None
    keep: bool


def _carry_out(task: _Task, progress: Callable[[float], None]) -> Run:
    """Replay one task."""
    return replay(
        task.config,
        out=task.out,
        keep=task.keep,
        progress=share_of(task.config, progress),
    )


def _machines(
    hw: Sequence[str | Path | HardwareProfile | None],
) -> dict[str, HardwareProfile]:
    """Profiles by name; by file where two of them share a name."""
    # The same machine by two names is one machine.
    profiles = list(
        {profile.digest: profile for profile in map(profile_of, hw)}.values()
    )
    names = [profile.name for profile in profiles]
    named = {p.name if names.count(p.name) == 1 else p.where: p for p in profiles}
    if len(named) < len(profiles):
        twice = next(name for name in names if names.count(name) > 1)
        raise PolicyError(
            f"machines: several profiles are named {twice!r}; give each a name of"
            " its own"
        )
    return named


def _memories(memory: Sequence[MemoryOptions]) -> dict[str, MemoryOptions]:
    """Memories by the words for their sizes; they lie on one axis."""
    if len({options.size[0] for options in memory}) > 1:
        raise PolicyError(
            "memories: expected all GPU caches sized in the same way, as ratios, slots"
            " or bytes; mix none"
        )
    named: dict[str, MemoryOptions] = {}
    for options in memory:
        if named.setdefault(options.size_words, options) != options:
            raise PolicyError(
                "memories: two that differ would both be called"
                f" {options.size_words!r}; give GPU caches of sizes further apart, and"
                " sweep what else differs on its own"
            )
    return named


def _table(runs: dict[tuple[str, str, str], Run]) -> pd.DataFrame:
    """A row of figures per run."""
    import pandas as pd  # noqa: PLC0415 - half a second that a plain replay need not pay

    rows = [_row(key, run) for key, run in runs.items()]
    table = pd.DataFrame(rows).astype(dict.fromkeys(FIGURES, float))
    parts = [
        # A stable sort keeps ties in the order in which policies were given.
        part.sort_values("makespan_s", kind="stable")
        for _, part in table.groupby(CELL, sort=False)
    ]
    table = pd.concat(parts, ignore_index=True)

    # An oracle is a bound, not a rival.
    first = table[~table["oracle"]].drop_duplicates(CELL).index
    table["fastest"] = table.index.isin(first)
    return table


def _row(key: tuple[str, str, str], run: Run) -> dict[str, Any]:
    machine, size, policy = key
    lane, share = busiest(run)
    return {
        "hw": machine,
        "memory": size,
        "policy": policy,
        "trace": run.config["trace"],
        "seed": run.config["seed"],
        **{name: run.metrics[name] for name in FIGURES},
        "h2d_bytes": moved_bytes(run.metrics, "h2d"),
        "ssd_bytes": moved_bytes(run.metrics, "ssd"),
        "h2d_bytes_per_s": bytes_per_s(run.metrics, "h2d"),
        "gpu_bytes": run.config["gpu_bytes"],
        "busiest": lane,
        "busiest_share": share,
        "oracle": run.config["oracle"],
    }


def comparison_rows(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Heads of columns, and a row of cells for each run; the SSD only where it is
    used.
    """
    columns: dict[str, Callable[[dict[Any, Any]], str]] = {
        "policy": lambda row: str(row["policy"]),
        "first token": lambda row: ms(row["ttft_s"]),
        "per token": lambda row: ms(row["tpot_s"]),
        "decode": lambda row: number(row["decode_tokens_per_s"], " tok/s"),
        "prefill": lambda row: number(row["prefill_tokens_per_s"], " tok/s"),
        "hit rate": lambda row: percent(row["hit_rate_active"]),
        "to GPU": lambda row: format_bytes(row["h2d_bytes"]),
        "at": lambda row: bandwidth(row["h2d_bytes_per_s"]),
        "from SSD": lambda row: format_bytes(row["ssd_bytes"]),
        "GPU memory": lambda row: format_bytes(row["gpu_bytes"]),
        "busiest lane": lambda row: (
            f"{row['busiest']} {percent(row['busiest_share'], 0)}"
        ),
        "run": lambda row: ms(row["makespan_s"]),
    }
    # Few comparisons use an SSD, and the table is wide as it is.
    if not table["ssd_bytes"].sum():
        del columns["from SSD"]
    rows = [
        [cell(row) for cell in columns.values()] for row in table.to_dict("records")
    ]
    return list(columns), rows


def check_each(config: RunConfig, trace: Trace, policies: Sequence[str]) -> None:
    """Refuse by name, before anything runs, the policies that `replay` cannot carry
    out.

    Columns, artefacts, memories and parameters are checked by setting every policy up
    and throwing it away.

    Args:
        config: machine, memories and parts.
        trace: an opened trace.
        policies: as in `compare`.

    Raises:
        TraceError, ProfileError, PolicyError: as `replay`; if several cannot run, one
            error names them all, unless no policy can and all for one reason.
    """
    refused: dict[str, ValueError] = {}
    profile = profile_of(config.hw)
    shape = trace.shape
    for name in policies:
        # One step and no calibration: the walk is not what is checked.
        single = config.replaced(policy=name, steps=1, warm=None)
        try:
            setup = Setup.of(single, trace, profile=profile)
            if config.warm is not None:
                setup.calibration = np.ones((shape.layers, shape.experts))
            setup.planner()
        except ValueError as error:
            refused[name] = error

    if not refused:
        return
    reasons = set(map(str, refused.values()))
    if len(refused) == 1 or (len(refused) == len(policies) and len(reasons) == 1):
        raise next(iter(refused.values()))
    summaries = [f"{name} ({_shortened(e, trace)})" for name, e in refused.items()]
    raise PolicyError(
        f"{trace.path}: {len(refused)} of {len(policies)} policies cannot run on it"
        f" as asked: {', '.join(summaries)}; drop them, or ask for one of them alone"
        " to learn what would help"
    )


def _shortened(error: ValueError, trace: Trace) -> str:
    """The reason without the place and the way out."""
    return (
        str(error)
        .removeprefix(f"{trace.path}: ")
        .partition(";")[0]
        .partition(", this trace has")[0]
    )


def folder_name(name: str) -> str:
    """A name for the folder of a policy's run: ``greedy+lfu:decay=0.9`` ->
    ``greedy+lfu_decay=0.9``.
    """
    # Colons and slashes of specifications are no parts of file names everywhere.
    return re.sub(r"[^\w.+=,-]+", "_", name).strip("._") or "run"
