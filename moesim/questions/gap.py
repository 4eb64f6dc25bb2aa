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
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

import pandas as pd

from moesim.base.options import ConfigError
from moesim.base.units import ms, percent
from moesim.policies import cache_replay
from moesim.policies.base import PolicyError
from moesim.policies.registry import references, resolve
from moesim.policies.systems import compose
from moesim.questions.gap_mixes import (
    CEILING,
    EVICTION,
    Grades,
    MixReplays,
    SameStart,
    cache_of,
)
from moesim.questions.replay import setting_facts
from moesim.reporting.answers import Answer
from moesim.reporting.figures import GPU, QUIET, Axis, Figure, names
from moesim.reporting.parts import Column, Listing, trace_words
from moesim.runs.bound import bound_of
from moesim.runs.clairvoyant import CLAIRVOYANT
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.engines import run_trace
from moesim.runs.replay import clairvoyant_rules, replay
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
    from moesim.policies.base import CachePolicy
    from moesim.policies.run_context import Future
    from moesim.policies.systems import System
    from moesim.runs.bound import Bound, MemoryBound
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.layer_steps import LayerSteps
    from moesim.traces.format.reader import Trace
    from moesim.traces.timeline.spans import Timeline


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a policy and what it costs, in seconds of the whole run; none is
    negative.

    Attributes:
        name: one of `moesim.questions.gap_mixes.PARTS`.
        policy: specification under study; for planning, the assignment policy whose
            decisions are charged.
        replaced_by: substitute in the ceiling; None if the ceiling is faster
            without one.
        alone_s: saved by this substitute only.
        last_s: saved by this substitute when all others are on offer already.
        share_s: mean saving over all orders of replacing; these sum to the gap.
    """

    name: str
    policy: str
    replaced_by: str | None
    alone_s: float
    last_s: float
    share_s: float


@dataclass(slots=True)
class Gap:
    """The gap of a policy to the ceiling, and its parts.

    Attributes:
        policy_s: makespan of the policy as it is.
        ceiling_s: of the fastest mix.
        resident_s: of a machine whose GPUs hold all experts: below it even more memory
            does not help.
        parts: with shares that sum to the gap.
        mixes: makespan of every mix, by its substitutes; the policy itself is ``as it
            is``.
        grades: of the policy's own assignment.
        belady_s: makespan when only the cache's rule is Belady's.
        forced_s: the same with a Belady that must admit every fetched expert; None if
            the policy has the ceiling's cache.
        eviction: of `split_eviction`.
        config: effective configuration.
        bound: what no schedule can beat; None where there is none.
        clairvoyant_s: of the clairvoyant system as it begins by itself; None where the
            ceiling was given.
    """

    policy_s: float
    ceiling_s: float
    resident_s: float
    parts: list[Part]
    mixes: dict[str, float]
    grades: Grades
    belady_s: float | None = None
    forced_s: float | None = None
    eviction: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    bound: Bound | MemoryBound | None = None
    clairvoyant_s: float | None = None

    @property
    def gap_s(self) -> float:
        """Seconds above the ceiling."""
        return self.policy_s - self.ceiling_s

    def to_json(self) -> dict[str, Any]:
        """Return one object; `share` is of the gap, null where there is none."""
        parts = {row.pop("name"): row for row in self.part_rows()}
        bound = None
        if self.bound is not None:
            share = self.bound.share(self.policy_s)
            bound = self.bound.to_json() | {"share": share}
        return {
            "policy_s": self.policy_s,
            "ceiling_s": self.ceiling_s,
            "clairvoyant_s": self.clairvoyant_s,
            "gap_s": self.gap_s,
            "resident_s": self.resident_s,
            "parts": parts,
            "mixes": self.mixes,
            "belady_s": self.belady_s,
            "forced_belady_s": self.forced_s,
            "eviction": self.eviction,
            "assignment": self.grades.to_json(),
            "bound": bound,
            "config": self.config,
        }

    def part_rows(self) -> list[dict[str, Any]]:
        """Parts with their shares of the gap."""
        return [
            asdict(part) | {"share": part.share_s / self.gap_s if self.gap_s else None}
            for part in self.parts
        ]


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
    subsets = [
        chosen for size in range(len(both) + 1) for chosen in combinations(both, size)
    ]
    for chosen in subsets:
        mix = {part: both[part][1] for part in chosen}
        # The policy itself is the only one that is graded.
        seconds = replays.replay_s(mix, *([] if mix else [grades]))
        # Two parts may have substitutes of one name.
        words = " + ".join(f"{part}: {name}" for part, name in mix.items())
        mixes[words or "as it is"] = times_s[frozenset(mix)] = seconds
        if progress is not None:
            progress(len(mixes) / len(subsets))

    # What may be replaced need not be: more offers never make it slower, so no share
    # is negative.
    value = {
        offers: min(seconds for mix, seconds in times_s.items() if mix <= offers)
        for offers in times_s
    }
    # Of equally fast mixes, the one that replaces least.
    ceiling = min(times_s, key=lambda mix: (times_s[mix], len(mix)))
    nothing, everything = frozenset[str](), frozenset(both)
    shares = shapley(value, list(both))
    # Alone and last are the ends of what an exchange can save; the share lies between.
    parts = [
        Part(
            name,
            policy=specification,
            replaced_by=substitute if name in ceiling else None,
            alone_s=value[nothing] - value[frozenset({name})],
            last_s=value[everything - {name}] - value[everything],
            share_s=shares[name],
        )
        for name, (specification, substitute) in both.items()
    ]
    gap_of_policy = Gap(
        policy_s=value[nothing],
        ceiling_s=times_s[ceiling],
        resident_s=replays.resident_s(),
        parts=parts,
        mixes=mixes,
        grades=grades,
    )
    # In seconds, beside the misses that `split_eviction` counts.
    if EVICTION in both:
        gap_of_policy.belady_s = replays.replay_s({EVICTION: BELADY})
        gap_of_policy.forced_s = replays.replay_s({EVICTION: FORCED})
    return gap_of_policy


@takes_options(RunConfig, without=["noise_seed"])
def gap(
    trace: RunConfig | str | Path | Trace,
    policy: str | None = None,
    *,
    ceiling: System | None = None,
    causal: Sequence[str] | None = None,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Gap:
    """Measure where a policy loses its time against a clairvoyant schedule.

    Args:
        ceiling: what its parts are replaced by, its routing not; None for the
            clairvoyant
            system with the rules that are fastest in this run.
        causal: cache policies that see the past only, against which the eviction gap is
            held; those whose columns the trace lacks are left out. None for the
            registry's references.
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
    searched = ceiling
    clairvoyant_s = None
    if searched is None:
        rules = clairvoyant_rules(
            config.replaced(trace=opened, policy=CLAIRVOYANT, cache=None, prefetch=None)
        )
        clairvoyant_s = float(replay(rules, keep=False).metrics["makespan_s"])
        searched = compose(rules.policy, cache=rules.cache, prefetch=rules.prefetch)
    # A trace without scores cannot drive caches that go by scores; the rest can be
    # compared all the same.
    at_hand = [
        name
        for name in (references("cache") if causal is None else causal)
        if set(resolve(name, "cache").needs) <= opened.columns
    ]
    # The ceiling routes as the policy does: only decisions differ, not the work.
    routing = setup.system.routing
    for system in (setup.system, replace(searched, routing=routing)):
        policies = system.build(gpus=setup.profile.gpus, host_cache=None)
        check_needs(opened, policies)
        if policies.routing.alters:
            raise PolicyError(
                f"gap: routing policy {routing!r} alters the routing, so the"
                " clairvoyant parts would foresee another run; use --routing"
                " as-recorded"
            )

    passes: dict[str, Any] = {"batch": config.batch, "steps": config.steps}

    def walk(planner: Planner, timeline: Timeline) -> ReplayResult:
        return run_trace(opened, planner, setup.profile, timeline, **passes)

    # Oracles know all forward passes, and no more than those that are replayed.
    future = setup.future or RecordedFuture.of(opened, **passes)
    replays = MixReplays(setup, walk, future, searched)
    if ceiling is None:
        # The rules were the best from a start of their own; from this policy's, plain
        # foresight may lead further.
        foresight = replace(replays, ceiling=CEILING)
        replays = min(replays, foresight, key=MixReplays.ceiling_s)
    gap_of_policy = decompose(replays, progress)
    gap_of_policy.clairvoyant_s = clairvoyant_s
    caches = [setup.system.cache, *at_hand]
    columns = dict.fromkeys(each for name in caches for each in cache_of(name).needs)
    gap_of_policy.eviction = split_eviction(
        setup,
        lambda: layer_steps(opened, **passes, columns=tuple(columns), tokens=True),
        future,
        at_hand,
    )
    gap_of_policy.bound = bound_of(config.replaced(trace=opened))
    fastest = replays.ceiling
    gap_of_policy.config = setup.effective_config(opened) | {
        "begins": begins(setup.planner(), setup.calibration),
        "ceiling": {
            "assignment": fastest.assignment,
            "cache": fastest.cache,
            "prefetch": fastest.prefetch,
        },
    }
    return gap_of_policy


