"""Measures what policies that change routing do to a model's answers: perplexity,
divergence and agreement on held-out text.

Speed alone is no measure of a policy that swaps one expert for another that happens to
be resident. So the model itself reads text that it was not trained on, once as it is
and once for each setting, and what it expects next is compared after every token.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.errors import TraceError
from moesim.base.files import write_text
from moesim.base.inputs import read_text
from moesim.policies.base import PolicyError
from moesim.policies.parameters import split
from moesim.reporting.answers import Answer, Column, Listing
from moesim.reporting.figures import Axis, Figure
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.setup import (
    Setup,
    needed_columns,
    profile_of,
    refuse_oracles,
    warm_counts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moesim.policies.systems import System
    from moesim.runs.config import MemoryOptions
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.quality import Passages, Scores
    from moesim.runtime.record.calibration import Residual
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
            likely.
        gate_mass_kept, altered, stale, hit_rate_active, experts_used: see
            `moesim.runtime.quality.Scores`.
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

    @classmethod
    def of(cls, setup: Setup, swept: str | None, scores: Scores) -> Row:
        """Sum up what one setting did."""
        # Tokens of a passage depend on each other; passages do not.
        lost_nats = (scores.nats - scores.reference_nats).mean(axis=1)
        standard_error = math.nan
        if len(lost_nats) > 1:
            standard_error = float(lost_nats.std(ddof=1) / math.sqrt(len(lost_nats)))
        return cls(
            setup.system.routing,
            # As a share, since sizes may have been given in slots or bytes.
            setup.memory.gpu.total_bytes / setup.shape.routed_bytes,
            swept,
            nats=float(scores.nats.mean()),
            reference_nats=float(scores.reference_nats.mean()),
            delta_nats_se=standard_error,
            kl=float(scores.kl.mean()),
            agreement=float(scores.agrees.mean()),
            **scores.shares,
        )

    @property
    def delta_nats(self) -> float:
        """Nats lost per token."""
        return self.nats - self.reference_nats

    @property
    def lost(self) -> str:
        """The same in words; a single passage has no standard error."""
        words = f"{self.delta_nats:+.4f}"
        if not math.isnan(self.delta_nats_se):
            words += f" ± {self.delta_nats_se:.4f}"
        return words

    def to_json(self) -> dict[str, Any]:
        """Return every figure; perplexity is exp(nats)."""
        figures = asdict(self) | {
            "delta_nats": self.delta_nats,
            "perplexity": math.exp(self.nats),
            "reference_perplexity": math.exp(self.reference_nats),
        }
        # JSON has no NaN.
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in figures.items()
        }


@dataclass(frozen=True, slots=True)
class Quality:
    """All settings of one `quality` run, and the effective configuration."""

    rows: list[Row]
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
        return {"settings": [row.to_json() for row in self.rows], "config": self.config}


@takes_options(RunConfig, without=["trace"])
def quality(
    model: str | Path = "tiny",
    policy: str = "smoe",
    *,
    config: RunConfig | None = None,
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
    memory: MemoryOptions | None = None,
    minutes: float | None = None,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Quality:
    """Measure what policies do to a model's answers.

    Args:
        model: ``tiny``, or a Hugging Face folder; it must fit the device's memory,
            experts included.
        policy: a system or an assignment policy, also as ``assignment+cache+prefetch``.
        config: a configuration, whose options those given here replace.
        text: UTF-8 file, cut into passages from its beginning; None draws passages of
            the corpus's evaluation part (``tiny`` only, which was not trained on it).
        sweep: a parameter of the routing policy and its values, ``alpha=0,0.1,0.2``.
        cache_ratios: shares of all experts in the cache, one setting each; with
            `sweep`, each with each.
        tokens: to score in all, rounded up to whole passages.
        prompt_tokens: of each passage that are read and not scored.
        scored_tokens: of each passage.
        own_input: give experts that were started ahead their own layer's input.
        residual: vectors for ``pred1_res`` or their file; calibrated now for ``tiny``
            when None.
        dtype: to compute in; ``auto`` takes the checkpoint's (float32 for ``tiny``).
        device: ``cpu``, ``cuda``, …
        memory: sizes of memories in one object, instead of single options.
        minutes: after which no passage is begun; None for no limit.
        progress: called with the share of the work that is done.
        options: fields of `moesim.runs.config.RunConfig`.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line.
    """
    _check_counts(
        tokens=tokens, prompt_tokens=prompt_tokens, scored_tokens=scored_tokens
    )
    # Before torch and the model are loaded, so that a typo costs no minute.
    config = RunConfig.of(config, policy, memory=memory, **options)
    systems = _swept_systems(config.system, sweep)
    sizes = _cache_sizes(config, cache_ratios)
    columns = _needed_columns(systems.values(), config.host_cache)

    from moesim.runtime.models.local_model import load_model  # noqa: PLC0415
    from moesim.runtime.quality import PolicyUnderTest, measure  # noqa: PLC0415
    from moesim.runtime.record.calibration import residual_for  # noqa: PLC0415 - torch

    local = load_model(model, device=device, dtype=dtype)
    shape = _shape_of(local)
    passages = _passages(
        local,
        text,
        tokens,
        prompt=prompt_tokens,
        scored=scored_tokens,
        seed=config.seed,
    )
    profile = profile_of(config.hw)
    calibration = None
    if config.warm is not None:
        calibration = warm_counts(config.warm, shape, f"{shape.name} has")
    # Each has caches of its own, which carry over from passage to passage.
    settings = [
        (value, Setup(sized, shape, profile, system, calibration))
        for (value, system), sized in product(systems.items(), sizes)
    ]
    end_s = time.monotonic() + (math.inf if minutes is None else 60.0 * minutes)
    all_tokens = len(passages.tokens) * passages.scored

    # Only the shipped model can calibrate residual vectors now; it has the text.
    shipped = (lambda: local) if local.name == "tiny" else None
    scores = measure(
        local,
        passages,
        [PolicyUnderTest(setup.planner(), own_input) for _, setup in settings],
        columns=columns,
        residual=residual_for(columns, residual, shipped),
        batch=config.batch,
        enough=lambda: time.monotonic() >= end_s,
        progress=lambda done: progress(done / all_tokens) if progress else None,
    )
    rows = [
        Row.of(setup, value, figures)
        for (value, setup), figures in zip(settings, scores, strict=True)
    ]
    read = len(scores[0].nats)
    effective = {
        "model": shape.name,
        "dtype": shape.dtype,
        "device": device,
        "text": "corpus" if text is None else str(text),
        "passages": read,
        "left_out": len(passages.tokens) - read,
        "prompt_tokens": passages.prompt,
        "scored_tokens": passages.scored,
        "tokens": read * passages.scored,
        "sweep": sweep,
        "own_input": own_input,
        # Settings differ in what is swept and in the cache's size, and in nothing else.
        **_described(settings[0][1]),
    }
    return Quality(rows, effective)


def _check_counts(**counts: int) -> None:
    """Refuse to read nothing.

    Raises:
        TraceError: naming the option.
    """
    for name, count in counts.items():
        if count < 1:
            raise TraceError(f"{name}: expected >= 1, got {count}")


def _shape_of(local: LocalModel) -> ModelShape:
    """The shape of a loaded model."""
    from moesim.runtime.models.gates import find_blocks, gate_facts  # noqa: PLC0415
    from moesim.runtime.models.local_model import model_shape  # noqa: PLC0415 - torch

    blocks = find_blocks(local.model)
    return model_shape(local.model, local.name, blocks, gate_facts(local.model, blocks))


def _described(setup: Setup) -> dict[str, Any]:
    """What all settings have in common, for the effective configuration."""
    system, memory, config = setup.system, setup.memory, setup.config
    return {
        "assignment": system.assignment,
        "cache": system.cache,
        "prefetch": system.prefetch,
        "routing": system.routing,
        "hw": setup.profile.name,
        "hw_digest": setup.profile.digest,
        "cache_scope": memory.gpu.scope,
        "staging": memory.staging,
        "host_bytes": None if memory.host is None else memory.host.total_bytes,
        "batch": config.batch,
        "seed": config.seed,
        "filled_by": "its policy, or empty" if config.warm is None else "calibration",
    }


def _swept_systems(base: System, sweep: str | None) -> dict[str | None, System]:
    """Value of the swept parameter -> composition; a value that is named twice is one.

    Raises:
        PolicyError: not ``parameter=value,value,…``.
    """
    if sweep is None:
        return {None: base}

    parameter, equals, listed = sweep.partition("=")
    if not (parameter.strip() and equals and listed.strip()):
        raise PolicyError(
            "--sweep: expected parameter=value,value,… of the routing policy, got"
            f" {sweep!r}"
        )
    # Parameters that are given already stay, unless it is the one that is swept.
    routing, _, settings = base.routing.partition(":")
    parameters = split(settings) if settings else {}
    fixed = {key: value for key, value in parameters.items() if key != parameter}
    systems: dict[str | None, System] = {}
    for value in (value.strip() for value in listed.split(",")):
        given = {**fixed, parameter.strip(): value}
        specification = ",".join(f"{key}={given[key]}" for key in given)
        systems[value] = replace(base, routing=f"{routing}:{specification}")
    return systems


def _cache_sizes(config: RunConfig, ratios: Sequence[float]) -> list[RunConfig]:
    """One configuration for each cache ratio.

    Raises:
        PolicyError: the cache has another size already.
    """
    sizes = (config.slots_per_layer, config.gpu_memory_bytes, config.cache_ratio)
    if ratios and any(size is not None for size in sizes):
        raise PolicyError(
            "--cache-ratio: expected no other size of the cache beside it; drop one of"
            " them"
        )
    return [config.replaced(cache_ratio=ratio) for ratio in ratios] or [config]


def _needed_columns(systems: Iterable[System], host_cache: str) -> tuple[str, ...]:
    """Columns that the policies need.

    Raises:
        PolicyError: one is unknown, or an oracle: a model that reads has no future.
    """
    # A dictionary keeps the order in which policies name them.
    columns: dict[str, None] = {}
    for system in systems:
        policies = system.build(gpus=1, host_cache=host_cache)
        refuse_oracles(
            policies,
            "a model that reads has no future; choose a policy that sees the past only",
        )
        columns |= dict.fromkeys(needed_columns(policies))
    return tuple(columns)


def _passages(
    local: LocalModel,
    text: str | Path | None,
    tokens: int,
    *,
    prompt: int,
    scored: int,
    seed: int,
) -> Passages:
    """Read as many passages as hold `tokens` scored tokens, or as many as the text
    has.

    Raises:
        TraceError: no text for a model that has no corpus, or a text that is not UTF-8.
    """
    from moesim.runtime.quality import Passages  # noqa: PLC0415 - torch

    # Rounded up to whole passages.
    most = -(-tokens // scored)
    if text is None:
        if local.name != "tiny":
            raise TraceError(
                f"{local.name}: expected --text FILE with text it was not trained on,"
                " found none"
            )
        return Passages.of_corpus(most, prompt=prompt, scored=scored, seed=seed)
    try:
        passage_text = read_text(Path(text))
    except UnicodeDecodeError as error:
        raise TraceError(f"{text}: expected UTF-8 text, found {error}") from None
    tokens_of_text = local.encode(passage_text)
    return Passages.cut(tokens_of_text, prompt=prompt, scored=scored, most=most)


_LEAST_SHOWN_KL = 5e-5
"""Below it four decimals would show zero, which only an unaltered model has."""


def quality_answer(report: Quality) -> Answer:
    """Say what each setting does to the model's answers."""
    config = report.config
    reference_nats = report.rows[0].reference_nats
    left_out = f", {config['left_out']:,} left out" if config["left_out"] else ""
    table = pd.DataFrame([row.to_json() for row in report.rows])
    table["cache_ratio"] = [f"{row.cache_ratio:.3g}" for row in report.rows]
    table["perplexity"] = [f"{math.exp(row.nats):.3f}" for row in report.rows]
    table["lost"] = [row.lost for row in report.rows]
    table["kl_words"] = [
        f"{row.kl:.1e}" if 0 != row.kl < _LEAST_SHOWN_KL else f"{row.kl:.4f}"
        for row in report.rows
    ]
    shares = {
        "agreement": "same top token",
        "gate_mass_kept": "gate mass kept",
        "altered": "altered",
        "stale": "stale",
        "hit_rate_active": "hit rate",
    }
    columns = [
        Column("routing", "routing"),
        Column("cache_ratio", "cache"),
        Column("perplexity", "perplexity"),
        Column("lost", "nats lost"),
        Column("kl_words", "KL"),
        *(Column(name, words, "share") for name, words in shares.items()),
        Column("experts_used", "used"),
    ]
    most = max(report.rows, key=lambda row: row.delta_nats)
    setting = {
        "model": f"{config['model']} ({config['dtype']}), batch {config['batch']}",
        "text": f"{config['text']}: {config['tokens']:,} tokens of"
        f" {config['passages']:,} passages scored{left_out}",
        "policy": f"{config['assignment']}, {config['cache']}, prefetch"
        f" {config['prefetch']}",
        "unmodified": f"{reference_nats:.4f} nats per token, perplexity"
        f" {math.exp(reference_nats):.3f}",
    }
    return Answer(
        question="what does the policy do to the model's answers?",
        subject=str(config["model"]),
        setting=list(setting.items()),
        # A setting is a routing policy and a cache ratio; both lead every block.
        tables=[Listing(table, columns, lead=2)],
        sentences=[f"at most {most.lost} nats per token are lost"],
        figures={
            name: partial(quality_drawn, report, name) for name in ("kl", "agreement")
        },
        data=report.to_json(),
        settings=json.dumps(config, indent=1),
    )


