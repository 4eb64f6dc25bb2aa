"""Known routing, written as each engine would, and what the importer makes of it.

Requests have different lengths, join and leave, come in chunks, reuse prefixes, lie in
several files. Whatever is drawn must come back equal or be refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
from support import foreign_files as files

from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape


@dataclass(frozen=True)
class Sequence:
    """Routing of one request. T tokens, L layers, K experts each.

    Attributes:
        prompt: how many of its tokens are prompt.
        ids: [T, L, K], best first.
        weights: [T, L, K], falling.
        first: position of its first token.
        token: [T] token ids.
        cut: the last layer has only the last token of the prompt.
    """

    prompt: int
    ids: np.ndarray
    weights: np.ndarray
    first: int = 0
    token: np.ndarray | None = None
    cut: bool = False

    @property
    def pos(self):
        return self.first + np.arange(len(self.ids))

    def rows(self):
        """(token, layer) of each row."""
        tokens, layers = self.ids.shape[:2]
        for token in range(tokens):
            for layer in range(layers):
                missing = layer == layers - 1 and token < self.prompt - 1
                if not (self.cut and missing):
                    yield token, layer


@dataclass
class Draw:
    """What is drawn for one import.

    Attributes:
        expected: sequences in the order in which they must come back.
        columns: what is compared beside positions, layers and experts.
        sources: files to import.
        options: of the importer.
    """

    dice: np.random.Generator
    folder: object
    layers: int
    experts: int
    top_k: int
    truth: list[Sequence]
    expected: list[Sequence] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    sources: list = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)

    def chance(self, share=0.5):
        return self.dice.random() < share

    @property
    def shape(self):
        return (
            f"layers={self.layers},experts={self.experts},top_k={self.top_k}"
            ",expert_bytes=1KiB"
        )

    def file(self, name="dump"):
        path = self.folder / name
        self.sources.append(path)
        return path


def drawn(seed, folder):
    """A routing of some requests, from a seed."""
    dice = np.random.default_rng(seed)
    layers, experts = int(dice.integers(2, 5)), int(dice.integers(4, 12))
    top_k = int(dice.integers(1, min(4, experts)))
    return Draw(dice, folder, layers, experts, top_k, []), dice


def sequence(draw, *, least_prompt=1, least_generated=0):
    dice = draw.dice
    prompt = int(dice.integers(least_prompt, 8))
    tokens = prompt + int(dice.integers(least_generated, 7))
    logits = dice.normal(size=(tokens, draw.layers, draw.experts))
    ids = np.argsort(-logits, axis=2)[:, :, : draw.top_k]
    weights = np.exp(np.take_along_axis(logits, ids, axis=2))
    weights = weights / weights.sum(axis=2, keepdims=True)
    token = dice.integers(0, 1000, tokens)
    return Sequence(prompt, ids, weights, token=token)


def fill(draw, **least):
    draw.truth = [sequence(draw, **least) for _ in range(draw.dice.integers(1, 7))]
    return draw.truth


# -- engines ---------------------------------------------------------------------------


def sglang(draw):  # noqa: C901 - a scheduler, as one loop
    """SGLang's scheduler: chunks, mixed passes, reused prefixes, a bounded batch."""
    import torch

    dice = draw.dice
    truth = fill(draw)
    for number, one in enumerate(truth):
        reused = int(dice.integers(0, one.prompt)) if draw.chance(0.2) else 0
        truth[number] = replace(
            one,
            first=reused,
            prompt=one.prompt - reused,
            ids=one.ids[reused:],
            weights=one.weights[reused:],
            token=one.token[reused:],
        )
    if draw.chance():  # as in a benchmark with prompts of one length
        length = min(one.prompt for one in truth)
        truth = [replace(one, prompt=length, first=0) for one in truth]

    cut_at = int(dice.integers(2, 9)) if draw.chance() else 1000
    is_mixed = draw.chance(0.3)
    most = int(dice.integers(1, 5))
    arrives = np.sort(dice.integers(0, 12, len(truth))) * draw.chance(0.7)
    done = [0] * len(truth)
    order, running, records, chunked, now = [], [], [], None, 0

    def record(parts, mode):
        tokens = [(n, t) for n, first, last in parts for t in range(first, last)]
        ids = np.full((draw.layers, len(tokens), 8), -1, np.int32)
        for column, (number, token) in enumerate(tokens):
            ids[:, column, : draw.top_k] = truth[number].ids[token]
        records.append(
            {
                "forward_pass_id": len(records),
                "rank": 0,
                "input_ids": [int(truth[n].token[t]) for n, t in tokens],
                "positions": [int(truth[n].pos[t]) for n, t in tokens],
                "extend_seq_lens": None
                if mode == 2
                else [last - first for _, first, last in parts],
                "forward_mode": mode,
                "topk_ids_of_layer": torch.from_numpy(ids),
            }
        )
        for number, _, last in parts:
            done[number] = last

    waiting = list(range(len(truth)))
    while waiting or running or chunked is not None:
        now += 1
        decoded = [(n, done[n], done[n] + 1) for n in running]
        room = cut_at - (len(decoded) if is_mixed else 0)
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
                order.append(number)
            if last < truth[number].prompt:
                chunked = number
                break
            finished.append(number)
        if parts and is_mixed and decoded:
            record([*parts, *decoded], 3)
            running = [*finished, *running]
        elif parts:
            record(parts, 1)
            running = [*running, *finished]
        elif decoded:
            record(decoded, 2)
        running = [n for n in running if done[n] < len(truth[n].ids)]

    logical = np.tile(np.arange(draw.experts), (draw.layers, 1))
    dump = {"records": records, "last_physical_to_logical_map": torch.tensor(logical)}
    torch.save(dump, draw.file())
    draw.expected = [truth[number] for number in order]
    draw.columns = {"phase", "token"}