BELADY = "belady"
FORCED = "belady:must_admit=true"


def split_eviction(
    setup: Setup,
    steps: Callable[[], Iterable[LayerSteps]],
    future: Future,
    causal: Sequence[str],
) -> dict[str, Any] | None:
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
        ``accesses``; ``misses`` of the policy, and of both Beladys; the ``gap`` between
        the first and the last; shares of it for want of knowing whom to evict
        (negative if the policy itself declines admissions well) and whom not to admit,
        and that the best causal cache saves, chosen in hindsight; null where there is
        no gap. None where misses alone do not fill the cache: the policy replaces
        experts by its own clock.

    Raises:
        PolicyError: a policy answered something illegal.
    """
    under_study = setup.system.cache
    # How many copies land in time that a cache asks for by its own clock, only a
    # machine can tell.
    if cache_of(under_study).replaces:
        return None
    accesses = 0

    def misses_of(name: str, cache: CachePolicy) -> int:
        nonlocal accesses
        counts = cache_replay.replay(
            cache,
            name,
            setup.shape,
            setup.cache,
            steps(),
            future=future,
            seed=setup.config.seed,
            calibration=setup.calibration,
            extras=load_artefacts(setup.config.artefacts),
        )
        accesses = counts.accesses
        return counts.accesses - counts.hits

    misses = misses_of(under_study, cache_of(under_study))
    # Fresh instances: a policy keeps its state from one run to the next.
    forced, belady, *others = (
        misses_of(name, SameStart(cache_of(name), cache_of(under_study)))
        for name in (FORCED, BELADY, *causal)
    )
    of_causal = dict(zip(causal, others, strict=True))
    best, fewest = min(
        of_causal.items(), key=lambda each: each[::-1], default=(None, misses)
    )
    counts = {
        "victims_share": misses - forced,
        "admissions_share": forced - belady,
        "won_by_causal_share": max(0, misses - fewest),
    }
    beyond = misses - belady
    return {
        "accesses": accesses,
        "misses": misses,
        "misses_forced": forced,
        "misses_belady": belady,
        "gap": beyond,
        # A policy may match Belady; shares of nothing are not zero.
        **{name: n / beyond if beyond else None for name, n in counts.items()},
        "best_causal": best,
        "causal": of_causal,
    }


def gap_answer(report: Gap) -> Answer:
    """Say how much time is lost against a schedule that knows the future, and where."""
    config = report.config
    largest = max(report.parts, key=lambda part: part.share_s, default=None)
    sentence = "knowing the future would save no time"
    if report.gap_s > 0 and largest is not None:
        sentence = (
            f"{percent(report.gap_s / report.policy_s)} of the time is lost to not"
            f" knowing the future, most of it by {largest.name} ({largest.policy}):"
            f" {percent(largest.share_s / report.policy_s)}"
        )
    replaced = [f"{p.name}: {p.replaced_by}" for p in report.parts if p.replaced_by]
    with_parts = ", ".join(replaced) or "nothing replaced"
    facts = [
        ("policy", ms(report.policy_s)),
        (
            "ceiling",
            f"{ms(report.ceiling_s)}: the fastest schedule found, with {with_parts}",
        ),
        ("gap", f"{ms(report.gap_s)}, {_share(report.gap_s, report.policy_s)}"),
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
    return Answer(
        question="where does the policy lose its time?",
        subject=f"{config['model']} on {config['hw']}",
        setting=[*setting_facts(config), *(("note", n) for n in config["synthetic"])],
        facts=facts,
        tables=[
            Listing(
                pd.DataFrame(report.part_rows()),
                _PARTS,
                note="costs: what replacing the part saves, the mean over all orders of"
                " replacing",
            ),
            *_grades_table(report.grades),
            _mixes_table(report),
        ],
        sentences=[sentence],
        notes=_eviction_lines(report),
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
_GRADES = [
    Column("costs", "costs of a layer"),
    Column("mean", "mean"),
    Column("p95", "95th percentile"),
    Column("max", "worst"),
    Column("optimal_share", "optimal", "share"),
]


def _grades_table(grades: Grades) -> list[Listing]:
    """How far each assignment is from the best for the same state of the machine."""
    figures = grades.to_json()
    if not figures["layer_steps"]:
        return []
    rows = [
        {"costs": "added up per device", **figures["modelled"]},
        {"costs": "copies one after the other", **figures["scheduled"]},
    ]
    note = f"time of {figures['layer_steps']:,} layer steps over the least possible"
    if figures["unproven"]:
        note += (
            f"; {figures['unproven']:,} were too large to solve exactly, so their ratio"
            " may be too small"
        )
    title = "Assignment against the best one"
    return [Listing(pd.DataFrame(rows), _GRADES, title=title, note=note)]


def _mixes_table(report: Gap) -> Listing:
    frame = pd.DataFrame(report.mixes.items(), columns=["mix", "run_s"])
    frame = frame.sort_values("run_s", kind="stable")
    frame["change"] = frame["run_s"] / (report.policy_s or math.nan) - 1
    columns = [
        Column("mix", "parts replaced"),
        Column("run_s", "whole run", "s"),
        Column("change", "against the policy", "share"),
    ]
    return Listing(frame, columns, title="Every combination", printed=False)


def _eviction_lines(report: Gap) -> list[str]:
    # A policy with the ceiling's cache loses nothing by eviction.
    if report.belady_s is None or report.forced_s is None:
        return []
    lines = [
        (
            f"with Belady's evictions alone it takes {ms(report.belady_s)};"
            f" {ms(report.forced_s)} if every fetched expert must enter the cache"
        )
    ]
    # Replacements that follow a clock depend on times, which misses alone do not tell.
    if report.eviction is None:
        clock = "this cache swaps by its own clock, so its misses depend on the machine"
        return [*lines, clock]
    split = report.eviction
    misses, belady, forced = (
        _share(split[name], split["accesses"])
        for name in ("misses", "misses_belady", "misses_forced")
    )
    lines.append(
        f"the cache alone misses {misses} of {split['accesses']:,} accesses; Belady"
        f" {belady}, and {forced} if all that is fetched must enter"
    )
    # Shares of nothing say nothing.
    if split["gap"]:
        lines += [
            (
                f"of that {percent(split['victims_share'])} comes from evicting the"
                f" wrong one, {percent(split['admissions_share'])} from admitting one"
                " that should have stayed out"
            ),
            (
                f"the best cache without foresight, {split['best_causal']}, closes"
                f" {percent(split['won_by_causal_share'])} of it"
            ),
        ]
    return lines


def _share(part: float, total: float) -> str:
    return percent(part / total) if total else "-"


def _figure(report: Gap) -> Figure:
    """From the policy's time down to the ceiling, a bar for each part."""
    left = 1e3 * report.policy_s
    rows = [("the policy", 0.0, left, "run")]
    for part in sorted(report.parts, key=lambda part: -part.share_s):
        rows.append((part.name, left - 1e3 * part.share_s, left, "part"))
        left -= 1e3 * part.share_s
    rows.append(("ceiling", 0.0, 1e3 * report.ceiling_s, "run"))
    frame = pd.DataFrame(rows, columns=["name", "from", "to", "kind"])
    frame["words"] = [ms(length) for length in (frame["to"] - frame["from"]) / 1e3]
    rules = [("x", 1e3 * report.resident_s, "all experts on the GPU")]
    if report.bound is not None:
        rules.append(
            (
                "x",
                1e3 * report.bound.seconds,
                "bound: no schedule is faster, where deciding takes time",
            )
        )
    return Figure(
        frame,
        Axis("to", "ms, whole run", limits=(0, 1150 * report.policy_s or 1)),
        names("name", "", frame["name"]),
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
