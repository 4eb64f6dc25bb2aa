"""``python -m benchmarks.drawn_ceilings RESULTS [--cells 400] [--shared DIR]``: does
any causal policy beat the clairvoyant system on drawn machines, or any run its bound?

Machines (links of 1 to 64 GB/s with the contention that belongs to them, or drawn;
processors of a third to thrice the speed; one card or two), models, memories, limited
host memory, batches and drafts are drawn, and in each cell causal systems and
compositions of the registry. Each cell is one line of RESULTS; finished ones are not
run again. Exits with 1 if the ceiling or a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import moesim
from benchmarks.combinations import PARTS
from benchmarks.recorded import RecordedTexts
from moesim.base.errors import TraceError
from moesim.evidence.reproduction.workloads import Workload
from moesim.hwprofiles.lanes import lane_names
from moesim.hwprofiles.profile import Contention, HardwareProfile, load_profile
from moesim.policies.base import PolicyError
from moesim.policies.registry import names, resolve
from moesim.policies.systems import SYSTEMS, compose
from moesim.runs.clairvoyant import CLAIRVOYANT
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from numpy.random import Generator

    from moesim.policies.systems import System

MACHINES = (
    *("rtx3080ti", "rtx4060ti", "rtx5060ti-ryzen9900x", "rtx5070ti-ryzen9600x"),
    *("rtx3090-epyc7532", "a6000-i9-10980xe", "dali-rtx3090"),
)
TOGETHER = 1.04
"""Rate that processor and link reach together, of the larger one: profiles' rule."""
SYSTEMS_DRAWN = 2
COMPOSITIONS_DRAWN = 6
SLOW = "ilp"
"""`exact` does the same in a hundredth of the time."""
LEAST_PASSES, MOST_PASSES = 4, 16
BEATEN = 1e-3
"""Share by which a causal one must be faster to count."""
ROUNDING = 1e-9


def workloads(shared: Path | None) -> list[Workload]:
    """Small traces with every column, recorded ones where there are any."""
    drawn = [
        Workload(model, "q4_k_m", 12, 40, 8, like=model, recall=0.75, residual=0.8)
        for model in ("olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b")
    ]
    if shared is None:
        return drawn
    recorded = (
        ("gpt-oss-20b", "mxfp4", "gpt_oss_20b", 8),
        ("kimi-linear-48b-a3b", "q4_k_m", "kimi_linear_48b_a3b_decode300", 1),
        ("olmoe-1b-7b", "q4_k_m", "olmoe_1b_7b_decode299", 1),
    )
    for model, weights, file, sequences in recorded:
        path = shared / f"{file}.parquet"
        sizes = (0, 48, sequences)
        drawn.append(
            RecordedTexts(
                model, weights, *sizes, recorded=path, recall=0.75, residual=0.8
            )
        )
    return drawn


def machine(dice: Generator) -> HardwareProfile:
    """Draw a machine: a packaged one with another link, processor and contention."""
    profile = load_profile(str(dice.choice(MACHINES)))
    link = float(np.exp(dice.uniform(np.log(1e9), np.log(64e9))))
    speed = float(np.exp(dice.uniform(np.log(1 / 3), np.log(3))))
    numbers = dict(profile.numbers)

    def put(path: str, value: float) -> None:
        numbers[path] = replace(numbers[path], value=value)

    for lane in ("h2d", "d2h"):
        put(f"costs.{lane}.bytes_per_s", link)
    for rate in ("bytes_per_s", "flops_per_s"):
        put(f"costs.cpu.{rate}", speed * numbers[f"costs.cpu.{rate}"].value)
    reads = numbers["costs.cpu.bytes_per_s"].value
    slowdown = (reads + link) / (TOGETHER * max(reads, link))
    towards = back = max(1.0, slowdown)
    if dice.random() < 0.5:
        towards, back = dice.uniform(1.0, 2.0, 2)
    factors = dict(profile.contention.factors)
    for copies in ("h2d", "d2h"):
        factors["cpu", copies] = float(towards)
        factors[copies, "cpu"] = float(back)
    gpus = 2 if dice.random() < 0.25 else 1
    workers = {lane: (lane,) for lane in lane_names(gpus)}
    drawn = replace(
        profile, name=f"{profile.name}-drawn", numbers=numbers, workers=workers
    )
    drawn.__dict__["contention"] = Contention(factors)
    return drawn


def options(dice: Generator, trace: Trace) -> dict[str, Any]:
    """Draw memories, batch and drafts."""
    drawn: dict[str, Any] = {
        "cache_ratio": float(np.exp(dice.uniform(np.log(0.02), 0.0))),
        "cache_scope": [None, None, "layer", "global"][dice.integers(4)],
        "gpu_split": ["layers", "experts"][dice.integers(2)],
        "batch": [1, 1, 1, 4][dice.integers(4)],
        "steps": int(dice.integers(LEAST_PASSES, MOST_PASSES)),
        "draft_tokens": 0,
    }
    if dice.random() < 0.3:
        share = dice.uniform(0.15, 0.95)
        # Staging of whole layers must find room, too.
        least = 3 * trace.shape.experts * trace.shape.max_expert_bytes
        drawn["host_memory_bytes"] = max(least, int(share * trace.shape.routed_bytes))
    if drawn["batch"] == 1 and dice.random() < 0.2:
        drawn["draft_tokens"] = int(dice.integers(1, 6))
    return drawn