def vllm(draw):  # noqa: C901 - two file formats, drawn
    """Responses of a server, or arrays of several requests; some share a prompt."""
    truth = fill(draw)
    draw.columns = {"phase"}
    draw.expected = []
    lines, arrays = [], {}
    as_json = draw.chance()
    for number, one in enumerate(truth):
        prompt = one.ids[: one.prompt].astype(np.int16)
        completions = [one.ids[one.prompt :]]
        if draw.chance(0.3):
            other = sequence(draw)
            completions.append(other.ids[other.prompt :])
        lacks = draw.chance(0.15)
        answers = []
        for index, ids in enumerate(completions):
            whole = np.concatenate([one.ids[: one.prompt], ids])
            draw.expected.append(replace(one, ids=whole, weights=whole, token=None))
            if draw.chance():  # the last token, which is never computed
                answers.append(np.concatenate([ids, np.zeros_like(one.ids[:1])]))
            else:
                answers.append(ids)
            answers[-1] = answers[-1].astype(np.int16)
            if len(completions) == 1 and not as_json:
                arrays[f"r{number}_routed_experts"] = answers[-1]
            elif not as_json:
                arrays[f"r{number}_{index}_routed_experts"] = answers[-1]
                if not lacks:
                    arrays[f"r{number}_{index}_prompt_routed_experts"] = prompt
        if len(completions) == 1 and not lacks and not as_json:
            arrays[f"r{number}_prompt_routed_experts"] = prompt
        choices = [
            {"index": i, "routed_experts": ids.tolist()}
            for i, ids in enumerate(answers)
        ]
        line = {"id": f"r{number}", "choices": choices}
        lines.append(
            line | ({} if lacks else {"prompt_routed_experts": prompt.tolist()})
        )
    has_prompts = [name for name in arrays if "prompt" in name]
    has_prompts += [line for line in lines if "prompt_routed_experts" in line]
    if not has_prompts:  # then nobody knows that there was one, which the notes say
        draw.expected = [
            replace(one, prompt=0, ids=one.ids[one.prompt :]) for one in draw.expected
        ]
    if as_json:
        text = "\n".join(map(json.dumps, lines)) if draw.chance() else json.dumps(lines)
        draw.file().write_text(text)
    else:
        path = draw.folder / "dump.npz"
        np.savez(path, **arrays)
        draw.sources.append(path)
        # Names come back in natural order, which is the order of the requests.


