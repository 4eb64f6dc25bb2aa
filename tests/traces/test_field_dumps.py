"""Routing as engines wrote it in autumn 2026, each file with its right reading."""

import json

import numpy as np
import pytest
from support.foreign_files import write_lines
from support.imports import bring, refused

from moesim.traces.exporters import export_trace
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.stats.quality_checks import ALIKE_TOKENS, check_quality

READINGS = {
    # file -> (layers, experts, top-k, importer, (prompt, generated) of each sequence)
    "moetrace_perf_join_qwen36_merged_excerpt.csv": (
        2, 256, 8, "llama_moe_trace", [(3, 0)]),
    "moetrace_perf_qwen38-flash-next_chat_excerpt_layers43-47.csv": (
        5, 512, 10, "llama_moe_trace", [(3, 4)]),
    "moetrace_upstream_two_files_joined_with_headers_schema_sample.csv": (
        4, 8, 2, "llama_cpp", [(5, 3), (5, 3)]),
    "moetrace_fork_phase-token-layer-rank-expert_schema_sample.csv": (
        4, 8, 2, "columns", [(5, 3)]),
    "moetrace_lab_binary_schema_sample.bin": (
        4, 8, 2, "pass_records", [(5, 0), (1, 0), (1, 0), (1, 0)]),
    "layer_id-expert_ids_schema_sample.csv": (
        2, 128, 4, "llama_cpp", [(2, 1)]),
    "playbook_schema_sample.jsonl": (2, 512, 4, "jsonl", [(1, 1)]),
    "batched_layer_jsonl_schema_sample.jsonl": (2, 8, 2, "jsonl", [(0, 2), (0, 1)]),
    "glm52_export_v2_schema_sample.json": (
        2, 256, 8, "json_export", [(2, 2), (2, 1)]),
    "switch-base-8_router-trace.v2.json": (6, 8, 1, "json_export", [(0, 215)]),
    "vllm_olmoe_moe_routes_first3000.jsonl": (1, 64, 8, "jsonl", [(0, 3000)]),
}  # fmt: skip


@pytest.fixture
def brought(shared_traces, tmp_path):
    """Import one of the dumps."""

    def bring_dump(name, **options):
        layers, experts, top_k, *_ = READINGS[name]
        words = f"layers={layers},experts={experts},top_k={top_k},expert_bytes=1KiB"
        source = shared_traces.parent / "field" / "dumps" / name
        if not source.is_file():
            pytest.skip(f"other people's data, no part of the project: no {source}")
        out = tmp_path / "out.parquet"
        summary = import_trace(source, out, shape=model_shape(words), **options)
        return summary, open_trace(out)

    return bring_dump


@pytest.mark.parametrize("name", READINGS)
def test_a_dump_reads_as_its_engine_meant_it(brought, name):
    *_, importer, lengths = READINGS[name]
    summary, trace = brought(name)
    assert summary.importer == importer
    found = []
    for rows in trace.sequences():
        prompt = np.unique(rows.pos[rows.phase == Phase.PREFILL])
        generated = np.unique(rows.pos[rows.phase == Phase.DECODE])
        assert [*prompt, *generated] == list(range(len(prompt) + len(generated)))
        found.append((len(prompt), len(generated)))
    assert found == lengths


def test_the_last_layer_of_a_prompt_is_unknown_where_the_engine_left_it_out(brought):
    """`pos` -1 alone at layer 47; ids by rank, as the file's lines have them."""
    name = "moetrace_perf_qwen38-flash-next_chat_excerpt_layers43-47.csv"
    (rows,) = brought(name)[1].sequences()
    assert rows.pos[rows.layer == 4].tolist() == [2, 3, 4, 5, 6]
    at_end = rows.experts[(rows.pos == 3) & (rows.layer == 4)][0]
    assert at_end.tolist() == [95, 451, 85, 142, 157, 424, 204, 82, 472, 361]


def test_rows_belong_to_the_prompts_that_claim_them(brought):
    _, trace = brought("glm52_export_v2_schema_sample.json")
    first, second = trace.sequences()
    assert first.experts[-1].tolist() == [254, 242, 58, 12, 159, 197, 175, 215]
    assert second.experts[1].tolist() == [96, 132, 55, 129, 107, 221, 10, 115]
    # What experts were selected by is no weight.
    assert not trace.columns


def test_rows_of_a_batch_keep_ids_and_weights(brought):
    _, trace = brought("batched_layer_jsonl_schema_sample.jsonl")
    first, second = trace.sequences(("weights",))
    assert first.experts.tolist() == [[1, 5], [3, 2], [2, 5], [0, 4]]
    assert second.experts.tolist() == [[7, 0], [6, 1]]
    assert first.columns["weights"][2] == pytest.approx([0.7, 0.3], abs=1e-3)


