"""Peak memory of a long replay, and how fast the command line starts."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.replay_speed import SHARED
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape

PROBE = """
import sys
from moesim.runs.replay import replay
trace, out, steps = sys.argv[1:4]
how = {"cache": "lru", "hw": "rtx3090-epyc7532", "steps": int(steps) or None}
run = replay(trace, "greedy", out=out, **how)
assert "torch" not in sys.modules
with open("/proc/self/status") as status:  # ru_maxrss would inherit the parent's peak
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(run.metrics["layer_steps"], peak_kib / 1024)
"""


def report() -> None:
    """Print peaks and start-up times."""
    print("memory (peak of a whole process) and start-up")
    source = SHARED / "gpt_oss_20b.parquet"
    if source.is_file():
        with tempfile.TemporaryDirectory() as name:
            trace = Path(name) / "g.parquet"
            import_trace(source, trace, shape=model_shape("gpt-oss-20b"))
            for steps in (8000, 16000, 0):
                call = [
                    sys.executable,
                    "-c",
                    PROBE,
                    str(trace),
                    str(Path(name) / "out"),
                    str(steps),
                ]
                done, peak = subprocess.run(
                    call, check=True, capture_output=True, text=True
                ).stdout.split()
                print(
                    f"  gpt_oss_20b, {int(done):9,} layer steps: {float(peak):5.0f} MiB"
                    " (target below 500 MB)"
                )
    else:
        print("  gpt_oss_20b: not beside this checkout, not measured")
    spent = []
    for _ in range(5):
        begin_s = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "moesim", "--help"], check=True, capture_output=True
        )
        spent.append(time.perf_counter() - begin_s)
    print(
        f"  moesim --help: {statistics.median(spent):.2f} s, median of five (target"
        " 0.5)"
    )
