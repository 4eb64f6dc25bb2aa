"""Advice as text for a terminal: the best command line, how fast, what limits it; and
as plain JSON values, with units in their names.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moesim.advice.plan.commands import flags_of, layers_in_words, server_command
from moesim.advice.plan.memory import TABLES
from moesim.advice.routing import COUNTS_FILE, FREQUENCY
from moesim.advice.routing import server_command as mask_command
from moesim.advice.times.latents import NINETY
from moesim.base.units import format_bytes, ms, number
from moesim.reporting.tables import aligned, facts_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.advice.advise import Advice
    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.ranking import Prospect
    from moesim.advice.times.latents import Interval
    from moesim.runs.bound import RoutingBound

OLDER_BUILDS = (
    "(llama.cpp from before June 2026: --no-mmap for --load-mode none, -mmp 0 for"
    " -lm none)"
)


UNLOCKED = (
    "refused beyond a share of memory by the driver under {}: set"
    " GGML_CUDA_NO_PINNED=1; uploads are then slower, and counted so"
)


def advice_text(
    advice: Advice, *, explain: bool = False, counts_file: str = COUNTS_FILE
) -> str:
    """Lay out an answer.

    Args:
        advice: what was found out.
        explain: also print the seconds of every term.
        counts_file: of experts, for ktransformers.
    """
    blocks = [facts_lines(_asked(advice)), _command_lines(advice)]
    blocks.append(facts_lines(_answer(advice)))
    blocks.append(aligned(setting_rows(advice), lead=1))
    blocks.append(tie_lines(advice))
    if explain:
        blocks.append(aligned(term_rows(advice.best)))
    if advice.what_ifs:
        blocks.append(["what would change it:", *facts_lines(_change_facts(advice))])
    blocks += _mask_blocks(advice, counts_file)
    blocks.append(row_lines(advice))
    blocks.append(_question_lines(advice))
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _asked(advice: Advice) -> list[tuple[str, str]]:
    """Model, machine and job in words."""
    machine = advice.machine
    facts = [("model", model_words(advice.model))]
    facts.append(("machine", f"{machine.name}{memory_words(machine)}"))
    facts.append(("known from", grade_words(advice)))
    if machine.assumed:
        facts.append(("assumed", "; ".join(machine.assumed)))
    job = advice.job
    words = (
        f"prompt of {job.prompt:,} and answer of {job.answer:,} tokens, context"
        f" {job.context:,}"
    )
    if job.sequences > 1:
        words += f", {job.sequences} requests at the same time"
    facts.append(("job", words))
    return facts


def model_words(model: ModelContents) -> str:
    """Put a model in words: name, format, size, experts."""
    layer = model.layers[model.moe_layers[0]]
    # File names often hold the format already.
    name = model.name if model.quant in model.name else f"{model.name} {model.quant}"
    return (
        f"{name.strip()}, {format_bytes(model.file_bytes)};"
        f" {len(model.moe_layers)} MoE layers with {layer.experts} experts,"
        f" {layer.top_k} per token ({model.source})"
    )


def grade_words(advice: Advice) -> str:
    """Say what the speeds rest on."""
    grades = {
        "spec": "specification alone",
        "probed": "probes on the machine",
        "observed": f"{len(advice.observed.used)} measured rows",
    }
    return grades[advice.grade.value]


def _command_lines(advice: Advice) -> list[str]:
    best = advice.best.candidate.setting
    command = server_command(best, advice.model, advice.machine, advice.job)
    return [command, OLDER_BUILDS] if "--load-mode" in command else [command]


def _answer(advice: Advice) -> list[tuple[str, str]]:
    """Speeds of the best setting with intervals, limits, bill and bound."""
    best = advice.best
    bill = best.candidate.bill
    requests = advice.job.sequences
    together = ""
    if requests > 1:
        together = f" of all {requests} requests together"
    decode = f"{speed_words(best.decode)}{together}; {limit_words(best.decode_terms)}"
    facts = [
        ("decode", decode),
        ("prompt", f"{speed_words(best.prefill)}; {limit_words(best.prefill_terms)}"),
        ("the job", interval_words(best.job, "s")),
    ]
    if advice.machine.graphics:
        words = format_bytes(bill.gpu_bytes)
        if math.isfinite(bill.gpu_free):
            words += (
                f" of {format_bytes(bill.gpu_free)}; {format_bytes(bill.gpu_left)} of"
                " headroom before it spills into host memory"
            )
        facts.append(("graphics memory", words))
    facts += [
        (
            card.name,
            (
                f"{card.layers} layers, {format_bytes(card.needed)} of"
                f" {format_bytes(card.free)}"
            ),
        )
        for card in bill.cards
    ]
    if bill.pages:
        facts.append(("SSD", "experts that memory cannot hold are read from the file"))
    for item, stored in bill.file.items():
        words = f"{format_bytes(stored)} stay in the file, read row by row"
        facts.append((item, words))
    host = format_bytes(bill.host_bytes)
    if TABLES in bill.host:
        host += f", {format_bytes(bill.host[TABLES])} of it {TABLES}"
    if bill.host_left is not None:
        spare = "to spare" if bill.host_left >= 0 else "more than there is"
        host += f"; {format_bytes(abs(bill.host_left))} {spare}"
    facts.append(("host memory", host))
    if best.candidate.setting.on_host(advice.model) and not (
        best.candidate.setting.page_locked or best.candidate.setting.mapped
    ):
        facts.append(("page-locking", UNLOCKED.format(advice.machine.system)))
    facts.append(("bound", bound_words(advice)))
    if advice.routing is not None:
        facts.append(("any schedule", routing_words(advice, advice.routing.bound)))
    return facts


def bound_words(advice: Advice) -> str:
    """Say how far the advised setting is from what bytes over bandwidth allow."""
    bound = advice.bound
    share = advice.best.decode.value / (
        bound.tokens_per_s * advice.best.candidate.setting.sequences
    )
    return (
        f"decode at {100 * share:.0f} % of what this machine can do at best with the"
        f" weights in these places: {number(bound.tokens_per_s)} steps/s, set by"
        f" {bound.resource}"
    )


def routing_words(advice: Advice, bound: RoutingBound) -> str:
    """Say how far the advised setting is from any schedule of the user's routing."""
    sequences = advice.best.candidate.setting.sequences
    share = advice.best.decode.value / (bound.steps_per_s * sequences)
    return (
        f"decode at {100 * share:.0f} % of what this machine can do at best with this"
        f" routing, wherever experts lie: {number(bound.steps_per_s)} steps/s, set by"
        f" {bound.resource} ({bound.reads:,} of {bound.accesses:,} expert reads of"
        f" {bound.steps:,} steps cannot be avoided)"
    )


