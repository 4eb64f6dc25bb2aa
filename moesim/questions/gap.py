"""Decomposes the time that a policy takes beyond one that knows the future, by its
parts.

Parts are replaced by substitutes that know the future, in every combination, and each
mix is timed. Replacing one part saves more or less time depending on which others are
replaced already, so the whole gap is shared out by Shapley's value
(`moesim.questions.gap`).

Four parts are replaced: eviction (the cache's rule, from the same start), assignment
and prefetch by those of the clairvoyant system, whose rules are searched for this run
(`moesim.runs.clairvoyant`), and planning (-> free). A substitute is an offer: a policy
that knows the future also knows when it would hurt, so a set of offers is worth its
fastest mix. Hence no share is negative, and the *ceiling* is the fastest mix of all: a
schedule that was carried out. What no schedule can beat is another question
(`moesim.runs.bound`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import factorial
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.base.options import ConfigError
from moesim.policies.base import PolicyError
from moesim.policies.registry import references, resolve
from moesim.policies.systems import compose
from moesim.questions.gap_eviction import (
    BELADY,
    FORCED,
    EvictionSplit,
    split_eviction,
)
from moesim.questions.gap_mixes import BOUND, EVICTION, Grades, MixReplays
from moesim.reporting.tables import aligned, facts_lines
from moesim.runs.clairvoyant import CLAIRVOYANT
from moesim.runs.config import RunConfig, takes_options
from moesim.runs.engines import choose_engine
from moesim.runs.replay import clairvoyant_rules
from moesim.runs.setup import (
    Setup,
    check_needs,
    load_artefacts,
    needed_columns,
    refuse_arrivals,
    trace_of,
)
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.future import RecordedFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from moesim.policies.planner.planner import Planner
    from moesim.policies.systems import System
    from moesim.questions.gap_eviction import EvictionSplit
    from moesim.sim.results import ReplayResult
    from moesim.traces.format.batch import RoutedStep
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
        replaced_by: substitute in the ceiling; None if the bound is faster
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
        bound_s: of the fastest mix.
        resident_s: of a machine whose GPUs hold all experts: below it even more memory
            does not help.
        parts: with shares that sum to the gap.
        mixes: makespan of every mix, by its substitutes; the policy itself is ``as it
            is``.
        grades: of the policy's own assignment.
        belady_s: makespan when only the cache's rule is Belady's.
        forced_s: the same with a Belady that must admit every fetched expert; None if
            the policy has the bound's cache.
        eviction: what the cache alone would miss, and why; None if misses alone do not
            fill it.
        config: effective configuration.
    """

    policy_s: float
    bound_s: float
    resident_s: float
    parts: list[Part]
    mixes: dict[str, float]
    grades: Grades
    belady_s: float | None = None
    forced_s: float | None = None
    eviction: EvictionSplit | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def gap_s(self) -> float:
        """Seconds above the ceiling."""
        return self.policy_s - self.bound_s

    def to_json(self) -> dict[str, Any]:
        """Return one object; `share` is of the gap, null where there is none."""
        parts = {
            part.name: {
                "policy": part.policy,
                "replaced_by": part.replaced_by,
                "alone_s": part.alone_s,
                "last_s": part.last_s,
                "share_s": part.share_s,
                "share": part.share_s / self.gap_s if self.gap_s else None,
            }
            for part in self.parts
        }
        return {
            "policy_s": self.policy_s,
            "bound_s": self.bound_s,
            "gap_s": self.gap_s,
            "resident_s": self.resident_s,
            "parts": parts,
            "mixes": self.mixes,
            "belady_s": self.belady_s,
            "forced_belady_s": self.forced_s,
            "eviction": None if self.eviction is None else self.eviction.to_json(),
            "assignment": self.grades.to_json(),
            "config": self.config,
        }


class _TimedMix(NamedTuple):
    """A mix and its makespan."""

    mix: dict[str, str]
    seconds: float


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
    substitutes = replays.substitutes()
    grades = Grades()
    times: list[_TimedMix] = []
    # None first: the first mix is the policy itself, the only one that is graded.
    for chosen in product(*([None, offer] for offer in substitutes.values())):
        mix = {
            part: substitute
            for part, substitute in zip(substitutes, chosen, strict=True)
            if substitute is not None
        }
        seconds = replays.replay_s(mix, None if mix else grades)
        times.append(_TimedMix(mix, seconds))
        if progress is not None:
            progress(len(times) / 2 ** len(substitutes))

    parts = list(substitutes)
    value = _fastest_by_offers(times, parts)
    # Of equally fast mixes, the one that replaces least.
    bound = min(times, key=lambda timed: (timed.seconds, len(timed.mix)))
    gap_of_policy = Gap(
        policy_s=value[frozenset()],
        bound_s=bound.seconds,
        resident_s=replays.resident_s(),
        parts=_parts(value, parts, bound.mix, replays.specifications()),
        mixes={_label(timed.mix): timed.seconds for timed in times},
        grades=grades,
    )
    # In seconds, beside the misses that `split_eviction` counts.
    if EVICTION in substitutes:
        gap_of_policy.belady_s = replays.replay_s({EVICTION: BELADY})
        gap_of_policy.forced_s = replays.replay_s({EVICTION: FORCED})
    return gap_of_policy


