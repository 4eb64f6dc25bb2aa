"""The loops over a run's tables, with C types."""

from __future__ import annotations

from math import inf

import numpy as np

from moesim.traces.timeline.spans import HIT, MISS

# -- copies ----------------------------------------------------------------------------

REFETCH_STEPS = 5

# What is known of the last prefetch of an expert; nothing before there was one.
_SETTLED = 0
_UNUSED = 1
_MISSED = 2
"""Unused, and a miss of the same step has been looked past."""


def follow_copies(  # noqa: C901, PLR0912 - one loop, compiled
    copy_step: np.ndarray,
    copy_gpu: np.ndarray,
    copy_layer: np.ndarray,
    copy_expert: np.ndarray,
    is_prefetch: np.ndarray,
    access_step: np.ndarray,
    access_gpu: np.ndarray,
    access_layer: np.ndarray,
    access_expert: np.ndarray,
    access_state: np.ndarray,
    present_step: np.ndarray,
    prefetch: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Add to `counts`, int64 [5]: copies, re-fetches, prefetches, used and timely ones;
    and bring the two tables [G, L, E] up to date.

    Copies and accesses are int64 [N] each, in the order of their steps; the GPU is the
    one to which a copy goes, or that computed the expert, -1 for the CPU.
    """
    gpus = len(present_step)
    copy = 0
    for access in range(len(access_step) + 1):
        is_last = access == len(access_step)
        # Within a step copies come before the access.
        while copy < len(copy_step) and (
            is_last or copy_step[copy] <= access_step[access]
        ):
            gpu = copy_gpu[copy]
            layer = copy_layer[copy]
            expert = copy_expert[copy]
            step = copy_step[copy]
            counts[0] += 1
            if step - present_step[gpu, layer, expert] <= REFETCH_STEPS:
                counts[1] += 1
            if is_prefetch[copy]:
                counts[2] += 1
            present_step[gpu, layer, expert] = step
            prefetch[gpu, layer, expert] = _UNUSED if is_prefetch[copy] else _SETTLED
            copy += 1
        if is_last:
            return

        gpu = access_gpu[access]
        layer = access_layer[access]
        expert = access_expert[access]
        step = access_step[access]
        state = access_state[access]
        if state == MISS:
            # No GPU has it. A prefetch for the next step may be issued behind the
            # access of its own.
            for each in range(gpus):
                own_step = step == present_step[each, layer, expert]
                if own_step and prefetch[each, layer, expert] == _UNUSED:
                    prefetch[each, layer, expert] = _MISSED
                else:
                    prefetch[each, layer, expert] = _SETTLED
            continue
        if gpu < 0:
            gpu = 0
            for each in range(1, gpus):
                last_step = present_step[gpu, layer, expert]
                if present_step[each, layer, expert] > last_step:
                    gpu = each
        if prefetch[gpu, layer, expert] != _SETTLED:
            counts[3] += 1
            if state == HIT:
                counts[4] += 1
        present_step[gpu, layer, expert] = step
        prefetch[gpu, layer, expert] = _SETTLED


# -- stalls ----------------------------------------------------------------------------


def waits_of_lanes(
    lane: np.ndarray,
    layer: np.ndarray,
    expert: np.ndarray,
    start_s: np.ndarray,
    end_s: np.ndarray,
    place: np.ndarray,
    order: np.ndarray,
    copies: np.ndarray,
    target: np.ndarray,
    plan_end_s: np.ndarray,
) -> tuple[bool, np.ndarray]:
    """Compute how long the lane of each compute span waited: idle, after planning and
    after the compute span before, until the last copy of its expert had landed.

    Args:
        lane: int8 [N], of N spans of S layer steps.
        layer: int16 [N].
        expert: int32 [N].
        start_s: float64 [N].
        end_s: float64 [N].
        place: int64 [N], the layer step of each compute span, -1 of other spans.
        order: int64 [N], in which the compute spans of every lane start.
        copies: int64, spans of copies in the order of their ends.
        target: int64, the lane that computes what each lane brings, -1 for none.
        plan_end_s: float64 [S].

    Returns:
        Whether the order is that of the starts, and if so seconds, float64 [N].
    """
    lanes = len(target)
    layers = 0
    experts = 0
    for n in range(len(copies)):
        layers = max(layers, layer[copies[n]] + 1)
        experts = max(experts, expert[copies[n]] + 1)
    landed_s = np.full((lanes, layers, experts), -inf)
    landed = np.zeros(lanes, np.int64)
    started_s = np.full(lanes, -inf)
    computed_s = np.full((len(plan_end_s), lanes), -inf)
    waits_s = np.zeros(len(place))

    for n in range(len(order)):
        row = order[n]
        if place[row] < 0:
            continue
        processor = lane[row]
        if start_s[row] < started_s[processor]:
            return False, np.asarray(waits_s)
        started_s[processor] = start_s[row]

        # A copy that ends as the span starts has landed.
        while landed[processor] < len(copies):
            copy = copies[landed[processor]]
            if end_s[copy] > start_s[row]:
                break
            if target[lane[copy]] == processor:
                landed_s[processor, layer[copy], expert[copy]] = end_s[copy]
            landed[processor] += 1

        step = place[row]
        idle_from_s = max(computed_s[step, processor], plan_end_s[step])
        computed_s[step, processor] = end_s[row]
        if layer[row] < layers and expert[row] < experts:
            copied_s = min(start_s[row], landed_s[processor, layer[row], expert[row]])
            waits_s[row] = max(copied_s - idle_from_s, 0.0)
    return True, np.asarray(waits_s)
