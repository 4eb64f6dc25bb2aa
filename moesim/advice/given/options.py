"""Reads command lines and settings of llama.cpp, ik_llama.cpp, ollama and LM Studio.

What an option is called, what it sets and which build knows it stands in one table,
``advice/data/options.yaml``; here are the ways in which people write them down.
"""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from moesim.advice.tables import table
from moesim.advice.times.work import ALL_LAYERS, KV_SHARES
from moesim.base.errors import AdviceError
from moesim.base.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LLAMA = "llama.cpp"
IK = "ik_llama.cpp"
OLLAMA = "ollama"
LM_STUDIO = "LM Studio"

AUTO = -1
"""Layers that the engine chooses itself."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an engine; see the table's head for the fields.

    Attributes:
        unique: only this engine has it, so it tells which one a line is for.
        adds: given twice, both count.
    """

    names: list[str]
    value: str
    env: str = ""
    sets: str = ""
    means: str = ""
    gone: str = ""
    instead: str = ""
    note: str = ""
    unique: bool = False
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that people should know about their line.

    Attributes:
        kind: ``stops``, ``ignored``, ``contradicts``, ``means`` or ``note``.
        words: a sentence.
    """

    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What a line states, in the engine's own terms; None is what it leaves open."""

    model: str = ""
    context: int | None = None
    gpu_layers: int | float | None = None
    cpu_moe: bool = False
    cpu_layers: int | None = None
    overrides: tuple[str, ...] = ()
    micro_batch: int | None = None
    batch: int | None = None
    threads: int | None = None
    flash: bool | None = None
    key_format: str | None = None
    value_format: str | None = None
    kv_formats: str | None = None
    kv_on_host: bool = False
    parallel: int | None = None
    unified: bool = False
    split_mode: str | None = None
    tensor_split: tuple[float, ...] = ()
    device: str = ""
    visible: str = ""
    main_gpu: int | None = None
    numa: str = ""
    load_mode: str | None = None
    lazy: str | None = None
    fit: bool | None = None
    fit_target: str = ""
    keep_bytes: int = 0
    cache_mib: int | None = None
    cache_slots: int | None = None
    all_uploaded: bool = False
    unpinned: bool = False
    no_uploads: bool = False
    repacked: bool = False
    fewer_experts: str = ""
    mmproj: str = ""
    mmproj_on_host: bool = False
    draft: str = ""
    drafts: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """A line as read.

    Attributes:
        engine: whose line it is.
        settings: what it states.
        findings: what its words alone tell.
        unread: options that nothing is known of.
    """

    engine: str
    settings: Settings = field(default_factory=Settings)
    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()


@cache
def options_of(engine: str) -> dict[str, Option]:
    """Return an engine's options under each of their names and variables."""
    known: dict[str, Option] = {}
    for group in table("options"):
        if engine not in group["engines"]:
            continue
        for row in group["options"]:
            option = Option(**row)
            known |= dict.fromkeys([*option.names, *filter(None, [option.env])], option)
    return known


