"""Sums over a run's spans and accesses as they come: busy time and bytes of lanes,
states of accesses, balance and stalls of layer steps, and what copies were good for.

Memory is that of the model and of one chunk, whatever the length of the run.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.traces.timeline.spans import (
    COMPUTE,
    FETCH,
    HIT,
    JOIN,
    MISS,
    PLAN,
    PREFETCH,
    READ,
    REPLACE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.traces.timeline.spans import Chunk

REFETCH_STEPS = 5

_SPANS = ("lane", "kind", "step", "layer", "expert", "start_s", "end_s", "bytes")
# Events of copies, beside the states of accesses.
_COPIED = 3
_PREFETCHED = 4

# What is known of the last prefetch of an expert; nothing before there was one.
_SETTLED = 0
_UNUSED = 1
_MISSED = 2
"""Unused, and a miss of the same step has been looked past."""


def consumer(lane: str) -> str:
    """The lane that computes what a link brings; nothing for other lanes."""
    if lane == "ssd":
        return "cpu"

    return lane.replace("h2d", "gpu") if lane.startswith("h2d") else ""


class Totals:
    """Takes chunks of spans and of accesses, each in order.

    A compute lane *stalls* before a compute span for the time that it was idle, after
    planning had ended, while the copy of that very expert to it was not yet finished:
    ``min(start, copy end) - max(previous compute end, plan end)`` where positive.
    Copies to ``gpuN`` are spans on ``h2dN``, copies for ``cpu`` are reads on ``ssd``.

    The tables do not say when an expert leaves a cache, so departures are inferred.
    Events of one expert on one GPU are ordered by step, and within a step copies before
    the access. A prefetch was *used* if the next event is a hit or a delayed hit; a
    miss in the very step of the copy is looked past, since a prefetch for the next step
    may be issued after it. A copy is a *re-fetch* if the expert had been on that GPU
    (copied, hit or delayed) in the five steps before. A hit counts for the GPU that
    computed it, and for the GPU that had the expert last if the CPU did. Source of the
    idea: SMoE's re-fetch rate, which counts from evictions that only a cache can see.

    Attributes:
        busy_s, bytes, stall_s: by lane.
        planning_s: seconds of decisions.
        start_s, end_s: first start and last end.
        imbalance: sum over layer steps of ``|CPU - busiest GPU| / the longer``.
        layer_steps: those in which anything was computed.
        states: int64 [3], accesses by state; `gpu_states` of GPU-assigned experts
            alone, `token_states` weighted by tokens.
        copies, refetched: to GPUs.
        prefetched, used, timely: prefetches to GPUs, those used, and those that were
            there in time.
        seen: last step whose compute spans have come.
        reached: last step whose accesses have come.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        names = list(lanes)
        count = len(names)
        self.busy_s = np.zeros(count)
        self.stall_s = np.zeros(count)
        self.bytes = np.zeros(count, np.int64)
        self.planning_s = 0.0
        self.start_s = inf
        self.end_s = -inf
        self.imbalance = 0.0
        self.layer_steps = 0
        self.seen = -1
        self.reached = -1
        self.copies = 0
        self.refetched = 0
        self.prefetched = 0
        self.used = 0
        self.timely = 0
        self.states = np.zeros(3, np.int64)
        self.gpu_states = np.zeros(3, np.int64)
        self.token_states = np.zeros(3, np.int64)

        # Lane -> the lane that computes what it brings, -1 for none.
        consumers = [consumer(name) for name in names]
        self._target = np.array(
            [names.index(name) if name in names else -1 for name in consumers],
            np.int64,
        )
        self._is_gpu = np.array([name.startswith("gpu") for name in names])
        self._gpus = np.flatnonzero(self._is_gpu)
        self._cpu = names.index("cpu") if "cpu" in names else -1

        # Copies and accesses of steps that may not be complete: int32 [N, 5] each.
        self._events: list[Any] = []
        # By compute lane, layer and expert: when it landed last, the last step in which
        # it was there, and whether a prefetch waits for its use.
        self._landed_s = np.empty((count, 0, 0))
        self._present_step = np.empty((count, 0, 0), np.int32)
        self._prefetch = np.empty((count, 0, 0), np.int8)
        # Of the layer step at work in each layer: its step, and by lane the end of the
        # last product and seconds of products.
        self._computed = np.empty(0, np.int32)
        self._idle_from_s = np.empty((0, count))
        self._work_s = np.empty((0, count))
        # The last step that was planned in each layer, and when that ended.
        self._planned = np.empty(0, np.int32)
        self._plan_end_s = np.empty(0)

    def add_spans(self, spans: Chunk) -> None:
        """Take one chunk of spans."""
        self._make_room(spans)
        kind = spans["kind"]
        target = self._target[spans["lane"]]
        columns: Any = (*(np.ascontiguousarray(spans[name]) for name in _SPANS), target)
        self._walk(*columns)
        is_copy = (kind >= FETCH) & (kind <= REPLACE) & (target >= 0)
        if is_copy.any():
            events = _events(spans, target, _COPIED + (kind == PREFETCH))
            self._events.append(events[is_copy])

    def add_accesses(self, accesses: Chunk) -> None:
        """Take one chunk of accesses."""
        self._make_room(accesses)
        state = accesses["state"]
        lane = accesses["lane"]
        on_gpu = self._is_gpu[lane]
        self.states += np.bincount(state, minlength=3)
        self.gpu_states += np.bincount(state[on_gpu], minlength=3)
        # Weighted counts come as floats; tokens are exact in them.
        by_tokens = np.bincount(state, accesses["tokens"], 3)
        self.token_states += by_tokens.astype(np.int64)

        self._events.append(_events(accesses, np.where(on_gpu, lane, -1), state))
        self.reached = int(accesses["step"].max())
        # A prefetch ends at most one step after its issue.
        self._settle(min(self.seen, self.reached) - 1)

    def end(self) -> None:
        """Count what is still at work: nothing follows."""
        if self._events:
            self._settle(np.iinfo(np.int32).max)
        for layer in range(len(self._computed)):
            self._end_layer_step(layer)

    def _make_room(self, chunk: Chunk) -> None:
        """Let tables reach to the last layer and expert that have come."""
        _, layers, experts = np.shape(self._landed_s)
        more_layers = max(0, 1 + int(chunk["layer"].max()) - layers)
        more_experts = max(0, 1 + int(chunk["expert"].max()) - experts)
        if not more_layers and not more_experts:
            return

        def wider(table: Any, filler: float, *more: int) -> Any:
            edges = [(0, each) for each in more]
            return np.pad(np.asarray(table), edges, constant_values=filler)

        more = (0, more_layers, more_experts)
        long_ago = -(1 << 30)
        self._landed_s = wider(self._landed_s, inf, *more)
        self._present_step = wider(self._present_step, long_ago, *more)
        self._prefetch = wider(self._prefetch, _SETTLED, *more)
        self._computed = wider(self._computed, -1, more_layers)
        self._planned = wider(self._planned, -1, more_layers)
        self._plan_end_s = wider(self._plan_end_s, 0, more_layers)
        self._idle_from_s = wider(self._idle_from_s, 0, more_layers, 0)
        self._work_s = wider(self._work_s, 0, more_layers, 0)

    def _walk(
        self,
        lane: np.ndarray,
        kind: np.ndarray,
        step: np.ndarray,
        layer: np.ndarray,
        expert: np.ndarray,
        start_s: np.ndarray,
        end_s: np.ndarray,
        nbytes: np.ndarray,
        target: np.ndarray,
    ) -> None:
        """Add up N spans, which come in the order of their ends; `target` is the lane
        that computes what each brings, -1 for none.
        """
        for n in range(len(lane)):
            at = lane[n]
            code = kind[n]
            duration_s = end_s[n] - start_s[n]
            self.busy_s[at] += duration_s
            self.bytes[at] += nbytes[n]
            self.start_s = min(self.start_s, start_s[n])
            self.end_s = max(self.end_s, end_s[n])
            on = layer[n]
            if code == PLAN:
                self.planning_s += duration_s
                self._planned[on] = step[n]
                self._plan_end_s[on] = end_s[n]
            elif code == COMPUTE:
                self.seen = max(self.seen, step[n])
                if self._computed[on] != step[n]:
                    self._end_layer_step(on)
                    self._computed[on] = step[n]
                    self.layer_steps += 1
                # Without planning there is no window, so no stall.
                if self._planned[on] == step[n]:
                    idle_from_s = max(self._idle_from_s[on, at], self._plan_end_s[on])
                    copied_s = self._landed_s[at, on, expert[n]]
                    if idle_from_s < copied_s <= start_s[n]:
                        self.stall_s[at] += copied_s - idle_from_s
                self._idle_from_s[on, at] = end_s[n]
                self._work_s[on, at] += duration_s
            elif code == JOIN:
                self.seen = max(self.seen, step[n])
            elif FETCH <= code <= READ and target[n] >= 0:
                self._landed_s[target[n], on, expert[n]] = end_s[n]

    def _end_layer_step(self, layer: int) -> None:
        """Add the imbalance of the layer step at work in a layer."""
        cpu_s = self._work_s[layer, self._cpu] if self._cpu >= 0 else 0.0
        gpu_s = 0.0
        for n in range(len(self._gpus)):
            gpu_s = max(gpu_s, self._work_s[layer, self._gpus[n]])
        longer_s = max(cpu_s, gpu_s)
        # A layer step whose spans have no length is balanced.
        if longer_s > 0:
            self.imbalance += abs(cpu_s - gpu_s) / longer_s
        self._work_s[layer, :] = 0.0

    def _settle(self, before: int) -> None:
        """Follow all buffered events of steps below `before`."""
        events = np.concatenate(self._events)
        step = events[:, 0]
        # Within a step copies come before the access.
        order = np.argsort(2 * step + (events[:, 4] < _COPIED), kind="stable")
        ready = order[step[order] < before]
        self._events = [events[step >= before]]
        self._follow(np.ascontiguousarray(events[ready]))

    def _follow(self, events: np.ndarray) -> None:
        """Count copies, and uses of prefetches, in ordered events [N, 5]: step, compute
        lane of the GPU (-1: the CPU computed), layer, expert, and what happened.
        """
        for n in range(len(events)):
            step = events[n, 0]
            gpu = events[n, 1]
            layer = events[n, 2]
            expert = events[n, 3]
            event = events[n, 4]
            if event >= _COPIED:
                self._note_copy(step, gpu, layer, expert, event)
            elif event == MISS:
                self._note_miss(step, layer, expert)
            else:
                self._note_use(step, gpu, layer, expert, event)

    def _note_copy(
        self, step: int, gpu: int, layer: int, expert: int, event: int
    ) -> None:
        self.copies += 1
        if step - self._present_step[gpu, layer, expert] <= REFETCH_STEPS:
            self.refetched += 1
        self._present_step[gpu, layer, expert] = step
        self._prefetch[gpu, layer, expert] = _SETTLED
        if event == _PREFETCHED:
            self.prefetched += 1
            self._prefetch[gpu, layer, expert] = _UNUSED

    def _note_miss(self, step: int, layer: int, expert: int) -> None:
        """No GPU has it. A prefetch for the next step may be issued behind the access
        of its own.
        """
        for n in range(len(self._gpus)):
            gpu = self._gpus[n]
            own_step = step == self._present_step[gpu, layer, expert]
            if own_step and self._prefetch[gpu, layer, expert] == _UNUSED:
                self._prefetch[gpu, layer, expert] = _MISSED
            else:
                self._prefetch[gpu, layer, expert] = _SETTLED

    def _note_use(
        self, step: int, gpu: int, layer: int, expert: int, state: int
    ) -> None:
        if gpu < 0:
            # The CPU computed: the GPU that had the expert last.
            gpu = self._gpus[0]
            for n in range(1, len(self._gpus)):
                last_step = self._present_step[gpu, layer, expert]
                if self._present_step[self._gpus[n], layer, expert] > last_step:
                    gpu = self._gpus[n]
        if self._prefetch[gpu, layer, expert] != _SETTLED:
            self.used += 1
            if state == HIT:
                self.timely += 1
        self._present_step[gpu, layer, expert] = step
        self._prefetch[gpu, layer, expert] = _SETTLED


def _events(chunk: Chunk, gpu: np.ndarray, event: np.ndarray) -> np.ndarray:
    """Copies or accesses as events of `Totals`: int32 [N, 5]."""
    columns = [chunk["step"], gpu, chunk["layer"], chunk["expert"], event]
    return np.stack(columns, axis=1, dtype=np.int32, casting="unsafe")
