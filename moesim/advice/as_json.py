"""Advice and model contents as plain JSON values; units stand in the names."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moesim.advice.plan.commands import server_command
from moesim.advice.routing import server_command as mask_command

if TYPE_CHECKING:
    from moesim.advice.advise import Advice
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.ranking import Prospect
    from moesim.advice.times.latents import Interval


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
                "decode_tokens_per_s": _interval(point.decode),
                "prefill_tokens_per_s": _interval(point.prefill),
                "gpu_bytes": point.gpu_bytes,
                "fits": point.fits,
            }
            for point in advice.curve
        ],
        "what_if": [
            {
                "change": each.change,
                "decode_tokens_per_s": _interval(each.decode) if each.factor else None,
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
        "decode_tokens_per_s": _interval(prospect.decode),
        "prefill_tokens_per_s": _interval(prospect.prefill),
        "job_s": _interval(prospect.job),
        "decode_terms_s": dict(prospect.decode_terms),
        "prefill_terms_s": dict(prospect.prefill_terms),
        "gpu_bytes": dict(bill.gpu),
        "gpu_left_bytes": bill.gpu_left,
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
                "decode_tokens_per_s": _interval(plan.decode),
            }
            for plan in routing.masks
        ],
    }


def _interval(interval: Interval) -> dict[str, float]:
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
        "assumed": list(model.assumed),
    }


def model_json(model: ModelContents) -> dict[str, Any]:
    """Return a model's sums and every layer."""
    layers = [asdict(layer) for layer in model.layers]
    return {**model_summary(model), "by_layer": layers}
