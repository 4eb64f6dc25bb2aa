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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.base.inputs import load_json, open_input, read_text
from moesim.traces.importers.readers.arrays import (
    NPY,
    integers,
    kind_of,
    read_arrays,
)
from moesim.traces.importers.readers.foreign import (
    DECODING_ERRORS,
    Foreign,
    decoding,
    head,
    layout_error,
    prompt_length,
)
from moesim.traces.importers.readers.sequence_rows import dense_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moesim.base.errors import TraceError
    from moesim.traces.format.schema import ModelShape

    Block = dict[str, np.ndarray]

OPTIONS = {
    "prompt_tokens": (
        "how many of the first tokens of an array without a prompt of its own are"
        " prompt"
    )
}
_PROMPT = "prompt_routed_experts"
_GENERATED = "routed_experts"
_PREFIX_CACHE = (
    "older builds leave out tokens that the prefix cache serves: record with"
    " --no-enable-prefix-caching, or with a build that returns them"
)


class _Completion(NamedTuple):
    """One completion of a request. P prompt tokens, G generated tokens.

    Attributes:
        prompt: ids [P, L, K]; None where the prompt is not told apart.
        generated: ids [G, L, K]; None where nothing was generated.
        model: its name, where the response has it.
    """

    prompt: np.ndarray | None
    generated: np.ndarray | None
    model: str = ""


def recognises(path: Path) -> bool:
    """Whether this is an integer npy with three dimensions, or npz or JSON with the key
    ``routed_experts``.
    """
    kind = kind_of(path)
    if kind == "npy":
        try:
            array = np.load(path, mmap_mode="r")
        except DECODING_ERRORS:
            return True  # an array that is cut off: reading it says so
        return array.ndim == 3 and array.dtype.kind in "iu"

    start = head(path, 1 << 20)
    if kind == "npz":
        return _GENERATED.encode() in start

    is_json = start.lstrip()[:1] in (b"{", b"[")
    if is_json and f'"{_GENERATED}"'.encode() in start:
        return True
    return f'"{_PROMPT}"'.encode() in start


def read(path: Path, _: ModelShape, **given: str) -> Foreign:
    """The file's completions, and the model where a response names it."""
    stated = prompt_length(path, given)
    models = [each.model for each in _completions(path) if each.model]
    facts = {"model": models[-1]} if models else {}
    return Foreign(lambda: _sequences(path, stated), facts=facts)


def _sequences(path: Path, stated: int | None) -> Iterator[Block]:
    """The rows of all completions; the first `stated` tokens of those without a prompt
    of their own are prompt.
    """
    for number, completion in enumerate(_completions(path)):
        prompt, generated, _ = completion
        split = stated if prompt is None else len(prompt)
        arrays = [ids for ids in (prompt, generated) if ids is not None and len(ids)]
        place = f"completion {number}"
        shapes = {each.shape[1:] for each in arrays}
        if len(shapes) > 1:
            raise layout_error(path, place, "one [layers, K] for all tokens", shapes)
        if arrays:
            ids = np.concatenate(arrays)
            yield dense_block(number, _computed(path, place, ids, split or 0), split)


def _computed(path: Path, place: str, ids: np.ndarray, prompt: int) -> np.ndarray:
    """The tokens of a completion [T, L, K] that were computed: all but the last one
    perhaps.
    """
    ids = integers(path, place, ids, 3)
    # K equal ids are no choice: such a row was filled, not computed.
    unrouted = _unrouted(ids)
    if unrouted[-1] and len(ids) > prompt:
        ids = ids[:-1]
        unrouted = unrouted[:-1]
    if unrouted.any() and ids.shape[2] > 1:
        token = int(unrouted.argmax())
        raise layout_error(
            path,
            f"{place}: token {token}",
            "distinct experts",
            f"{ids[token, 0, 0]} at every layer",
            _PREFIX_CACHE,
        )
    return ids


def _unrouted(ids: np.ndarray) -> np.ndarray:
    """Bool [T]: tokens that have one id everywhere, in ids [T, L, K]."""
    if ids.shape[2] < 2:
        # One id is always one. Rows are filled with 0, and only the last may be.
        filled = np.zeros(len(ids), bool)
        filled[-1:] = ids.shape[1] > 1 and not ids[-1:].any()
        return filled

    same: np.ndarray = (ids == ids[:, :, :1]).all(axis=(1, 2))
    return same


