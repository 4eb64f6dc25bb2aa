"""Stops of a process group, as a terminal sends them."""

from __future__ import annotations

import os
import signal
import time


def end_by_two_interrupts(process, gap_s):
    """Interrupt a group twice; it ends at once, with one line."""
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(gap_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted\n", err
