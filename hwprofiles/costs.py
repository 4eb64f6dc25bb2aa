"""Costs of one model's operations on one machine: tokens to seconds, bytes to seconds.

Experts are in `moesim.hwprofiles.roofline`, dense parts in
`moesim.hwprofiles.dense_costs`; links and control are here.

Shape legend: T tokens, E experts, L MoE layers, H hidden, F expert intermediate.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.hwprofiles import paths
from moesim.hwprofiles.dense_costs import DenseCosts
from moesim.hwprofiles.lanes import CPU, D2H, GPU, H2D, SSD
from moesim.hwprofiles.roofline import (
    MeasuredPart,
    expert_table,
    extrapolated_sizes,
    isotonic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.hwprofiles.paths import ControlPaths
    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.traces.format.schema import ModelShape


_ACTIVATION = paths.link(paths.ACTIVATION)
_NO_TABLE = np.empty(0)

ControlTerms = tuple[float, ...]
"""Four: base, per active expert, per copy, and what an SSD behind host memory adds."""

_FIRST_TABLE_TOKENS = 256
"""Length of the first tables. Decode steps rarely ask for more; a prefill lets the
tables grow.
"""


class Overlap(NamedTuple):
    """Factors by which a copy to a GPU and an expert on the CPU take longer while the
    other runs.
    """

    link: float
    cpu: float


class Kernels(NamedTuple):
    """Costs of a system's own kernels, where they are not the profile's.

    Attributes:
        cpu: factor on what an expert's product takes on the CPU beyond its fixed time.
        gpu: the same on a GPU.
        grouped: whether the GPU's products of a layer step are one launch where the
            profile states `costs.gpu.further_s`; otherwise each expert is launched by
            itself.
        cpu_expert_s: fixed seconds of each expert on the CPU; None takes the
            profile's `costs.cpu.overhead_s`.
        source: the publication, or the measurement.
    """

    cpu: float = 1.0
    gpu: float = 1.0
    grouped: bool = True
    cpu_expert_s: float | None = None
    source: str = ""


_PROFILE_KERNELS = Kernels()


class Costs:
    """Seconds of every operation of one model on one machine.

    A cost that the profile lacks raises `ProfileError` when it is first asked for, not
    before: a machine without an SSD figure is fine as long as no expert is read from
    SSD.

    Args:
        profile: the machine.
        shape: the model.
        pageable: host memory is not page-locked, so copies to a GPU take longer: by the
            profile's probes of both, else twice as long.
        kernels: of the system that computes, where they are not the profile's.
        polls: its helpers poll for work, so that a layer step which CPU and GPU share
            takes no longer to join.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        shape: ModelShape,
        *,
        pageable: bool = False,
        kernels: Kernels | None = None,
        polls: bool = False,
    ) -> None:
        self.profile = profile
        self.shape = shape
        self.kernels = kernels or _PROFILE_KERNELS
        self._polls = polls
        self._copy_factor = _pageable_factor(profile) if pageable else 1.0
        # Empty tables: the first look-up lies beyond their end and builds them.
        lanes = (CPU.name, GPU.name)
        self._by_layer = dict.fromkeys(lanes, [_NO_TABLE] * shape.layers)
        self._unequal = bool(shape.bytes_by_expert)
        self._by_size: dict[str, np.ndarray] = {}
        if self._unequal:
            sizes = np.array(shape.bytes_by_expert, np.int64)
            self._size_of = np.searchsorted(shape.expert_sizes, sizes)
        self._dense = DenseCosts(profile, shape)
        self._links: dict[tuple[str, int], float] = {}

    # --- experts

    def cpu_s(
        self, layer: int, tokens: np.ndarray, experts: np.ndarray | None = None
    ) -> np.ndarray:
        """Look up the seconds one expert of `layer` takes on the CPU lane, weights in
        host memory.

        Args:
            layer: MoE layer.
            tokens: int, any shape, >= 0; 0 tokens take 0 seconds.
            experts: int, same shape: which ones; None for one of mean size. It matters
                where experts of a layer differ in size.

        Returns:
            float64, same shape as `tokens`; `cpu_first_s` is not included.

        Raises:
            ProfileError: the profile has no CPU cost.
        """
        return self._expert_s(CPU.name, layer, tokens, experts)

    def gpu_s(
        self,
        layer: int,
        tokens: np.ndarray,
        gpu: int = 0,
        experts: np.ndarray | None = None,
    ) -> np.ndarray:
        """Look up the seconds one resident expert of `layer` takes on a GPU; all GPUs
        of a machine are alike.

        Args, returns and raises as `cpu_s`.
        """
        del gpu
        return self._expert_s(GPU.name, layer, tokens, experts)

    def _expert_s(
        self, lane: str, layer: int, tokens: np.ndarray, experts: np.ndarray | None
    ) -> np.ndarray:
        if experts is not None and self._unequal:
            return self._of_experts(lane, layer, tokens, experts)
        # Asked in every layer step: an exception once is cheaper than a check always.
        try:
            return self._by_layer[lane][layer].take(tokens)
        except IndexError:
            self._by_layer[lane] = self._tables(lane, tokens)
            return self._by_layer[lane][layer].take(tokens)

    def _of_experts(
        self, lane: str, layer: int, tokens: np.ndarray, experts: np.ndarray
    ) -> np.ndarray:
        """Look up the seconds of experts by their sizes."""
        table = self._by_size.get(lane)
        most_tokens = int(np.max(tokens, initial=0))
        if table is None or most_tokens >= table.shape[1]:
            sizes = self.shape.expert_sizes
            table = np.array(list(self._tables_of(lane, sizes, most_tokens).values()))
            self._by_size[lane] = table
        return np.asarray(table[self._size_of[layer, experts], tokens])

    def _tables(self, lane: str, tokens: np.ndarray) -> list[np.ndarray]:
        """By layer, read-only float64 [T]; layers of equal size share one table."""
        sizes = sorted(set(self.shape.expert_bytes))
        tables = self._tables_of(lane, sizes, int(np.max(tokens)))
        return [tables[expert_bytes] for expert_bytes in self.shape.expert_bytes]

    def _tables_of(
        self, lane: str, sizes: Sequence[int], most_tokens: int
    ) -> dict[int, np.ndarray]:
        """Tabulate seconds by bytes of an expert, past `most_tokens`."""
        # Twice as long as needed, so that growing prefills do not rebuild it always.
        length = max(_FIRST_TABLE_TOKENS, 2 * (most_tokens + 1))
        tables = {}
        for size in sizes:
            table = expert_table(self.profile, self.shape, lane, size, length)
            tables[size] = self._by_own_kernels(lane, table)
        return tables

    def _by_own_kernels(self, lane: str, table: np.ndarray) -> np.ndarray:
        """Put a system's own kernels, or grouped ones, into a table of seconds."""
        overhead_s = self._optional(paths.roofline(lane).overhead_s)
        if lane == CPU.name:
            factor = self.kernels.cpu
            fixed_s = self.kernels.cpu_expert_s
        else:
            factor = self.kernels.gpu
            fixed_s = self._further_s
        if factor == 1.0 and fixed_s is None:
            return table
        work_s = np.maximum(table - overhead_s, 0.0)
        changed = factor * work_s + (overhead_s if fixed_s is None else fixed_s)
        changed[0] = 0.0
        changed.flags.writeable = False
        return changed

    @property
    def _further_s(self) -> float | None:
        """Fixed seconds of each expert of a grouped launch; None without groups."""
        further = self.profile.numbers.get(paths.FURTHER_S)
        return further.value if further and self.kernels.grouped else None

    @property
    def cpu_first_s(self) -> float:
        """Seconds that the first CPU expert of a layer step takes beyond the later
        ones.
        """
        return self.profile.number(paths.first_s(CPU.name))

    @property
    def gpu_first_s(self) -> float:
        """The same on a GPU: what is stated, and the launch that a group shares."""
        first_s = self._optional(paths.first_s(GPU.name))
        further_s = self._further_s
        if further_s is None:
            return first_s
        overhead_s = self.profile.number(paths.roofline(GPU.name).overhead_s)
        return first_s + max(0.0, overhead_s - further_s)

    @property
    def ssd_first_s(self) -> float:
        """Seconds from the end of planning to the first read of a layer step; 0 where
        it was not measured.
        """
        return self._optional(paths.first_s(SSD.name))

    def after_read(self, part: str) -> float:
        """Return the factor on what follows a read from the SSD; 1 where it was not
        measured.

        Args:
            part: ``cpu``, ``h2d``: products and copies of an expert read in the same
                layer step, which caches may still hold; ``dense``: the dense part after
                a layer step that read.
        """
        measured_factors = []
        for small in (False, True):
            factor = self.profile.numbers.get(paths.after_read(part, small=small))
            measured = MeasuredPart.of(self.profile, CPU.name, small=small)
            if factor is not None and measured is not None:
                log_bytes = np.log(measured.reference.bytes)
                measured_factors.append((log_bytes, factor.value))
        if not measured_factors:
            return 1.0

        # What decides is how much of an expert a cache holds: a ratio of sizes.
        log_sizes, factors = zip(*sorted(measured_factors), strict=True)
        log_size = np.log(self.shape.max_expert_bytes)
        return float(np.interp(log_size, log_sizes, factors))

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """Expert sizes whose times follow from another, measured size by bytes and
        FLOPs, in words.
        """
        return extrapolated_sizes(self.profile, self.shape)

    # --- links

    def copy_s(self, layer: int, gpu: int = 0, expert: int | None = None) -> float:
        """Seconds to copy an expert of `layer` from host memory to a GPU; one of mean
        size, if none is named.
        """
        del gpu
        expert_bytes = self.shape.bytes_of(layer, expert)
        return self._copy_factor * self._link_s(H2D.name, expert_bytes)

    @property
    def overlap(self) -> Overlap:
        """Return what copies to a GPU and experts on the CPU cost each other."""
        slowdown = self.profile.contention.slowdown
        return Overlap(
            link=slowdown(H2D.name, CPU.name), cpu=slowdown(CPU.name, H2D.name)
        )

    def writeback_s(self, layer: int, gpu: int = 0, expert: int | None = None) -> float:
        """The same of a copy from a GPU to host memory."""
        del gpu
        expert_bytes = self.shape.bytes_of(layer, expert)
        return self._link_s(D2H.name, expert_bytes)

    def read_s(self, layer: int, expert: int | None = None) -> float:
        """The same of a read from SSD into host memory."""
        expert_bytes = self.shape.bytes_of(layer, expert)
        return self._link_s(SSD.name, expert_bytes)

    def activation_s(self, tokens: int) -> float:
        """Seconds to move hidden states to the CPU and results back, once per layer
        with CPU experts.

        Source: DAOP Table I charges 0.02 ms per layer at one token.
        """
        latency_s = self.profile.number(_ACTIVATION.latency_s)
        bytes_per_s = self.profile.number(_ACTIVATION.bytes_per_s)
        # There and back.
        elements = 2 * tokens * self.shape.hidden
        moved_bytes = elements * self._dense.sizes.element_bytes
        return latency_s + moved_bytes / bytes_per_s

    def _link_s(self, link: str, size: int) -> float:
        """Latency + bytes / bandwidth, or the measured curve with that line below and
        beyond it.
        """
        # Models have few expert sizes, and every copy asks for one of them.
        key = (link, size)
        seconds = self._links.get(key)
        if seconds is None:
            seconds = self._link_model(link, size) + size * self._charged(link)
            self._links[key] = seconds
        return seconds

    def _link_model(self, link: str, size: int) -> float:
        constants = paths.link(link)
        latency_s = self.profile.number(constants.latency_s)
        bytes_per_s = self.profile.number(constants.bytes_per_s)
        curve = self.profile.curves.get(paths.points(link))
        if curve is None:
            return latency_s + size / bytes_per_s

        measured_s = isotonic(np.asarray(curve.seconds))
        if size > curve.at[-1]:
            largest_s = float(measured_s[-1])
            beyond_bytes = size - curve.at[-1]
            return largest_s + beyond_bytes / bytes_per_s

        # Nothing to move takes the latency, but no longer than the smallest size did.
        none_s = min(latency_s, measured_s[0])
        sizes = (0.0, *curve.at)
        seconds = (none_s, *measured_s)
        return float(np.interp(size, sizes, seconds))

    # --- the dense part

    def dense_s(
        self,
        tokens: int,
        context_tokens: int,
        sequences: int,
    ) -> float:
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
        return float(self._dense.layer_s(tokens, context_tokens, sequences))

    def gate_s(self, tokens: int) -> float:
        """Seconds of one more gate on the GPU: scores of `tokens`, and their top k."""
        return float(self._dense.gate_s(tokens))

    def head_s(self, tokens: int, logits: int | None = None) -> float:
        """Seconds of what happens once per step: embedding, feed-forward of the dense
        layers, output head.

        Args:
            tokens: of this step.
            logits: positions whose output is wanted (prefill: one per sequence); all
                tokens when None.
        """
        return float(self._dense.head_s(tokens, tokens if logits is None else logits))

    def dense_of_passes(
        self, tokens: np.ndarray, context_tokens: np.ndarray, sequences: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`dense_s`, and `head_s` of one output per sequence, of many forward passes:
        float64 [P] each, to the last bit.
        """
        dense_s = self._dense.layer_s(tokens, context_tokens, sequences)
        return dense_s, self._dense.head_s(tokens, sequences)

    # --- control

    def planning_terms(
        self, policy_name: str, *, tiered: bool = False, own_s: float = 0.0
    ) -> ControlTerms:
        """Seconds that the control lane plans one layer step, by what they grow with.

        A policy that the profile does not name costs what ``costs.planning.default``
        states; so does what the SSD tier adds where the policy was not seen with one.

        Args:
            policy_name: of the assignment policy.
            tiered: an SSD lies behind host memory.
            own_s: what the policies say that they take beyond that.
        """
        default = paths.planning(paths.DEFAULT_POLICY)
        # Profiles know policies by name, whatever their parameters.
        name, _, _ = policy_name.partition(":")
        constants = paths.planning(name)
        if constants.base_s not in self.profile.numbers:
            constants = default
        # Few policies are calibrated with an SSD; the tier costs all of them alike.
        elif constants.with_ssd_s not in self.profile.numbers:
            constants = constants._replace(with_ssd_s=default.with_ssd_s)
        base_s, *others = self._control_terms(constants, tiered=tiered)
        return (base_s + own_s, *others)

    def first_op_terms(self, *, tiered: bool = False) -> ControlTerms:
        """The same from the end of planning to the first operation of a layer step."""
        return self._control_terms(paths.FIRST_OPERATION, tiered=tiered)

    def join_terms(self, *, tiered: bool = False) -> ControlTerms:
        """The same of joining the lanes' results at the end of a layer step."""
        return self._control_terms(paths.JOIN, tiered=tiered)

    def least_planning_s(self, active: np.ndarray) -> np.ndarray:
        """Seconds that planning layer steps takes at least, whoever plans: float64, by
        active experts.
        """
        stated = {
            path.split(".")[2]
            for path in self.profile.numbers
            if fnmatch(path, paths.planning("*").base_s)
        }
        lines = [self.planning_terms(name)[:2] for name in sorted(stated)]
        return np.min([base_s + each_s * active for base_s, each_s in lines], axis=0)

    @property
    def dispatch_s(self) -> float:
        """Seconds to hand one operation to a lane."""
        return self._charged(paths.OPERATION)

    @property
    def split_s(self) -> float:
        """Seconds that a layer step takes longer to join where CPU and GPU share its
        experts.
        """
        return 0.0 if self._polls else self._charged(paths.SPLIT)

    def _control_terms(self, constants: ControlPaths, *, tiered: bool) -> ControlTerms:
        """Look up the constants of one formula; only the base must be there."""
        is_charged = any(c.per == constants.base_s for c in paths.CHARGES)
        find_base = self._charged if is_charged else self.profile.number
        return (
            find_base(constants.base_s),
            self._optional(constants.per_expert_s),
            self._optional(constants.per_copy_s),
            self._optional(constants.with_ssd_s) if tiered else 0.0,
        )

    def _charged(self, per: str) -> float:
        """Add up what `paths.CHARGES` charges for one thing."""
        seconds = 0.0
        for charge in paths.CHARGES:
            if charge.per == per:
                find = self.profile.number if charge.required else self._optional
                seconds += find(charge.path)
        return seconds

    def _optional(self, path: str) -> float:
        quantity = self.profile.numbers.get(path)
        return 0.0 if quantity is None else quantity.value


def seconds_by_expert(
    shape: ModelShape, seconds_of: Callable[..., float]
) -> np.ndarray:
    """Ask for the seconds of every expert of a model, float64 [L, E].

    Args:
        shape: the model.
        seconds_of: of a layer; where its experts differ in size, asked with `expert`.
    """
    layers = range(shape.layers)
    if not shape.bytes_by_expert:
        by_layer = [[seconds_of(layer)] * shape.experts for layer in layers]
        return np.array(by_layer, np.float64)
    return np.array(
        [
            [seconds_of(layer, expert=expert) for expert in range(shape.experts)]
            for layer in layers
        ],
        np.float64,
    )


def _pageable_factor(profile: HardwareProfile) -> float:
    """Return the factor by which a copy from pageable memory takes longer.

    Source, where no probe tells: half the rate, by threads of llama.cpp (15346).
    """
    locked = profile.numbers.get(paths.LINK_PAGE_LOCKED)
    pageable = profile.numbers.get(paths.LINK_PAGEABLE)
    if locked is None or pageable is None:
        return 2.0
    return locked.value / pageable.value
