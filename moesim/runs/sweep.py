"""Which policy is fastest: on one machine with one memory, or on each of several.

Every policy is replayed on every machine with every memory. A comparison on one machine
with one memory is such a sweep of one cell. Replays know nothing of each other, so
several processes may share them out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.base import PolicyError
from moesim.reporting import text as report
from moesim.runs.memory import MemoryOptions
from moesim.runs.parallel import share_out
from moesim.runs.replay import replay
from moesim.runs.setup import Setup, profile_of
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runs.result import Run
    from moesim.traces.format.batch import RoutedStep

FIGURES = (
    "tpot_s",
    "decode_tokens_per_s",
    "ttft_s",
    "prefill_tokens_per_s",
    "hit_rate_active",
    "makespan_s",
)
CELL = ["hw", "memory"]
"""Columns of a sweep's table that say where a policy ran."""


@dataclass(slots=True)
class Sweep:
    """What every policy did on every machine with every memory.

    Attributes:
        table: one row per run; machines and memories in the order they were asked for,
            the shortest run first in each.
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
        """The rows of those that win their cell; a cell in which every policy sees the
        future has none.
        """
        return self.table[self.table["fastest"]].reset_index(drop=True)

    def to_json(self) -> dict[str, Any]:
        """Winners and runs, each with its machine, memory and policy."""
        where = [*CELL, "policy"]
        fastest = self.fastest()[where].to_dict("records")
        runs = [
            dict(zip(where, key, strict=True)) | run.to_json()
            for key, run in self.runs.items()
        ]
        return {"fastest": fastest, "runs": runs}


def compare(
    trace: str | Path | Trace,
    policies: Sequence[str],
    *,
    hw: str | Path | HardwareProfile | None = None,
    memory: MemoryOptions | None = None,
    **options: Any,
) -> tuple[pd.DataFrame, dict[str, Run]]:
    """Replay one trace under several policies on one machine with one memory: a `sweep`
    of one cell.

    Returns:
        A table with one row per policy (shortest run first), and the runs by policy.

    Raises:
        TraceError, ProfileError, PolicyError: as `sweep`.
    """
    found = sweep(
        trace,
        policies,
        hw=[hw],
        memory=[memory or MemoryOptions()],
        keep=True,
        **options,
    )
    return found.table, found.by_policy()


def sweep(
    trace: str | Path | Trace,
    policies: Sequence[str],
    *,
    hw: Sequence[str | Path | HardwareProfile | None] = (None,),
    memory: Sequence[MemoryOptions] = (MemoryOptions(),),
    out: str | Path | None = None,
    keep: bool = False,
    jobs: int | None = 1,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Sweep:
    """Replay one trace under several policies on several machines with several
    memories.

    A policy may be written ``greedy+lru+residual``: assignment or system, then cache,
    then prefetch.

    Args:
        hw: hardware profiles, each by name, path or itself.
        memory: sizes of memories; sizes of the GPU cache all stated in the same way.
        out: each run has a folder below it, named after its policy, in folders for
            machine and memory where there are several.
        keep: keep the timelines of all runs in memory; without it and without `out`
            they are empty.
        jobs: replays at the same time, in processes of their own where it is more than
            1; None takes as many as pay. Those processes do not know policies that were
            registered here by hand, and a script that starts them does so below ``if
            __name__ == "__main__":``, since each of them reads it again.
        progress: told the share that is done.
        options: as in `moesim.runs.replay.replay`.

    Raises:
        TraceError, ProfileError, PolicyError: as `replay`, and before anything runs;
            also for nothing to compare, and for memories that the table could not tell
            apart.
        ChildProcessError: one of several processes was killed.
    """
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    names = list(dict.fromkeys(policies))
    machines = _machines(hw)
    memories = _memories(memory)
    for what, given in (("policy", names), ("machine", machines), ("memory", memories)):
        if not given:
            raise PolicyError(f"sweep: expected at least one {what}, got none")
    for (machine, profile), (size, sizes) in product(
        machines.items(), memories.items()
    ):
        try:
            check_each(opened, names, hw=profile, memory=sizes, **options)
        except ValueError as error:
            if len(machines) == len(memories) == 1:
                raise
            raise type(error)(f"on {machine} with {size}: {error}") from None
    keys = list(product(machines, memories, names))
    several = [len(machines) > 1, len(memories) > 1, True]
    tasks = [
        {
            "trace": opened,
            "policy": policy,
            "hw": machines[machine],
            "memory": memories[size],
            **options,
            "out": (
                None
                if out is None
                else _place(out, [x for x, s in zip(key, several, strict=True) if s])
            ),
            "keep": keep,
        }
        for key in keys
        for machine, size, policy in [key]
    ]
    steps = options.get("steps")
    passed = len(tasks) * (steps or max(1, opened.rows))
    found = share_out(
        _Replay(by_step=steps is not None),
        tasks,
        jobs=jobs,
        weight=opened.rows * len(tasks),
        progress=None if progress is None else lambda done: progress(done / passed),
    )
    runs = dict(zip(keys, found, strict=True))
    return Sweep(_table(runs), runs, memories)


@dataclass(frozen=True, slots=True)
class _Replay:
    """One replay, in this process or another one; forward passes or rows of the trace
    are told as they are done.
    """

    by_step: bool

    def __call__(self, task: dict[str, Any], tell: Callable[[int], None]) -> Run:
        layers = task["trace"].shape.layers

        def after(step: RoutedStep) -> None:
            tell(1 if self.by_step else step.tokens * layers)

        return replay(**task, progress=after)


def _machines(
    hw: Sequence[str | Path | HardwareProfile | None],
) -> dict[str, HardwareProfile]:
    """Profiles by name; by place where two files share a name."""
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
    """Memories by what a reader calls them; they lie on one axis."""
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


def _place(out: str | Path, names: Sequence[str]) -> Path:
    return Path(out, *map(folder_name, names))


def _table(runs: dict[tuple[str, str, str], Run]) -> pd.DataFrame:
    """A row of figures per run."""
    import pandas as pd  # noqa: PLC0415 - half a second that a plain replay need not pay

    rows = [
        dict(zip([*CELL, "policy"], key, strict=True))
        | {name: run.metrics[name] for name in FIGURES}
        | {f"{link}_bytes": _moved(run, link) for link in ("h2d", "ssd")}
        | {
            "h2d_bytes_per_s": _bandwidth(run, "h2d"),
            "gpu_bytes": run.config["gpu_bytes"],
        }
        | dict(zip(("busiest", "busiest_share"), report.busiest(run), strict=True))
        | {"oracle": run.config["oracle"]}
        for key, run in runs.items()
    ]
    table = pd.DataFrame(rows).astype(dict.fromkeys(FIGURES, float))
    parts = [
        part.sort_values("makespan_s", kind="stable")
        for _, part in table.groupby(CELL, sort=False)
    ]
    table = pd.concat(parts, ignore_index=True)
    first = table[~table["oracle"]].drop_duplicates(CELL).index
    table["fastest"] = table.index.isin(first)
    return table


def _moved(run: Run, link: str) -> int:
    """Bytes over all links of a kind."""
    return sum(
        count for lane, count in run.metrics["bytes"].items() if lane.startswith(link)
    )


def _bandwidth(run: Run, link: str) -> float | None:
    """Bytes per second of all links of a kind while they were busy."""
    lanes = [
        lane
        for lane, count in run.metrics["bytes"].items()
        if lane.startswith(link) and count
    ]
    busy_s = sum(run.metrics["busy_s"][lane] for lane in lanes)
    return _moved(run, link) / busy_s if busy_s else None


def check_each(trace: Trace, policies: Sequence[str], **options: Any) -> None:
    """Refuse by name, before anything runs, those of several policies that `replay`
    could not carry out.

    Columns, artefacts, memories and parameters are checked by setting every policy up
    and throwing it away.

    Args:
        trace: an opened trace.
        policies: as in `compare`.
        options: as in `moesim.runs.replay.replay`.

    Raises:
        TraceError, ProfileError, PolicyError: as `replay`; if several cannot run, one
            error names them all, unless no policy can and all for one reason.
    """
    refused: dict[str, ValueError] = {}
    profile = profile_of(options.get("hw"))
    shape = trace.shape
    chosen = (
        "cache",
        "prefetch",
        "routing",
        "host_cache",
        "memory",
        "batch",
        "artefacts",
    )
    given = {name: options[name] for name in chosen if name in options}
    for name in policies:
        try:
            setup = Setup.of(trace, name, profile, steps=1, **given)
            if options.get("warm") is not None:
                setup.calibration = np.ones((shape.layers, shape.experts))
            setup.planner()
        except ValueError as error:
            refused[name] = error
    if len(refused) == 1 or (
        len(refused) == len(policies) and len(set(map(str, refused.values()))) == 1
    ):
        raise next(iter(refused.values()))
    if refused:
        reasons = [
            f"{name} ({_in_short(error, trace)})" for name, error in refused.items()
        ]
        raise PolicyError(
            f"{trace.path}: {len(refused)} of {len(policies)} policies cannot run on it"
            f" as asked: {', '.join(reasons)}; drop them, or ask for one of them alone"
            " to learn what would help"
        )


def _in_short(error: ValueError, trace: Trace) -> str:
    """What is wrong, without the place and the way out."""
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
    return re.sub(r"[^\w.+=,-]+", "_", name).strip("._") or "run"
