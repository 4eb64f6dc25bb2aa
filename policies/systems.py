"""Named compositions of the four kinds of policy: what a paper or a program is made of."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from policies.base import PolicyError
from policies.plan import Policies
from policies.registry import names, resolve

if TYPE_CHECKING:
    from policies.base import AssignmentPolicy, CachePolicy, PrefetchPolicy, RoutingPolicy


@dataclass(frozen=True, slots=True)
class System:
    """Four policy specifications, and where they depart from their source.

    Each is a registered name with parameters, as on the command line: ``lfu:variant=perfect``.
    """

    assignment: str
    cache: str = "lru"
    prefetch: str = "none"
    routing: str = "as-recorded"
    staging: int | None = None
    note: str = ""

    def build(self, *, gpus: int, host_cache: str | None) -> Policies:
        """Make fresh instances: one cache policy per GPU, and one for host memory if it is limited.

        Raises:
            PolicyError: an unknown name or parameter.
        """
        return Policies(
            assignment=cast("AssignmentPolicy", resolve(self.assignment, "assignment")),
            prefetch=cast("PrefetchPolicy", resolve(self.prefetch, "prefetch")),
            caches=[cast("CachePolicy", resolve(self.cache, "cache")) for _ in range(gpus)],
            routing=cast("RoutingPolicy", resolve(self.routing, "routing")),
            host_cache=None if host_cache is None else cast("CachePolicy", resolve(host_cache, "cache")),
            names={
                "assignment": self.assignment,
                "prefetch": self.prefetch,
                "cache": self.cache,
                "routing": self.routing,
            },
        )


SYSTEMS = {
    "fiddler": System(
        assignment="static-threshold",
        cache="static",
        note="Fiddler's per-expert rule over a static placement; placement per layer, not ranked over the whole model",
    ),
    "mixtral-offloading": System(
        assignment="on-demand",
        cache="lru",
        note="per-layer LRU, everything on the GPU; evicted experts are not copied back, as weights never change",
    ),
    "moe-on-demand": System(
        assignment="on-demand",
        cache="static",
        note="DAOP's baseline: static residents, every miss is copied to staging and dropped",
    ),
}


def compose(
    policy: str, *, cache: str | None = None, prefetch: str | None = None, routing: str | None = None
) -> System:
    """Take a system or an assignment policy by name, and replace parts of it.

    Raises:
        PolicyError: `policy` is neither.
    """
    base = SYSTEMS.get(policy)
    if base is None:
        name = policy.partition(":")[0]
        known = [*names("assignment"), *SYSTEMS]
        if name not in known and not policy.endswith(".py"):
            close = difflib.get_close_matches(name, known, n=1)
            raise PolicyError(
                f"unknown policy {name!r}; systems: {', '.join(sorted(SYSTEMS))}; assignment policies:"
                f" {', '.join(names('assignment'))}" + (f" (did you mean {close[0]!r}?)" if close else "")
            )
        base = System(assignment=policy)
    return System(
        assignment=base.assignment,
        cache=cache or base.cache,
        prefetch=prefetch or base.prefetch,
        routing=routing or base.routing,
        staging=base.staging,
        note=base.note,
    )
