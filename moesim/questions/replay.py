"""What one run was worth. Every figure of tokens per second stands beside the bytes
that were moved for it: a speed alone cannot be judged.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from moesim.base.units import format_bytes, ms, number, percent
from moesim.hwprofiles.profile import rate_interval
from moesim.reporting.answers import Answer
from moesim.reporting.parts import Column, Listing, column, trace_words
from moesim.runs.result import busy_shares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.runs.result import Run


def run_answer(run: Run) -> Answer:
    """Say what was run, how fast, what was hit, what each lane did."""
    config = run.config
    metrics = run.metrics
    notes = []
    bound: dict[str, Any] = {"bound": None}
    if run.bound is not None:
        makespan_s = metrics["makespan_s"]
        notes = [f"bound: {run.bound.words(makespan_s)}"]
        bound["bound"] = run.bound.to_json(makespan_s)
    answer = Answer(
        question=f"how fast is {config['options']['policy']}?",
        subject=f"{config['model']} on {config['hw']}",
        setting=setting_facts(config, metrics["steps"]),
        facts=_result_facts(metrics, error_of(run)),
        tables=[_lanes(run)],
        sentences=[_sentence(metrics)],
        notes=notes,
        data=run.to_json() | bound,
        sources={"trace": trace_words(config["trace"], config["trace_digest"])},
        warnings=run.warnings,
        settings=json.dumps(config, indent=1),
    )
    if not any(True for _ in run.timeline.step_chunks()):
        return answer
    # They need pandas, half a second that figures alone need not cost.
    from moesim.questions.timeline import (  # noqa: PLC0415
        placement_drawn,
        run_sections,
        step_drawn,
    )

    answer.figures = {
        "step": partial(step_drawn, run),
        "placement": lambda: placement_drawn(run.placement()),
    }
    # A page holds many passes, to zoom into.
    answer.on_page = partial(run_sections, {"run": run})
    return answer


def _sentence(metrics: Mapping[str, Any]) -> str:
    first = f"first token after {ms(metrics['ttft_s'])}"
    if metrics["decode_tokens_per_s"] is None:
        return first
    return (
        f"{number(metrics['decode_tokens_per_s'])} tokens/s, {first};"
        f" {percent(metrics['hit_rate_active'])} of active experts were hits"
    )


def setting_facts(
    config: Mapping[str, Any], steps: int | None = None
) -> list[tuple[str, str]]:
    """What was run, on which machine, with how much memory.

    Args:
        config: effective.
        steps: forward passes; None where they are not counted.
    """
    passes = "trace " if steps is None else f"{steps:,} forward passes of "
    parts = ("assignment", "cache", "prefetch", "routing", "batch")
    return [
        ("model", f"{config['model']}, {passes}{config['trace']}"),
        ("machine", f"{config['hw']} ({config['hw_kind']} profile)"),
        ("policy", ", ".join(f"{part} {config[part]}" for part in parts)),
        ("cache", cache_words(config)),
        # Runs stored by older versions do not say how they began.
        ("cache began", config.get("begins", "unknown")),
        ("GPU memory", _gpu_memory(config)),
    ]


def error_of(run: Run) -> float | None:
    """By how much a predicted run may be off; None for a measured one."""
    if run.config.get("world") == "measured":
        return None
    return run.config.get("prediction_error")


# The three hit rates differ by tens of points in one run, so each is named.
_FACTS = (
    (
        "hit rate",
        "accesses",
        (
            "{hit_rate_active} of active experts, {hit_rate_gpu} of GPU-assigned ones,"
            " {hit_rate_token} weighted by tokens"
        ),
    ),
    (
        "accesses",
        "accesses",
        "{accesses}: {hits} hits, {delayed_hits} delayed, {misses} misses",
    ),
    ("planning", "makespan_s", "{planning_s} of {makespan_s}, {planning_share}"),
    (
        "prefetch",
        "prefetch_accuracy",
        "{prefetched} copies, {prefetch_accuracy} of them used",
    ),
    ("requests", "requests", "{requests} served"),
    (
        "first token, by request",
        "requests",
        "50 % within {ttft_p50_s}, 95 % within {ttft_p95_s}, 99 % within {ttft_p99_s}",
    ),
    (
        "per token, by request",
        "requests",
        "50 % within {tpot_p50_s}, 95 % within {tpot_p95_s}, 99 % within {tpot_p99_s}",
    ),
    (
        "limits",
        "slo_attainment",
        "{slo_attainment} within them, {goodput_per_s} such requests/s",
    ),
    ("energy", "energy_j", "{energy_j}, {tokens_per_kj} tokens per kJ"),
    (
        "routing",
        "altered",
        "{routing}: counterfactual, {gate_mass_kept} of the gate mass kept",
    ),
    (
        "answers",
        "early",
        "approximate: experts start one layer early, or join one layer late",
    ),
)
"""What is said of a run, the metric without which it is not said, and the words with
metrics in their places.
"""


def _result_facts(
    metrics: Mapping[str, Any], error: float | None
) -> list[tuple[str, str]]:
    """How fast it was, what was hit, and whatever else there is to say."""
    known = {
        **metrics,
        # Measured runs have no arrivals.
        **(metrics.get("requests") or {}),
        "altered": None if metrics["routing"] == "recorded" else "yes",
        "early": metrics["approximate"] or None,
    }
    words = {
        name: column(name).cell(value)
        for name, value in known.items()
        if not isinstance(value, dict)
    }
    return [
        ("first token", _speed(metrics, "ttft_s", "prefill", error)),
        ("per token", _speed(metrics, "tpot_s", "decode", error)),
        *(
            (name, text.format_map(words))
            for name, needed, text in _FACTS
            if known.get(needed) is not None
        ),
    ]


def _lanes(run: Run) -> Listing:
    """A row for each lane; empty cells where a lane cannot stall or move bytes."""
    metrics = run.metrics
    shares = busy_shares(run)
    rows = [
        [
            lane,
            busy_s,
            shares[lane],
            metrics["stall_s"].get(lane, ""),
            *(metrics[name].get(lane) or "" for name in ("bytes", "bandwidth")),
        ]
        for lane, busy_s in metrics["busy_s"].items()
    ]
    columns = [
        Column("lane", "lane"),
        Column("busy_s", "busy", "s"),
        Column("share", "of the run", "share"),
        Column("stall_s", "waits for copies", "s"),
        Column("bytes", "moved", "bytes"),
        Column("bandwidth", "bandwidth", "bytes/s"),
    ]
    return Listing(rows, columns)


def cache_words(config: Mapping[str, Any]) -> str:
    """Slots of the GPU cache and their bytes; host memory where that is limited."""
    slots = config["cache_slots"]
    # One pool for all layers has one entry, else there is one for each layer.
    if config["cache_scope"] == "global":
        held = f"{slots[0]:,} experts of any layer"
    elif max(slots) > min(slots):
        held = f"{min(slots)} to {max(slots)} experts per layer"
    else:
        held = f"{min(slots)} experts per layer"
    # Slots count the largest experts, and others are smaller.
    least = "at least " if "expert_sizes" in config else ""
    size = (
        f"{least}{held}, {percent(config['cache_ratio'])} of all"
        f" ({format_bytes(config['cache_bytes'])})"
    )
    # None: host memory holds every expert, which needs no mention.
    if config["host_bytes"] is None:
        return size
    host = format_bytes(config["host_bytes"])
    return f"{size}; {host} of experts in host memory, the rest on SSD"


def _gpu_memory(config: Mapping[str, Any]) -> str:
    each = "each of them takes " if config["gpus"] > 1 else ""
    bill = config["gpu_bill"]
    names = {
        "staging": f"{config['staging']} staged experts",
        "keys and values": (
            f"keys and values of {config['options']['context_tokens']:,} tokens"
        ),
    }
    items = [f"{names.get(name, name)} {format_bytes(n)}" for name, n in bill.items()]
    return f"{each}{format_bytes(sum(bill.values()))}: {', '.join(items)}"


def _speed(
    metrics: Mapping[str, Any], time: str, phase: str, error: float | None
) -> str:
    """Time and tokens per second of a phase, also per sequence where that differs; with
    the profile's interval where it has one.
    """
    total = metrics[f"{phase}_tokens_per_s"]
    if total is None:
        return f"the trace has no {phase}"
    unit = "prompt tokens/s" if phase == "prefill" else "tokens/s"
    speed = f"{ms(metrics[time])}, {number(total)} {unit}"
    if error is not None:
        low, high = rate_interval(total, error)
        speed += f" ({number(low)}–{number(high)})"  # noqa: RUF001 - a range

    # With one sequence both rates are one; a batch serves each of its sequences slower.
    each = metrics[f"{phase}_tokens_per_s_seq"]
    if each is None or math.isclose(total, each, rel_tol=1e-3):
        return speed
    return f"{speed} ({number(each)} per sequence)"
