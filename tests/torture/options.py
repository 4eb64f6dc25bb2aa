"""Options that are drawn two by two: an answer, or one line; and none without effect.

What `replay` prints for two options together must differ from what it prints without
one of them, or a note must say that the option changes nothing. Options of the other
commands are drawn from their dataclasses.
"""

import inspect
import json
import random
import re
import shutil
import signal
import tempfile
from dataclasses import fields
from pathlib import Path

from moesim.base.options import default_of, flag_of, option_of

from .commands import faults_of_end, run
from .places import SHAPE, contents, preload, prepare
from .report import Report

TIMES = re.compile(r'"(wall_s|simulated_s|date|version|git_commit)": [^,}]+')
SILENT = (
    "--seed", "--engine", "--out", "--perfetto", "--html", "--hw", "--warm", "--artefacts",
)  # fmt: skip
"""What may leave figures as they are without a word: where results go, what equals a
default, and what answers the same in another way.
"""

SIZES = {"--cache-ratio", "--slots-per-layer", "--gpu-memory"}

COMMANDS = {
    "replay": "t.parquet --json",
    # command -> what it needs at least, and keeps short
    "compare": "t.parquet --policy all-cpu,greedy --steps 3 --jobs 1",
    "sweep": "t.parquet --policy all-cpu,greedy --steps 3 --jobs 1",
    "search": "t.parquet --over cache_ratio=0.1:0.9 --trials 2 --steps 3 --jobs 1",
    "hits": "t.parquet --cache lru --cache-ratio 0.5",
    "gap": "t.parquet --steps 2",
    "sensitivity": "t.parquet --policy greedy,all-cpu --steps 2",
    "results": "STORE",
    "advise": "qwen3-30b-a3b --gpu RTX3090",
    "model": "olmoe-1b-7b",
    "list": "cache",
    "config": "",
    "reproduce": "hybrimoe-hit-rate --steps 5",
    "trace info": "t.parquet",
    "trace check": "t.parquet",
    "trace stats": "t.parquet",
    "trace export": "t.parquet result.csv --to csv",
    "trace import": f"foreign result.parquet --shape {SHAPE}",
    "trace synth": "result.parquet --like t.parquet --tokens 20",
    "trace predict": "t.parquet result.parquet --recall 0.8",
    "trace widths": "t.parquet result.parquet --bits 8,4",
}
LONGEST_S = 300
WORDS = {
    # field -> texts that mean something to it, and some that do not
    "hw": ("rtx4060ti", "hw.toml", "nothing.toml"),
    "arrivals": ("a.txt", "poisson:2", "poisson:0"),
    "slo": ("ttft=1", "ttft=.5,ttft=.1"),
    "shape": ("mixtral-8x7b", SHAPE, "layers=0"),
    "quant": ("q4_k_m", "q99"),
    "cpu": ("Ryzen 7 5700X", "cores=8,ghz=3.6", "cores=-1"),
    "ram": ("2x16GB DDR4-3600", "DDR4-999999", "32"),
    "gpu": ("RTX 4060 Ti 16GB", "none", "2x RTX 3090", "vram=0"),
    "pcie": ("4.0x8", "9.0x99"),
    "like": ("t.parquet", "qwen3-30b-a3b", "nope"),
    "map": ("pos=token", "pos", "=x"),
    "others": ("cut_at=8", "x", "=1"),
    "over": ("cache_ratio=0.1:0.9", "cache_ratio=0.9:0.1", "seed=0:9", "x=1:2", "a"),
    "objective": ("tpot_s", "tpot_s,gpu_bytes", "nope"),
    "sql": ("FROM runs", "DROP TABLE runs", "FROM read_csv('a.txt')", "SELECT"),
    "cluster": ("tcp://256.0.0.1:1", "nowhere"),
    "by": ("popularity", "a.txt", "nothing.csv"),
    "layout": ("oracle-general", "nope"),
    "paper": ("DAOP", "nope"),
    "policy": (
        "on-demand",
        "greedy+lru",
        "greedy+lifo",
        "nope",
        "greedy:x=1",
        "greedy,greedy",
    ),
    "cache": ("lfu", "belady", "nope", "lfu:decay=2"),
    "prefetch": ("random", "next-gate", "none", "nope"),
    "routing": ("cache-prior", "nope"),
    "trace": ("t.parquet", "tiny", "a.txt"),
    "warm": ("warm.parquet", "a.txt"),
    "host_cache": ("lfu", "arc"),
    "context_tokens": ("0", "100", "65536"),
    "steps": ("1", "5", "0"),
}
SLOW = ("everything", "trials", "tokens", "jobs", "cluster_processes")
"""What would only take long."""


