"""Import what the writers of `support.foreign_files` wrote, and judge what came of it."""

import numpy as np
import pytest
from support import foreign_files as files

from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape

WRITERS = {
    # file name without meaning -> (writer, importer, options, what comes back:
    # sequences, phases, weights, ragged)
    "sglang_per_token": (files.sglang_per_token, "sglang", {}, "all phases"),
    "vllm_npz": (files.vllm_npz, "vllm", {}, "first phases"),
    "vllm_npy": (files.vllm_npy, "vllm", {"prompt_tokens": "5"}, "first phases"),
    "vllm_json": (files.vllm_json, "vllm", {}, "all phases"),
    "hf_safetensors": (
        files.hf_safetensors,
        "hf_router_logits",
        {"batch": "2", "prompt_tokens": "4"},
        "cut weights",
    ),
    "hf_npz": (files.hf_npz, "hf_router_logits", {"batch": "2"}, "cut weights"),
    "hf_torch": (files.hf_torch, "hf_router_logits", {"batch": "2"}, "cut weights"),
    "llama_cpp": (files.llama_cpp, "llama_cpp", {}, "all phases ragged"),
    "llama_moe_trace": (
        files.llama_moe_trace,
        "llama_moe_trace",
        {},
        "all phases ragged",
    ),
    "pass_records": (files.pass_records, "pass_records", {}, "all"),
    "json_export": (files.json_export, "json_export", {}, "all phases"),
    "megatron": (files.megatron, "megatron", {}, "all phases ragged"),
    "route_trace": (files.route_trace, "route_trace", {}, "all phases ragged weights"),
    "lattice": (files.lattice, "jsonl", {"prompt_tokens": "5"}, "first phases weights"),
    "per_token": (files.per_token, "jsonl", {}, "all phases weights"),
    "imp": (files.imp, "jsonl", {"prompt_tokens": "5"}, "first phases"),
    "routing_rows": (files.routing_rows, "routing_rows", {}, "all phases weights"),
    "columns_csv": (
        files.columns_csv,
        "columns",
        files.COLUMNS_MAP,
        "all phases weights",
    ),
    "columns_long": (files.columns_long, "columns", {}, "all phases weights"),
    "moesim_unordered": (
        files.moesim_unordered,
        "moesim_trace",
        {},
        "all phases weights",
    ),
}


def write(folder, name, truth=None):
    """Write one foreign file; numpy insists on its endings, nobody else looks at
    them.
    """
    ending = {"vllm_npz": ".npz", "hf_npz": ".npz", "vllm_npy": ".npy"}.get(name, "")
    return WRITERS[name][0](folder / f"dump{ending}", truth or files.routing())


def bring(source, options=None, shape=files.SHAPE):
    out = source.parent / "out.parquet"
    summary = import_trace(source, out, shape=model_shape(shape), options=options)
    return summary, open_trace(out)


def compare(trace, expected, columns):
    """Every row of every sequence is as expected, and so are its phases, weights and
    token ids, as far as `columns` names them.
    """
    found = list(trace.sequences(sorted(columns - {"phases"})))
    assert len(found) == len(expected), "another number of sequences"
    for rows, one in zip(found, expected, strict=True):
        token, layer = np.array(one.rows()).T
        assert rows.pos.tolist() == (one.first + token).tolist()
        assert rows.layer.tolist() == layer.tolist()
        assert (rows.experts == one.ids[token, layer]).all()
        if "phases" in columns:
            assert ((rows.phase == Phase.PREFILL) == (token < one.prompt)).all()
        if "weights" in columns:
            weights = rows.columns["weights"]
            assert np.allclose(weights, one.weights[token, layer], atol=1e-3)
        if "token" in columns:
            assert (rows.columns["token"] == one.token[token]).all()


def refused(source, message, options=None, shape=files.SHAPE):
    """The import fails in one line, and leaves nothing behind."""
    with pytest.raises(TraceError, match=message) as caught:
        bring(source, options, shape)
    assert "\n" not in str(caught.value)
    assert not list(source.parent.glob("out.parquet*"))
