"""This checkout against another commit, in turns, in CPU seconds.

``python -m benchmarks.against_commit REV`` prints a ratio for everything that is
compared: above 1, this checkout is slower (or needs more memory). ``--part`` names
some, and a second commit stands in this checkout's place. Both take turns, as a shared
machine is faster at one time than at another, and the least figures of each are
compared: what others do only adds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import import_speed, trace_speed
from benchmarks.commit_probe import PARTS
from benchmarks.replay_speed import SHARED, bench_trace
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.predict import predict
from tests.support import foreign_files

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("engine", "hwprofiles", "policies", "runtime", "sim", "traces")
TOLERANCE = 1.05
"""What is slower than this is marked."""

TOKENS = 3000
LONG = SHARED / "gpt_oss_20b.parquet"
CACHE_ROWS = 1_000_000


def checkout(rev: str, place: Path) -> Path:
    """Write the files of a commit into a folder."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", rev], stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(place, filter="data")
    if (place / "setup.py").is_file():
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=place, stderr=subprocess.DEVNULL, check=True)
    return place


def importable(source: Path, tree: Path) -> Path:
    """Make a folder from which a checkout is imported as it would be installed."""
    package = tree / "moesim"
    package.mkdir(parents=True)
    for path in (source / "moesim").iterdir():
        (package / path.name).symlink_to(path)
    for room in ROOMS:
        if not (source / room).is_dir():
            continue
        if not (package / room).exists():
            # Commits before the links in `moesim`.
            (package / room).symlink_to(source / room)
        # Commits before the namespace import it by its own name.
        (tree / room).symlink_to(source / room)
    for beside in ("benchmarks", "tests"):
        (tree / beside).symlink_to(source / beside)
    return tree


def figures(tree: Path, part: str, files: Path, rounds: int) -> dict[str, float]:
    """The figures of one part, in a process of its own."""
    probe = Path(__file__).with_name("commit_probe.py")
    # Isolated from the script's folder, which belongs to this checkout.
    code = f"import runpy, sys; sys.argv[0] = {str(probe)!r}; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, part, str(files), str(rounds)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        # Elsewhere the folder itself would be imported.
        cwd=tree.parent,
        stdout=subprocess.PIPE,
        check=True,
    )
    printed: dict[str, float] = json.loads(done.stdout)
    return printed


def write_files(folder: Path) -> None:
    """Write what both checkouts read: traces and foreign files."""
    # A copy, as it may be the shipped one.
    shutil.copy(bench_trace(folder).path, folder / "routing.parquet")
    predict(
        open_trace(folder / "routing.parquet"),
        folder / "predicted.parquet",
        recall=(0.82, 0.75, 0.7),
        residual=0.86,
        at=1,
        scores=True,
    )
    if LONG.is_file():
        shape = model_shape("gpt-oss-20b")
        import_trace(LONG, folder / "long.parquet", shape=shape)
    trace_speed.write(folder / "large.parquet", CACHE_ROWS)
    truth = foreign_files.routing(
        ((TOKENS // 8, TOKENS - TOKENS // 8),),
        layers=import_speed.LAYERS,
        experts=import_speed.EXPERTS,
        top_k=import_speed.TOP_K,
    )
    for number, (name, (write, options)) in enumerate(import_speed.LAYOUTS.items()):
        place = folder / "foreign" / str(number)
        place.mkdir(parents=True)
        layout = {"name": name, "shape": import_speed.SHAPE, "options": options}
        layout["file"] = write(place / "dump.npz", truth).name
        (place / "layout.json").write_text(json.dumps(layout))


def main() -> None:
    """Print both figures of everything and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rev", metavar="REV", help="the commit to compare with")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="not this checkout")
    parser.add_argument("--part", action="append", choices=PARTS, help="all without")
    parser.add_argument("--turns", type=int, default=3, help="processes of each")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions in each")
    chosen = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        later = chosen.other or "this checkout"
        place = checkout(chosen.other, folder / "later") if chosen.other else ROOT
        trees = {
            chosen.rev: importable(
                checkout(chosen.rev, folder / "earlier"), folder / "before"
            ),
            later: importable(place, folder / "after"),
        }
        print(f"least figures of {chosen.rev}, of {later}, and their ratio")
        for part in chosen.part or PARTS:
            least: dict[str, dict[str, float]] = defaultdict(dict)
            for _ in range(chosen.turns):
                for label, tree in trees.items():
                    spent = figures(tree, part, folder, chosen.rounds)
                    for name_, figure in spent.items():
                        earlier = least[name_].get(label, float("inf"))
                        least[name_][label] = min(earlier, figure)
            _print_ratios(least)


def _print_ratios(least: dict[str, dict[str, float]]) -> None:
    """Print what both commits have."""
    for label, by_tree in least.items():
        if len(by_tree) < 2:
            continue
        before, after = by_tree.values()
        ratio = after / before
        mark = "  slower" if ratio > TOLERANCE else ""
        print(
            f"  {label:40} {_text(before):>10} {_text(after):>10} {ratio:6.2f}{mark}",
            flush=True,
        )


def _text(figure: float) -> str:
    """Seconds or MiB, with the unit that fits."""
    if figure > 1e2:
        return f"{figure:.0f} MiB"
    return f"{figure:.2f} s" if figure > 1e-2 else f"{figure * 1e6:.1f} us"


if __name__ == "__main__":
    main()
