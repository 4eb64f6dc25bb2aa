"""Decomposes the time that a policy takes beyond one that knows the future, by its
parts.

Parts are replaced by substitutes that know the future, in every combination. Each such
*mix*, part -> its substitute, is timed with the same trace, machine and memories.
Replacing one part saves more or less time depending on which others are replaced
already, so the whole gap is shared out by Shapley's value (`shapley`).

Four parts are replaced: eviction (the cache's rule, from the same start), assignment
and prefetch by those of the clairvoyant system, whose rules are searched for this run
(`moesim.runs.clairvoyant`), and planning (-> none). A substitute is an offer: a policy
that knows the future also knows when it would hurt, so a set of offers is worth its
fastest mix. Hence no share is negative, and the *ceiling* is the fastest mix of all: a
schedule that was carried out, from the policy's own start and in its memories. What
no schedule can beat is another question (`moesim.runs.bound`).
"""

from __future__ import annotations

import json
import math
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from moesim.base.units import ms, percent
from moesim.engine.observers import observed_policy
from moesim.engine.planner import Planner
from moesim.policies.base import PolicyError
from moesim.policies.delegating import DelegatingCache, context_for
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import System, compose
from moesim.questions.replay import setting_facts
from moesim.reporting.answers import Answer
from moesim.reporting.figures import GPU, QUIET, Axis, Figure, names
from moesim.reporting.parts import Column, Listing, records, trace_words
from moesim.runs.bound import bound_of
from moesim.runs.clairvoyant import CLAIRVOYANT
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.replay import clairvoyant_rules, simulated
from moesim.runs.setup import Setup, begins, load_artefacts, refuse_arrivals, trace_of
from moesim.traces.format.future import RecordedFuture
from moesim.traces.timeline.spans import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from moesim.engine.observers import Observer
    from moesim.hwprofiles.costs import Costs
    from moesim.policies.base import CachePolicy
    from moesim.policies.run_context import Future, RunContext
    from moesim.runs.bound import Bound, MemoryBound
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.reader import Trace

EVICTION = "eviction"
ASSIGNMENT = "assignment"
PREFETCH = "prefetch"
PLANNING = "planning"
PARTS = (EVICTION, ASSIGNMENT, PREFETCH, PLANNING)
CEILING = System(
    assignment="exact:objective=scheduled", cache="foresight", prefetch="foresight"
)
"""What parts are replaced by, unless the clairvoyant system's rules are searched. The
scheduled objective knows that copies follow each other on a link.
"""
FREE = "in no time"


class SameStart(DelegatingCache):
    """One policy's rules from another one's initial content."""

    def __init__(self, rule: CachePolicy, start_of: CachePolicy) -> None:
        super().__init__(rule)
        # Whatever the rules are, they must be given the future to hand it on.
        self.oracle = True  # type: ignore[misc] # for this pair of rules
        self.start_of = start_of
        self.needs = (*rule.needs, *start_of.needs)

    def start(self, context: RunContext) -> None:
        """Start both."""
        # Its random draws and calibration may decide what it begins with.
        self.start_of.start(context_for(self.start_of, context))
        super().start(context)

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray | None:
        """Return what the other one would begin with."""
        return self.start_of.initial(capacity_slots)


def cache_of(spec: str) -> CachePolicy:
    """A fresh cache policy."""
    return cast("CachePolicy", resolve(spec, "cache"))