def mask_rows(advice: Advice) -> list[list[str]]:
    """One row per placement strategy of kt-kernel, fastest first."""
    rows = [["strategy", "experts per layer", "served by the card", "decode t/s"]]
    masks = () if advice.routing is None else advice.routing.masks
    rows += [
        [
            plan.strategy,
            str(plan.per_layer),
            f"{100 * plan.on_card:.0f} %",
            speed_words(plan.decode, unit=""),
        ]
        for plan in masks
    ]
    return rows


def _mask_blocks(advice: Advice, counts_file: str) -> list[list[str]]:
    """Lines for ktransformers: its command, then its strategies."""
    if advice.routing is None or not advice.routing.masks:
        return []
    first = advice.routing.masks[0]
    command = mask_command(advice.forecast, first, counts_file)
    lines = ["the same memory under ktransformers:", f"  {command}"]
    table = [f"  {line}" for line in aligned(mask_rows(advice), lead=1)]
    origin = "chosen on one half of the routing and judged on the other; experts on the"
    notes = [f"{origin} card in as many bytes as in host memory"]
    if first.strategy == FREQUENCY:
        notes.append(f"--expert-counts {counts_file} writes the file that it reads")
    return [[*lines, *table, *notes]]


def setting_rows(advice: Advice) -> list[list[str]]:
    """One row per setting, fastest first."""
    rows = [
        ["layers on the CPU", "-ub", "KV", "decode t/s", "prompt t/s", "job", "GPU"]
    ]
    for prospect in advice.prospects:
        setting = prospect.candidate.setting
        rows.append(
            [
                place_words(advice, prospect) + (" =" if prospect.tied else ""),
                str(setting.micro_batch),
                setting.kv_format,
                speed_words(prospect.decode, unit=""),
                speed_words(prospect.prefill, unit=""),
                ms(prospect.job.value),
                format_bytes(prospect.candidate.bill.gpu_bytes),
            ]
        )
    return rows


def place_words(advice: Advice, prospect: Prospect) -> str:
    """Say where a setting puts layers."""
    setting = prospect.candidate.setting
    if not advice.machine.graphics:
        return "all"
    on_host = setting.on_host(advice.model)
    layers = setting.first_gpu_layer(advice.model)
    # Whole layers off the card matter more than where experts are.
    if layers:
        return f"{layers} whole"
    if setting.chosen_layers is not None:
        return f"experts of {layers_in_words(on_host)}"
    return str(setting.cpu_layers) if on_host else "none"


