"""A live model on the executor: its own gates decide, its tokens come out, its experts
work where the plan says.

The model's frame (attention, norms, gates, shared experts) runs on the device's thread;
every experts module asks the executor. Where a policy wants predictions, the gates of
the coming layers are asked about this layer's input before its experts are computed, so
what a policy sees is what a real system could know. Padding of shorter prompts and
sequences that have ended are not computed: nobody looks at their answers.

B sequences of a batch, S positions of a pass, T tokens kept of B S, E experts, K
experts per token, H hidden.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moesim.base.errors import TraceError
from moesim.policies.base import PolicyError
from moesim.runtime.models.expert_layout import UNUSED, group_tokens
from moesim.runtime.models.gates import best_first, gate_facts
from moesim.runtime.models.local_model import Pass, generate
from moesim.runtime.models.offloaded import StoreExperts, offloaded_shape
from moesim.runtime.record.gate_observer import GateObserver
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import PREDICTION_COLUMNS, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moesim.runtime.executor.executor import Executor
    from moesim.runtime.models.expert_layout import Groups
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.models.offloaded import OffloadedModel
    from moesim.runtime.record.calibration import Residual
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.schema import ModelShape

TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest difference of logits, as a share of the largest logit, that rounding
explains: sums in another order.
"""


def live_shape(
    offloaded: OffloadedModel, model_dir: Path, store: ExpertStore
) -> ModelShape:
    """Describe an offloaded model: experts as they lie in the store, everything else as
    loaded.
    """
    records = [store.record_bytes(layer) for layer in range(store.layers)]
    name = model_dir.resolve().name
    return offloaded_shape(offloaded, model_dir, name, store, records)


def encode(local: LocalModel, prompts: Sequence[str | bytes]) -> list[list[int]]:
    """Turn prompts into token ids.

    Raises:
        TraceError: a prompt without a token, or with one that the model does not know.
    """
    ids = [local.encode(prompt) for prompt in prompts]
    vocabulary = int(local.model.get_input_embeddings().num_embeddings)
    for prompt, tokens in enumerate(ids):
        if not tokens or max(tokens) >= vocabulary:
            largest = "none" if not tokens else f"token {max(tokens)}"
            raise TraceError(
                f"prompt {prompt}: expected tokens below {vocabulary}, found {largest};"
                " has the model a tokenizer?"
            )
    if not ids:
        raise TraceError("prompts: expected at least one, found none")
    return ids


def warm_up(offloaded: OffloadedModel, store: ExpertStore) -> None:
    """Send one token through the model, so that libraries have initialised themselves
    before anything is timed.
    """
    offloaded.handler = StoreExperts(store, offloaded.gatings, check=False)
    with torch.inference_mode():
        offloaded.model(
            input_ids=torch.zeros(
                1, 1, dtype=torch.long, device=offloaded.model.device
            ),
            use_cache=False,
        )
    offloaded.handler = None


def routed_layer(
    layer: int, index: torch.Tensor, weights: torch.Tensor
) -> tuple[RoutedLayer, Groups]:
    """Describe a gate's choice as a trace would, and group its pairs by expert.

    Args:
        layer: MoE layer.
        index: [T, K] ids, best first.
        weights: [T, K].
    """
    chosen = index.cpu().numpy().astype(np.uint16)
    assert not (chosen == UNUSED).any(), "a gate names experts that exist"
    groups = group_tokens(chosen)
    routed = RoutedLayer(
        layer=layer,
        experts=groups.experts,
        tokens=groups.tokens,
        routing=chosen,
        # In full: a token whose experts a policy keeps must keep its answer.
        weights=weights.float().cpu().numpy(),
        scores=None,
        predicted={},
    )
    return routed, groups


class PassRecord(NamedTuple):
    """What went into one forward pass, and what came out, for `verify`.

    Attributes:
        inputs: arguments of the model's forward.
        fresh: the pass begins a batch, so there are no keys and values yet.
        alive: bool [B], sequences that have not ended.
        logits: float32 [alive sequences, V] of the last position.
    """

    inputs: dict[str, Any]
    fresh: bool
    alive: torch.Tensor
    logits: torch.Tensor


