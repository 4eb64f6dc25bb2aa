"""Foreign routing dumps as their real writers lay them out, all of the same small
routing.

Three layers, eight experts, top-2; sequences of (prompt, generated) tokens. `routing`
is the truth that every importer must give back; a writer takes a path and that truth.
"""

import base64
import io
import json
import struct

import numpy as np

LAYERS = 3
EXPERTS = 8
TOP_K = 2
SHAPE = "layers=3,experts=8,top_k=2,expert_bytes=1KiB"
LENGTHS = ((5, 7), (4, 6))


def routing(lengths=LENGTHS, *, seed=0, layers=LAYERS, experts=EXPERTS, top_k=TOP_K):
    """(prompt, experts [T, L, K], weights [T, L, K], logits [T, L, E]) per sequence;
    some experts are busier.
    """
    rng = np.random.default_rng(seed)
    found = []
    for prompt, generated in lengths:
        logits = rng.normal(size=(prompt + generated, layers, experts)) - np.linspace(
            0, 2, experts
        )
        ids = np.argsort(-logits, axis=2)[:, :, :top_k]
        scores = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
        weights = np.take_along_axis(scores, ids, axis=2)
        found.append(
            (
                prompt,
                ids,
                weights / weights.sum(axis=2, keepdims=True),
                logits.astype(np.float32),
            )
        )
    return found


def cells(truth):
    """(sequence, whether prompt, token, layer, ids, weights) of every row."""
    for number, (prompt, ids, weights, _) in enumerate(truth):
        for token in range(len(ids)):
            for layer in range(LAYERS):
                place = token, layer
                chosen = ids[place].tolist(), weights[place].tolist()
                yield number, token < prompt, token, layer, *chosen


def write_lines(path, lines):
    """Texts as they are, and all else as JSON: a line each."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n")
    return path


def write_table(path, names, rows, **types):
    """Parquet of rows of values; `types` where Arrow would take others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = zip(names, map(list, zip(*rows, strict=True)), strict=True)
    arrays = {name: pa.array(column, types.get(name)) for name, column in columns}
    pq.write_table(pa.table(arrays), path)
    return path


def shuffled(rows):
    """Rows in any order, but for the first."""
    order = np.random.default_rng(0).permutation(len(rows) - 1) + 1
    return [rows[0], *(rows[index] for index in order)]


PHYSICAL = np.array(
    [
        [7, 6, 5, 4, 3, 2, 1, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 7, 2, 3],
        [1, 0, 3, 2, 5, 4, 7, 6, 4, 5],
    ]
)
"""Logical expert of each of ten physical ones, by layer: every logical expert at least
once, some twice.
"""


def physical(ids, copy=0):
    """Physical ids of logical ids [T, L, K]; the copy is chosen where there are two."""
    out = np.empty_like(ids)
    for layer in range(ids.shape[1]):
        for expert in range(EXPERTS):
            places = np.flatnonzero(PHYSICAL[layer] == expert)
            out[:, layer][ids[:, layer] == expert] = places[min(copy, len(places) - 1)]
    return out


def sglang_per_token(path, truth, *, dense_before=0, **options):
    """One extend pass with all prompts, then decode passes of whoever still runs,
    finished requests leaving.
    """
    import torch

    records = []
    layers = dense_before + LAYERS

    def record(tokens, mode, lengths):
        ids = np.full((layers, len(tokens), 8), -1, np.int32)
        for column, (number, position) in enumerate(tokens):
            ids[dense_before:, column, :TOP_K] = physical(
                truth[number][1], copy=position % 2
            )[position]
        records.append(
            {
                "forward_pass_id": len(records),
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": [
                    100 + 10 * number + position for number, position in tokens
                ],
                "positions": [position for _, position in tokens],
                "extend_seq_lens": lengths,
                "forward_mode": mode,
                "topk_ids_of_layer": torch.from_numpy(ids),
                "misc_objects": [],
            }
        )

    prompts = [
        [(number, position) for position in range(one[0])]
        for number, one in enumerate(truth)
    ]
    record(
        [place for one in prompts for place in one], 1, [len(one) for one in prompts]
    )
    for step in range(max(len(one[1]) - one[0] for one in truth)):
        running = [n for n, one in enumerate(truth) if one[0] + step < len(one[1])]
        record([(n, truth[n][0] + step) for n in running], 2, None)
    table = np.concatenate(
        [np.tile(np.arange(PHYSICAL.shape[1]) % EXPERTS, (dense_before, 1)), PHYSICAL]
    ).astype(np.int64)
    torch.save(
        {"records": records, "last_physical_to_logical_map": torch.from_numpy(table)},
        path,
        **options,
    )
    return path


def vllm_npz(path, truth):
    prompt, ids, *_ = truth[0]
    np.savez(
        path,
        prompt_routed_experts=ids[:prompt].astype(np.int16),
        routed_experts=ids[prompt:].astype(np.int16),
    )
    return path


def vllm_npy(path, truth):
    np.save(path, truth[0][1].astype(np.int16))
    return path


