"""Checks what other people's policies answer, before an engine works with it.

Engines index arrays with these answers, so a wrong one would show far from the policy,
or as wrong figures. Our own policies are tested instead. What only an engine knows,
such as who may leave a memory, it checks itself, as it does lanes and launch order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.arrays import read_only
from moesim.policies.base import Policy, PolicyError
from moesim.policies.names import UNUSED

if TYPE_CHECKING:
    from collections.abc import Callable

    from moesim.policies.arrays import Ints
    from moesim.policies.base import Gate, MachineView
    from moesim.policies.ranked_cache import RankedCache


def with_checks(policy: Policy, where: str) -> Policy:
    """The same policy, whose own answers raise where they do not fit.

    Args:
        policy: one that is none of ours.
        where: kind and name, for messages.
    """
    from moesim.policies.ranked_cache import RankedCache  # noqa: PLC0415 - names need not wait for it

    for question, check in _CHECKS.items():
        ask = getattr(policy, question, None)
        # What is inherited from a base of ours is tested.
        if ask is None or str(ask.__func__.__module__).startswith("moesim."):
            continue
        vars(policy)[question] = partial(check, ask, f"{where}: {question}")

    # Such a cache answers by numbers that it keeps.
    if isinstance(policy, RankedCache):
        vars(policy)["victims"] = partial(_by_score, policy, policy.victims, where)
    return policy


def _flags(ask: Callable[..., Any], where: str, *shown: Any) -> int:
    answer = _integer(ask(*shown), where, "SERIAL and WAITS, added up, or 0")
    if not 0 <= answer <= 3:
        raise _unexpected(where, "SERIAL and WAITS, added up, or 0", answer)
    return answer


def _columns(
    ask: Callable[..., Any], where: str, gate: Gate, view: MachineView, routing: Ints
) -> int:
    answer = _integer(ask(gate, view, routing), where, "a number of columns")
    most = len(routing) // max(1, gate.rows)
    if not 0 <= answer <= most:
        raise _unexpected(where, f"0 to {most} columns", answer)
    chosen = np.asarray(routing)[: gate.rows * answer]
    used = chosen[chosen != UNUSED]
    if used.size and used.max() >= view.experts:
        raise PolicyError(
            f"{where}: experts: expected 0 to {view.experts - 1}, or {UNUSED} for none,"
            f" got {used.max()}"
        )
    return answer


def _ahead(ask: Callable[..., Any], where: str, *shown: Any) -> int:
    gate, view, routing, _ = shown
    return _columns(lambda *_: ask(*shown), where, gate, view, routing)


def _weights(
    ask: Callable[..., Any], where: str, gate: Gate, experts: np.ndarray
) -> np.ndarray | None:
    answer = ask(gate, experts)
    if answer is not None and np.shape(answer) != experts.shape:
        raise _unexpected(where, f"numbers of shape {experts.shape}, or None", answer)
    return answer


def _named(ask: Callable[..., Any], where: str, *shown: Any) -> int:
    return _keys(ask(*shown), where, shown[-1])


def _victims(ask: Callable[..., Any], where: str, *shown: Any) -> None:  # noqa: ARG001 - engines check who leaves
    incoming, candidates, chosen = shown
    ask(read_only(incoming), read_only(candidates), chosen)


def _pairs(ask: Callable[..., Any], where: str, *shown: Any) -> int:
    work, states, outgoing, incoming = shown
    answer = ask(work, read_only(states), outgoing, incoming)
    _keys(answer, where, outgoing)
    return _keys(answer, where, incoming)


def _keys(answer: Any, where: str, named: Ints) -> int:
    """How many flat keys have been named, if they are keys of experts."""
    most = len(named)
    answer = _integer(answer, where, "the number of keys named")
    if not 0 <= answer <= most:
        raise _unexpected(where, f"0 to {most} keys", answer)
    for n in range(answer):
        if not 0 <= named[n] < most:
            raise _unexpected(where, f"keys of 0 to {most - 1}", named[n])
    return answer


def _truth(ask: Callable[..., Any], where: str, *shown: Any) -> bool:
    answer = ask(*shown)
    if not isinstance(answer, (bool, np.bool_)):
        raise _unexpected(where, "true or false", answer)
    return bool(answer)


def _by_score(
    policy: RankedCache,
    ask: Callable[..., Any],
    where: str,
    incoming: Ints,
    candidates: Ints,
    chosen: Ints,
) -> None:
    keys = np.asarray(candidates)
    wrong = keys[np.isnan(np.asarray(policy.score)[keys])]
    if len(wrong):
        raise PolicyError(f"{where}: score[{wrong[0]}]: expected a number, got nan")
    ask(incoming, candidates, chosen)


_CHECKS: dict[str, Callable[..., Any]] = {
    "assign": _flags,
    "precompute": _ahead,
    "admits": _truth,
    "victims": _victims,
    "replacements": _pairs,
    "prefetch": _named,
    "foretold": _named,
    "route": _columns,
    "weigh": _weights,
}
"""Questions of all kinds of policies, which share no names."""


def _integer(answer: Any, where: str, expected: str) -> int:
    if isinstance(answer, (int, np.integer)):
        return int(answer)
    raise _unexpected(where, expected, answer)


def _unexpected(where: str, expected: str, answer: Any) -> PolicyError:
    return PolicyError(f"{where}: expected {expected}, got {_shown(answer)}")


def _shown(answer: Any) -> str:
    """What a policy answered, in a few words."""
    if answer is None:
        return "None (does it end with `return`?)"
    if isinstance(answer, np.ndarray):
        return f"an array of {answer.dtype}, shape {answer.shape}"
    text = repr(answer)
    return text if len(text) <= 80 else f"{text[:77]}..."
