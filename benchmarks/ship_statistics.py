"""Fits and saves the synthetic statistics that ship, from traces beside this checkout:
``python -m benchmarks.ship_statistics``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.replay_speed import SHARED
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.fit import fit
from moesim.traces.synthetic.saved import SUFFIX, save

DATA = Path(__file__).parents[1] / "traces" / "data"
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


def main() -> None:
    """Write all of them into ``traces/data``."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (*FOREIGN, *OURS):
            path = save(
                fit(open_trace(source_of(name, Path(folder)))), DATA / f"{name}{SUFFIX}"
            )
            print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
