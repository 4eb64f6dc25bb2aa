"""What is particular to single foreign layouts: what they leave out, and what must not
be guessed.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import foreign_files as files
from support.imports import bring, refused

from moesim.traces.format.schema import Phase

# -- vLLM ------------------------------------------------------------------------------


def test_vllm_base64_arrays(tmp_path):
    truth = files.routing()
    _, trace = bring(files.vllm_json(tmp_path / "dump", truth, encoded=True))
    for rows, (_, ids, *_) in zip(trace.sequences(), truth, strict=True):
        assert (rows.experts == ids[rows.pos, rows.layer]).all()
        # The row of zeros behind the last token is gone.
        assert len(rows.pos) == len(ids) * 3


def test_vllm_prompt_served_from_the_prefix_cache_is_refused(tmp_path):
    prompt, ids, *rest = files.routing()[0]
    ids = ids.copy()
    ids[:2] = 0
    source = files.vllm_npz(tmp_path / "dump.npz", [(prompt, ids, *rest)])
    refused(
        source,
        "token 0: expected distinct experts, found 0 at every layer; .*record with"
        " --no-enable-prefix-caching",
    )


def test_vllm_without_the_flag_says_which(tmp_path):
    (tmp_path / "dump").write_text(
        json.dumps(
            {"prompt_routed_experts": None, "choices": [{"routed_experts": None}]}
        )
    )
    refused(
        tmp_path / "dump", "found neither; serve with --enable-return-routed-experts"
    )


def test_vllm_object_arrays_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "dump.npz", routed_experts=np.array([{}], dtype=object))
    refused(tmp_path / "dump.npz", "Object arrays cannot be loaded")


def test_vllm_one_array_is_parted_by_its_token_ids(tmp_path):
    prompt, ids, *_ = files.routing()[0]
    tokens = {
        "prompt_token_ids": list(range(prompt)),
        "token_ids": list(range(len(ids) - prompt + 1)),
    }
    (tmp_path / "dump").write_text(
        json.dumps({"routed_experts": ids.tolist(), **tokens})
    )
    _, trace = bring(tmp_path / "dump")
    (rows,) = trace.sequences()
    assert (rows.phase == Phase.PREFILL).sum() == prompt * 3


# -- Hugging Face router logits --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_hf_softmaxed_values_give_the_same_experts(tmp_path, dtype):
    """Some models hand out probabilities under the name of logits: same top-k, and no
    softmax twice.
    """
    truth = files.routing()
    for name, given in (("logits", False), ("probabilities", True)):
        arrays = files.hf_arrays(truth, probabilities=given)
        _, trace = bring(
            files.safetensors(tmp_path / name, arrays, dtype), {"batch": "2"}
        )
        assert trace.header.provenance["values"] == name
        for rows, one in zip(trace.sequences(("scores",)), truth, strict=True):
            scores = np.exp(one.logits)
            scores /= scores.sum(axis=2, keepdims=True)
            assert np.allclose(
                rows.columns["scores"],
                scores[rows.pos, rows.layer],
                atol=1e-2 if dtype == "BF16" else 1e-3,
            )
            if dtype == "F32":
                assert (rows.experts == one.ids[rows.pos, rows.layer]).all()


@pytest.mark.parametrize(
    "model", ["deepseek-v3", "kimi-linear-48b-a3b", "glm-4.5-air", "phi-3.5-moe"]
)
def test_hf_gates_whose_choice_is_not_the_top_k_are_refused(tmp_path, model):
    source = files.hf_safetensors(tmp_path / "dump", files.routing())
    refused(
        source,
        "groups, biases or another score decide its selection: record the gate's"
        " returned ids",
        shape=model,
    )


def test_hf_layers_are_in_the_order_of_their_numbers(tmp_path):
    """Twelve layers, written as layer.0, layer.1, layer.10, layer.11, layer.2, …"""
    truth = files.routing(((0, 4),), layers=12)
    arrays = {
        f"layer.{n}": np.ascontiguousarray(truth[0][3][:, n])
        for n in sorted(range(12), key=str)
    }
    _, trace = bring(
        files.safetensors(tmp_path / "dump", arrays),
        shape=files.SHAPE.replace("layers=3", "layers=12"),
    )
    (rows,) = trace.sequences()
    assert (rows.experts == truth[0][1][rows.pos, rows.layer]).all()


@pytest.mark.parametrize(("change", "message"), [
    (lambda a: a.update(x=np.zeros((3, 8), np.float32)),
     "shape .* as in the other layers"),
    (lambda a: a.update(x=np.zeros((20, 8), np.int32)),
     "floats .batch . seq, experts."),
    (lambda a: a.popitem(), "3 arrays as in custom, found 2"),
    (lambda a: a["router_logits.1"].__setitem__((4, 2), np.nan),
     "layer 1, row 4: expected finite numbers, found nan"),
])  # fmt: skip
def test_hf_arrays_that_do_not_fit(tmp_path, change, message):
    arrays = files.hf_arrays(files.routing())
    change(arrays)
    np.savez(tmp_path / "dump.npz", **arrays)
    refused(tmp_path / "dump.npz", message, {"batch": "2"})


# -- llama.cpp and Megatron ------------------------------------------------------------


def test_llama_cpp_prompts_in_chunks_are_one_prompt(tmp_path):
    """Micro-batches of 4 and 3 tokens, then two generated ones: seven prompt tokens,
    positions 0 to 8. With all tokens at all layers, two prompts would look the same.
    """
    ids = files.routing(((7, 2),))[0][1]
    chunks = [ids[:4], ids[4:7], ids[7:8], ids[8:9]]
    rows = [
        (layer, e)
        for chunk in chunks
        for layer in range(3)
        for e in chunk[:, layer].reshape(-1)
    ]
    (tmp_path / "dump").write_text(
        "layer,expert\n" + "".join(f"{layer},{expert}\n" for layer, expert in rows)
    )
    refused(tmp_path / "dump", "prompts that can be told apart")
    _, trace = bring(tmp_path / "dump", {"prompt_passes": "joined"})
    (found,) = trace.sequences()
    assert (found.experts == ids[found.pos, found.layer]).all()
    assert found.pos[found.phase == Phase.PREFILL].max() == 6
    _, trace = bring(tmp_path / "dump", {"prompt_passes": "apart"})
    assert [len(rows.pos) for rows in trace.sequences()] == [12, 15]


@pytest.mark.parametrize(("shape_top_k", "file_top_k"), [(1, 2), (2, 3), (1, 3)])
def test_llama_cpp_with_a_wrong_top_k_is_refused(tmp_path, shape_top_k, file_top_k):
    ids = files.routing(((4, 8),), top_k=file_top_k)
    shape = files.SHAPE.replace("top_k=2", f"top_k={shape_top_k}")
    refused(
        files.llama_cpp(tmp_path / "dump", ids),
        "is the shape's top-k right",
        shape=shape,
    )


@pytest.mark.parametrize(("text", "message"), [
    ("0,1\n0,2\n1,3\n",
     ("row 2, layer 1: expected whole tokens of 2 experts, found 1 rows; is"
      " the shape's top-k right")),
    ("0,1\n0,1\n1,3\n1,4\n2,0\n2,1\n",
     ("distinct experts of a token, found .1, 1.; a naive read of the"
      " ffn_moe_topk view")),
    ("0,1\nx,2\n0,3\n", "no importer knows this layout"),
    ("-1,1\n-1,2\n1,3\n1,4\n2,0\n2,1\n", "row 0: layer: expected a whole number from 0, found -1"),
])  # fmt: skip
def test_llama_cpp_rows_that_are_no_tokens(tmp_path, text, message):
    (tmp_path / "dump").write_text(text)
    refused(tmp_path / "dump", message)


def test_megatron_counts_layers_from_one_and_mentions_what_lies_beside(tmp_path):
    path = files.megatron(tmp_path / "dump", files.routing())
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record.update(layer=record["layer"] + 1, hs_offset=0, hs_bytes=8)
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    summary, trace = bring(path)
    assert (
        "hidden states and logits in the files beside the trace are left out"
        in summary.notes
    )
    assert "1 records of draft heads (block mtp) left out" in summary.notes
    assert {int(n) for rows in trace.sequences() for n in rows.layer} == {0, 1, 2}


# -- route_trace -----------------------------------------------------------------------


def test_route_trace_knows_the_bytes_of_its_layers(tmp_path):
    _, trace = bring(files.route_trace(tmp_path / "dump", files.routing()))
    assert (trace.shape.expert_bytes, trace.shape.other_bytes) == (
        (1000, 2000, 3000),
        2000,
    )
    assert trace.shape.dense_layers == (0,)
    assert trace.header.provenance["arch"] == "tiny"


@pytest.mark.parametrize(("old", "new", "message"), [
    ("v1", "v2", ("line 1: expected # route_trace v1, found # route_trace v2; is there a"
     " newer moesim")),
    ("n_expert=8", "n_expert=16",
     "preamble: experts: expected 8 as in custom, found 16"),
    ("slot,", "place,", "expected a column 'slot'"),
    (",dropped", ",turn", "expected every column once, found turn,phase,step,layer,slot"),
    ("\n1,1,9,3,1,", "\n1,1,9,3,0,",
     r"seq 1, pos 9, layer 3: expected 2 rows, one per expert and rank, found"),
    ("\n0,0,", "\n0,2,", r"row 0: phase: expected 0 \(prefill\) or 1 \(decode\), found 2"),
    ("\n1,1,9,", "\n1,1,-9,", "pos: expected a whole number from 0, found -9"),
])  # fmt: skip
def test_route_trace_broken(tmp_path, old, new, message):
    path = files.route_trace(tmp_path / "dump", files.routing())
    path.write_text(path.read_text().replace(old, new, 1))
    refused(path, message)


# -- JSONL and plain tables ------------------------------------------------------------


def test_imp_as_one_object_over_many_lines(tmp_path):
    truth = files.routing()
    _, trace = bring(files.imp(tmp_path / "dump", truth, lines=False))
    (rows,) = trace.sequences()
    assert (rows.experts == truth[0][1][rows.pos, rows.layer]).all()


@pytest.mark.parametrize(("line", "message"), [
    ({"layer_idx": 0, "token_idx": 0, "selected_ids": [1, 2, 3]},
     r"line 2: experts: expected 2 values as in all rows, found .*\[1, 2, 3\]"),
    ({"layer_idx": 1, "token_idx": 0},
     'line 2: experts: expected a value in every row, found ."layer_idx": 1'),
    ({"layer_idx": 0, "token_idx": 0, "selected_ids": [1, 2]},
     "pos 0, layer 0: expected one row per token and layer, found two"),
    ({"layer_idx": 1, "token_idx": 0.5, "selected_ids": [1, 2]},
     "line 2: pos: expected a whole number from 0, found .*0.5"),
    ({"layer_idx": 1, "token_idx": 0, "selected_ids": [1, 2], "gate_weights": [1, 0]},
     "line 2: weights: expected weights in all rows or in none"),
    ({"layer_idx": 1, "token_idx": 0, "selected_ids": [1, 2], "phase": "prompt"},
     "line 2: phase: expected phase in all rows or in none"),
])  # fmt: skip
def test_jsonl_rows_that_do_not_fit(tmp_path, line, message):
    good = {"layer_idx": 0, "token_idx": 0, "selected_ids": [0, 1]}
    (tmp_path / "dump").write_text(json.dumps(good) + "\n" + json.dumps(line) + "\n")
    refused(tmp_path / "dump", message)


def rows_of(tmp_path, *lines, layers=2):
    """Positions, layers and experts of all rows of JSON lines."""
    path = tmp_path / "dump"
    path.write_text("\n".join(lines) + "\n")
    shape = f"layers={layers},experts=8,top_k=2,expert_bytes=1KiB"
    return [
        [rows.pos.tolist(), rows.layer.tolist(), rows.experts[:, 0].tolist()]
        for rows in bring(path, shape=shape)[1].sequences()
    ]


def test_a_position_goes_before_a_token_id(tmp_path):
    row = '{"token": 17, "pos": 4, "layer": 0, "experts": [1, 2]}'
    assert rows_of(tmp_path, row, layers=1) == [[[4], [0], [1]]]


def test_layers_without_numbers_have_their_turn(tmp_path):
    line = '{"pos": 0, "layers": [{"ids": [1, 0]}, {"ids": [2, 0], "layer": 5}, {"ids": [3, 0]}]}'
    # Layers 0, 5 and 2 are the three that the model has, in order of their numbers.
    found = rows_of(tmp_path, line, line.replace(": 0,", ": 1,", 1), layers=3)
    assert found == [[[0, 0, 0, 1, 1, 1], [0, 1, 2] * 2, [1, 3, 2] * 2]]


@pytest.mark.parametrize(("lines", "message"), [
    (['{"top_k": 2}', "[0, 1]"], r"line 2: experts: expected .layer, 2 ids. .*, found .0, 1."),
    (['{"top_k": 2}', "[0, 1, null]"], r"line 2: experts: expected numbers in every list, found .0, 1, null"),
    (['{"top_k": "x"}', "[0, 1]"], "header: top_k"),
    (['{"pos": 0, "layers": [[1]]}', '{"pos": 1, "layers": 3}'],
     "line 2: .*: expected a list of layers"),
])  # fmt: skip
def test_lines_that_are_not_like_the_first(tmp_path, lines, message):
    (tmp_path / "dump").write_text("\n".join(lines) + "\n")
    refused(tmp_path / "dump", message)


def test_columns_as_lists_texts_and_fields_are_the_same(tmp_path):
    prompt, ids, *_ = files.routing()[0]
    pos, layer = np.divmod(np.arange(len(ids) * 3), 3)
    flat = ids.reshape(-1, 2)
    plain = {"t": pos, "l": layer}
    pq.write_table(pa.table({**plain, "ids": flat.tolist()}), tmp_path / "lists")
    pq.write_table(
        pa.table({**plain, "ids": [f"[{a} {b}]" for a, b in flat]}), tmp_path / "texts"
    )
    pq.write_table(
        pa.table({**plain, "ids0": flat[:, 0], "ids1": flat[:, 1]}), tmp_path / "fields"
    )
    for name, ours in (("lists", "ids"), ("texts", "ids"), ("fields", "ids*")):
        options = {"map": f"pos=t,layer=l,experts={ours}", "prompt_tokens": str(prompt)}
        _, trace = bring(tmp_path / name, options)
        (rows,) = trace.sequences()
        assert (rows.experts == flat).all()
        assert (rows.phase == Phase.PREFILL).sum() == prompt * 3


@pytest.mark.parametrize(("text", "message"), [
    ("pos=position,layer=block",
     "columns: expected experts .all ids of a row. or expert"),
    ("position=pos", "--map: expected names of seq, pos, .*, found position"),
    ("pos=position,pos=block", "--map: expected ours=theirs, each column once"),
    ("pos=nothing", "--map: pos: expected one of request, position"),
    (files.COLUMNS_MAP["map"] + ",expert=e0", "experts .all ids"),
    (files.COLUMNS_MAP["map"].replace("phase=stage", "phase=e0"),
     "phase: expected 0 .prefill. or 1"),
    (files.COLUMNS_MAP["map"].replace("layer=block", "layer=stage"),
     "layer: expected numbers, found string"),
])  # fmt: skip
def test_mappings_that_do_not_fit(tmp_path, text, message):
    refused(
        files.columns_csv(tmp_path / "dump", files.routing()), message, {"map": text}
    )