ENGINES = (LLAMA, IK, OLLAMA, LM_STUDIO)
_PROGRAM = re.compile(
    r"(?:^|[/\\])(?:llama[-.]\w*|server|main|ollama|lms)(?:\.exe)?\b|llama\.cpp:",
    re.IGNORECASE,
)
# Engines whose options have other words than these.
FOREIGN = re.compile(
    r"\b(vllm|sglang|koboldcpp|exllama\w*|tabbyapi|mlx_lm\S*|ktransformers|kt-kernel|"
    r"lmdeploy|tensorrt\S*|aphrodite)\b",
    re.IGNORECASE,
)
_OLLAMA = re.compile(r"\bollama\b|\bOLLAMA_|\bnum_(?:ctx|gpu|thread|batch)\b")
_LM_STUDIO = re.compile(
    r"\blms\b|\blm ?studio\b|weights onto cpu|gpu offload|evaluation batch|thread pool",
    re.IGNORECASE,
)
# ``NAME=value`` of shells, ``NAME: value`` of compose files.
_VARIABLE = re.compile(
    r"""(?:\bexport\s+|\bset\s+|\$env:|\bEnvironment=|(?<=\s)-e\s+|\benv\s+|-\s+)?["']?"""
    r"""\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)\s*(?:=|:\s)\s*("[^"]*"|'[^']*'|[^\s;&"']+)["']?"""
)
_CONTINUED = re.compile(r"[\\^`][ \t]*\r?\n")
# Arguments as compose files list them: ``["-ngl", "99"]``, or one a line behind a dash.
_LISTED = re.compile(r"""\[\s*(["']-.*["'])\s*\]""", re.DOTALL)
_BETWEEN = re.compile(r"""(?<=["'])\s*,\s*(?=["'])""")
_ITEM = re.compile(r"^\s*-\s+", re.MULTILINE)
# So alike are a slip of the pen and the option that was meant.
MISSPELT = 0.85
# What ends a command in a shell.
_ENDS = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "2>"}


def read_flags(text: str) -> Given:
    """Read a line, settings or variables as people paste them.

    Raises:
        AdviceError: of another engine, nothing that is an option, an option without
            its value, or a value that is none; in one line.
    """
    line = _ITEM.sub(" ", _CONTINUED.sub(" ", text)).strip()
    line = _LISTED.sub(lambda listed: _BETWEEN.sub(" ", listed[1]), line)
    if not line:
        raise AdviceError("--flags: empty; give a command line, as in 'llama-server …'")
    engine = _engine(line)
    known = options_of(engine)
    read = _Found(engine)

    variables = _VARIABLE.findall(line)
    rest = _VARIABLE.sub(" ", line)
    named = [name for name in known if not name.startswith("-") and not name.isupper()]
    if named:
        rest = read.labels(rest, named, known)
    tokens = _tokens(rest)
    read.read(tokens, known)
    # An argument outweighs a variable, wherever it stands.
    for name, value in variables:
        read.variable(name, value.strip("\"'"), known)
    if not read.seen and not _is_program(tokens, engine):
        raise AdviceError(
            f"--flags {line[:40]!r}: nothing in it is an option of {engine}; paste the"
            " whole line, as in 'llama-server -m model.gguf -ngl 99 --n-cpu-moe 20'"
        )
    return read.given()


def _engine(line: str) -> str:
    foreign = FOREIGN.search(line)
    if foreign and not _PROGRAM.search(line):
        raise AdviceError(
            f"--flags: a line of {foreign.group(1)}; moesim reads those of"
            f" {', '.join(ENGINES)}"
        )
    if _OLLAMA.search(line):
        return OLLAMA
    if _LM_STUDIO.search(line):
        return LM_STUDIO
    unique = {name for name, option in options_of(IK).items() if option.unique}
    words = set(line.split())
    return IK if "ik_llama" in line.lower() or words & unique else LLAMA


