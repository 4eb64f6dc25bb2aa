"""Search where a grid is too large: Optuna proposes runs, a sweep carries them out.

Proposals come in rounds of a fixed size, so a search finds the same whatever the number
of processes.

Source: Akiba et al., *Optuna*.
"""

from __future__ import annotations

import math
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.options import ConfigError, option_of
from moesim.base.text import unknown
from moesim.policies.base import PolicyError
from moesim.policies.parameters import parameters
from moesim.policies.registry import find
from moesim.reporting.answers import Answer
from moesim.reporting.parts import Column, Listing, column, records
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.sweeps.plan import Plan, planned, split_options
from moesim.runs.sweeps.rows import directions
from moesim.runs.sweeps.sweep import bases_of, run_sweep
from moesim.traces.timeline.metrics import LARGER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from moesim.traces.format.reader import Trace

ROUND = 12
"""Proposals that are made before any of them is judged."""

MOST_SHOWN = 12
"""Proposals that an answer shows; the frame has all of them."""

_OPTIONS = {field.name: option_of(field) for field in fields(RunConfig)}


@takes_options(RunConfig, without=["policy"])
def search(
    trace: RunConfig | str | Path | Trace,
    policies: str | Sequence[str] | None = None,
    *,
    over: Mapping[str, tuple[float, float]] | None = None,
    objectives: str | Sequence[str] = "tpot_s",
    trials: int = 60,
    minutes: float | None = None,
    results: str | Path | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    search_seed: int = 0,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Search for the best run.

    Every option that is a list is a choice; ranges stand in `over`::

        moesim.search("tiny", "greedy", cache=["lru", "lfu"],
                      over={"cache.decay": (0.5, 0.99), "slots_per_layer": (2, 16)},
                      objectives=["tpot_s", "gpu_bytes"])

    Args:
        trace: a moesim trace, a configuration, or a TOML file.
        policies: systems or assignment policies to choose from.
        over: lowest and highest value of a field, or of a parameter of a policy, which
            is written ``cache.decay``.
        objectives: metrics; with several the answer is a Pareto front. Which way is
            better stands with each metric (`moesim.traces.timeline.metrics`).
        trials: runs that are proposed.
        minutes: after which no round of proposals is begun; with `results`, whose runs
            are not made again, the next call goes on.
        results: as `moesim.sweep` takes it.
        jobs: as `moesim.sweep` takes it.
        cluster: as `moesim.sweep` takes it.
        progress: called with the share of the work that is done.
        search_seed: of the proposals.
        options: fields of `moesim.runs.config.RunConfig`, each a value or a list.

    Returns:
        One row for each proposal that could be replayed, the best first: what was
        chosen, the objectives, ``best`` (on the Pareto front), and the digest; in
        ``attrs`` the objectives, and how many proposals were ``left_out``.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as
            `moesim.sweep`; also for nothing to choose, or no such metric.
        ImportError: without Optuna.
    """
    import optuna  # noqa: PLC0415 - an extra

    names = [objectives] if isinstance(objectives, str) else list(objectives)
    known = directions()
    for name in names:
        if name not in known:
            raise ConfigError(f"objective: {unknown('metric', name, known)}")
    is_maximised = {name: known[name] == LARGER for name in names}
    if policies is not None:
        options["policy"] = policies
    single, axes = split_options(options)
    (base,) = bases_of(trace, options)
    base = RunConfig.of(base, **single)
    ranges = dict(over or {})
    _check_choices(base, axes, ranges)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["maximize" if is_maximised[name] else "minimize" for name in names],
        sampler=optuna.samplers.TPESampler(seed=search_seed),
    )
    places = {"results": results, "jobs": jobs, "cluster": cluster}
    end_s = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    done = 0
    refusal = None
    # One round in any case: without it there is nothing to answer.
    while done < trials and (not done or time.monotonic() < end_s):
        count = min(ROUND, trials - done)
        asked = [study.ask() for _ in range(count)]
        proposals = [(trial, _proposal(base, axes, ranges, trial)) for trial in asked]
        refusal = _judge(study, proposals, names, places) or refusal
        done += count
        if progress is not None:
            progress(done / trials)

    completed = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    if not completed:
        raise PolicyError(refusal or "search: no run was possible")
    unbeaten = {trial.number for trial in study.best_trials}
    rows = [
        {name: values[trial.params[name]] for name, values in axes.items()}
        # A policy may lack the parameter of another.
        | {name: trial.params.get(name) for name in ranges}
        | dict(zip(names, trial.values, strict=True))
        | {"digest": trial.user_attrs["digest"], "best": trial.number in unbeaten}
        for trial in completed
    ]
    frame = pd.DataFrame(rows).drop_duplicates("digest")
    frame = frame.sort_values(
        ["best", names[0]],
        ascending=[False, not is_maximised[names[0]]],
        kind="stable",
        ignore_index=True,
    )
    frame.attrs |= {"objectives": names, "left_out": trials - done}
    return frame


def _judge(
    study: Any,
    proposals: Sequence[tuple[Any, RunConfig]],
    objectives: Sequence[str],
    places: Mapping[str, Any],
) -> str | None:
    """Replay proposals, and tell the sampler of Optuna.

    Args:
        study: that made them.
        proposals: trials, with what each chose.
        objectives: metrics.
        places: where runs happen, as `run_sweep` takes it.

    Returns:
        Why one of them was impossible; None if none was.
    """
    from optuna.trial import TrialState  # noqa: PLC0415 - an extra

    refusal = None
    plans: dict[Any, Plan] = {}
    for trial, config in proposals:
        try:
            plans[trial] = planned([config])
        except PolicyError as error:
            refusal = str(error)
    # Two may be one run.
    points = {plan.points[0].digest: plan.points[0] for plan in plans.values()}
    together = Plan(list(points.values()), [], sum(p.rows for p in plans.values()))
    rows: dict[str, Any] = {}
    try:
        table = run_sweep(together, **places).table.select(["digest", *objectives])
        rows = {row["digest"]: row for row in table.to_pylist()}
    except PolicyError as error:
        # Not even one of them can be.
        refusal = str(error)

    for trial, _ in proposals:
        row = rows.get(plans[trial].points[0].digest) if trial in plans else None
        if row is None or None in row.values():
            study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_user_attr("digest", row["digest"])
            study.tell(trial, [row[name] for name in objectives])
    return refusal


def _check_choices(
    base: RunConfig,
    axes: Mapping[str, Sequence[Any]],
    ranges: Mapping[str, tuple[float, float]],
) -> None:
    """Refuse a search without anything to choose, or with what is no range.

    Raises:
        ConfigError: naming it.
    """
    for name, ends in ranges.items():
        field, _, parameter = name.partition(".")
        option = _OPTIONS.get(field)
        if option is None or (option.policy_kind is None) != (not parameter):
            raise ConfigError(
                f"over: {name}: expected a number among the options, or a parameter of"
                " a policy such as cache.decay"
            )
        if name in axes:
            raise ConfigError(f"over: {name}: expected a range or values, got both")
        if len(ends) != 2 or not ends[0] < ends[1]:
            raise ConfigError(f"over: {name}: expected low < high, got {ends!r}")
        policies = axes.get(field, [getattr(base, field)])
        if parameter and not any(_knows(each, field, parameter) for each in policies):
            raise ConfigError(
                f"over: {name}: none of the policies has this parameter:"
                f" {', '.join(map(str, policies))}; name one (--{field})"
            )
    if not axes and not ranges:
        raise ConfigError(
            "search: expected something to choose, got none; give options several"
            " values, or ranges"
        )


def _knows(policy: str | None, field: str, parameter: str) -> bool:
    """Whether a policy has a parameter that its specification leaves open."""
    kind = _OPTIONS[field].policy_kind
    if policy is None or kind is None or f"{parameter}=" in policy:
        return False
    try:
        cls = find(policy.partition(":")[0], kind)
    except PolicyError:
        # A system is no single policy.
        return False
    return any(each.name == parameter for each in parameters(cls))


def _proposal(
    base: RunConfig,
    axes: Mapping[str, Sequence[Any]],
    ranges: Mapping[str, tuple[float, float]],
    trial: Any,
) -> RunConfig:
    """The configuration that a trial of Optuna chooses."""
    # Optuna keeps simple values only; a place stands for any.
    chosen = {
        name: values[trial.suggest_categorical(name, range(len(values)))]
        for name, values in axes.items()
    }
    config = RunConfig.of(base, **chosen)
    for name, (low, high) in ranges.items():
        field, _, parameter = name.partition(".")
        policy = getattr(config, field)
        # Of several policies to choose from, not all may have the parameter.
        if parameter and not _knows(policy, field, parameter):
            continue
        is_whole = isinstance(low, int) and isinstance(high, int)
        if not parameter:
            is_whole = _OPTIONS[field].kind is int
        if is_whole:
            number = trial.suggest_int(name, int(low), int(high))
        else:
            number = trial.suggest_float(name, low, high)
        if parameter:
            joint = "," if ":" in policy else ":"
            number = f"{policy}{joint}{parameter}={number}"
        config = config.replaced(**{field: number})
    return config


def search_answer(proposals: pd.DataFrame) -> Answer:
    """Say which proposal is best, or which of them nothing beats.

    Args:
        proposals: of `search`.
    """
    objectives: list[str] = proposals.attrs["objectives"]
    left_out = proposals.attrs.get("left_out")
    first = proposals.iloc[0]
    shown = [column(str(n)) for n in proposals if n not in ("best", "digest")]
    words = ", ".join(
        f"{each.head} {each.cell(first[each.name])}"
        for each in shown
        if not pd.isna(first[each.name])
    )
    best = int(proposals["best"].sum())
    notes = [f"nothing beats {best} of {len(proposals)} runs that were replayed"]
    if left_out:
        notes.append(f"left out: {left_out} proposals that did not fit the time")
    return Answer(
        question=f"which run is best by {', '.join(objectives)}?",
        subject="",
        tables=[
            Listing(proposals.head(MOST_SHOWN), [*shown, Column("best", "unbeaten")])
        ],
        sentences=[f"best: {words}"],
        notes=notes,
        all_rows=proposals,
        data={"table": records(proposals)},
    )
