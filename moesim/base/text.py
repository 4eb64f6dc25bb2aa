"""One door to the screen: text that came from a file, shown so that it can do nothing.

A trace or a profile may carry names with escape sequences, line ends and signs that
turn the direction of writing. Printed raw they could set the terminal's title, clear
the screen, or forge a line such as ``error: …``.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST_LINE: Final = 400
"""Letters of an error's line; what is longer loses its middle."""

# C0, DEL, C1, marks of direction, separators of lines, halves of surrogate pairs.
_CONTROLS: Final = (
    "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
)
_CONTROL: Final = re.compile(f"[{_CONTROLS}]")
_NO_LINES: Final = re.compile(f"(?![\n\t])[{_CONTROLS}]")
# Lines end and tables have tabs; bold is what our own tables and help pages are set in.
_NO_TEXT: Final = re.compile(
    r"(\x1b\[(?:[0-9;]{0,8})m)|"
    + f"[{_CONTROLS}]".replace("\x00-\x1f", r"\x00-\x08\x0b-\x1f")
)
_STYLES: Final = re.compile(r"\x1b\[(?:0|1|2|3|4|7|22|3[0-7]|9[0-7]|1;3[0-7])?m")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def visible(text: str) -> str:
    r"""Return text with every control character as its escape: ``\x1b``, ``\n``."""
    return _CONTROL.sub(_escaped, text)


def visible_lines(text: str) -> str:
    """As `visible`, but lines still end and tabs remain."""
    return _NO_LINES.sub(_escaped, text)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Return a message as one visible line, without its middle where it is long."""
    line = visible(" ".join(text.split()))
    if len(line) <= longest:
        return line
    # What was expected and what to do often stand at the end.
    end = longest // 3
    return f"{line[: longest - end - 5]} ... {line[-end:]}"


def cell(text: str) -> str:
    """Return the text of a CSV cell, which no spreadsheet takes for a formula."""
    shown = visible(text)
    return f"'{shown}" if text.startswith(_FORMULA) and not _is_number(text) else shown


class VisibleStream(io.TextIOWrapper):
    """Standard output or error: whatever is printed, control characters are visible.

    Line ends, tabs and the colours of our own tables pass.

    Args:
        stream: to be replaced; it is detached.
        is_lossy: whether what cannot be written, as on a full disk, is left unsaid.
    """

    def __init__(self, stream: io.TextIOWrapper, *, is_lossy: bool = False) -> None:
        self._is_lossy = is_lossy
        encoding = stream.encoding
        is_buffered = stream.line_buffering
        stream.flush()
        super().__init__(
            stream.detach(),
            encoding=encoding,
            errors="replace",
            line_buffering=is_buffered,
        )

    def write(self, text: str) -> int:
        """Write text, made visible."""
        try:
            super().write(_NO_TEXT.sub(_unless_style, text))
        except OSError:
            self._give_up()
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            super().flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Write nowhere from now on, where that is allowed; call it in a handler.

        Raises:
            OSError: it is not.
        """
        if not self._is_lossy:
            raise  # noqa: PLE0704 - the error that is being handled
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _unless_style(match: re.Match[str]) -> str:
    return match[0] if _STYLES.fullmatch(match[0]) else _CONTROL.sub(_escaped, match[0])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- words that nobody knows -----------------------------------------------------------


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
        listing: command of moesim that prints them all, where they are many.
    """
    names = list(known)
    everything = f"known: {', '.join(names) or 'none'}"
    if listing and len(names) > _MOST_LISTED:
        everything = f"`moesim {listing}` prints all"
    return f"unknown {kind} {word!r}{did_you_mean(word, names)}; {everything}"


def one_expected(text: str, noun: str) -> str:
    """Where to go with ``a,b`` where one thing is expected; nothing for other texts."""
    if "," not in text:
        return ""
    several = "`moesim sweep` takes several, `compare` several policies"
    return f"; one {noun} is expected here; {several}"
