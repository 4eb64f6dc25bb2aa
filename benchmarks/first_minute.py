"""What the first commands take: CPU seconds, with nothing on disk and afterwards.

``python -m benchmarks first_minute`` prints the table of `docs/reference/engines.md`.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import tempfile
from typing import NamedTuple

_WITHOUT_TORCH = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, Finder())
from moesim.start import main
main()
"""


_IMPORTS = "import moesim.runs.measured, moesim.runtime.executor.trace_driven"


class Case(NamedTuple):
    """A command, what it is for, and the seconds that it may take."""

    label: str
    words: str
    target_s: float
    first_only: bool = False
    code: tuple[str, ...] = ("-m", "moesim")


CASES = (
    Case("the first thing that one types", "list", 0.6),
    Case("first replay", "replay tiny", 5.0, first_only=True),
    Case("first under hybrimoe", "replay tiny --policy hybrimoe", 15.0, True),
    Case("first under exact", "replay tiny --policy exact", 15.0, True),
    Case("first under freetoken", "replay tiny --policy freetoken", 15.0, True),
    Case("replay", "replay tiny", 0.8),
    Case("a refusal", "replay tiny --policy gready", 0.4),
    Case("statistics", "trace stats tiny", 0.8),
    Case("compare", "compare tiny", 1.2),
    Case(
        "advise",
        "advise qwen3-30b-a3b --cpu 'Ryzen 7 5700X' --ram '2x16GB DDR4-3600'"
        " --gpu 'RTX 4060 Ti 16GB'",
        1.0,
    ),
    Case("a real run", "run tiny", 4.0),
    Case("its imports", "", 4.0, code=("-c", _IMPORTS)),
    Case("a real run without torch", "run tiny", 0.4, code=("-c", _WITHOUT_TORCH)),
)


def seconds(case: Case, folder: str) -> tuple[float, int]:
    """CPU seconds of a command with a cache folder, and its exit code."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": folder,
    }
    # Python's own files are no part of a first run: installation makes them.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *case.code, *shlex.split(case.words)],
        env=environment,
        capture_output=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return spent, done.returncode


def report() -> None:
    """Print the table."""
    print("| | command | cold | warm | target |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as warm:
        for case in CASES:
            with tempfile.TemporaryDirectory() as cold:
                cold_s, code = seconds(case, cold)
            warm_words = ""
            if not case.first_only:
                seconds(case, warm)
                warm_s, code = seconds(case, warm)
                warm_words = f"{warm_s:.2f}"
            print(
                f"| {case.label} | `{case.words}` | {cold_s:.2f} | {warm_words} |"
                f" ≤ {case.target_s:g} |{'' if code in {0, 2} else f' exit {code}'}",
                flush=True,
            )
