"""What one commit takes for what `benchmarks.against_commit` compares.

Run as a script, with the modules of that commit on its path: names that have moved
since are looked for where they were. Prints one JSON object, label to figure: CPU
seconds of this process or its children, or MiB; the least of several rounds.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPLAYED = ("greedy", "on-demand", "all-cpu", "fiddler")
SYSTEMS = ("dali", "hybrimoe", "daop", "smoe")
LONG = ("greedy",)
"""On 34,000 tokens, where setting a replay up is nothing."""
PLANNED = ("greedy", "on-demand")
MACHINE = "rtx3090-epyc7532"
SLOW = {"ilp"}
"""Assignments that ask a solver: their milliseconds are not ours."""


def module(*names: str) -> Any:
    """The first module that this commit has."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"this commit has none of {', '.join(names)}")


def least_s(work: Callable[[], object], rounds: int) -> float:
    """Least CPU seconds of several rounds, after one that loads what is compiled."""
    work()
    spent = []
    for _ in range(rounds):
        gc.collect()
        begin_s = time.process_time()
        work()
        spent.append(time.process_time() - begin_s)
    return min(spent)


def _replay(trace: Path, policy: str, **options: Any) -> Any:
    runs = module("moesim.runs.replay", "moesim.api")
    return runs.replay(str(trace), policy, hw=MACHINE, cache_ratio=0.25, **options)


def replays(folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of a layer step, in SimPy whatever else the commit has."""
    # Commits before the compiled engine know no other.
    engine = (
        {"engine": "simpy"}
        if _has("moesim.runs.engines") or _has("moesim.engine")
        else {}
    )
    run = partial(_replay, folder / "routing.parquet", cache="lru", **engine)
    return _layer_steps("replay", run, REPLAYED, rounds)


def fast(folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of a layer step in the fastest engine that the commit has, metrics
    included: with LRU, and of systems on drawn predictions.
    """
    routing = partial(_replay, folder / "routing.parquet", cache="lru", keep=False)
    predicted = partial(_replay, folder / "predicted.parquet", keep=False)
    spent = _layer_steps("fast", routing, REPLAYED, rounds)
    spent |= _layer_steps("fast", predicted, SYSTEMS, rounds)
    long = folder / "long.parquet"
    if long.is_file():
        run = partial(_replay, long, cache="lru", keep=False)
        spent |= _layer_steps("fast, long", run, LONG, rounds)
    return spent


def _layer_steps(
    label: str, replay: Callable[..., Any], policies: Sequence[str], rounds: int
) -> dict[str, float]:
    figures = {}
    for policy in policies:
        run = partial(replay, policy=policy)
        try:
            steps = run().metrics["layer_steps"]
        except Exception as error:  # noqa: BLE001 - a commit may lack what it needs
            print(f"{label}, {policy}: {error}", file=sys.stderr)
            continue
        figures[f"{label}, {policy}, layer step"] = least_s(run, rounds) / steps
    return figures


def planning(_: Path, rounds: int) -> dict[str, float]:
    """Seconds of planning a layer step, and of every decision alone."""
    planned = module("benchmarks.planning")
    # Some commits took the clock's time for the process's own.
    planned.time = SimpleNamespace(
        perf_counter=time.process_time, process_time=time.process_time
    )
    names = module("moesim.policies.registry", "policies.registry").names("assignment")
    figures = {}
    for assignment in PLANNED:
        for active in (8, 128):
            spent = [planned.planning_s(assignment, active) for _ in range(rounds)]
            figures[f"planning, {assignment}, {active} active"] = min(spent)
    for name in sorted(set(names) - SLOW):
        spent = [planned.decision_s(name, 8) for _ in range(rounds)]
        figures[f"decision, {name}, 8 active"] = min(spent)
    return figures


def caches(folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of a cache alone."""
    runs = module("moesim.runs.replay", "moesim.api")
    trace = str(folder / "large.parquet")
    return {
        f"cache alone, {cache}": least_s(
            partial(runs.replay_cache, trace, cache), rounds
        )
        for cache in ("lru", "belady")
    }


def imports(folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of importing each foreign file."""
    importers = module("moesim.traces.importers", "traces.importers")
    models = module("moesim.traces.models", "traces.models")
    figures = {}
    for path in sorted((folder / "foreign").iterdir()):
        layout = json.loads((path / "layout.json").read_text())
        work = partial(
            importers.import_trace,
            path / layout["file"],
            folder / "imported.parquet",
            shape=models.model_shape(layout["shape"]),
            options=layout["options"],
        )
        figures[f"import, {layout['name']}"] = least_s(work, rounds)
    return figures


def starts(_: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of the command line's help."""

    def help_() -> None:
        command = [sys.executable, "-m", "moesim", "--help"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    spent = []
    for _ in range(3 * rounds):
        before = os.times()
        help_()
        after = os.times()
        user_s = after.children_user - before.children_user
        spent.append(user_s + after.children_system - before.children_system)
    return {"moesim --help": min(spent)}


def memory(folder: Path, _: int) -> dict[str, float]:
    """Peak MiB of this process after a replay in whichever engine is chosen."""
    _replay(folder / "routing.parquet", "greedy", cache="lru")
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"peak of a replay, MiB": peak_kib / 1024}


PARTS = {
    part.__name__: part
    for part in (replays, fast, planning, caches, imports, starts, memory)
}


def _has(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    part_, folder_, rounds_ = sys.argv[1:]
    print(json.dumps(PARTS[part_](Path(folder_), int(rounds_))))
