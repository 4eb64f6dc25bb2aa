"""Options of importers, and notes that several of them leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.base.errors import TraceError

if TYPE_CHECKING:
    from pathlib import Path

# Said in the same words by every importer.
NO_WEIGHTS = "no combine weights in the source"
NO_PHASES = "the source does not tell prompt from generated tokens"
PROMPT_TOKENS = "how many of the first tokens of every sequence are prompt"
PROMPT_TOKENS_NOTE = (
    f"{NO_PHASES}: all are taken as generated; --prompt-tokens N says more"
)


_FLAGS = ("map", "prompt_tokens", "batch")


def spelled(name: str) -> str:
    """Return how the command line calls an option of an importer."""
    return f"--{name.replace('_', '-')}" if name in _FLAGS else f"--option {name}"


def whole_number(
    path: Path,
    name: str,
    value: object,
    least: int = 1,
) -> int:
    """Return an option such as ``prompt_tokens=28`` as a number.

    Raises:
        TraceError: not a whole number, or below `least`.
    """
    text = str(value).strip()
    if not text.isdecimal() or int(text) < least:
        raise TraceError(
            f"{path}: {spelled(name)}: expected a whole number >= {least}, got {text!r}"
        )

    return int(text)


def prompt_length(
    path: Path,
    prompt_tokens: str,
) -> int | None:
    """Return the option ``prompt_tokens`` as a number; None where it is not given."""
    if not prompt_tokens:
        return None

    return whole_number(
        path,
        "prompt_tokens",
        prompt_tokens,
        least=0,
    )
