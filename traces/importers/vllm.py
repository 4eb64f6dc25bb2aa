"""vLLM `routed_experts`: one npy array, an npz, or the JSON of its server (one
response, or one per line).

``prompt_routed_experts`` is [prompt tokens, MoE layers, K] per response,
``routed_experts`` [generated tokens, MoE layers, K] per completion; in JSON as nested
lists or as a base64 npy. The last generated token is never computed: an array that has
a row for it fills it with one id.
"""

from __future__ import annotations

import base64
import io
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from moesim.traces.format.sorting import BATCH_ROWS
from moesim.traces.importers.readers.array_stream import in_memory, streams
from moesim.traces.importers.readers.foreign import (
    DAMAGE,
    NO_PHASES,
    NO_WEIGHTS,
    bad,
    decoding,
    dense_block,
    head,
    whole_number,
)
from moesim.traces.importers.readers.tensors import (
    NPY,
    array,
    integers,
    kind_of,
    npy_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.importers.readers.array_stream import Stream

    Block = dict[str, np.ndarray]

OPTIONS = {
    "prompt_tokens": (
        "how many of the first tokens of an array without a prompt of its own are"
        " prompt"
    )
}
_PROMPT = "prompt_routed_experts"
_GENERATED = "routed_experts"
_HOLE = (
    "tokens served from the prefix cache are not routed again: record with"
    " --no-enable-prefix-caching"
)


def recognises(path: Path) -> bool:
    """Whether this is an integer npy with three dimensions, or npz or JSON with the key
    ``routed_experts``.
    """
    kind = kind_of(path)
    if kind == "npy":
        try:
            with path.open("rb") as file:
                shape, _, dtype = npy_header(file)
        except DAMAGE:
            return True  # an array that is cut off: say so
        return len(shape) == 3 and dtype.kind in "iu"
    if kind == "npz":
        return _GENERATED.encode() in head(path, 1 << 20)
    start = head(path, 1 << 20).lstrip()
    return (
        start[:1] in (b"{", b"[") and f'"{_GENERATED}"'.encode() in start
    ) or f'"{_PROMPT}"'.encode() in start


def provenance(path: Path, *, prompt_tokens: str = "") -> dict[str, Any]:
    """Model where the response names it, and remarks."""
    notes = [NO_WEIGHTS]
    model: dict[str, str] = {}
    phases = False
    for prompt, _, told in _completions(path):
        phases |= prompt is not None
        if told:
            model = {"model": told}
    if not phases and not prompt_tokens:
        notes.append(
            f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more"
        )
    return {**model, "notes": notes}


def read(path: Path, shape: ModelShape, *, prompt_tokens: str = "") -> Iterator[Block]:
    """Completions in parts: the prompt, then what was generated."""
    del shape
    number = 0
    for prompt, generated, _ in _completions(path):
        split = prompt.shape[0] if prompt is not None else 0
        if prompt is None and prompt_tokens:
            split = whole_number(path, "prompt_tokens", prompt_tokens, 0)
        told = [one for one in (prompt, generated) if one is not None and one.shape[0]]
        first = 0
        tokens = sum(one.shape[0] for one in told)
        for part in chain.from_iterable(
            one.rows(max(1, BATCH_ROWS // max(1, one.shape[1]))) for one in told
        ):
            ids = integers(path, f"completion {number}", part, 3)
            same = (
                (ids == ids[:, :, :1]).all(axis=(1, 2))
                if ids.shape[2] > 1
                else np.zeros(len(ids), bool)
            )
            if first + len(ids) == tokens and same[-1] and tokens > split:
                ids = ids[:-1]
                same = same[:-1]
            if same.any():
                place = f"completion {number}: token {first + int(same.argmax())}"
                raise bad(
                    path,
                    place,
                    "distinct experts",
                    f"{ids[same.argmax(), 0, 0]} at every layer",
                    _HOLE,
                )
            if len(ids):
                yield dense_block(number, ids, max(0, split - first), first)
            first += len(ids)
        number += first > 0


def _completions(path: Path) -> Iterator[tuple[Stream | None, Stream, str]]:
    """(prompt or None, generated, model) of every completion."""
    kind = kind_of(path)
    if kind in ("npy", "npz"):
        found = streams(path)
        if kind == "npz":
            found = {
                name: values
                for name, values in found.items()
                if name.endswith(_GENERATED)
            }
        for name, values in found.items():
            if (
                len(values.shape) != 3
                or values.dtype.kind not in "iu"
                or 0 in values.shape[1:]
            ):
                told = f"{values.dtype} {list(values.shape)}"
                raise bad(path, name or "array", "integers with 3 dimensions", told)
        prompts = [name for name in found if name.endswith(_PROMPT)]
        for name, values in found.items():
            if not name.endswith(_PROMPT):
                prompt = found.get(
                    name.removesuffix(_GENERATED) + _PROMPT,
                    found[prompts[0]] if prompts else None,
                )
                yield _checked(path, name, prompt, values), values, ""
        if len(prompts) == len(found):
            for name in prompts:
                yield (
                    found[name],
                    in_memory(np.empty((0, *found[name].shape[1:]), np.int32)),
                    "",
                )
        return
    for index, response in enumerate(_responses(path)):
        with decoding(path, f"response {index}"):
            yield from _of_response(path, f"response {index}", response)


def _responses(path: Path) -> Iterator[Any]:
    """One in all, a list of them, or one per line."""
    with decoding(path, "JSON"), path.open(encoding="utf-8") as file:
        try:
            first = json.loads(next(line for line in file if line.strip()))
        except (ValueError, StopIteration):
            file.seek(0)
            first = json.load(file)
        if isinstance(first, list):
            yield from first
        else:
            yield first
        for line in file:
            if line.strip():
                yield json.loads(line)


def _of_response(
    path: Path, where: str, response: dict[str, Any]
) -> Iterator[tuple[Stream | None, Stream, str]]:
    common = _ids(path, f"{where}: {_PROMPT}", response.get(_PROMPT))
    choices = response.get("choices") or [response]
    for index, choice in enumerate(choices):
        place = f"{where}: choice {index}"
        generated = _ids(path, f"{place}: {_GENERATED}", choice.get(_GENERATED))
        prompt = (
            common
            if common is not None
            else _ids(path, f"{place}: {_PROMPT}", choice.get(_PROMPT))
        )
        if generated is None and prompt is None:
            way_out = "serve with --enable-return-routed-experts"
            raise bad(path, place, f"{_GENERATED} or {_PROMPT}", "neither", way_out)
        if generated is None:
            assert prompt is not None
            generated = prompt[:0]
        asked = response.get("prompt_token_ids")
        told = choice.get("token_ids")
        if (
            prompt is None
            and asked
            and told
            and len(generated) in (len(asked) + len(told) - 1, len(asked) + len(told))
        ):
            prompt = generated[: len(asked)]
            generated = generated[len(asked) :]
        whole = None if prompt is None else in_memory(prompt)
        yield (
            _checked(path, place, whole, in_memory(generated)),
            in_memory(generated),
            str(response.get("model", "")),
        )


def _checked(
    path: Path, place: str, prompt: Stream | None, generated: Stream
) -> Stream | None:
    if (
        prompt is not None
        and generated.shape[0]
        and prompt.shape[1:] != generated.shape[1:]
    ):
        raise bad(
            path,
            place,
            f"[tokens, {prompt.shape[1]}, {prompt.shape[2]}] as in the prompt",
            list(generated.shape),
        )
    return prompt


def _ids(path: Path, place: str, value: Any) -> np.ndarray | None:
    """An array of nested lists, or of a base64 npy; None for null."""
    if value is None:
        return None
    if isinstance(value, str):
        data = base64.b64decode(value, validate=True)
        if not data.startswith(NPY):
            raise bad(
                path,
                place,
                "nested lists or a base64 npy",
                "other base64 bytes",
                "save the array with numpy.save",
            )
        return integers(path, place, array(path, place, io.BytesIO(data), len(data)), 3)
    if value == []:
        return np.empty((0, 1, 1), np.int32)
    return integers(path, place, np.array(value), 3)
