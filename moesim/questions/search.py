"""Search where a grid is too large: Optuna proposes runs, a sweep carries them out.

Proposals come in rounds of a fixed size, so a search finds the same whatever the number
of processes. Successive halving replays every proposal of a round for a few steps only,
and the better ones for more.

Source: Akiba et al., *Optuna*; Jamieson & Talwalkar, *Non-stochastic best arm
identification* (successive halving).
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from moesim.base.options import ConfigError, option_of
from moesim.base.text import did_you_mean
from moesim.policies.base import PolicyError
from moesim.policies.parameters import parameters, split_policies
from moesim.policies.registry import find
from moesim.questions.ranked import axis_head, axis_value
from moesim.reporting.answers import Answer, Column, Listing, column
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.setup import trace_of
from moesim.runs.sweeps.plan import planned, split_options
from moesim.runs.sweeps.rows import directions
from moesim.runs.sweeps.sweep import bases_of, run_sweep
from moesim.traces.format.batch import compose
from moesim.traces.timeline.metrics import LARGER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd

    from moesim.traces.format.reader import Trace

ROUND = 12
"""Proposals that are made before any of them is judged."""

KEPT = 3
"""One in so many proposals of a round goes on to a longer replay."""

RUNGS = 3
"""Lengths of replays under successive halving; each is `KEPT` times the one before."""

MOST_SHOWN = 12
"""Proposals that an answer shows; the frame has all of them."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """What a search may choose.

    Attributes:
        name: a field, or a parameter of its policy: ``cache.decay``.
        choices: values; empty for a range.
        low, high: ends of a range, both included.
        is_whole: whether a range holds whole numbers only.
    """

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_whole: bool = False

    def suggest(self, trial: Any) -> Any:
        """Let a trial of Optuna choose."""
        if self.choices:
            # Optuna keeps simple values only; a place stands for any.
            places = range(len(self.choices))
            return self.choices[trial.suggest_categorical(self.name, list(places))]
        if self.is_whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high))
        return trial.suggest_float(self.name, self.low, self.high)


@takes_options(RunConfig, without=["policy"])
def search(
    trace: RunConfig | str | Path | Trace,
    policies: str | Sequence[str] | None = None,
    *,
    over: Mapping[str, tuple[float, float]] | None = None,
    objectives: str | Sequence[str] = "tpot_s",
    trials: int = 60,
    halving: bool = False,
    minutes: float | None = None,
    store: str | Path | None = None,
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
        halving: replay proposals for a ninth and a third of the steps first, and only
            the best third of them longer; for one objective.
        minutes: after which no round of proposals is begun; with a store, whose runs
            are not made again, the next call goes on.
        store: as `moesim.sweep` takes it.
        jobs: as `moesim.sweep` takes it.
        cluster: as `moesim.sweep` takes it.
        progress: called with the share of the work that is done.
        search_seed: of the proposals.
        options: fields of `moesim.runs.config.RunConfig`, each a value or a list.

    Returns:
        One row for each proposal that was replayed in full, the best first: what was
        chosen, the objectives, ``best`` (on the Pareto front), and the digest; in
        ``attrs["left_out"]`` how many proposals were not made.

    Raises:
        TypeError, ConfigError, TraceError, ProfileError, PolicyError: as
            `moesim.sweep`; also for nothing to choose, or no such metric.
        ImportError: without Optuna.
    """
    import optuna  # noqa: PLC0415 - an extra
    import pandas as pd  # noqa: PLC0415 - half a second

    names = [objectives] if isinstance(objectives, str) else list(objectives)
    _check_objectives(names, halving=halving)
    if policies is not None:
        listed = split_policies(policies) if isinstance(policies, str) else policies
        options["policy"] = listed
    single, axes = split_options(options)
    (base,) = bases_of(trace, options)
    base = RunConfig.of(base, **single)
    dimensions = _dimensions(base, axes, over or {})

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=[
            "maximize" if _is_maximised(name) else "minimize" for name in names
        ],
        sampler=optuna.samplers.TPESampler(seed=search_seed),
    )
    places = {"store": store, "jobs": jobs, "cluster": cluster}
    rounds = _Rounds(study, base, dimensions, names, places)
    end_s = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    done = 0
    # One round in any case: without it there is nothing to answer.
    while done < trials and (not done or time.monotonic() < end_s):
        count = min(ROUND, trials - done)
        rounds.run(count, halving=halving)
        done += count
        if progress is not None:
            progress(done / trials)
    if not rounds.rows:
        raise PolicyError(rounds.refusal or "search: no run was possible")

    frame = pd.DataFrame(rounds.rows).drop_duplicates("digest")
    frame["best"] = _front(frame, names)
    frame = frame.sort_values(
        ["best", names[0]],
        ascending=[False, not _is_maximised(names[0])],
        kind="stable",
    )
    frame = frame.reset_index(drop=True)
    frame.attrs["left_out"] = trials - done
    return frame


