"""Finds a device of a table in free text such as ``2x NVIDIA GeForce RTX 3090 (ROCm)``.

Both sides are cut into words without maker names. A table entry matches when its words
stand in the text one after another; of several matches the longest wins, so that
``RTX 5060 Ti`` is not read as ``RTX 5060``.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Entry = TypeVar("Entry")

# Makers and decorations, which people write or leave out as they like.
FILLERS = {
    "amd",
    "apple",
    "core",
    "cpu",
    "desktop",
    "founders",
    "edition",
    "geforce",
    "gpu",
    "graphics",
    "intel",
    "nvidia",
    "processor",
    "radeon",
    "r",
    "rtx",
    "rx",
    "gtx",
    "tm",
}

# Units that belong to the number before them: "16 GB" and "16GB" are the same word.
_GLUED = re.compile(r"(\d+)\s*(gb|gib|g)\b")
_COUNT = re.compile(
    # Four digits are a card's number: "2x3090".
    r"(?:^|\s)(\d{1,2})\s*[x\u00d7*]\s*(?=\D|\d{4}\b)",
    re.IGNORECASE,
)

# People and profiles write a card's maker and number as one word: "rtx4060ti".
_JOINED = re.compile(r"\b(rtx|gtx|rx)(?=\d)|(?<=\d)(?=(?:ti|super|xtx?|gre)\b)")
_COUNT_BEHIND = re.compile(r"\s[x\u00d7]\s?(\d)\b(?!\s*G)", re.IGNORECASE)


def words_of(text: str) -> tuple[str, ...]:
    """Cut a device name into lower-case words without maker names."""
    # "AI Max+" and "AI Max" are two chips, so the sign is a word.
    lowered = _GLUED.sub(r"\1gb", text.lower().replace("+", " plus "))
    lowered = _JOINED.sub(r"\1 ", _COUNT.sub(" ", lowered))
    words = re.findall(r"[a-z0-9]+", lowered)
    return tuple(word for word in words if word not in FILLERS)


def count_in(text: str) -> int:
    """Read how many devices a text names: 2 in ``2x RTX 3090``; 1 by default."""
    if re.match(r"\s*dual\b", text, re.IGNORECASE):
        # Written-out numbers are rare; this one is common.
        return 2

    match = _COUNT.search(text) or _COUNT_BEHIND.search(text)
    return int(match.group(1)) if match else 1


def find(text: str, table: Mapping[str, Entry]) -> Entry | None:
    """Return the entry whose name stands in `text`; the longest name of several.

    Args:
        text: as a person or a tool wrote it.
        table: name -> entry; several names may lead to one entry.
    """
    present = words_of(text)
    best: Entry | None = None
    best_length = (0, 0)

    for name, entry in table.items():
        words = words_of(name)
        length = (len(words), len(name))
        if words and length > best_length and _stands_in(words, present):
            best = entry
            best_length = length
    return best


def _stands_in(words: tuple[str, ...], present: tuple[str, ...]) -> bool:
    # Words must follow each other, or "5060" and a stray "Ti" would match.
    starts = range(len(present) - len(words) + 1)
    return any(present[start : start + len(words)] == words for start in starts)


def closest(text: str, names: Iterable[str]) -> str:
    """Return ``(did you mean 'X'?)`` for the most similar name, or nothing."""
    by_words = {" ".join(words_of(name)): name for name in names}
    similar = difflib.get_close_matches(" ".join(words_of(text)), by_words, n=1)
    return f" (did you mean {by_words[similar[0]]!r}?)" if similar else ""
