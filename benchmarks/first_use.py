"""What machine code costs at its first use, and afterwards, in CPU seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

FIRST_TARGET_S = 15.0
LATER_TARGET_S = 0.5
"""Of a first replay, and of later ones, both beside what Numba takes to load."""

_CHILD = """
import time
import moesim
from numba.core.registry import cpu_target
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
begin_s = time.process_time()
import moesim.sim.compiled.engine
loop_s = time.process_time() - begin_s
moesim.replay("tiny", "greedy", cache="lru", steps=4)
print(loop_s, time.process_time() - begin_s)
"""


def report() -> None:
    """Print the seconds of a first replay and of one that finds everything on disk."""
    with tempfile.TemporaryDirectory() as folder:
        for label, target_s in (("first", FIRST_TARGET_S), ("second", LATER_TARGET_S)):
            done = subprocess.run(
                [sys.executable, "-c", _CHILD],
                env={**os.environ, "NUMBA_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            loop_s, all_s = map(float, done.stdout.split())
            print(
                f"{label} replay: {all_s:.1f} s (target {target_s:g}), of which the"
                f" engine's loop {loop_s:.1f} s"
            )
