"""A finished run: its figures, tables and effective configuration, in memory and on
disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moesim.base.files import write_text
from moesim.base.units import ms, number, percent

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from moesim.runs.bound import Bound, MemoryBound
    from moesim.traces.timeline.spans import Timeline

FILES = ("timeline.parquet", "accesses.parquet", "steps.parquet", "run.json")
"""Names of what the folder of a run holds."""


@dataclass(slots=True, repr=False)
class Run:
    """A finished replay.

    Attributes:
        metrics: every figure, as `moesim replay --json` prints it; keys are explained
            in `moesim.traces.timeline.metrics`.
        timeline: spans, accesses and steps.
        config: the effective configuration, digests included.
        warnings: what a reader of the figures should know.
        bound: what the machine can do at best; None where it was not asked for, or
            where there is none.
    """

    metrics: dict[str, Any]
    timeline: Timeline
    config: dict[str, Any]
    warnings: list[str]
    bound: Bound | MemoryBound | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        """Say what ran where, and how fast."""
        config = self.config
        parts = [config["assignment"], config["cache"], config["prefetch"]]
        speed = self.metrics["decode_tokens_per_s"]
        rate = "" if speed is None else f", {speed:.1f} tokens/s"
        return (
            f"<Run {'+'.join(parts)} of {config['trace']} on {config['hw']},"
            f" {self.metrics['steps']} steps{rate}>"
        )

    def _repr_markdown_(self) -> str:
        """A small table, which notebooks show."""
        # Reports are no part of what simulates.
        from moesim.reporting.tables import markdown_table  # noqa: PLC0415

        config = self.config
        metrics = self.metrics
        parts = ("assignment", "cache", "prefetch", "routing")
        rows = [
            ("trace", f"{config['trace']}, {metrics['steps']:,} forward passes"),
            ("model", str(config["model"])),
            ("machine", f"{config['hw']} ({config['hw_kind']} profile)"),
            ("policy", ", ".join(f"{part} {config[part]}" for part in parts)),
            ("seed", str(config["seed"])),
            ("first token", ms(metrics["ttft_s"])),
            ("per token", ms(metrics["tpot_s"])),
            ("95th percentile of them", ms(metrics["tpot_p95_s"])),
            ("decode", number(metrics["decode_tokens_per_s"], " tokens/s")),
            ("hit rate", percent(metrics["hit_rate_active"])),
            ("energy", number(metrics["energy_j"], " J")),
        ]
        notes = [f"\nnote: {text}" for text in self.warnings]
        return "\n".join([*markdown_table(("run", ""), rows), *notes])

    def to_json(self) -> dict[str, Any]:
        """One object with metrics, configuration and warnings."""
        return {**self.metrics, "config": self.config, "warnings": self.warnings}

    def placement(self) -> pd.DataFrame:
        """Count where each expert was and which device computed it.

        Returns:
            One row per expert that was active: ``layer``, ``expert``, ``uses`` (layer
            steps in which it was active), ``tokens``, ``resident`` (share of its uses
            for which it was resident) and ``on_gpu`` (share of its uses that a GPU
            computed).
        """
        accesses = self.timeline.access_frame()
        # A delayed hit was still on its way, so it does not count as there.
        accesses["resident"] = (accesses["state"] == "hit").astype(float)
        accesses["on_gpu"] = (accesses["lane"] != "cpu").astype(float)

        by_expert = accesses.groupby(["layer", "expert"], sort=True)
        placement: pd.DataFrame = by_expert.agg(
            uses=("tokens", "size"),
            tokens=("tokens", "sum"),
            resident=("resident", "mean"),
            on_gpu=("on_gpu", "mean"),
        )
        return placement.reset_index()


def save_run(run: Run, folder: Path) -> None:
    """Write figures and configuration beside the tables."""
    # Before the file is opened: what JSON cannot say must leave nothing behind.
    text = json.dumps(run.to_json(), indent=2) + "\n"
    write_text(folder / "run.json", text)


def busiest(run: Run) -> tuple[str, float | None]:
    """The lane that worked most, and its share of the run.

    More speed helps there first.
    """
    shares = busy_shares(run)
    # Shares are None in a run without any work; then the first lane is named.
    lane = max(shares, key=lambda name: shares[name] or 0.0)
    return lane, shares[lane]


def busy_shares(run: Run) -> dict[str, float | None]:
    """Share of the run in which each lane worked; None for a run without any work."""
    makespan_s = run.metrics["makespan_s"]
    return {
        lane: busy_s / makespan_s if makespan_s else None
        for lane, busy_s in run.metrics["busy_s"].items()
    }