def hf_router_logits(draw):
    """A batch of one forward pass, padded where its sequences differ in length."""
    truth = fill(draw)
    longest = max(len(one.ids) for one in truth)
    left = draw.chance()
    stacked = draw.dice.normal(size=(len(truth), longest, draw.layers, draw.experts))
    draw.expected = []
    for number, one in enumerate(truth):
        values = stacked[number].astype(np.float32)
        tokens = len(one.ids)
        values = values[longest - tokens :] if left else values[:tokens]
        ids = np.argsort(-values, axis=2, kind="stable")[:, :, : draw.top_k]
        draw.expected.append(replace(one, ids=ids, weights=ids, token=None))
    arrays = {
        f"router_logits.{layer}": stacked[:, :, layer]
        .reshape(-1, draw.experts)
        .astype(np.float32)
        for layer in range(draw.layers)
    }
    files.safetensors(draw.file(), arrays)
    draw.options = {"batch": str(len(truth))}
    lengths = [len(one.ids) for one in truth]
    if len(set(lengths)) > 1:
        draw.options["lengths"] = ",".join(map(str, lengths))
        draw.options["padding"] = "left" if left else "right"


def llama_cpp(draw):
    """A session: prompts in chunks of one size, the last layer for the last token."""
    truth = fill(draw, least_prompt=2)
    chunk = int(draw.dice.integers(2, 6)) if draw.chance() else 1000
    all_logits = draw.chance(0.2)
    lines = []
    draw.expected = []
    for request in truth:
        one = request
        if one.prompt % chunk == 1:  # would look like a generated token
            one = replace(one, prompt=one.prompt - 1, ids=one.ids[:-1])
        starts = range(0, one.prompt, chunk)
        passes = [(first, min(one.prompt, first + chunk)) for first in starts]
        passes += [(token, token + 1) for token in range(one.prompt, len(one.ids))]
        for first, last in passes:
            for layer in range(draw.layers):
                tokens = range(first, last)
                if layer == draw.layers - 1 and not all_logits and last <= one.prompt:
                    tokens = [last - 1] if last == one.prompt else []
                for token in tokens:
                    lines += [f"{layer},{e}" for e in one.ids[token, layer]]
        draw.expected.append(replace(one, cut=not all_logits, token=None))
    files.write_lines(draw.file(), lines)
    draw.columns = {"phase"}
    if draw.chance(0.2):  # a wrong model is refused
        draw.top_k = int(draw.dice.integers(1, 4))


def llama_moe_trace(draw):
    """Captures joined without a mark."""
    truth = fill(draw)
    all_rows = draw.chance(0.3)
    lines = []
    for one in truth:
        lines += files.moe_trace_rows(one.prompt, one.ids, last_only=not all_rows)
    files.write_lines(draw.file(), lines)
    draw.expected = [replace(one, cut=not all_rows, token=None) for one in truth]
    draw.columns = {"phase"}


def pass_records(draw):
    """A pass for each request."""
    truth = fill(draw)
    files.pass_records(draw.file(), [(one.prompt, one.ids) for one in truth])
    draw.expected = [replace(one, prompt=len(one.ids), token=None) for one in truth]
    draw.columns = {"phase"}


def json_export(draw):
    """Rows of all requests, layer by layer."""
    truth = fill(draw)
    first_layer = int(draw.dice.integers(0, 4))
    files.json_export(
        draw.file(), [(one.prompt, one.ids) for one in truth], first_layer
    )
    draw.expected = [replace(one, token=None) for one in truth]
    draw.columns = {"phase"}


