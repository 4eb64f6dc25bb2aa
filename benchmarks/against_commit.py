"""Replay speed of this checkout against another commit, in turns, in CPU seconds.

``python -m benchmarks.against_commit REV`` prints a ratio for each policy: above 1,
this checkout is slower. Both take turns, as a shared machine is faster at one time than
at another, and the least seconds of each are compared: what others do only adds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.replay_speed import bench_trace

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("engine", "hwprofiles", "policies", "runtime", "sim", "traces")
POLICIES = ("greedy", "on-demand", "all-cpu", "fiddler")
WORKER = """
import gc, json, sys, time
try:
    from moesim.runs.replay import MemoryOptions, replay
except ImportError:  # commits before the rooms had one namespace
    from moesim.api import MemoryOptions, replay
memory = MemoryOptions(cache_ratio=0.25)
trace, rounds, *policies = sys.argv[1:]
spent = {}
for policy in policies:
    for round_ in range(int(rounds) + 1):
        gc.collect()
        begin_s = time.process_time()
        try:
            run = replay(trace, policy, hw="rtx3090-epyc7532", memory=memory)
        except Exception as error:
            print(f"{policy}: {error}", file=sys.stderr)
            break
        seconds = time.process_time() - begin_s
        # The first round loads compiled loops.
        if round_:
            spent.setdefault(policy, []).append(seconds / run.metrics["layer_steps"])
print(json.dumps(spent))
"""


def importable(checkout: Path, tree: Path) -> Path:
    """Make a folder from which a checkout is imported as it would be installed."""
    package = tree / "moesim"
    package.mkdir(parents=True)
    for path in (checkout / "moesim").iterdir():
        (package / path.name).symlink_to(path)
    for room in ROOMS:
        if not (checkout / room).is_dir():
            continue
        (package / room).symlink_to(checkout / room)
        # Commits before the namespace import it by its own name.
        (tree / room).symlink_to(checkout / room)
    return tree


def layer_step_s(tree: Path, trace: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds per layer step of some replays by policy, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(trace), str(rounds), *POLICIES],
        env={**os.environ, "PYTHONPATH": str(tree)},
        # Elsewhere the folder itself would be imported.
        cwd=tree.parent,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print both speeds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rev", metavar="REV", help="the commit to compare with")
    parser.add_argument("--turns", type=int, default=3, help="processes of each")
    parser.add_argument("--rounds", type=int, default=4, help="replays in each")
    chosen = parser.parse_args()

    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", chosen.rev],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder / "checkout", filter="data")
        trace = bench_trace(folder)
        trees = {
            chosen.rev: importable(folder / "checkout", folder / "before"),
            "here": importable(ROOT, folder / "after"),
        }
        least: dict[str, dict[str, float]] = defaultdict(dict)
        for _ in range(chosen.turns):
            for label, tree in trees.items():
                spent = layer_step_s(tree, trace.path, chosen.rounds)
                for policy, seconds in spent.items():
                    earlier = least[policy].get(label, float("inf"))
                    least[policy][label] = min(earlier, *seconds)

        print(f"replay of {trace.path.name}, least CPU seconds per layer step")
        for policy, by_label in least.items():
            if len(by_label) < len(trees):
                continue
            before, after = by_label.values()
            print(
                f"  {policy:10} {before * 1e6:6.1f} us at {chosen.rev},"
                f" {after * 1e6:6.1f} us here: {after / before:.2f} times"
            )


if __name__ == "__main__":
    main()