def vllm_json(path, truth, *, encoded=False):
    """One response per line; the last generated token has a row of zeros, since it was
    never computed.
    """
    lines = []
    for prompt, ids, *_ in truth:
        parts = [ids[:prompt], np.concatenate([ids[prompt:], np.zeros_like(ids[:1])])]
        texts = [part.tolist() for part in parts]
        if encoded:
            for number, part in enumerate(parts):
                file = io.BytesIO()
                np.save(file, part.astype(np.int16))
                texts[number] = base64.b64encode(file.getvalue()).decode()
        message = {"role": "assistant"}
        choice = {"index": 0, "message": message, "routed_experts": texts[1]}
        response = {"id": "x", "model": "m", "choices": [choice]}
        lines.append(response | {"prompt_routed_experts": texts[0]})
    return write_lines(path, lines)


def safetensors(path, arrays, dtype="F32"):
    """The layout of safetensors, written by hand; BF16 keeps the upper half of each
    float.
    """
    header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = (
            (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
            if dtype == "BF16"
            else array.tobytes()
        )
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def hf_arrays(truth, *, probabilities=False):
    """One array [batch * seq, E] per layer; all sequences cut to the shortest."""
    tokens = min(len(one[1]) for one in truth)
    values = np.concatenate([one[3][:tokens] for one in truth])
    if probabilities:
        values = np.exp(values) / np.exp(values).sum(axis=2, keepdims=True)
    return {
        f"router_logits.{layer}": np.ascontiguousarray(values[:, layer])
        for layer in range(LAYERS)
    }


def hf_safetensors(path, truth, **options):
    return safetensors(path, hf_arrays(truth, **options))


def hf_npz(path, truth):
    np.savez(path, **hf_arrays(truth))
    return path


def hf_torch(path, truth):
    import torch

    torch.save(
        tuple(torch.from_numpy(array) for array in hf_arrays(truth).values()), path
    )
    return path


def passes(truth):
    """(tokens, layer, ids) of every layer run: a prompt in one pass, its last layer for
    the last token only.
    """
    for prompt, ids, *_ in truth:
        for layer in range(LAYERS):
            yield (
                0,
                layer,
                (
                    ids[prompt - 1 : prompt, layer]
                    if layer == LAYERS - 1
                    else ids[:prompt, layer]
                ),
            )
        for token in range(prompt, len(ids)):
            for layer in range(LAYERS):
                yield token, layer, ids[token : token + 1, layer]


def llama_cpp(path, truth):
    runs = [(layer, ids.reshape(-1)) for _, layer, ids in passes(truth)]
    return write_lines(path, [f"{layer},{e}" for layer, ids in runs for e in ids])


def llama_moe_trace(path, truth):
    """Captures joined: prompts count from their end, their last layer has one row."""
    lines = []
    for prompt, ids, *_ in truth:
        lines += moe_trace_rows(prompt, ids, last_only=True)
    return write_lines(path, lines)


def moe_trace_rows(prompt, ids, *, last_only):
    """Lines ``pos,layer,e0,…`` of one capture, its prompt layer by layer."""
    tokens, layers = ids.shape[:2]
    places = [
        (token, layer)
        for layer in range(layers)
        for token in range(prompt)
        if not last_only or layer < layers - 1 or token == prompt - 1
    ]
    places += [
        (token, layer) for token in range(prompt, tokens) for layer in range(layers)
    ]
    return [
        f"{token - prompt},{layer},{','.join(map(str, ids[token, layer]))}"
        for token, layer in places
    ]


def pass_records(path, truth):
    """Every sequence in one pass."""
    records = [
        np.concatenate(([layer, len(ids), ids.shape[2]], ids[:, layer].reshape(-1)))
        for _, ids, *_ in truth
        for layer in range(ids.shape[1])
    ]
    path.write_bytes(np.concatenate(records).astype("<i4").tobytes())
    return path


def json_export(path, truth, first_layer=0):
    """Rows of all prompts by layer, numbered from `first_layer`."""
    ids = np.concatenate([ids for _, ids, *_ in truth])
    edges = np.cumsum([0, *(len(ids) for _, ids, *_ in truth)]).tolist()
    prompts = [
        {"start_row": start, "end_row": end, "decode_step_rows": end - start - prompt}
        for (prompt, *_), start, end in zip(truth, edges, edges[1:], strict=False)
    ]
    layers = {
        str(first_layer + layer): {"executed_topk": ids[:, layer].tolist()}
        for layer in range(ids.shape[1])
    }
    whole = {"schema": "x/v2", "conditional": {"prompts": prompts}, "layers": layers}
    return write_lines(path, [whole])


def megatron(path, truth):
    lines = []
    step = 0
    before = -1
    for _, layer, ids in passes(truth):
        step += layer <= before
        before = layer
        lines.append(megatron_record(step, layer, ids))
    lines.append({**lines[-1], "block": "mtp", "mtp_idx": 0})
    return write_lines(path, lines)


def megatron_record(step, layer, ids):
    """What one layer chose in one step, ids [T, K]."""
    place = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer}
    sizes = {"rank": 0, "num_tokens": len(ids), "topk": ids.shape[1]}
    return {**place, **sizes, "top_indices": ids.tolist()}


