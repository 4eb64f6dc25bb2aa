"""What the compiled engine supports: everything whose kernels the policies bring.

What it does not is run by SimPy, and `unsupported` says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba

from moesim.hwprofiles.costs import Costs
from moesim.policies.base import (
    AssignmentPolicy,
    CachePolicy,
    Policy,
    PrefetchPolicy,
)
from moesim.policies.planner.planner import Planner
from moesim.policies.planner.residency import GLOBAL
from moesim.sim.compiled.records import MOST_LANES

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile

_READ_ONLY = frozenset({"kernels", "initial", "start", "replaces", "evaluations"})
"""Members of a policy that a kernel has no part in."""


def unsupported(planner: Any, profile: HardwareProfile, costs: Any) -> str | None:
    """Say why the compiled engine cannot run this; None if it can."""
    if numba.config.DISABLE_JIT:
        return "compilation is switched off (NUMBA_DISABLE_JIT)"
    if type(planner) is not Planner:
        return "somebody observes the planner"
    if type(costs) is not Costs:
        return "costs that are not a hardware profile's"
    if len(profile.lanes) > MOST_LANES:
        return f"a machine of more than {MOST_LANES} lanes"
    if profile.memory.unified:
        return "memory that CPU and GPU share"
    policies = planner.policies
    if policies.routing.alters:
        return f"routing policy {policies.names.get('routing')!r}"
    if planner.host is not None:
        return "limited host memory"
    if policies.writes_back:
        return "copies back to host memory"
    return _unsupported_policies(planner)


def _unsupported_policies(planner: Planner) -> str | None:
    policies = planner.policies
    if policies.prefetch.late == "wait":
        return "prefetches that their layer step waits for"
    for kind, policy in (
        ("assignment", policies.assignment),
        ("prefetch", policies.prefetch),
        ("cache", policies.caches[0]),
    ):
        if not brings_kernels(type(policy)) or policy.kernels() is None:
            return f"{kind} policy {policies.names.get(kind)!r}: no kernels"
    others = {
        column
        for policy in policies.all()
        for column in policy.needs
        if policy is not policies.prefetch
    }
    if others - {"scores"}:
        return f"the trace's column {min(others - {'scores'})!r}"
    if "scores" in policies.prefetch.needs:
        return "a prefetch that reads gate scores"
    sizes = planner.shape.expert_bytes
    if planner.sizes.gpu.scope == GLOBAL and len(set(sizes)) > 1:
        return "experts of unequal sizes in one pool"
    if policies.prefetch.requeue and len(set(sizes)) > 1:
        return "a prefetch queue of unequal experts that is sorted anew"
    cache = policies.caches[0]
    if cache.replaces and cache.replaces_first:
        return f"cache policy {policies.names.get('cache')!r}: replaces before the step"
    return None


def brings_kernels(policy: type[Policy]) -> bool:
    """Whether a class of policies brings kernels for every answer that it gives.

    A subclass that overrides an answer in Python, and not its kernels, does not.
    """
    kinds = policy.__mro__
    base = next(kind for kind in kinds if kind in _KINDS)
    owner = _depth(kinds, "kernels")
    if kinds[owner] is base or kinds[owner] is Policy:
        return False
    answers = [name for name in vars(base) if name not in _READ_ONLY]
    overridden = [
        name for name in answers if not name.startswith("_") and callable_of(base, name)
    ]
    return all(_depth(kinds, name) >= owner for name in overridden)


def callable_of(kind: type, name: str) -> bool:
    """Whether a class answers something by this name."""
    return callable(getattr(kind, name))


def _depth(kinds: tuple[type, ...], name: str) -> int:
    """Place, in the order of resolution, of the class that defines a name."""
    return next(place for place, kind in enumerate(kinds) if name in vars(kind))


_KINDS = (AssignmentPolicy, CachePolicy, PrefetchPolicy)
