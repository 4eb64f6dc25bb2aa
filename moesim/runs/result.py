"""A finished run: its figures, tables and effective configuration, in memory and on
disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.traces.files import remove_leftovers, write_text

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from moesim.traces.timeline.spans import Timeline

FILES = ("timeline.parquet", "accesses.parquet", "steps.parquet", "run.json")


@dataclass(slots=True)
class Run:
    """A finished replay.

    Attributes:
        metrics: every figure, as `moesim replay --json` prints it; keys are explained
            in `moesim.traces.timeline.metrics`.
        timeline: spans, accesses and steps.
        config: the effective configuration, digests included.
        warnings: what a reader of the figures should know.
    """

    metrics: dict[str, Any]
    timeline: Timeline
    config: dict[str, Any]
    warnings: list[str]

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


def save_run(run: Run, folder: Path | None) -> list[Path]:
    """Write figures and configuration beside the tables; return all files of a run."""
    if folder is None:
        return []
    # Before the file is opened: what JSON cannot say must leave nothing behind.
    text = json.dumps(run.to_json(), indent=2) + "\n"
    write_text(folder / "run.json", text)
    return run_files(folder)


def run_files(folder: Path | None) -> list[Path]:
    """The files of a run that was written into a folder."""
    return [] if folder is None else [folder / name for name in FILES]


def remove_parts(folder: Path) -> None:
    """Remove what a killed process had begun to write into the folder of a run."""
    remove_leftovers(folder)
