"""Names with escape sequences, line ends and formulas: no output obeys them."""

import itertools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from .commands import forked, warm_up
from .report import Report

NAMES = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "line": "x\nerror: all your disks are full",
    "return": "real\rfake",
    "C1": "\x9b31mred",
    "conceal": "\x1b[8mhidden",
    "direction": "abc\u202egpj.exe",
    "separator": "a\u2028b\u2029c",
    "formula": "=cmd|' /C calc'!A0",
    "html": "<script>alert(1)</script>",
    "null": "a\x00b",
    "backspace": "good\b\b\b\bevil",
}

COMMANDS = (
    "trace info FILE",
    "trace stats FILE --out out",
    "trace check FILE",
    "replay FILE --policy greedy --steps 2 --out out",
    "compare FILE --policy greedy,all-cpu --steps 2 --jobs 1 --table out.csv --html out.html",
    "hits FILE --cache-ratio 0.5",
    "trace import FOREIGN new.parquet --shape layers=1,experts=4,top_k=1,expert_bytes=1KiB",
    "trace export FILE out.csv --to csv",
    "sweep FILE --policy greedy --steps 2 --jobs 1 --results store && results store && results store --table again.csv --sql FROM_RUNS",
    "replay NAMED --policy greedy",
    "replay tiny --policy NAME",
    "replay tiny --policy greedy --hw BASED --steps 2",
    "replay FILE --policy greedy --hw PROFILE --steps 2 --out out --html out.html",
    "compare FILE --policy greedy,all-cpu --hw PROFILE --steps 2 --jobs 1",
)

FORBIDDEN = [chr(code) for code in range(32) if chr(code) not in "\n\t"]
FORBIDDEN += [chr(code) for code in range(0x7F, 0xA0)]
FORBIDDEN += ["\u202e", "\u2028", "\u2029"]


def attacks():
    """(name, text, words) of every attack."""
    return [
        (f"{name}: {words}", text, words)
        for (name, text), words in itertools.product(NAMES.items(), COMMANDS)
    ]


def _renamed(path, target, text):
    """A trace whose model bears a name."""
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[b"moesim"])
    header["shape"]["name"] = text
    header["provenance"]["model"] = text
    metadata = {**table.schema.metadata, b"moesim": json.dumps(header).encode()}
    metadata.pop(b"moesim.seal", None)
    pq.write_table(table.replace_schema_metadata(metadata), target)


def judge(text, words, work):
    """Run one command on a name; what reached an output unchanged."""
    from moesim.traces.shipped import resolve_trace

    folder = work / "screen"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _renamed(resolve_trace("tiny"), folder / "t.parquet", text)
    (folder / "foreign").write_text(f"seq,pos,layer,experts\n\"{text}\",0,0,'{text}'\n")
    quoted = json.dumps(text)
    (folder / "based.toml").write_text(f"base = {quoted}\n")
    (folder / "named.toml").write_text(
        f'base = "two-core-host"\nname = {quoted}\ndescription = {quoted}\n'
    )
    named = folder / text.replace("/", "_").replace("\x00", "_")
    shutil.copy(folder / "foreign", named)
    places = {"FILE": "t.parquet", "FOREIGN": "foreign", "PROFILE": "named.toml"}
    places |= {"BASED": "based.toml", "FROM_RUNS": "FROM runs"}
    places |= {"NAMED": named.name, "NAME": text.replace("\x00", "")}
    said = []
    codes = []
    for command in words.split(" && "):
        process = forked([places.get(word, word) for word in command.split()], folder)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        said += [
            (name, Path(f"{folder}.{name}").read_text(errors="replace"))
            for name in ("stdout", "stderr")
        ]

    faults = []
    written = [
        (path.name, path.read_text(errors="replace"))
        for path in folder.rglob("*")
        if path.suffix in (".csv", ".html", ".md", ".txt") and path != named
    ]
    for name, shown in said + written:
        # Our own tables may be bold.
        plain = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
        reached = [sign for sign in FORBIDDEN if sign in plain]
        if reached:
            faults.append(f"{name}: {reached[:3]!r}")
        if any(line.startswith("error: all your disks") for line in shown.split("\n")):
            faults.append(f"{name}: a forged line")
        if name.endswith(".html") and "<script>alert(1)" in shown:
            faults.append(f"{name}: markup")
        cells = [
            cell.strip('"') for line in shown.split("\n") for cell in line.split(",")
        ]
        if name.endswith(".csv") and any(cell.startswith("=cmd") for cell in cells):
            faults.append(f"{name}: a formula")
        if "Traceback" in shown:
            faults.append(f"{name}: {shown.strip().splitlines()[-1][:150]!r}")
    if not set(codes) <= {0, 2}:
        faults.append(f"exit codes {codes}")
    return ", ".join(faults)


def run_suite(count, seed=0, only=None):
    """Run `count` attacks, drawn from all of them."""
    report = Report("screen")
    chosen = [one for one in attacks() if only is None or only in one[0]]
    random.Random(seed).shuffle(chosen)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        warm_up(work)
        for name, text, words in chosen[:count]:
            if report.is_over:
                break
            fault = judge(text, words, work)
            report.count(name.partition(":")[0], "fell" if fault else "held")
            if fault:
                report.fail(f"{name}: {fault}")
    return report