@dataclass(frozen=True, slots=True)
class MixReplays:
    """One run, replayed with any of its policy's parts replaced.

    Attributes:
        setup: trace, machine, memories and the policy under study.
        walk: walks a planner through the trace.
        future: of the same passes.
        ceiling: what parts are replaced by.
    """

    setup: Setup
    walk: Callable[[Planner, Timeline], ReplayResult]
    future: Future
    ceiling: System = CEILING

    def parts(self) -> dict[str, tuple[str, str]]:
        """Part -> its specification and its substitute, where they differ; planning is
        named after the assignment it is charged for, and always replaced.
        """
        ours, theirs = self.setup.system, self.ceiling
        parts = {
            EVICTION: (ours.cache, theirs.cache),
            ASSIGNMENT: (ours.assignment, theirs.assignment),
            PREFETCH: (ours.prefetch, theirs.prefetch),
            PLANNING: (ours.assignment.partition(":")[0], FREE),
        }
        # A part that is its own substitute would double the replays for nothing.
        return {part: both for part, both in parts.items() if both[0] != both[1]}

    def replay_s(self, mix: Mapping[str, str], *observers: Observer) -> float:
        """Return the makespan with some parts replaced, in virtual seconds.

        A replaced cache starts with what the policy's own cache starts with, so only
        evictions and admissions differ. Decisions are charged as those of the policy's
        own assignment unless planning is replaced. The cache of limited host memory is
        never replaced.

        Args:
            mix: part -> its substitute; other parts stay.
            observers: of the assignment policy's answers.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        setup = self.setup
        ours = setup.system
        system = replace(
            ours,
            assignment=mix.get(ASSIGNMENT, ours.assignment),
            prefetch=mix.get(PREFETCH, ours.prefetch),
        )
        host_cache = setup.config.host_cache if setup.memory.host else None
        policies = system.build(gpus=setup.profile.gpus, host_cache=host_cache)
        # Planning seconds are looked up by this name.
        policies.names = {**policies.names, "assignment": ours.assignment}
        if EVICTION in mix:
            # One instance per GPU: caches keep state of their own.
            policies.caches = [
                SameStart(cache_of(mix[EVICTION]), cache) for cache in policies.caches
            ]
        for observer in observers:
            policies.assignment = observed_policy(
                policies.assignment, observer, calls=("assign",)
            )
        costs = setup.costs()
        planner = Planner(
            setup.shape,
            without_planning(costs) if PLANNING in mix else costs,
            policies,
            setup.memory,
            seed=setup.config.seed,
            future=self.future,
            calibration=setup.calibration,
            extras=load_artefacts(setup.config.artefacts),
        )
        timeline = Timeline(setup.profile.lanes)
        result = self.walk(planner, timeline)
        timeline.close()
        return result.makespan_s

    def ceiling_s(self) -> float:
        """Return the makespan with all parts replaced."""
        return self.replay_s({part: both[1] for part, both in self.parts().items()})

    def resident_s(self) -> float:
        """Return the makespan if all experts were on the GPUs from the start, with the
        ceiling's assignment and no planning time.
        """
        setup = copy(self.setup)
        all_experts = CacheSize.for_model(setup.shape, ratio=1.0)
        setup.memory = replace(setup.memory, gpu=all_experts, host=None)
        # A static cache is filled from the start, and asks for no copy.
        setup.system = System(self.ceiling.assignment, cache="static:fill=lowest")
        return replace(self, setup=setup).replay_s({PLANNING: FREE})


def without_planning(costs: Costs) -> Costs:
    """The same costs, with decisions that take no time."""
    free = copy(costs)
    vars(free).update(planning_terms=lambda *_, **__: (0.0,) * 4)
    return free


@dataclass(slots=True, kw_only=True)
class Gap:
    """The gap of a policy to the ceiling, and its parts.

    Attributes:
        policy_s: makespan of the policy as it is.
        ceiling_s: of the fastest mix.
        resident_s: of a machine whose GPUs hold all experts: below it even more memory
            does not help.
        parts: a row for each of `PARTS` that differs, in
            seconds of the whole run, none negative: ``policy`` is the specification
            under study (for planning, the assignment whose decisions are charged),
            ``replaced_by`` its substitute in the ceiling (None if that is faster
            without one), ``alone_s`` what this substitute saves alone, ``last_s`` what
            it saves when all others are on offer already, ``share_s`` the mean over all
            orders of replacing, ``share`` that of the gap (None where there is none).
        mixes: makespan of every mix, by its substitutes; the policy itself is ``as it
            is``.
        config: effective configuration.
        bound: what no schedule can beat; None where there is none.
    """

    policy_s: float
    ceiling_s: float
    resident_s: float
    parts: pd.DataFrame
    mixes: dict[str, float]
    config: dict[str, Any] = field(default_factory=dict)
    bound: Bound | MemoryBound | None = None

    @property
    def gap_s(self) -> float:
        """Seconds above the ceiling."""
        return self.policy_s - self.ceiling_s

    def to_json(self) -> dict[str, Any]:
        """Return one object; parts by name."""
        names = ("policy_s", "ceiling_s", "gap_s", "resident_s", "mixes", "config")
        bound = None
        if self.bound is not None:
            bound = self.bound.to_json(self.policy_s)
        return {
            **{name: getattr(self, name) for name in names},
            "parts": {row.pop("name"): row for row in records(self.parts)},
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
    mixes: dict[str, float] = {}
    times_s: dict[frozenset[str], float] = {}
    for size in range(len(both) + 1):
        for chosen in combinations(both, size):
            mix = {part: both[part][1] for part in chosen}
            seconds = replays.replay_s(mix)
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
    )


@takes_options(RunConfig)
def gap(
    trace: RunConfig | str | Path | Trace,
    policy: str | None = None,
    *,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Gap:
    """Measure where a policy loses its time against a clairvoyant schedule.

    Args:
        progress: called with the share of mixes that were replayed.
        options: fields of `moesim.runs.config.RunConfig`; `trace` and `policy` as in
            `moesim.runs.replay.replay`.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line; also a routing
            policy that alters the routing, because then the future depends on the mix.
    """
    config = RunConfig.of(trace, policy, **options)
    refuse_arrivals(config, "the gap")
    opened = trace_of(config)
    setup = Setup.of(config, opened)
    if setup.policies().routing.alters:
        raise PolicyError(
            f"gap: routing policy {setup.system.routing!r} alters the routing, so the"
            " clairvoyant parts would foresee another run; use --routing as-recorded"
        )
    asked = config.replaced(trace=opened, policy=CLAIRVOYANT, cache=None, prefetch=None)
    rules = clairvoyant_rules(asked)
    # They were the best from a start of their own; from this policy's, plain foresight
    # may lead further.
    best = compose(rules.policy, cache=rules.cache, prefetch=rules.prefetch)

    passes: dict[str, Any] = {"batch": config.batch, "steps": config.steps}

    def walk(planner: Planner, timeline: Timeline) -> ReplayResult:
        return simulated(setup, opened, planner, timeline)[0]

    # Oracles know all forward passes, and no more than those that are replayed.
    future = setup.future or RecordedFuture.of(opened, **passes)
    candidates = [MixReplays(setup, walk, future, each) for each in (best, CEILING)]
    replays = min(candidates, key=MixReplays.ceiling_s)
    result = decompose(replays, progress)
    result.bound = bound_of(config.replaced(trace=opened))
    result.config = setup.effective_config(opened) | {
        "begins": begins(setup.planner(), setup.calibration),
        "ceiling": {
            name: getattr(replays.ceiling, name)
            for name in ("assignment", "cache", "prefetch")
        },
    }
    return result


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
    if report.bound is not None:
        words = report.bound.words(report.policy_s)
        free = "no schedule is faster, unless decisions take no time"
        facts.append(
            ("bound", f"{ms(report.bound.seconds)}: {free}; the policy is {words}")
        )
    return Answer(
        question="where does the policy lose its time?",
        subject=f"{config['model']} on {config['hw']}",
        setting=[*setting_facts(config), *(("note", n) for n in config["synthetic"])],
        facts=facts,
        tables=[Listing(parts, _PARTS, note=_PARTS_NOTE)],
        sentences=[sentence],
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
