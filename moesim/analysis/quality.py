"""What policies that change routing do to a model's answers: perplexity, divergence and
agreement on held-out text.

Speed alone cannot judge a policy that swaps one expert for another that happens to be
there. So the model itself reads text that it was not trained on, once as it is and once
for each setting, and every setting answers for what it did.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies.base import PolicyError
from moesim.policies.parameters import split
from moesim.policies.systems import System, compose
from moesim.reporting.text import aligned
from moesim.runs.memory import MemoryOptions
from moesim.runs.replay import activation_counts, needed_columns, profile_of
from moesim.runs.setup import Setup
from moesim.traces.errors import TraceError
from moesim.traces.files import written_beside
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.plan import Policies
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.quality.measure import Scores
    from moesim.runtime.quality.passages import Passages
    from moesim.runtime.record.residual import Residual
    from moesim.traces.format.schema import ModelShape

TOKENS = 1024
PROMPT_TOKENS = 64
SCORED_TOKENS = 64
"""Defaults: tokens scored in all, and per passage tokens read before and scored."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting and what it did. Nats per token; shares between 0 and 1.

    Attributes:
        routing: specification of the routing policy.
        cache_ratio: share of all experts in the cache.
        swept: value of the swept parameter; None if none is swept.
        nats, reference_nats: mean minus log probability of the text's next token,
            modified and unmodified.
        delta_nats_se: standard error of their difference, over passages; NaN for a
            single passage.
        kl: mean KL(unmodified || modified).
        agreement: share of tokens after which both find the same next token most
        likely. gate_mass_kept, altered, stale, hit_rate_active, experts_used: see
        `moesim.runtime.quality.measure.Scores`.
    """

    routing: str
    cache_ratio: float
    swept: str | None
    nats: float
    reference_nats: float
    delta_nats_se: float
    kl: float
    agreement: float
    gate_mass_kept: float
    altered: float
    stale: float
    hit_rate_active: float
    experts_used: float

    @property
    def delta_nats(self) -> float:
        """Nats lost per token."""
        return self.nats - self.reference_nats

    def to_json(self) -> dict[str, Any]:
        """Every figure; perplexity is exp(nats)."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        found |= {"delta_nats": self.delta_nats, "perplexity": math.exp(self.nats)}
        found["reference_perplexity"] = math.exp(self.reference_nats)
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in found.items()
        }


@dataclass(frozen=True, slots=True)
class Quality:
    """All settings of one `quality` run, and the effective configuration."""

    rows: list[Row]
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {"settings": [row.to_json() for row in self.rows], "config": self.config}