def tie_lines(advice: Advice) -> list[str]:
    """Name ties, and what other formats of keys and values would give."""
    lines = []
    ties = sum(prospect.tied for prospect in advice.prospects)
    if ties:
        lines.append(
            f"= {ties} of these cannot be told from the first: noise, or what is not"
            " known of the machine, could turn the order"
        )
    for prospect, words in (
        (advice.faster, "fast, but it may spill: the bill of memory is not so sure"),
        (advice.rounded, "rounded keys and values change answers a little"),
    ):
        if prospect is not None:
            flags = flags_of(prospect.candidate.setting, advice.model, advice.machine)
            lines.append(
                f"{words}; decode {speed_words(prospect.decode)} with {' '.join(flags)}"
            )
    return lines


def term_rows(prospect: Prospect) -> list[list[str]]:
    """Seconds by term: of one decode step and of the prompt."""
    rows = [["where the time goes", "a decode step", "share", "the prompt", "share"]]
    # Decode and prompt share most terms; each gets one line.
    names = [*prospect.decode_terms, *prospect.prefill_terms]
    rows += [
        [
            term_words(name),
            *_term_cells(prospect.decode_terms, name),
            *_term_cells(prospect.prefill_terms, name),
        ]
        for name in dict.fromkeys(names)
    ]
    return rows


def _term_cells(terms: Mapping[str, float], name: str) -> list[str]:
    seconds = terms.get(name)
    if not seconds:
        return ["", ""]
    return [ms(seconds), f"{100 * seconds / sum(terms.values()):.0f} %"]


def what_if_rows(advice: Advice) -> list[list[str]]:
    """One row per change of machine or model."""
    rows = [["change", "decode t/s", "factor", "note"]]
    for change in advice.what_ifs:
        speed = number(change.decode.value) if change.factor else "-"
        factor = f"{change.factor:.2f}" if change.factor else "-"
        rows.append([change.change, speed, factor, change.note])
    return rows


def _change_facts(advice: Advice) -> list[tuple[str, str]]:
    return [
        (
            change,
            f"{speed} tokens/s, {factor} times{f'; {note}' if note else ''}"
            if speed != "-"
            else note,
        )
        for change, speed, factor, note in what_if_rows(advice)[1:]
    ]


def row_lines(advice: Advice) -> list[str]:
    """Say which measured rows were used, and which contradict the rest."""
    observed = advice.observed
    if not observed.rows:
        return []
    lines = [f"learned from {len(observed.used)} of {len(observed.rows)} rows"]
    for surprise in observed.surprises:
        slow = surprise.row
        lines.append(
            f"slower than expected: {slow.words}, {number(slow.row.tokens_per_s)}"
            f" tokens/s against {number(slow.expected)}; what would give about that:"
        )
        lines += [
            f"  {each.words} ({number(each.tokens_per_s)} tokens/s); {each.command}"
            for each in surprise.explanations
        ]
    for row, reason in observed.contradicting:
        lines.append(f"  set aside: {row.words}: {reason}")
    # Many rows of one file are one line.
    names = sorted({row.text("model_filename") for row in observed.foreign})
    lines += [f"  of a model that is not at hand: {name}" for name in names]
    return lines


def _question_lines(advice: Advice) -> list[str]:
    if not advice.questions:
        return []
    lines = ["to know more, run these and give --bench rows.jsonl:"]
    for question in advice.questions:
        lines.append(f"  {question.command}")
        before = 100 * NINETY * question.spread_before
        after = 100 * NINETY * question.spread_after
        lines.append(
            f"    {question.reason}; the job is then known to +-{after:.1f} % instead"
            f" of +-{before:.1f} %"
        )
    return lines


def model_text(model: ModelContents) -> str:
    """Lay out what a model file holds, layer by layer."""
    weights = (
        f"{model.weights / 1e9:.2f} billion, {model.active_weights / 1e9:.2f} billion"
        " per token"
    )
    head = f"{format_bytes(model.head_bytes)} {model.head_format}"
    if model.tied:
        head += " (the embeddings)"
    keys = f"{format_bytes(model.kv_bytes(1024))} per 1,024 tokens in f16"
    facts = [
        ("model", model_words(model)),
        ("architecture", model.architecture),
        ("weights", weights),
        ("embeddings", format_bytes(model.embed_bytes)),
        ("head", head),
        ("keys and values", keys),
    ]
    if model.table_bytes:
        tables = f"{format_bytes(model.table_bytes)}, {model.table_rows} rows per token"
        facts.append(("look-up tables", tables))
    if model.unused_bytes:
        facts.append(("not run", format_bytes(model.unused_bytes)))
    if model.assumed:
        facts.append(("assumed", "; ".join(model.assumed)))
    lines = [*facts_lines(facts), "", *aligned(layer_rows(model))]
    return "\n".join(lines)