def _completions(path: Path) -> Iterator[_Completion]:
    """Every completion of the file."""
    if kind_of(path) in ("npy", "npz"):
        yield from _of_arrays(path)
        return

    lacking = ""
    has_prompts = False
    for index, response in enumerate(_responses(path)):
        where = f"response {index}"
        with decoding(path, where):
            for completion in _of_response(path, where, response):
                has_prompts |= completion.prompt is not None
                lacking = lacking or ("" if completion.prompt is not None else where)
                if lacking and has_prompts:
                    raise _lacks_prompt(path, lacking, _PROMPT)
                yield completion


def _of_arrays(path: Path) -> Iterator[_Completion]:
    """Completions of named arrays; a prompt without a prefix belongs to all of them."""
    arrays = read_arrays(path)
    if kind_of(path) == "npz":
        arrays = {
            name: ids for name, ids in arrays.items() if name.endswith(_GENERATED)
        }

    for name, ids in arrays.items():
        is_routing = ids.ndim == 3 and ids.dtype.kind in "iu"
        if not is_routing or 0 in ids.shape[1:]:
            actual = f"{ids.dtype} {list(ids.shape)}"
            expected = "integers with 3 dimensions"
            raise layout_error(path, name or "array", expected, actual)

    # Names may have prefixes, such as a request number.
    prompts = [name for name in arrays if name.endswith(_PROMPT)]

    for name, ids in arrays.items():
        if name in prompts:
            continue
        own_prompt = name.removesuffix(_GENERATED) + _PROMPT
        prompt = arrays.get(own_prompt, arrays.get(_PROMPT))
        if prompt is None and prompts:
            raise _lacks_prompt(path, name, own_prompt)
        yield _Completion(prompt, ids)

    if len(prompts) == len(arrays):
        for name in prompts:
            yield _Completion(arrays[name], None)


def _lacks_prompt(path: Path, place: str, expected: str) -> TraceError:
    return layout_error(
        path,
        place,
        f"{expected}, for others have theirs",
        "none",
        "its positions are unknown: save the prompt's array too, or leave it out",
    )


def _responses(path: Path) -> Iterator[Any]:
    """The responses of a server: one in all, a list of them, or one per line."""
    with decoding(path, "JSON"), open_input(path) as file:
        try:
            first = load_json(next(line for line in file if line.strip()))
        except (ValueError, StopIteration):
            # No line is a value by itself: the text is one over many lines.
            first = load_json(read_text(path))

        if isinstance(first, list):
            yield from first
        else:
            yield first

        for line in file:
            if line.strip():
                yield load_json(line)


def _of_response(
    path: Path, where: str, response: dict[str, Any]
) -> Iterator[_Completion]:
    """The completions of one response: its choices, or itself."""
    common = _ids(path, f"{where}: {_PROMPT}", response.get(_PROMPT))

    for index, choice in enumerate(response.get("choices") or [response]):
        place = f"{where}: choice {index}"
        generated = _ids(path, f"{place}: {_GENERATED}", choice.get(_GENERATED))
        prompt = common
        if prompt is None:
            prompt = _ids(path, f"{place}: {_PROMPT}", choice.get(_PROMPT))

        if generated is None and prompt is None:
            way_out = "serve with --enable-return-routed-experts"
            expected = f"{_GENERATED} or {_PROMPT}"
            raise layout_error(path, place, expected, "neither", way_out)

        if prompt is None and generated is not None:
            prompt, generated = _split(response, choice, generated)
        yield _Completion(
            prompt,
            generated,
            str(response.get("model", "")),
        )


def _split(
    response: dict[str, Any], choice: dict[str, Any], ids: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray]:
    """Prompt and generated tokens of one array, where the numbers of token ids say how
    many are which; otherwise no prompt.
    """
    prompt_ids = response.get("prompt_token_ids")
    generated_ids = choice.get("token_ids")
    if not prompt_ids or not generated_ids:
        return None, ids

    # The last generated token is not computed, so it may or may not have a row.
    tokens = len(prompt_ids) + len(generated_ids)
    if len(ids) not in (tokens - 1, tokens):
        return None, ids
    return ids[: len(prompt_ids)], ids[len(prompt_ids) :]


def _ids(path: Path, place: str, value: Any) -> np.ndarray | None:
    """An array of nested lists, or of a base64 npy; None for null."""
    if value is None:
        return None

    if isinstance(value, str):
        data = base64.b64decode(value, validate=True)
        if not data.startswith(NPY):
            raise layout_error(
                path,
                place,
                "nested lists or a base64 npy",
                "other base64 bytes",
                "save the array with numpy.save",
            )
        return integers(path, place, np.load(io.BytesIO(data)), 3)

    if value == []:
        return np.empty((0, 1, 1), np.int32)
    return integers(path, place, np.array(value), 3)
