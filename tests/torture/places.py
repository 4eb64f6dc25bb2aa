"""Where results go: every writer, on every kind of node, and on every input of its own.

What is read stays as it was, whatever a command says. A link stays a link, and what it
points to is whole. A refusal is one line.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from .commands import COMMANDS, faults_of_end, run, warm_up
from .commands import prepare as prepare_commands
from .report import Report
from .subjects import ROOT


class Writer(NamedTuple):
    """A command that writes.

    Attributes:
        words: of its command line, without results.
        outputs: option of a result -> ending of its name; ``/`` for a folder.
        inputs: what it reads, below the current folder.
        most: cases that are tried of it, for one that takes seconds.
    """

    words: str
    outputs: dict[str, str]
    inputs: tuple[str, ...] = ()
    most: int = 1_000


RUN = "--config c.toml --hw hw.toml --warm warm.parquet --steps 3"
RUN_INPUTS = ("t.parquet", "c.toml", "hw.toml", "warm.parquet")
SHAPE = "layers=3,experts=8,top_k=2,expert_bytes=1KiB"
WRITERS = (
    Writer(f"replay t.parquet {RUN}",
           {"--out": "/", "--perfetto": ".json", "--png": ".png", "--html": ".html"},
           RUN_INPUTS),
    Writer(f"replay t.parquet {RUN} --arrivals a.txt", {"--perfetto": ".json"},
           (*RUN_INPUTS, "a.txt")),
    Writer(f"compare t.parquet {RUN} --policy all-cpu,greedy --jobs 1",
           {"--table": ".csv", "--html": ".html", "--png": ".png", "--perfetto": ".json"},
           RUN_INPUTS),
    Writer("compare t.parquet --policy all-cpu,greedy --jobs 1 --steps 3",
           {"--out": "/"}, ("t.parquet",)),
    Writer("gap t.parquet --steps 2 --hw hw.toml",
           {"--html": ".html", "--png": ".png"},
           ("t.parquet", "hw.toml")),
    Writer("sweep t.parquet --hw hw.toml --steps 3 --jobs 1",
           {"--table": ".csv", "--html": ".html", "--png": ".png", "--results": "/"},
           ("t.parquet", "hw.toml")),
    Writer("hits t.parquet --cache-ratio 0.5 --cache lru",
           {"--table": ".csv", "--png": ".png", "--html": ".html"}, ("t.parquet",)),
    Writer(("search t.parquet --hw hw.toml --steps 2 --trials 2 --policy greedy --jobs 1"
           " --over cache_ratio=0.1:0.9"), {"--table": ".csv", "--results": "/"},
           ("t.parquet", "hw.toml")),
    Writer("results STORE", {"--table": ".parquet"}, ("STORE/row.parquet",)),
    Writer("train-cache t.parquet --held-out warm.parquet --hidden 8 --epochs 1",
           {"--out": "/"}, ("t.parquet", "warm.parquet"), most=80),
    Writer(f"trace import foreign OUT --shape {SHAPE}", {"OUT": ".parquet"},
           ("foreign",)),
    Writer("trace export t.parquet OUT --to csv", {"OUT": ".csv"}, ("t.parquet",)),
    Writer("trace predict t.parquet OUT --recall 0.8", {"OUT": ".parquet"},
           ("t.parquet",)),
    Writer("trace widths t.parquet OUT --bits 4,8", {"OUT": ".parquet"},
           ("t.parquet",)),
    Writer("trace widths t.parquet OUT --widths widths.csv", {"OUT": ".parquet"},
           ("widths.csv",)),
    Writer("trace synth OUT --like t.parquet --tokens 20",
           {"OUT": ".parquet", "--save-stats": ".npz"}, ("t.parquet",)),
    Writer("trace stats t.parquet",
           {"--html": ".html", "--png": ".png", "--out": "/"}, ("t.parquet",)),
    Writer("record OUT --model M --prompts p.txt --new-tokens 1 --no-overhead",
           {"OUT": ".parquet", "--calibration": ".safetensors"},
           ("p.txt", "M/model.safetensors"), most=80),
    Writer(
        # Beside a calibration, vectors are of its text, which is short.
        "record other.parquet --model M --prompts p.txt --new-tokens 1 --no-overhead"
        " --calibration other.safetensors",
        {"--residual": ".st"},
        ("p.txt", "M/model.safetensors"),
        most=80,
    ),
    Writer("advise qwen3-30b-a3b --hw hw.toml --bench rows.jsonl",
           {"--html": ".html", "--save-profile": ".toml"}, ("rows.jsonl", "hw.toml")),
    Writer("advise gpt-oss-20b --gpu RTX3090 --trace gpt-oss-20b-like",
           {"--expert-counts": ".pt"}, (), most=20),
    Writer("calibrate OUT --from run --force", {"OUT": ".toml"}, ("run/run.json",)),
    Writer("store build tiny", {"--out": "/"}, (), most=30),
    Writer("run t.parquet --hw two-core-host --steps 2 --policy on-demand",
           {"--out": "/", "--perfetto": ".json", "--learn": ".toml"}, ("t.parquet",),
           most=60),
    Writer(("quality --text p.txt --tokens 16 --prompt-tokens 8 --scored-tokens 8"
           " --cache-ratio 0.5"), {"--out": "/"}, ("p.txt",), most=12),
    Writer("train-tiny --minutes 0.01", {"--out": "/"}, (), most=12),
    Writer("profile OUT --quick", {"OUT": ".toml"}, (), most=8),
    Writer(("validate tiny --hw two-core-host --policy on-demand+lru --cache-ratio 0.5"
           " --batch 1 --steps 2 --repetitions 1 --shape olmoe-1b-7b/64 --with before.json"),
           {"--out": "/"}, ("before.json",), most=12),
    Writer("verify --minutes 0.01", {"--out": "/"}, (), most=4),
    Writer("doctor", {"--report": ".json"}, (), most=4),
    Writer("reproduce --all --paper DAOP --jobs 1", {"--out": "/"}, (), most=4),
)  # fmt: skip

LONG = 1_000
"""Cases of a writer that takes no time."""

NODES = (
    "absent", "file", "folder", "link to a file", "link to nothing", "loop of links",
    "link to a folder", "link to a device", "pipe", "socket", "device", "full device",
    "below a file", "closed folder", "long name", "hostile name",
)  # fmt: skip
WAYS = ("plain", "absolute", "through a link")
"""How a node is named."""

GUISES = ("same name", "dotted path", "absolute path", "soft link", "hard link")


def run_suite(count, seed, only=None):
    """Try nodes and pairs in a drawn order."""
    report = Report("places")
    dice = random.Random(seed)
    cases = [
        (writer, option, kind, name)
        for writer in WRITERS
        for option in writer.outputs
        for kind, names in (
            ("node", [f"{node}|{way}" for node in NODES for way in WAYS]),
            (
                "input",
                [f"{guise}|{read}" for guise in GUISES for read in writer.inputs],
            ),
        )
        for name in names
        if not only or only in f"{kind} {writer.words}"
    ]
    dice.shuffle(cases)
    # Those that take seconds come last, if time is left.
    cases.sort(key=lambda case: case[0].most < LONG)
    tried = Counter()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        prepare(source)
        preload(Path(folder) / "imports")
        real = "run t.parquet --policy greedy --steps 8 --hw two-core-host --out run"
        ended = run(real.split(), source)
        assert ended.code == 0, ended
        for case in cases:
            words = case[0].words
            tried[words] += 1
            if tried[words] > case[0].most:
                continue
            if count <= 0 or report.is_over:
                break
            count -= 1
            work = Path(folder) / "work"
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(source, work)
            attack(*case, work, report)
    return report


def preload(folder):
    """Import here what quick commands import, so that forked ones need not."""
    folder.mkdir()
    prepare_commands(folder)
    torch = ("train-cache", "store build", "record")
    warm_up(folder, [one for one in COMMANDS if one.name not in torch])


def prepare(folder):
    """Write what the commands read."""
    from support import foreign_files as files
    from support.bench_files import as_jsonl, row
    from support.small_trace import write_small_trace

    from moesim.hwprofiles.profile import load_profile, save_profile

    for name, seed in (("t.parquet", 0), ("warm.parquet", 1)):
        write_small_trace(folder / name, seed=seed)
    save_profile(load_profile("rtx4060ti"), folder / "hw.toml")
    (folder / "c.toml").write_text("batch = 1\n")
    (folder / "a.txt").write_text("0\n0.0001\n")
    (folder / "p.txt").write_text("One, two.\n")
    rows = [row("tg", 64, 30.0, n_cpu_moe=20), row("pp", 512, 400.0, n_cpu_moe=20)]
    (folder / "rows.jsonl").write_text(as_jsonl(rows))
    widths = [f"{number // 8},{number % 8},4" for number in range(24)]
    (folder / "widths.csv").write_text("\n".join(["layer,expert,bits", *widths]))
    files.llama_cpp(folder / "foreign", files.routing(seed=3))
    sweep = "sweep t.parquet --hw hw.toml --policy all-cpu --steps 3 --results STORE"
    ended = run(sweep.split(), folder)
    assert ended.code == 0, ended
    tiny = ROOT / "moesim" / "runtime" / "data" / "tiny"
    shutil.copytree(tiny, folder / "M", ignore=shutil.ignore_patterns("residual*"))
    (stored,) = (folder / "STORE").glob("*.parquet")
    stored.rename(stored.with_stem("row"))
    (folder / "before.json").write_text("{}")


def attack(writer, option, kind, name, work, report):
    """Put a node in the place of one result, and run."""
    before = contents(work)
    ending = writer.outputs[option]
    stem = f"result{ending.strip('/')}"
    node = Node(work, stem, is_folder=ending == "/")
    if kind == "node":
        name, _, way = name.partition("|")
        place = named(node.set(name), way, work)
    else:
        place = node.disguised(name)
    words = writer.words.split()
    if option == "OUT":
        words = [place if word == "OUT" else word for word in words]
    else:
        others = [
            f"other{end.strip('/')}"
            for key, end in writer.outputs.items()
            if key == "OUT"
        ]
        words = [others[0] if word == "OUT" else word for word in words]
        words += [option, place]
    ended = run(words, work)
    node.clear()

    where = f"{' '.join(writer.words.split()[:2])} {option} on {name} as {place}"
    report.count(f"{kind}:", "done" if ended.code == 0 else "refused")
    # Some say by their code that what they found is not as it should be.
    says = words[0] in ("doctor", "verify", "validate")
    for fault in faults_of_end(ended.code, ended.err, (0, 1, 2) if says else (0, 2)):
        report.fail(f"{where}: {fault}")
    if name == "absent" and ended.code == 2:
        report.fail(f"{where}: writes nowhere: {ended.err[-300:]!r}")
    after = contents(work)
    changed = [key for key, value in before.items() if after.get(key) != value]
    if changed:
        report.fail(f"{where}: changed {changed}, exit code {ended.code}")
    # Of a file in a folder that is read, a hard link elsewhere is another file.
    is_other = name.startswith("hard link") and "/" in name
    if kind == "input" and ended.code == 0 and ending != "/" and not is_other:
        report.fail(f"{where}: wrote over what is read")
    for fault in node.faults(name):
        report.fail(f"{where}: {fault}")
    leftover = [key for key in after if key.endswith(".part")]
    if leftover:
        report.fail(f"{where}: left {leftover}")


def named(place, way, work):
    """The same place, called in another way."""
    if way == "absolute":
        return str(work / place)
    if way == "through a link":
        link = work.with_name("link")
        link.unlink(missing_ok=True)
        link.symlink_to((work / place).parent)
        return str(link / Path(place).name)
    return place


class Node:
    """What stands where a result should go."""

    def __init__(self, work, stem, *, is_folder):
        self.work = work
        self.place = work / stem
        self.outside = work.with_name("outside")
        self.is_folder = is_folder
        self.open = None
        shutil.rmtree(self.outside, ignore_errors=True)
        self.outside.mkdir()

    def set(self, kind):
        """Make a node; the words that name it."""
        place, victim = self.place, self.outside / "victim"
        if "link" in kind:
            self._link(kind, place, victim)
        elif kind == "file":
            place.write_text("older")
        elif kind == "folder":
            place.mkdir()
        elif kind == "pipe":
            os.mkfifo(place)
        elif kind == "socket":
            with contextlib.chdir(place.parent):
                self.open = socket.socket(socket.AF_UNIX)
                self.open.bind(place.name)
        elif kind == "below a file":
            victim.write_text("older")
            return str(victim / place.name)
        elif kind == "long name":
            return f"{'r' * 300}{place.suffix}"
        elif kind == "hostile name":
            return f"result\x1b]0;title\x07\nerror: \x9b{place.suffix}"
        elif kind == "closed folder":
            self.outside.chmod(0o500)
            return str(self.outside / place.name)
        devices = {"device": "/dev/null", "full device": "/dev/full"}
        return devices.get(kind, place.name)

    @staticmethod
    def _link(kind, place, victim):
        if kind == "link to a device":
            place.symlink_to("/dev/null")
        elif kind == "loop of links":
            other = place.with_name("other-link")
            place.symlink_to(other)
            other.symlink_to(place)
        else:
            place.symlink_to(victim)
        if kind == "link to a file":
            victim.write_text("older")
        elif kind == "link to a folder":
            victim.mkdir()

    def disguised(self, name):
        """The words that name an input in another way."""
        guise, _, read = name.partition("|")
        source = self.work / read
        if guise == "same name":
            return read
        if guise == "dotted path":
            (self.work / "sub").mkdir(exist_ok=True)
            return f"sub/../{read}"
        if guise == "absolute path":
            return str(source)
        if guise == "soft link":
            self.place.symlink_to(source)
        else:
            os.link(source, self.place)
        return self.place.name

    def faults(self, kind):
        """What a command did to a link or to what it points to."""
        victim = self.outside / "victim"
        is_link = kind.startswith("link") or kind == "loop of links"
        if is_link and not self.place.is_symlink():
            yield "replaced the link itself"
        if kind == "link to a file" and victim.is_file() and not victim.stat().st_size:
            yield "emptied what the link points to"
        if not Path("/dev/null").is_char_device():
            yield "replaced /dev/null"

    def clear(self):
        """Close and unlock what `set` made."""
        self.outside.chmod(0o700)
        if self.open is not None:
            self.open.close()


def contents(folder):
    """Bytes of every file that a command may read, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.is_symlink()
        and not path.name.startswith(("result", "other"))
    }