def _tokens(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    # Backslashes belong to patterns and to paths of Windows.
    lexer.escape = ""
    try:
        tokens = list(lexer)
    except ValueError:
        raise AdviceError(
            f"--flags {line[:40]!r}: a quotation mark has no partner; was the line cut?"
        ) from None
    commands: list[list[str]] = [[]]
    for token in tokens:
        if token in _ENDS:
            commands.append([])
        else:
            commands[-1].append(token)
    for command in commands:
        starts = [at for at, token in enumerate(command) if _PROGRAM.search(token)]
        if starts:
            # Options of wrappers and containers stand before the program, or its image.
            return command[starts[-1] :]
    return max(commands, key=len)


def _is_program(tokens: list[str], engine: str) -> bool:
    return engine in {OLLAMA, LM_STUDIO} or any(map(_PROGRAM.search, tokens))


class _Found:
    """What was read so far."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.values: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.unread: list[str] = []
        self.seen = False

    def given(self) -> Given:
        settings = Settings(**self.values)
        return Given(self.engine, settings, tuple(self.findings), tuple(self.unread))

    def labels(self, text: str, names: list[str], known: Mapping[str, Option]) -> str:
        """Take ``name value`` out of free text: Modelfiles, JSON, a window's labels."""
        longest = sorted(names, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest))
        label = re.compile(
            rf"""(?<![\w-])["']?({pattern})["']?\s*[:=]?\s*"""
            r"""("[^"]*"|'[^']*'|[\w.+/-]+)?""",
            re.IGNORECASE,
        )
        for match in label.finditer(text):
            name = match.group(1).lower()
            self.take(known[name], name, (match.group(2) or "on").strip("\"'"))
        return label.sub(" ", text)

    def read(self, tokens: list[str], known: Mapping[str, Option]) -> None:
        """Walk over a command line."""
        words = iter(enumerate(tokens))
        for at, token in words:
            if not _is_option(token):
                continue
            name, equals, value = token.partition("=")
            option = known.get(name)
            following = tokens[at + 1] if at + 1 < len(tokens) else None
            if option is None:
                self.unknown(name, known)
                continue
            takes = option.value != "flag" and not equals
            # A switch may stand alone.
            alone = option.value in _SWITCHES and not _is_switch(following)
            if takes and not alone:
                if following is None or (_is_option(following) and option.sets):
                    raise AdviceError(f"--flags: {name}: expected a value behind it")
                value = following
                next(words)
            elif takes:
                value = ""
            self.take(option, name, value)

    def unknown(self, name: str, known: Mapping[str, Option]) -> None:
        """Name an option that this engine lacks."""
        owners = [other for other in ENGINES if name in options_of(other)]
        if owners:
            self.seen = True
            words = f"{name} is an option of {owners[0]}; {self.engine} stops at it"
            self.findings.append(Finding("stops", words))
            return
        dashed = [each for each in known if each.startswith("--")]
        if difflib.get_close_matches(name, dashed, n=1, cutoff=MISSPELT):
            hint = did_you_mean(name, dashed)
            raise AdviceError(f"--flags: unknown option {name!r}{hint}")
        self.unread.append(name)

    def variable(self, name: str, value: str, known: Mapping[str, Option]) -> None:
        """Take an environment variable."""
        option = known.get(name)
        if option is None and self.engine in {OLLAMA, LM_STUDIO}:
            # ollama hands these on to the engine inside it.
            option = options_of(LLAMA).get(name) if self.engine == OLLAMA else None
        if option is None:
            if name.startswith(("LLAMA_ARG_", "OLLAMA_")):
                words = f"{name} is no variable of {self.engine}"
                self.findings.append(Finding("ignored", words))
            return
        if option.value == "flag" and value.lower() in _OFF:
            return
        if option.sets in self.values and not option.adds:
            words = f"{name} is ignored: {self.written[option.sets]} outweighs it"
            self.findings.append(Finding("ignored", words))
            return
        self.take(option, name, value)

    def take(self, option: Option, name: str, text: str) -> None:
        """Keep one option's value."""
        self.seen = True
        if option.note:
            self.findings.append(Finding("note", option.note))
        if option.gone:
            words = f"builds since {option.gone} refuse {name}: {option.instead}"
            self.findings.append(Finding("means", words))
        # -1 asks for the default.
        if not option.sets or (option.value == "whole" and text == "-1"):
            return
        value: Any
        if option.value == "flag":
            value = option.means or True
        else:
            value = CONVERTED[option.value](text, f"--flags: {name}")
        _check_word(option.sets, value, name)
        if option.adds:
            self.values[option.sets] = (*self.values.get(option.sets, ()), value)
            return
        before = self.values.get(option.sets, value)
        if before != value:
            words = f"{name} is given as {before} and {value}: the last one counts"
            self.findings.append(Finding("contradicts", words))
        self.values[option.sets] = value
        self.written[option.sets] = name


