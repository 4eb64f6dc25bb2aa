"""The page of a trace, its tables, and the verdict."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.handmade import hand_trace
from support.small_trace import write_trace

import moesim
from moesim import cli
from moesim.questions.trace_stats import stats_answer, stats_figures
from moesim.traces.format.reader import open_trace
from moesim.traces.stats.trace_summary import knee, summarise_trace


def routed(path, choose, *, tokens=200, experts=64):
    """One layer of decode whose token t uses ``choose(t)``."""
    return hand_trace(
        path,
        [[choose(t)] for t in range(tokens)],
        experts=experts,
        expert_bytes=1 << 20,
    )


def test_knee_by_hand():
    """Above the diagonal 0, 1/4, 1/2, 3/4, 1 by 0, 0.35, 0.4, 0.2, 0."""
    assert knee(np.array([0.0, 0.6, 0.9, 0.95, 1.0])) == 2


def test_faithful_routing_is_worth_it(tmp_path):
    """Four experts do everything: 4 slots, 4 MiB, all but two first uses of each pair
    hit.
    """
    found = summarise_trace(
        routed(tmp_path / "t.parquet", lambda t: (0, 1) if t % 2 else (2, 3))
    ).figures["verdict"]
    assert found["answer"] == "yes"
    assert found["sizes"][0] == {
        "at": "knee",
        "slots": 4,
        "bytes": 4 << 20,
        "lru": 396 / 400,
        "belady": 396 / 400,
        "copied_bytes_per_step": pytest.approx(0.01 * 2 * (1 << 20)),
    }


def test_even_routing_and_dense_routing_are_not(tmp_path):
    circle = routed(tmp_path / "c.parquet", lambda t: (2 * t % 64, (2 * t + 1) % 64))
    assert summarise_trace(circle).figures["verdict"]["answer"] == "no"
    dense = summarise_trace(
        routed(tmp_path / "d.parquet", lambda t: (0, 1), experts=4)
    ).figures["verdict"]
    assert dense["answer"] == "no"
    assert "Too dense" in dense["why"][-1]


def test_a_prompt_alone_gives_no_verdict_but_a_page(make_trace, tmp_path):
    trace = open_trace(make_trace(sequences=((9, 0),)))
    found = summarise_trace(trace)
    assert found.figures["verdict"]["answer"] == "unknown"
    assert (
        "No verdict"
        in stats_answer(trace, found).write(tmp_path / "p.html").read_text()
    )
    assert "curves" not in stats_figures(found)


def test_page_is_whole_and_needs_nothing_else(make_trace, tmp_path):
    trace = open_trace(
        make_trace("<b>.parquet", sequences=((6, 300),), columns=("pred1_raw",))
    )
    text = moesim.answer(trace).write(tmp_path / "p.html").read_text()
    assert text.count('class="chart wide"') == 9
    for label in re.findall('aria-label="(.*)"', text):
        assert label.count("dashed") <= 1
    assert "<b>.parquet" not in text
    prose = re.sub("<script.*?</script>", "", text, flags=re.DOTALL)
    for foreign in ("src=", "<link", "@import"):
        assert foreign not in prose
    HTMLParser().feed(text)


def test_command_writes_page_and_tables(tmp_path, tiny_shape, capsys):
    path = write_trace(tmp_path / "t.parquet", tiny_shape, ((4, 40),))
    line = f"trace stats {path} --html {tmp_path}/p.html --out {tmp_path}/o --json"
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert not end.value.code
    figures = json.loads(capsys.readouterr().out)
    assert figures["verdict"]["answer"] in ("yes", "hardly", "no")
    assert (tmp_path / "p.html").stat().st_size > 10_000
    layers = pq.read_table(tmp_path / "o" / "layers.parquet")
    assert layers.column("entropy_bits").to_pylist() == figures["entropy_bits"]
    table = pq.read_table(tmp_path / "o" / "curves.parquet").to_pandas()
    decode = table[(table.phase == "decode") & (table.slots == 4)]
    assert decode.belady.sum() / decode.accesses.sum() == pytest.approx(
        figures["curve_decode"]["belady"][4]
    )
    assert json.loads(layers.schema.metadata[b"statistics"])["decode_tokens"] == 40
