"""Decomposes the time that a policy takes beyond one that knows the future, by its
parts.

Parts are replaced by substitutes that know the future, in every combination, and each
mix is timed. Replacing one part saves more or less time depending on which others are
replaced already, so the whole gap is shared out by Shapley's value
(`moesim.questions.gap`).

Four parts are replaced: eviction (the cache's rule, from the same start), assignment
and prefetch by those of the clairvoyant system, whose rules are searched for this run
(`moesim.runs.clairvoyant`), and planning (-> none). A substitute is an offer: a policy
that knows the future also knows when it would hurt, so a set of offers is worth its
fastest mix. Hence no share is negative, and the *ceiling* is the fastest mix of all: a
schedule that was carried out, from the policy's own start and in its memories. What the
clairvoyant system takes with a start and memories of its own is stated beside it. What
no schedule can beat is another question (`moesim.runs.bound`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.options import ConfigError
from moesim.base.units import ms, percent
from moesim.policies import cache_replay
from moesim.policies.base import PolicyError
from moesim.policies.registry import references
from moesim.policies.systems import compose
from moesim.questions.gap_mixes import (
    CEILING,
    Grades,
    MixReplays,
    SameStart,
    cache_of,
)
from moesim.questions.replay import setting_facts
from moesim.reporting.answers import Answer
from moesim.reporting.figures import GPU, QUIET, Axis, Figure, names
from moesim.reporting.parts import Column, Listing, records, trace_words
from moesim.runs.bound import bound_of
from moesim.runs.clairvoyant import CLAIRVOYANT
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.replay import clairvoyant_rules, replay, simulated
from moesim.runs.setup import (
    Setup,
    begins,
    check_needs,
    load_artefacts,
    refuse_arrivals,
    trace_of,
)
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from moesim.engine.planner import Planner
    from moesim.policies.run_context import Future
    from moesim.policies.systems import System
    from moesim.runs.bound import Bound, MemoryBound
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace
    from moesim.traces.timeline.spans import Timeline


@dataclass(slots=True, kw_only=True)
class Gap:
    """The gap of a policy to the ceiling, and its parts.

    Attributes:
        policy_s: makespan of the policy as it is.
        ceiling_s: of the fastest mix.
        resident_s: of a machine whose GPUs hold all experts: below it even more memory
            does not help.
        parts: a row for each of `moesim.questions.gap_mixes.PARTS` that differs, in
            seconds of the whole run, none negative: ``policy`` is the specification
            under study (for planning, the assignment whose decisions are charged),
            ``replaced_by`` its substitute in the ceiling (None if that is faster
            without one), ``alone_s`` what this substitute saves alone, ``last_s`` what
            it saves when all others are on offer already, ``share_s`` the mean over all
            orders of replacing, ``share`` that of the gap (None where there is none).
        mixes: makespan of every mix, by its substitutes; the policy itself is ``as it
            is``.
        grades: of the policy's own assignment.
        eviction: of `split_eviction`.
        config: effective configuration.
        bound: what no schedule can beat; None where there is none.
        clairvoyant_s: of the clairvoyant system as it begins by itself; None where the
            ceiling was given.
    """

    policy_s: float
    ceiling_s: float
    resident_s: float
    parts: pd.DataFrame
    mixes: dict[str, float]
    grades: Grades
    eviction: pd.DataFrame | None = None
    config: dict[str, Any] = field(default_factory=dict)
    bound: Bound | MemoryBound | None = None
    clairvoyant_s: float | None = None

    @property
    def gap_s(self) -> float:
        """Seconds above the ceiling."""
        return self.policy_s - self.ceiling_s

    def to_json(self) -> dict[str, Any]:
        """Return one object; parts by name."""
        names = (
            *("policy_s", "ceiling_s", "clairvoyant_s", "gap_s", "resident_s"),
            *("mixes", "config"),
        )
        bound = None
        if self.bound is not None:
            bound = self.bound.to_json(self.policy_s)
        return {
            **{name: getattr(self, name) for name in names},
            "parts": {row.pop("name"): row for row in records(self.parts)},
            "eviction": None if self.eviction is None else records(self.eviction),
            "assignment": self.grades.to_json(),
            "bound": bound,
        }


def decompose(
    replays: MixReplays, progress: Callable[[float], None] | None = None
) -> Gap:
    """Replay all mixes (16 where all four parts differ) and share out the gap.

    Args:
        replays: the trace, the machine and the policy.
        progress: called with the share of mixes that were replayed.

    Raises:
        PolicyError: a policy answered something illegal.
    """
    both = replays.parts()
    grades = Grades()
    mixes: dict[str, float] = {}
    times_s: dict[frozenset[str], float] = {}
    for size in range(len(both) + 1):
        for chosen in combinations(both, size):
            mix = {part: both[part][1] for part in chosen}
            # The policy itself is the only one that is graded.
            seconds = replays.replay_s(mix, *([] if mix else [grades]))
            # Two parts may have substitutes of one name.
            words = " + ".join(f"{part}: {name}" for part, name in mix.items())
            mixes[words or "as it is"] = times_s[frozenset(mix)] = seconds
            if progress is not None:
                progress(len(mixes) / 2 ** len(both))

    # What may be replaced need not be: more offers never make it slower, so no share
    # is negative.
    value = {
        offers: min(seconds for mix, seconds in times_s.items() if mix <= offers)
        for offers in times_s
    }
    # Of equally fast mixes, the one that replaces least.
    ceiling = min(times_s, key=lambda mix: (times_s[mix], len(mix)))
    nothing, everything = frozenset[str](), frozenset(both)
    gap_s = value[nothing] - value[everything]
    shares = shapley(value, list(both))
    # Alone and last are the ends of what an exchange can save; the share lies between.
    parts = [
        {
            "name": name,
            "policy": specification,
            "replaced_by": substitute if name in ceiling else None,
            "alone_s": value[nothing] - value[frozenset({name})],
            "last_s": value[everything - {name}] - value[everything],
            "share_s": shares[name],
            "share": shares[name] / gap_s if gap_s else None,
        }
        for name, (specification, substitute) in both.items()
    ]
    return Gap(
        policy_s=value[nothing],
        ceiling_s=value[everything],
        resident_s=replays.resident_s(),
        parts=pd.DataFrame(parts),
        mixes=mixes,
        grades=grades,
    )


@takes_options(RunConfig, without=["noise_seed"])
def gap(
    trace: RunConfig | str | Path | Trace,
    policy: str | None = None,
    *,
    ceiling: System | None = None,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Gap:
    """Measure where a policy loses its time against a clairvoyant schedule.

    Args:
        ceiling: what its parts are replaced by, its routing not; None for the
            clairvoyant system with the rules that are fastest in this run.
        progress: called with the share of mixes that were replayed.
        options: fields of `moesim.runs.config.RunConfig`; `trace` and `policy` as in
            `moesim.runs.replay.replay`.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line; also a routing
            policy that alters the routing, because then the future depends on the mix.
    """
    config = RunConfig.of(trace, policy, **options)
    refuse_arrivals(config, "the gap")
    if config.noise_seed is not None:
        raise ConfigError(
            "noise_seed: the gap compares mean times, found"
            f" {config.noise_seed}; remove it"
        )
    opened = trace_of(config)
    setup = Setup.of(config, opened)
    if setup.policies().routing.alters:
        raise PolicyError(
            f"gap: routing policy {setup.system.routing!r} alters the routing, so the"
            " clairvoyant parts would foresee another run; use --routing as-recorded"
        )
    clairvoyant_s = None
    if ceiling is None:
        asked = config.replaced(
            trace=opened, policy=CLAIRVOYANT, cache=None, prefetch=None
        )
        rules = clairvoyant_rules(asked)
        clairvoyant_s = float(replay(rules, keep=False).metrics["makespan_s"])
        # The rules were the best from a start of their own; from this policy's, plain
        # foresight may lead further.
        best = compose(rules.policy, cache=rules.cache, prefetch=rules.prefetch)
        ceilings = [best, CEILING]
    else:
        check_needs(opened, ceiling.build(gpus=setup.profile.gpus, host_cache=None))
        ceilings = [ceiling]

    passes: dict[str, Any] = {"batch": config.batch, "steps": config.steps}

    def walk(planner: Planner, timeline: Timeline) -> ReplayResult:
        return simulated(setup, opened, planner, timeline)[0]

    # Oracles know all forward passes, and no more than those that are replayed.
    future = setup.future or RecordedFuture.of(opened, **passes)
    candidates = [MixReplays(setup, walk, future, each) for each in ceilings]
    replays = min(candidates, key=MixReplays.ceiling_s)
    result = decompose(replays, progress)
    result.clairvoyant_s = clairvoyant_s
    # A trace without scores cannot drive caches that go by scores; the rest can be
    # compared all the same.
    causal = [
        name
        for name in references("cache")
        if set(cache_of(name).needs) <= opened.columns
    ]
    caches = map(cache_of, (setup.system.cache, *causal))
    columns = dict.fromkeys(column for cache in caches for column in cache.needs)
    result.eviction = split_eviction(
        setup,
        lambda: layer_steps(opened, **passes, columns=tuple(columns), tokens=True),
        future,
        causal,
    )
    result.bound = bound_of(config.replaced(trace=opened))
    result.config = setup.effective_config(opened) | {
        "begins": begins(setup.planner(), setup.calibration),
        "ceiling": {
            name: getattr(replays.ceiling, name)
            for name in ("assignment", "cache", "prefetch")
        },
    }
    return result


BELADY = "belady"
FORCED = "belady:must_admit=true"


def split_eviction(
    setup: Setup,
    steps: Callable[[], Iterable[LayerSteps]],
    future: Future,
    causal: Sequence[str],
) -> pd.DataFrame | None:
    """Split the misses of a cache beyond Belady's by which knowledge of the future is
    missing.

    Caches of one size and start read the same accesses, and every miss is fetched and
    offered to them: the policy, a Belady that must admit every fetched expert as the
    policy does, and a Belady that may decline. From the first to the second only the
    choice of *victims* improves; from the second to the third only the choice of *what
    to admit*. Neither choice can be made so without the future. What a causal policy
    could win of it is not computable; what those at hand do win on this very trace is.

    Args:
        setup: of the run, for its cache.
        steps: gives its layer steps anew.
        future: of the same passes.
        causal: caches that see the past only.

    Returns:
        A row for the policy's ``cache``, both Beladys and each causal one: ``misses``,
        ``miss_rate`` and ``closes``, the share that it avoids of the misses beyond
        Belady's (NaN where there are none). None where misses alone do not fill the
        cache: the policy replaces experts by its own clock.

    Raises:
        PolicyError: a policy answered something illegal.
    """
    under_study = setup.system.cache
    # How many copies land in time that a cache asks for by its own clock, only a
    # machine can tell.
    if cache_of(under_study).replaces:
        return None
    misses = {}
    for name in (under_study, FORCED, BELADY, *causal):
        # Fresh instances: a policy keeps its state from one run to the next.
        counts = cache_replay.replay(
            SameStart(cache_of(name), cache_of(under_study)),
            name,
            setup.shape,
            setup.cache,
            steps(),
            future=future,
            seed=setup.config.seed,
            calibration=setup.calibration,
            extras=load_artefacts(setup.config.artefacts),
        )
        misses[name] = counts.accesses - counts.hits
    own_misses = misses[under_study]
    frame = pd.DataFrame(misses.items(), columns=["cache", "misses"])
    frame["miss_rate"] = frame["misses"] / (counts.accesses or math.nan)
    frame["closes"] = (own_misses - frame["misses"]) / (
        own_misses - misses[BELADY] or math.nan
    )
    return frame.sort_values("misses", kind="stable", ignore_index=True)


def gap_answer(report: Gap) -> Answer:
    """Say how much time is lost against a schedule that knows the future, and where."""
    config = report.config
    whole_s = report.policy_s or math.nan
    parts = report.parts
    sentence = "knowing the future would save no time"
    if report.gap_s > 0:
        largest = max(records(parts), key=lambda part: part["share_s"])
        sentence = (
            f"{percent(report.gap_s / whole_s)} of the time is lost to not knowing the"
            f" future, most of it by {largest['name']} ({largest['policy']}):"
            f" {percent(largest['share_s'] / whole_s)}"
        )
    substitutes = parts.dropna(subset=["replaced_by"])
    each = ", ".join(substitutes["name"] + ": " + substitutes["replaced_by"])
    replaced = f"with {each}" if each else "with nothing replaced"
    facts = [
        ("policy", ms(report.policy_s)),
        ("ceiling", f"{ms(report.ceiling_s)}: the fastest schedule found, {replaced}"),
        ("gap", f"{ms(report.gap_s)}, {percent(report.gap_s / whole_s)}"),
        ("all on the GPU", f"{ms(report.resident_s)}, if GPUs held every expert"),
    ]
    own_s = report.clairvoyant_s
    if own_s is not None and own_s < report.ceiling_s:
        facts.append(
            ("other start", f"{ms(own_s)}: clairvoyant, with a start of its own")
        )
    if report.bound is not None:
        words = report.bound.words(report.policy_s)
        free = "no schedule is faster, unless decisions take no time"
        facts.append(
            ("bound", f"{ms(report.bound.seconds)}: {free}; the policy is {words}")
        )
    notes = []
    tables = [Listing(parts, _PARTS, note=_PARTS_NOTE)]
    if report.eviction is None:
        notes.append(
            "this cache swaps by its own clock, so its misses depend on the machine"
        )
    else:
        title = "The cache alone, every miss offered to it"
        tables.append(
            Listing(report.eviction, _EVICTION, title=title, note=_EVICTION_NOTE)
        )
    if report.grades.modelled:
        tables.append(_grades_table(report.grades))
    mixes = pd.DataFrame(report.mixes.items(), columns=["mix", "run_s"])
    mixes = mixes.sort_values("run_s", kind="stable")
    mixes["change"] = mixes["run_s"] / whole_s - 1
    tables.append(Listing(mixes, _MIXES, title="Every combination", printed=False))
    return Answer(
        question="where does the policy lose its time?",
        subject=f"{config['model']} on {config['hw']}",
        setting=[*setting_facts(config), *(("note", n) for n in config["synthetic"])],
        facts=facts,
        tables=tables,
        sentences=[sentence],
        notes=notes,
        figures={"parts": lambda: _figure(report)},
        data=report.to_json(),
        sources={"trace": trace_words(config["trace"], config["trace_digest"])},
        settings=json.dumps(config, indent=1),
    )


_PARTS = [
    Column("name", "part"),
    Column("share_s", "costs", "s"),
    Column("share", "of the gap", "share"),
    Column("alone_s", "if replaced alone", "s"),
    Column("last_s", "if replaced last", "s"),
    Column("policy", "is"),
    Column("replaced_by", "replaced by"),
]
_PARTS_NOTE = (
    "costs: what replacing the part saves, the mean over all orders of replacing"
)
_EVICTION = [
    Column("cache", "cache"),
    Column("misses", "misses"),
    Column("miss_rate", "of accesses", "share"),
    Column("closes", "of the gap closed", "share"),
]
_EVICTION_NOTE = (
    f"what {FORCED} closes is lost by evicting the wrong one, the rest by admitting too"
    " much"
)
_GRADES = [
    Column("costs", "costs of a layer"),
    Column("mean", "mean", "ratio"),
    Column("p95", "95th percentile", "ratio"),
    Column("max", "worst", "ratio"),
    Column("optimal_share", "optimal", "share"),
]
_MIXES = [
    Column("mix", "parts replaced"),
    Column("run_s", "whole run", "s"),
    Column("change", "against the policy", "share"),
]


def _grades_table(grades: Grades) -> Listing:
    """How far each assignment is from the best for the same state of the machine."""
    costs = ["added up per device", "copies one after the other"]
    note = f"time of {len(grades.modelled):,} layer steps over the least possible"
    if grades.unproven:
        note += (
            f"; {grades.unproven:,} were too large to solve exactly, so their ratio"
            " may be too small"
        )
    title = "Assignment against the best one"
    return Listing(
        grades.statistics().assign(costs=costs), _GRADES, title=title, note=note
    )


def _figure(report: Gap) -> Figure:
    """From the policy's time down to the ceiling, a bar for each part."""
    parts = report.parts.sort_values("share_s", ascending=False, kind="stable")
    left_s = report.policy_s - parts["share_s"].cumsum()
    bars = pd.DataFrame(
        {
            "name": ["the policy", *parts["name"], "ceiling"],
            "from": [0.0, *left_s, 0.0],
            "length": [report.policy_s, *parts["share_s"], report.ceiling_s],
            "kind": ["run", *["part"] * len(parts), "run"],
        }
    )
    bars["words"] = bars["length"].map(ms)
    bars["from"] *= 1e3
    bars["to"] = bars["from"] + 1e3 * bars["length"]
    rules = [("x", 1e3 * report.resident_s, "all experts on the GPU")]
    if report.bound is not None:
        words = "bound: no schedule is faster, where deciding takes time"
        rules.append(("x", 1e3 * report.bound.seconds, words))
    return Figure(
        bars,
        Axis("to", "ms, whole run", limits=(0, 1150 * report.policy_s or 1)),
        names("name", "", bars["name"]),
        "From the policy's time to the ceiling, by part; dashed: all on the GPU,"
        " and the bound",
        mark="bar",
        series="kind",
        colours={"run": QUIET, "part": GPU},
        start="from",
        text="words",
        rules=rules,
    )


def shapley(
    value: Mapping[frozenset[str], float], players: Sequence[str]
) -> dict[str, float]:
    """Share out the drop of `value` from no player to all, averaged over all orders of
    joining.

    Args:
        value: seconds of every subset of `players`.
        players: at least one.

    Returns:
        Player -> seconds; they sum to ``value[{}] - value[all]``.

    Source: Shapley 1953, applied to the time saved.
    """
    orders = list(permutations(players))
    shares = dict.fromkeys(players, 0.0)
    for order in orders:
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            shares[player] += value[before] - value[before | {player}]
    return {player: total / len(orders) for player, total in shares.items()}
