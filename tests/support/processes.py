"""Programs that tests start beside their own: Python code, or our command line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300
"""How long a program may take before it counts as hanging."""


def start(*words, environment=None, **options):
    """Start ``python WORDS`` with our packages, its streams in pipes.

    Args:
        words: of the command line.
        environment: variables beside those of this process.
        options: of `subprocess.Popen`, such as `cwd`.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        **pipes | options,
    )


def run_python(*words, **options):
    """Run ``python WORDS`` to its end; return code and streams. Options as in `start`."""
    with start(*words, **options) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def output_of(*words, **options):
    """What a program prints that ends well."""
    done = run_python(*words, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(condition):
    """Until a condition holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def end_by_two_interrupts(process, gap_s):
    """Interrupt a process group twice, as a terminal does; it ends with one line."""
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(gap_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err == "interrupted\n", err
