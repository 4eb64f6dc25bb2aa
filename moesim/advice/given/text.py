"""An answer about a line as text for a terminal, and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moesim.advice.given.reading import need_words
from moesim.advice.plan.commands import layers_in_words
from moesim.advice.text import (
    interval_json,
    limit_words,
    memory_words,
    model_words,
    speed_words,
)
from moesim.base.units import format_bytes, number
from moesim.reporting.tables import facts_lines

if TYPE_CHECKING:
    from moesim.advice.given.answer import Change, FlagsAnswer

MARKS = {
    "stops": "stops here",
    "ignored": "ignored",
    "contradicts": "contradicts itself",
    "means": "means",
    "note": "note",
}


def flags_text(answer: FlagsAnswer) -> str:
    """Lay out an answer about a line."""
    blocks = [facts_lines(_facts(answer))]
    ranked = sorted(answer.findings, key=lambda each: list(MARKS).index(each.kind))
    if ranked:
        rows = [(MARKS[each.kind], each.words) for each in ranked]
        blocks.append(facts_lines(rows))
    if answer.verdict is not None:
        blocks.append(_verdict_lines(answer))
    if answer.changes:
        head = "what to change first:"
        if need_words(answer.reading) != "fits":
            head = "what fits instead:"
        blocks.append([head, *facts_lines(_rows(answer.changes))])
    elif answer.reading.bill.fits:
        blocks.append(["nothing to change: no flag gains more than 3 % of the job"])
    if answer.target is not None:
        blocks.append(_target_lines(answer))
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _facts(answer: FlagsAnswer) -> list[tuple[str, str]]:
    reading = answer.reading
    machine = reading.machine
    now = answer.prospect
    facts = [
        ("model", model_words(answer.model)),
        ("machine", f"{machine.name}{memory_words(machine)}"),
        ("read as", f"{reading.given.engine}; {place_words(answer)}"),
    ]
    if machine.assumed:
        facts.append(("assumed", "; ".join(machine.assumed)))
    facts.append(("memory", _memory_words(answer)))
    for card in reading.bill.cards:
        sizes = f"{format_bytes(card.needed)} of {format_bytes(card.free)}"
        facts.append((card.name, f"{card.layers} layers, {sizes}"))
    job = reading.job
    depth = f" at {job.mean_depth:,.0f} tokens deep"
    if job.sequences > 1:
        depth += f", of all {job.sequences} requests together"
    decode = f"{speed_words(now.decode)}{depth}; {limit_words(now.decode_terms)}"
    facts.append(("decode", decode))
    deep = f"{speed_words(answer.deep)} at the end of {job.context:,} tokens"
    facts.append(("decode, deep", deep))
    facts.append(
        ("prompt", f"{speed_words(now.prefill)}; {limit_words(now.prefill_terms)}")
    )
    return facts


def place_words(answer: FlagsAnswer) -> str:
    """Say where the line puts layers and experts."""
    reading = answer.reading
    model = answer.model
    if not reading.machine.graphics or not reading.setting.gpu_layers:
        return "everything on the CPU"
    on_host = reading.setting.on_host(model)
    first = reading.setting.first_gpu_layer(model)
    words = []
    if first:
        words.append(f"layers {layers_in_words(range(first))} whole on the CPU")
    if not on_host:
        words.append("all experts on the card")
    elif len(on_host) == len(model.moe_layers):
        words.append("all experts on the CPU")
    else:
        words.append(f"experts of layers {layers_in_words(on_host)} on the CPU")
    if reading.setting.kv_on_host:
        words.append("keys and values on the CPU")
    return ", ".join(words)


def _memory_words(answer: FlagsAnswer) -> str:
    reading = answer.reading
    bill = reading.bill
    words = [need_words(reading)]
    if reading.machine.graphics and math.isfinite(bill.gpu_free):
        words.append(
            f"graphics memory {format_bytes(bill.gpu_bytes)} of"
            f" {format_bytes(bill.gpu_free)}"
        )
    words.append(f"host memory {format_bytes(bill.host_bytes)}")
    words += [
        f"{format_bytes(size)} of {item} in the file"
        for item, size in bill.file.items()
    ]
    if answer.most_context:
        words.append(f"the largest context is {answer.most_context:,} tokens")
    else:
        words.append("no context fits")
    return "; ".join(words)


def _rows(changes: tuple[Change, ...]) -> list[tuple[str, str]]:
    rows = []
    for each in changes:
        words = f"decode {number(each.decode.value)}"
        if each.prefill is not None:
            words += f", prompt {number(each.prefill.value)} tokens/s"
            words += f"; the job {each.gain:.2f} times as fast"
        else:
            words += f" tokens/s; {each.gain:.2f} times"
        rows.append((each.words, words))
    return rows


def _verdict_lines(answer: FlagsAnswer) -> list[str]:
    verdict = answer.verdict
    assert verdict is not None
    measured = number(verdict.measured)
    expected = speed_words(verdict.expected)
    if verdict.word == "normal":
        return [f"{measured} tokens/s is normal here: {expected} are expected"]
    if verdict.word == "faster":
        return [f"{measured} tokens/s is faster than expected: {expected}"]
    lines = [f"{measured} tokens/s is slow: {expected} are expected; likely causes:"]
    if not verdict.causes:
        return [*lines, "  none that slows this term alone"]
    for each in verdict.causes:
        lines.append(f"  {each.words} (would give {number(each.tokens_per_s)})")
        lines.append(f"    {each.command}")
    return lines


def _target_lines(answer: FlagsAnswer) -> list[str]:
    assert answer.target is not None
    wished = number(answer.target)
    now = answer.prospect.decode
    if now.value >= answer.target:
        return [f"{wished} tokens/s are reached as it is: {speed_words(now)}"]
    reached = [each for each in answer.ways if each.decode.value >= answer.target]
    head = f"to reach {wished} tokens/s:"
    if not reached:
        head = f"nothing known reaches {wished} tokens/s; what comes nearest:"
    return [head, *facts_lines(_rows(answer.ways))]


def flags_json(answer: FlagsAnswer) -> dict[str, Any]:
    """Return an answer about a line as plain values."""
    reading = answer.reading
    verdict = answer.verdict

    def change(each: Change) -> dict[str, Any]:
        prompt = None if each.prefill is None else interval_json(each.prefill)
        return {
            "change": each.words,
            "decode_tokens_per_s": interval_json(each.decode),
            "prompt_tokens_per_s": prompt,
            "gain": each.gain,
        }

    return {
        "engine": reading.given.engine,
        "machine": reading.machine.name,
        "placement": place_words(answer),
        "experts_on_cpu_layers": list(reading.setting.on_host(answer.model)),
        "fits": need_words(reading),
        "gpu_bytes": reading.bill.gpu,
        "host_bytes": reading.bill.host,
        "file_bytes": reading.bill.file,
        "cards": [asdict(card) for card in reading.bill.cards],
        "context_tokens": reading.job.context,
        "most_context_tokens": answer.most_context,
        "decode_tokens_per_s": interval_json(answer.prospect.decode),
        "decode_at_full_context_tokens_per_s": interval_json(answer.deep),
        "prompt_tokens_per_s": interval_json(answer.prospect.prefill),
        "findings": [asdict(each) for each in answer.findings],
        "changes": [change(each) for each in answer.changes],
        "verdict": None
        if verdict is None
        else {
            "measured_tokens_per_s": verdict.measured,
            "word": verdict.word,
            "causes": [asdict(each) for each in verdict.causes],
        },
        "target_tokens_per_s": answer.target,
        "ways": [change(each) for each in answer.ways],
    }
