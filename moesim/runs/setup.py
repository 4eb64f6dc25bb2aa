"""From what a user says to a planner: the same for virtual and for real seconds, so
that both worlds start alike.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import HardwareProfile, default_profile, load_profile
from moesim.policies.base import PolicyError
from moesim.policies.planner.plan import LAYERS
from moesim.policies.planner.planner import Planner
from moesim.policies.registry import resolve
from moesim.policies.systems import System, compose
from moesim.runs.artefacts import load_artefacts
from moesim.runs.memory import MemoryOptions
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import Trace, open_trace

if TYPE_CHECKING:
    from moesim.policies.planner.plan import MemoryPlan, Policies
    from moesim.traces.format.schema import ModelShape


@dataclass(slots=True)
class Setup:
    """What a run needs beside its lanes: one planner per call of `planner`, all alike.

    Attributes:
        shape: sizes of the experts, which may be larger or smaller than those of the
            trace.
        calibration: what fills caches beforehand, float64 [L, E].
        future: for policies that know it.
        artefacts: folder of tensors that policies ask for.
    """

    shape: ModelShape
    profile: HardwareProfile
    system: System
    options: MemoryOptions
    host_cache: str = "lru"
    seed: int = 0
    calibration: np.ndarray | None = None
    future: RecordedFuture | None = None
    artefacts: str | Path | None = None

    @classmethod
    def of(
        cls,
        trace: Trace,
        policy: str,
        profile: HardwareProfile,
        *,
        shape: ModelShape | None = None,
        cache: str | None = None,
        prefetch: str | None = None,
        routing: str | None = None,
        host_cache: str = "lru",
        memory: MemoryOptions | None = None,
        batch: int = 1,
        steps: int | None = None,
        seed: int = 0,
        warm: str | Path | Trace | None = None,
        artefacts: str | Path | None = None,
    ) -> Setup:
        """Set up a walk through a trace; arguments as those of
        `moesim.runs.replay.replay`.

        Args:
            shape: sizes of the experts; None takes the trace's.

        Raises:
            TraceError: the trace lacks a column that a policy reads.
            PolicyError: an unknown policy or parameter, impossible memories, or a
                `warm` trace of another model.
        """
        system = compose(policy, cache=cache, prefetch=prefetch, routing=routing)
        setup = cls(
            shape or trace.shape,
            profile,
            system,
            memory or MemoryOptions(),
            host_cache,
            seed,
            artefacts=artefacts,
        )
        policies = setup.policies()
        check_needs(trace, policies)
        if warm is not None:
            setup.calibration = warm_counts(warm, trace)
        if any(one.oracle for one in policies.all()):
            setup.future = RecordedFuture.of(trace, batch=batch, steps=steps)
        return setup

    def policies(self) -> Policies:
        """Fresh policies.

        Raises:
            PolicyError: an unknown policy or parameter, that of an unlimited host
                memory included.
        """
        resolve(self.host_cache, "cache")
        limited = self.memory.host is not None
        return self.system.build(
            gpus=self.profile.gpus, host_cache=self.host_cache if limited else None
        )

    @property
    def memory(self) -> MemoryPlan:
        """Sizes of memories.

        Raises:
            PolicyError: contradicting options, or no room to stage even one expert.
        """
        artefacts = (
            load_artefacts(self.artefacts) if self.system.divides_slots else None
        )
        return self.options.plan(self.shape, self.profile, self.system, artefacts)

    def planner(self) -> Planner:
        """A fresh planner.

        Raises:
            PolicyError: an oracle without a future, or an impossible memory.
        """
        return Planner(
            self.shape,
            Costs(self.profile, self.shape),
            self.policies(),
            self.memory,
            seed=self.seed,
            future=self.future,
            calibration=self.calibration,
            extras=load_artefacts(self.artefacts),
        )

    def gpu_bytes(self) -> int:
        """Memory that the run takes of each GPU: the cache, staging, and the weights
        that are no experts.
        """
        plan = self.memory
        split = self.profile.gpus if self.memory.gpu_split == LAYERS else 1
        cache_bytes = plan.gpu.total_bytes // split
        return (
            cache_bytes
            + plan.staging * self.shape.max_expert_bytes
            + self.shape.other_bytes // split
        )

    def config(
        self,
        trace: Trace,
        *,
        batch: int = 1,
        steps: int | None = None,
        warm: str | Path | Trace | None = None,
    ) -> dict[str, Any]:
        """The effective configuration of a run of `trace`, as results store it."""
        shape = self.shape
        profile = self.profile
        system = self.system
        plan = self.memory
        return {
            "trace": str(trace.path),
            "trace_digest": trace.digest(),
            "model": shape.name,
            "hw": profile.name,
            "hw_kind": profile.kind,
            "hw_digest": profile.digest,
            "assignment": system.assignment,
            "cache": system.cache,
            "prefetch": system.prefetch,
            "routing": system.routing,
            "oracle": self.future is not None,
            "cache_scope": plan.gpu.scope,
            "cache_slots": plan.gpu.slots.tolist(),
            "cache_bytes": plan.gpu.total_bytes,
            "cache_ratio": (
                plan.gpu.total_bytes / (sum(shape.expert_bytes) * shape.experts)
            ),
            "gpus": profile.gpus,
            "gpu_bytes": self.gpu_bytes(),
            "host_bytes": None if plan.host is None else plan.host.total_bytes,
            "staging": plan.staging,
            "prefetch_budget_bytes": self.options.prefetch_budget_bytes,
            "gpu_split": plan.gpu_split,
            "batch": batch,
            "steps": steps,
            "seed": self.seed,
            "filled_by": "calibration" if warm is not None else "its policy, or empty",
            "warm": (
                None
                if warm is None
                else str(warm.path if isinstance(warm, Trace) else warm)
            ),
            "artefacts": None if self.artefacts is None else str(self.artefacts),
            "git_commit": _git_commit(),
        }


def figures_of(planner: Planner) -> dict[str, Any]:
    """What a run's planner knows and its tables do not say."""
    return {
        "routing": "altered" if planner.policies.routing.alters else "recorded",
        "approximate": planner.policies.assignment.approximates,
        "gate_mass_kept": (
            float(np.mean(planner.gate_mass)) if planner.gate_mass else None
        ),
        "memory_high_bytes": {
            **{
                f"gpu{g}": tier.memory.used_high_bytes
                for g, tier in enumerate(planner.gpu)
            },
            **({"host": planner.host.memory.used_high_bytes} if planner.host else {}),
        },
    }


