"""One word for one thing: an option is called the same and means the same in every
command, and stands in the table of `docs/reference/options.md`.
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

from typer.main import get_command

from moesim import cli
from moesim.base.options import WRITTEN, flag_of, option_of
from moesim.cli.commands.listing import KINDS
from moesim.runs.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "options.md"


def commands():
    """Every command's function, by the words that call it."""
    found = {}
    for name, deferred in get_command(cli.app).commands.items():
        command = deferred.command()
        group = getattr(command, "commands", {name: command})
        for word, each in group.items():
            words = name if word == name else f"{name} {word}"
            found[words] = getattr(each, "command", lambda each=each: each)()
    return {words: inspect.unwrap(each.callback) for words, each in found.items()}


def declared(*, arguments=False):
    """Every option of every command, or argument: flag -> command -> field."""
    options = defaultdict(dict)
    for words, function in commands().items():
        of = function.__annotations__
        kinds = [of["config"]] if "config" in of else []
        kinds += [RunConfig] if {"configs", "axes"} & of.keys() else []
        kinds += [of["options"]] if "options" in of else []
        for kind in kinds:
            for field in fields(kind):
                stated = option_of(field)
                if stated.on_command_line and stated.argument == arguments:
                    options[flag_of(field)][words] = field
    return options


def test_every_command_declares_its_options_as_fields():
    for words, function in commands().items():
        names = set(function.__annotations__) - {"return"}
        assert names <= {"options", "config", "configs", "axes", "context"}, words


EXCEPTIONS = {
    ("--residual", "record"),
    ("--hw", "calibrate"),
}
"""A recording writes the vectors that it finds no file of, and a profile may be calibrated in
its place.
"""


# People write a million tokens as 1e6.
NUMBERS = {int: float}


def test_a_name_has_one_kind_of_value_everywhere():
    for flag, by_command in declared().items():
        kinds = {
            (
                NUMBERS.get(option_of(field).kind, option_of(field).kind),
                option_of(field).place or "",
                option_of(field).policy_kind or "",
            )
            for words, field in by_command.items()
            if (flag, words) not in EXCEPTIONS
        }
        assert len(kinds) == 1, (flag, kinds, list(by_command))


def test_every_path_is_read_or_written_or_a_place_to_work_in():
    """What is declared is protected: no result replaces it."""
    to_work_in = {"--store", "--disk"}
    for flag, by_command in [*declared().items(), *declared(arguments=True).items()]:
        for words, field in by_command.items():
            stated = option_of(field)
            if stated.kind is Path and flag not in to_work_in:
                assert stated.place, (flag, words)


def test_the_page_says_why_each_option_is_there():
    table = PAGE.read_text(encoding="utf-8").partition("## Why each is there")[2]
    named = set(re.findall(r"`(--[\w-]+)`", table))
    assert named == set(declared())


def imported_in(source):
    """What a function imports, by the names that it gives them."""
    for node in ast.walk(ast.parse(source)):
        for alias in getattr(node, "names", ()):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                yield alias.asname or alias.name, getattr(module, alias.name)


def test_every_option_is_read_or_handed_on():
    """`Options.arguments` hands on what a function takes: a name that nothing takes
    would be lost.
    """
    lost = []
    handing = 0
    for words, function in commands().items():
        source = inspect.getsource(function)
        names = dict(imported_in(source))
        taken = set(WRITTEN)
        for name, attribute in re.findall(r"\.arguments\((\w+)\.?(\w*)\)", source):
            callee = getattr(names[name], attribute) if attribute else names[name]
            taken.update(inspect.unwrap(callee).__code__.co_varnames)
            handing += 1
        if len(taken) == len(WRITTEN):
            continue
        kind = function.__annotations__["options"]
        text = source + "".join(inspect.getsource(each) for each in kind.__mro__[:2])
        lost += [
            f"{words}: {field.name}"
            for field in fields(kind)
            if field.name not in taken
            and not re.search(rf"(options|self)\.{field.name}\b", text)
        ]
    assert handing >= 5
    assert lost == []


COMMON = ("--help", "--version", "--config")
"""Options that no dataclass declares."""


def texts_of(tree):
    """Every text of a module, with what is filled in left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(getattr(part, "value", "X")) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_name_commands_and_options_that_exist():
    """`moesim list hardware` was one of them."""
    by_flag = declared()
    known = {*commands(), "trace", *(f"list {kind}" for kind in KINDS)}
    wrong = []
    rooms = ("moesim", "hwprofiles", "policies", "runtime", "traces")
    for path in [path for room in rooms for path in (ROOT / room).rglob("*.py")]:
        for text in texts_of(ast.parse(path.read_text(encoding="utf-8"))):
            for line in re.findall(r"`moesim ([a-z][^`]+)`", text):
                names = (*re.findall(r"^[a-z-]+(?: [a-z]+)?", line)[0].split(), "")
                has_group = names[0] in ("trace", "list")
                words = " ".join(names[:2]).strip() if has_group else names[0]
                flags = re.findall(r"--[a-z-]+", line)
                if words not in known or any(
                    flag not in COMMON and words not in by_flag[flag] for flag in flags
                ):
                    wrong.append(f"{path.name}: {line}")
    assert wrong == []