def is_rival(system: System) -> bool:
    """Whether a system sees the past only, and does the same work."""
    policies = system.build(gpus=1, host_cache=None)
    return system.keeps_work and not any(part.oracle for part in policies.all())


def rivals(dice: Generator) -> list[str]:
    """Draw causal systems and compositions."""
    systems = [name for name in SYSTEMS if name != CLAIRVOYANT]
    systems = [name for name in systems if is_rival(compose(name))]
    parts = [
        [
            name
            for name in names(kind)
            if name != SLOW and not resolve(name, kind).oracle
        ]
        for kind in PARTS[:3]
    ]
    drawn = list(dice.choice(systems, SYSTEMS_DRAWN, replace=False))
    while len(drawn) < SYSTEMS_DRAWN + COMPOSITIONS_DRAWN:
        composition = "+".join(str(dice.choice(each)) for each in parts)
        if is_rival(compose(composition)):
            drawn.append(composition)
    return [str(name) for name in drawn]


def cell(number: int, seed: int, traces: list[Trace]) -> dict[str, Any]:
    """Draw a cell and run it."""
    dice = np.random.default_rng([seed, number])
    trace = traces[dice.integers(len(traces))]
    hw = machine(dice)
    drawn = options(dice, trace)
    named = rivals(dice)
    common = {"hw": hw, "keep": False, "bounded": True, **drawn}
    begin_s = time.process_time()
    run = moesim.replay(trace, CLAIRVOYANT, **common)
    took_s = time.process_time() - begin_s
    seconds: dict[str, Any] = {}
    for name in named:
        try:
            rival = moesim.replay(trace, name, **common)
        except (PolicyError, TraceError) as error:
            # Columns or artefacts that this trace has not, contradicting memories.
            seconds[name] = str(error)
            continue
        assert rival.bound is not None
        seconds[name] = [rival.metrics["makespan_s"], rival.bound.seconds]
    assert run.bound is not None
    return {
        "cell": number,
        "seed": seed,
        "trace": trace.name,
        "hw": hw.name,
        "link": hw.numbers["costs.h2d.bytes_per_s"].value,
        "cpu": hw.numbers["costs.cpu.bytes_per_s"].value,
        "contention": [hw.contention.slowdown(*each) for each in SLOWED],
        "gpus": hw.gpus,
        **drawn,
        CLAIRVOYANT: [run.metrics["makespan_s"], run.bound.seconds],
        "rules": [run.config[part] for part in PARTS[:3]],
        "cpu_s": took_s,
        "rivals": seconds,
    }


SLOWED = (("cpu", "h2d"), ("h2d", "cpu"))


def verdict(lines: list[dict[str, Any]]) -> tuple[str, bool]:
    """What cells say, and whether ceiling and bound held."""
    beaten = []
    broken = []
    ratios = []
    tightness = []
    runs = refused = 0
    for line in lines:
        ceiling_s, bound_s = line[CLAIRVOYANT]
        tightness.append(ceiling_s / bound_s)
        ran = {k: s for k, s in line["rivals"].items() if not isinstance(s, str)}
        refused += len(line["rivals"]) - len(ran)
        runs += len(ran)
        for name, (s, least_s) in (ran | {CLAIRVOYANT: line[CLAIRVOYANT]}).items():
            if s < least_s * (1 - ROUNDING):
                broken.append((line["cell"], name, s / least_s))
        taken = {name: s for name, (s, _) in ran.items()}
        if taken:
            best = min(taken, key=taken.__getitem__)
            ratios.append(taken[best] / ceiling_s)
            if taken[best] < ceiling_s * (1 - BEATEN):
                beaten.append((line["cell"], best, ceiling_s / taken[best] - 1))
    cpu_s = np.median([line["cpu_s"] for line in lines])
    text = [
        f"{len(lines)} cells, {runs} causal runs, {refused} refused",
        f"clairvoyant is beaten in {len(beaten)}, a bound in {len(broken)}",
        f"the best causal takes {min(ratios):.4f} to {max(ratios):.2f} times as long",
        f"clairvoyant takes {np.median(tightness):.2f} times the bound (median)",
        f"its search takes {cpu_s:.1f} s of the processor (median)",
    ]
    text += [f"  cell {n}: {name} is faster by {by:.2%}" for n, name, by in beaten]
    text += [
        f"  cell {n}: {name} takes {by:.6f} of the bound" for n, name, by in broken
    ]
    return "\n".join(text), not (beaten or broken)


def main() -> None:
    """Run what the results lack, and judge."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drawn_ceilings", description=__doc__
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--cells", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared", type=Path, help="folder of recorded traces")
    given = parser.parse_args()
    warnings.simplefilter("ignore")

    lines = []
    if given.results.exists():
        lines = [json.loads(line) for line in given.results.read_text().splitlines()]
    done = {(line["seed"], line["cell"]) for line in lines}
    with given.results.open("a") as file, tempfile.TemporaryDirectory() as folder:
        drawn = [each.draw(Path(folder)) for each in workloads(given.shared)]
        traces = [open_trace(path) for path in drawn]
        for number in range(given.cells):
            if (given.seed, number) in done:
                continue
            line = cell(number, given.seed, traces)
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
    text, holds = verdict(lines)
    print(text)
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