def _is_option(token: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", token))


_SWITCHES = {"switch", "negated", "mapping"}
_ON = {"on", "1", "true", "enabled", "yes", "auto", ""}
_OFF = {"off", "0", "false", "disabled", "no"}


def _is_switch(token: str | None) -> bool:
    return token is not None and token.lower() in _ON | _OFF


def _whole(text: str, where: str) -> int:
    # "10,20,30" are three runs of llama-bench, "65,536" is one number.
    number = text
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text):
        number = text.replace(",", "")
    if not re.fullmatch(r"\d{1,12}", number):
        raise AdviceError(f"{where}: expected a whole number, got {text!r}")
    return int(number)


def _layers(text: str, where: str) -> int | float:
    """Read a number of layers; a share of them is below 1."""
    words = {"all": ALL_LAYERS, "max": ALL_LAYERS, "auto": AUTO, "off": 0, "-1": AUTO}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"0?\.\d+", text):
        return float(text)
    # LM Studio shows "20/48"; with all of them the output head goes, too.
    count, _, total = text.partition("/")
    return ALL_LAYERS if count == total else _whole(count, where)


def _switch(text: str, where: str) -> bool:
    if text.lower() not in _ON | _OFF:
        raise AdviceError(f"{where}: expected on or off, got {text!r}")
    return text.lower() in _ON


def _ratios(text: str, where: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in re.split(r"[,/]", text))
    except ValueError:
        shares = ()
    if not shares or min(shares) < 0 or not sum(shares) > 0:
        raise AdviceError(f"{where}: expected shares such as 3,1, got {text!r}")
    return shares


CONVERTED: Mapping[str, Callable[[str, str], Any]] = {
    "whole": _whole,
    "layers": _layers,
    "switch": _switch,
    "negated": lambda text, where: not _switch(text, where),
    "mapping": lambda text, where: "mmap" if _switch(text, where) else "none",
    "ratios": _ratios,
    "word": lambda text, _: text.lower(),
    "text": lambda text, _: text,
}

# Values that a word may have, by what it sets.
WORDS = {
    "key_format": tuple(KV_SHARES),
    "value_format": tuple(KV_SHARES),
    "kv_formats": tuple(KV_SHARES),
    "split_mode": ("none", "layer", "row", "tensor", "graph"),
    "load_mode": ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"),
    "lazy": ("on", "off", "auto"),
    "numa": ("distribute", "isolate", "numactl"),
}
# Numbers that may not be 0.
ABOVE_ZERO = {"micro_batch", "batch", "threads", "parallel"}


def _check_word(sets: str, value: Any, name: str) -> None:
    if sets in WORDS and value not in WORDS[sets]:
        hint = did_you_mean(str(value), WORDS[sets])
        raise AdviceError(
            f"--flags: {name}: expected {', '.join(WORDS[sets])}, got {value!r}{hint}"
        )
    if sets in ABOVE_ZERO and value == 0:
        raise AdviceError(f"--flags: {name}: expected at least 1, got 0")


def spelled(engine: str, name: str, value: str = "") -> str:
    """Write an option of llama-server as another engine calls it.

    Args:
        engine: one of `ENGINES`.
        name: of llama-server.
        value: behind it; empty for none.
    """
    option = options_of(LLAMA).get(name)
    plain = f"{name} {value}".strip()
    if engine == LLAMA or option is None:
        return plain
    if engine == OLLAMA:
        return f"{option.env}={value or 1}" if option.env else plain
    for other in options_of(engine).values():
        fixed = not other.means or value in {"", other.means}
        if option.sets and other.sets == option.sets and fixed:
            label = other.names[0] if engine == IK else f"{other.names[0]}:"
            if other.value == "mapping":
                value = "on" if value == "mmap" else "off"
            return label if other.means else f"{label} {value}".strip()
    return f"{plain} (not in {engine})"


def stated(settings: Settings) -> Iterator[str]:
    """Yield the names of what a line states."""
    empty = Settings()
    for each in fields(Settings):
        if getattr(settings, each.name) != getattr(empty, each.name):
            yield each.name