def profile_of(hw: str | Path | HardwareProfile | None) -> HardwareProfile:
    """A profile by name, path or itself; None takes the default (see
    `moesim.hwprofiles.profile.default_profile`).
    """
    if hw is None:
        return default_profile()
    return hw if isinstance(hw, HardwareProfile) else load_profile(hw)


def watts(profile: HardwareProfile) -> dict[str, tuple[float, float]] | None:
    """Idle and busy watts by lane, as the metrics take them."""
    power = profile.power
    if power is None:
        return None
    lanes = {lane: (power.idle_w[lane], power.busy_w[lane]) for lane in profile.lanes}
    return {**lanes, "platform": (power.platform_idle_w, 0.0)}


def needed_columns(policies: Policies) -> tuple[str, ...]:
    """Optional trace columns that some policy of a run reads."""
    return tuple(
        dict.fromkeys(column for policy in policies.all() for column in policy.needs)
    )


def check_needs(trace: Trace, policies: Policies) -> None:
    """Refuse, before anything runs, a policy whose column the trace lacks.

    Raises:
        TraceError: naming policy and column.
    """
    for kind, policy in (
        ("assignment", policies.assignment),
        ("prefetch", policies.prefetch),
        ("cache", policies.caches[0]),
        ("routing", policies.routing),
    ):
        trace.require(policy.needs, f"{kind} policy {policies.names.get(kind)!r}")


def activation_counts(trace: Trace, *, phase: int | None = None) -> np.ndarray:
    """How often each expert was chosen, float64 [L, E]: what ``--warm`` fills caches
    from.
    """
    shape = trace.shape
    counts = np.zeros(shape.layers * shape.experts)
    for rows in trace.sequences():
        chosen = (
            rows.experts.astype(np.int64)
            + rows.layer.astype(np.int64)[:, None] * shape.experts
        )
        if phase is not None:
            chosen = chosen[rows.phase == phase]
        counts += np.bincount(chosen.ravel(), minlength=len(counts))
    return counts.reshape(shape.layers, shape.experts)


def warm_counts(warm: str | Path | Trace, trace: Trace) -> np.ndarray:
    """`activation_counts` of a calibration trace, float64 [L, E].

    Raises:
        TraceError: no such trace.
        PolicyError: it has other layers or experts than `trace`.
    """
    calibration = warm if isinstance(warm, Trace) else open_trace(warm)
    if (calibration.shape.layers, calibration.shape.experts) != (
        trace.shape.layers,
        trace.shape.experts,
    ):
        raise PolicyError(
            f"--warm {calibration.path}: expected {trace.shape.layers} layers x"
            f" {trace.shape.experts} experts as in {trace.path}, found"
            f" {calibration.shape.layers} x {calibration.shape.experts}; record it from"
            " that model"
        )
    return activation_counts(calibration)


def _git_commit() -> str | None:
    """Commit of the checkout this runs in, or None outside one."""
    root = Path(__file__).resolve().parents[2]
    head = root / ".git" / "HEAD"
    if not head.is_file() or shutil.which("git") is None:
        return None
    text = head.read_text(encoding="utf-8").strip()
    if not text.startswith("ref: "):
        return text
    ref = root / ".git" / text[5:]
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else None
