"""What operations work on: the data of one layer step, and which slot holds which
expert.

The planner says *that* an expert is in a memory (`moesim.engine.memory`); here stands
*where*. A slot is taken when a copy or a read starts, and given back the moment the
planner lets the expert go. All changes are made with the lanes' lock held.

T tokens, K experts per token, P token-expert pairs, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moesim.base.errors import RuntimeFault
from moesim.engine.memory import Placement
from moesim.policies.names import RESIDENT
from moesim.policies.sizes import GLOBAL
from moesim.runtime.models.expert_layout import Groups, group_tokens
from moesim.runtime.store.memory import HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from moesim.engine.memory import Memory
    from moesim.policies.sizes import CacheSize
    from moesim.runtime.accelerators import Accelerator
    from moesim.runtime.models.expert_layout import ExpertWeights
    from moesim.runtime.store.memory import Slots
    from moesim.runtime.store.store import ExpertStore
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

    Args:
        routed, hidden, weights, groups: as below.
        send: brings host values to the device without waiting for what it is doing.

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
        block, place: where the planner finds it.
        asked_s: instant at which the device has asked.
        answered_s: instant at which it was answered.
    """

    __slots__ = (
        "_send",
        "_shares",
        "answer",
        "answered",
        "answered_s",
        "asked_s",
        "block",
        "device_rows",
        "groups",
        "hidden",
        "hidden_cpu",
        "place",
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
        send: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._send = send
        self.routed = routed
        self.hidden = hidden
        self.hidden_cpu = hidden
        self.answer = hidden
        self.weights = weights
        self.results: list[Any] = []
        self.block: Any = None
        self.place = 0
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
        return cls(None, none, none, groups, lambda values: values)  # type: ignore[arg-type]

    def _sort(self, groups: Groups) -> None:
        self.groups = groups
        if len(self.hidden) == 1:
            self.rows = None
            self.device_rows = None
            return
        self.rows = torch.from_numpy(groups.pairs // self._top_k)
        self.device_rows = self._send(self.rows)

    @property
    def _top_k(self) -> int:
        return max(1, self.weights.shape[1])

    def reroute(self, routing: np.ndarray, weights: np.ndarray | None) -> None:
        """Serve tokens by the experts and weights that a routing policy has chosen."""
        assert weights is not None, (
            "a routing policy that replaces experts says how they are weighted"
        )
        in_full = np.ascontiguousarray(weights, np.float32)
        # In the precision of the model's: some combine in float32 whatever they compute
        # in.
        self.weights = self._send(torch.from_numpy(in_full).to(self.weights.dtype))
        self._sort(group_tokens(routing))

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

    def part(self, positions: np.ndarray) -> LayerJob:
        """What some of the active experts, ascending, contribute to the layer step."""
        groups = self.groups
        pairs = [
            groups.pairs[groups.starts[position] : groups.starts[position + 1]]
            for position in positions
        ]
        tokens = groups.tokens[positions]
        chosen = Groups(
            experts=groups.experts[positions],
            tokens=tokens,
            starts=np.concatenate([[0], np.cumsum(tokens)]),
            pairs=np.concatenate([groups.pairs[:0], *pairs]),
        )
        part = LayerJob(self.routed, self.hidden, self.weights, chosen, self._send)
        part.results = [self.results[position] for position in positions]
        return part

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


def cache_slots(size: CacheSize, expert_bytes: tuple[int, ...]) -> int:
    """Most experts that a memory of this size may hold at once, staging not counted.

    Raises:
        RuntimeFault: layers whose experts differ in size share the memory: slots, all
            of one size, would take more of it than was asked for.
    """
    if size.scope != GLOBAL:
        return int(size.slots.sum())
    if len(set(expert_bytes)) > 1:
        raise RuntimeFault(
            "expected experts of one size in a memory that layers share, found"
            f" {min(expert_bytes):,} to {max(expert_bytes):,} bytes; use --cache-scope"
            " layer, and no --host-memory"
        )
    return int(size.pool_bytes[0]) // expert_bytes[0]


def residents(memory: Memory) -> list[int]:
    """Keys that the planner holds resident, ascending: before the run, what fills a
    memory from the start.
    """
    return np.flatnonzero(np.asarray(memory.state) == RESIDENT).tolist()


class SlotMap(Placement):
    """Slots of one memory, by expert key ``layer * E + expert``.

    Args:
        slots: the memory; cache and staging together.
        store: knows the experts' layouts.
        memory: the planner's books of it, None where experts keep their slots.
        slot_of: of each expert, -1 for none; None for none of them.
    """

    def __init__(
        self,
        slots: Slots,
        store: ExpertStore,
        memory: Memory | None,
        slot_of: Sequence[int] | None = None,
    ) -> None:
        self.slots = slots
        self._memory = memory
        self._experts = store.experts(0)
        count = self._experts * store.layers
        self._slot_of = np.array([-1] * count if slot_of is None else slot_of, np.int32)
        self._layouts = [store.layout(layer) for layer in range(store.layers)]
        if memory is not None:
            memory.slots = self

    def record(self, key: int) -> torch.Tensor:
        """Return the bytes of an expert's slot."""
        return self.slots.record(int(self._slot_of[key]))

    def weights(self, key: int) -> ExpertWeights:
        """Look at an expert's slot as weights."""
        layout = self._layouts[key // self._experts]
        return self.slots.weights(int(self._slot_of[key]), layout)

    def slot(self, key: int) -> int:
        """Return the slot of an expert that has one."""
        return int(self._slot_of[key])

    def take_residents(self) -> list[int]:
        """Give slots to the experts that are resident from the start; return their
        keys.
        """
        assert self._memory is not None
        keys = residents(self._memory)
        for key in keys:
            self.take(key)
        return keys

    def take(self, key: int) -> None:
        """Give an expert a slot: its copy starts."""
        assert self._slot_of[key] < 0, "an expert has two slots"
        self._slot_of[key] = self.slots.take()

    def release(self, key: int) -> None:
        """Take an expert's slot back: the planner has let it go."""
        self.slots.give_back(int(self._slot_of[key]))
        self._slot_of[key] = -1


class HostSlotMap(SlotMap):
    """Host memory in front of the SSD: a limited part of the experts, or all of them
    but those that the device keeps for good.

    Where it is not limited, experts that share a record of the store share its slot.

    Args:
        store: where experts come from.
        memory: the planner's books of host memory, None where it is not limited.
        size: its size, None where it is not limited.
        staging: staging slots beside it.
        expert_bytes: per layer.
        page_lock: for whom pages are kept in place, None for nobody.
        kept: keys of experts that never leave the device, so that host memory that is
            not limited need not hold them too.

    Attributes:
        limited: whether experts come and go.
    """

    def __init__(
        self,
        store: ExpertStore,
        memory: Memory | None,
        size: CacheSize | None,
        staging: int,
        expert_bytes: tuple[int, ...],
        *,
        page_lock: Accelerator | None,
        kept: Collection[int] = (),
    ) -> None:
        self._store = store
        slot_of = None
        if memory is None or size is None:
            record_of = [
                store.record(layer, expert)
                for layer in range(store.layers)
                for expert in range(store.experts(layer))
            ]
            needed = dict.fromkeys(
                record for key, record in enumerate(record_of) if key not in kept
            )
            slot_by_record = {record: slot for slot, record in enumerate(needed)}
            slot_of = [slot_by_record.get(record, -1) for record in record_of]
            count = len(needed)
        else:
            count = cache_slots(size, expert_bytes) + staging
        slots = HostSlots(count, store.slot_bytes, page_lock=page_lock)
        super().__init__(slots, store, memory, slot_of)
        self.limited = slot_of is None

    def load(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Read what is resident from the start: all that it is to hold, or what the
        host cache's policy chose.

        Returns:
            Bytes read.
        """
        if self.limited:
            keys = self.take_residents()
        else:
            # Of experts that share a slot one is read.
            by_slot = {slot: key for key, slot in enumerate(self._slot_of) if slot >= 0}
            keys = list(by_slot.values())
        read = 0
        for done, key in enumerate(keys):
            layer, expert = divmod(key, self._experts)
            read += self._store.read_into(layer, expert, self.record(key))
            if progress is not None:
                progress(done + 1, len(keys))
        return read

    def holds_always(self, key: int) -> bool:
        """Whether an expert is in host memory throughout the run."""
        return not self.limited and self.slot(key) >= 0

    def close(self) -> None:
        """Let go of the memory."""
        self.slots.close()