class _Rounds:
    """Rounds of proposals, and what came of them.

    Args:
        study: of Optuna.
        base: what all proposals share.
        dimensions: what they choose.
        objectives: metrics.
        places: where runs happen, as `run_sweep` takes it.

    Attributes:
        rows: choices, objectives and digest of each full replay.
        refusal: why the last impossible proposal was.
    """

    def __init__(
        self,
        study: Any,
        base: RunConfig,
        dimensions: Sequence[Dimension],
        objectives: Sequence[str],
        places: Mapping[str, Any],
    ) -> None:
        self._study = study
        self._base = base
        self._dimensions = dimensions
        self._objectives = objectives
        self._places = places
        self.rows: list[dict[str, Any]] = []
        self.refusal: str | None = None

    def run(self, count: int, *, halving: bool) -> None:
        """Propose, replay, and tell the sampler."""
        proposals = []
        for _ in range(count):
            trial = self._study.ask()
            chosen = {each.name: each.suggest(trial) for each in self._dimensions}
            proposals.append((trial, chosen, _config_of(self._base, chosen)))
        if halving:
            proposals = self._halved(proposals)

        figures = self._figures([config for _, _, config in proposals])
        for (trial, chosen, _), row in zip(proposals, figures, strict=True):
            if row is None or any(row[name] is None for name in self._objectives):
                self._study.tell(trial, state=_state("FAIL"))
                continue
            values = {name: row[name] for name in self._objectives}
            self._study.tell(trial, list(values.values()))
            applied = {
                name: value if _applies(self._base, chosen, name) else None
                for name, value in chosen.items()
            }
            self.rows.append(applied | values | {"digest": row["digest"]})

    def _halved(self, proposals: list[Any]) -> list[Any]:
        """Those that are worth a full replay; the sampler learns of the others."""
        (objective,) = self._objectives
        sign = -1 if _is_maximised(objective) else 1
        full = self._steps()
        for rung in reversed(range(1, RUNGS)):
            steps = max(1, full // KEPT**rung)
            figures = self._figures(
                [each[2].replaced(steps=steps) for each in proposals]
            )
            judged = []
            for proposal, row in zip(proposals, figures, strict=True):
                value = None if row is None else row[objective]
                if value is None:
                    self._study.tell(proposal[0], state=_state("FAIL"))
                    continue
                proposal[0].report(value, steps)
                judged.append((sign * value, proposal))
            # A stable sort keeps equals in the order of their proposal.
            judged.sort(key=lambda pair: pair[0])
            kept = -(-len(judged) // KEPT)  # rounded up
            for _, proposal in judged[kept:]:
                self._study.tell(proposal[0], state=_state("PRUNED"))
            proposals = [proposal for _, proposal in judged[:kept]]
        return proposals

    def _steps(self) -> int:
        """Forward passes of a full replay."""
        walk = compose(
            trace_of(self._base), batch=self._base.batch, steps=self._base.steps
        )
        return sum(1 for _ in walk)

    def _figures(self, configs: Sequence[RunConfig]) -> list[Any]:
        """The row of each run, by column; None for one that cannot be."""
        digests: list[str | None] = []
        possible = []
        for config in configs:
            try:
                plan = planned([config])
            except PolicyError as error:
                self.refusal = str(error)
                digests.append(None)
            else:
                digests.append(plan.points[0].digest)
                possible.append(config)

        rows: dict[str | None, Any] = {}
        try:
            swept = run_sweep(planned(possible), **self._places)
        except PolicyError as error:
            # Not even one of them can be.
            self.refusal = str(error)
        else:
            columns = ["digest", *self._objectives]
            rows = {
                row["digest"]: row for row in swept.table.select(columns).to_pylist()
            }
        return [rows.get(digest) for digest in digests]


def _state(name: str) -> Any:
    from optuna.trial import TrialState  # noqa: PLC0415 - an extra

    return TrialState[name]


def _is_maximised(metric: str) -> bool:
    return directions()[metric] == LARGER


def _check_objectives(names: Sequence[str], *, halving: bool) -> None:
    known = directions()
    for name in names:
        if name not in known:
            raise ConfigError(
                f"objective: unknown metric {name!r}{did_you_mean(name, known)}; known:"
                f" {', '.join(known)}"
            )
    if halving and len(names) > 1:
        raise ConfigError(
            "halving: expected one objective to judge short replays by, got"
            f" {len(names)}; drop it, or the others"
        )


def _dimensions(
    base: RunConfig,
    axes: Mapping[str, Sequence[Any]],
    over: Mapping[str, tuple[float, float]],
) -> list[Dimension]:
    """Everything that the search may choose.

    Raises:
        ConfigError: nothing, no such field or parameter, or no range.
    """
    declared = {field.name: option_of(field) for field in fields(RunConfig)}
    dimensions = [Dimension(name, tuple(values)) for name, values in axes.items()]
    for name, ends in over.items():
        field, _, parameter = name.partition(".")
        option = declared.get(field)
        if option is None or (option.policy_kind is None) != (not parameter):
            raise ConfigError(
                f"over: {name}: expected a number among the options, or a parameter of"
                " a policy such as cache.decay"
            )
        if name in axes:
            raise ConfigError(f"over: {name}: expected a range or values, got both")
        if len(ends) != 2 or not ends[0] < ends[1]:
            raise ConfigError(f"over: {name}: expected low < high, got {ends!r}")
        is_whole = all(isinstance(end, int) for end in ends)
        if not parameter:
            is_whole = option.kind is int
        dimensions.append(Dimension(name, (), ends[0], ends[1], is_whole))
        if parameter:
            policies = axes.get(field, [getattr(base, field)])
            _check_parameter(name, parameter, policies, option.policy_kind)
    if not dimensions:
        raise ConfigError(
            "search: expected something to choose, got none; give options several"
            " values, or ranges"
        )
    return dimensions


def _check_parameter(
    name: str, parameter: str, policies: Sequence[Any], kind: str | None
) -> None:
    assert kind is not None, "only policies have parameters"
    if not any(_knows(policy, parameter, kind) for policy in policies):
        raise ConfigError(
            f"over: {name}: none of the policies has this parameter:"
            f" {', '.join(map(str, policies))}; name one (--{kind})"
        )


def _knows(policy: str | None, parameter: str, kind: str) -> bool:
    """Whether a policy has a parameter that its specification leaves open."""
    if policy is None or f"{parameter}=" in policy:
        return False
    try:
        cls = find(policy.partition(":")[0], kind)
    except PolicyError:
        # A system is no single policy.
        return False
    return any(each.name == parameter for each in parameters(cls))


def _config_of(base: RunConfig, chosen: Mapping[str, Any]) -> RunConfig:
    """The configuration of a proposal."""
    options = {name: value for name, value in chosen.items() if "." not in name}
    config = RunConfig.of(base, **options)
    kinds = {field.name: option_of(field).policy_kind for field in fields(RunConfig)}
    for name, value in chosen.items():
        field, _, parameter = name.partition(".")
        kind = kinds[field]
        policy = getattr(config, field)
        # Of several policies to choose from, not all may have the parameter.
        if parameter and kind is not None and _knows(policy, parameter, kind):
            joint = "," if ":" in policy else ":"
            spec = f"{policy}{joint}{parameter}={value}"
            config = config.replaced(**{field: spec})
    return config


def _applies(base: RunConfig, chosen: Mapping[str, Any], name: str) -> bool:
    """Whether a run has what was chosen: a policy may lack the parameter of another."""
    field, _, parameter = name.partition(".")
    policy = chosen.get(field, getattr(base, field))
    kind = option_of(RunConfig.__dataclass_fields__[field]).policy_kind
    return not parameter or (kind is not None and _knows(policy, parameter, kind))


def search_answer(proposals: pd.DataFrame, objectives: Sequence[str]) -> Answer:
    """Say which proposal is best, or which of them nothing beats.

    Args:
        proposals: of `search`.
        objectives: of the same call.
    """
    best = int(proposals["best"].sum())
    first = proposals.iloc[0]
    words = ", ".join(
        f"{axis_head(name)} {axis_value(name, first[name])}"
        for name in proposals.columns
        if name not in (*objectives, "best", "digest") and first[name] is not None
    )
    reached = ", ".join(
        f"{each.head} {each.cell(first[each.name])}" for each in map(column, objectives)
    )
    chosen = [n for n in proposals.columns if n not in (*objectives, "best", "digest")]
    table = proposals.head(MOST_SHOWN).copy()
    for name in chosen:
        table[name] = [axis_value(name, value) for value in table[name].astype(object)]
        table[name] = table[name].replace("default", "-")
    notes = [
        f"nothing beats {best} of {len(proposals)} runs that were replayed in full"
    ]
    if left_out := proposals.attrs.get("left_out"):
        notes.append(f"left out: {left_out} proposals that did not fit the time")
    columns = [*(Column(name, axis_head(name)) for name in chosen)]
    columns += [*map(column, objectives), Column("best", "unbeaten")]
    return Answer(
        question=f"which run is best by {', '.join(objectives)}?",
        subject="",
        tables=[Listing(table, columns)],
        sentences=[f"best: {words}; {reached}"],
        notes=notes,
        data={"table": json.loads(proposals.to_json(orient="records"))},
    )


def _front(frame: pd.DataFrame, objectives: Sequence[str]) -> list[bool]:
    """Which rows no other row beats in every objective."""
    signs = [-1 if _is_maximised(name) else 1 for name in objectives]
    points = (frame[list(objectives)] * signs).to_numpy(float)
    best = []
    for point in points:
        is_as_good = (points <= point).all(axis=1)
        is_better = (points < point).any(axis=1)
        best.append(not (is_as_good & is_better).any())
    return best
