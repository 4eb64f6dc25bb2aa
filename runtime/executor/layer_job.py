"""The data of one layer step: hidden states in, experts' results by position, one sum.

T tokens, K experts per token, P token-expert pairs, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moesim.runtime.models.expert_math import group_tokens

if TYPE_CHECKING:
    from moesim.policies.base import LayerWork
    from moesim.runtime.models.expert_math import Groups
    from moesim.traces.format.batch import RoutedLayer


class PrecomputedRows:
    """Rows that an expert computed one layer ahead, on that layer's hidden state.

    Attributes:
        tokens: int64 [t] ascending, those for which the expert was predicted, counted
            from the end (-1 is the last): in a ragged prefill a layer asks about the
            last tokens only.
        result: [t, H], once its product has ended.
    """

    __slots__ = ("result", "tokens")

    def __init__(self, tokens: np.ndarray, hidden: torch.Tensor) -> None:
        self.tokens = tokens
        self.result = hidden


class Share(NamedTuple):
    """What an expert computed one layer ahead contributes to its own layer step.

    Attributes:
        position: of the expert among the active ones.
        rows: what was computed.
        at: int64 [t], the row for each token routed here; any where there is none.
        have: bool [t], whether there is one.
    """

    position: int
    rows: PrecomputedRows
    at: np.ndarray
    have: np.ndarray


class LayerJob:
    """One layer step in the making.

    Attributes:
        routed: what the gate decided.
        hidden: [T, H].
        hidden_cpu: the same, where the CPU reads it.
        weights: [T, K] combine weights.
        groups: pairs by expert.
        rows: int64 [P], the token of each pair, on the CPU; None where there is one
            token only.
        device_rows: the same on the device.
        results: per active expert, [t, H]; after `gather` also for those computed
            ahead.
        answer: [T, H], once `answered`.
        asked_s: instant at which the device has asked.
        answered_s: instant at which it was answered.
    """

    __slots__ = (
        "_shares",
        "answer",
        "answered",
        "answered_s",
        "asked_s",
        "device_rows",
        "groups",
        "hidden",
        "hidden_cpu",
        "results",
        "routed",
        "rows",
        "weights",
    )

    def __init__(
        self,
        routed: RoutedLayer,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        groups: Groups,
    ) -> None:
        self.routed = routed
        self.hidden = hidden
        self.hidden_cpu = hidden
        self.answer = hidden
        self.weights = weights
        self.results: list[Any] = []
        self.answered = False
        self.asked_s = 0.0
        self.answered_s = 0.0
        self._shares: list[Share] = []
        self._sort(groups)

    @classmethod
    def nothing(cls) -> LayerJob:
        """Stand in until the first layer step."""
        none = torch.empty(0, 0)
        groups = group_tokens(np.empty((0, 1), np.int64))
        return cls(None, none, none, groups)  # type: ignore[arg-type]

    def _sort(self, groups: Groups) -> None:
        self.groups = groups
        if len(self.hidden) == 1:
            self.rows = None
            self.device_rows = None
            return
        self.rows = torch.from_numpy(groups.pairs // self._top_k)
        self.device_rows = self.rows.to(self.hidden.device)

    @property
    def _top_k(self) -> int:
        return max(1, self.weights.shape[1])

    def reroute(self, work: LayerWork) -> None:
        """Serve tokens by the experts and weights that a routing policy has chosen."""
        assert work.weights is not None, (
            "a routing policy that replaces experts says how they are weighted"
        )
        weights = np.ascontiguousarray(work.weights, np.float32)
        self.weights = torch.from_numpy(weights).to(self.hidden)
        self._sort(group_tokens(work.routing))

    def take_precomputed(self, position: int, rows: PrecomputedRows) -> np.ndarray:
        """Note what was computed ahead for the expert at `position`.

        Returns:
            Tokens routed to it for which nothing was computed, int64 ascending: they
            are served on their own input.
        """
        starts = self.groups.starts
        pairs = self.groups.pairs[starts[position] : starts[position + 1]]
        tokens = pairs // self._top_k
        from_end = tokens - len(self.hidden)
        at = np.searchsorted(rows.tokens, from_end)
        have = np.isin(from_end, rows.tokens)
        if have.any():
            self._shares.append(Share(position, rows, at, have))
        return tokens[~have]

    def gather(self) -> None:
        """Complete the results of experts that were computed ahead."""
        for position, rows, at, have in self._shares:
            if have.all():
                self.results[position] = rows.result[torch.from_numpy(at)]
                continue
            result = rows.result.new_empty(len(have), rows.result.shape[1])
            result[torch.from_numpy(have)] = rows.result[torch.from_numpy(at[have])]
            result[torch.from_numpy(~have)] = self.results[position]
            self.results[position] = result

    def is_answered(self) -> bool:
        """Whether the model may go on."""
        return self.answered
