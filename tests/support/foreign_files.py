"""Foreign routing dumps as their real writers lay them out, all of the same small
routing.

Three layers, eight experts, top-2; sequences of (prompt, generated) tokens. `routing`
is the truth that every importer must give back; a writer takes a path and that truth, and, where
engines differ, what they do otherwise.
"""

import base64
import io
import itertools
import json
import struct
from typing import NamedTuple

import numpy as np

LAYERS = 3
EXPERTS = 8
TOP_K = 2
SHAPE = "layers=3,experts=8,top_k=2,expert_bytes=1KiB"
LENGTHS = ((5, 7), (4, 6))


class Sequence(NamedTuple):
    """Routing of one request: T tokens, L layers, K of E experts each.

    Attributes:
        prompt: how many of its tokens are prompt.
        ids: [T, L, K], best first.
        weights: [T, L, K], falling.
        logits: [T, L, E].
        first: position of its first token.
        token: [T] token ids.
        cut: engines that may leave it out compute the last layer of a prompt for its
            last token only.
    """

    prompt: int
    ids: np.ndarray
    weights: np.ndarray | None = None
    logits: np.ndarray | None = None
    first: int = 0
    token: np.ndarray | None = None
    cut: bool = False

    def has(self, token, layer):
        last = self.ids.shape[1] - 1
        return not (self.cut and layer == last and token < self.prompt - 1)

    def rows(self):
        """(token, layer) of each row."""
        return [place for place in np.ndindex(self.ids.shape[:2]) if self.has(*place)]

    def staged(self):
        """The same rows as computed: the prompt layer by layer, then each token."""
        return sorted(
            self.rows(), key=lambda row: (max(0, row[0] - self.prompt + 1), row[1])
        )


def routing(lengths=LENGTHS, *, seed=0, layers=LAYERS, experts=EXPERTS, top_k=TOP_K):
    """A sequence for each (prompt, generated); some experts are busier."""
    rng = np.random.default_rng(seed)
    found = []
    for number, (prompt, generated) in enumerate(lengths):
        tokens = prompt + generated
        logits = rng.normal(size=(tokens, layers, experts))
        logits -= np.linspace(0, 2, experts)
        token = 100 + 10 * number + np.arange(tokens)
        found.append(sequence(prompt, logits, top_k, token=token, cut=True))
    return found


def sequence(prompt, logits, top_k, **facts):
    """What a router chooses from its logits [T, L, E]."""
    ids = np.argsort(-logits, axis=2)[:, :, :top_k]
    weights = np.exp(np.take_along_axis(logits, ids, axis=2))
    weights = weights / weights.sum(axis=2, keepdims=True)
    return Sequence(prompt, ids, weights, logits.astype(np.float32), **facts)


class Cell(NamedTuple):
    """A row of a table. Steps count from the prompt, which is step 0; experts may be
    listed in any order, their weights with them.
    """

    number: int
    step: int
    phase: str
    layer: int
    pos: int
    ids: list
    weights: list


def cells(truth, *, order=None, ascending=False):
    """Every row of every sequence, or (sequence, token, layer) as in `order`."""
    if order is None:
        places = (np.ndindex(one.ids.shape[:2]) for one in truth)
        order = ((n, *place) for n, rows in enumerate(places) for place in rows)
    for number, token, layer in order:
        one = truth[number]
        ids, weights = one.ids[token, layer], one.weights[token, layer]
        if ascending:
            ranks = np.argsort(ids)
            ids, weights = ids[ranks], weights[ranks]
        step = max(0, token - one.prompt + 1)
        phase = "decode" if step else "prefill"
        place = number, step, phase, layer, one.first + token
        yield Cell(*place, ids.tolist(), weights.tolist())


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


def physical(ids, table):
    """Physical ids of logical ids [T, L, K]; odd tokens go to the last copy."""
    copies = [
        [np.flatnonzero(row == expert)[[0, -1]] for expert in range(row.max() + 1)]
        for row in table
    ]
    token, layer, _ = np.ogrid[tuple(map(slice, ids.shape))]
    return np.array(copies)[layer, ids, token % 2]


