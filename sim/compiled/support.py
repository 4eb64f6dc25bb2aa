"""What the compiled engine supports: everything whose kernels the policies bring.

What it does not is run by SimPy, and `unsupported` says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.hwprofiles.costs import Costs
from moesim.machine_code.functions import INTERPRETED
from moesim.policies.base import (
    AssignmentPolicy,
    CachePolicy,
    Policy,
    PrefetchPolicy,
    RoutingPolicy,
)
from moesim.policies.planner.planner import Planner
from moesim.sim.compiled.records import MOST_LANES

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile

_READ_ONLY = frozenset({"kernels", "initial", "start", "evaluations", "drafted"})
"""Members of a policy that a kernel has no part in."""


COMPILE_S = 4.0
"""Seconds that the engine takes to compile, about: once."""


OBSERVED = "a planner that somebody observes"
OTHER_COSTS = "costs that are not a hardware profile's"
MANY_LANES = f"a machine of more than {MOST_LANES} lanes"
ARRIVALS = "requests that arrive over time"
SIMPY_ALONE = (ARRIVALS, OBSERVED, OTHER_COSTS, MANY_LANES)
"""What SimPy's engine runs, and the compiled one does not."""


def unsupported(planner: Any, profile: HardwareProfile, costs: Any) -> str | None:
    """Say why the compiled engine cannot run this; None if it can."""
    if INTERPRETED:
        return "compilation is switched off (NUMBA_DISABLE_JIT)"
    if type(planner) is not Planner:
        return OBSERVED
    if type(costs) is not Costs:
        return OTHER_COSTS
    if len(profile.lanes) > MOST_LANES:
        return MANY_LANES
    return None


def all_bring_kernels(planner: Planner) -> bool:
    """Whether no policy's Python is asked in a compiled run."""
    policies = planner.policies
    asked: list[Policy] = [
        policies.routing,
        policies.assignment,
        policies.prefetch,
        policies.caches[0],
    ]
    host_cache = policies.host_cache
    of_host = host_cache is None or host_answers_with_kernels(host_cache)
    return of_host and all(map(answers_with_kernels, asked))


def host_answers_with_kernels(policy: CachePolicy) -> bool:
    """The same of host memory's cache, which is told of some active experts only."""
    # Oracles count accesses of whole layer steps, which host memory does not see.
    return not policy.oracle and answers_with_kernels(policy)


def answers_with_kernels(policy: Policy) -> bool:
    """Whether a policy, once started, brings kernels for every answer that it gives."""
    return brings_kernels(type(policy)) and policy.kernels() is not None


def brings_kernels(policy: type[Policy]) -> bool:
    """Whether a class of policies brings kernels for every answer that it gives.

    A subclass that overrides an answer in Python, and not its kernels, does not.
    """
    kinds = policy.__mro__
    base = next(kind for kind in kinds if kind in _KINDS)
    owner = _depth(kinds, "kernels")
    if kinds[owner] is base or kinds[owner] is Policy:
        return False
    answers = [
        name
        for name in vars(base)
        if not name.startswith("_")
        and name not in _READ_ONLY
        and callable(getattr(base, name))
    ]
    overridden = [
        name for name in answers if getattr(policy, name) is not getattr(base, name)
    ]
    return all(_depth(kinds, name) >= owner for name in overridden)


def _depth(kinds: tuple[type, ...], name: str) -> int:
    """Place, in the order of resolution, of the class that defines a name."""
    return next(place for place, kind in enumerate(kinds) if name in vars(kind))


_KINDS = (AssignmentPolicy, CachePolicy, PrefetchPolicy, RoutingPolicy)
