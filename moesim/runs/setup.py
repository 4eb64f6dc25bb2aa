"""Sets up a run from a configuration: policies, memories, a planner.

Simulated and measured runs share this, so that both start alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.options import ConfigError
from moesim.base.version import __version__, git_commit
from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import (
    HardwareProfile,
    default_profile,
    load_profile,
    prediction_error,
    ships,
)
from moesim.policies.base import PolicyError
from moesim.policies.names import RESIDENT
from moesim.policies.registry import KINDS, resolve, settings
from moesim.policies.sizes import PER_LAYER
from moesim.runs.memory import (
    HOST_ACCELERATOR,
    card_bill,
    kept_bytes,
    left_on_card,
    of_all_cards,
    plan_memory,
    sharing_cards,
)
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.synthetic.marks import synthetic_caveats

if TYPE_CHECKING:
    from moesim.policies.base import Policy
    from moesim.policies.sizes import CacheSize, MemoryPlan
    from moesim.policies.systems import Policies, System
    from moesim.runs.config import RunConfig
    from moesim.traces.format.schema import ModelShape


@dataclass
class Setup:
    """The parts of a run beside its lanes; every call of `planner` makes an equal one.

    Attributes:
        config: what the user asked for.
        shape: sizes of the experts, which may differ from those of the trace.
        profile: the machine.
        system: the four policies.
        calibration: activation counts that fill caches beforehand, float64 [L, E].
        future: for policies that know it.
    """

    config: RunConfig
    shape: ModelShape
    profile: HardwareProfile
    system: System
    calibration: np.ndarray | None = None
    future: RecordedFuture | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        trace: Trace,
        *,
        profile: HardwareProfile | None = None,
        shape: ModelShape | None = None,
        future: RecordedFuture | None = None,
    ) -> Setup:
        """Set up a walk through a trace.

        Args:
            config: what the user asked for.
            trace: that of the configuration, opened.
            profile: the machine; None takes that of the configuration.
            shape: sizes of the experts; None takes the trace's.
            future: of these passes, for oracles; None reads it where there is one.

        Raises:
            TraceError: the trace lacks a column that a policy reads.
            ProfileError: no such profile.
            PolicyError: an unknown policy or parameter, impossible memories, or a
                `warm` trace of another model.
            ConfigError: trace or profile are not those that the configuration names.
        """
        profile = profile or profile_of(config.hw)
        check_digests(config, trace, profile)
        # Routing may be given the experts of another model.
        setup = cls(config, shape or trace.shape, profile, config.system)

        # Cheap checks come before counting and looking ahead in the trace.
        policies = setup.policies()
        check_needs(trace, policies)
        if config.warm is not None:
            setup.calibration = warm_counts(
                config.warm, trace.shape, f"in {trace.path}"
            )
        # Only oracles may see it, and making it reads the trace.
        if any(policy.oracle for policy in policies.all()):
            if future is None:
                future = RecordedFuture.of(
                    trace, batch=config.batch, steps=config.steps
                )
            setup.future = future
        return setup

    def policies(self) -> Policies:
        """Fresh policies.

        Raises:
            PolicyError: an unknown policy or parameter, that of an unlimited host
                memory included.
        """
        host_cache = self.config.host_cache
        # Checked even where it is not used: a wrong name is wrong everywhere.
        resolve(host_cache, "cache")
        limited = self.memory.host is not None
        return self.system.build(
            gpus=self.profile.gpus, host_cache=host_cache if limited else None
        )

    @cached_property
    def memory(self) -> MemoryPlan:
        """Sizes of memories.

        Raises:
            PolicyError: contradicting options, or no room to stage even one expert.
        """
        artefacts = None
        if self.system.divides_slots:
            artefacts = load_artefacts(self.config.artefacts)
        return plan_memory(
            self.config.memory,
            self.shape,
            self.profile,
            self.system,
            artefacts,
            kv_bytes=self.kv_bytes,
        )

    @property
    def cache(self) -> CacheSize:
        """The expert cache of all cards that share the layers."""
        return of_all_cards(self.memory, self.shape, self.profile.gpus)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all sequences, which a GPU holds."""
        of_sequence = kept_bytes(self.shape, self.config.context_tokens)
        return self.config.batch * of_sequence

    def costs(self) -> Costs:
        """Seconds of this model's operations on this machine, as the system uses it."""
        return Costs(
            self.profile,
            self.shape,
            pageable=self.system.pageable,
            kernels=self.system.kernels,
            polls=self.system.polls,
        )

    def planner(self) -> Planner:
        """A fresh planner.

        Raises:
            PolicyError: an oracle without a future, or an impossible memory.
        """
        return Planner(
            self.shape,
            self.costs(),
            self.policies(),
            self.memory,
            seed=self.config.seed,
            future=self.future,
            calibration=self.calibration,
            extras=load_artefacts(self.config.artefacts),
        )

    def gpu_bytes(self) -> int:
        """Memory of each GPU for weights: cache, staging, and what is no expert."""
        return sum(self.weights_bill().values())

    def weights_bill(self) -> dict[str, int]:
        """The same by item."""
        plan = self.memory
        split = sharing_cards(plan.gpu_split, self.profile.gpus)
        cached_bytes = plan.gpu.total_bytes
        # One pool for all layers is that of one card already.
        if plan.gpu.scope == PER_LAYER:
            cached_bytes //= split
        return {
            "cache": cached_bytes,
            "staging": plan.staging * self.shape.max_expert_bytes,
            "dense weights": self.shape.other_bytes // split,
        }

    def fits_card(self) -> bool:
        """True if the cache got a default size although every expert would fit."""
        memory = self.config.memory
        left = left_on_card(
            memory, self.shape, self.profile, self.memory.staging, self.kv_bytes
        )
        is_enough = left is not None and left >= self.shape.routed_bytes
        return is_enough and not memory.is_stated

    def gpu_bill(self) -> dict[str, int]:
        """Contents of each GPU: item -> bytes; beside weights only where no size of the
        cache was stated, since that leaves room for it.
        """
        memory = self.config.memory
        bill = self.weights_bill()
        if not memory.is_stated and self.profile.accelerator != HOST_ACCELERATOR:
            bill |= card_bill(memory, self.shape, self.profile, self.kv_bytes)
        return bill

    def effective_config(self, trace: Trace | None) -> dict[str, Any]:
        """The effective configuration of a run, as results store it.

        What was left open is decided here: sizes of memories, parameters of policies.
        ``options`` repeats the run (`moesim replay --config run.json`).

        Args:
            trace: that of the run; None for a live model.
        """
        config = self.config
        shape = self.shape
        profile = self.profile
        system = self.system
        plan = self.memory
        warm = config.warm.path if isinstance(config.warm, Trace) else config.warm
        # Reading the whole file once is enough.
        digest = None if trace is None else trace.digest()
        hw = _source(profile)
        # What repeats this run, with its files and their digests.
        repeated = config.replaced(
            trace=None if trace is None else trace.path,
            trace_digest=digest,
            hw=hw,
            # A profile that was measured just now cannot be loaded again.
            hw_digest=None if hw is None else profile.digest,
            warm=warm,
        )
        return {
            "trace": None if trace is None else trace.name,
            "trace_digest": digest,
            # What of the trace was drawn and not recorded; empty for a recorded one.
            "synthetic": [] if trace is None else synthetic_caveats(trace.header),
            "model": shape.name,
            # Sizes of it that rest on defaults or on rules of thumb.
            "assumed": list(shape.assumed),
            "hw": profile.name,
            "hw_kind": profile.kind,
            "hw_digest": profile.digest,
            "prediction_error": prediction_error(profile),
            **{kind: getattr(system, kind) for kind in KINDS},
            "oracle": self.future is not None,
            "cache_scope": plan.gpu.scope,
            "cache_slots": self.cache.slots.tolist(),
            "cache_bytes": self.cache.total_bytes,
            "cache_ratio": self.cache.total_bytes / shape.routed_bytes,
            "gpus": profile.gpus,
            "gpu_bytes": self.gpu_bytes(),
            "gpu_bill": self.gpu_bill(),
            "fits_card": self.fits_card(),
            "host_bytes": None if plan.host is None else plan.host.total_bytes,
            "staging": plan.staging,
            "prefetch_budget_bytes": plan.prefetch_budget_bytes,
            "gpu_split": plan.gpu_split,
            "batch": config.batch,
            "micro_batch": config.passes.micro_batch_tokens,
            "draft_tokens": config.passes.draft_tokens,
            "acceptance": config.passes.acceptance,
            "steps": config.steps,
            "seed": config.seed,
            "filled_by": "calibration" if warm is not None else "its policy, or empty",
            "warm": None if warm is None else str(warm),
            "artefacts": None if config.artefacts is None else str(config.artefacts),
            "git_commit": git_commit(),
            "version": __version__,
            # Every policy with all its parameters, defaults included.
            "policies": {
                **{kind: settings(getattr(system, kind), kind) for kind in KINDS},
                "host_cache": settings(config.host_cache, "cache"),
            },
            "options": repeated.to_json(),
            # Where those of one layer differ, slots count the largest.
            **({"expert_sizes": shape.expert_sizes} if shape.bytes_by_expert else {}),
        }


