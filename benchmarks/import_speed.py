"""How fast foreign files become traces, written as their engines write them, and how
much memory large ones take.

``python -m benchmarks.import_speed [TOKENS [LARGE_ROWS]]``; 64 tokens or more, no large
files with 0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv, json

from benchmarks.cpu_seconds import cpu_seconds
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from tests.support import foreign_files as files

LAYERS = 24
EXPERTS = 64
TOP_K = 8
SHAPE = f"layers={LAYERS},experts={EXPERTS},top_k={TOP_K},expert_bytes=1MiB"
TOKENS = 6000
COLUMNS_MAP = "seq=request,pos=position,phase=stage,layer=block,experts=e*"
MILLION = 1e6

PHYSICAL = np.tile(np.arange(EXPERTS), (LAYERS, 1))
"""Logical expert of each physical one, of which there are as many."""

# Layout -> what writes such a file, and the options of its import.
LAYOUTS = {
    "sglang, one token a pass": (partial(files.sglang_per_token, table=PHYSICAL), {}),
    "sglang, 64 requests": (
        lambda path, truth: _large_sglang(path, len(truth[0][1]) * LAYERS),
        {},
    ),
    "vllm, npz": (files.vllm_npz, {}),
    "hugging face, safetensors": (files.hf_safetensors, {}),
    "our layout, unordered": (partial(files.moesim_unordered, shape=SHAPE), {}),
    "routing rows, parquet": (files.routing_rows, {}),
    "megatron, jsonl": (files.megatron, {}),
    "llama.cpp, csv": (files.llama_cpp, {}),
    "route trace, csv": (partial(files.route_trace, dense=False), {}),
    "jsonl by token": (files.per_token, {}),
    "jsonl by token and layer": (files.lattice, {}),
    "jsonl lists": (files.imp, {}),
    "columns, csv": (files.columns_csv, {"map": COLUMNS_MAP}),
}

LARGE_ROWS = 2_000_000
_CHILD = """
import sys
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
import_trace(sys.argv[1], sys.argv[2], shape=model_shape(sys.argv[3]))
with open("/proc/self/status") as status:
    high = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    print(int(high) / 1024)