def quality_drawn(report: Quality, measure: str) -> Figure:
    """What is lost against what is won, one line per cache ratio; labels say what was
    swept.
    """
    rows = [
        {
            "cache": f"{row.cache_ratio:.3g}",
            "hits": row.hit_rate_active,
            "kl": row.kl,
            "agreement": row.agreement,
            "swept": row.swept or "",
        }
        for row in sorted(report.rows, key=lambda row: row.cache_ratio)
    ]
    measures = {
        # Divergence has a natural zero; agreement lies close to 100 %.
        "kl": Axis("kl", "KL to the unmodified model, nats per token", zero=True),
        "agreement": Axis("agreement", "same most likely token", ".1%"),
    }
    return Figure(
        pd.DataFrame(rows),
        Axis("hits", "hit rate of active experts", ".0%"),
        measures[measure],
        f"{_title(report)}: what altered routing loses and wins, by cache ratio",
        series="cache",
        text="swept",
    )


def _title(report: Quality) -> str:
    config = report.config
    routing = config["routing"]
    swept = ""
    if config["sweep"]:
        # The first row's specification holds its own value of the swept parameter.
        routing = routing.partition(":")[0]
        swept = f", labels: {config['sweep'].partition('=')[0]}"
    return (
        f"{config['model']}, {config['tokens']:,} tokens; {config['assignment']},"
        f" {config['cache']}, {routing}{swept}"
    )


def save_quality(report: Quality, folder: Path) -> list[Path]:
    """Write figures, configuration, pictures and the page; return the files."""
    figures = folder / "quality.json"
    write_text(figures, json.dumps(report.to_json(), indent=2) + "\n")
    pictures = [
        quality_drawn(report, name).save(folder / f"quality-{name}.png")
        for name in ("kl", "agreement")
    ]
    page = quality_answer(report).write(folder / "quality.html")
    return [figures, *pictures, page]
