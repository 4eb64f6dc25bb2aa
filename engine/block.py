"""A block of a trace as the engine reads it: layer steps one after the other.

N layer steps, T tokens, K experts per token, E experts of a layer, P predictors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.policies.arrays import read_only, view_of, zeros
from moesim.traces.format.schema import PREDICTION_COLUMNS

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints
    from moesim.policies.systems import Policies
    from moesim.traces.format.batch import LayerSteps


class Block:
    """What was routed, and what trace and costs say of each layer step.

    Attributes:
        count: N.
        step, batch, rows, layer, phase: int64 [N].
        edges: int64 [N + 1], where each layer step's experts begin.
        experts, tokens: int32, the active experts as recorded.
        served, served_tokens, served_edges: the same as they are really used; those
            that were recorded, unless routing is altered.
        lane_of, state_of: int8, beside `served`: where each was computed, and how it
            was found.
        row_edges: int64 [N + 1], where each layer step's tokens begin.
        routing: uint16 [all T, K]; weights, scores, predicted: float64 [all T, …]; no
            rows where nobody reads them.
        mean_scores: float64 [N * E], the gate's scores, mean over the tokens; empty.
        workload, score_sums: [N * P, E], see `MachineView`.
        predictors: P.
        dense_s, gate_s, head_s, activation_s: float64 [N]; the head's is -1 but for the
            last layer of a pass.
        drafted: int64 [N], tokens that are drafted before it; draft_s: of each.
        drafts: int32 [D * L, K], what drafts know of each drafted token, by layer.
        start_s, end_s: float64 [N], of passes, at their last layer step.
    """

    def __init__(self, block: LayerSteps, experts: int, *, alters: bool) -> None:
        count = len(block.layer)
        self.source: LayerSteps = block
        self.count = count
        self.step: Ints = view_of(block.step, np.int64)
        self.batch: Ints = view_of(block.batch, np.int64)
        self.rows: Ints = view_of(block.rows, np.int64)
        self.layer: Ints = view_of(block.layer, np.int64)
        self.phase: Ints = view_of(block.phase, np.int64)
        # What policies are shown of it nobody can write through.
        self.edges: Ints = read_only(block.edges, np.int64)
        self.experts: Ints = read_only(block.experts, np.int32)
        self.tokens: Ints = read_only(block.tokens, np.int32)
        row_edges = np.zeros(count + 1, np.int64)
        np.cumsum(block.rows, out=row_edges[1:])
        self.row_edges: Ints = row_edges.data
        columns = block.columns
        self.routing: Ints = _rows(columns.get("experts"), np.uint16)
        self.weights: Floats = _rows(columns.get("weights"), np.float64)
        self.scores: Floats = _rows(columns.get("scores"), np.float64)
        self.predicted: Floats = _rows(columns.get("pred1_raw"), np.float64)
        self.first_scores: Floats = zeros(0)
        if "scores" in columns:
            self.first_scores = read_only(np.ravel(columns["scores"]), np.float64)
        self.mean_scores: Floats = zeros(0)
        if block.scores is not None:
            self.mean_scores = read_only(np.ravel(block.scores), np.float64)
        self.predictors = 0
        self.workload: Ints = zeros((0, experts), np.int32)
        self.score_sums: Floats = zeros((0, experts), np.float32)
        if block.workload is not None and block.score_sums is not None:
            self.predictors = block.workload.shape[1]
            self.workload = read_only(block.workload.reshape(-1, experts), np.int32)
            score_sums = block.score_sums.reshape(-1, experts)
            self.score_sums = read_only(score_sums, np.float32)
        accesses = len(block.experts)
        self.served: Ints = self.experts
        self.served_tokens: Ints = self.tokens
        self.served_edges: Ints = self.edges
        # What altered routing writes; the others are read alone.
        self.new_served: Ints = zeros(0, np.int32)
        self.new_tokens: Ints = zeros(0, np.int32)
        self.new_edges: Ints = zeros(0, np.int64)
        if alters:
            accesses = count * experts
            served = np.zeros(accesses, np.int32)
            served_tokens = np.zeros(accesses, np.int32)
            self.new_served = served.data
            self.new_tokens = served_tokens.data
            self.new_edges = zeros(count + 1, np.int64)
            self.served = read_only(served)
            self.served_tokens = read_only(served_tokens)
            self.served_edges = self.new_edges
        self.lane_of: Ints = zeros(accesses, np.int8)
        self.state_of: Ints = zeros(accesses, np.int8)
        self.start_s: Floats = zeros(count)
        self.end_s: Floats = zeros(count)
        nothing = zeros(count)
        self.dense_s: Floats = nothing
        self.gate_s: Floats = nothing
        self.head_s: Floats = nothing
        self.activation_s: Floats = nothing
        self.draft_s: Floats = nothing
        self.drafted: Ints = zeros(count, np.int64)
        self.drafts: Ints = zeros((0, 1), np.int32)


def _rows(column: Any, dtype: Any) -> memoryview:
    return zeros((0, 0), dtype) if column is None else read_only(column, dtype)


def read_by(policies: Policies) -> dict[str, Any]:
    """What policies read of a trace: the arguments of
    `moesim.traces.format.layer_steps.layer_steps` and `of_step`.
    """
    prefetch = policies.prefetch
    # Altered routing is weighed by the gates of single tokens.
    tokens = policies.routing.alters
    tokens |= any(policy.reads_tokens for policy in policies.all())
    routing = tokens or prefetch.foretells or prefetch.reads_routing
    routing |= policies.assignment.defers or policies.assignment.precomputes
    columns = [column for policy in policies.all() for column in policy.needs]
    return {
        "columns": tuple(dict.fromkeys(columns)),
        "predictors": tuple(
            name for name in prefetch.needs if name in PREDICTION_COLUMNS
        ),
        "routing": routing,
        "tokens": tokens,
    }
