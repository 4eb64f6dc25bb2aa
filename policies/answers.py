"""Checks what other people's policies answer, before an engine works with it.

Engines index arrays with these answers, so a wrong shape or a wrong type would show far
from the policy, as wrong figures, or not at all. Our own policies are tested instead.
What only an engine knows, such as the number of GPUs, it checks itself. Answers are
on the critical path of every layer step, so what is right is seen soon.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.base import (
    Assignment,
    ExpertKey,
    Policy,
    PolicyError,
    Routing,
    Swap,
)
from moesim.policies.kernels import UNUSED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.base import Gate, LayerWork, MachineView
    from moesim.policies.cache._score_based import ScoreBasedCache


def with_checks(policy: Policy, where: str) -> Policy:
    """The same policy, whose own answers raise where they do not fit.

    Args:
        policy: one that is none of ours.
        where: kind and name, for messages.
    """
    from moesim.policies.cache._score_based import ScoreBasedCache  # noqa: PLC0415 - compiled: names need not wait for it

    for question, check in _CHECKS.items():
        ask = getattr(policy, question, None)
        # What is inherited from a base of ours is tested.
        if ask is None or ask.__func__.__module__.startswith("moesim."):
            continue
        vars(policy)[question] = partial(check, ask, f"{where}: {question}")

    # Such a cache answers by numbers that it keeps.
    if isinstance(policy, ScoreBasedCache) and "victims" not in vars(policy):
        vars(policy)["victims"] = partial(_by_score, policy, where)
    return policy


def _assign(
    ask: Callable[..., Any], where: str, work: LayerWork, view: MachineView
) -> Assignment:
    answer = ask(work, view)
    if not isinstance(answer, Assignment):
        raise _unexpected(where, "an Assignment", answer)

    count = len(work.experts)
    lanes = _integers(answer.lanes, count, where, "lanes")
    order = answer.order
    if order is not None:
        order = _integers(order, count, where, "order")
    if lanes is answer.lanes and order is answer.order:
        return answer
    return answer._replace(lanes=lanes, order=order)


def _victims(
    ask: Callable[..., Any], where: str, incoming: np.ndarray, candidates: np.ndarray
) -> np.ndarray:
    # A policy may sort what it is shown.
    allowed = candidates.copy()
    victims = _integers(ask(incoming, candidates), len(incoming), where)
    if victims.dtype != np.int64:
        victims = victims.astype(np.int64)

    chosen = victims
    if min(victims.tolist(), default=0) < 0:
        chosen = victims[victims != -1]
    if not _membership()(chosen, allowed):
        raise PolicyError(
            f"{where}: {victims.tolist()} are not distinct members of the"
            f" {len(allowed)} candidates, or -1 to decline"
        )
    return victims


@cache
def _membership() -> Callable[[np.ndarray, np.ndarray], bool]:
    """Whether every chosen key is among ascending ones, none of them twice."""
    from moesim.policies.planner.residency import distinct_members  # noqa: PLC0415 - compiled: names need not wait for it

    return distinct_members


def _by_score(
    policy: ScoreBasedCache, where: str, incoming: np.ndarray, candidates: np.ndarray
) -> np.ndarray:
    scores = policy.score[candidates]
    if np.isnan(scores).any():
        key = candidates[np.isnan(scores).argmax()]
        raise PolicyError(f"{where}: score[{key}]: expected a number, got nan")
    return type(policy).victims(policy, incoming, candidates)


def _admits(
    ask: Callable[..., Any], where: str, work: LayerWork, incoming: np.ndarray
) -> np.ndarray:
    answer = ask(work, incoming)
    if np.shape(answer) != incoming.shape or np.asarray(answer).dtype != np.bool_:
        raise _unexpected(where, f"an array of {len(incoming)} bool", answer)
    return np.asarray(answer)


def _precedence(
    ask: Callable[..., Any], where: str, incoming: np.ndarray
) -> np.ndarray:
    return _integers(ask(incoming), len(incoming), where)


def _replacements(
    ask: Callable[..., Any], where: str, work: LayerWork, view: MachineView
) -> list[Swap]:
    answer = _listed(ask(work, view), where, "Swaps")
    for swap in answer:
        if not isinstance(swap, Swap):
            raise _unexpected(where, "Swap(outgoing, incoming)", swap)
        _keys(swap, where)
    return answer


def _prefetch(
    ask: Callable[..., Any], where: str, work: LayerWork, view: MachineView
) -> Sequence[ExpertKey]:
    answer = _listed(ask(work, view), where, "ExpertKeys")
    return _keys(answer, where)


def _route(
    ask: Callable[..., Any], where: str, gate: Gate, view: MachineView
) -> Routing:
    tokens, top_k = gate.experts.shape
    answer = ask(gate, view)
    if not isinstance(answer, Routing):
        raise _unexpected(where, "a Routing", answer)

    experts = np.asarray(answer.experts)
    are_integers = np.issubdtype(experts.dtype, np.integer)
    if not are_integers or experts.ndim != 2 or len(experts) != tokens:
        raise _unexpected(
            f"{where}: experts", f"integers of shape ({tokens}, {top_k})", experts
        )
    weights = answer.weights
    if weights is not None and np.shape(weights) != experts.shape:
        raise _unexpected(
            f"{where}: weights", f"numbers of shape {experts.shape}, or None", weights
        )

    used = experts[experts != UNUSED]
    if used.size and not 0 <= used.min() <= used.max() < view.experts:
        raise PolicyError(
            f"{where}: experts: expected 0 to {view.experts - 1}, or {UNUSED} for none,"
            f" got {used.min()} to {used.max()}"
        )
    return answer._replace(experts=experts.astype(np.uint16, copy=False))


_CHECKS: dict[str, Callable[..., Any]] = {
    "assign": _assign,
    "victims": _victims,
    "admits": _admits,
    "precedence": _precedence,
    "replacements": _replacements,
    "prefetch": _prefetch,
    "route": _route,
}
"""Questions of all kinds of policies, which share no names."""


def _integers(answer: Any, count: int, where: str, part: str = "") -> np.ndarray:
    """`answer`, or a part of it, as an array, if it holds `count` integers."""
    array = np.asarray(answer)
    if array.shape == (count,):
        if array.dtype.kind in "iu":
            return array
        # An empty list has no numbers that could be of a wrong type.
        if not count:
            return array.astype(np.int64)
    where = f"{where}: {part}" if part else where
    raise _unexpected(where, f"an array of {count} integers", answer)


def _listed(answer: Any, where: str, expected: str) -> list[Any]:
    try:
        return list(answer)
    except TypeError:
        raise _unexpected(where, expected, answer) from None


def _keys(answer: Sequence[Any], where: str) -> Sequence[ExpertKey]:
    """`answer`, if each of it is a layer and an expert."""
    for key in answer:
        try:
            layer, expert = key
        except (TypeError, ValueError):
            raise _unexpected(where, "ExpertKey(layer, expert)", key) from None
        if type(layer) is int and type(expert) is int:
            continue
        if not isinstance(layer, _INTEGER) or not isinstance(expert, _INTEGER):
            raise _unexpected(where, "integers in ExpertKey(layer, expert)", key)
    return answer


_INTEGER = (int, np.integer)


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
