"""Examples in Markdown pages: found, marked, run.

An example is a fenced block. What may stand in one:

- ``console``: commands behind ``$``, each with the output printed below it, compared
  line by line;
- ``sh``: commands of moesim that must succeed, one per line;
- ``python``: statements; all blocks of a page share one namespace;
- ``toml``: a file, or part of one;
- ``text`` and ``diff``: shown only, and without commands.

A block that cannot run in a test has a mark in the line above it, ``<!-- not run:
REASON -->``, with one of `REASONS`.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from textwrap import dedent
from types import ModuleType
from typing import TYPE_CHECKING

import matplotlib as mpl
import pytest

from moesim import cli
from moesim.cli.output import PlainProgress

if TYPE_CHECKING:
    from pathlib import Path

REASONS = {
    "needs a GPU",
    "needs a network",
    "needs a model",
    "needs your trace",
    "needs an interruption",
    "takes minutes",
}
LANGUAGES = {"console", "sh", "python", "toml", "text", "diff"}
_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<mark>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Example:
    """One fenced block. `mark` is why it is not run, or None."""

    language: str
    text: str
    mark: str | None = None


def examples(page: str) -> list[Example]:
    """Every fenced block of a page, in order."""
    return [
        Example(match["language"], dedent(match["text"]), match["mark"])
        for match in _BLOCK.finditer(page)
    ]


def session(text: str) -> list[tuple[str, str]]:
    """Commands of a console block, each with the output that stands below it."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with `$ `"
    pairs = []
    for part in parts[1:]:
        command, _, output = part.partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command = f"{command}\n{more}"
        pairs.append((command, output))
    return pairs


def lines_of(text: str) -> list[str]:
    """Commands of an `sh` block; a backslash at the end continues a line."""
    joined = text.replace("\\\n", " ").splitlines()
    return [line for line in joined if shlex.split(line, comments=True)]


def run_command(command: str, capsys) -> str:
    """Run one command of moesim; what it prints, notes on standard error last."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    assert words[0] == "moesim", f"{command}: only moesim runs here; mark the block"
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine everything takes long enough to be told of.
        patch.setattr(PlainProgress, "EVERY_S", float("inf"))
        with pytest.raises(SystemExit) as end:
            cli.main(words[1:])
    streams = capsys.readouterr()
    code = end.value.code
    assert not code, f"{command}: exit {code}: {streams.out}{streams.err}"
    return (streams.out + streams.err).rstrip() + "\n"


class PageRun:
    """Runs the examples of one page in order, in the current folder.

    Attributes:
        page: its text, with outputs of console blocks as they are printed now.
        ran: how many blocks ran.
    """

    def __init__(self, page: str, capsys) -> None:
        self.page = page
        self.ran = 0
        self._capsys = capsys
        self._module = ModuleType("page_examples")

    def run(self) -> None:
        """Run everything that is not marked."""
        sys.modules[self._module.__name__] = self._module
        try:
            # A page may set a style; the next test has its own.
            with mpl.rc_context():
                for example in examples(self.page):
                    self._run(example)
        finally:
            del sys.modules[self._module.__name__]

    def _run(self, example: Example) -> None:
        if example.mark is not None or example.language in {"text", "diff"}:
            return
        self.ran += 1
        match example.language:
            case "console":
                self._run_session(example.text)
            case "sh":
                for command in lines_of(example.text):
                    run_command(command, self._capsys)
            case "python":
                code = compile(example.text, "example", "exec")
                exec(code, vars(self._module))
                self._capsys.readouterr()
            case "toml":
                tomllib.loads(example.text)

    def _run_session(self, text: str) -> None:
        printed = ""
        for command, _ in session(text):
            output = run_command(command, self._capsys)
            printed += f"$ {command}\n{output if output.strip() else ''}"
        self.page = self.page.replace(text, printed)


def write_files(page: str, root: Path) -> list[Path]:
    """Write every block that begins with a comment naming a file, such as ``#
    policies/cache/mru.py``, below `root`.
    """
    written = []
    for example in examples(page):
        first, _, rest = example.text.partition("\n")
        named = re.fullmatch(r"# ([\w/.-]+/[\w.-]+)", first)
        if named is None:
            continue
        path = root / named[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rest.lstrip("\n"), encoding="utf-8")
        written.append(path)
    return written
