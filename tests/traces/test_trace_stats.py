"""Characteristics of routing, against counts done by hand and against an LRU list."""

import numpy as np
import pytest
from support.handmade import hand_trace

from moesim.traces.format.reader import open_trace
from moesim.traces.stats.statistics import info
from moesim.traces.stats.trace_summary import summarise_trace


def figures_of(folder, routing):
    """Of one layer of eight experts, decode only: `routing` lists those of each token."""
    trace = hand_trace(
        folder / "t.parquet", [[chosen] for chosen in routing], experts=8
    )
    return summarise_trace(trace).figures


def test_by_hand(tmp_path):
    """Tokens {0,1} {1,2} {1,0} {0,1}: loads 3, 4, 1; overlaps 1/2, 1/2, 2/2."""
    figures = figures_of(tmp_path, [[0, 1], [1, 2], [1, 0], [0, 1]])
    assert figures["active"] == [2.0]
    assert figures["overlap"] == [pytest.approx(2 / 3)]
    assert figures["overlap_chance"] == 2 / 8
    assert figures["max_share"] == [4 / 8]
    assert figures["entropy_bits"] == [
        pytest.approx(
            -(3 / 8 * np.log2(3 / 8) + 0.5 * np.log2(0.5) + np.log2(1 / 8) / 8)
        )
    ]
    assert figures["touched"] == [3]
    assert figures["active_prefill"] is figures["working_set"] is None


def test_one_token_of_one_expert_is_all_of_the_load(tmp_path):
    figures = figures_of(tmp_path, [[5]])
    assert (figures["max_share"], figures["entropy_bits"]) == ([1.0], [0.0])


def test_even_loads_have_all_the_bits(tmp_path):
    figures = figures_of(tmp_path, [[i % 8] for i in range(64)])
    assert figures["entropy_bits"] == [pytest.approx(3.0)]
    assert figures["overlap"] == [0.0]
    assert figures["working_set"] == [8.0]


def test_cyclic_access_gives_lru_no_hit_below_capacity(tmp_path):
    """Four experts in a circle through an LRU cache of two slots."""
    figures = figures_of(tmp_path, [[i % 4] for i in range(40)])
    assert figures["lru"] == {
        0.125: [0.0],
        0.25: [0.0],
        0.5: [36 / 40],
        0.75: [36 / 40],
    }
    assert figures["reuse"] == [0, 0, 0, 36, 0, 0, 0, 0, 4]


def test_info_counts_tokens_not_rows(make_trace):
    told = info(
        open_trace(
            make_trace(sequences=((4, 2), (0, 3)), columns=("weights",), ragged=True)
        )
    )
    assert (told["sequences"], told["prefill_tokens"], told["decode_tokens"]) == (
        2,
        4,
        5,
    )
    assert told["columns"] == ["weights"]
    assert told["rows"] == 9 * 3 - 3