@dataclass(slots=True)
class LiveResult:
    """What a live run generated.

    Attributes:
        tokens: per prompt, generated token ids.
        steps: what the gates decided, pass by pass.
        passes: inputs and logits, where they were kept.
    """

    tokens: list[list[int]] = field(default_factory=list)
    steps: list[RoutedStep] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)


class LiveRun:
    """Generates on an offloaded model with an executor as its experts; pass it to
    `Executor.run`.

    Args:
        offloaded: the model.
        local: the same model, with its way of reading text.
        executor: computes experts.
        prompts: token ids, none empty.
        new_tokens: decode steps per sequence.
        batch: sequences run together.
        columns: optional trace columns that the policies need.
        residual: vectors for ``pred1_res``.
        temperature: 0 decodes greedily.
        seed: of the draws.
        keep_passes: keep inputs and logits for `verify`.
    """

    def __init__(
        self,
        offloaded: OffloadedModel,
        local: LocalModel,
        executor: Executor,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        batch: int = 1,
        columns: Sequence[str] = (),
        residual: Residual | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        keep_passes: bool = False,
    ) -> None:
        self.result = LiveResult()
        self._offloaded = offloaded
        self._local = local
        self._executor = executor
        self._prompts = prompts
        self._new = new_tokens
        self._size = batch
        self._temperature = temperature
        self._seed = seed
        self._keep_passes = keep_passes
        vectors = (
            None
            if residual is None
            else torch.from_numpy(residual.vectors).to(local.device)
        )
        self._predicted = [name for name in columns if name in PREDICTION_COLUMNS]
        self._scores = "scores" in columns
        facts = gate_facts(offloaded.model, offloaded.blocks)
        self._observer = GateObserver(
            offloaded.blocks, facts, columns, residual=vectors
        )
        self._watches = bool(self._predicted) or self._scores
        # Rows that are neither padding nor of an ended sequence; None where all are
        # kept. Ended sequences stay in the batch.
        self._kept: torch.Tensor | None = None
        self._alive = torch.ones(0, dtype=torch.bool)
        self._inputs: dict[str, Any] = {}
        self._step = -1
        self._batch = 0
        self._generated: list[list[int]] = []

    def __call__(self) -> None:
        """Generate for all prompts, a batch at a time."""
        self._offloaded.handler = self
        try:
            with self._observer if self._watches else nullcontext():
                for first in range(0, len(self._prompts), self._size):
                    prompts = self._prompts[first : first + self._size]
                    self._generated = [[] for _ in prompts]
                    generate(
                        self._local,
                        prompts,
                        self._new,
                        self._listen,
                        begin=self._begin,
                        first=first,
                        temperature=self._temperature,
                        seed=self._seed,
                    )
                    self.result.tokens += self._generated
                    self._batch += 1
        finally:
            self._offloaded.handler = None

    def experts(
        self,
        layer: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Answer as `moesim.runtime.models.offloaded.ExpertsHandler.experts`."""
        seen: dict[str, torch.Tensor] = {}
        if self._watches:
            seen = self._observer.layers[layer]
            if "output" not in seen:
                raise PolicyError(
                    f"{self._offloaded.blocks[layer].name}: its gate shows only its"
                    " choice; policies that need scores cannot run"
                )
            index, weights = seen["experts"], seen["weights"]
        else:
            index, weights = best_first(index, weights, None)
        weights = self._rows(weights)
        routed, groups = routed_layer(layer, self._rows(index), weights)
        if self._scores:
            routed.scores = _half(self._rows(seen["scores"]))
        routed.predicted = {
            name: _half(self._rows(seen[name]))
            for name in self._predicted
            if name in seen
        }
        # A pass keeps nothing of the layers that are done.
        seen.clear()
        self.result.steps[-1].layers.append(routed)
        answer = self._executor.layer(routed, self._rows(hidden), weights, groups)
        if self._kept is None:
            return answer
        # The rest keeps zeros: nobody reads these positions.
        padded = torch.zeros_like(hidden)
        padded[self._kept] = answer
        return padded

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        """Leave out padding and ended sequences."""
        return values if self._kept is None else values[self._kept]

    def _begin(self, inputs: dict[str, Any]) -> None:
        """Note what a forward pass is given."""
        tokens = inputs["input_ids"]
        kept = inputs["attention_mask"][:, -tokens.shape[1] :].bool()
        keep = kept.reshape(-1)
        self._alive = kept[:, -1]
        self._kept = None if bool(keep.all()) else keep.nonzero().flatten()
        self._inputs = dict(inputs)
        fresh = self._inputs.pop("past_key_values") is None
        phase = Phase.PREFILL if fresh else Phase.DECODE
        self._step += 1
        # Counts are known when the pass has ended.
        self.result.steps.append(
            RoutedStep(
                step=self._step,
                phase=phase,
                batch=self._batch,
                tokens=0,
                context_tokens=0,
                sequences=0,
                layers=[],
            )
        )
        self._executor.begin_step(self._step, phase, self._batch)

    def _listen(self, step: Pass) -> None:
        """Close the books of a forward pass."""
        tokens = int(step.keep.sum())
        sequences = int(step.keep.any(1).sum())
        noted = self.result.steps[-1]
        if self._keep_passes:
            fresh = noted.phase == Phase.PREFILL
            logits = step.logits[self._alive, -1].float().cpu()
            self.result.passes.append(
                PassRecord(self._inputs, fresh, self._alive, logits)
            )
        noted.tokens = tokens
        noted.sequences = sequences
        noted.context_tokens = int(step.positions.max()) + 1
        if noted.phase == Phase.DECODE:
            tokens_of = step.tokens[:, -1].tolist()
            running = step.keep[:, -1].tolist()
            for sequence, token in enumerate(tokens_of):
                if running[sequence]:
                    self._generated[sequence].append(token)
        self._executor.end_step(tokens, sequences)


class Verdict(NamedTuple):
    """How far an offloaded model's logits are from the plain model's.

    `largest` is the largest absolute difference, `tolerance` what rounding explains,
    `logits` how many were compared.
    """

    largest: float
    tolerance: float
    logits: int

    @property
    def passed(self) -> bool:
        """Whether rounding explains it."""
        return self.largest <= self.tolerance


def verify(plain: Any, passes: Sequence[PassRecord], dtype: str) -> Verdict:
    """Show the plain model the same tokens, pass by pass, and compare logits.

    Args:
        plain: the library's model with its own experts.
        passes: of a `LiveRun` with `keep_passes`.
        dtype: in which both compute.
    """
    largest = 0.0
    scale = 0.0
    count = 0
    cache = None
    if hasattr(plain, "set_experts_implementation"):
        plain.set_experts_implementation("eager")
    with torch.inference_mode():
        for record in passes:
            out = plain(
                **record.inputs,
                past_key_values=None if record.fresh else cache,
                use_cache=True,
            )
            cache = out.past_key_values
            expected = out.logits[record.alive, -1].float().cpu()
            largest = max(largest, float((expected - record.logits).abs().max()))
            scale = max(scale, float(expected.abs().max()))
            count += expected.numel()
    return Verdict(largest, TOLERANCES[dtype] * max(1.0, scale), count)


def made_up_steps(
    shape: ModelShape, columns: Sequence[str], count: int = 3
) -> list[RoutedStep]:
    """Draw some steps for a rehearsal of the planner."""
    rng = np.random.default_rng(0)
    steps = []
    for step in range(count):
        layers = []
        for layer in range(shape.layers):
            scores = torch.from_numpy(rng.random((1, shape.experts)))
            weights, index = scores.topk(shape.top_k)
            routed, _ = routed_layer(layer, index, weights)
            routed.scores = _half(scores)
            reach = {
                name
                for name in columns
                if name in PREDICTION_COLUMNS and layer + int(name[4]) < shape.layers
            }
            routed.predicted = dict.fromkeys(sorted(reach), routed.scores)
            layers.append(routed)
        steps.append(
            RoutedStep(
                step=step,
                phase=Phase.DECODE,
                batch=0,
                tokens=1,
                context_tokens=step + 1,
                sequences=1,
                layers=layers,
            )
        )
    return steps


def _half(values: torch.Tensor) -> np.ndarray:
    return values.half().cpu().numpy()
