"""Known routing, written as each engine would, and what the importer makes of it.

Requests have different lengths, join and leave, come in chunks, reuse prefixes, lie in
several files. Whatever is drawn must come back equal or be refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
from support import foreign_files as files
from support.imports import compare

from moesim.base.errors import TraceError
from moesim.traces.format.reader import open_trace
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape


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
    expected: list[files.Sequence] = field(default_factory=list)
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
    """A model, from a seed."""
    dice = np.random.default_rng(seed)
    layers, experts = int(dice.integers(2, 5)), int(dice.integers(4, 12))
    top_k = int(dice.integers(1, min(4, experts)))
    return Draw(dice, folder, layers, experts, top_k)


def sequence(draw, least_prompt=1):
    dice = draw.dice
    prompt = int(dice.integers(least_prompt, 8))
    tokens = prompt + int(dice.integers(0, 7))
    logits = dice.normal(size=(tokens, draw.layers, draw.experts))
    token = dice.integers(0, 1000, tokens)
    return files.sequence(prompt, logits, draw.top_k, token=token)


def fill(draw, least_prompt=1):
    """Some requests, which come back as they are unless somebody knows better."""
    draw.expected = [
        sequence(draw, least_prompt) for _ in range(draw.dice.integers(1, 7))
    ]
    return draw.expected


# -- engines ---------------------------------------------------------------------------


def sglang(draw):
    """Chunks, mixed passes, reused prefixes, a bounded batch."""
    dice = draw.dice
    truth = fill(draw)
    for number, one in enumerate(truth):
        reused = int(dice.integers(0, one.prompt)) if draw.chance(0.2) else 0
        truth[number] = one._replace(
            first=reused,
            prompt=one.prompt - reused,
            ids=one.ids[reused:],
            token=one.token[reused:],
        )
    if draw.chance():  # as in a benchmark with prompts of one length
        length = min(one.prompt for one in truth)
        truth = [one._replace(prompt=length, first=0) for one in truth]

    passes = list(
        files.sglang_passes(
            truth,
            cut_at=int(dice.integers(2, 9)) if draw.chance() else 1000,
            is_mixed=draw.chance(0.3),
            most=int(dice.integers(1, 5)),
            arrives=np.sort(dice.integers(0, 12, len(truth))) * draw.chance(0.7),
        )
    )
    logical = np.tile(np.arange(draw.experts), (draw.layers, 1))
    files.sglang_per_token(draw.file(), truth, passes, table=logical)
    order = dict.fromkeys(number for _, parts in passes for number, *_ in parts)
    draw.expected = [truth[number] for number in order]
    draw.columns = {"phases", "token"}


def vllm(draw):
    """Responses of a server, or arrays of several requests; some share a prompt."""
    truth = fill(draw)
    draw.columns = {"phases"}
    draw.expected = []
    lines, arrays = [], {}
    for number, one in enumerate(truth):
        completions = [one.ids[one.prompt :]]
        if draw.chance(0.3):
            other = sequence(draw)
            completions.append(other.ids[other.prompt :])
        prompt = one.ids[: one.prompt]
        draw.expected += [
            one._replace(ids=np.concatenate([prompt, ids])) for ids in completions
        ]
        # The last token is never computed.
        last = np.zeros_like(one.ids[:1])
        answers = [
            np.concatenate([ids, last]) if draw.chance() else ids for ids in completions
        ]
        told = None if draw.chance(0.15) else prompt
        lines.append(files.vllm_response(told, answers, f"r{number}"))
        arrays |= files.vllm_arrays(told, answers, f"r{number}_")
    if not any("prompt" in name for name in arrays):
        # Then nobody knows that there was one, which the notes say.
        draw.expected = [
            one._replace(prompt=0, ids=one.ids[one.prompt :]) for one in draw.expected
        ]
    if draw.chance():
        as_list = draw.chance()
        files.write_lines(draw.file(), [json.dumps(lines)] if as_list else lines)
    else:
        # Names come back in natural order, which is the order of the requests.
        np.savez(draw.file("dump.npz"), **arrays)


def hf_router_logits(draw):
    """A batch of one forward pass, padded where its sequences differ in length."""
    truth = fill(draw)
    lengths = [len(one.ids) for one in truth]
    left = draw.chance()
    padded = []
    for one in truth:
        missing = (max(lengths) - len(one.ids), draw.layers, draw.experts)
        parts = one.logits, draw.dice.normal(size=missing).astype(np.float32)
        logits = np.concatenate(parts[::-1] if left else parts)
        padded.append(one._replace(logits=logits))
    files.hf_safetensors(draw.file(), padded)
    draw.options = {"batch": str(len(truth))}
    if len(set(lengths)) > 1:
        draw.options["lengths"] = ",".join(map(str, lengths))
        draw.options["padding"] = "left" if left else "right"


def llama_cpp(draw):
    """A session: prompts in chunks of one size, the last layer for the last token."""
    truth = fill(draw, least_prompt=2)
    chunk = int(draw.dice.integers(2, 6)) if draw.chance() else 1000
    cut = not draw.chance(0.2)
    for number, one in enumerate(truth):
        truth[number] = one._replace(cut=cut)
        if one.prompt % chunk == 1:  # would look like a generated token
            shorter = {"prompt": one.prompt - 1, "ids": one.ids[:-1]}
            truth[number] = one._replace(cut=cut, **shorter)
    files.llama_cpp(draw.file(), truth, chunk=chunk)
    draw.columns = {"phases"}
    if draw.chance(0.2):  # a wrong model is refused
        draw.top_k = int(draw.dice.integers(1, 4))


def llama_moe_trace(draw):
    cut = not draw.chance(0.3)
    draw.expected = [one._replace(cut=cut) for one in fill(draw)]
    files.llama_moe_trace(draw.file(), draw.expected)
    draw.columns = {"phases"}


def pass_records(draw):
    """A pass for each request."""
    draw.expected = [one._replace(prompt=len(one.ids)) for one in fill(draw)]
    files.pass_records(draw.file(), draw.expected)
    draw.columns = {"phases"}


def json_export(draw):
    files.json_export(draw.file(), fill(draw), int(draw.dice.integers(0, 4)))
    draw.columns = {"phases"}


def megatron(draw):
    """Steps are left out; records of draft heads lie between them."""
    records = files.megatron_records(fill(draw, least_prompt=2))
    steps = np.cumsum(draw.dice.integers(1, 3, records[-1]["step"] + 1))
    lines = []
    for record in records:
        lines.append({**record, "step": int(steps[record["step"]])})
        if draw.chance(0.1):
            lines.append({**lines[-1], "block": "mtp", "mtp_idx": 0})
    files.write_lines(draw.file(), lines)
    draw.columns = {"phases"}


def route_trace(draw):
    """Turns of a session, whose positions go on or begin anew."""
    truth = fill(draw)
    goes_on = draw.chance()
    first = 0
    for number, one in enumerate(truth):
        truth[number] = one._replace(first=first, cut=draw.chance())
        first = first + len(one.ids) if goes_on else 0
    files.route_trace(draw.file(), truth, dense=False, dropped=False)
    draw.columns = {"phases", "weights"}


def _table(draw):
    """Rows as any recorder might write them: the sequences, and (sequence, token,
    layer) in an order of its own.
    """
    truth = fill(draw)
    if draw.chance(0.3):
        first = int(draw.dice.integers(1, 50))
        truth = [one._replace(first=first) for one in truth]
    rows = [(n, *row) for n, one in enumerate(truth) for row in one.rows()]
    how = draw.dice.integers(0, 3)
    if how == 1:  # step by step, whoever is running
        arrives = draw.dice.integers(0, 9, len(truth))
        rows.sort(key=lambda r: (arrives[r[0]] + max(0, r[1] - truth[r[0]].prompt), r))
    if how == 2:
        rows = [rows[i] for i in draw.dice.permutation(len(rows))]
    draw.expected = [truth[n] for n in dict.fromkeys(n for n, *_ in rows)]
    draw.columns = {"phases", "weights"}
    return truth, rows


def _states_prompts(draw):
    """Whether an option says how many of the first tokens are prompt, not the file."""
    stated = draw.chance(0.3)
    if stated:
        least = min(len(one.ids) for one in draw.expected)
        draw.options["prompt_tokens"] = str(draw.dice.integers(0, least + 1))
    return stated


def jsonl(draw):
    """Rows by token and layer, or tokens with a list of layers."""
    truth, rows = _table(draw)
    phases = not _states_prompts(draw)
    ascending = draw.chance(0.3)
    if draw.chance(0.4):
        tokens = dict.fromkeys((n, t) for n, t, _ in rows)
        order = [(*token, layer) for token in tokens for layer in range(draw.layers)]
        how = {"order": order, "ascending": ascending}
        files.per_token(draw.file(), truth, phases=phases, **how)
        return
    both = draw.chance(0.15)
    lines = []
    cells = files.cells(truth, order=rows, ascending=ascending)
    for cell, (n, t, _) in zip(cells, rows, strict=True):
        line = {"seq_id": f"s{n}", "layer": cell.layer, "expert_ids": cell.ids}
        line["weights"] = cell.weights
        if both:
            line |= {"step": cell.pos, "token": int(truth[n].token[t])}
        else:
            line["pos"] = cell.pos
        lines.append(line | ({"phase": cell.phase} if phases else {}))
    files.write_lines(draw.file(), lines)


def columns(draw):
    """CSV or Parquet: lists, numbered columns, or a row for each expert; one file, or
    one for each layer.
    """
    import pandas as pd

    kind = str(draw.dice.choice(["lists", "wide", "long"]))
    by_layer = kind != "long" and draw.chance(0.4)
    truth, rows = _table(draw)
    how = {"phases": not _states_prompts(draw)}
    how["ascending"] = kind != "long" and draw.chance(0.3)
    counted = by_layer and draw.chance()
    if counted:  # positions are the order of the rows
        truth = [one._replace(first=0) for one in truth]
        rows.sort(key=lambda r: (r[1], r[0]) if draw.layers % 2 else r)
    table = pd.DataFrame(files.columns_rows(truth, kind, order=rows, **how))
    if kind == "wide":
        draw.options["map"] = "experts=e*,weights=w*"
    if kind == "long" and draw.chance():
        table = table.sample(frac=1, random_state=draw.dice)
    parts = {"dump": table}
    if by_layer:
        table = table.drop(columns="pos") if counted else table
        parts = {
            f"layer{layer}": part.drop(columns="layer")
            for layer, part in table.groupby("layer")
        }
    if by_layer and not counted:  # each file in its own order
        for name in list(parts)[1:]:
            if draw.chance():
                parts[name] = parts[name].sample(frac=1, random_state=draw.dice)
    seen = next(iter(parts.values()))["seq"] // 10
    draw.expected = [truth[n] for n in dict.fromkeys(seen)]
    as_csv = draw.chance()
    for name, part in parts.items():
        if as_csv:
            texts = {
                column: part[column].map(lambda v: " ".join(map(str, v)))
                for column in {"experts", "weights"} & set(part)
            }
            part.assign(**texts).to_csv(draw.file(f"{name}.csv"), index=False)
        else:
            part.to_parquet(draw.file(f"{name}.parquet"), index=False)


def routing_rows(draw):
    """A runtime's own table, step by step."""
    truth, rows = _table(draw)
    how = {"order": rows, "ascending": draw.chance(0.3)}
    files.routing_rows(draw.file(), truth, **how)


def moesim_trace(draw):
    """Our own layout, its rows in another order: numbers of sequences stay."""
    truth, rows = _table(draw)
    draw.expected = truth
    weights = draw.chance()
    how = {"shape": draw.shape, "order": rows, "weights": weights}
    files.moesim_unordered(draw.file(), truth, **how)
    draw.columns = {"phases", "weights"} if weights else {"phases"}


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
    draw = drawn([seed, len(importer)], folder)
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
    expected = [one for one in draw.expected if len(one.ids)]
    if "prompt_tokens" in draw.options:
        prompt = int(draw.options["prompt_tokens"])
        expected = [one._replace(prompt=prompt) for one in expected]
    compare(open_trace(out), expected, draw.columns)
    return ""
