"""Decision logs on disk: so that anybody can check, anywhere, that the same reports
give the same plans.

One `.npz` file: the log (every report to the planner and every answer) as JSON, and,
where routing did not come from a trace, what the gates of a live model decided.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.policies.planner.decision_log import Entry
from moesim.runtime.errors import StoreError
from moesim.traces.files import write_bytes
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import Phase

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
        entries: of `moesim.policies.planner.decision_log.DecisionLog`.
        steps: the routing, where no trace has it.
    """
    arrays = {_LOG: _to_bytes([list(entry) for entry in entries])}
    if steps is not None:
        passes = []
        for step in steps:
            passes.append(
                [
                    step.step,
                    int(step.phase),
                    step.batch,
                    step.tokens,
                    step.context_tokens,
                    step.sequences,
                ]
            )
            for layer in step.layers:
                for name, values in _arrays_of(layer).items():
                    arrays[f"{step.step}/{layer.layer}/{name}"] = values
        arrays[_STEPS] = _to_bytes(passes)
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
    write_bytes(path, archive.getbuffer())


def load_decision_log(path: Path) -> tuple[list[Entry], list[RoutedStep] | None]:
    """Read a decision log; `moesim.policies.planner.decision_log.repeat` checks it.

    Returns:
        Entries, and the routing where it is in the file.

    Raises:
        StoreError: not such a file.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
        log = json.loads(arrays.pop(_LOG).tobytes())
        passes = json.loads(arrays.pop(_STEPS).tobytes()) if _STEPS in arrays else None
        entries = [
            Entry(call, _to_tuples(arguments), _to_tuples(answer))
            for call, arguments, answer in log
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: expected the decision log of a run, found"
            f" {type(error).__name__}: {error}"
        ) from None
    if passes is None:
        return entries, None

    by_layer: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for key, values in arrays.items():
        step, layer, name = key.split("/", 2)
        by_layer.setdefault((int(step), int(layer)), {})[name] = values
    steps = []
    for number, phase, batch, tokens, context, sequences in passes:
        layers = [
            _layer_of(layer, named)
            for (step_of_layer, layer), named in sorted(by_layer.items())
            if step_of_layer == number
        ]
        steps.append(
            RoutedStep(
                step=number,
                phase=Phase(phase),
                batch=batch,
                tokens=tokens,
                context_tokens=context,
                sequences=sequences,
                layers=layers,
            )
        )
    return entries, steps


def _arrays_of(layer: RoutedLayer) -> dict[str, np.ndarray]:
    """What a gate decided, by name; without what it did not tell."""
    named: dict[str, Any] = {
        name: getattr(layer, name)
        for name in ("experts", "tokens", "routing", "weights", "scores")
    }
    named |= {f"predicted/{name}": values for name, values in layer.predicted.items()}
    return {name: values for name, values in named.items() if values is not None}


def _layer_of(layer: int, named: dict[str, np.ndarray]) -> RoutedLayer:
    """The inverse of `_arrays_of`."""
    predicted = {
        key.removeprefix("predicted/"): values
        for key, values in named.items()
        if key.startswith("predicted/")
    }
    return RoutedLayer(
        layer=layer,
        experts=named["experts"],
        tokens=named["tokens"],
        routing=named["routing"],
        weights=named.get("weights"),
        scores=named.get("scores"),
        predicted=predicted,
    )


def _to_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), np.uint8)


def _to_tuples(value: Any) -> Any:
    """JSON has lists where the log has tuples."""
    if isinstance(value, list):
        return tuple(_to_tuples(part) for part in value)
    return value
