"""The text corpus: the sources of Python's standard library, read as bytes.

Routing is learned from text, so anything that trains, calibrates or measures needs
some, and a machine without a network still has this one. Files belong to one of three
parts: *training* for models that we train ourselves, *calibration* for whatever a
policy may learn beforehand, *evaluation* for the numbers we report. The part of a file
follows from its name alone, so the parts never mix, whichever Python or machine splits
them.

Left out: installed packages; test suites (many distributions drop them); files
generated for one build; and `encodings` and `pydoc_data`, which are tables rather than
writing. A Python version changes the text, hence `digest`: results name the corpus they
were made from.
"""

import hashlib
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

Part = Literal["calibration", "training", "evaluation"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)

# Of 100 equal shares of the hash space: the first ten calibrate, the next ten evaluate,
# the rest train.
_CALIBRATION_SHARES: Final = 10
_EVALUATION_SHARES: Final = 10
_SHARES: Final = 100

_SKIPPED_FOLDERS: Final = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
    }
)
# Written by the build of Python, and full of its paths.
_SKIPPED_PREFIX: Final = "_sysconfigdata"


def root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def split_of(relative_path: str) -> Part:
    """Return the part that a file belongs to.

    Only the name decides, through SHA-256 rather than Python's salted `hash`, so that a
    file stays in its part from one run, version and machine to the next.

    Args:
        relative_path: path below the library's root, with forward slashes, e.g.
            `json/decoder.py`.
    """
    digest = hashlib.sha256(relative_path.encode()).digest()
    share = int.from_bytes(digest[:8], "big") % _SHARES
    if share < _CALIBRATION_SHARES:
        return "calibration"
    if share < _CALIBRATION_SHARES + _EVALUATION_SHARES:
        return "evaluation"
    return "training"


@cache
def files(part: Part) -> tuple[str, ...]:
    """List the files of a part as relative paths with forward slashes, in ascending
    order.

    Raises:
        ValueError: `part` is not one of `PARTS`.
        FileNotFoundError: this Python came without the sources of its library.
    """
    if part not in PARTS:
        raise ValueError(f"unknown corpus part {part!r}; known: {', '.join(PARTS)}")

    base = root()
    names = (path.relative_to(base) for path in base.rglob("*.py"))
    # Sorted, because file systems list in an order of their own.
    kept = sorted(
        name.as_posix()
        for name in names
        if _SKIPPED_FOLDERS.isdisjoint(name.parts)
        and not name.name.startswith(_SKIPPED_PREFIX)
    )
    chosen = tuple(name for name in kept if split_of(name) == part)
    if not chosen:
        raise FileNotFoundError(
            f"{base}: expected the standard library's .py files, found {len(kept)} of"
            f" them and none for {part!r}; use a Python that ships its sources"
        )
    return chosen


def load_bytes(part: Part, limit_bytes: int | None = None) -> bytes:
    """Read a part as one string of bytes, file after file in the order of `files`.

    Args:
        part: which part.
        limit_bytes: stop after so many bytes; all of them when None.

    Raises:
        ValueError: `limit_bytes` is negative, or `part` is unknown.
    """
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"limit_bytes: expected >= 0, got {limit_bytes}")

    base = root()
    pieces: list[bytes] = []
    size_bytes = 0
    for name in files(part):
        if limit_bytes is not None and size_bytes >= limit_bytes:
            break
        piece = (base / name).read_bytes()
        pieces.append(piece)
        size_bytes += len(piece)
    return b"".join(pieces)[:limit_bytes]


def prompts(part: Part, count: int, length_bytes: int, seed: int) -> list[bytes]:
    """Draw prompts: excerpts that begin at the start of a line and stay inside one
    file.

    Files are drawn without repetition while they last, so that a few prompts are a few
    different texts; files shorter than a prompt are passed over.

    Args:
        part: which part.
        count: how many prompts, >= 0.
        length_bytes: length of each, >= 1.
        seed: the same seed draws the same prompts from the same corpus.

    Raises:
        ValueError: `count` or `length_bytes` is out of range, or no file of the part is
            long enough.
    """
    if count < 0 or length_bytes < 1:
        raise ValueError(
            f"expected count >= 0 and length_bytes >= 1, got {count} and {length_bytes}"
        )

    base = root()
    texts = [(base / name).read_bytes() for name in files(part)]
    texts = [text for text in texts if len(text) >= length_bytes]
    if not texts:
        raise ValueError(
            f"length_bytes: no file of {part!r} has {length_bytes} bytes; ask for"
            " shorter prompts"
        )

    # Shuffle and excerpts share one generator: fewer prompts are the first of more.
    rng = random.Random(seed)  # noqa: S311 - excerpts, not secrets
    excerpts: list[bytes] = []
    while len(excerpts) < count:
        rng.shuffle(texts)
        round_texts = texts[: count - len(excerpts)]
        excerpts.extend(_excerpt(text, length_bytes, rng) for text in round_texts)
    return excerpts


def digest(part: Part) -> str:
    """Name the exact text of a part: SHA-256 over the path, size and bytes of every
    file, in hexadecimal.
    """
    base = root()
    total = hashlib.sha256()
    for name in files(part):
        piece = (base / name).read_bytes()
        # With its size, so that bytes cannot move from one file to the next unseen.
        total.update(f"{name}\0{len(piece)}\0".encode())
        total.update(piece)
    return total.hexdigest()


def _excerpt(text: bytes, length_bytes: int, rng: random.Random) -> bytes:
    """Cut `length_bytes` out of `text`, moved back to the start of the line where the
    draw fell.
    """
    drawn = rng.randint(0, len(text) - length_bytes)
    start = text.rfind(b"\n", 0, drawn) + 1
    return text[start : start + length_bytes]
