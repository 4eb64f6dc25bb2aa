"""Whether this checkout answers as another commit did, to the last digit.

``python -m benchmarks.same_outputs REV`` draws configurations, gives each to both
commits, and prints which figures of which answers differ: replays on either engine,
tables of runs, hit rates, statistics of traces, imported files, gaps and advice. Both
take the machines of this checkout. What an answer says of the run itself, such as its
seconds and its commit, is left out, and refusals are counted, since they show little. A
difference is no fault by itself, as a release may mend a number; it should be known.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PROFILES = Path(__file__).parents[1] / "hwprofiles" / "data"
MACHINES = (
    "rtx3090-epyc7532",
    "rtx5070ti-ryzen9600x",
    "rtx4060ti",
    "a6000-xeon5220r-10c",
)
TRACES = ("tiny", "gpt-oss-20b-like")
GRAPHICS_CARDS = ("RTX 3060", "RTX 4090", "RTX 5070 Ti", "RX 7900 XTX")
PROCESSORS = ("Ryzen 7 5800X", "i7-12700K", "EPYC 7532")
MODELS = ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b", "glm-4.5-air")
ANSWERS = "answers.jsonl"
REPLAYED = 80
"""So many of a hundred configurations are replays."""
SHAPE = "layers=3,experts=8,top_k=2,expert_bytes=1KiB"
REFUSED = "error: "
UNKNOWN = "unknown "
"""What a commit says of a policy or parameter that it does not have."""
OF_THE_RUN = (
    "wall_s",
    "engine",
    "git_commit",
    "version",
    "trace",
    "hw",
    "hw_digest",
    "made",
)
"""What differs from one run to the next, or by where a checkout lies."""


def draw(number: int) -> list[list[str]]:
    """Draw the command line of a configuration, from its number alone.

    The place of what is written is PLACE and the file to import DUMP.
    """
    drawn = random.Random(number)
    trace = drawn.choice(TRACES)
    machine = str(PROFILES / f"{drawn.choice(MACHINES)}.toml")
    share = drawn.choice(("0.1", "0.25", "0.5"))
    if number % 100 < REPLAYED:
        return [_replay(drawn, trace, machine, share)]
    run = [trace, "--hw", machine, "--cache-ratio", share, "--steps", "24"]
    policy = ["--policy", drawn.choice(_systems())]
    caches = drawn.sample(_words("CACHES"), 4)
    parts = ["--gpu", drawn.choice(GRAPHICS_CARDS), "--ram", "64GiB"]
    parts += ["--cpu", drawn.choice(PROCESSORS)]
    read = ["DUMP", "PLACE.parquet", "--prompt-tokens", "3", "--shape", SHAPE]
    asked = (
        [["hits", trace, "--cache", ",".join(caches), "--json"]],
        [["trace", "stats", trace, "--json"]],
        [["gap", *run, *policy, "--json"]],
        [["advise", drawn.choice(MODELS), *parts, "--json"]],
        [["trace", "import", *read], ["trace", "stats", "PLACE.parquet", "--json"]],
        [["replay", *run, *policy, "--out", "PLACE"]],
    )
    return asked[number % len(asked)]


def _replay(drawn: random.Random, trace: str, machine: str, share: str) -> list[str]:
    system = drawn.random() < 0.4
    policy = drawn.choice(_systems() if system else _words("ASSIGNMENTS"))
    line = ["replay", trace, "--policy", policy, "--hw", machine]
    if not system:
        line += ["--cache", drawn.choice(_words("CACHES"))]
        line += ["--prefetch", drawn.choice(_words("PREFETCHES"))]
    line += ["--cache-ratio", share, "--batch", drawn.choice(("1", "2", "4"))]
    line += ["--engine", drawn.choice(("simpy", "auto"))]
    return [*line, "--steps", drawn.choice(("8", "32")), "--json"]


def _words(name: str) -> list[str]:
    # Only the process that draws has the tests' folder on its path.
    from support import engine_draws

    return list(getattr(engine_draws, name))


def _systems() -> list[str]:
    from moesim.policies.systems import SYSTEMS

    return sorted(SYSTEMS)


def write_dump(place: Path, number: int) -> None:
    """Write routing as somebody's table: position, layer, experts."""
    drawn = random.Random(number)
    rows = ["pos,layer,expert_0,expert_1"]
    for token in range(drawn.randint(4, 12)):
        for layer in range(3):
            first, second = drawn.sample(range(8), 2)
            rows.append(f"{token},{layer},{first},{second}")
    place.write_text("\n".join(rows) + "\n")


