"""Tokens to seconds, bytes to seconds: what one model's operations cost on one machine.

An expert is a pile of weights that must be read once, however many tokens it serves, so
its time is flat while reading dominates and linear once arithmetic does. That picture
(the *roofline*) is all a datasheet can give; a measured curve replaces it at the size
that was measured, and then the roofline only carries the curve to experts of other
sizes.

Shape legend: T tokens, E experts, L MoE layers, H hidden, F expert intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from moesim.hwprofiles.calibration.fit_curves import isotonic
from moesim.hwprofiles.schema import ReferenceExpert

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.hwprofiles.schema import Curve
    from moesim.traces.format.schema import ModelShape

_FIRST_TABLE_TOKENS = 256
_WIDE_DTYPES = {"f32", "fp32", "float32"}


class _Roofline(NamedTuple):
    """Seconds of work that reads `bytes` and does `flops`: overhead + the slower of the
    two.
    """

    overhead_s: float
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, read_bytes: float, flops: np.ndarray) -> np.ndarray:
        """Float64, same shape as `flops`."""
        return self.overhead_s + np.maximum(
            read_bytes / self.bytes_per_s, flops / self.flops_per_s
        )


class Costs:
    """Seconds of every operation of one model on one machine.

    A cost that the profile lacks raises `ProfileError` when it is first asked for, not
    before: a machine without an SSD figure is fine as long as no expert is read from
    SSD.

    Args:
        profile: the machine.
        shape: the model.
    """

    def __init__(self, profile: HardwareProfile, shape: ModelShape) -> None:
        self.profile = profile
        self.shape = shape
        self._cpu: list[np.ndarray] = [np.empty(0)] * shape.layers
        self._gpu: list[np.ndarray] = [np.empty(0)] * shape.layers
        self._dense = _DenseSizes.of(shape)
        self._roofs: dict[str, _Roofline] = {}
        self._factors: dict[tuple[str, int], float] = {}
        self._links: dict[tuple[str, int], float] = {}
        self._control: dict[str, tuple[float, float, float, float]] = {}

    # --- experts

    def cpu_s(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Look up the seconds one expert of `layer` takes on the CPU lane, weights in
        host memory.

        Args:
            layer: MoE layer.
            tokens: int, any shape, >= 0; 0 tokens take 0 seconds.

        Returns:
            float64, same shape as `tokens`; `cpu_first_s` is not included.

        Raises:
            ProfileError: the profile has no CPU cost.
        """
        try:
            return self._cpu[layer].take(tokens)
        except IndexError:
            self._cpu = self._grown("cpu", tokens)
            return self._cpu[layer].take(tokens)

    def gpu_s(self, layer: int, tokens: np.ndarray, gpu: int = 0) -> np.ndarray:
        """Look up the seconds one resident expert of `layer` takes on a GPU; all GPUs
        of a machine are alike.

        Args, returns and raises as `cpu_s`.
        """
        del gpu
        try:
            return self._gpu[layer].take(tokens)
        except IndexError:
            self._gpu = self._grown("gpu", tokens)
            return self._gpu[layer].take(tokens)

    @property
    def cpu_first_s(self) -> float:
        """Seconds that the first CPU expert of a layer step takes beyond the later
        ones.
        """
        return self.profile.number("costs.cpu.first_s")

    def after_read(self, part: str) -> float:
        """Factor on what follows a read from the SSD; 1 where it was not measured.

        Args:
            part: ``cpu``, ``h2d``: products and copies of an expert read in the same
                layer step, which caches may still hold; ``dense``: the dense part after
                a layer step that read.
        """
        known = []
        for size in ("", "_small"):
            factor = self.profile.numbers.get(f"costs.{part}.after_read{size}")
            measured = self._measured("cpu", f"points{size}")
            if factor is not None and measured is not None:
                known.append((np.log(measured[1].bytes), factor.value))
        if not known:
            return 1.0
        sizes, factors = zip(*sorted(known), strict=True)
        return float(np.interp(np.log(self.shape.max_expert_bytes), sizes, factors))

    @property
    def ssd_first_s(self) -> float:
        """Seconds from the end of planning to the first read of a layer step; 0 where
        it was not measured.
        """
        first = self.profile.numbers.get("costs.ssd.first_s")
        return 0.0 if first is None else first.value

    @property
    def gpu_first_s(self) -> float:
        """The same on a GPU; 0 in a profile that does not say (only calibration can
        tell).
        """
        first = self.profile.numbers.get("costs.gpu.first_s")
        return 0.0 if first is None else first.value

    def _grown(self, lane: str, tokens: np.ndarray) -> list[np.ndarray]:
        """Tables of every layer [tokens] that reach past the largest of `tokens`; equal
        sizes share one table.
        """
        length = max(_FIRST_TABLE_TOKENS, 2 * (int(np.max(tokens)) + 1))
        tables = {
            size: self._expert_table(lane, size, length)
            for size in sorted(set(self.shape.expert_bytes))
        }
        return [tables[size] for size in self.shape.expert_bytes]

    def _expert_table(self, lane: str, expert_bytes: int, length: int) -> np.ndarray:
        """Seconds by tokens, float64 [length].

        Source: `costs.<lane>.points` where the profile has it, carried to this size by
        the roofline; between it and `points_small`, the same for a smaller expert,
        linear in bytes; else the roofline itself (reference/algorithms.md §0: flat
        below saturation, linear above).
        """
        tokens = np.arange(length, dtype=np.float64)
        large, small = (self._measured(lane, key) for key in ("points", "points_small"))
        here = self._roof(lane).seconds(
            expert_bytes, tokens * self.shape.expert_flops_per_token
        )
        if large is not None:
            here = self._carried(lane, large, tokens, here)
            if small is not None and expert_bytes < large[1].bytes:
                roof = self._roof(lane).seconds(
                    expert_bytes, tokens * self.shape.expert_flops_per_token
                )
                low = self._carried(lane, small, tokens, roof)
                if expert_bytes > small[1].bytes:
                    share = (expert_bytes - small[1].bytes) / (
                        large[1].bytes - small[1].bytes
                    )
                    low = (1 - share) * self._at_reference(lane, small, tokens)
                    low += share * self._at_reference(lane, large, tokens)
                here = low
            # Carried by a roofline, the product may dip; it must not.
            here = np.maximum.accumulate(here)
        here[0] = 0.0
        here.flags.writeable = False
        return here

    def _measured(self, lane: str, key: str) -> tuple[Curve, ReferenceExpert] | None:
        curve = self.profile.curves.get(f"costs.{lane}.{key}")
        return (
            None
            if curve is None or curve.reference is None
            else (curve, curve.reference)
        )

    def _at_reference(
        self, lane: str, measured: tuple[Curve, ReferenceExpert], tokens: np.ndarray
    ) -> np.ndarray:
        """Seconds of the expert that was measured; beyond the last of its tokens as the
        roofline goes on.
        """
        curve, known = measured
        there = self._roof(lane).seconds(known.bytes, tokens * _flops_per_token(known))
        last = self._roof(lane).seconds(
            known.bytes, np.asarray(curve.at[-1] * _flops_per_token(known))
        )
        beyond = np.where(tokens > curve.at[-1], there / last, 1.0)
        return np.asarray(
            np.interp(
                np.minimum(tokens, curve.at[-1]),
                curve.at,
                isotonic(np.asarray(curve.seconds)),
            )
            * beyond
        )

    def _carried(
        self,
        lane: str,
        measured: tuple[Curve, ReferenceExpert],
        tokens: np.ndarray,
        here: np.ndarray,
    ) -> np.ndarray:
        """Seconds of this size from those of another, by the ratio of the roofline's
        answers.
        """
        known = measured[1]
        there = self._roof(lane).seconds(known.bytes, tokens * _flops_per_token(known))
        return np.asarray(self._at_reference(lane, measured, tokens) * (here / there))

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """Expert sizes whose times follow from another, measured size by bytes and
        FLOPs, in words.
        """
        said = []
        for lane in ("cpu", "gpu"):
            measured = self._measured(lane, "points")
            if measured is None:
                continue
            curve, known = measured
            small = self._measured(lane, "points_small")
            sizes = {
                (one.hidden, one.intermediate, one.bytes)
                for one in (known, *([small[1]] if small else []))
            }
            for size in sorted(set(self.shape.expert_bytes)):
                wanted = (self.shape.hidden, self.shape.expert_intermediate, size)
                if wanted not in sizes:
                    said.append(
                        f"{lane}: experts of {wanted[0]} x {wanted[1]}, {size} bytes,"
                        f" from {curve.kind} {known.hidden} x {known.intermediate},"
                        f" {known.bytes} bytes ({known.dtype})"
                    )
        return tuple(said)

    # --- links

    def copy_s(self, layer: int, gpu: int = 0) -> float:
        """Seconds to copy one expert of `layer` from host memory to a GPU."""
        del gpu
        return self._link_s("h2d", self.shape.expert_bytes[layer])

    def writeback_s(self, layer: int, gpu: int = 0) -> float:
        """Seconds to copy one expert of `layer` from a GPU to host memory."""
        del gpu
        return self._link_s("d2h", self.shape.expert_bytes[layer])

    def read_s(self, layer: int) -> float:
        """Seconds to read one expert of `layer` from SSD into host memory."""
        return self._link_s("ssd", self.shape.expert_bytes[layer])

    def _link_s(self, link: str, size: int) -> float:
        """Latency + bytes / bandwidth, or the measured curve with that line below and
        beyond it.
        """
        seconds = self._links.get((link, size))
        if seconds is None:
            seconds = self._links[link, size] = self._link_model(link, size)
        return seconds

    def _link_model(self, link: str, size: int) -> float:
        latency_s = self.profile.number(f"costs.{link}.latency_s")
        bytes_per_s = self.profile.number(f"costs.{link}.bytes_per_s")
        curve = self.profile.curves.get(f"costs.{link}.points")
        if curve is None:
            return latency_s + size / bytes_per_s
        measured = isotonic(np.asarray(curve.seconds))
        if size > curve.at[-1]:
            return float(measured[-1]) + (size - curve.at[-1]) / bytes_per_s
        return float(
            np.interp(size, (0.0, *curve.at), (min(latency_s, measured[0]), *measured))
        )

    def activation_s(self, tokens: int) -> float:
        """Seconds to move hidden states to the CPU and results back, once per layer
        with CPU experts.

        Source: DAOP Table I charges 0.02 ms per layer at one token.
        """
        moved_bytes = 2 * tokens * self.shape.hidden * self._dense.element_bytes
        return self.profile.number(
            "costs.activation.latency_s"
        ) + moved_bytes / self.profile.number("costs.activation.bytes_per_s")

    # --- the dense part

    def dense_s(self, tokens: int, context_tokens: int, sequences: int) -> float:
        """Seconds of one layer's dense part on the GPU: attention, norms, gate, shared
        experts.

        Args:
            tokens: of this step, all sequences together.
            context_tokens: key/value entries of each sequence after this step, its own
                included (the longest where sequences differ: padding is read too).
            sequences: in this step; each is taken to have its share of the tokens.

        Raises:
            ProfileError: the profile has no dense cost.
        """
        return self._dense_roof(
            *self._dense.layer_work(tokens, context_tokens, sequences)
        ) * self._in_place("dense", self._dense.layer_params, tokens)

    def head_s(self, tokens: int, logits: int | None = None) -> float:
        """Seconds of what happens once per step: embedding, feed-forward of the dense
        layers, output head.

        Args:
            tokens: of this step.
            logits: positions whose output is wanted (prefill: one per sequence); all
                tokens when None.
        """
        outputs = tokens if logits is None else logits
        params = self._dense.dense_layer_params + self._dense.head_params
        return self._dense_roof(
            *self._dense.head_work(tokens, outputs)
        ) * self._in_place("head", params, outputs)

    def _dense_roof(self, read_bytes: float, flops: float) -> float:
        roof = self._roof("dense")
        return roof.overhead_s + max(
            read_bytes / roof.bytes_per_s, flops / roof.flops_per_s
        )

    def _in_place(self, part: str, params: float, tokens: int) -> float:
        """By what a dense part of so many tokens differs from the roofline, at the most
        similar size calibrated.

        One token is a matrix times a vector, several a product of matrices: libraries
        are not equally good at both, and less good where rows are short. So the most
        similar size is that of the nearest width, then bytes.
        """
        factor = self._factors.get((part, tokens))
        if factor is None:
            known = [
                one
                for key in ("points", "points_small")
                if (one := self._measured(part, key)) is not None
            ]
            factor = 1.0
            if known:
                here = max(1.0, params * self._dense.param_bytes)
                curve, nearest = min(
                    known,
                    key=lambda one: (
                        abs(np.log(one[1].hidden / self.shape.hidden)),
                        abs(np.log(one[1].bytes / here)),
                    ),
                )
                factors = [
                    seconds
                    / self._dense_roof(nearest.bytes, at * _flops_per_token(nearest))
                    for at, seconds in zip(curve.at, curve.seconds, strict=True)
                ]
                factor = float(np.interp(tokens, curve.at, factors))
            self._factors[part, tokens] = factor
        return factor

    # --- control

    def planning_s(
        self, policy_name: str, active: int, copies: int = 0, *, tiered: bool = False
    ) -> float:
        """Seconds the control lane plans one layer step with `active` experts, of which
        it has `copies` brought.

        A policy that the profile does not name costs what ``costs.planning.default``
        says; so does what the SSD tier adds where the policy was not seen with one
        (`tiered`: an SSD lies behind host memory).
        """
        default = "costs.planning.default."
        table = f"costs.planning.{policy_name}."
        if f"{table}base_s" not in self.profile.numbers:
            table = default
        return self._plane(
            f"{table}base_s", table, active, copies, tiered=tiered, unseen=default
        )

    @property
    def dispatch_s(self) -> float:
        """Seconds to hand one operation to a lane."""
        return self.profile.number("costs.dispatch.per_op_s")

    def first_op_s(self, active: int, copies: int, *, tiered: bool = False) -> float:
        """Seconds from the end of planning to the first operation of a layer step;
        `tiered` as in `planning_s`.
        """
        return self._plane(
            "costs.dispatch.first_op_s",
            "costs.dispatch.first_op_",
            active,
            copies,
            tiered=tiered,
        )

    def join_s(self, active: int, copies: int, *, tiered: bool = False) -> float:
        """Seconds to join the lanes' results at the end of a layer step; `tiered` as in
        `planning_s`.
        """
        return self._plane(
            "costs.dispatch.join_s",
            "costs.dispatch.join_",
            active,
            copies,
            tiered=tiered,
        )

    def _plane(
        self,
        base: str,
        more: str,
        active: int,
        copies: int,
        *,
        tiered: bool,
        unseen: str = "",
    ) -> float:
        """``base + active x per_expert + copies x per_copy``, and ``with_ssd`` where an
        SSD lies behind host memory.

        A profile may leave out what begins with `more`; ``with_ssd`` is then that of
        the table `unseen`, if it has it.
        """
        known = self._control.get(base)
        if known is None:
            numbers = self.profile.numbers
            terms = [
                numbers.get(f"{more}{what}_s")
                for what in ("per_expert", "per_copy", "with_ssd")
            ]
            terms[2] = terms[2] or numbers.get(f"{unseen}with_ssd_s")
            per_expert_s, per_copy_s, with_ssd_s = (
                0.0 if one is None else one.value for one in terms
            )
            known = self._control[base] = (
                self.profile.number(base),
                per_expert_s,
                per_copy_s,
                with_ssd_s,
            )
        seconds = known[0] + known[1] * active + known[2] * copies
        return seconds + known[3] if tiered else seconds

    def _roof(self, lane: str) -> _Roofline:
        roof = self._roofs.get(lane)
        if roof is None:
            roof = self._roofs[lane] = _Roofline(
                *(
                    self.profile.number(f"costs.{lane}.{key}")
                    for key in _Roofline._fields
                )
            )
        return roof


