"""Runs behind the papers' experiments: each is described, done once, and shared by all
records that need it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from moesim.hwprofiles.profile import load_profile
from moesim.runs.replay import replay
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moesim.evidence.reproduction.workloads import Workload
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.runs.result import Run

_opened = lru_cache(maxsize=4)(open_trace)
Outcome = dict[str, Any]
"""Metrics of a run, and `decode_seconds` under ``decode``."""

TRAINING_SEQUENCES = 256
"""Drawn texts that a cache network is trained on, half of FlashMoE's 512 (its text,
``train_samples``): all of them take 5 GB for Qwen3-30B-A3B and hardly another result
(docs/measurements/papers.md).
"""
EPOCHS = 8
"""Most epochs of that training, which stops early where it can; the paper has 200."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run, before it is done.

    Attributes:
        workload: what is replayed.
        policy: a system or an assignment policy.
        machine: hardware profile.
        options: further options of `moesim.replay` and `moesim.sweep`, sorted.
        warm: what the cache is filled from: ``all`` steps of other sequences of the
            workload, or their ``decode`` steps alone; empty for none.
        learned: whether a cache network is trained on those, for ``flashmoe``.
        numbers: of the machine's profile, in place of its own: dotted path and value.
    """

    workload: Workload
    policy: str
    machine: str
    options: tuple[tuple[str, Any], ...] = ()
    warm: str = ""
    learned: bool = False
    numbers: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(
        cls,
        workload: Workload,
        policy: str,
        machine: str,
        *,
        warm: str = "",
        learned: bool = False,
        numbers: Mapping[str, float] | None = None,
        **options: Any,
    ) -> RunSpec:
        """Describe a run; options that are None are left out."""
        given = {name: value for name, value in options.items() if value is not None}
        return cls(
            workload,
            policy,
            machine,
            options=tuple(sorted(given.items())),
            warm=warm,
            learned=learned,
            numbers=tuple((numbers or {}).items()),
        )

    @property
    def calibration(self) -> Workload:
        """What the cache is filled from, where it is."""
        drawn = self.workload.calibration()
        return replace(drawn, prompt=0) if self.warm == "decode" else drawn

    @property
    def profile(self) -> HardwareProfile:
        """The machine, with the numbers that take the place of its own."""
        profile = load_profile(self.machine)
        other = {
            path: replace(profile.numbers[path], value=value)
            for path, value in self.numbers
        }
        return replace(profile, numbers={**profile.numbers, **other})

    @property
    def words(self) -> str:
        """The run in the words of the command line."""
        given = [f"--{name.replace('_', '-')} {value}" for name, value in self.options]
        return " ".join([self.policy, *given, *["--warm"] * bool(self.warm)])

    def do(self, folder: Path) -> Outcome:
        """Do the run; its traces lie in `folder`, or are drawn into it.

        Raises:
            TraceError, ProfileError, PolicyError: a description that fits nothing.
        """
        # Runs of one trace read it once.
        trace = _opened(self.workload.draw(folder))
        options = dict(self.options)
        if self.warm:
            options["warm"] = _opened(self.calibration.draw(folder))
        if self.learned:
            options["artefacts"] = learned_cache(self.workload, folder)
        run = replay(trace, self.policy, hw=self.profile, **options)
        return run.metrics | {"decode": decode_seconds(run)}


def decode_seconds(run: Run) -> dict[str, float]:
    """How long all decode steps took, under ``total``, and what was busy in them, by
    lane and by kind of operation; lanes overlap.
    """
    steps = run.timeline.step_frame()
    steps = steps[steps["phase"] == "decode"]
    spans = run.timeline.frame()
    spans = spans[spans["step"].isin(steps["step"])]
    seconds = spans["end_s"] - spans["start_s"]
    total_s = float((steps["end_s"] - steps["start_s"]).sum())
    by_lane, by_kind = (
        seconds.groupby(spans[name].astype(str)).sum() for name in ("lane", "kind")
    )
    return {"total": total_s, **by_kind, **by_lane}


def learned_cache(workload: Workload, folder: Path) -> Path:
    """Train FlashMoE's cache network on other sequences of the workload, unless it is
    there already, and return its folder.

    Raises:
        ImportError: PyTorch is not installed.
    """
    from moesim.runtime.train_cache import train  # noqa: PLC0415 - needs torch

    training = workload.calibration(TRAINING_SEQUENCES)
    artefacts = folder / f"{training.name}-learned"
    network = artefacts / "flashmoe.safetensors"
    if not network.exists():
        trace = open_trace(training.draw(folder))
        trained = train(list(compose(trace)), trace.shape, epochs=EPOCHS)
        artefacts.mkdir(exist_ok=True)
        trained.save(network)
    return artefacts