def answers(folder: Path) -> None:
    """Answer every configuration of ``drawn.json``; print the answers, one a line."""
    from moesim.cli.app import main as command

    for number, lines in json.loads((folder / "drawn.json").read_text()):
        place = folder / f"place{number}"
        names = partial(_named, place=place, dump=folder / f"dump{number}.csv")
        shown = io.StringIO()
        refused = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(refused):
            for line in lines:
                _ask(command, [names(word) for word in line])
        answer = _tables(place) if place.is_dir() else shown.getvalue()
        print(json.dumps([number, answer or refused.getvalue()]), flush=True)


def _tables(folder: Path) -> str:
    """A digest of every column of a run's tables, as JSON."""
    import pandas as pd

    digests: dict[str, dict[str, str]] = {}
    for place in sorted(folder.glob("*.parquet")):
        table = pd.read_parquet(place).astype(str)
        hashes = {name: pd.util.hash_pandas_object(table[name]) for name in table}
        digests[place.stem] = {name: str(each.sum()) for name, each in hashes.items()}
    return json.dumps(digests)


def _ask(command: Any, line: list[str]) -> None:
    sys.argv = ["moesim", *line]
    try:
        command()
    except SystemExit:
        pass
    except Exception as fault:  # noqa: BLE001 # a crash is an answer, and others follow
        print(f"crashed: {type(fault).__name__}: {fault}", file=sys.stderr)


def _named(word: str, *, place: Path, dump: Path) -> str:
    return word.replace("PLACE", str(place)).replace("DUMP", str(dump))


def figures(answer: str) -> dict[str, object]:
    """The comparable figures of an answer, by their place in it."""
    try:
        return dict(_leaves(json.loads(answer), ""))
    except ValueError:
        # A refusal may name a file of its own checkout.
        words = (word for word in answer.split() if "/" not in word)
        return {"text": " ".join(words)}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in OF_THE_RUN:
                yield from _leaves(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{place}.{number}")
    else:
        yield place.removeprefix("."), value


def main() -> None:
    """Compare, and print what differs; exit with 1 if anything does."""
    from benchmarks.against_commit import ROOT, checkout, importable

    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_outputs")
    parser.add_argument("rev", metavar="REV", help="the commit to compare with")
    parser.add_argument("--draws", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    chosen = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = chosen.seed * 1_000_000
        drawn = {number: draw(number) for number in range(begin, begin + chosen.draws)}
        trees = {
            "before": importable(
                checkout(chosen.rev, folder / "earlier"), folder / "tree-before"
            ),
            "after": importable(ROOT, folder / "tree-after"),
        }
        running = {}
        for label, tree in trees.items():
            place = folder / label
            place.mkdir()
            (place / "drawn.json").write_text(json.dumps(list(drawn.items())))
            for number in drawn:
                write_dump(place / f"dump{number}.csv", number)
            running[label] = _begin(tree, place)
        before, after = (
            _answered(process, folder / label) for label, process in running.items()
        )
    kinds: Counter[str] = Counter()
    different = 0
    refused = 0
    for number, lines in drawn.items():
        earlier = before.get(number, "nothing")
        later = after.get(number, "nothing")
        if UNKNOWN in earlier[:200] or UNKNOWN in later[:200]:
            continue
        kinds[lines[0][0]] += 1
        refused += REFUSED in later[:200]
        changed = differences(earlier, later)
        if changed:
            different += 1
            print(f"{number}: {' '.join(lines[0])}")
            print(f"  {len(changed)}: {'; '.join(changed)[:300]}")
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    total = kinds.total()
    print(f"{total - different} of {total} answers equal: {counts}")
    print(f"{refused} of these are refusals")
    print(f"{chosen.draws - total} more have policies that one commit does not know")
    raise SystemExit(bool(different))


def differences(earlier: str, later: str) -> list[str]:
    """What differs in two answers; what only one of them states is a feature."""
    before, after = figures(earlier), figures(later)
    if not before.keys() & after.keys():
        return [f"{earlier[:100]!r} -> {later[:100]!r}"]
    return [
        f"{place} {value} -> {after[place]}"
        for place, value in before.items()
        if place in after and after[place] != value
    ]


def _begin(tree: Path, place: Path) -> subprocess.Popen[bytes]:
    """Start a process in which one commit answers."""
    code = f"import runpy; runpy.run_path({__file__!r})['answers'](place)"
    code = f"from pathlib import Path; place = Path({str(place)!r}); {code}"
    # Into a file: a pipe that nobody reads yet would stop it when it is full.
    with (place / ANSWERS).open("wb") as answers_file:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "80"},
            cwd=place,
            stdout=answers_file,
        )


def _answered(process: subprocess.Popen[bytes], place: Path) -> dict[int, str]:
    process.wait()
    return dict(map(json.loads, (place / ANSWERS).read_text().splitlines()))


if __name__ == "__main__":
    main()