def layer_rows(model: ModelContents) -> list[list[str]]:
    """One row for each run of equal layers."""
    rows = [["layers", "dense", "experts", "per token", "expert formats"]]
    start = 0
    for at in range(1, len(model.layers) + 1):
        # Runs of equal layers are one line; models have up to 94.
        if at < len(model.layers) and model.layers[at] == model.layers[start]:
            continue
        layer = model.layers[start]
        last = at - 1
        rows.append(
            [
                str(start) if start == last else f"{start}-{last}",
                format_bytes(layer.dense_bytes),
                format_bytes(layer.expert_bytes) if layer.experts else "-",
                format_bytes(layer.dense_bytes + layer.active_bytes),
                " ".join(layer.expert_formats) or "-",
            ]
        )
        start = at
    return rows


TERMS = {
    "step": "start of a step",
    "gpu weights": "GPU reads weights",
    "gpu kernels": "GPU starts kernels",
    "gpu keys and values": "GPU reads keys and values",
    "gpu products": "GPU multiplies",
    "attention": "attention",
    "upload": "upload of experts",
    "ssd": "SSD reads experts",
    "look-up tables": "look-up tables from the file",
    "sampling": "sampling, request by request",
    "cpu experts": "CPU reads experts",
    "cpu floor": "start of CPU layers",
    "cpu other layers": "CPU runs whole layers",
    "cpu keys and values": "CPU reads keys and values",
}


def term_words(name: str) -> str:
    """Return a term's name where people read."""
    return TERMS.get(name, name)


def interval_words(interval: Interval, unit: str) -> str:
    """Write ``12.3 s (90 %: 10.1 to 15.0)``."""
    low = number(interval.low)
    high = number(interval.high)
    return f"{number(interval.value)} {unit} (90 %: {low} to {high})"


def speed_words(interval: Interval, unit: str = "tokens/s") -> str:
    """Write a speed with its interval; without a unit as ``12.3 (10.1-15.0)``."""
    if unit:
        return interval_words(interval, unit)
    return f"{number(interval.value)} ({number(interval.low)}-{number(interval.high)})"


def limit_words(terms: Mapping[str, float]) -> str:
    """Say which term takes most of the time, and how much."""
    name = max(terms, key=lambda each: terms[each])
    share = terms[name] / sum(terms.values())
    return f"{100 * share:.0f} % of it: {term_words(name)}"


def memory_words(machine: Machine) -> str:
    """Say how much memory a machine has, as far as it is known."""
    memory = machine.memory
    parts = []
    if memory.size_bytes:
        parts.append(format_bytes(memory.size_bytes))
    if memory.generation:
        rate = f"-{memory.rate}" if memory.rate else ""
        parts.append(f"DDR{memory.generation}{rate}")
    # Assumed channels are among the assumptions, not here.
    if memory.channels and memory.rate:
        parts.append(f"{memory.channels} channels")
    words = f", {' '.join(parts)}" if parts else ""
    if machine.link_bytes_per_s and not machine.unified:
        words += f", link {machine.link_bytes_per_s / 1e9:.1f} GB/s"
    return words


def advice_json(advice: Advice) -> dict[str, Any]:
    """Return everything that the text says, and the whole curve."""
    machine = advice.machine
    return {
        "model": model_summary(advice.model),
        "machine": {
            "name": machine.name,
            "grade": advice.grade.value,
            "assumed": list(machine.assumed),
            "host_peak_bytes_per_s": machine.host_peak_bytes_per_s,
            "host_memory_bytes": machine.memory.size_bytes,
            "graphics": [asdict(card) for card in machine.graphics],
            "link_bytes_per_s": machine.link_bytes_per_s,
            "unified": machine.unified,
        },
        "job": asdict(advice.job),
        "settings": [_prospect(advice, each) for each in advice.prospects],
        "rounded_keys_and_values": _optional(advice, advice.rounded),
        "faster_but_near_spilling": _optional(advice, advice.faster),
        "bound": asdict(advice.bound) | {"tokens_per_s": advice.bound.tokens_per_s},
        "routing": _routing(advice),
        # Readers draw their own figures from it.
        "curve": [
            {
                "cpu_layers": point.cpu_layers,
                "decode_tokens_per_s": interval_json(point.decode),
                "prefill_tokens_per_s": interval_json(point.prefill),
                "gpu_bytes": point.gpu_bytes,
                "fits": point.fits,
            }
            for point in advice.curve
        ],
        "what_if": [
            {
                "change": each.change,
                "decode_tokens_per_s": interval_json(each.decode)
                if each.factor
                else None,
                "factor": each.factor,
                "note": each.note,
            }
            for each in advice.what_ifs
        ],
        "observed": _observed(advice),
        "measure_next": [asdict(question) for question in advice.questions],
    }