def megatron(draw):
    """Steps of one rank; records of draft heads between them."""
    truth = fill(draw, least_prompt=2)
    lines, step = [], 0
    for one in truth:
        passes = [(0, one.prompt)]
        passes += [(token, token + 1) for token in range(one.prompt, len(one.ids))]
        for first, last in passes:
            for layer in range(draw.layers):
                record = files.megatron_record(step, layer, one.ids[first:last, layer])
                lines.append(record)
                if draw.chance(0.1):
                    lines.append({**record, "block": "mtp", "mtp_idx": 0})
            step += int(draw.dice.integers(1, 3))
    files.write_lines(draw.file(), lines)
    draw.expected = [replace(one, token=None) for one in truth]
    draw.columns = {"phase"}


def route_trace(draw):
    """Turns of a session, whose positions go on or begin anew."""
    truth = fill(draw)
    goes_on = draw.chance()
    facts = f"n_layer={draw.layers} n_expert={draw.experts} n_expert_used={draw.top_k}"
    lines = ["# route_trace v1", f"# model=/m/x.gguf arch=tiny {facts}"]
    lines += [
        f"# layer={n} expert_bytes={1000 * (n + 1)} dense_bytes=5"
        for n in range(draw.layers)
    ]
    lines.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")
    first = 0
    for turn, request in enumerate(truth):
        one = replace(request, first=first, cut=draw.chance())
        draw.expected.append(one)
        cells = sorted(one.rows(), key=lambda c: (max(0, c[0] - one.prompt + 1), c[1]))
        for token, layer in cells:
            for slot in range(draw.top_k):
                row = (
                    turn,
                    int(token >= one.prompt),
                    one.pos[token],
                    layer,
                    slot,
                    one.ids[token, layer, slot],
                    f"{one.weights[token, layer, slot]:.6g}",
                    0,
                    1000 * (layer + 1),
                )
                lines.append(",".join(map(str, row)))
        first = first + len(one.ids) if goes_on else 0
    files.write_lines(draw.file(), lines)
    draw.columns = {"phase", "weights"}


def _table(draw, *, may_shuffle=True, may_cut=False):
    """Rows as any recorder might write them: (sequence, token, layer), names of the
    sequences, in an order of its own.
    """
    truth = fill(draw)
    if draw.chance(0.3):
        first = int(draw.dice.integers(1, 50))
        truth = [replace(one, first=first) for one in truth]
    rows = [(n, t, layer) for n, one in enumerate(truth) for t, layer in one.rows()]
    how = draw.dice.integers(0, 3 if may_shuffle else 1)
    if how == 1:  # step by step, whoever is running
        arrives = draw.dice.integers(0, 9, len(truth))
        rows.sort(key=lambda r: (arrives[r[0]] + max(0, r[1] - truth[r[0]].prompt), r))
    if how == 2:
        rows = [rows[i] for i in draw.dice.permutation(len(rows))]
    seen = list(dict.fromkeys(n for n, *_ in rows))
    draw.truth = truth
    draw.expected = [truth[n] for n in seen]
    return truth, rows


def _written(draw, one, token, layer, *, ascending):
    """Ids and weights of one row as they are written."""
    ids, weights = one.ids[token, layer], one.weights[token, layer].round(5)
    order = np.argsort(ids) if ascending else slice(None)
    return ids[order].tolist(), weights[order].tolist()


def _phase(one, token):
    return "prefill" if token < one.prompt else "decode"


def _with_phases(draw, record, one, token):
    if "prompt_tokens" not in draw.options:
        record["phase"] = _phase(one, token)
    return record


def _states_prompts(draw):
    """Say by an option how many of the first tokens are prompt."""
    least = min(len(one.ids) for one in draw.truth)
    prompt = int(draw.dice.integers(0, least + 1))
    draw.options["prompt_tokens"] = str(prompt)
    draw.expected = [replace(one, prompt=prompt) for one in draw.expected]