def route_trace(path, truth, *, residency=None, dropped=True, dense=True, turns=True):
    """With `dense`, layer 0 of four has no experts. Prefill rows by layer, then decode
    rows by token, as staged.
    """
    offset = int(dense)
    facts = f"n_layer={LAYERS + offset} n_expert={EXPERTS} n_expert_used={TOP_K}"
    lines = ["# route_trace v1", f"# model=/models/x.gguf arch=tiny {facts}"]
    sizes = [0] * offset + [1000 * (layer + 1) for layer in range(LAYERS)]
    lines += [
        f"# layer={layer} expert_bytes={size} dense_bytes=500"
        for layer, size in enumerate(sizes)
    ]
    lines.append(
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
        + ",dropped" * dropped
    )
    for turn, (prompt, ids, weights, _) in enumerate(truth):
        pre = [
            (0, t, n)
            for n in range(LAYERS)
            for t in range(prompt)
            if n < LAYERS - 1 or t == prompt - 1
        ]
        for phase, token, layer in pre + [
            (1, t, n) for t in range(prompt, len(ids)) for n in range(LAYERS)
        ]:
            for slot in range(ids.shape[2]):
                met = 0 if residency is None else residency[turn][token, layer, slot]
                size = 0 if met else sizes[layer + offset]
                row = f"{turn if turns else 0},{phase},{token},{layer + offset},{slot},{ids[token, layer, slot]}"
                lines.append(
                    f"{row},{weights[token, layer, slot]:.6g},{met},{size}"
                    + ",0" * dropped
                )
    return write_lines(path, lines)


def lattice(path, truth):
    names = ("layer_idx", "token_idx", "selected_ids", "gate_weights")
    rows = [(layer, t, *chosen) for _, _, t, layer, *chosen in cells(truth[:1])]
    return write_lines(path, [dict(zip(names, row, strict=True)) for row in rows])


def per_token(path, truth):
    lines = []
    for number, is_prompt, token, layer, ids, weights in cells(truth):
        if layer == 0:
            phase = "prefill" if is_prompt else "decode"
            line = {"seq": f"s{number}", "token": token, "phase": phase, "layers": []}
            lines.append(line)
        lines[-1]["layers"].append({"experts": ids, "weights": weights})
    return write_lines(path, lines)


def imp(path, truth, *, lines=True):
    rows = [[layer, *ids] for _, _, _, layer, ids, _ in cells(truth[:1])]
    head = {"model": "m", "top_k": TOP_K}
    if lines:
        return write_lines(path, [head, *rows])
    return write_lines(path, [json.dumps({**head, "trace": rows}, indent=1)])


def columns_csv(path, truth):
    names = [f"{letter}{rank}" for letter in "ew" for rank in range(TOP_K)]
    rows = [["request", "position", "stage", "block", *names]]
    for number, is_prompt, token, layer, ids, weights in cells(truth):
        stage = "prefill" if is_prompt else "decode"
        rows.append([number, token, stage, layer, *ids, *np.round(weights, 5)])
    return write_lines(path, [";".join(map(str, row)) for row in rows])


COLUMNS_MAP = {
    "map": "seq=request,pos=position,phase=stage,layer=block,experts=e*,weights=w*"
}


def columns_long(path, truth):
    """One row per selected expert, in Parquet, shuffled."""
    rows = [
        (number, token, int(not is_prompt), layer, rank, ids[rank], weights[rank])
        for number, is_prompt, token, layer, ids, weights in cells(truth)
        for rank in range(TOP_K)
    ]
    names = ("seq", "pos", "phase", "layer", "rank", "expert", "weight")
    return write_table(path, names, shuffled(rows))


ROUTING_ROWS = ("seq_id", "step", "phase", "layer", "token", "expert_ids", "scores")


def routing_rows(path, truth):
    """The layout of ../shared/traces."""
    rows = []
    for number, is_prompt, token, layer, *chosen in cells(truth):
        step = max(0, token - truth[number][0] + 1)
        phase = "prefill" if is_prompt else "decode"
        rows.append((f"s{number}", step, phase, layer, token, *chosen))
    return write_table(path, ROUTING_ROWS, rows)


def moesim_unordered(path, truth):
    """Our own layout by another hand, which appended the rows of whoever was ready."""
    rows = [
        (number, token, "prefill" if is_prompt else "decode", layer, ids, weights)
        for number, is_prompt, token, layer, ids, weights in cells(truth)
    ]
    notes = {"model": "m"}, {"vectors": "x"}, "calibration"
    return write_moesim(path, SHAPE, notes, shuffled(rows))


def write_moesim(path, shape, notes, rows):
    """Rows of sequence, position, phase, layer, ids, and perhaps weights, behind our
    header.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from moesim.traces.format.schema import METADATA_KEY, TraceHeader
    from moesim.traces.models import model_shape

    names = ("seq", "pos", "phase", "layer", "experts", "weights")[: len(rows[0])]
    write_table(path, names, rows, weights=pa.list_(pa.float16()))
    header = TraceHeader(model_shape(shape), *notes)
    metadata = {METADATA_KEY: header.to_json()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    return path
