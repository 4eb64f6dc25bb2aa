"""How fast foreign files become traces: rows per CPU second by layout, written as their engines write them."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests import foreign_files as files
from traces.importers import import_trace
from traces.models import model_shape

LAYERS, EXPERTS, TOP_K = 24, 64, 8
SHAPE = f"layers={LAYERS},experts={EXPERTS},top_k={TOP_K},expert_bytes=1MiB"
TOKENS = 4000
LAYOUTS = {
    "sglang, per token": (files.sglang_per_token, {}),
    "vllm, npz": (files.vllm_npz, {}),
    "hugging face, safetensors": (files.hf_safetensors, {}),
    "our layout, unordered": (files.moesim_unordered, {}),
    "routing rows, parquet": (files.routing_rows, {}),
    "megatron, jsonl": (files.megatron, {}),
    "llama.cpp, csv": (files.llama_cpp, {}),
    "route trace, csv": (lambda path, truth: files.route_trace(path, truth, dense=False), {}),
    "jsonl by token": (files.per_token, {}),
    "jsonl by token and layer": (files.lattice, {}),
    "jsonl lists": (files.imp, {}),
    "columns, csv": (files.columns_csv, {"map": "seq=request,pos=position,phase=stage,layer=block,experts=e*"}),
}


def report(tokens: int = TOKENS) -> None:
    """Print a line per layout."""
    plain = {name: getattr(files, name) for name in ("LAYERS", "EXPERTS", "TOP_K", "PHYSICAL", "SHAPE", "physical")}
    files.LAYERS, files.EXPERTS, files.TOP_K, files.SHAPE = LAYERS, EXPERTS, TOP_K, SHAPE
    files.physical = lambda ids, copy=0: ids  # noqa: ARG005 - as many physical as logical experts
    files.PHYSICAL = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    print(
        f"imports of {LAYERS} x {EXPERTS} top {TOP_K}, {tokens * LAYERS:,} rows; million rows per CPU second (target 1)"
    )
    truth = files.routing(((tokens // 8, tokens - tokens // 8),), layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, (write, options) in LAYOUTS.items():
                source = write(Path(folder) / "dump.npz", truth)
                print(f"  {name:<26} {_rate(source, options):5.2f}, {source.stat().st_size / 1e6:4.0f} MB")
                source.unlink()
    finally:
        for name, value in plain.items():
            setattr(files, name, value)


def _rate(source: Path, options: dict[str, str]) -> float:
    """Million rows per CPU second, the middle of three."""
    taken = []
    for _ in range(3):
        begin_s = time.process_time()
        done = import_trace(source, source.with_name("out.parquet"), shape=model_shape(SHAPE), options=options)
        taken.append(done.rows / (time.process_time() - begin_s) / 1e6)
    return float(np.median(taken))


if __name__ == "__main__":
    report(int(float(sys.argv[1])) if len(sys.argv) > 1 else TOKENS)
