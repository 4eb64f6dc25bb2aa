"""Between the gates and the experts of a model: a planner looks at every choice, and
its word counts.

A hook behind each gate notes what it was asked and what it answered; a hook before each
layer's experts shows both to the planner of whoever is in charge, and gives the experts
what its routing policy makes of it. Nothing else of the model changes, and a token
whose experts stay keeps its ids and weights to the bit.

Where an assignment starts experts one layer ahead (DAOP), they get what they would get:
the input of the layer before.

T tokens of a pass, H hidden, E experts, K experts per token, K' places after rerouting.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from moesim.policies.base import RESIDENT, PolicyError
from moesim.runtime.executor.live import Foresight
from moesim.runtime.models.expert_math import UNUSED, group_tokens
from moesim.runtime.models.gates import best_first
from moesim.runtime.models.hf import find_blocks, gate_facts, read_gate
from moesim.traces.errors import TraceError
from moesim.traces.format.batch import RoutedLayer
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from moesim.policies.base import LayerWork
    from moesim.policies.planner.plan import Copies
    from moesim.policies.planner.planner import Planner
    from moesim.runtime.models.hf import LocalModel
    from moesim.runtime.record.residual import Residual


@dataclass(slots=True)
class Trial:
    """One composition of policies: its planner's books, and what it has done so far.

    Attributes:
        planner: asked at every layer of every pass.
        own_input: whether experts that were started one layer ahead nevertheless get
            their own layer's input.
        started: active experts of the last layer step that the CPU had begun before its
            gate spoke.
        expected: bool [T, E], the choice that the last layer step foresaw for the next
            layer; None if it foresaw none.
        counts: over scored tokens.
    """

    planner: Planner
    own_input: bool = False
    phase: Phase = Phase.PREFILL
    started: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    expected: np.ndarray | None = None
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _step: int = -1
    _batch: int = 0
    _now_s: float = 0.0

    def begin(self, phase: Phase, batch: int) -> None:
        """Note that a forward pass begins."""
        self.phase = phase
        self._batch = batch
        self._step += 1

    def layer(self, routed: RoutedLayer) -> LayerWork:
        """Plan one layer step and carry out all its copies.

        Raises:
            PolicyError: a policy answered something illegal.
        """
        planner = self.planner
        masses = len(self.planner.gate_mass)
        plan = planner.plan(routed, self._step, self.phase, self._now_s, self._batch)
        self._land(plan.copies)
        self._land(planner.complete(plan, self._now_s))
        work = plan.work
        self.started = (
            work.experts[:0]
            if work.precomputed is None
            else work.experts[work.precomputed]
        )
        self.expected = None
        if plan.precompute is not None and "pred1_raw" in routed.predicted:
            self.expected = _best(
                routed.predicted["pred1_raw"], routed.routing.shape[1]
            )
        if self.phase == Phase.DECODE:
            tokens = len(routed.routing)
            self.counts["tokens"] += tokens
            self.counts["mass"] += tokens * (
                planner.gate_mass[masses] if len(planner.gate_mass) > masses else 1.0
            )
            self.counts["altered"] += _differ(routed.routing, work.routing)
            self.counts["pairs"] += int((work.routing != UNUSED).sum())
            self.counts["hits"] += int((work.state == RESIDENT).sum())
            self.counts["asked"] += len(work.state)
        return work

    def _land(self, asked: Sequence[Copies]) -> None:
        """Let copies land one after another; time passes by what the profile says they
        take.
        """
        planner = self.planner
        for copies in asked:
            for expert, read in zip(copies.experts, copies.read, strict=True):
                if read:
                    planner.read_done(copies.layer, expert)
                    self._now_s += planner.costs.read_s(copies.layer)
                if copies.gpu >= 0:
                    planner.landed(copies.gpu, copies.layer, expert)
                    self._now_s += planner.copy_s(copies.layer)

    def share(self, part: str, whole: str) -> float:
        """Divide two counts; NaN where nothing was counted."""
        return (
            self.counts[part] / self.counts[whole]
            if self.counts[whole]
            else float("nan")
        )


class Joint:
    """Sits between the gates and the experts of a model while the context is open."""

    def __init__(
        self, local: LocalModel, columns: Sequence[str], residual: Residual | None
    ) -> None:
        self.model: Any = local.model
        self._blocks = find_blocks(local.model)
        self._facts = gate_facts(local.model, self._blocks)
        vectors = (
            None
            if residual is None
            else torch.from_numpy(residual.vectors).to(local.device)
        )
        wanted = [name for name in columns if name in PREDICTION_COLUMNS]
        self._foresight = Foresight(self._blocks, self._facts, wanted, vectors)
        self._scores = "scores" in columns
        self._trial: Trial | None = None
        self._asked = self._said = torch.empty(0)
        # [T, H] what the experts of the layer before were given.
        self._before = torch.empty(0)
        self._expected: np.ndarray | None = (
            None  # bool [T, E] what the layer before expected of this one
        )
        self._late: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._served = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        """Attach the hooks."""
        for layer, block in enumerate(self._blocks):
            self._hooks += [
                block.gate.register_forward_hook(self._on_gate, with_kwargs=True),
                block.experts.register_forward_pre_hook(
                    self._on_experts(layer), with_kwargs=True
                ),
                block.experts.register_forward_hook(
                    self._after_experts, with_kwargs=True
                ),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove them."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, trial: Trial | None) -> None:
        """Let `trial` overrule the gates from now on; nobody if None."""
        self._trial = trial
        self._served = 0
        self._expected = None

    def check(self) -> None:
        """Make sure that every layer's experts were called as we know it.

        Raises:
            TraceError: they were not.
        """
        if self._served != len(self._blocks):
            raise TraceError(
                f"{self._blocks[0].name}: expected the experts of {len(self._blocks)}"
                " layers to be called with hidden states, ids and weights, found"
                f" {self._served}; this kind of MoE layer is not supported"
            )

    def _on_gate(
        self, gate: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note what a gate was asked and answered."""
        del gate
        self._asked = args[0] if args else next(iter(kwargs.values()))
        every, _, _ = read_gate(output, self._blocks[self._served].count)
        if every is None and self._scores:
            raise PolicyError(
                f"{self._blocks[self._served].name}: its gate shows only its choice,"
                " and a policy needs its scores"
            )
        self._said = torch.empty(0) if every is None else every

    def _on_experts(self, layer: int) -> Callable[..., Any]:
        """Return the hook that runs before a layer's experts and may change what they
        are given.
        """

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = _Given.find(args, kwargs)
            if given is None:
                return None
            self._served += 1
            trial = self._trial
            self._late = None
            if trial is not None:
                index, weights = self._overruled(trial, layer, given)
                late = self._begun_before(trial, index)
                if late is not None:
                    self._late = given.changed(
                        args, kwargs, self._before, index, weights * late
                    )
                    weights = weights * ~late
                self._before = given.hidden
                if index is not given.index or late is not None:
                    return given.changed(args, kwargs, given.hidden, index, weights)
            return None

        return hook

    def _after_experts(
        self, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Join what was computed on the input of the layer before."""
        del args, kwargs
        if self._late is None:
            return output
        args, kwargs = self._late
        return output + experts.forward(*args, **kwargs)

    def _overruled(
        self, trial: Trial, layer: int, given: _Given
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ask the planner; ids and weights [T, K'] for the experts, the given ones
        themselves where nothing changes.
        """
        said = self._said if self._said.numel() else None
        index, weights = best_first(given.index, given.weights, said)
        chosen = index.cpu().numpy().astype(np.uint16)
        groups = group_tokens(chosen)
        own = weights.float().cpu().numpy()
        routed = RoutedLayer(
            layer, groups.experts, groups.tokens, chosen, own, None, {}
        )
        if self._scores and said is not None:
            routed.scores = self._facts.scores(said).cpu().numpy()
        foreseen = self._foresight.predict(layer, self._asked)
        routed.predicted = {
            name: scores.cpu().numpy() for name, scores in foreseen.items()
        }
        work = trial.layer(routed)
        if work.routing is chosen:
            return given.index, given.weights
        if work.weights is None:
            raise PolicyError(
                "routing policy: expected weights beside the experts that it names, got"
                " none"
            )
        ids = _padded(work.routing, chosen.shape[1], UNUSED)
        shares = _padded(work.weights, chosen.shape[1], 0)
        same = (ids == _padded(chosen, ids.shape[1], UNUSED)).all(1)
        same &= (shares == _padded(own, ids.shape[1], 0)).all(1)
        if same.all():
            return given.index, given.weights
        used = ids != UNUSED
        first = np.where(used.any(1), ids[np.arange(len(ids)), used.argmax(1)], 0)
        new = torch.from_numpy(np.where(used, ids, first[:, None]).astype(np.int64)).to(
            given.index
        )
        share = torch.from_numpy(np.where(used, shares, 0).astype(np.float32)).to(
            given.weights
        )
        rows = torch.from_numpy(np.flatnonzero(same)).to(new.device)
        # In the model's own order, to the bit.
        new[rows, : chosen.shape[1]] = given.index[rows]
        share[rows, : chosen.shape[1]] = given.weights[rows]
        return new, share

    def _begun_before(self, trial: Trial, index: torch.Tensor) -> torch.Tensor | None:
        """Bool [T, K'], on the weights' device: pairs that were computed on the input
        of the layer before, or None.
        """
        expected = self._expected
        self._expected = trial.expected
        if trial.own_input or expected is None or not len(trial.started):
            return None
        begun = torch.zeros(expected.shape[1], dtype=torch.bool)
        begun[torch.from_numpy(trial.started.astype(np.int64))] = True
        late = (
            (torch.from_numpy(expected) & begun)
            .to(index.device)
            .gather(1, index.long())
        )
        if trial.phase == Phase.DECODE:
            trial.counts["stale"] += int(late.sum())
        return late


class _Given(NamedTuple):
    """What an experts module is called with, and where it stands among the arguments
    (place or name).
    """

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    places: tuple[int | str, ...]

    @classmethod
    def find(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given | None:
        """Read arguments by what they are: hidden states first, integers are ids,
        floats of their shape the weights.
        """
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = [(at, one) for at, one in places if isinstance(one, torch.Tensor)]
        index = next(
            (
                part
                for part in tensors
                if not part[1].is_floating_point() and part[1].dim() == 2
            ),
            None,
        )
        if index is None:
            return None
        floats = [
            part
            for part in tensors[1:]
            if part[1].is_floating_point() and part[1].shape == index[1].shape
        ]
        if not floats:
            return None
        (first, hidden), (second, ids), (third, weights) = tensors[0], index, floats[0]
        return cls(hidden, ids, weights, (first, second, third))

    def changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *values: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put other hidden states, ids and weights in their places."""
        new = dict(zip(self.places, values, strict=True))
        return tuple(new.get(at, one) for at, one in enumerate(args)), {
            k: new.get(k, v) for k, v in kwargs.items()
        }


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Bool [T, E]: the `count` best of each row, ties to the lower id."""
    chosen = np.zeros(scores.shape, np.bool_)
    order = np.argsort(-scores.astype(np.float32), axis=1, kind="stable")[:, :count]
    np.put_along_axis(chosen, order, values=True, axis=1)
    return chosen


def _padded(values: np.ndarray, width: int, filler: int) -> np.ndarray:
    """Widen [T, K] to at least `width` columns."""
    missing = max(0, width - values.shape[1])
    return np.pad(values, ((0, 0), (0, missing)), constant_values=filler)


def _differ(before: np.ndarray, after: np.ndarray) -> int:
    """Count tokens whose experts [T, K] and [T, K'] are not the same ones, in whatever
    order.
    """
    width = max(before.shape[1], after.shape[1])
    one, other = (
        np.sort(_padded(ids, width, UNUSED), axis=1) for ids in (before, after)
    )
    return int((one != other).any(axis=1).sum())
