"""Faults of other people's policies: whose they are, with the lines of their own code.

A user's policy runs deep inside a replay. Without this, its author would look for a
`KeyError` among forty frames of ours.
"""

from __future__ import annotations

import inspect
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from moesim.policies.base import Policy, PolicyError
from moesim.policies.registry import KINDS, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


class PolicyFault(RuntimeError):  # noqa: N818 - named like `RuntimeFault`
    """A policy that is none of ours failed.

    Attributes:
        frames: the traceback of its own code, as Python prints it.
    """

    def __init__(self, message: str, frames: str) -> None:
        # Both are arguments, so that processes can send it to each other.
        super().__init__(message, frames)
        self.frames = frames

    def __str__(self) -> str:
        """The message alone; the frames are printed where there is room for them."""
        return str(self.args[0])


@contextmanager
def policy_faults() -> Iterator[None]:
    """Name the policy whose code raises in the block, unless it is ours.

    Raises:
        PolicyFault: from the policy's exception, whose traceback begins in its code.
    """
    try:
        yield
    except Exception as error:
        fault = policy_fault(error)
        if fault is None:
            raise
        raise fault from fault.__cause__


def policy_fault(error: Exception) -> PolicyFault | None:
    """The fault of a policy that is none of ours, if `error` comes out of its code."""
    # That is how a policy says what its user can mend.
    if isinstance(error, PolicyError):
        return None
    for raised in _chain(error):
        begin = _first_frame(raised.__traceback__)
        if begin is not None:
            fault = _fault(raised, begin)
            fault.__cause__ = raised.with_traceback(begin)
            return fault
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes: the simulated clock raises a copy of what a process
    raised.
    """
    raised: BaseException | None = error
    while raised is not None:
        yield raised
        raised = raised.__cause__


def _first_frame(trace: TracebackType | None) -> TracebackType | None:
    """Where a traceback enters a foreign policy; None if it never does."""
    while trace is not None:
        if _policy_of(trace) is not None:
            return trace
        trace = trace.tb_next
    return None


def _policy_of(trace: TracebackType) -> type[Policy] | None:
    """The class of the foreign policy whose method a frame runs."""
    frame = trace.tb_frame
    # Methods that are inherited from a base of ours run in a file of ours.
    if str(frame.f_globals.get("__name__", "")).startswith("moesim."):
        return None
    code = frame.f_code
    owner: Any = None
    if code.co_argcount:
        owner = type(frame.f_locals.get(code.co_varnames[0]))
    elif "." in code.co_name:
        # A compiled method has no locals, but says where it is: module, class, name.
        owner = frame.f_globals.get(code.co_name.split(".")[-2])
    is_policy = isinstance(owner, type) and issubclass(owner, Policy)
    return owner if is_policy else None


def _fault(error: BaseException, begin: TracebackType) -> PolicyFault:
    policy = _policy_of(begin)
    assert policy is not None, "the frame was chosen by it"
    kind = next(name for name, base in KINDS.items() if issubclass(policy, base))
    name = name_of(policy) or policy.__name__
    file = inspect.getframeinfo(begin.tb_frame).filename
    frames = "".join(traceback.format_exception(type(error), error, begin, chain=False))
    last = traceback.format_exception_only(error)[-1].strip()
    return PolicyFault(
        f"{kind} policy {name!r} failed, in {file}, line {begin.tb_lineno}: {last}",
        frames,
    )