"""


def report(tokens: int = TOKENS, large_rows: int = LARGE_ROWS) -> None:
    """Print a line per layout: its rate, beside a library's for the same bytes; and
    what large files need.
    """
    with tempfile.TemporaryDirectory() as folder:
        _report_rates(Path(folder), tokens)
        if large_rows:
            _report_memory(Path(folder), large_rows)


def _report_rates(folder: Path, tokens: int) -> None:
    print(
        f"imports of {LAYERS} x {EXPERTS} top {TOP_K}, some {tokens * LAYERS:,} rows;"
        " million rows per CPU second"
    )
    print(
        "(target 1); beside it the same bytes parsed by a library, their meaning left"
        " aside"
    )
    prompt = tokens // 8
    truth = files.routing(
        ((prompt, tokens - prompt),),
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
    )

    for name, (write, options) in LAYOUTS.items():
        source = write(folder / "dump.npz", truth)
        imported = partial(
            import_trace,
            source,
            source.with_name("out"),
            shape=model_shape(SHAPE),
            options=options,
        )
        # The first import compiles, or loads, what it needs.
        rows = imported().rows
        rate = rows / cpu_seconds(imported) / MILLION
        parsed = rows / cpu_seconds(partial(_parse, source)) / MILLION
        size = source.stat().st_size / MILLION
        print(
            f"  {name:<26} {rate:5.2f}, parsed alone {parsed:6.2f}, {size:4.0f} MB",
            flush=True,
        )
        source.unlink()


def _report_memory(folder: Path, rows: int) -> None:
    print(f"peak memory of {rows:,} rows, each in a process of its own (target: 1 GB)")
    for name, write in LARGE.items():
        source = write(folder / "dump.npz", rows)
        out = source.with_name("out")
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(source), str(out), SHAPE],
            capture_output=True,
            text=True,
            check=True,
        )
        size = source.stat().st_size / 2**20
        print(
            f"  {name:<26} {float(done.stdout):5.0f} MiB of {size:5.0f} MiB", flush=True
        )
        source.unlink()


def _parse(path: Path) -> None:
    """Read all values of a file with pyarrow, numpy or torch, and nothing else."""
    start = path.read_bytes()[:8]
    if start.startswith(b"PAR1"):
        pq.ParquetFile(path, pre_buffer=False).read(use_threads=False)
    elif start.startswith(b"PK"):
        _parse_zip(path)
    elif start[:1] in (b"{", b"["):
        _parse_json(path.read_bytes())
    elif start[8:9] == b"{" or not start[:1].isascii() or b"\0" in start:
        header_bytes = int.from_bytes(start, "little")
        np.fromfile(path, np.float32, offset=8 + header_bytes).sum()
    else:
        _parse_csv(path.read_bytes())


def _parse_zip(path: Path) -> None:
    try:
        with np.load(path) as arrays:
            deque((arrays[name] for name in arrays), maxlen=0)
    except ValueError:
        import torch

        torch.load(path, weights_only=True)


def _parse_json(data: bytes) -> None:
    # Arrow reads objects only.
    _, _, rest = data.partition(b"\n")
    if rest.startswith(b"["):
        data = b'{"row":' + rest.strip().replace(b"\n", b'}\n{"row":') + b"}"

    json.read_json(
        pa.BufferReader(data),
        read_options=json.ReadOptions(use_threads=False, block_size=8 << 20),
    )


def _parse_csv(data: bytes) -> None:
    at = 0
    while data.startswith(b"#", at):
        at = data.index(b"\n", at) + 1

    delimiter = ";" if b";" in data[at : at + 256] else ","
    csv.read_csv(
        pa.BufferReader(pa.py_buffer(data).slice(at)),
        read_options=csv.ReadOptions(use_threads=False, block_size=8 << 20),
        parse_options=csv.ParseOptions(delimiter=delimiter),
    )


# -- large files -----------------------------------------------------------------------


def _routing(rows: int, requests: int = 1) -> np.ndarray:
    """Ids [T, L, K] of rows / L tokens, drawn from a pool."""
    rng = np.random.default_rng(0)
    pool = np.argsort(rng.random((4096, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    tokens = rows // LAYERS // requests * requests
    # Knuth's multiplicative hash: much faster than drawing millions of numbers.
    drawn = np.arange(tokens * LAYERS) * 2_654_435_761 % (1 << 32) % len(pool)
    return pool[drawn].reshape(tokens, LAYERS, TOP_K)


def _large_route_trace(path: Path, rows: int) -> Path:
    """One session of 500 tokens after the other."""
    truth = files.routing(((100, 500),), layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    small = files.route_trace(path, truth, dense=False)
    lines = small.read_bytes().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line[:1].isdigit())
    body = b"".join(lines[first:])

    with path.open("wb") as file:
        file.writelines(lines[:first])
        for turn in range(-(-rows // (500 * LAYERS))):
            file.write(b"%d," % turn + body[2:].replace(b"\n0,", b"\n%d," % turn))
    return path


def _large_jsonl(path: Path, rows: int) -> Path:
    """One sequence of tokens, a line per token and layer."""
    truth = files.routing(((0, 500),), layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    lines = files.lattice(path, truth).read_bytes().splitlines(keepends=True)

    with path.open("wb") as file:
        for part in range(-(-rows // len(lines))):
            for number, line in enumerate(lines):
                token = part * 500 + number // LAYERS
                head, _, tail = line.partition(b'"token_idx": ')
                tail = tail[tail.index(b",") :]
                file.write(head + b'"token_idx": %d' % token + tail)
    return path


def _large_sglang(path: Path, rows: int) -> Path:
    """64 requests that generate side by side."""
    ids = _routing(rows, 64).reshape(-1, 64, LAYERS, TOP_K)
    token = np.full(len(ids), 7)
    truth = [files.Sequence(0, ids[:, n], token=token) for n in range(64)]
    passes = [(2, [(n, step, step + 1) for n in range(64)]) for step in range(len(ids))]
    return files.sglang_per_token(path, truth, passes, table=PHYSICAL)


def _large_vllm(path: Path, rows: int) -> Path:
    np.savez(path, routed_experts=_routing(rows))
    return path


def _large_logits(path: Path, rows: int) -> Path:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(rows // LAYERS, EXPERTS)).astype(np.float32)
    np.savez(path, **{f"layer.{layer}": logits for layer in range(LAYERS)})
    return path


LARGE = {
    "route trace, csv": _large_route_trace,
    "jsonl by token and layer": _large_jsonl,
    "sglang, 64 requests": _large_sglang,
    "vllm, npz": _large_vllm,
    "hugging face, npz": _large_logits,
}


if __name__ == "__main__":
    report(*(int(float(argument)) for argument in sys.argv[1:3]))
