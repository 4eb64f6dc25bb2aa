"""Parsers of option values: sizes, lists, words out of a few."""

import re
from collections.abc import Callable

import typer


def size_bytes(text: str) -> int:
    """Parse ``8GiB``, ``500MB`` or ``1024``."""
    # Only commands that are given a size need the module.
    from moesim.base.sizes import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        from moesim.base.words import one_expected

        raise typer.BadParameter(f"{error}{one_expected(text, 'size')}") from None


def sizes_bytes(text: str) -> tuple[int, ...]:
    """Parse ``4GiB,8GiB``, each once."""
    return tuple(dict.fromkeys(size_bytes(part) for part in text.split(",")))


def one_of(*choices: str) -> Callable[[str], str]:
    """Make a parser that accepts these texts only."""

    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"expected {' or '.join(choices)}, got {text!r}")
        return text

    return parse


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Make a parser that accepts texts which the whole of `pattern` matches.

    Args:
        pattern: a regular expression.
        expected: what the pattern stands for, in errors.
    """

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise typer.BadParameter(f"expected {expected}, got {text!r}")
        return text

    return parse


def split_policies(text: str, option: str) -> list[str]:
    """Split the policies of an option.

    Raises:
        typer.BadParameter: no policy at all.
    """
    from moesim.policies.base import PolicyError
    from moesim.policies.parameters import split_policies as split

    try:
        return split(text)
    except PolicyError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def shares(text: str) -> tuple[float, ...]:
    """Parse ``0.125,0.25,0.5``, each once."""
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    # NaN is a number to Python, but no share.
    if not numbers or not all(0 <= share <= 1 for share in numbers):
        raise typer.BadParameter(
            f"expected shares between 0 and 1 such as 0.125,0.25,0.5, got {text!r}"
        )
    return numbers


def counts(text: str) -> tuple[int, ...]:
    """Parse ``8,16,32``, each once."""
    # `int` would take signs, spaces and underscores too.
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise typer.BadParameter(
            f"expected whole numbers such as 8,16,32, got {text!r}"
        )
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Parse ``a,b``, each once."""
    parts = (part.strip() for part in text.split(","))
    unique = tuple(dict.fromkeys(filter(None, parts)))
    if not unique:
        raise typer.BadParameter(f"expected names separated by commas, got {text!r}")
    return unique


def numbers(text: str) -> list[float]:
    """Parse ``0.1,0.3,0.6`` as it stands."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers separated by commas, got {text!r}"
        ) from None
