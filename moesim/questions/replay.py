"""What one run was worth. Every figure of tokens per second stands beside the bytes
that were moved for it: a speed alone cannot be judged.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from moesim.base.units import bandwidth, format_bytes, ms, number, percent
from moesim.hwprofiles.profile import rate_interval
from moesim.reporting.answers import HEADS, Answer, Listing
from moesim.reporting.pages import trace_words
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
        bound["bound"] = run.bound.to_json() | {"share": run.bound.share(makespan_s)}
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
    if any(True for _ in run.timeline.step_chunks()):
        _draw_with(answer, run)
    return answer


def _draw_with(answer: Answer, run: Run) -> None:
    """Add what a timeline can show."""
    # They need pandas, half a second that figures alone need not cost.
    from moesim.questions.lanes import (  # noqa: PLC0415
        add_runs,
        course_drawn,
        placement_drawn,
    )
    from moesim.questions.timeline import step_drawn  # noqa: PLC0415

    answer.figures = {
        "step": lambda **which: step_drawn(run, **which),
        "placement": lambda: placement_drawn(run.placement()),
        "passes": lambda: course_drawn({"run": run}),
    }
    # A page holds many passes, to zoom into.
    answer.on_page = lambda page: add_runs(page, {"run": run})


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
    passes = "" if steps is None else f"{steps:,} forward passes of "
    facts = [
        ("model", f"{config['model']}, {passes}{config['trace']}"),
        ("machine", f"{config['hw']} ({config['hw_kind']} profile)"),
        ("policy", _policy_parts(config)),
        ("cache", _cache_size(config)),
        # Runs stored by older versions do not say how they began.
        ("cache began", str(config.get("begins", "unknown"))),
    ]
    # Runs stored by older versions do not say what a GPU's memory was taken by.
    if "gpu_bill" in config:
        facts.append(("GPU memory", _gpu_memory(config)))
    return facts


def error_of(run: Run) -> float | None:
    """By how much a predicted run may be off; None for a measured one."""
    if run.config.get("world") == "measured":
        return None
    return run.config.get("prediction_error")


def _result_facts(
    metrics: Mapping[str, Any], error: float | None
) -> list[tuple[str, str]]:
    """How fast it was, and what was hit; energy and prefetches where there are any."""
    facts = [
        ("first token", _speed(metrics, "ttft_s", "prefill", error)),
        ("per token", _speed(metrics, "tpot_s", "decode", error)),
        ("hit rate", _hit_rates(metrics)),
        ("accesses", _access_counts(metrics)),
        (
            "planning",
            (
                f"{ms(metrics['planning_s'])} of {ms(metrics['makespan_s'])},"
                f" {percent(metrics['planning_share'])}"
            ),
        ),
    ]
    if metrics["prefetched"]:
        accuracy = percent(metrics["prefetch_accuracy"])
        facts.append(
            ("prefetch", f"{metrics['prefetched']:,} copies, {accuracy} of them used")
        )
    # Measured runs have no arrivals.
    if metrics.get("requests"):
        facts += _request_facts(metrics["requests"])
    if metrics["energy_j"] is not None:
        efficiency = number(metrics["tokens_per_kj"])
        facts.append(
            ("energy", f"{metrics['energy_j']:.0f} J, {efficiency} tokens per kJ")
        )
    if metrics["routing"] != "recorded":
        kept = percent(metrics["gate_mass_kept"])
        facts.append(
            (
                "routing",
                f"{metrics['routing']}: counterfactual, {kept} of the gate mass kept",
            )
        )
    if metrics["approximate"]:
        facts.append(
            (
                "answers",
                "approximate: experts start one layer early, or join one layer late",
            )
        )
    return facts


def _request_facts(served: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What users of a server see."""
    facts = [("requests", f"{served['requests']:,} served")]
    for name in ("ttft", "tpot"):
        words = f"{HEADS[f'{name}_s']}, by request"
        shares = ", ".join(
            f"{percent} % within {ms(served[f'{name}_p{percent}_s'])}"
            for percent in (50, 95, 99)
        )
        facts.append((words, shares))
    if served["slo_attainment"] is not None:
        goodput = number(served["goodput_per_s"])
        within = percent(served["slo_attainment"])
        facts.append(("limits", f"{within} within them, {goodput} such requests/s"))
    return facts


def _lanes(run: Run) -> Listing:
    """A row for each lane; empty cells where a lane cannot stall or move bytes."""
    metrics = run.metrics
    shares = busy_shares(run)
    rows = []
    for lane, busy_s in metrics["busy_s"].items():
        # Only links move bytes, and only compute lanes wait for copies.
        moved = metrics["bytes"].get(lane)
        can_stall = lane in metrics["stall_s"]
        rows.append(
            [
                lane,
                ms(busy_s),
                percent(shares[lane]),
                ms(metrics["stall_s"][lane]) if can_stall else "",
                format_bytes(moved) if moved else "",
                bandwidth(metrics["bandwidth"].get(lane)) if moved else "",
            ]
        )
    return Listing.of(
        ["lane", "busy", "of the run", "waits for copies", "moved", "bandwidth"], rows
    )


def _policy_parts(config: Mapping[str, Any]) -> str:
    parts = [
        f"{part} {config[part]}"
        for part in ("assignment", "cache", "prefetch", "routing", "batch")
    ]
    return ", ".join(parts)


def _cache_size(config: Mapping[str, Any]) -> str:
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


def _hit_rates(metrics: Mapping[str, Any]) -> str:
    # The three differ by tens of points in one run, so each is named.
    return (
        f"{percent(metrics['hit_rate_active'])} of active experts,"
        f" {percent(metrics['hit_rate_gpu'])} of GPU-assigned ones,"
        f" {percent(metrics['hit_rate_token'])} weighted by tokens"
    )


def _access_counts(metrics: Mapping[str, Any]) -> str:
    return (
        f"{metrics['accesses']:,}: {metrics['hits']:,} hits,"
        f" {metrics['delayed_hits']:,} delayed, {metrics['misses']:,} misses"
    )
