"""Real runs on this machine, drawn and audited as simulated ones are."""

import dataclasses
import random
import tempfile
from pathlib import Path

from .audit import Record, audit
from .report import Report

BLOCK_BYTES = 4096


def run_suite(count, seed, only=None):
    """Run one drawn configuration after the other, on one store."""
    del only
    from support.small_trace import write_small_trace

    report = Report("real runs")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = ("weights", "scores", "pred1_raw")
        trace = write_small_trace(folder / "t.parquet", sequences=3, columns=columns)
        for number in range(count):
            if report.is_over:
                break
            dice = random.Random(f"{seed} {number}")
            for fault in attack(trace, folder, dice, report):
                report.fail(f"{number} of seed {seed}: {fault}")
    return report


def attack(trace, folder, dice, report):
    """Run and audit one configuration; what is wrong."""
    from support.real_machine import host_profile

    from moesim.cli.errors import message_for_users
    from moesim.runs.measured import run_trace
    from moesim.traces.format.reader import open_trace

    policy = dice.choice(("greedy", "on-demand", "all-cpu", "hybrimoe", "beam"))
    options = {
        "cache": dice.choice(("lru", "lfu", "arc", "fifo")),
        "slots_per_layer": dice.randint(1, 8),
        "steps": dice.randint(1, 20),
        "batch": dice.choice((1, 2)),
        "seed": dice.randrange(100),
    }
    out = folder / "out"
    hw = dataclasses.replace(host_profile(), kind="measured")
    try:
        run = run_trace(
            str(trace), policy, hw=hw, out=out, store=str(folder / "s"), **options
        )
    except Exception as error:  # noqa: BLE001 - one line is an answer
        message = message_for_users(error)
        report.count("refused" if message else "broke")
        return [] if message else [f"{policy}, {options}: {error!r}"]

    report.count("run")
    opened = open_trace(trace)
    # Real experts are what the machine computes with, in full blocks of the store.
    weights = 3 * opened.shape.hidden * opened.shape.expert_intermediate
    size = -(-weights * 4 // BLOCK_BYTES) * BLOCK_BYTES
    record = Record(out, opened, run.config, run.metrics["makespan_s"])
    record.sizes = [size] * opened.shape.layers
    return [f"{policy}, {options}: {fault}" for fault in audit(record)]
