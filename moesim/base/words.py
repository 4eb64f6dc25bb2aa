"""What is said of a word that nobody knows: the nearest one first, then the others."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_LISTED = 10


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``: the closest word and all others that begin so; nothing
    if none is close.
    """
    names = list(known)
    closest = difflib.get_close_matches(word, names, n=1)
    family = [name for name in names if word and name.startswith(word)]
    meant = list(dict.fromkeys([*closest, *family]))
    if not meant:
        return ""
    # One letter begins many words, and a line of errors is short.
    more = len(meant) - _MOST_LISTED
    words = [repr(name) for name in meant[:_MOST_LISTED]]
    if more > 0:
        words.append(f"{more} more")
    *first, last = words
    return f" (did you mean {', '.join(first)}{' or ' if first else ''}{last}?)"


def unknown(kind: str, word: str, known: Iterable[str], listing: str = "") -> str:
    """The line about an unknown word.

    Args:
        kind: of thing that it should have named.
        word: that nobody knows.
        known: words that it could have been.
        listing: words of ``moesim list`` that print them all, where they are many.
    """
    names = list(known)
    everything = f"known: {', '.join(names) or 'none'}"
    if listing and len(names) > _MOST_LISTED:
        everything = f"`moesim list {listing}` prints all"
    return f"unknown {kind} {word!r}{did_you_mean(word, names)}; {everything}"


def one_expected(text: str, noun: str) -> str:
    """Where to go with ``a,b`` where one thing is expected; nothing for other texts."""
    if "," not in text:
        return ""
    return f"; one {noun} is expected here, `moesim compare` and `sweep` take several"
