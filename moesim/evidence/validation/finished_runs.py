"""Finished real runs, read back from their folders: set up as they were."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.base.errors import TraceError
from moesim.base.inputs import load_json, read_text
from moesim.hwprofiles.profile import load_profile
from moesim.runs.config import MeasuredConfig
from moesim.runs.config_file import load_config
from moesim.runs.measured import PROFILE_FILE, columns_of
from moesim.runs.setup import Setup, trace_of
from moesim.traces.format.batch import compose
from moesim.traces.format.schema import ModelShape
from moesim.traces.timeline.operations import OperationTable
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from moesim.traces.format.batch import RoutedStep


class FinishedRun(NamedTuple):
    """A real run.

    Attributes:
        name: of its folder.
        setup: what it was run with, its own profile included.
        steps: its routing.
        timeline: its tables, those of its operations included.
    """

    name: str
    setup: Setup
    steps: list[RoutedStep]
    timeline: Timeline


def load_run(folder: str | Path) -> FinishedRun:
    """Read a real run back.

    Args:
        folder: of `moesim run --out`.

    Raises:
        TraceError: it is no folder of a real run, or its trace is gone.
        ConfigError, ProfileError, PolicyError, StoreError: a file of it is damaged, or
            a policy is gone.
    """
    folder = Path(folder)
    operations = OperationTable.load(folder)
    timeline = Timeline.load(folder)
    timeline.operations = operations
    file = folder / "run.json"
    facts = _facts(file)
    profile = load_profile(folder / PROFILE_FILE)
    # Its own profile stands beside it, wherever the run once found it.
    config = load_config(file, MeasuredConfig).replaced(hw=profile, hw_digest=None)
    shape = _shape(file, facts)
    if config.model is not None:
        setup = Setup(config, shape, profile, config.system)
        return FinishedRun(folder.name, setup, _decided_steps(folder), timeline)

    trace = trace_of(config)
    setup = Setup.of(config, trace, profile=profile, shape=shape)
    steps = compose(
        trace,
        batch=config.batch,
        steps=config.steps,
        columns=columns_of(trace, setup.policies()),
    )
    return FinishedRun(folder.name, setup, list(steps), timeline)


def _facts(file: Path) -> dict[str, Any]:
    try:
        facts = load_json(read_text(file))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{file}: expected the figures of a real run, found {error}; run again with"
            " --out"
        ) from None
    return dict(facts)


def _shape(file: Path, facts: dict[str, Any]) -> ModelShape:
    """Sizes of the run's experts."""
    values = facts.get("model_shape")
    if not isinstance(values, dict):
        raise TraceError(
            f"{file}: expected model_shape, which real runs note; run again with --out"
        )
    lists = {
        name: tuple(value) for name, value in values.items() if isinstance(value, list)
    }
    return ModelShape(**{**values, **lists})


def _decided_steps(folder: Path) -> list[RoutedStep]:
    """What a live model's gates decided."""
    from moesim.runtime.executor.decision_log_file import (  # noqa: PLC0415 - torch
        FILE_NAME,
        load_decision_log,
    )

    _, steps = load_decision_log(folder / FILE_NAME)
    if steps is None:
        raise TraceError(f"{folder / FILE_NAME}: expected routing, found none")
    return steps
