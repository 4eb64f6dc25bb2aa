"""Small files that would fill memory, and nodes that are no files: each is refused in
one short line, within 2 GB and 30 s of a processor.
"""

import functools
import itertools
import json
import os
import random
import resource
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .commands import forked, warm_up
from .report import Report

MOST_BYTES = 2 << 30
MOST_SECONDS = 30
LONGEST_LINE = 400
LONGEST_ANSWER = 20_000
SHAPE = "layers=3,experts=8,top_k=2,expert_bytes=1KiB"

READS = {
    # kind of file -> commands that read it, FILE standing for its place
    "toml": (
        "replay tiny --steps 2 --policy greedy --hw FILE",
        "replay --config FILE",
        "run tiny --steps 2 --policy greedy --hw FILE",
        "calibrate --hw FILE --minutes 0.01",
    ),
    "json": (
        "advise olmoe-1b-7b --bench FILE",
        "replay --config FILE",
        f"trace import FILE out.parquet --shape {SHAPE}",
        "validate --with FILE --out out",
        "model FOLDER",
    ),
    "csv": (
        "advise olmoe-1b-7b --bench FILE",
        f"trace import FILE out.parquet --shape {SHAPE}",
        "trace widths tiny out.parquet --widths FILE",
        "replay tiny --steps 2 --policy greedy --arrivals FILE",
    ),
    "parquet": (
        f"trace import FILE out.parquet --shape {SHAPE}",
        "trace info FILE",
        "hits FILE --cache-ratio 0.5",
        "results FOLDER",
        "trace synth out.parquet --like FILE --tokens 10",
        "replay tiny --steps 2 --policy greedy --arrivals FILE",
    ),
    "npz": (
        f"trace import FILE out.parquet --shape {SHAPE}",
        "trace synth out.parquet --like FILE --tokens 10",
    ),
    "gguf": ("model FILE", "advise FILE"),
    "safetensors": (
        f"trace import FILE out.parquet --shape {SHAPE}",
        "replay tiny --steps 2 --policy on-demand --cache flashmoe --artefacts FOLDER",
    ),
}

NAMES = {"gguf": "x.gguf", "npz": "x.npz", "csv": "x.csv", "toml": "x.toml"}
NAMES |= {"json": "config.json", "parquet": "x.parquet"}
NAMES |= {"safetensors": "flashmoe.safetensors"}


def _texts():
    """(kind, name, content) of texts."""
    for depth in (150, 5_000, 200_000):
        yield "json", f"{depth} lists", "[" * depth
        yield "json", f"{depth} closed lists", "[" * depth + "]" * depth
        yield "json", f"{depth} objects", '{"layer":' * depth + "1" + "}" * depth
        yield "json", f"{depth} lists in a value", '{"pos":' + "[" * depth
        yield "toml", f"{depth} lists", "x = " + "[" * depth + "]" * depth
        yield "toml", f"{depth} tables", "x = " + "{a=" * depth + "1" + "}" * depth
        yield "toml", f"{depth} parts", ".".join(["a"] * depth) + " = 1"
        yield "toml", f"{depth} quoted parts", ".".join(['"a"'] * depth) + " = 1"
        yield "toml", f"{depth} parts of a table", f"[{'.'.join(['a'] * depth)}]\nb = 1"
    for digits in (4_301, 1_000_000):
        number = "1" * digits
        yield "json", f"{digits} digits", json.dumps({"layer": 1})[:-3] + f" {number}}}"
        yield "json", f"{digits} digits in rows", f'[{{"n_gpu_layers": {number}}}]'
        yield "toml", f"{digits} digits", f"cores = {number}\n"
        yield "toml", f"{digits} digits of a float", f"cores = 1.{number}\n"
        yield "csv", f"{digits} digits", f"seq,pos,layer,experts\n0,{number},0,1\n"
    many = ",".join(f'"k{n}":{n}' for n in range(1_000_000))
    yield "json", "a million keys", f"{{{many}}}"
    yield "toml", "a million keys", "\n".join(f"k{n} = 1" for n in range(300_000))
    yield "json", "a string of 64 MB", '{"layer": "' + "x" * (64 << 20) + '"}'
    for count in (5_000, 200_000):
        names = ",".join(f"column{n}" for n in range(count))
        yield "csv", f"{count} columns", f"{names}\n{names}\n"
        yield "csv", f"{count} cells", "seq,pos,layer,experts\n" + "1," * count
    yield "csv", "a line of 32 MB", "seq,pos,layer,experts\n" + "1" * (32 << 20)
    yield "csv", "a cell of 32 MB", '"seq' + "x" * (32 << 20) + '",pos\n'