def jsonl(draw):
    """Rows by token and layer, or tokens with a list of layers."""
    by_token = draw.chance(0.4)
    truth, rows = _table(draw)
    ascending = draw.chance(0.3)
    if draw.chance(0.3):
        _states_prompts(draw)
    both = not by_token and draw.chance(0.15)
    lines = []
    if by_token:
        tokens = list(dict.fromkeys((n, t) for n, t, _ in rows))
        draw.expected = [truth[n] for n in dict.fromkeys(n for n, _ in tokens)]
        if "prompt_tokens" in draw.options:
            prompt = int(draw.options["prompt_tokens"])
            draw.expected = [replace(one, prompt=prompt) for one in draw.expected]
        for n, t in tokens:
            one = truth[n]
            layers = []
            for layer in range(draw.layers):
                ids, weights = _written(draw, one, t, layer, ascending=ascending)
                layers.append({"experts": ids, "weights": weights})
            line = {"seq": f"s{n}", "token": int(one.pos[t]), "layers": layers}
            lines.append(_with_phases(draw, line, one, t))
    else:
        for n, t, layer in rows:
            one = truth[n]
            ids, weights = _written(draw, one, t, layer, ascending=ascending)
            line = {"seq_id": f"s{n}", "layer": layer, "expert_ids": ids}
            line["weights"] = weights
            if both:
                line |= {"step": int(one.pos[t]), "token": int(one.token[t])}
            else:
                line["pos"] = int(one.pos[t])
            lines.append(_with_phases(draw, line, one, t))
    files.write_lines(draw.file(), lines)
    draw.columns = {"phase", "weights"}