def run_suite(count, seed, only=None):
    """Draw pairs, every other one of `replay`."""
    report = Report("options")
    dice = random.Random(seed)
    others = [name for name in COMMANDS if not only or only in name]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        prepare(source)
        preload(Path(folder) / "imports")
        fields_of = {command: _fields(command) for command in COMMANDS}
        for number in range(count):
            if report.is_over:
                break
            is_replay = number % 2 and "replay" in others
            command = "replay" if is_replay else dice.choice(others)
            declared = fields_of[command]
            pair = _drawn(dice, declared)
            work = Path(folder) / "work"
            attack(command, pair, declared, source, work, report, f"{seed}/{number}")
    return report


def _fields(command):
    """Every field that a command makes an option of, by flag."""
    from typer.main import get_command

    from moesim.cli.app import app
    from moesim.runs.config import RunConfig

    found = get_command(app)
    for word in command.split():
        found = getattr(found, "command", lambda found=found: found)()
        found = found.commands[word]
    function = inspect.unwrap(getattr(found, "command", lambda: found)().callback)
    kinds = [function.__annotations__.get("options")]
    if {"config", "configs", "axes"} & function.__annotations__.keys():
        kinds.append(RunConfig)
    every = [each for kind in kinds if kind is not None for each in fields(kind)]
    return {
        flag_of(each): each
        for each in every
        if not option_of(each).argument
        and option_of(each).on_command_line
        and each.name not in (*SLOW, "trace", "as_json")
    }


def _drawn(dice, declared):
    """Two options with a value each."""
    flags = dice.sample(list(declared), min(2, len(declared)))
    return {flag: _value(dice, declared[flag]) for flag in flags}


def _value(dice, field):
    """A value of a field, every fifth one out of place."""
    odd = ("x", "-1", "nan", "1.5", "0", "nothing", "t.parquet")
    stated = option_of(field)
    if stated.kind is bool:
        return None
    return dice.choice(odd if dice.random() < 0.2 else _values(field))


def _values(field):
    """Values that may fit a field."""
    stated = option_of(field)
    if field.name in WORDS or stated.choices:
        return WORDS.get(field.name, stated.choices)
    if stated.is_size:
        return ("1GiB", "600MiB", "20KiB", "100KiB")
    if stated.kind in (int, float):
        return ("0.1", "0.6") if stated.maximum == 1 else ("1", "2", "3", "7")
    if stated.place == "file":
        return (f"result{(stated.suffixes or ('.x',))[0]}", "-", "result.png")
    if stated.place == "folder":
        return ("result", "STORE")
    return ("t.parquet", "a.txt", "hw.toml", "STORE")


def attack(command, pair, declared, source, work, report, name):
    """Run a command with two options: it answers, or says one line. Where `replay`
    answers, each of them must matter.
    """

    def again(other):
        return _ended(command, other, source, work)[0]

    ended, before = _ended(command, pair, source, work)
    where = f"{name}: {command} {' '.join(_words(pair))}"
    report.count(command, "answered" if ended.code == 0 else "refused")
    # `trace check` says by its code that a trace misleads.
    allowed = (0, 1, 2) if command == "trace check" else (0, 2)
    for fault in faults_of_end(ended.code, ended.err, allowed):
        report.fail(f"{where}: {fault}")
    after = contents(work)
    changed = [key for key, value in before.items() if after.get(key) != value]
    if changed:
        report.fail(f"{where}: changed {changed}")
    if command == "replay" and ended.code == 0:
        for flag in pair:
            told = f"{flag} changes nothing" in ended.err
            is_default = pair[flag] == str(default_of(declared[flag]))
            may = told or is_default or flag in SILENT
            if not may and not _matters(flag, pair, declared, again):
                report.fail(f"{where}: {flag} changes nothing, without a word")


def _matters(flag, pair, declared, again):
    """Whether figures differ without an option, which may be refused, or with another
    value of it: the one that was drawn may be the default.
    """
    if flag in ("--staging", "--cache"):
        # A limit that a roomy cache never reaches, a small one does.
        pair = {key: value for key, value in pair.items() if key not in SIZES}
        pair |= {"--cache-ratio": "0.05"}
    if flag == "--batch":
        # Requests that come seldom never meet.
        pair = {key: value for key, value in pair.items() if key != "--arrivals"}
    rest = {key: value for key, value in pair.items() if key != flag}
    others = [rest, *({**pair, flag: value} for value in _values(declared[flag]))]
    _, without, *_ = ends = [again(other) for other in (pair, *others)]
    figures = {_figures(end.out) for end in ends if end.code == 0}
    return len(figures) > 1 or without.code != 0


def _ended(command, pair, source, work):
    """How a command ended in a fresh folder, and what lay there before."""
    base = COMMANDS[command].split()
    for flag in pair:
        if flag in base:
            at = base.index(flag)
            del base[at : at + 2]
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    before = contents(work)
    words = [*command.split(), *base, *_words(pair)]
    return run(words, work, before=lambda: signal.alarm(LONGEST_S)), before


def _words(pair):
    return [word for both in pair.items() for word in both if word is not None]


def _figures(text):
    """What a run came to, without what merely repeats its options."""
    answer = json.loads(text)
    answer.pop("config", None)
    return TIMES.sub("", json.dumps(answer, sort_keys=True))