def sglang_passes(truth, *, cut_at=1 << 20, is_mixed=False, most=1 << 20, arrives=None):
    """(mode, [(sequence, first token, last)]) of SGLang's scheduler, which knows chunks
    of prompts, mixed passes and a bounded batch; finished requests leave. Without
    options it is one pass with all prompts, then decode passes.
    """
    waiting = list(range(len(truth)))
    arrives = arrives if arrives is not None else [0] * len(truth)
    done = [0] * len(truth)
    running, chunked, now = [], None, 0
    while waiting or running or chunked is not None:
        now += 1
        decoded = [(n, done[n], done[n] + 1) for n in running]
        mixed = decoded if is_mixed else []
        room = cut_at - len(mixed)
        parts, finished = [], []
        candidates = [] if chunked is None else [chunked]
        candidates += [n for n in waiting if arrives[n] < now]
        chunked = None
        for number in candidates:
            started = done[number] > 0
            if room <= 0 or (not started and len(running) + len(finished) >= most):
                if started:
                    chunked = number
                continue
            last = min(truth[number].prompt, done[number] + room)
            parts.append((number, done[number], last))
            room -= last - done[number]
            if number in waiting:
                waiting.remove(number)
            if last < truth[number].prompt:
                chunked = number
                break
            finished.append(number)
        if parts:
            yield 3 if mixed else 1, [*parts, *mixed]
            running = [*finished, *running] if mixed else [*running, *finished]
        elif decoded:
            yield 2, decoded
        for number, _, last in [*parts, *mixed] if parts else decoded:
            done[number] = last
        running = [n for n in running if done[n] < len(truth[n].ids)]


def sglang_per_token(
    path, truth, passes=None, *, table=PHYSICAL, dense_before=0, **options
):
    """A record a pass, as the scheduler put them together."""
    import torch

    places = [physical(one.ids, table) for one in truth]
    _, layers, top_k = places[0].shape
    records = []
    for number, (mode, parts) in enumerate(passes or sglang_passes(truth)):
        tokens = [(n, t) for n, first, last in parts for t in range(first, last)]
        ids = np.full((dense_before + layers, len(tokens), 8), -1, np.int32)
        ids[dense_before:, :, :top_k] = np.stack(
            [places[n][t] for n, t in tokens], axis=1
        )
        lengths = [last - first for _, first, last in parts]
        records.append(
            {
                "forward_pass_id": number,
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": [int(truth[n].token[t]) for n, t in tokens],
                "positions": [truth[n].first + t for n, t in tokens],
                "extend_seq_lens": None if mode == 2 else lengths,
                "forward_mode": mode,
                "topk_ids_of_layer": torch.from_numpy(ids),
                "misc_objects": [],
            }
        )
    logical = torch.from_numpy(np.vstack([table[:1]] * dense_before + [table]))
    dump = {"records": records, "last_physical_to_logical_map": logical}
    torch.save(dump, path, **options)
    return path


def vllm_arrays(prompt, completions, name=""):
    """Arrays of one request, whose completions have numbers where there are several;
    each repeats the prompt, unless it is None.
    """
    arrays = {}
    for index, ids in enumerate(completions):
        start = f"{name}{index}_" if len(completions) > 1 else name
        if prompt is not None:
            arrays[f"{start}prompt_routed_experts"] = prompt.astype(np.int16)
        arrays[f"{start}routed_experts"] = ids.astype(np.int16)
    return arrays


def vllm_npz(path, truth):
    prompt, ids, *_ = truth[0]
    np.savez(path, **vllm_arrays(ids[:prompt], [ids[prompt:]]))
    return path


def vllm_npy(path, truth):
    np.save(path, truth[0][1].astype(np.int16))
    return path


