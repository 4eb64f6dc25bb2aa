"""Names that engines write for our columns, and options that add others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.traces.importers.readers.errors import layout_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAMES = {
    "seq": (
        "seq",
        "seq_id",
        "sequence",
        "sequence_id",
        "request",
        "request_id",
        "req_id",
        "rid",
        "problem_id",
        "prompt_id",
        "sample_id",
        "conversation_id",
    ),
    "phase": ("phase",),
    "pos": ("pos", "position", "token_idx", "token_index"),
    "layer": ("layer", "layer_idx", "layer_id"),
    "experts": ("experts", "selected_ids", "expert_ids", "ids", "topk_ids"),
    "weights": ("weights", "gate_weights", "expert_weights", "topk_weights"),
}
"""Our column -> names of it, the most explicit first."""


def named_by(path: Path, text: str, known: tuple[str, ...]) -> dict[str, str]:
    """Read the option ``map``: our column -> theirs.

    Args:
        path: the file, for errors.
        text: words ``ours=theirs``, joined by commas.
        known: our columns.

    Raises:
        TraceError: a word that is no mapping.
    """
    words: dict[str, str] = {}
    for word in filter(None, text.split(",")):
        name, equals, source = (part.strip() for part in word.partition("="))
        if not equals or not source or name not in known:
            raise layout_error(
                path,
                f"--map: {word!r}",
                f"column=theirs with {', '.join(known)}",
                name or "nothing",
                "",
            )
        words[name] = source
    return words


def layout_names(path: Path, text: str, meanings: Mapping[str, str]) -> dict[str, str]:
    """Read the option ``map`` for a layout with names of its own: its name -> theirs.

    Args:
        path: the file, for errors.
        text: words ``ours=theirs``, joined by commas.
        meanings: what may stand on the left -> the layout's name of it.

    Returns:
        All names of the layout; those that are not mapped stand for themselves.

    Raises:
        TraceError: a word that is no mapping, or two for one name.
    """
    words = named_by(path, text, tuple(meanings))
    names = {name: name for name in meanings.values()}
    # Two words may mean one column, ours and the layout's own.
    mapped: set[str] = set()
    for word, source in words.items():
        name = meanings[word]
        if name in mapped or source in [names[other] for other in mapped]:
            raise layout_error(
                path, "--map", "each column once", f"{word}={source}", ""
            )
        mapped.add(name)
        names[name] = source
    return names