def _optional(advice: Advice, prospect: Prospect | None) -> dict[str, Any] | None:
    return None if prospect is None else _prospect(advice, prospect)


def _prospect(advice: Advice, prospect: Prospect) -> dict[str, Any]:
    setting = prospect.candidate.setting
    bill = prospect.candidate.bill
    return {
        "command": server_command(setting, advice.model, advice.machine, advice.job),
        "cpu_layers": list(setting.on_host(advice.model)),
        "micro_batch": setting.micro_batch,
        "kv_format": setting.kv_format,
        "tied_with_first": prospect.tied,
        "decode_tokens_per_s": interval_json(prospect.decode),
        "prefill_tokens_per_s": interval_json(prospect.prefill),
        "job_s": interval_json(prospect.job),
        "decode_terms_s": dict(prospect.decode_terms),
        "prefill_terms_s": dict(prospect.prefill_terms),
        "gpu_bytes": dict(bill.gpu),
        "gpu_left_bytes": bill.gpu_left if math.isfinite(bill.gpu_left) else None,
        "safe": bill.safe,
        "cards": [asdict(card) for card in bill.cards],
        "reads_from_ssd": bill.pages,
        "host_bytes": dict(bill.host),
        "host_left_bytes": bill.host_left,
    }


def _routing(advice: Advice) -> dict[str, Any] | None:
    routing = advice.routing
    if routing is None:
        return None
    return {
        "bound": asdict(routing.bound) | {"steps_per_s": routing.bound.steps_per_s},
        "ktransformers": [
            {
                "command": mask_command(advice.forecast, plan),
                "strategy": plan.strategy,
                "experts_per_layer": plan.per_layer,
                "share_on_card": plan.on_card,
                "decode_tokens_per_s": interval_json(plan.decode),
            }
            for plan in routing.masks
        ],
    }


def interval_json(interval: Interval) -> dict[str, float]:
    """Return median and ends of an interval."""
    return {
        "median": interval.value,
        "low_90": interval.low,
        "high_90": interval.high,
    }


def _observed(advice: Advice) -> dict[str, Any]:
    observed = advice.observed
    return {
        "rows": len(observed.rows),
        "used": [
            {
                "row": row.words,
                "measured_tokens_per_s": row.row.tokens_per_s,
                "expected_tokens_per_s": row.expected,
            }
            for row in observed.used
        ],
        "slower_than_expected": [
            {
                "row": surprise.row.words,
                "measured_tokens_per_s": surprise.row.row.tokens_per_s,
                "expected_tokens_per_s": surprise.row.expected,
                "explanations": [asdict(each) for each in surprise.explanations],
            }
            for surprise in observed.surprises
        ],
        "contradicting": [
            {"row": row.words, "reason": reason}
            for row, reason in observed.contradicting
        ],
        "foreign": [row.place for row in observed.foreign],
    }


def model_summary(model: ModelContents) -> dict[str, Any]:
    """Return a model's sums."""
    return {
        "name": model.name,
        "architecture": model.architecture,
        "quant": model.quant,
        "source": model.source,
        "layers": len(model.layers),
        "moe_layers": len(model.moe_layers),
        "file_bytes": model.file_bytes,
        "expert_bytes": model.expert_bytes,
        "dense_bytes": model.dense_bytes,
        "embed_bytes": model.embed_bytes,
        "head_bytes": model.head_bytes,
        "unused_bytes": model.unused_bytes,
        "table_bytes": model.table_bytes,
        "assumed": list(model.assumed),
    }


def model_json(model: ModelContents) -> dict[str, Any]:
    """Return a model's sums and every layer."""
    layers = [asdict(layer) for layer in model.layers]
    return {**model_summary(model), "by_layer": layers}