def vllm_response(prompt, completions, name="x", *, encoded=False):
    """What the server answers to one request; `prompt` may be None."""

    def told(ids):
        if not encoded:
            return ids.tolist()
        file = io.BytesIO()
        np.save(file, ids.astype(np.int16))
        return base64.b64encode(file.getvalue()).decode()

    message = {"role": "assistant"}
    choices = [
        {"index": index, "message": message, "routed_experts": told(ids)}
        for index, ids in enumerate(completions)
    ]
    response = {"id": name, "model": "m", "choices": choices}
    return response | (
        {} if prompt is None else {"prompt_routed_experts": told(prompt)}
    )


def vllm_json(path, truth, *, encoded=False):
    """One response per line; the last generated token has a row of zeros, since it was
    never computed.
    """
    lines = []
    for prompt, ids, *_ in truth:
        answer = np.concatenate([ids[prompt:], np.zeros_like(ids[:1])])
        lines.append(vllm_response(ids[:prompt], [answer], encoded=encoded))
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
    tokens = min(len(one.logits) for one in truth)
    values = np.concatenate([one.logits[:tokens] for one in truth])
    if probabilities:
        values = np.exp(values) / np.exp(values).sum(axis=2, keepdims=True)
    return {
        f"router_logits.{layer}": np.ascontiguousarray(values[:, layer])
        for layer in range(values.shape[1])
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


def passes(truth, chunk=1 << 20):
    """(step, layer, ids [T, K]) of every layer run: prompts in chunks, then a pass for
    each token.
    """
    step = 0
    for one in truth:
        starts = [*range(0, one.prompt, chunk), *range(one.prompt, len(one.ids))]
        for first, last in itertools.pairwise([*starts, len(one.ids)]):
            for layer in range(one.ids.shape[1]):
                tokens = [t for t in range(first, last) if one.has(t, layer)]
                yield step, layer, one.ids[tokens, layer]
            step += 1


def llama_cpp(path, truth, **chunks):
    runs = [(layer, ids.reshape(-1)) for _, layer, ids in passes(truth, **chunks)]
    return write_lines(path, [f"{layer},{e}" for layer, ids in runs for e in ids])


def llama_moe_trace(path, truth):
    """Captures joined without a mark: lines ``pos,layer,e0,…``, positions counted from
    the end of the prompt.
    """
    return write_lines(
        path,
        [
            f"{token - one.prompt},{layer},{','.join(map(str, one.ids[token, layer]))}"
            for one in truth
            for token, layer in one.staged()
        ],
    )


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
    """Records of one rank; one of a draft head follows."""
    lines = megatron_records(truth)
    return write_lines(path, [*lines, {**lines[-1], "block": "mtp", "mtp_idx": 0}])


def megatron_records(truth):
    """What each layer chose in each step."""
    place = {"stage": "pre_dispatch", "block": "decoder", "rank": 0}
    return [
        {"step": step, "layer": layer, **place}
        | {"num_tokens": len(ids), "topk": ids.shape[1], "top_indices": ids.tolist()}
        for step, layer, ids in passes(truth)
    ]


def route_trace(path, truth, *, residency=None, dropped=True, dense=True, turns=True):
    """With `dense`, layer 0 of four has no experts."""
    offset = int(dense)
    _, layers, experts = truth[0].logits.shape
    top_k = truth[0].ids.shape[2]
    facts = f"n_layer={layers + offset} n_expert={experts} n_expert_used={top_k}"
    lines = ["# route_trace v1", f"# model=/models/x.gguf arch=tiny {facts}"]
    sizes = [0] * offset + [1000 * (layer + 1) for layer in range(layers)]
    lines += [
        f"# layer={layer} expert_bytes={size} dense_bytes=500"
        for layer, size in enumerate(sizes)
    ]
    lines.append(
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
        + ",dropped" * dropped
    )
    for turn, one in enumerate(truth):
        for token, layer in one.staged():
            place = f"{turn * turns},{int(token >= one.prompt)},{one.first + token}"
            for slot in range(top_k):
                here = token, layer, slot
                met = 0 if residency is None else residency[turn][here]
                size = 0 if met else sizes[layer + offset]
                row = f"{place},{layer + offset},{slot},{one.ids[here]}"
                lines.append(
                    f"{row},{one.weights[here]:.6g},{met},{size}" + ",0" * dropped
                )
    return write_lines(path, lines)


def lattice(path, truth):
    names = ("layer_idx", "token_idx", "selected_ids", "gate_weights")
    return write_lines(
        path, [dict(zip(names, cell[3:], strict=True)) for cell in cells(truth[:1])]
    )


def per_token(path, truth, *, phases=True, **how):
    """A line for each token, with a list of its layers."""
    lines = []
    for cell in cells(truth, **how):
        if cell.layer == 0:
            line = {"seq": f"s{cell.number}", "token": cell.pos}
            phase = {"phase": cell.phase} if phases else {}
            lines.append({**line, **phase, "layers": []})
        layer = {"experts": cell.ids, "weights": cell.weights}
        lines[-1]["layers"].append(layer)
    return write_lines(path, lines)


def imp(path, truth, *, lines=True):
    rows = [[cell.layer, *cell.ids] for cell in cells(truth[:1])]
    head = {"model": "m", "top_k": truth[0].ids.shape[2]}
    if lines:
        return write_lines(path, [head, *rows])
    return write_lines(path, [json.dumps({**head, "trace": rows}, indent=1)])


def columns_rows(truth, kind, *, phases=True, **how):
    """Rows of a plain table: with lists, with columns numbered by rank (wide), or one
    for each expert (long).
    """
    rows = []
    for cell in cells(truth, **how):
        row = {"seq": 10 * cell.number + 3, "pos": cell.pos, "layer": cell.layer}
        row |= {"phase": cell.phase} if phases else {}
        ranked = list(enumerate(zip(cell.ids, cell.weights, strict=True)))
        if kind == "lists":
            rows.append(row | {"experts": cell.ids, "weights": cell.weights})
        elif kind == "wide":
            ids = {f"e{rank}": expert for rank, (expert, _) in ranked}
            rows.append(
                row | ids | {f"w{rank}": weight for rank, (_, weight) in ranked}
            )
        else:
            rows += [
                row | {"rank": rank, "expert": expert, "weight": weight}
                for rank, (expert, weight) in ranked
            ]
    return rows


def columns_csv(path, truth):
    """Under names that a map has to explain."""
    import pandas as pd

    names = {"seq": "request", "pos": "position", "phase": "stage", "layer": "block"}
    table = pd.DataFrame(columns_rows(truth, "wide")).rename(columns=names)
    table.round(5).to_csv(path, sep=";", index=False)
    return path


COLUMNS_MAP = {
    "map": "seq=request,pos=position,phase=stage,layer=block,experts=e*,weights=w*"
}


def columns_long(path, truth):
    """One row per selected expert, in Parquet, shuffled; phases are numbers."""
    rows = [
        row | {"phase": int(row["phase"] == "decode")}
        for row in shuffled(columns_rows(truth, "long"))
    ]
    return write_table(path, list(rows[0]), [row.values() for row in rows])


def routing_rows(path, truth, **how):
    """The layout of ../shared/traces."""
    names = ("seq_id", "step", "phase", "layer", "token", "expert_ids", "scores")
    rows = [(f"s{cell.number}", *cell[1:]) for cell in cells(truth, **how)]
    return write_table(path, names, rows)


def moesim_unordered(path, truth, *, shape=SHAPE, order=None, weights=True):
    """Our own layout by another hand, which appended the rows of whoever was ready."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from moesim.traces.format.schema import METADATA_KEY, TraceHeader
    from moesim.traces.models import model_shape

    rows = [
        (cell.number, cell.pos, cell.phase, cell.layer, cell.ids, cell.weights)
        for cell in cells(truth, order=order)
    ]
    rows = shuffled(rows) if order is None else rows
    names = ("seq", "pos", "phase", "layer", "experts", "weights")
    write_table(path, names, rows, weights=pa.list_(pa.float16()))
    table = pq.read_table(path, columns=list(names[: 5 + weights]))
    notes = {"model": "m"}, {"vectors": "x"}, "calibration"
    header = TraceHeader(model_shape(shape), *notes)
    metadata = {METADATA_KEY: header.to_json()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path