def test_a_profiling_run_is_found_and_left_out_on_request(brought):
    name = "vllm_olmoe_moe_routes_first3000.jsonl"
    summary, trace = brought(name)
    assert "2,048 tokens in a row have the same experts" in summary.notes[-1]
    grave = [finding.kind for finding in check_quality(trace) if finding.grave]
    assert grave == ["profiling"]

    summary, trace = brought(name, drop_profiling=True)
    (rows,) = trace.sequences()
    assert rows.pos.tolist() == list(range(3000 - 2048))
    assert rows.experts[0].tolist() == [45, 57, 46, 17, 42, 22, 29, 47]
    assert not [finding for finding in check_quality(trace) if finding.grave]


SHAPE = "layers=2,experts=8,top_k=2,expert_bytes=1KiB"


def rows_of(tokens, alike=0):
    """Lines of one sequence at two layers; the first `alike` tokens choose alike."""
    return [
        {"token_idx": token, "layer": layer, "topk_ids": ids}
        for token in range(tokens)
        for layer in range(2)
        for ids in [[0, 1] if token < alike else [token % 7, 7]]
    ]


@pytest.mark.parametrize("alike", [0, ALIKE_TOKENS - 1, ALIKE_TOKENS, 60])
def test_as_many_alike_tokens_as_no_routing_has_are_a_profiling_run(tmp_path, alike):
    source = write_lines(tmp_path / "dump", rows_of(60, alike))
    out = tmp_path / "out.parquet"
    shape = model_shape(SHAPE)
    if alike == 60:
        with pytest.raises(ValueError, match="found an empty trace"):
            import_trace(source, out, shape=shape, drop_profiling=True)
        return
    summary = import_trace(source, out, shape=shape, drop_profiling=True)
    left = 60 - (alike if alike >= ALIKE_TOKENS else 0)
    assert summary.rows == 2 * left
    assert next(open_trace(out).sequences()).pos[-1] == left - 1


def test_positions_that_restart_say_so(tmp_path):
    """Rows of passes numbered anew are no sequence; on request each pass is one."""
    source = write_lines(tmp_path / "dump", [*rows_of(5), *rows_of(3), *rows_of(1)])
    refused(source, "positions restart: .*--option restarts=passes", shape=SHAPE)
    summary, trace = bring(source, {"restarts": "passes"}, shape=SHAPE)
    assert summary.sequences == 3
    lengths = [rows.pos[-1] + 1 for rows in trace.sequences()]
    assert lengths == [5, 3, 1]