def refuse_arrivals(config: RunConfig, caller: str) -> None:
    """Refuse a configuration with arrivals where a batch is there from the beginning.

    Raises:
        ConfigError: it has some.
    """
    if config.arrivals is not None:
        raise ConfigError(
            f"arrivals: {caller} knows no requests that come later, found"
            f" {config.arrivals!r}; remove it, or use `moesim replay`"
        )


def refuse_drafts(config: RunConfig, caller: str) -> None:
    """Refuse a configuration that drafts tokens where nothing can draft them.

    Raises:
        ConfigError: it does.
    """
    drafted = config.passes.draft_tokens
    if drafted:
        raise ConfigError(
            f"draft_tokens: {caller} cannot draft, found {drafted}; set it to 0, or use"
            " `moesim replay`"
        )


def check_digests(config: RunConfig, trace: Trace, profile: HardwareProfile) -> None:
    """Refuse another trace or machine than those that a configuration names.

    Raises:
        ConfigError: naming the file and both digests.
    """
    expected = config.trace_digest
    if expected is not None and trace.digest() != expected:
        raise ConfigError(
            f"{trace.path}: expected a file with SHA-256 {expected:.12}…, as this run"
            f" was made with, found {trace.digest():.12}…; name the trace, to run on"
            " this one"
        )
    expected = config.hw_digest
    if expected is not None and profile.digest != expected:
        raise ConfigError(
            f"profile {profile.where}: expected digest {expected:.12}…, as this run was"
            f" made with, found {profile.digest:.12}…; name the profile (--hw), to run"
            " on this one"
        )


