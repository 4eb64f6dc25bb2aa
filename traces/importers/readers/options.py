"""Options of importers, and notes that several of them leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.traces.errors import TraceError

if TYPE_CHECKING:
    from pathlib import Path

# Said in the same words by every importer.
NO_WEIGHTS = "no combine weights in the source"
NO_PHASES = "the source does not tell prompt from generated tokens"
PROMPT_TOKENS = "how many of the first tokens of every sequence are prompt"
PROMPT_TOKENS_NOTE = (
    f"{NO_PHASES}: all are taken as generated; option prompt_tokens=N says more"
)


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
            f"{path}: option {name}: expected a whole number >= {least}, got {text!r}"
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
