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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.errors import TraceError
from moesim.base.inputs import read_text
from moesim.base.options import as_list
from moesim.base.units import percent
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure
from moesim.reporting.parts import Column, Listing, records
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

    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.quality import Passages, Scores
    from moesim.runtime.record.calibration import Residual

TOKENS = 1024
PROMPT_TOKENS = 64
SCORED_TOKENS = 64
"""Defaults: tokens scored in all, and per passage tokens read before and scored."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What each setting did to a model's answers.

    Attributes:
        frame: a row for each setting, which ``routing`` and ``cache_ratio`` name.
            ``nats`` and ``reference_nats`` are the mean minus log probabilities of the
            text's next token, modified and unmodified, per token; ``delta_nats`` their
            difference, ``delta_nats_se`` its standard error over passages, NaN for a
            single one. ``kl`` is the mean KL(unmodified || modified) in nats,
            ``agreement`` the share of tokens after which both find the same next token
            most likely. All else: see `moesim.runtime.quality.Scores`.
        config: effective.
    """

    frame: pd.DataFrame
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
        return {"settings": records(self.frame), "config": self.config}


def _row(setup: Setup, scores: Scores) -> dict[str, Any]:
    """Sum up what one setting did."""
    # Tokens of a passage depend on each other; passages do not.
    lost_nats = (scores.nats - scores.reference_nats).mean(axis=1)
    nats, reference_nats = scores.nats.mean(), scores.reference_nats.mean()
    return {
        "routing": setup.system.routing,
        # As a share, since sizes may have been given in slots or bytes.
        "cache_ratio": setup.memory.gpu.total_bytes / setup.shape.routed_bytes,
        "nats": nats,
        "reference_nats": reference_nats,
        "delta_nats": nats - reference_nats,
        "delta_nats_se": pd.Series(lost_nats).sem(),
        "perplexity": math.exp(nats),
        "reference_perplexity": math.exp(reference_nats),
        "kl": scores.kl.mean(),
        "agreement": scores.agrees.mean(),
        **scores.shares,
    }


