"""What the policies saw, on disk: so that anybody can check, anywhere, that the same
views give the same plans.

One `.npz` file: the journal (every report to the planner and every answer) as JSON,
and, where routing did not come from a trace, what the gates of a live model decided.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from moesim.policies.planner.decision_log import Entry
from moesim.runtime.errors import StoreError
from moesim.traces.files import written_beside
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE_NAME: Final = "views.npz"
_JOURNAL = "journal"
_STEPS = "steps"


def save_views(
    path: Path, entries: Iterable[Entry], steps: Iterable[RoutedStep] | None = None
) -> None:
    """Write a journal.

    Args:
        path: the file; written beside, then renamed.
        entries: of `moesim.policies.planner.decision_log.Journal`.
        steps: the routing, where no trace has it.
    """
    arrays: dict[str, np.ndarray] = {
        _JOURNAL: _text([list(entry) for entry in entries])
    }
    if steps is not None:
        facts = []
        for one in steps:
            facts.append(
                [
                    one.step,
                    int(one.phase),
                    one.batch,
                    one.tokens,
                    one.context_tokens,
                    one.sequences,
                ]
            )
            for layer in one.layers:
                for name, values in _parts(layer).items():
                    arrays[f"{one.step}/{layer.layer}/{name}"] = values
        arrays[_STEPS] = _text(facts)
    with written_beside(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load_views(path: Path) -> tuple[list[Entry], list[RoutedStep] | None]:
    """Read a journal; feed it to `moesim.policies.planner.decision_log.repeat`.

    Returns:
        Entries, and the routing where it is in the file.

    Raises:
        StoreError: not such a file.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
        journal = json.loads(arrays.pop(_JOURNAL).tobytes())
        facts = json.loads(arrays.pop(_STEPS).tobytes()) if _STEPS in arrays else None
        entries = [
            Entry(call, tuple(arguments), _tuples(answer))
            for call, arguments, answer in journal
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: expected the views of a run, found {type(error).__name__}:"
            f" {error}"
        ) from None
    if facts is None:
        return entries, None
    parts: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for key, values in arrays.items():
        step, layer, name = key.split("/", 2)
        parts.setdefault((int(step), int(layer)), {})[name] = values
    steps = []
    for step, phase, batch, tokens, context, sequences in facts:
        layers = [
            _routed(layer, named)
            for (of, layer), named in sorted(parts.items())
            if of == step
        ]
        steps.append(
            RoutedStep(step, Phase(phase), batch, tokens, context, sequences, layers)
        )
    return entries, steps


def _parts(layer: RoutedLayer) -> dict[str, np.ndarray]:
    named: dict[str, Any] = {
        name: getattr(layer, name)
        for name in ("experts", "tokens", "routing", "weights", "scores")
    }
    named |= {f"predicted/{name}": values for name, values in layer.predicted.items()}
    return {name: values for name, values in named.items() if values is not None}


def _routed(layer: int, named: dict[str, np.ndarray]) -> RoutedLayer:
    predicted = {
        key.removeprefix("predicted/"): named[key]
        for key in named
        if key.startswith("predicted/")
    }
    return RoutedLayer(
        layer,
        named["experts"],
        named["tokens"],
        named["routing"],
        named.get("weights"),
        named.get("scores"),
        predicted,
    )


def _text(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), np.uint8)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