@pytest.mark.parametrize("gap", [False, True])
def test_captures_are_told_apart_wherever_one_ends(tmp_path, gap):
    """Generated alone, a prompt alone, both; a prompt that was cut off is refused."""
    whole = [(-2, 0), (-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
    captures = [whole[3:], whole[:3], whole, whole[3:]]
    if gap:
        captures.append([(-9, 0), (-8, 0), (-9, 1), (-8, 1)])
    lines = [f"{pos},{layer},1,5" for capture in captures for pos, layer in capture]
    source = write_lines(tmp_path / "dump", lines)
    if gap:
        refused(source, "sequence 4: prompt: expected positions up to -1", shape=SHAPE)
        return
    _, trace = bring(source, shape=SHAPE)
    assert [len(rows.pos) for rows in trace.sequences()] == [4, 3, 7, 4]


@pytest.mark.parametrize(
    "header",
    [
        "layer,expert",
        "seq,pos,layer,e0,e1",
        "token,layer,rank,expert",
        "pos,layer,e0,e1",
    ],
)
def test_joined_files_are_other_sequences_whatever_their_header(tmp_path, header):
    rows = {
        "layer,expert": ["0,1", "0,5", "1,2", "1,3"],
        "seq,pos,layer,e0,e1": ["7,0,0,1,5", "7,0,1,2,3"],
        "pos,layer,e0,e1": ["0,0,1,5", "0,1,2,3"],
        "token,layer,rank,expert": ["0,0,0,1", "0,0,1,5", "0,1,0,2", "0,1,1,3"],
    }[header]
    source = write_lines(tmp_path / "dump", [header, *rows] * 3)
    summary, trace = bring(source, shape=SHAPE)
    assert summary.sequences == 3
    for sequence in trace.sequences():
        assert sequence.experts.tolist() == [[1, 5], [2, 3]]


def test_the_profile_of_a_cache_brings_the_same_routing_back(shared_traces, tmp_path):
    """Dense layers are counted in it, as in the model's own file."""
    for name, model in (
        ("qwen36_35b_a3b_coding_prefill28_decode192", "qwen3.6-35b-a3b"),
        ("kimi_linear_48b_a3b_decode300", "kimi-linear-48b-a3b"),
    ):
        first, again = tmp_path / f"{name}.parquet", tmp_path / f"{name}-2.parquet"
        shape = model_shape(model)
        import_trace(shared_traces / f"{name}.parquet", first, shape=shape)
        profile = tmp_path / f"{name}.csv"
        export_trace(open_trace(first), profile, "moe-cache-profile")
        layer = int(profile.read_text().split(",", 2)[1])
        assert layer == (1 if "kimi" in name else 0)
        import_trace(profile, again, shape=shape)
        for one, other in zip(
            open_trace(first).sequences(), open_trace(again).sequences(), strict=True
        ):
            assert (one.phase == other.phase).all()
            assert (one.pos - one.pos[0] == other.pos).all()
            assert (one.layer == other.layer).all()
            assert (one.experts == other.experts).all()


def test_counts_of_slots_are_those_that_a_fork_was_run_with(shared_traces, tmp_path):
    """Qwen3.6-35B-A3B Q4_K_M: 112 slots of 25 and 15 layers took 5,042.62 and 3,094.88
    MiB on two cards that share layers 10 to 7.
    """
    out = tmp_path / "q.parquet"
    import_trace(
        shared_traces / "qwen36_35b_a3b_coding_prefill28_decode192.parquet",
        out,
        shape=model_shape("qwen3.6-35b-a3b", "q4_k_m"),
    )
    said = []
    export_trace(
        open_trace(out),
        tmp_path / "slots.csv",
        "moe-cache-slots",
        cache_size="5043MiB,3095MiB",
        tensor_split="10,7",
        tell=said.append,
    )
    assert said[0].startswith(
        ("--moe-cache-slots 111,112:", "--moe-cache-slots 112,112:")
    )
    rows = np.genfromtxt(tmp_path / "slots.csv", delimiter=",", skip_header=1)
    assert rows[:, 1].tolist() == [0] * 25 + [1] * 15
    # More to the layers that are used unevenly gives more for the same memory.
    assert rows[:, 5].mean() > rows[:, 3].mean() > 0.7


def test_what_slots_should_give_is_counted_on_other_tokens(tmp_path):
    """Uses by hand: experts 0 and 1 in the first half, 2 and 3 in the second; what was
    used most in one is never used in the other.
    """
    lines = [
        {"pos": token, "layer": 0, "experts": [0, 1] if token < 10 else [2, 3]}
        for token in range(20)
    ]
    source = write_lines(tmp_path / "dump", lines)
    shape = "layers=1,experts=8,top_k=2,expert_bytes=1KiB"
    _, trace = bring(source, shape=shape)
    said = []
    for size, covered in (("2KiB", 0.0), ("8KiB", 1.0)):
        target = tmp_path / "slots.csv"
        export_trace(
            trace,
            target,
            "moe-cache-slots",
            cache_size=size,
            tell=said.append,
        )
        assert float(target.read_text().splitlines()[1].split(",")[3]) == covered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected --cache-size"),
        ({"cache_size": "many"}, "--cache-size"),
        ({"cache_size": "1KiB"}, "an expert of each of its 2 layers"),
        ({"cache_size": "9KiB", "tensor_split": "1,1"}, "expected 1 numbers"),
        ({"cache_size": "9KiB", "n_cpu_moe": 0}, "expected MoE layers, found none"),
    ],
)
def test_slots_without_room_are_refused(tmp_path, options, message):
    source = write_lines(tmp_path / "dump", rows_of(3))
    _, trace = bring(source, shape=SHAPE)
    with pytest.raises(ValueError, match=message):
        export_trace(trace, tmp_path / "s.csv", "moe-cache-slots", **options)
    assert not (tmp_path / "s.csv").exists()


def test_a_batch_of_tokens_is_one_sequence_where_each_origin_has_one_row(tmp_path):
    lines = [
        {
            "layer": layer,
            "origin_rows": [2, 0, 1],
            "topk_experts": [[5, 1], [6, 2], [7, 3]],
        }
        for layer in range(2)
    ]
    source = write_lines(tmp_path / "dump", [json.dumps(line) for line in lines])
    _, trace = bring(source, shape=SHAPE)
    (rows,) = trace.sequences()
    assert rows.experts[::2].tolist() == [[6, 2], [7, 3], [5, 1]]
