"""Kills and signals at random moments: whatever stands under a result's name is whole,
the older one or the newer, and the next run gives the same bytes.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import foreign_files as files
from support.small_trace import write_small_trace

from torture import ATTACKS, IS_LONG

pytestmark = pytest.mark.skipif(not IS_LONG, reason="long: `make torture` runs it")

ROOT = Path(__file__).parents[2]
OLDER, NEWER = 3, 4
COMMANDS = {
    "import": "trace import foreignSEED out/t.parquet --shape layers=3,experts=8,top_k=2,expert_bytes=1KiB",
    "synth": "trace synth out/s.parquet --like smallSEED.parquet --tokens 200 --seed SEED --save-stats out/s.npz",
    "export": "trace export smallSEED.parquet out/t.csv --to csv",
    "replay": "replay tiny --policy greedy --steps SEED --out out",
    "hits": "hits smallSEED.parquet --cache-ratio 0.25,0.5 --png out/hits.png",
    "sweep": "sweep smallSEED.parquet --policy greedy,on-demand --steps 20 --jobs 1 --results out/results --table out/t.csv",
}
MAIN = "import sys; from moesim.start import main; main(sys.argv[1:])"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Stage:
    """A folder in which a command has run cleanly with two seeds."""

    def __init__(self, folder, name):
        self.folder = folder
        self.words = COMMANDS[name]
        self.resumes = name == "sweep"
        for seed in (OLDER, NEWER):
            write_small_trace(folder / f"small{seed}.parquet", seed=seed, new_tokens=60)
            files.llama_cpp(folder / f"foreign{seed}", files.routing(seed=seed))
        self.clean = {}
        for seed in (OLDER, NEWER):
            began_s = time.monotonic()
            assert self.ended(self.started(seed))[0] == 0
            self.seconds = time.monotonic() - began_s
            self.clean[seed] = self.digests()
            shutil.move(folder / "out", folder / f"out{seed}")

    def started(self, seed):
        (self.folder / "out").mkdir(exist_ok=True)
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                MAIN,
                *self.words.replace("SEED", str(seed)).split(),
            ],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "SOURCE_DATE_EPOCH": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @staticmethod
    def ended(process):
        """Exit code, and lines that are no notes."""
        _, err = process.communicate(timeout=300)
        return process.returncode, [
            line for line in err.splitlines() if not line.startswith("note: ")
        ]

    def laid_out(self, *, with_older):
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        if with_older and not self.resumes:
            shutil.copytree(self.folder / f"out{OLDER}", self.folder / "out")

    def digests(self):
        """Name -> digest of every result; a run's settings hold times of day."""
        return {
            str(path.relative_to(self.folder / "out")): hashlib.sha256(
                path.read_bytes()
            ).hexdigest()
            for path in sorted((self.folder / "out").rglob("*"))
            if path.suffix in (".parquet", ".csv", ".npz", ".png")
            and path.parent.name != "results"
            and not path.name.startswith(".")
        }

    def halves(self):
        """Results that are neither the older nor the newer one."""
        return [
            name
            for name, digest in self.digests().items()
            if digest not in {clean.get(name) for clean in self.clean.values()}
        ]


@pytest.fixture(scope="module", params=COMMANDS)
def stage(request, tmp_path_factory):
    return Stage(tmp_path_factory.mktemp("stage"), request.param)


@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_what_is_ended_at_any_moment_leaves_whole_results(stage, number):
    dice = random.Random(number)
    for _ in range(ATTACKS):
        stage.laid_out(with_older=dice.random() < 0.5)
        process = stage.started(NEWER)
        time.sleep(dice.uniform(0.02, 1.1 * stage.seconds))
        os.killpg(process.pid, getattr(signal, number))
        code, lines = stage.ended(process)
        assert stage.halves() == []
        if number != "SIGKILL" and code != 0:
            # Before Python has begun, the system ends it.
            assert code in (CODES[getattr(signal, number)], -getattr(signal, number))
            assert len(lines) <= 1 or code < 0
            assert not list((stage.folder / "out").rglob(".*.part"))
        assert stage.ended(stage.started(NEWER))[0] == 0
        assert stage.digests() == stage.clean[NEWER]
        assert not list((stage.folder / "out").rglob(".*.part"))
