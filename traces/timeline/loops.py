"""The loops over a run's tables, with C types."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from moesim.traces.timeline.spans import HIT, MISS

# -- forward passes --------------------------------------------------------------------

_PREFILL = 0
_DECODE = 1


class Books:
    """What is counted of forward passes, and what is known of the batch at hand.

    Attributes:
        steps, batches: forward passes and groups of sequences so far.
        start_s, end_s: first start and last end; infinite before any pass has come.
        tokens, seconds: by phase, whose codes are places.
        speeds, counted: by phase the sum of the sequences' own tokens per second, and
            how many sequences.
        batch: at hand.
        last_s: end of its last pass.
        prompt_tokens, prompts, prompt_s: tokens, sequences and seconds of this batch's
            prompts, in one pass or several.
        decode_start_s: where this batch's decoding began.
        alive, made, decoded_s: of its last decode step: sequences, tokens that each of
            them has made by then, and its end.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.batches = 0
        self.start_s = inf
        self.end_s = -inf
        self.tokens = np.zeros(2, np.int64).data
        self.seconds: Any = np.zeros(2).data
        self.speeds: Any = np.zeros(2).data
        self.counted = np.zeros(2, np.int64).data
        self.batch = -1
        self.last_s = 0.0
        self.prompt_tokens = 0
        self.prompts = 0
        self.prompt_s = 0.0
        self.decode_start_s = 0.0
        self.alive = 0
        self.made = 0.0
        self.decoded_s = 0.0

    def follow(
        self,
        phases: np.ndarray,
        batches: np.ndarray,
        tokens: np.ndarray,
        sequences: np.ndarray,
        start_s: np.ndarray,
        end_s: np.ndarray,
        gaps_s: np.ndarray,
        ttft_s: np.ndarray,
        is_last: bool,
    ) -> int:
        """Add forward passes in order, N; fill in the seconds of each decoded token,
        and of each prefill that has ended.

        Args:
            phases: int64 [N], as are batches, tokens and sequences.
            batches: numbers of groups of sequences.
            tokens: of each pass.
            sequences: of each pass.
            start_s: float64 [N].
            end_s: float64 [N].
            gaps_s: filled.
            ttft_s: filled.
            is_last: nothing follows.

        Returns:
            How many prefills have ended.
        """
        prefills = 0
        gaps = 0
        for n in range(len(phases)):
            if batches[n] != self.batch:
                prefills = self._end_prefill(ttft_s, prefills)
                self._end_sequences(0)
                self.made = 0.0
                self.batch = batches[n]
                self.last_s = start_s[n]
                self.batches += 1

            # From the end of the step before: what lies between belongs to the gap.
            duration_s = end_s[n] - self.last_s
            if phases[n] == _PREFILL:
                self.prompt_tokens += tokens[n]
                self.prompts = max(self.prompts, sequences[n])
                self.prompt_s += duration_s
            else:
                prefills = self._end_prefill(ttft_s, prefills)
                if self.made == 0.0:
                    self.decode_start_s = self.last_s
                # A pass that verifies a draft makes several tokens of one sequence.
                each = tokens[n] / sequences[n]
                for _ in range(round(each)):
                    gaps_s[gaps] = duration_s / each
                    gaps += 1
                self._end_sequences(sequences[n])
                self.made += each
                self.decoded_s = end_s[n]

            self.tokens[phases[n]] += tokens[n]
            self.seconds[phases[n]] += duration_s
            self.start_s = min(self.start_s, start_s[n])
            self.end_s = max(self.end_s, end_s[n])
            self.last_s = end_s[n]
            self.steps += 1
        if is_last:
            prefills = self._end_prefill(ttft_s, prefills)
            self._end_sequences(0)
            self.made = 0.0
        return prefills

    def _end_prefill(self, ttft_s: np.ndarray, prefills: int) -> int:
        """Add a batch's prefill: the speeds of its sequences add up to the batch's."""
        if not self.prompts:
            return prefills
        ttft_s[prefills] = self.prompt_s
        if self.prompt_s:
            self.speeds[_PREFILL] += self.prompt_tokens / self.prompt_s
        self.counted[_PREFILL] += self.prompts
        self.prompt_tokens = 0
        self.prompts = 0
        self.prompt_s = 0.0
        return prefills + 1

    def _end_sequences(self, alive: int) -> None:
        """Add the decode speeds of sequences that have ended with the last decode step:
        they follow from the tokens that were made by then.
        """
        ended = self.alive - alive
        if ended > 0 and self.decoded_s > self.decode_start_s:
            seconds = self.decoded_s - self.decode_start_s
            self.speeds[_DECODE] += ended * self.made / seconds
            self.counted[_DECODE] += ended
        self.alive = alive


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


def sum_by_lane(
    lane: np.ndarray,
    start_s: np.ndarray,
    end_s: np.ndarray,
    place: np.ndarray,
    waits_s: np.ndarray,
    busy_s: np.ndarray,
    waited_s: np.ndarray,
) -> None:
    """Add the seconds of compute spans to those of their layer steps and lanes, float64
    [S, lanes], and what lanes waited before them to those of the lanes.
    """
    for row in range(len(place)):
        if place[row] >= 0:
            busy_s[place[row], lane[row]] += end_s[row] - start_s[row]
            waited_s[lane[row]] += waits_s[row]


def number_in_order(key: np.ndarray, chosen: np.ndarray, place: np.ndarray) -> int:
    """Number the distinct keys of what is chosen, if they ascend.

    Args:
        key: int64 [N].
        chosen: uint8 [N], one or zero.
        place: int64 [N], to be filled in where chosen.

    Returns:
        How many there are; -1 if they do not ascend.
    """
    count = 0
    last = 0
    for n in range(len(key)):
        if not chosen[n]:
            continue
        if not count or key[n] > last:
            count += 1
            last = key[n]
        elif key[n] < last:
            return -1
        place[n] = count - 1
    return count