def quality(
    model: str | Path = "tiny",
    policy: str = "smoe",
    *,
    cache: str | None = None,
    prefetch: str | None = None,
    routing: str | None = None,
    text: str | Path | None = None,
    sweep: str | None = None,
    cache_ratios: Sequence[float] = (),
    tokens: int = TOKENS,
    prompt_tokens: int = PROMPT_TOKENS,
    scored_tokens: int = SCORED_TOKENS,
    own_input: bool = False,
    residual: str | Path | Residual | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    hw: str | Path | HardwareProfile | None = None,
    memory: MemoryOptions | None = None,
    host_cache: str = "lru",
    batch: int = 1,
    seed: int = 0,
    warm: str | Path | Trace | None = None,
    artefacts: str | Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> Quality:
    """Measure what policies do to a model's answers.

    Args:
        model: ``tiny``, or a Hugging Face folder; it must fit the device's memory,
            experts included.
        policy: a system or an assignment policy, also as ``assignment+cache+prefetch``.
        text: UTF-8 file, cut into passages from its beginning; None draws passages of
            the corpus's evaluation part (``tiny`` only, which was not trained on it).
        sweep: a parameter of the routing policy and its values, ``alpha=0,0.1,0.2``.
        cache_ratios: shares of all experts in the cache, one setting each; with
            `sweep`, each with each.
        tokens: to score in all, rounded up to whole passages.
        prompt_tokens, scored_tokens: of each passage.
        own_input: give experts that were started one layer ahead their own layer's
            input after all.
        residual: vectors for ``pred1_res`` or their file; calibrated now for ``tiny``
            when None.
        dtype: to compute in; ``auto`` takes the checkpoint's (float32 for ``tiny``).
        device: ``cpu``, ``cuda``, …
        warm: calibration trace that caches may be filled from.
        progress: told the share of the work that is done. cache, prefetch, routing, hw,
        memory, host_cache, batch, seed, artefacts: as in `moesim.runs.replay.replay`.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line.
    """
    for name, count in (
        ("tokens", tokens),
        ("prompt_tokens", prompt_tokens),
        ("scored_tokens", scored_tokens),
    ):
        if count < 1:
            raise TraceError(f"{name}: expected >= 1, got {count}")
    systems = _systems(policy, cache, prefetch, routing, sweep)
    options = _sizes(memory or MemoryOptions(), cache_ratios)
    columns = _columns([system for _, system in systems], host_cache)

    from moesim.runtime.models.gates import gate_facts  # noqa: PLC0415
    from moesim.runtime.models.local_model import load_model  # noqa: PLC0415
    from moesim.runtime.models.model_shape import model_shape  # noqa: PLC0415
    from moesim.runtime.models.moe_blocks import find_blocks  # noqa: PLC0415
    from moesim.runtime.quality.measure import measure  # noqa: PLC0415
    from moesim.runtime.quality.policy_under_test import PolicyUnderTest  # noqa: PLC0415
    from moesim.runtime.record.residual import residual_for  # noqa: PLC0415 - torch

    local = load_model(model, device=device, dtype=dtype)
    blocks = find_blocks(local.model)
    shape = model_shape(
        local.model, local.name, blocks, gate_facts(local.model, blocks)
    )
    passages = _passages(local, text, tokens, prompt_tokens, scored_tokens, seed)
    profile = profile_of(hw)
    calibration = None if warm is None else _counts(warm, shape)
    settings = []
    trials = []
    for (value, system), option in product(systems, options):
        setup = Setup(
            shape,
            profile,
            system,
            option,
            host_cache,
            seed,
            calibration,
            artefacts=artefacts,
        )
        settings.append((value, system, setup.memory))
        trials.append(PolicyUnderTest(setup.planner(), own_input))
    shipped = (lambda: local) if local.name == "tiny" else None
    scored = measure(
        local,
        passages,
        trials,
        columns=columns,
        residual=residual_for(columns, residual, shipped),
        batch=batch,
        progress=(
            None
            if progress is None
            else lambda done: progress(done / (len(passages.tokens) * passages.scored))
        ),
    )
    whole = sum(shape.expert_bytes) * shape.experts
    rows = [
        _row(system.routing, plan.gpu.total_bytes / whole, value, found)
        for (value, system, plan), found in zip(settings, scored, strict=True)
    ]
    first = settings[0][1]
    plan = settings[0][2]
    config = {
        "model": shape.name,
        "dtype": shape.dtype,
        "device": device,
        "text": "corpus" if text is None else str(text),
        "passages": len(passages.tokens),
        "prompt_tokens": prompt_tokens,
        "scored_tokens": scored_tokens,
        "tokens": len(passages.tokens) * passages.scored,
        "assignment": first.assignment,
        "cache": first.cache,
        "prefetch": first.prefetch,
        "routing": first.routing,
        "sweep": sweep,
        "own_input": own_input,
        "hw": profile.name,
        "hw_digest": profile.digest,
        "cache_scope": plan.gpu.scope,
        "staging": plan.staging,
        "host_bytes": None if plan.host is None else plan.host.total_bytes,
        "batch": batch,
        "seed": seed,
        "filled_by": "calibration" if warm is not None else "its policy, or empty",
    }
    return Quality(rows, config)


def quality_text(found: Quality) -> str:
    """Lay out a report for a terminal."""
    config = found.config
    facts = [
        ("model", f"{config['model']} ({config['dtype']}), batch {config['batch']}"),
        (
            "text",
            (
                f"{config['text']}: {config['tokens']:,} tokens of"
                f" {config['passages']:,} passages scored"
            ),
        ),
        (
            "policy",
            f"{config['assignment']}, {config['cache']}, prefetch {config['prefetch']}",
        ),
        ("unmodified", _nats_words(found.rows[0].reference_nats)),
    ]
    width = max(len(name) for name, _ in facts)
    head = [f"{name:<{width}}  {words}" for name, words in facts]
    table = [
        [
            "routing",
            "cache",
            "perplexity",
            "nats lost",
            "KL",
            "top-1",
            "gate mass",
            "altered",
            "stale",
            "hits",
            "used",
        ]
    ]
    table += [
        [
            row.routing,
            f"{row.cache_ratio:.3g}",
            f"{math.exp(row.nats):.3f}",
            f"{row.delta_nats:+.4f}"
            + ("" if math.isnan(row.delta_nats_se) else f" ± {row.delta_nats_se:.4f}"),
            f"{row.kl:.4f}" if row.kl >= 5e-5 or row.kl == 0 else f"{row.kl:.1e}",
            *(
                f"{100 * share:.1f} %"
                for share in (row.agreement, row.gate_mass_kept, row.altered, row.stale)
            ),
            f"{100 * row.hit_rate_active:.1f} %",
            f"{row.experts_used:.2f}",
        ]
        for row in found.rows
    ]
    return "\n".join([*head, "", *aligned(table)])


def quality_figure(found: Quality, path: str | Path) -> Path:
    """Draw what is lost against what is won: KL and disagreement over the share of
    hits, one line per cache ratio.
    """
    from matplotlib.backends.backend_agg import (  # noqa: PLC0415 - half a second, for pictures only
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    panels = (
        ("KL to the unmodified model, nats per token", "kl"),
        ("top-1 agreement, %", "agreement"),
    )
    for axis, (title, name) in zip(axes, panels, strict=True):
        scale = 1 if name == "kl" else 100
        for ratio in sorted({row.cache_ratio for row in found.rows}):
            rows = [row for row in found.rows if row.cache_ratio == ratio]
            hits = [100 * row.hit_rate_active for row in rows]
            values = [scale * getattr(row, name) for row in rows]
            axis.plot(hits, values, marker="o", label=f"cache {ratio:.3g}")
            for row, hit, value in zip(rows, hits, values, strict=True):
                if row.swept is not None:
                    axis.annotate(
                        row.swept,
                        (hit, value),
                        xytext=(4, 4),
                        textcoords="offset points",
                        fontsize=8,
                    )
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("hit rate of active experts, %")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    config = found.config
    routed = (
        config["routing"].partition(":")[0] if config["sweep"] else config["routing"]
    )
    swept = f", labels: {config['sweep'].partition('=')[0]}" if config["sweep"] else ""
    title = (
        f"{config['model']}, {config['tokens']:,} tokens; {config['assignment']},"
        f" {config['cache']}, {routed}{swept}"
    )
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    with written_beside(path) as part:
        figure.savefig(part, format="png", dpi=120)
    return Path(path)


def save_quality(found: Quality, folder: Path) -> list[Path]:
    """Write figures, configuration and the picture into a folder."""
    with written_beside(folder / "quality.json") as part:
        part.write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
    return [folder / "quality.json", quality_figure(found, folder / "quality.png")]


def _systems(
    policy: str,
    cache: str | None,
    prefetch: str | None,
    routing: str | None,
    sweep: str | None,
) -> list[tuple[str | None, System]]:
    """One composition for each value of the swept parameter."""
    base = compose(policy, cache=cache, prefetch=prefetch, routing=routing)
    if sweep is None:
        return [(None, base)]
    parameter, equals, values = sweep.partition("=")
    if not (parameter.strip() and equals and values.strip()):
        raise PolicyError(
            "--sweep: expected parameter=value,value,… of the routing policy, got"
            f" {sweep!r}"
        )
    routed, _, settings = base.routing.partition(":")
    fixed = {
        key: value
        for key, value in (split(settings) if settings else {}).items()
        if key != parameter
    }
    found: list[tuple[str | None, System]] = []
    for value in dict.fromkeys(one.strip() for one in values.split(",")):
        words = ",".join(
            f"{key}={one}" for key, one in {**fixed, parameter.strip(): value}.items()
        )
        found.append((value, replace(base, routing=f"{routed}:{words}")))
    return found


def _sizes(memory: MemoryOptions, ratios: Sequence[float]) -> list[MemoryOptions]:
    """One set of sizes for each cache ratio."""
    if ratios and (
        memory.slots_per_layer,
        memory.gpu_memory_bytes,
        memory.cache_ratio,
    ) != (None, None, None):
        raise PolicyError(
            "--cache-ratios: expected no other size of the cache beside it; drop one of"
            " them"
        )
    return [replace(memory, cache_ratio=ratio) for ratio in ratios] or [memory]


def _columns(systems: Sequence[System], host_cache: str) -> tuple[str, ...]:
    """Columns that the policies need.

    Raises:
        PolicyError: one is unknown, or an oracle: a model that reads has no future.
    """
    columns: dict[str, None] = {}
    for system in systems:
        parts: Policies = system.build(gpus=1, host_cache=host_cache)
        named = (
            *zip(
                ("assignment", "prefetch"),
                (parts.assignment, parts.prefetch),
                strict=True,
            ),
            ("cache", parts.caches[0]),
            ("routing", parts.routing),
        )
        for kind, one in named:
            if one.oracle:
                raise PolicyError(
                    f"{kind} policy {parts.names[kind]!r} is an oracle: a model that"
                    " reads has no future; choose a policy that sees the past only"
                )
        columns |= dict.fromkeys(needed_columns(parts))
    return tuple(columns)


def _passages(
    local: LocalModel,
    text: str | Path | None,
    tokens: int,
    prompt: int,
    scored: int,
    seed: int,
) -> Passages:
    """Read as many passages as hold `tokens` scored tokens, or as many as the text
    has.
    """
    from moesim.runtime.quality.passages import Passages  # noqa: PLC0415 - torch

    most = -(-tokens // scored)
    if text is None:
        if local.name != "tiny":
            raise TraceError(
                f"{local.name}: expected --text FILE with text it was not trained on,"
                " found none"
            )
        return Passages.of_corpus(most, prompt=prompt, scored=scored, seed=seed)
    try:
        words = Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{text}: expected UTF-8 text, found {error}") from None
    return Passages.cut(local.encode(words), prompt=prompt, scored=scored, most=most)


def _counts(warm: str | Path | Trace, shape: ModelShape) -> np.ndarray:
    calibration = warm if isinstance(warm, Trace) else open_trace(warm)
    found = calibration.shape
    if (found.layers, found.experts) != (shape.layers, shape.experts):
        raise PolicyError(
            f"--warm {calibration.path}: expected {shape.layers} layers x"
            f" {shape.experts} experts as {shape.name} has, found {found.layers} x"
            f" {found.experts}; record it from that model"
        )
    return activation_counts(calibration)


def _row(routing: str, cache_ratio: float, swept: str | None, found: Scores) -> Row:
    lost = (found.nats - found.reference_nats).mean(axis=1)
    return Row(
        routing,
        cache_ratio,
        swept,
        nats=float(found.nats.mean()),
        reference_nats=float(found.reference_nats.mean()),
        delta_nats_se=(
            float(lost.std(ddof=1) / math.sqrt(len(lost)))
            if len(lost) > 1
            else math.nan
        ),
        kl=float(found.kl.mean()),
        agreement=float(found.agrees.mean()),
        gate_mass_kept=found.gate_mass,
        altered=found.altered,
        stale=found.stale,
        hit_rate_active=found.hit_rate,
        experts_used=found.used,
    )


def _nats_words(nats: float) -> str:
    return f"{nats:.4f} nats per token, perplexity {math.exp(nats):.3f}"
