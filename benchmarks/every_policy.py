"""Every policy on real routing, really run: copies, direct reads and products of a
stated share of the model's width.

    python -m benchmarks.every_policy t.parquet
    ../shared/traces/gpt_oss_20b.parquet=gpt-oss-20b --scale 16 --steps 4

``--kinds product`` runs every combination of assignment, cache, prefetch and routing
policies that the trace serves, ``--kinds pairs`` few that show every two of different
kinds together. With ``--done FILE`` each finished run is written there, and what stands
there is not run again; ``--minutes`` ends in good time, ``--part 2/5`` takes a fifth.

A checker as much as a table: it ends with code 1 when something differs that must be
equal. Each run is held against

- the simulator, on the same forward passes: hits, access by access, where they do not
  depend on timing (no prefetch and no replacement);
- a fresh planner, fed with the views that the run logged: the same plans;
- the CPU alone: the same answers, where the policy keeps the model's (one seed, so one
  answer);
- its budget: slots taken in each memory, and the planner's own high-water mark;
- the trace: a policy is refused, before anything runs and by name, exactly where a
  column is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from benchmarks.combinations import PARTS, all_of, pairwise, served
from benchmarks.replay_speed import MODELS, SHARED, SHIPPED
from moesim.base.errors import TraceError
from moesim.engine.observers import repeat
from moesim.hwprofiles.costs import Costs
from moesim.policies.base import PolicyError
from moesim.policies.registry import names
from moesim.policies.systems import SYSTEMS, System, compose
from moesim.runs.config import RunConfig
from moesim.runs.machine import device_of, machine_profile, open_random_store
from moesim.runs.measured import execute
from moesim.runs.setup import Setup, check_needs, needed_columns
from moesim.runtime.executor.trace_driven import ForcedRouting, shape_for
from moesim.runtime.models.dense import DenseStack
from moesim.runtime.train_cache import train
from moesim.sim.replay import Replay
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moesim.runtime.executor.executor import Executor
    from moesim.traces.format.batch import RoutedStep

KINDS = ("system", "assignment", "cache", "prefetch", "routing")
COMBINED = {"product": all_of, "pairs": pairwise}
TIERINGS = ("gpu", "ssd")
DISTINCT = 127
"""Different experts on disk: a prime, so that an expert shares its record with none of
its layer or of its number.
"""
TRAINED_STEPS = 60
TOLERANCE = 1e-4
"""Largest difference of hidden states, as a share of the largest: float32 sums over
many layers in one order.
"""


class SameInputs(DenseStack):
    """The dense part, with inputs that depend on the step alone, and a memory of every
    step's outcome.
    """

    outcomes: list[torch.Tensor]

    def embed(self, tokens: int) -> torch.Tensor:
        """Draw what this step of every run begins with."""
        draws = torch.Generator().manual_seed(len(self.outcomes))
        return torch.randn(tokens, self.shape.hidden, generator=draws).to(self._dtype)

    def head(self, hidden: torch.Tensor, sequences: int) -> None:
        """Keep the last hidden states."""
        self.outcomes.append(hidden.clone())
        super().head(hidden, sequences)


@dataclass(slots=True)
class Row:
    """What one policy did in one tiering: `wrong` is what must not be, `simulated` None
    if hits depend on time.
    """

    kind: str
    policy: str
    tiering: str
    outcome: str = "ran"
    why: str = ""
    hits: int = 0
    simulated: int | None = None
    accesses: int = 0
    slots: str = ""
    wrong: list[str] = field(default_factory=list)


class Bench:
    """One trace, made ready: a store, a dense part, and forward passes."""

    def __init__(
        self,
        trace: Trace,
        folder: Path,
        *,
        scale: int,
        steps: int,
        hw: str | None,
        batch: int = 1,
    ) -> None:
        spec = None if scale == 1 else f"{trace.shape.name}/{scale}"
        self.trace = trace
        self.steps = steps
        self.batch = batch
        self.shape = shape_for(trace.shape, spec)
        self.profile = machine_profile(hw)
        self.device = device_of(self.profile)
        every = self.shape.layers * self.shape.experts
        self.store = open_random_store(
            self.shape, folder / self.shape.name, "float32", min(DISTINCT, every)
        )
        self.dense = SameInputs(self.shape, torch.float32, self.device.device)
        self.future = RecordedFuture.of(trace, batch=batch, steps=steps)
        self.artefacts = folder / f"{trace.path.stem}-learned"
        self.artefacts.mkdir()
        training = list(compose_steps(trace, steps=TRAINED_STEPS))
        train(training, trace.shape, epochs=1).save(
            self.artefacts / "flashmoe.safetensors"
        )
        self._walks: dict[tuple[str, ...], list[RoutedStep]] = {}
        self.expected = {}
        for tiering in TIERINGS:
            self.expected[tiering] = self._run(
                self._setup(compose("all-cpu", cache="none"), tiering), self._walk(())
            )[1]

    def __enter__(self) -> Self:
        """Use it in a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.store.close()

    def row(self, kind: str, name: str, tiering: str) -> Row:
        """Run one policy, and hold it against everything it must agree with."""
        row = Row(kind, name, tiering)
        system = _system(kind, name)
        setup = self._setup(system, tiering)
        policies = setup.policies()
        missing = set(needed_columns(policies)) - set(self.trace.columns)
        try:
            check_needs(self.trace, policies)
        except TraceError as refusal:
            row.outcome = "refused"
            row.why = str(refusal)
            parts = (system.assignment, system.cache, system.prefetch, system.routing)
            if not missing or not any(repr(part) in row.why for part in parts):
                row.wrong.append("refused without a reason that names it")
            return row
        if missing:
            row.wrong.append(f"ran without {', '.join(sorted(missing))}")
        walk = self._walk(needed_columns(policies))
        try:
            run, outcomes, slots = self._run(setup, walk)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs into the table
            row.outcome, row.why = "FAILED", f"{type(error).__name__}: {error}"
            row.wrong.append(row.why)
            return row
        self._hold(row, setup, walk, run, outcomes)
        self._weigh(row, setup, run, slots)
        return row

    def _setup(self, system: System, tiering: str) -> Setup:
        """A cache that must choose; and, where reads are wanted, host memory for one
        layer's experts beside staging.
        """
        slots = self.shape.top_k + max(2, self.shape.experts // 16)
        staging = (
            system.staging_slots(self.shape) or self.profile.memory.staging_experts
        )
        host = (
            (staging + self.shape.experts) * self.shape.max_expert_bytes
            if tiering == "ssd"
            else None
        )
        config = RunConfig(
            slots_per_layer=slots, host_memory_bytes=host, artefacts=self.artefacts
        )
        return Setup(config, self.shape, self.profile, system, future=self.future)

    def _walk(self, needed: tuple[str, ...]) -> list[RoutedStep]:
        weights = ("weights",) if "weights" in self.trace.columns else ()
        columns = tuple(dict.fromkeys((*weights, *needed)))
        if columns not in self._walks:
            steps = compose_steps(
                self.trace, batch=self.batch, steps=self.steps, columns=columns
            )
            self._walks[columns] = list(steps)
        return self._walks[columns]

    def _run(
        self, setup: Setup, walk: list[RoutedStep]
    ) -> tuple[Any, list[torch.Tensor], dict[str, int]]:
        """Run for real; what came out, the hidden states of every step, and the bytes
        of each memory's slots.
        """
        slots: dict[str, int] = {}

        def forward(executor: Executor) -> Callable[[], None]:
            slots["gpu0"] = executor.memories.slots.slots.memory.nbytes
            slots["host"] = executor.memories.host.slots.memory.nbytes
            self.dense.outcomes = []
            routing = ForcedRouting(executor, self.dense, walk)
            self.dense.outcomes.clear()
            return routing

        run = execute(setup, self.store, self.device, forward)
        return run, self.dense.outcomes, slots

    def _hold(
        self,
        row: Row,
        setup: Setup,
        walk: list[RoutedStep],
        run: Any,
        outcomes: list[torch.Tensor],
    ) -> None:
        """Against the simulator, a fresh planner, and the CPU alone."""
        layer_steps = sum(len(step.layers) for step in walk)
        if run.metrics["layer_steps"] != layer_steps:
            row.wrong.append(
                f"layer steps: expected {layer_steps}, ran {run.metrics['layer_steps']}"
            )
        try:
            repeat(run.decision_log.entries, setup.planner(), walk)
        except PolicyError as difference:
            row.wrong.append(f"plans: {difference}")
        row.hits = int(run.metrics["hits"])
        row.accesses = int(run.metrics["accesses"])
        policies = setup.policies()
        replaces = policies.caches[0].replaces
        if not policies.prefetch.prefetches and not replaces:
            timeline = Timeline(setup.profile.lanes)
            Replay(
                setup.profile,
                setup.planner(),
                timeline,
                costs=Costs(setup.profile, self.shape),
            ).run(walk)
            timeline.close()
            row.simulated = int(summarise(timeline)["hits"])
            real = run.timeline.access_frame()
            virtual = timeline.access_frame()
            keys = ["step", "layer", "expert"]
            real, virtual = (
                frame.sort_values(keys).reset_index(drop=True)
                for frame in (real, virtual)
            )
            if not real.equals(virtual):
                row.wrong.append("accesses differ from the simulator's")
        if not policies.routing.alters and not policies.assignment.approximates:
            for step, (got, expected) in enumerate(
                zip(outcomes, self.expected[row.tiering], strict=True)
            ):
                largest = float((got - expected).abs().max() / expected.abs().max())
                if not largest <= TOLERANCE:
                    row.wrong.append(
                        f"answers of step {step}: {largest:.2g} from the CPU's"
                    )
                    break

    def _weigh(self, row: Row, setup: Setup, run: Any, slots: dict[str, int]) -> None:
        """Against the budget."""
        plan = setup.memory
        each = self.shape.max_expert_bytes
        budget = {"gpu0": plan.gpu.total_bytes + plan.staging * each}
        if plan.host is not None:
            budget["host"] = setup.config.host_memory_bytes
        row.slots = ", ".join(
            f"{name} {slots[name] / 2**20:.1f} of {most / 2**20:.1f} MiB"
            for name, most in budget.items()
        )
        for name, most in budget.items():
            used = run.metrics["memory_high_bytes"][name]
            if not used <= slots[name] <= most:
                row.wrong.append(
                    f"{name}: {used} bytes used, {slots[name]} taken, {most} allowed"
                )
        reads = run.metrics["bytes"]["ssd"]
        if (reads > 0) != (row.tiering == "ssd"):
            row.wrong.append(f"{reads} bytes read from the SSD")


def _system(kind: str, name: str) -> System:
    if kind in COMBINED:
        return System(**dict(zip(PARTS, name.split("+"), strict=True)))  # type: ignore[arg-type]
    if kind in ("system", "assignment"):
        return compose(name)
    return compose("greedy", **{kind: name})


def _names(kinds: list[str], trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield what to run: all of a kind, those included that the trace must refuse, or
    combinations that it serves.
    """
    for kind in kinds:
        if kind in COMBINED:
            choices, missing = served(trace.columns)
            sizes = " x ".join(str(len(one)) for one in choices)
            print(
                f"{kind} of {sizes} policies; left out for columns that"
                f" {trace.path.name} lacks: {missing or 'none'}"
            )
            found = COMBINED[kind](choices)
        else:
            found = list(SYSTEMS if kind == "system" else names(kind))
        yield from ((kind, name) for name in found)


def _open(given: str, folder: Path) -> Trace:
    """A trace of ours, or a foreign file with its model: ``FILE=MODEL``."""
    path, _, model = given.partition("=")
    if not model:
        return open_trace(path)
    place = folder / f"{model}.parquet"
    import_trace(Path(path), place, shape=model_shape(model))
    return open_trace(place)


def main() -> int:
    """Run the table; 1 if anything in it is wrong."""
    known = [f"{SHARED / name}.parquet={model}" for name, model in MODELS.items()]
    parser = argparse.ArgumentParser(
        description="Run every policy on real routing, and check each run."
    )
    parser.add_argument(
        "traces",
        nargs="*",
        default=[*known, str(SHIPPED)],
        help="TRACE, or FILE=MODEL to import",
    )
    parser.add_argument(
        "--scale",
        type=int,
        default=16,
        help="a stated fraction of the model's width (tiny: 1)",
    )
    parser.add_argument("--steps", type=int, default=6, help="forward passes")
    parser.add_argument(
        "--batch", type=int, default=1, help="sequences that run together"
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="of these, or product, or pairs"
    )
    parser.add_argument("--tierings", default=",".join(TIERINGS))
    parser.add_argument(
        "--hw", default="two-core-host", help="a profile of this machine"
    )
    parser.add_argument(
        "--without",
        default="",
        help="put off what uses these policies, such as the slow ilp",
    )
    parser.add_argument(
        "--part", default="1/1", help="take part of the runs: 2/5 is the second fifth"
    )
    parser.add_argument(
        "--done",
        type=Path,
        help="write finished runs here (JSON lines), and skip those of earlier ones",
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no run after that time"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wrong = left = 0
    part, parts = map(int, asked.part.split("/"))
    with tempfile.TemporaryDirectory() as name:
        for given in asked.traces:
            begin_s = time.perf_counter()
            trace = _open(given, Path(name))
            scale = 1 if trace.shape.name == "tiny" else asked.scale
            tierings = asked.tierings.split(",")
            todo = [
                (kind, policy, tiering)
                for kind, policy in _names(asked.kinds.split(","), trace)
                for tiering in tierings
                if not set(policy.split("+")) & set(asked.without.split(","))
            ]
            with Bench(
                trace,
                Path(name),
                scale=scale,
                steps=asked.steps,
                hw=asked.hw,
                batch=asked.batch,
            ) as bench:
                ledger = Ledger(asked.done, bench)
                for one in todo[part - 1 :: parts]:
                    if (
                        time.perf_counter() - begin_s < 60 * asked.minutes
                        and one not in ledger.rows
                    ):
                        ledger.add(bench.row(*one))
                rows = [
                    ledger.rows[one]
                    for one in todo[part - 1 :: parts]
                    if one in ledger.rows
                ]
            left += len(todo[part - 1 :: parts]) - len(rows)
            _print(bench, rows, time.perf_counter() - begin_s)
            wrong += sum(bool(row.wrong) for row in rows)
    if left:
        print(f"{left} runs left", flush=True)
    return 1 if wrong else 3 if left else 0


class Ledger:
    """Finished runs of one bench, by kind, policy and tiering; on disk as well, if a
    file is named.

    Args:
        path: a file of JSON lines; what was wrong, or a kill left half written, is run
            again.
        bench: whose runs; lines of other benches are left alone.
    """

    def __init__(self, path: Path | None, bench: Bench) -> None:
        self.rows: dict[tuple[str, str, str], Row] = {}
        self._path = path
        self._bench = [
            str(bench.trace.path.name),
            bench.shape.name,
            bench.steps,
            bench.batch,
        ]
        if path is None:
            return
        whole = path.read_bytes() if path.exists() else b""
        whole = whole[: whole.rfind(b"\n") + 1]
        for line in whole.splitlines():
            if (found := json.loads(line)).pop("bench") == self._bench and not found[
                "wrong"
            ]:
                self._keep(Row(**found))
        path.touch()
        os.truncate(path, len(whole))

    def add(self, row: Row) -> None:
        """Keep a finished run."""
        self._keep(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"bench": self._bench} | asdict(row)) + "\n")

    def _keep(self, row: Row) -> None:
        self.rows[row.kind, row.policy, row.tiering] = row


def _print(bench: Bench, rows: list[Row], seconds: float) -> None:
    shape = bench.shape
    print(
        f"{shape.name}: {shape.layers} layers x {shape.experts} experts of"
        f" {shape.expert_bytes[0] / 1024:.0f} KiB, {bench.steps} forward passes of"
        f" {bench.trace.path.name}, batch {bench.batch}, {bench.profile.name},"
        f" {seconds:.0f} s"
    )
    for row in rows:
        if row.kind in COMBINED and not row.wrong:
            continue  # thousands: what is wrong is enough
        head = f"  {row.kind:10} {row.policy:20} {row.tiering:4}"
        if row.outcome == "refused":
            print(f"{head} refused: {row.why.partition(': ')[2]}" + _words(row))
            continue
        beside = (
            "depend on time" if row.simulated is None else f"simulated {row.simulated}"
        )
        print(
            f"{head} {row.outcome} hits {row.hits} of {row.accesses} ({beside});"
            f" {row.slots}" + _words(row)
        )
    ran = [row for row in rows if row.outcome == "ran"]
    free = [row for row in ran if row.simulated is not None]
    print(
        f"  {len(ran)} ran, {sum(row.outcome == 'refused' for row in rows)} refused by"
        f" name, {sum(bool(row.wrong) for row in rows)} wrong; hits equal in"
        f" {sum(r.hits == r.simulated for r in free)} of {len(free)} that do not depend"
        " on timing",
        flush=True,
    )


def _words(row: Row) -> str:
    return "".join(f"\n      WRONG: {one}" for one in row.wrong)


if __name__ == "__main__":
    sys.exit(main())
