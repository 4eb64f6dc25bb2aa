"""Fits and saves the synthetic statistics that ship, from traces beside this checkout,
and how often a cache of experts hits on routing drawn from them, which `advise` reads:
``python -m benchmarks.ship_statistics``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from benchmarks.replay_speed import SHARED
from moesim.advice.plan.what_if import CACHE_POLICY, replayed_hits
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.fit import fit
from moesim.traces.synthetic.generate import synthesise
from moesim.traces.synthetic.saved import SUFFIX, model_like, save, shipped_statistics

DATA = Path(__file__).parents[1] / "traces" / "data"
HITS = Path(__file__).parents[1] / "moesim" / "advice" / "data" / "cache_hits.yaml"
# Shares of every layer's experts that the cache holds.
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
DRAWN_TOKENS = 192
FOREIGN = {
    "qwen3-30b-a3b": "qwen3_30b_a3b_top6",
    "olmoe-1b-7b": "olmoe_1b_7b_decode299",
    "gpt-oss-20b": "gpt_oss_20b",
    "kimi-linear-48b-a3b": "kimi_linear_48b_a3b_decode300",
    "qwen3.6-35b-a3b": "qwen36_35b_a3b_coding_prefill28_decode192",
    "qwen3.8-flash-next": "qwen38_flash_next_chat_decode67",
}
"""Models whose routing was recorded by other people, in a layout of their own."""
OURS = {
    "mixtral-8x7b": "mixtral_8x7b_like",
    "deepseek-v2-lite": "deepseek_v2_lite_like",
}
"""Models of which only synthetic traces are there."""


def source_of(name: str, folder: Path) -> Path:
    """The moesim trace that the statistics of that name are fitted to."""
    if name in OURS:
        return SHARED / f"{OURS[name]}.parquet"
    target = folder / f"{FOREIGN[name]}.parquet"
    source = SHARED / f"{FOREIGN[name]}.parquet"
    return import_trace(source, target, shape=model_shape(name)).path


def hits_of(name: str, folder: Path) -> dict[str, object]:
    """How many tokens some statistics are of, and the hit rate at every ratio."""
    statistics = model_like(name)
    trace = folder / f"{name}.drawn.parquet"
    synthesise(statistics, trace, tokens=DRAWN_TOKENS)
    return {
        "tokens": int(statistics.provenance["fitted_tokens"]),
        "hits": [round(replayed_hits(trace, ratio), 3) for ratio in RATIOS],
    }


def write_hits(folder: Path) -> None:
    """Write what `advise` reads."""
    written = {
        "source": "python -m benchmarks.ship_statistics",
        "policy": CACHE_POLICY,
        "ratios": list(RATIOS),
        "models": {name: hits_of(name, folder) for name in shipped_statistics()},
    }
    words = yaml.safe_dump(written, sort_keys=False, width=150, default_flow_style=None)
    HITS.write_text(words, encoding="utf-8")


def main() -> None:
    """Write all of them into ``traces/data``, and the hits beside ``advise``."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (*FOREIGN, *OURS):
            path = save(
                fit(open_trace(source_of(name, Path(folder)))), DATA / f"{name}{SUFFIX}"
            )
            print(f"{path.name}: {path.stat().st_size:,} bytes")
        write_hits(Path(folder))


if __name__ == "__main__":
    main()
