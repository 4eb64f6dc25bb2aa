"""Decision logs on disk: so that anybody can check, anywhere, that the same reports
give the same plans.

One `.npz` file: the log (every report to the planner and every answer) as JSON, and,
where routing did not come from a trace, what the gates of a live model decided.
"""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.base.errors import StoreError, TraceError
from moesim.base.files import write_bytes
from moesim.base.inputs import Checked, parse_json
from moesim.engine.observers import Entry
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import Phase  # noqa: TC001 - pydantic reads it
from moesim.traces.importers.readers.arrays import load_named

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE_NAME: Final = "decisions.npz"
_LOG = "log"
_STEPS = "steps"


def save_decision_log(
    path: Path, entries: Iterable[Entry], steps: Iterable[RoutedStep] | None = None
) -> None:
    """Write a decision log.

    Args:
        path: the file; written beside, then renamed.
        entries: of `moesim.engine.observers.DecisionLog`.
        steps: the routing, where no trace has it.
    """
    arrays = {_LOG: _to_bytes([list(entry) for entry in entries])}
    if steps is not None:
        passes = []
        for step in steps:
            passes.append([int(getattr(step, name)) for name in _Pass._fields])
            for layer in step.layers:
                for name, values in _arrays_of(layer).items():
                    arrays[f"{step.step}/{layer.layer}/{name}"] = values
        arrays[_STEPS] = _to_bytes(passes)
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
    write_bytes(path, archive.getbuffer())


def load_decision_log(path: Path) -> tuple[list[Entry], list[RoutedStep] | None]:
    """Read a decision log; `moesim.engine.observers.repeat` checks it.

    Returns:
        Entries, and the routing where it is in the file.

    Raises:
        StoreError: not such a file.
    """
    try:
        arrays = load_named(path)
    except (OSError, TraceError) as error:
        raise StoreError(f"{path}: expected a decision log, found: {error}") from None
    if _LOG not in arrays:
        raise StoreError(f"{path}: expected the decision log of a run, found no log")

    log = _parsed(path, arrays.pop(_LOG), list[tuple[str, list[Any], Any]])
    entries = [
        Entry(call, _to_tuples(arguments), _to_tuples(answer))
        for call, arguments, answer in log
    ]
    if _STEPS not in arrays:
        return entries, None

    passes = _parsed(path, arrays.pop(_STEPS), list[_Pass])
    by_layer: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for key, values in arrays.items():
        place = re.fullmatch(r"(\d{1,9})/(\d{1,9})/(.+)", key)
        if place is None:
            raise StoreError(f"{path}: {key}: expected STEP/LAYER/NAME; run it again")
        numbers = (int(place[1]), int(place[2]))
        by_layer.setdefault(numbers, {})[place[3]] = values
    for (step, layer), named in by_layer.items():
        routing = named.get("routing")
        if (
            routing is None
            or routing.ndim != 2
            or routing.dtype != np.uint16
            or not routing.shape[1]
        ):
            content = "none" if routing is None else f"{routing.dtype} {routing.shape}"
            raise StoreError(
                f"{path}: step {step}, layer {layer}: routing: expected experts by"
                f" token, uint16, found {content}; run it again"
            )
    steps = []
    for numbers_of_pass in passes:
        layers = [
            _layer_of(layer, named)
            for (step_of_layer, layer), named in sorted(by_layer.items())
            if step_of_layer == numbers_of_pass.step
        ]
        steps.append(RoutedStep(**numbers_of_pass._asdict(), layers=layers))
    return entries, steps


class _Pass(NamedTuple):
    """A forward pass, but for its layers; the fields of `RoutedStep`."""

    step: int
    phase: Phase
    batch: int
    tokens: int
    context_tokens: int
    sequences: int


def _parsed(path: Path, text: np.ndarray, schema: type[Checked]) -> Checked:
    return parse_json(
        text.tobytes(),
        schema,
        where=str(path),
        error=StoreError,
        way_out="run it again",
    )


def _arrays_of(layer: RoutedLayer) -> dict[str, np.ndarray]:
    """What a gate decided, by name; without what it did not tell."""
    named: dict[str, Any] = {
        name: getattr(layer, name) for name in ("routing", "weights", "scores")
    }
    named |= {f"predicted/{name}": values for name, values in layer.predicted.items()}
    return {name: values for name, values in named.items() if values is not None}


def _layer_of(layer: int, named: dict[str, np.ndarray]) -> RoutedLayer:
    """The inverse of `_arrays_of`."""
    experts, tokens = np.unique(named["routing"], return_counts=True)
    return RoutedLayer(
        layer=layer,
        experts=experts.astype(np.int32),
        tokens=tokens.astype(np.int32),
        routing=named["routing"],
        weights=named.get("weights"),
        scores=named.get("scores"),
        predicted={
            key.removeprefix("predicted/"): values
            for key, values in named.items()
            if key.startswith("predicted/")
        },
    )


def _to_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), np.uint8)


def _to_tuples(value: Any) -> Any:
    """JSON has lists where the log has tuples."""
    if isinstance(value, list):
        return tuple(_to_tuples(part) for part in value)
    return value