def columns(draw):  # noqa: C901, PLR0912 - many habits, drawn
    """CSV or Parquet: lists, numbered columns, or a row for each expert; one file, or
    one for each layer.
    """
    import pandas as pd

    kind = str(draw.dice.choice(["lists", "wide", "long"]))
    by_layer = kind != "long" and draw.chance(0.4)
    truth, rows = _table(draw)
    ascending = kind != "long" and draw.chance(0.3)
    if draw.chance(0.3):
        _states_prompts(draw)
    counted = by_layer and draw.chance()
    if counted:  # positions are the order of the rows
        rows.sort(key=lambda r: (r[1], r[0]) if draw.layers % 2 else r)
        draw.expected = [
            replace(truth[n], first=0, prompt=one.prompt)
            for n, one in zip(
                dict.fromkeys(n for n, *_ in rows), draw.expected, strict=True
            )
        ]
        if "prompt_tokens" not in draw.options:
            draw.expected = [
                replace(truth[n], first=0) for n in dict.fromkeys(n for n, *_ in rows)
            ]
    records = []
    for n, t, layer in rows:
        one = truth[n]
        ids, weights = _written(draw, one, t, layer, ascending=ascending)
        record = {"seq": 10 * n + 3, "pos": int(one.pos[t]), "layer": layer}
        record = _with_phases(draw, record, one, t)
        if kind == "lists":
            records.append(record | {"experts": ids, "weights": weights})
        elif kind == "wide":
            cells = {f"e{i}": value for i, value in enumerate(ids)}
            records.append(
                record | cells | {f"w{i}": value for i, value in enumerate(weights)}
            )
        else:
            records += [
                record | {"rank": i, "expert": ids[i], "weight": weights[i]}
                for i in range(draw.top_k)
            ]
    if kind == "wide":
        draw.options["map"] = "experts=e*,weights=w*"
    if kind == "long" and draw.chance():
        records = [records[i] for i in draw.dice.permutation(len(records))]
        seen = dict.fromkeys((r["seq"] - 3) // 10 for r in records)
        prompts = [one.prompt for one in draw.expected]
        stated = "prompt_tokens" in draw.options
        draw.expected = [truth[n] for n in seen]
        if stated:
            draw.expected = [replace(one, prompt=prompts[0]) for one in draw.expected]

    table = pd.DataFrame(records)
    as_csv = draw.chance()
    parts = [table]
    if by_layer:
        table = table.drop(columns="pos") if counted else table
        parts = [
            table[table["layer"] == layer].drop(columns="layer")
            for layer in range(draw.layers)
        ]
        if not counted:  # each file in its own order
            parts[1:] = [
                part.sample(frac=1, random_state=layer) if draw.chance() else part
                for layer, part in enumerate(parts[1:])
            ]
            seen = dict.fromkeys((parts[0]["seq"] - 3) // 10)
            stated = draw.options.get("prompt_tokens")
            draw.expected = [
                replace(truth[n], prompt=int(stated)) if stated else truth[n]
                for n in seen
            ]
    for number, part in enumerate(parts):
        name = f"layer{number}" if by_layer else "dump"
        if as_csv:
            texts = {
                column: part[column].map(lambda v: " ".join(map(str, v)))
                for column in {"experts", "weights"} & set(part)
            }
            part.assign(**texts).to_csv(draw.file(f"{name}.csv"), index=False)
        else:
            part.to_parquet(draw.file(f"{name}.parquet"), index=False)
    draw.columns = {"phase", "weights"}


def routing_rows(draw):
    """A runtime's own table, step by step."""
    truth, rows = _table(draw)
    ascending = draw.chance(0.3)
    records = []
    for n, t, layer in rows:
        one = truth[n]
        step = max(0, t - one.prompt + 1)
        place = (f"s{n}", step, _phase(one, t), layer, int(one.pos[t]))
        records.append((*place, *_written(draw, one, t, layer, ascending=ascending)))
    files.write_table(draw.file(), files.ROUTING_ROWS, records)
    draw.columns = {"phase", "weights"}


def moesim_trace(draw):
    """Our own layout, its rows in another order: numbers of sequences stay."""
    truth, rows = _table(draw)
    draw.expected = truth
    records = [
        (n, int(one.pos[t]), _phase(one, t), layer, one.ids[t, layer].tolist())
        for n, t, layer in rows
        for one in [truth[n]]
    ]
    notes = {"model": "m"}, {}, "evaluation"
    files.write_moesim(draw.file(), draw.shape, notes, records)
    draw.columns = {"phase"}


ENGINES = {
    "sglang": sglang,
    "vllm": vllm,
    "hf_router_logits": hf_router_logits,
    "llama_cpp": llama_cpp,
    "llama_moe_trace": llama_moe_trace,
    "pass_records": pass_records,
    "json_export": json_export,
    "megatron": megatron,
    "route_trace": route_trace,
    "jsonl": jsonl,
    "columns": columns,
    "routing_rows": routing_rows,
    "moesim_trace": moesim_trace,
}
"""Importer -> what writes a drawn routing for it."""


# -- judgement -------------------------------------------------------------------------


def outcome(importer, seed, folder):
    """Write a drawn routing, import it: the refusal, or an empty text where all rows
    came back equal.

    Raises:
        AssertionError: something else came back.
    """
    draw, _ = drawn([seed, len(importer)], folder)
    ENGINES[importer](draw)
    out = folder / "out.parquet"
    try:
        summary = import_trace(
            draw.sources, out, shape=model_shape(draw.shape), options=draw.options
        )
    except TraceError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert not list(folder.glob("out.parquet*")), "something was left behind"
        assert "\n" not in refusal
        return refusal
    assert summary.importer == importer
    compare(list(open_trace(out).sequences(sorted(draw.columns - {"phase"}))), draw)
    return ""


def compare(found, draw):
    """Every row of every sequence is as it was drawn."""
    expected = [one for one in draw.expected if len(one.ids)]
    assert len(found) == len(expected), "another number of sequences"
    for rows, one in zip(found, expected, strict=True):
        token, layer = np.array(list(one.rows())).T
        assert rows.pos.tolist() == one.pos[token].tolist()
        assert rows.layer.tolist() == layer.tolist()
        assert (rows.experts == one.ids[token, layer]).all()
        if "phase" in draw.columns:
            assert ((rows.phase == Phase.PREFILL) == (token < one.prompt)).all()
        if "weights" in draw.columns:
            weights = rows.columns["weights"]
            assert np.allclose(weights, one.weights[token, layer], atol=1e-3)
        if "token" in draw.columns:
            assert (rows.columns["token"] == one.token[token]).all()
