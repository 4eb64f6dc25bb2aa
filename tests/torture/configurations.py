"""Drawn configurations: same seed, same bytes, in any process; and every run audited."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from .report import Report, last_lines
from .subjects import TESTS

HASH_SEEDS = ("1", "271828")


def drawn(dice, traces):
    """The options of one replay."""
    from moesim.hwprofiles.profile import list_profiles
    from moesim.policies.registry import names
    from moesim.policies.systems import SYSTEMS

    options = {
        "trace": str(dice.choice(traces)),
        "hw": dice.choice(list_profiles()),
        "steps": dice.randint(1, 12),
        "batch": dice.choice((1, 1, 2, 3)),
        "seed": dice.randrange(1000),
        "cache_ratio": dice.choice((0.0, 0.1, 0.25, 0.5, 0.9, 1.0)),
    }
    if dice.random() < 0.5:
        options["policy"] = dice.choice(sorted(SYSTEMS))
    else:
        options["policy"] = dice.choice(names("assignment"))
        options["cache"] = dice.choice(names("cache"))
        options["prefetch"] = dice.choice(names("prefetch"))
    if dice.random() < 0.3:
        options["cache_scope"] = dice.choice(("layer", "global"))
    if dice.random() < 0.3:
        options["host_memory_bytes"] = dice.choice((1 << 18, 1 << 20, 1 << 22))
    if dice.random() < 0.2:
        options["prefetch_budget_bytes"] = dice.choice((0, 1 << 16, 1 << 20))
    if dice.random() < 0.2:
        options["noise_seed"] = dice.randrange(100)
    return options


def replayed(options, folder):
    """Replay one configuration; return a digest of its bytes and what the audit says.

    A configuration that is refused in one line has the digest of that line.
    """
    import moesim
    from moesim.cli.errors import message_for_users
    from moesim.traces.format.reader import open_trace

    from .audit import Record, audit

    try:
        run = moesim.replay(**options, out=folder)
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        message = message_for_users(error)
        if message is None or "\n" in message:
            return "", [f"broke: {last_lines(error)}"]
        return f"refused: {message}", []

    digest = hashlib.sha256()
    for name in ("timeline", "accesses", "steps"):
        digest.update((folder / f"{name}.parquet").read_bytes())
    record = Record(
        folder, open_trace(options["trace"]), run.config, run.metrics["makespan_s"]
    )
    return digest.hexdigest(), audit(record)


def _worker(count, seed, folder):
    """Replay all configurations; print a line of JSON for each."""
    folder = Path(folder)
    traces = sorted(folder.glob("*.parquet"))
    for number in range(count):
        options = drawn(random.Random(f"{seed} {number}"), traces)
        with tempfile.TemporaryDirectory() as out:
            digest, faults = replayed(options, Path(out))
        sys.stdout.write(json.dumps([options, digest, faults]) + "\n")


def run_suite(count, seed, only=None):
    """Replay every configuration in two processes with different hash seeds."""
    del only
    from support.small_trace import write_small_trace

    report = Report("drawn configurations")
    with tempfile.TemporaryDirectory() as name:
        columns = ("weights", "scores", "pred1_raw")
        for number in range(2):
            path = Path(name) / f"t{number}.parquet"
            write_small_trace(path, sequences=4, seed=number, columns=columns)
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(count), str(seed), name],
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "PYTHONHASHSEED": hash_seed,
                    "PYTHONPATH": str(TESTS),
                },
            )
            for hash_seed in HASH_SEEDS
        ]
        answers = [worker.communicate()[0].splitlines() for worker in workers]

    for number, pair in enumerate(zip(*answers, strict=True)):
        (options, digest, faults), (_, other, _) = map(json.loads, pair)
        report.count("refused" if digest.startswith("refused") else "replayed")
        where = f"{number} of seed {seed}: {json.dumps(options)}"
        if digest != other:
            report.fail(f"{where}: other bytes in another process")
        for fault in faults:
            report.fail(f"{where}: {fault}")
    if len(answers[0]) != count:
        report.fail(f"{count} expected, {len(answers[0])} answered")
    return report


if __name__ == "__main__":
    _worker(int(sys.argv[1]), sys.argv[2], sys.argv[3])