def _flops_per_token(expert: ReferenceExpert) -> int:
    """Gate, up and down projections, multiply-adds counted twice: ``6 H F``."""
    return 6 * expert.hidden * expert.intermediate


class _DenseSizes(NamedTuple):
    """Parameters outside the routed experts, by when they are read."""

    layer_params: float
    """One MoE layer: attention, gate, shared experts."""
    dense_layer_params: float
    """All layers without routed experts together."""
    head_params: float
    """Output head; of the embedding only the tokens' own rows are read."""
    param_bytes: float
    kv_bytes: float
    """Keys and values of one token in one layer."""
    attention_flops: float
    """Per query and key: scores and weighted values."""
    element_bytes: int

    @classmethod
    def of(cls, shape: ModelShape) -> _DenseSizes:
        """Count parameters; their bytes are `shape.other_bytes` shared out evenly, so
        bytes are conserved.

        Where the shape does not know its attention (0 heads), four H x H matrices and
        full-width keys are assumed.
        """
        element_bytes = 4 if shape.dtype in _WIDE_DTYPES else 2
        if shape.heads and shape.head_dim:
            query_width = shape.heads * shape.head_dim
            kv_width = (shape.kv_heads or shape.heads) * shape.head_dim
        else:
            query_width = kv_width = shape.hidden
        attention = 2 * shape.hidden * (query_width + kv_width)
        layer = (
            attention
            + shape.hidden * shape.experts
            + 3 * shape.hidden * shape.shared_intermediate
        )
        dense = len(shape.dense_layers) * (
            attention + 3 * shape.hidden * shape.dense_intermediate
        )
        head = shape.vocab * shape.hidden
        return cls(
            layer_params=layer,
            dense_layer_params=dense,
            head_params=head,
            param_bytes=shape.other_bytes / (shape.layers * layer + dense + 2 * head),
            kv_bytes=2.0 * kv_width * element_bytes,
            attention_flops=4.0 * query_width,
            element_bytes=element_bytes,
        )

    def layer_work(
        self, tokens: int, context_tokens: int, sequences: int
    ) -> tuple[float, float]:
        """Bytes and FLOPs of one layer's dense part."""
        # q queries at the end of a context of c see c - (q - 1) / 2 keys on average
        # (causal attention)
        keys_seen = context_tokens - (tokens / sequences - 1) / 2
        flops = (
            2.0 * self.layer_params * tokens + self.attention_flops * tokens * keys_seen
        )
        return (
            self.layer_params * self.param_bytes
            + self.kv_bytes * context_tokens * sequences,
            flops,
        )

    def head_work(self, tokens: int, outputs: int) -> tuple[float, float]:
        """Bytes and FLOPs of what happens once per step."""
        flops = 2.0 * (self.dense_layer_params * tokens + self.head_params * outputs)
        return (self.dense_layer_params + self.head_params) * self.param_bytes, flops


def dense_reference(shape: ModelShape, *, head: bool = False) -> ReferenceExpert:
    """Describe the dense part of one layer, or what is done once per step, as an expert
    of as many weights.

    ``6 H F = 2 x weights`` FLOPs per token.
    """
    sizes = _DenseSizes.of(shape)
    params = (
        sizes.dense_layer_params + sizes.head_params if head else sizes.layer_params
    )
    intermediate = max(1, round(params / (3 * shape.hidden)))
    return ReferenceExpert(
        shape.hidden,
        intermediate,
        max(1, round(params * sizes.param_bytes)),
        shape.dtype,
    )


def dense_work(
    shape: ModelShape, tokens: int, context_tokens: int, sequences: int, *, head: bool
) -> tuple[float, float]:
    """Bytes and FLOPs of a dense part, of which `Costs.dense_s` and `Costs.head_s` make
    seconds.
    """
    sizes = _DenseSizes.of(shape)
    return (
        sizes.head_work(tokens, sequences)
        if head
        else sizes.layer_work(tokens, context_tokens, sequences)
    )
