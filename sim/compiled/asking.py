"""Kernels of policies that bring none: they ask Python, through one C function.

A kernel writes keys into the state's marks, calls the function with the number of the
policy and of the question, and reads the answer. Everything else that Python needs, it
finds in the arrays of the run (`moesim.sim.compiled.python_policies`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types as nb
from numba.extending import intrinsic

from moesim.policies.kernels import (
    ACCESSED,
    ADMITS,
    ASSIGN,
    KERNELS,
    MOVED,
    PRECEDENCE,
    PREFETCH,
    REPLACEMENTS,
    VICTIMS,
    KernelView,
    State,
    Work,
)
from moesim.traces.compilation import compiled

if TYPE_CHECKING:
    import numpy as np

QUESTIONS = tuple(KERNELS)
"""What policies are asked; a question's number is its place here."""

COUNTS = 0
INCOMING = 1
CANDIDATES = 2
ANSWERS = 3
"""Rows of the marks. The first holds two counts of keys, and a number as the answer."""

ROWS = 4

_ASSIGN = QUESTIONS.index("assign")
_PREFETCH = QUESTIONS.index("prefetch")
_ACCESSED = QUESTIONS.index("accessed")
_ADMITS = QUESTIONS.index("admits")
_PRECEDENCE = QUESTIONS.index("precedence")
_VICTIMS = QUESTIONS.index("victims")
_ADMITTED = QUESTIONS.index("admitted")
_EVICTED = QUESTIONS.index("evicted")
_REPLACEMENTS = QUESTIONS.index("replacements")

_INT = ir.IntType(64)


@intrinsic
def _call(_: Any, address: Any, policy: Any, question: Any) -> Any:
    """Call the C function at an address."""

    def code(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT, _INT])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(function, arguments[1:])
        return context.get_dummy_value()

    return nb.void(address, policy, question), code


@compiled(ASSIGN)
def assign(state: State, work: Work, lanes: np.ndarray, order: np.ndarray) -> int:
    """Let Python fill in the lanes and the order, where they lie."""
    _call(state.integers[0], state.integers[1], _ASSIGN)
    return state.marks[COUNTS, 2]


@compiled(PREFETCH)
def prefetch(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    """Let Python fill in keys, where they lie."""
    _call(state.integers[0], state.integers[1], _PREFETCH)
    return state.marks[COUNTS, 2]


@compiled(ACCESSED)
def accessed(state: State, work: Work) -> None:
    """Tell how many experts are meant."""
    state.marks[COUNTS, 0] = len(work.experts)
    _call(state.integers[0], state.integers[1], _ACCESSED)


@compiled(ADMITS)
def admits(state: State, work: Work, incoming: np.ndarray, answers: np.ndarray) -> None:
    """Hand over keys, take an answer for each."""
    count = len(incoming)
    state.marks[COUNTS, 0] = count
    state.marks[INCOMING, :count] = incoming
    _call(state.integers[0], state.integers[1], _ADMITS)
    for n in range(count):
        answers[n] = state.marks[ANSWERS, n] != 0


@compiled(PRECEDENCE)
def precedence(state: State, incoming: np.ndarray) -> None:
    """Hand over keys, take them in another order."""
    count = len(incoming)
    state.marks[COUNTS, 0] = count
    state.marks[INCOMING, :count] = incoming
    _call(state.integers[0], state.integers[1], _PRECEDENCE)
    incoming[:] = state.marks[ANSWERS, :count]


@compiled(VICTIMS)
def victims(
    state: State, incoming: np.ndarray, candidates: np.ndarray, chosen: np.ndarray
) -> None:
    """Hand over keys and candidates, take a victim for each."""
    count = len(incoming)
    state.marks[COUNTS, 0] = count
    state.marks[COUNTS, 1] = len(candidates)
    state.marks[INCOMING, :count] = incoming
    state.marks[CANDIDATES, : len(candidates)] = candidates
    _call(state.integers[0], state.integers[1], _VICTIMS)
    chosen[:] = state.marks[ANSWERS, :count]


@compiled(MOVED)
def admitted(state: State, keys: np.ndarray) -> None:
    """Hand over keys."""
    state.marks[COUNTS, 0] = len(keys)
    state.marks[INCOMING, : len(keys)] = keys
    _call(state.integers[0], state.integers[1], _ADMITTED)


@compiled(MOVED)
def evicted(state: State, keys: np.ndarray) -> None:
    """Hand over keys."""
    state.marks[COUNTS, 0] = len(keys)
    state.marks[INCOMING, : len(keys)] = keys
    _call(state.integers[0], state.integers[1], _EVICTED)


@compiled(REPLACEMENTS)
def replacements(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Let Python fill in keys, where they lie."""
    _call(state.integers[0], state.integers[1], _REPLACEMENTS)
    return state.marks[COUNTS, 2]
