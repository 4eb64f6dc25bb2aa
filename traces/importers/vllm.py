"""vLLM `routed_experts`: one npy array, an npz, or the JSON of its server (one response, or one per line).

``prompt_routed_experts`` is [prompt tokens, MoE layers, K] per response, ``routed_experts`` [generated tokens, MoE
layers, K] per completion; in JSON as nested lists or as a base64 npy. The last generated token is never computed: an
array that has a row for it fills it with one id.
"""

from __future__ import annotations

import base64
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.foreign import DAMAGE, NO_PHASES, bad, decoding, dense_block, head, whole_number
from traces.tensors import NPY, array, integers, kind_of, load_named, npy_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.schema import ModelShape

    Block = dict[str, np.ndarray]

OPTIONS = {"prompt_tokens": "how many of the first tokens of an array without a prompt of its own are prompt"}
_PROMPT, _GENERATED = "prompt_routed_experts", "routed_experts"
_HOLE = "tokens served from the prefix cache are not routed again: record with --no-enable-prefix-caching"


def recognises(path: Path) -> bool:
    """Whether this is an integer npy with three dimensions, or npz or JSON with the key ``routed_experts``."""
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
    return (start[:1] in (b"{", b"[") and f'"{_GENERATED}"'.encode() in start) or f'"{_PROMPT}"'.encode() in start


def provenance(path: Path, *, prompt_tokens: str = "") -> dict[str, Any]:
    """Model where the response names it, and remarks."""
    notes = ["no combine weights in the source"]
    model: dict[str, str] = {}
    phases = False
    for prompt, _, told in _completions(path):
        phases |= prompt is not None
        if told:
            model = {"model": told}
    if not phases and not prompt_tokens:
        notes.append(f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more")
    return {**model, "notes": notes}


def read(path: Path, shape: ModelShape, *, prompt_tokens: str = "") -> Iterator[Block]:
    """One block per completion: its prompt, then what it generated."""
    del shape
    number = 0
    for prompt, generated, _ in _completions(path):
        whole = generated if prompt is None else np.concatenate((prompt, generated)) if generated.size else prompt
        if not len(whole):
            continue
        split = len(prompt) if prompt is not None else 0
        if prompt is None and prompt_tokens:
            split = whole_number(path, "prompt_tokens", prompt_tokens, 0)
        same = (whole == whole[:, :, :1]).all(axis=(1, 2)) if whole.shape[2] > 1 else np.zeros(len(whole), bool)
        if same[-1] and len(whole) > split:
            whole, same = whole[:-1], same[:-1]
        if same.any():
            token = int(same.argmax())
            raise bad(
                path,
                f"completion {number}: token {token}",
                "distinct experts",
                f"{whole[token, 0, 0]} at every layer",
                _HOLE,
            )
        if len(whole):
            yield dense_block(number, whole, min(split, len(whole)))
            number += 1


def _completions(path: Path) -> Iterator[tuple[np.ndarray | None, np.ndarray, str]]:
    """(prompt or None, generated, model) of every completion."""
    kind = kind_of(path)
    if kind in ("npy", "npz"):
        found = load_named(path)
        if kind == "npz":
            found = {name: values for name, values in found.items() if name.endswith(_GENERATED)}
        prompts = [name for name in found if name.endswith(_PROMPT)]
        arrays = {name: integers(path, name or "array", values, 3) for name, values in found.items()}
        for name, values in arrays.items():
            if not name.endswith(_PROMPT):
                prompt = arrays.get(name.removesuffix(_GENERATED) + _PROMPT, arrays[prompts[0]] if prompts else None)
                yield _checked(path, name, prompt, values), values, ""
        if len(prompts) == len(arrays):
            for name in prompts:
                yield arrays[name], arrays[name][:0], ""
        return
    with decoding(path, "JSON"):
        text = path.read_text(encoding="utf-8")
        try:
            responses = [json.loads(text)]
        except ValueError:
            responses = [json.loads(line) for line in text.splitlines() if line.strip()]
        if len(responses) == 1 and isinstance(responses[0], list):
            responses = responses[0]
        for index, response in enumerate(responses):
            yield from _of_response(path, f"response {index}", response)


def _of_response(
    path: Path, where: str, response: dict[str, Any]
) -> Iterator[tuple[np.ndarray | None, np.ndarray, str]]:
    common = _ids(path, f"{where}: {_PROMPT}", response.get(_PROMPT))
    choices = response.get("choices") or [response]
    for index, choice in enumerate(choices):
        place = f"{where}: choice {index}"
        generated = _ids(path, f"{place}: {_GENERATED}", choice.get(_GENERATED))
        prompt = common if common is not None else _ids(path, f"{place}: {_PROMPT}", choice.get(_PROMPT))
        if generated is None and prompt is None:
            way_out = "serve with --enable-return-routed-experts"
            raise bad(path, place, f"{_GENERATED} or {_PROMPT}", "neither", way_out)
        if generated is None:
            assert prompt is not None
            generated = prompt[:0]
        asked = response.get("prompt_token_ids")
        told = choice.get("token_ids")
        if prompt is None and asked and told and len(generated) in (len(asked) + len(told) - 1, len(asked) + len(told)):
            prompt, generated = generated[: len(asked)], generated[len(asked) :]
        yield _checked(path, place, prompt, generated), generated, str(response.get("model", ""))


def _checked(path: Path, place: str, prompt: np.ndarray | None, generated: np.ndarray) -> np.ndarray | None:
    if prompt is not None and generated.size and prompt.shape[1:] != generated.shape[1:]:
        raise bad(
            path, place, f"[tokens, {prompt.shape[1]}, {prompt.shape[2]}] as in the prompt", list(generated.shape)
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
                path, place, "nested lists or a base64 npy", "other base64 bytes", "save the array with numpy.save"
            )
        return integers(path, place, array(path, place, io.BytesIO(data), len(data)), 3)
    if value == []:
        return np.empty((0, 1, 1), np.int32)
    return integers(path, place, np.array(value), 3)
