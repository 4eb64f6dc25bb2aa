"""Compiling ahead leaves nothing behind, however it ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

PATIENCE_S = 60


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_workers_end_with_a_killed_parent(tmp_path):
    environment = os.environ | {"MOESIM_MACHINE_CODE": str(tmp_path / "code")}
    command = [sys.executable, "-m", "moesim", "doctor", "--warm"]
    parent = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        workers = wait_for_workers(parent)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    for worker in alive:
        worker.kill()
    assert alive == []


def wait_for_workers(parent):
    """Until something was compiled: whoever waits for work is there as well."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and parent.poll() is None:
        workers = psutil.Process(parent.pid).children()
        if workers:
            return workers
        time.sleep(0.05)
    pytest.fail("no worker began")
    return []