def _fastest_by_offers(
    times: Sequence[_TimedMix], parts: Sequence[str]
) -> dict[frozenset[str], float]:
    """Set of parts that may be replaced -> seconds of the fastest mix within it."""
    # Monotonic by construction: more offers never make it slower, so no share is
    # negative.
    value = {}
    for size in range(len(parts) + 1):
        for offers in map(frozenset, combinations(parts, size)):
            value[offers] = min(
                timed.seconds for timed in times if timed.mix.keys() <= offers
            )
    return value


def _parts(
    value: Mapping[frozenset[str], float],
    names: Sequence[str],
    bound: Mapping[str, str],
    specifications: Mapping[str, str],
) -> list[Part]:
    # Alone and last are the ends of what an exchange can save; the share lies between.
    no_offers = frozenset[str]()
    all_offers = frozenset(names)
    shares = shapley(value, names)
    return [
        Part(
            name,
            policy=specifications[name],
            replaced_by=bound.get(name),
            alone_s=value[no_offers] - value[frozenset({name})],
            last_s=value[all_offers - {name}] - value[all_offers],
            share_s=shares[name],
        )
        for name in names
    ]


def _label(mix: Mapping[str, str]) -> str:
    return " + ".join(mix.values()) or "as it is"


@takes_options(RunConfig, without=["noise_seed"])
def gap(
    trace: RunConfig | str | Path | Trace,
    policy: str | None = None,
    *,
    bound: System | None = None,
    causal: Sequence[str] | None = None,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Gap:
    """Measure where a policy loses its time against a clairvoyant schedule.

    Args:
        bound: what its parts are replaced by, its routing not; None for the clairvoyant
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
    searched = bound
    if searched is None:
        rules = clairvoyant_rules(
            config.replaced(trace=opened, policy=CLAIRVOYANT, cache=None, prefetch=None)
        )
        searched = compose(rules.policy, cache=rules.cache, prefetch=rules.prefetch)
    # A trace without scores cannot drive caches that go by scores; the rest can be
    # compared all the same.
    at_hand = [
        name
        for name in (references("cache") if causal is None else causal)
        if set(resolve(name, "cache").needs) <= opened.columns
    ]
    columns = _needed_columns(opened, setup, searched, at_hand)

    # A generator each: every replay walks the trace from its beginning.
    def passes() -> Iterable[RoutedStep]:
        return compose_steps(
            opened, batch=config.batch, steps=config.steps, columns=columns
        )

    def walk(planner: Planner, timeline: Timeline) -> ReplayResult:
        return choose_engine(config.engine, planner).run(
            opened,
            planner,
            setup.profile,
            timeline,
            batch=config.batch,
            steps=config.steps,
            noise_seed=None,
            progress=None,
        )

    # Oracles know all forward passes, and no more than those that are replayed.
    future = setup.future
    if future is None:
        future = RecordedFuture.of(opened, batch=config.batch, steps=config.steps)
    extras = load_artefacts(config.artefacts)
    replays = MixReplays(
        shape=setup.shape,
        profile=setup.profile,
        costs=setup.costs(),
        memory=setup.memory,
        system=setup.system,
        passes=passes,
        future=future,
        bound=searched,
        host_cache=config.host_cache,
        seed=config.seed,
        calibration=setup.calibration,
        extras=extras,
        walk=walk,
    )
    if bound is None:
        # The rules were the best from a start of their own; from this policy's, plain
        # foresight may lead further.
        foresight = replace(replays, bound=BOUND)
        replays = min(replays, foresight, key=MixReplays.ceiling_s)
    bound = replays.bound
    gap_of_policy = decompose(replays, progress)
    gap_of_policy.eviction = split_eviction(
        setup.system.cache,
        setup.shape,
        setup.memory.gpu,
        passes,
        future,
        causal=at_hand,
        seed=config.seed,
        calibration=setup.calibration,
        extras=extras,
    )
    gap_of_policy.config = setup.effective_config(opened)
    gap_of_policy.config["bound"] = {
        "assignment": bound.assignment,
        "cache": bound.cache,
        "prefetch": bound.prefetch,
    }
    return gap_of_policy


def _needed_columns(
    trace: Trace, setup: Setup, bound: System, causal: Sequence[str]
) -> dict[str, None]:
    """Columns that any mix or causal cache needs, in the order in which they are named.

    Raises:
        PolicyError: a column is missing, or the routing policy alters the routing.
    """
    routing = setup.system.routing
    # The bound routes as the policy does: only decisions differ, not the work.
    with_bound = replace(setup, system=replace(bound, routing=routing))
    columns: dict[str, None] = {}
    for either in (setup, with_bound):
        policies = either.policies()
        check_needs(trace, policies)
        columns |= dict.fromkeys(needed_columns(policies))
        if policies.routing.alters:
            raise PolicyError(
                f"gap: routing policy {routing!r} alters the routing, so the"
                " clairvoyant parts would foresee another run; use --routing"
                " as-recorded"
            )
    for name in causal:
        columns |= dict.fromkeys(resolve(name, "cache").needs)
    return columns


def gap_text(report: Gap) -> str:
    """Lay out a gap for a terminal: the times, the shares, the eviction gap, the
    assignment's grades.
    """
    config = report.config
    facts = [
        ("model", f"{config['model']}, {config['trace']}"),
        (
            "machine",
            f"{config['hw']} ({config['hw_kind']} profile), batch {config['batch']}",
        ),
        (
            "policy",
            (
                f"{_ms(report.policy_s)}: {config['assignment']}, {config['cache']},"
                f" prefetch {config['prefetch']}"
            ),
        ),
        ("ceiling", f"{_ms(report.bound_s)}: {_bound_words(report)}"),
        (
            "gap",
            (
                f"{_ms(report.gap_s)}, {_percent(report.gap_s, report.policy_s)} of the"
                " policy's time"
            ),
        ),
        (
            "all resident",
            f"{_ms(report.resident_s)}: the ceiling if the GPUs held every expert",
        ),
    ]
    facts += [("note", caveat) for caveat in config["synthetic"]]
    head = facts_lines(facts)
    rows = [["part", "share", "of the gap", "alone", "last"]]
    rows += [
        [
            part.name,
            _ms(part.share_s),
            _percent(part.share_s, report.gap_s),
            _ms(part.alone_s),
            _ms(part.last_s),
        ]
        for part in report.parts
    ]
    rows.append(
        ["sum", _ms(report.gap_s), _percent(report.gap_s, report.gap_s), "", ""]
    )
    legend = (
        "share: saved on average over all orders of exchanges; alone: as the only one;"
        " last: after all others"
    )
    blocks = ["\n".join(head), "\n".join([*aligned(rows), "", legend])]
    # A policy with the bound's cache has no eviction gap.
    if report.belady_s is not None:
        blocks.append("\n".join(_eviction_lines(report, report.eviction)))
    blocks.append("\n".join(_assignment_lines(report.grades)))
    return "\n\n".join(blocks)


def _bound_words(report: Gap) -> str:
    used = [part.replaced_by for part in report.parts if part.replaced_by]
    return (
        "exchanged for " + " + ".join(used)
        if used
        else "nothing known of the future helps"
    )


def _eviction_lines(report: Gap, split: EvictionSplit | None) -> list[str]:
    assert report.belady_s is not None
    assert report.forced_s is not None
    eviction_s = report.policy_s - report.belady_s
    victims_s = report.policy_s - report.forced_s
    lines = [
        (
            f"eviction alone: {_ms(eviction_s)} to Belady; {_ms(victims_s)} of it to a"
            " Belady that must admit every fetch"
        ),
    ]
    # Replacements that follow a clock depend on times, which misses alone do not tell.
    if split is None:
        return [
            *lines,
            (
                "its misses cannot be told without the machine: this cache swaps by its"
                " own clock"
            ),
        ]
    lines.append(
        f"cache alone: misses {_percent(split.misses, split.accesses)},"
        f" forced-admission Belady {_percent(split.forced, split.accesses)}, Belady"
        f" {_percent(split.belady, split.accesses)} of {split.accesses:,} accesses"
    )
    # Shares of nothing say nothing.
    if split.gap:
        lines += [
            (
                f"of that gap {_percent(split.victims, split.gap)} is not knowing whom"
                f" to evict, {_percent(split.admissions, split.gap)} not knowing whom"
                " to turn away"
            ),
            (
                f"the best causal cache at hand ({split.best_causal}) wins"
                f" {_percent(split.won, split.gap)} of it;"
                f" {_percent(split.gap - split.won, split.gap)} is won by none"
            ),
        ]
    return lines


def _assignment_lines(grades: Grades) -> list[str]:
    figures = grades.to_json()
    if not figures["layer_steps"]:
        return ["assignment: no layer step to grade"]
    lines = [
        (
            f"assignment of {figures['layer_steps']:,} layer steps, makespan over the"
            " least possible:"
        )
    ]
    # Two models of a layer step, since no policy knows how lanes will really overlap.
    for name, model in (
        ("modelled", "sums of costs"),
        ("scheduled", "copies in turn"),
    ):
        ratios = figures[name]
        lines.append(
            f"  {name:<9}  mean {ratios['mean']:.3f}, p95 {ratios['p95']:.3f}, max"
            f" {ratios['max']:.3f}; {ratios['optimal_share']:.1%} optimal ({model})"
        )
    if figures["unproven"]:
        lines.append(
            f"  {figures['unproven']} were too large to solve exactly: their ratio may"
            " be too small"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds:.3f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.2f} ms"


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"


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
    count = len(players)
    shares = dict.fromkeys(players, 0.0)
    for player in players:
        others = [other for other in players if other != player]
        for size in range(count):
            # Share of all orders in which just so many players come before this one.
            orders = factorial(size) * factorial(count - 1 - size)
            weight = orders / factorial(count)
            for before in map(frozenset, combinations(others, size)):
                saved = value[before] - value[before | {player}]
                shares[player] += weight * saved
    return shares