def _source(profile: HardwareProfile) -> str | None:
    """Return what loads a profile again: its file, or the name of one that ships."""
    path = Path(profile.where)
    if path.is_file():
        return str(path.absolute())
    return path.stem if ships(path.stem) else None


def figures_of(planner: Planner) -> dict[str, Any]:
    """Figures of a run that only its planner knows, not the tables."""
    high_bytes = {
        f"gpu{index}": memory.used_high_bytes
        for index, memory in enumerate(planner.gpu)
    }
    if planner.host:
        high_bytes["host"] = planner.host.memory.used_high_bytes
    mass = float(np.mean(planner.gate_mass)) if planner.gate_mass else None
    return {
        "routing": "altered" if planner.policies.routing.alters else "recorded",
        "approximate": planner.policies.assignment.approximates,
        "gate_mass_kept": mass,
        "memory_high_bytes": high_bytes,
    }


def begins(planner: Planner, calibration: np.ndarray | None) -> str:
    """What the caches of the GPUs hold at the beginning: ``empty``, ``all experts``,
    ``lowest ids``, ``calibrated``, or ``own choice`` of the cache policy.

    Args:
        planner: before its first step.
        calibration: counts that may fill caches; None for none.
    """
    words: dict[str, None] = {}
    for memory in planner.gpu:
        there = np.flatnonzero(np.asarray(memory.state) == RESIDENT)
        ids = there % planner.experts
        counts = np.bincount(there // planner.experts, minlength=planner.layers)
        if not len(there):
            word = "empty"
        elif len(there) == planner.layers * planner.experts:
            word = "all experts"
        elif (ids < counts[there // planner.experts]).all() and counts.min():
            word = "lowest ids"
        else:
            word = "own choice"
            # Whole layers, for one, are no choice by counts.
            if calibration is not None:
                chosen = calibration.reshape(-1)[there].mean()
                word = "calibrated" if chosen > 1.01 * calibration.mean() else word
        words[word] = None
    return ", ".join(words)


def opened(config: RunConfig) -> tuple[RunConfig, Trace]:
    """A configuration that holds its trace opened, and that trace.

    Raises:
        TraceError, ConfigError: as `trace_of`.
    """
    trace = trace_of(config)
    # It is the same trace, so what its digest must be stays as well.
    return config.replaced(trace=trace, trace_digest=config.trace_digest), trace


def trace_of(config: RunConfig) -> Trace:
    """The trace of a configuration, opened, in the passes of its system.

    Raises:
        TraceError: no such trace, or a damaged one.
        ConfigError: the configuration names none.
    """
    if config.trace is None:
        raise ConfigError("trace: expected a trace, got none")
    trace = config.trace
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    return opened.cut(config.passes)


def profile_of(hw: str | Path | HardwareProfile | None) -> HardwareProfile:
    """A profile by name, path or itself; None takes the default (see
    `moesim.hwprofiles.profile.default_profile`).
    """
    if hw is None:
        return default_profile()
    if isinstance(hw, HardwareProfile):
        return hw
    if not isinstance(hw, str | Path):
        raise ConfigError(f"hw: expected a machine by name, path or itself, got {hw!r}")
    return load_profile(hw)


def watts(profile: HardwareProfile) -> dict[str, tuple[float, float]] | None:
    """Idle and busy watts by lane, as the metrics take them."""
    # Datasheets rarely say; energy is left out then.
    power = profile.power
    if power is None:
        return None
    lanes = {lane: (power.idle_w[lane], power.busy_w[lane]) for lane in profile.lanes}
    return {**lanes, "platform": (power.platform_idle_w, 0.0)}


def needed_columns(policies: Policies) -> tuple[str, ...]:
    """Optional trace columns that some policy of a run reads."""
    # A dict keeps the order, so that columns are read in the same one every time.
    return tuple(
        dict.fromkeys(column for policy in policies.all() for column in policy.needs)
    )


def check_needs(trace: Trace, policies: Policies) -> None:
    """Refuse, before anything runs, a policy whose column the trace lacks.

    Raises:
        TraceError: naming policy and column.
    """
    for kind, policy in _by_kind(policies):
        trace.require(policy.needs, f"{kind} policy {policies.names.get(kind)!r}")


def refuse_oracles(policies: Policies, why: str) -> None:
    """Refuse a policy that needs the future where there is none.

    Raises:
        PolicyError: naming the policy, and why.
    """
    for kind, policy in _by_kind(policies):
        if policy.oracle:
            raise PolicyError(
                f"{kind} policy {policies.names[kind]!r} is an oracle: {why}"
            )


def _by_kind(policies: Policies) -> tuple[tuple[str, Policy], ...]:
    return (
        ("assignment", policies.assignment),
        ("prefetch", policies.prefetch),
        ("cache", policies.caches[0]),
        ("routing", policies.routing),
    )


def warm_counts(
    warm: str | Path | Trace, expected: ModelShape, where: str
) -> np.ndarray:
    """Count how often a calibration trace uses each expert, float64 [L, E]: what
    ``--warm`` fills caches from.

    Args:
        warm: the trace.
        expected: layers and experts that it must have.
        where: they are so, in words.

    Raises:
        TraceError: no such trace.
        PolicyError: it has other layers or experts.
    """
    trace = of_model("--warm", warm, expected, where)
    shape = trace.shape
    counts = np.zeros(shape.layers * shape.experts)
    for rows in trace.sequences():
        # One number per expert of any layer, so that one count serves all layers.
        first = rows.layer.astype(np.int64)[:, None] * shape.experts
        chosen = rows.experts.astype(np.int64) + first
        counts += np.bincount(chosen.ravel(), minlength=len(counts))
    return counts.reshape(shape.layers, shape.experts)


def of_model(
    option: str, named: str | Path | Trace, expected: ModelShape, where: str
) -> Trace:
    """A trace of a model with as many layers and experts as another.

    Args:
        option: that names it.
        named: the trace.
        expected: the other model's.
        where: it has so many, in words.

    Raises:
        TraceError: no such trace.
        PolicyError: it has other layers or experts.
    """
    trace = named if isinstance(named, Trace) else open_trace(named)
    shape = trace.shape
    if (shape.layers, shape.experts) != (expected.layers, expected.experts):
        raise PolicyError(
            f"{option} {trace.path}: expected {expected.layers} layers x"
            f" {expected.experts} experts as {where}, found {shape.layers} x"
            f" {shape.experts}; record it from that model"
        )
    return trace


SUFFIXES = (".npy", ".npz", ".safetensors")
TENSORS = (
    "activation_counts",
    "activation_matrices",
    "prefetch_accuracy",
    "residual",
    "sensitivity",
    "single_share",
    "transitions",
)
"""Tensors that policies know by their own names, whatever file they lie in (`moesim
record --calibration`).
"""


def load_artefacts(place: str | Path | None) -> dict[str, Any]:
    """Read every tensor file of a folder, or one tensor file; nothing for None.

    Returns:
        Name without suffix -> the array of a ``.npy``, the named arrays of an ``.npz``
        or ``.safetensors``: what policies see as `RunContext.extras`. Arrays named as
        in `TENSORS` are there under their own names as well.

    Raises:
        PolicyError: no such path, no tensor file in it, or two files with the same
            tensor of `TENSORS`.
        TraceError: a damaged file.
    """
    if place is None:
        return {}
    artefacts: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    for path in artefact_files(Path(place)):
        for name, content in _named(path).items():
            # A policy asks by name, so two answers would be one too many.
            if name in TENSORS and name in origin:
                raise PolicyError(
                    f"--artefacts {place}: {name}: expected one file with it, found"
                    f" {origin[name].name} and {path.name}; keep one of them"
                )
            origin[name] = path
            artefacts[name] = content
    if not artefacts:
        raise PolicyError(
            f"--artefacts {place}: expected files {', '.join(SUFFIXES)}, found none; is"
            " it the right folder?"
        )
    return artefacts


def artefact_files(place: Path) -> list[Path]:
    """The tensor files of a folder, sorted, or one such file.

    Raises:
        PolicyError: no such path, or a file of another kind.
    """
    if not (place.is_dir() or (place.is_file() and place.suffix in SUFFIXES)):
        raise PolicyError(
            f"--artefacts {place}: no such folder; `moesim train-cache TRACE --out"
            f" {place}` makes one"
        )
    # Sorted, so that the same folder gives the same order on every file system.
    paths = sorted(place.iterdir()) if place.is_dir() else [place]
    return [path for path in paths if path.suffix in SUFFIXES]


def _named(path: Path) -> dict[str, np.ndarray | dict[str, np.ndarray]]:
    """Return one file's contribution: its content by its name, and known tensors."""
    # Few runs read other formats.
    from moesim.traces.importers.readers.arrays import (
        load_named,
    )

    arrays = load_named(path)
    if path.suffix == ".npy":
        return {path.stem: arrays[""]}
    # Files of calibrations hold many tensors, and policies ask for single ones.
    known = {name: arrays[name] for name in TENSORS if name in arrays}
    return {path.stem: arrays, **known}
