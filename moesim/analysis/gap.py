"""Where does a policy lose its time against one that knows the future, and which of its
parts loses it?

Think of a relay team that is slower than a team of stars. Exchange one runner and the
time saved says what that runner costs; but a better second runner helps more when the
first is better too. So every mix is timed, and each gain is averaged over all orders in
which the runners could be exchanged (Shapley's value). Those shares alone depend on no
order, treat parts alike and sum exactly to the whole gap.

Four parts are exchanged: eviction (the cache's rule, from the same start -> Belady),
assignment (-> exact), prefetch (-> clairvoyant), planning (-> free). An exchange is an
offer: who knows the future also knows when his help would hurt, so a set of offers is
worth its fastest mix. Hence no share is negative, and the *clairvoyant bound* is the
fastest mix of all. It is a bound for these parts, not a theorem: the exact assignment
looks at one layer step only, and Belady saves misses, not seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import factorial
from typing import TYPE_CHECKING, Any

from moesim.analysis.gap_bench import BOUND, EVICTION, Bench, Choice, Grades
from moesim.analysis.gap_eviction import FORCED, EvictionSplit, split_eviction
from moesim.hwprofiles.costs import Costs
from moesim.policies.base import PolicyError
from moesim.policies.registry import references, resolve
from moesim.runs.artefacts import load_artefacts
from moesim.runs.setup import Setup, check_needs, needed_columns, profile_of
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.systems import System
    from moesim.traces.format.batch import RoutedStep


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a policy and what it costs, in seconds of the whole run; none is
    negative.

    Attributes:
        name: one of `moesim.analysis.gap_bench.PARTS`.
        policy: specification under study; for planning, the assignment policy whose
            decisions are charged.
        replaced_by: counterpart in the clairvoyant bound; None if the bound is faster
            without an exchange.
        alone_s: saved by this exchange only.
        last_s: saved by this exchange when all others are on offer already.
        share_s: mean saving over all orders of exchanges; these sum to the gap.
    """

    name: str
    policy: str
    replaced_by: str | None
    alone_s: float
    last_s: float
    share_s: float


@dataclass(slots=True)
class Gap:
    """The gap of a policy to the clairvoyant bound, and its parts.

    Attributes:
        policy_s: makespan of the policy as it is.
        bound_s: of the fastest mix.
        resident_s: of a machine whose GPUs hold all experts: below it even more memory
            does not help.
        parts: with shares that sum to the gap.
        mixes: makespan of every mix, by its exchanges; the policy itself is ``as it
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
        """Seconds above the clairvoyant bound."""
        return self.policy_s - self.bound_s

    def to_json(self) -> dict[str, Any]:
        """One object; `share` is of the gap, null where there is none."""
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


def shapley(
    value: Mapping[frozenset[str], float], players: Sequence[str]
) -> dict[str, float]:
    """Share out the drop of `value` from nobody to everybody, averaged over all orders
    of joining.

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
            weight = factorial(size) * factorial(count - 1 - size) / factorial(count)
            for before in map(frozenset, combinations(others, size)):
                shares[player] += weight * (value[before] - value[before | {player}])
    return shares