def _parquet(rows, columns):
    """What writes a table of `rows` equal rows, which are encoded by runs."""

    def write(path):
        place = pa.array(np.zeros(min(rows, 5_000_000), np.int8))
        piece = pa.table(
            {
                name: pa.DictionaryArray.from_arrays(place, value)
                if pa.types.is_string(value.type)
                else value.take(place)
                for name, value in columns.items()
            }
        )
        with pq.ParquetWriter(path, piece.schema, store_schema=False) as writer:
            for start in range(0, rows, len(piece)):
                writer.write_table(piece.slice(0, min(len(piece), rows - start)))

    return write


def _tables():
    ours = {"seq": [0], "pos": [0], "phase": ["decode"], "layer": [0]}
    ours = {name: pa.array(values) for name, values in ours.items()}
    equal = ours | {"experts": pa.array([[1, 2]])}
    named = ours | {"seq": pa.array(["x" * 100_000]), "experts": pa.array([[1, 2]])}
    wide = ours | {"experts": pa.array([list(range(8))]), "weights": pa.array([[1.0]])}
    yield "parquet", "100 M equal rows", _parquet(100_000_000, equal)
    yield "parquet", "30,000 long names", _parquet(30_000, named)
    yield "parquet", "20 M rows of lists", _parquet(20_000_000, wide)
    theirs = {"seq_id": pa.array(["s" * 50_000]), "phase": pa.array(["decode"])}
    theirs |= {"layer": pa.array([0]), "token": pa.array([0])}
    theirs |= {"expert_ids": pa.array([[1, 2]])}
    yield "parquet", "50,000 names of a runtime", _parquet(50_000, theirs)
    arrivals = {"arrival_s": pa.array([0.0])}
    yield "parquet", "100 M arrivals", _parquet(100_000_000, arrivals)
    many = {f"column{n}": pa.array([0]) for n in range(20_000)}
    yield "parquet", "20,000 columns", _parquet(1, many)
    store = {"model": pa.array(["m" * 100_000]), "policy": pa.array(["p"])}
    yield "parquet", "a store of long names", _parquet(30_000, store)


def _arrays():
    for name, shape, kind in (
        ("routed_experts", (40_000_000, 16, 2), "<i2"),
        ("x_routed_experts", (2_000_000_000,), "<f8"),
        ("router_logits.0", (30_000_000, 8), "<f4"),
        ("reuse", (1 << 30,), "<f8"),
        ("seed", (1 << 29,), "<i8"),
    ):
        yield "npz", name, functools.partial(_npz, name, shape, kind)