@takes_options(RunConfig, without=["trace"])
def quality(
    model: str | Path = "tiny",
    policy: str = "smoe",
    *,
    config: RunConfig | None = None,
    text: str | Path | None = None,
    routing: str | Sequence[str] | None = None,
    cache_ratio: float | Sequence[float] | None = None,
    tokens: int = TOKENS,
    prompt_tokens: int = PROMPT_TOKENS,
    scored_tokens: int = SCORED_TOKENS,
    own_input: bool = False,
    residual: str | Path | Residual | None = None,
    dtype: str = "auto",
    device: str = "cpu",
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
        routing: one or several routing policies, ``expert-cache-router:alpha=0.1``.
        cache_ratio: one or several shares of all experts in the cache; each is a
            setting with each of `routing`.
        tokens: to score in all, rounded up to whole passages.
        prompt_tokens: of each passage that are read and not scored.
        scored_tokens: of each passage.
        own_input: give experts that were started ahead their own layer's input.
        residual: vectors for ``pred1_res`` or their file; calibrated now for ``tiny``
            when None.
        dtype: to compute in; ``auto`` takes the checkpoint's (float32 for ``tiny``).
        device: ``cpu``, ``cuda``, …
        minutes: after which no passage is begun; None for no limit.
        progress: called with the share of the work that is done.
        options: fields of `moesim.runs.config.RunConfig`.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line.
    """
    counts = {"tokens": tokens, "prompt_tokens": prompt_tokens}
    for name, count in (counts | {"scored_tokens": scored_tokens}).items():
        if count < 1:
            raise TraceError(f"{name}: expected >= 1, got {count}")
    # Before torch and the model are loaded, so that a typo costs no minute.
    configs = [
        RunConfig.of(
            config,
            policy,
            **options,
            # What is not chosen is the system's, or stated otherwise.
            **({} if rule is None else {"routing": rule}),
            **({} if ratio is None else {"cache_ratio": ratio}),
        )
        for rule in as_list(routing) or [None]
        for ratio in as_list(cache_ratio) or [None]
    ]
    base = configs[0]
    columns = _needed_columns(configs)

    from moesim.runtime.models.local_model import (  # noqa: PLC0415 - torch
        load_model,
        model_shape,
    )
    from moesim.runtime.quality import PolicyUnderTest, measure  # noqa: PLC0415
    from moesim.runtime.record.calibration import residual_for  # noqa: PLC0415 - torch

    local = load_model(model, device=device, dtype=dtype)
    shape = model_shape(local.model, local.name)
    # Rounded up to whole passages.
    most = -(-tokens // scored_tokens)
    passages = _passages(
        local, text, most, prompt=prompt_tokens, scored=scored_tokens, seed=base.seed
    )
    profile = profile_of(base.hw)
    calibration = None
    if base.warm is not None:
        calibration = warm_counts(base.warm, shape, f"{shape.name} has")
    # Each has caches of its own, which carry over from passage to passage.
    setups = [Setup(each, shape, profile, each.system, calibration) for each in configs]
    end_s = time.monotonic() + (math.inf if minutes is None else 60.0 * minutes)

    # Only the shipped model can calibrate residual vectors now; it has the text.
    shipped = (lambda: local) if local.name == "tiny" else None
    scores = measure(
        local,
        passages,
        [PolicyUnderTest(setup.planner(), own_input) for setup in setups],
        columns=columns,
        residual=residual_for(columns, residual, shipped),
        batch=base.batch,
        enough=lambda: time.monotonic() >= end_s,
        progress=progress,
    )
    rows = [_row(*each) for each in zip(setups, scores, strict=True)]
    read = len(scores[0].nats)
    described = setups[0].effective_config(None)
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
        "own_input": own_input,
        **{name: described[name] for name in _SHARED},
    }
    return Quality(pd.DataFrame(rows), effective)


_SHARED = (
    *("assignment", "cache", "prefetch", "hw", "hw_digest", "cache_scope"),
    *("staging", "host_bytes", "batch", "seed", "filled_by"),
)
"""What all settings have in common: they differ in routing and in the cache's size."""


def _needed_columns(configs: Iterable[RunConfig]) -> tuple[str, ...]:
    """Columns that the policies need.

    Raises:
        PolicyError: one is unknown, or an oracle: a model that reads has no future.
    """
    # A dictionary keeps the order in which policies name them.
    columns: dict[str, None] = {}
    for config in configs:
        policies = config.system.build(gpus=1, host_cache=config.host_cache)
        refuse_oracles(
            policies,
            "a model that reads has no future; choose a policy that sees the past only",
        )
        columns |= dict.fromkeys(needed_columns(policies))
    return tuple(columns)


def _passages(
    local: LocalModel, text: str | Path | None, most: int, *, seed: int, **sizes: int
) -> Passages:
    """Read so many passages, or as many as the text has.

    Raises:
        TraceError: no text for a model that has no corpus, or a text that is not UTF-8.
    """
    from moesim.runtime.quality import Passages  # noqa: PLC0415 - torch

    if text is not None:
        try:
            tokens = local.encode(read_text(Path(text)))
        except UnicodeDecodeError as error:
            raise TraceError(f"{text}: expected UTF-8 text, found {error}") from None
        return Passages.cut(tokens, most=most, **sizes)
    if local.name != "tiny":
        raise TraceError(
            f"{local.name}: expected --text FILE with text it was not trained on, found"
            " none"
        )
    return Passages.of_corpus(most, seed=seed, **sizes)


_SHARES = {
    "agreement": "same top token",
    "gate_mass_kept": "gate mass kept",
    "altered": "altered",
    "stale": "stale",
    "hit_rate_active": "hit rate",
}
_MEASURES = (
    # Divergence has a natural zero; agreement lies close to 100 %.
    Axis("kl", "KL to the unmodified model, nats per token", zero=True),
    Axis("agreement", "same most likely token", ".1%"),
)


def quality_answer(report: Quality) -> Answer:
    """Say what each setting does to the model's answers."""
    config = report.config
    table = report.frame
    reference_nats = table["reference_nats"].iloc[0]
    left_out = f", {config['left_out']:,} left out" if config["left_out"] else ""
    # A single passage has no standard error.
    lost = [
        f"{nats:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")
        for nats, error in zip(table["delta_nats"], table["delta_nats_se"], strict=True)
    ]
    words = table.assign(
        perplexity=table["perplexity"].map("{:.3f}".format), delta_nats=lost
    )
    columns = [
        Column("routing", "routing"),
        Column("cache_ratio", "cache", "share"),
        Column("perplexity", "perplexity"),
        Column("delta_nats", "nats lost"),
        Column("kl", "KL"),
        *(Column(name, words, "share") for name, words in _SHARES.items()),
        Column("experts_used", "used"),
    ]
    policies = f"{config['assignment']}, {config['cache']}"
    setting = {
        "model": f"{config['model']} ({config['dtype']}), batch {config['batch']}",
        "text": f"{config['text']}: {config['tokens']:,} tokens of"
        f" {config['passages']:,} passages scored{left_out}",
        "policy": f"{policies}, prefetch {config['prefetch']}",
        "unmodified": f"{reference_nats:.4f} nats per token, perplexity"
        f" {math.exp(reference_nats):.3f}",
    }
    return Answer(
        question="what does the policy do to the model's answers?",
        subject=str(config["model"]),
        setting=list(setting.items()),
        # A setting is a routing policy and a cache ratio; both lead every block.
        tables=[Listing(words, columns, lead=2)],
        all_rows=table,
        sentences=[
            f"at most {lost[table['delta_nats'].argmax()]} nats per token are lost"
        ],
        figures={"quality": lambda: quality_drawn(report)},
        data=report.to_json(),
        settings=json.dumps(config, indent=1),
    )


def quality_drawn(report: Quality) -> Figure:
    """What is lost against what is won, one line per cache ratio; labels are parameters
    of the routing policy.
    """
    config = report.config
    rows = report.frame.sort_values("cache_ratio", kind="stable")
    routing = rows["routing"].str.partition(":")
    return Figure(
        rows.assign(cache=rows["cache_ratio"].map(percent), swept=routing[2]),
        Axis("hit_rate_active", "hit rate of active experts", ".0%"),
        _MEASURES[0],
        f"{config['model']}, {config['tokens']:,} tokens; {config['assignment']},"
        f" {config['cache']}, {', '.join(routing[0].unique())}: what altered routing"
        " loses and wins, by cache ratio",
        series="cache",
        text="swept",
        measures=_MEASURES,
    )