def decompose(bench: Bench, progress: Callable[[int], None] | None = None) -> Gap:
    """Replay all mixes of a bench (32 where all four parts differ) and share out the
    gap.

    Args:
        bench: the trace, the machine and the policy.
        progress: told how many replays are done.

    Raises:
        PolicyError: a policy answered something illegal.
    """
    offers = bench.choices()
    grades = Grades()
    players = list(offers)
    times: list[tuple[dict[str, Choice], float]] = []
    for answers in product(*([None, *offers[part]] for part in players)):
        mix = {
            part: choice
            for part, choice in zip(players, answers, strict=True)
            if choice is not None
        }
        times.append((mix, bench.replay_s(mix, None if mix else grades)))
        if progress is not None:
            progress(len(times))
    value = {
        subset: min(seconds for mix, seconds in times if mix.keys() <= subset)
        for size in range(len(players) + 1)
        for subset in map(frozenset, combinations(players, size))
    }
    nobody = frozenset[str]()
    everybody = frozenset(players)
    best, bound_s = min(times, key=lambda item: (item[1], len(item[0])))
    shares = shapley(value, players)
    own = bench.own()
    parts = [
        Part(
            name,
            own[name],
            best[name].label if name in best else None,
            alone_s=value[nobody] - value[frozenset({name})],
            last_s=value[everybody - {name}] - value[everybody],
            share_s=shares[name],
        )
        for name in players
    ]
    mixes = {_words(mix): seconds for mix, seconds in times}
    found = Gap(value[nobody], bound_s, bench.resident_s(), parts, mixes, grades)
    if EVICTION in offers:
        found.belady_s = next(
            seconds for mix, seconds in times if mix.keys() == {EVICTION}
        )
        found.forced_s = bench.replay_s({EVICTION: Choice(FORCED, None, FORCED)})
    return found


def _words(mix: Mapping[str, Choice]) -> str:
    return " + ".join(choice.label for choice in mix.values()) or "as it is"


def gap(
    trace: str | Path | Trace,
    policy: str = "greedy",
    *,
    hw: str | Path | HardwareProfile | None = None,
    batch: int = 1,
    steps: int | None = None,
    warm: str | Path | Trace | None = None,
    bound: System = BOUND,
    causal: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Gap:
    """Say where a policy loses its time against the clairvoyant bound.

    Args:
        bound: what its parts are replaced by; its routing is not used.
        causal: cache policies that see the past only, against which the eviction gap is
            held; those whose columns the trace lacks are left out. None for the
            registry's references.
        progress: told how many replays are done.
        options: as in `moesim.runs.replay.replay`, as are the arguments that are not
            named here.

    Raises:
        TraceError, ProfileError, PolicyError: bad input, in one line; also a routing
            policy that alters the routing, because then the future depends on the mix.
    """
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    setup = Setup.of(
        opened, policy, profile_of(hw), batch=batch, steps=steps, warm=warm, **options
    )
    shape = setup.shape
    profile = setup.profile
    system = setup.system
    plan = setup.memory
    needs: dict[str, None] = {}
    for one in (setup, replace(setup, system=replace(bound, routing=system.routing))):
        policies = one.policies()
        check_needs(opened, policies)
        needs |= dict.fromkeys(needed_columns(policies))
        if policies.routing.alters:
            raise PolicyError(
                f"gap: routing policy {system.routing!r} alters the routing, so the"
                " clairvoyant parts would foresee another run; use --routing"
                " as-recorded"
            )
    at_hand = [
        name
        for name in (references("cache") if causal is None else causal)
        if set(resolve(name, "cache").needs) <= opened.columns
    ]
    needs |= dict.fromkeys(
        column for name in at_hand for column in resolve(name, "cache").needs
    )

    def passes() -> Iterable[RoutedStep]:
        return compose_steps(opened, batch=batch, steps=steps, columns=needs)

    future = setup.future or RecordedFuture.of(opened, batch=batch, steps=steps)
    extras = load_artefacts(setup.artefacts)
    bench = Bench(
        shape,
        profile,
        Costs(profile, shape),
        plan,
        system,
        passes,
        future,
        bound,
        setup.host_cache,
        setup.seed,
        setup.calibration,
        extras,
    )
    found = decompose(bench, progress)
    found.eviction = split_eviction(
        system.cache,
        shape,
        plan.gpu,
        passes,
        future,
        causal=at_hand,
        seed=setup.seed,
        calibration=setup.calibration,
        extras=extras,
    )
    found.config = setup.config(opened, batch=batch, steps=steps, warm=warm)
    found.config["bound"] = {
        "assignment": bound.assignment,
        "cache": bound.cache,
        "prefetch": bound.prefetch,
    }
    return found