def _npz(name, shape, kind, path):
    """An array of zeros, of which 3 GB are there."""
    left = min(int(np.prod(shape, dtype=object)) * np.dtype(kind).itemsize, 3 << 30)
    zeros = bytes(16 << 20)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(f"{name}.npy", "w", force_zip64=True) as member,
    ):
        header = {"descr": kind, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        while left > 0:
            left -= member.write(zeros[: min(left, len(zeros))])


def _headers():
    """GGUF and safetensors whose headers promise much."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    def number(key, value, kind=4, form="<I"):
        return text(key) + struct.pack("<I", kind) + struct.pack(form, value)

    arch = text("general.architecture") + struct.pack("<I", 8) + text("llama")

    def gguf(pairs, *, tensors=0, count=None):
        count = len(pairs) + 1 if count is None else count
        head = b"GGUF" + struct.pack("<IQQ", 3, tensors, count)
        return head + arch + b"".join(pairs)

    for key in ("block_count", "expert_count", "head_count", "vocab_size"):
        for value in (4_000_000_000, 1 << 20):
            name = f"{key} {value}"
            yield "gguf", name, gguf([number(f"llama.{key}", value)])
    yield "gguf", "2**60 pairs", gguf([], count=1 << 60)
    yield "gguf", "2**60 tensors", gguf([], tensors=1 << 60)
    long = text("x") + struct.pack("<I", 8) + struct.pack("<Q", 1 << 60)
    yield "gguf", "a string of 2**60", gguf([long])
    for kind in (4, 8, 9):
        array = text("x") + struct.pack("<IIQ", 9, kind, 1 << 60)
        yield "gguf", f"an array of 2**60 of {kind}", gguf([array])
    nested = text("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    yield "gguf", "arrays in arrays", gguf([nested])

    for depth in (200, 100_000):
        body = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
        name = f"header of {depth} lists"
        yield "safetensors", name, struct.pack("<Q", len(body)) + body
    number = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}'
    for digits in (20, 5_000):
        body = number % (b"9" * digits)
        data = struct.pack("<Q", len(body)) + body + bytes(4)
        yield "safetensors", f"a side of {digits} digits", data
    body = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % b",".join(
        [b"0"] * 1_000_000
    )
    data = struct.pack("<Q", len(body)) + body
    yield "safetensors", "a million sides", data
    many = ",".join(
        f'"t{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        for n in range(500_000)
    )
    body = f"{{{many}}}".encode()
    data = struct.pack("<Q", len(body)) + body
    yield "safetensors", "half a million tensors", data


def _nodes():
    """Nodes that are no files, and files that are huge holes."""
    for kind in READS:
        yield kind, "a FIFO", os.mkfifo
        yield kind, "a folder", os.mkdir
        yield kind, "a link to itself", lambda path: Path(path).symlink_to(path)
        yield (
            kind,
            "a link to /dev/zero",
            lambda path: Path(path).symlink_to("/dev/zero"),
        )
        yield kind, "8 GB of nothing", _hole


def _hole(path):
    with Path(path).open("wb") as file:
        file.truncate(8 << 30)


def attacks():
    """(name, kind, content or what makes the node, words) of every bomb."""
    made = itertools.chain(_nodes(), _texts(), _tables(), _arrays(), _headers())
    for kind, name, content in made:
        for words in READS[kind]:
            yield f"{kind}: {name}: {words}", kind, content, words


def judge(kind, content, words, work):
    """Run one command on one bomb; what is wrong with its end, or nothing."""
    folder = work / "bomb"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / NAMES[kind]
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    words = [
        word.replace("FILE", str(path)).replace("FOLDER", str(folder))
        for word in words.split()
    ]
    process = forked(words, folder, before=_bounded)
    _, status, used = os.wait4(process, 0)
    code = os.waitstatus_to_exitcode(status)
    out, err = (
        Path(f"{folder}.{name}").read_text(errors="replace")
        for name in ("stdout", "stderr")
    )
    faults = []
    if code not in (0, 2):
        faults.append(f"exit code {code}")
    if "Traceback" in err:
        faults.append(f"traceback {err.strip().splitlines()[-1][:200]}")
    if used.ru_maxrss * 1024 > MOST_BYTES:
        faults.append(f"{used.ru_maxrss >> 10} MiB")
    if used.ru_utime + used.ru_stime > MOST_SECONDS:
        faults.append(f"{used.ru_utime + used.ru_stime:.0f} s")
    if len(out) + len(err) > LONGEST_ANSWER:
        faults.append(f"{len(out) + len(err):,} letters")
    longest = max(map(len, err.splitlines()), default=0)
    if longest > LONGEST_LINE:
        faults.append(f"a line of {longest} letters")
    if code == 2 and "error" not in err.lower():
        faults.append("no error line")
    return ", ".join(faults), code


def _bounded():
    """Ends a process that takes far too much, for the machine's sake."""
    resource.setrlimit(resource.RLIMIT_DATA, (5 << 30, 5 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    import signal

    # A command that waits for somebody to write is ended, too.
    signal.alarm(60)


def run_suite(count, seed=0, only=None):
    """Run `count` bombs, drawn from all of them."""
    report = Report("bombs")
    names = [name for name, *_ in attacks() if only is None or only in name]
    drawn = set(random.Random(seed).sample(names, min(count, len(names))))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        warm_up(work)
        # Made one by one: all together they would fill the memory of every fork.
        for name, kind, content, words in attacks():
            if report.is_over:
                break
            if name not in drawn:
                continue
            fault, code = judge(kind, content, words, work)
            report.count(kind, "fell" if fault else f"exit code {code}")
            if fault:
                report.fail(f"{name}: {fault}")
    return report
