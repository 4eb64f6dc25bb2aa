"""One finished run: its figures, its tables and its effective configuration, in memory
and on disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.traces.files import written_beside

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from moesim.traces.timeline.spans import Timeline


@dataclass(slots=True)
class Run:
    """One finished replay.

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
        """Which expert was where, and computed by whom: one row per expert that was
        asked for.

        Returns:
            ``layer``, ``expert``, ``uses`` (layer steps in which it was active),
            ``tokens``, ``resident`` (share of its uses for which it was there) and
            ``on_gpu`` (share of its uses that a GPU computed).
        """
        found = self.timeline.access_frame()
        found["resident"] = (found["state"] == "hit").astype(float)
        found["on_gpu"] = (found["lane"] != "cpu").astype(float)
        groups = found.groupby(["layer", "expert"], sort=True)
        placed: pd.DataFrame = groups.agg(
            uses=("tokens", "size"),
            tokens=("tokens", "sum"),
            resident=("resident", "mean"),
            on_gpu=("on_gpu", "mean"),
        ).reset_index()
        return placed


def save_run(run: Run, folder: Path | None) -> list[Path]:
    """Write figures and effective configuration beside the tables of a run; return all
    files of the folder.
    """
    if folder is None:
        return []
    with written_beside(folder / "run.json") as part:
        part.write_text(json.dumps(run.to_json(), indent=2) + "\n", encoding="utf-8")
    return run_files(folder)


def run_files(folder: Path | None) -> list[Path]:
    """The files of a run that was written into a folder."""
    names = ("timeline.parquet", "accesses.parquet", "steps.parquet", "run.json")
    return [] if folder is None else [folder / name for name in names]
