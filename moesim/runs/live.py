"""Live runs on this machine: a model's own gates decide, its tokens come out, policies
say where experts work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies.base import PolicyError
from moesim.policies.systems import compose
from moesim.runs import replay as api
from moesim.runs.measured import (
    MeasuredRun,
    default_store,
    device_of,
    execute,
    finish,
    machine_profile,
    rehearse,
)
from moesim.runs.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.hwprofiles.profile import HardwareProfile
    from moesim.policies.planner.plan import Policies
    from moesim.runtime.executor.executor import Executor, StepInfo
    from moesim.runtime.executor.live import Verdict
    from moesim.runtime.record.residual import Residual
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.batch import RoutedStep


@dataclass(slots=True)
class LiveMeasuredRun(MeasuredRun):
    """A finished live run.

    Attributes:
        texts: what was generated, per prompt.
        tokens: the same as token ids.
        steps: what the gates decided.
        verdict: how far logits are from the plain model's, where that was asked.
    """

    texts: list[str]
    tokens: list[list[int]]
    steps: list[RoutedStep]
    verdict: Verdict | None

    def to_json(self) -> dict[str, Any]:
        """As `MeasuredRun.to_json`, with texts and the verdict."""
        verdict = (
            None
            if self.verdict is None
            else {**self.verdict._asdict(), "passed": self.verdict.passed}
        )
        return {**MeasuredRun.to_json(self), "texts": self.texts, "verify": verdict}


def run_live(
    model: str | Path,
    prompts: Sequence[str | bytes],
    policy: str = "greedy",
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    residual: str | Path | Residual | None = None,
    verify: bool = False,
    store: str | Path | ExpertStore | None = None,
    dtype: str | None = None,
    cache: str | None = None,
    prefetch: str | None = None,
    routing: str | None = None,
    host_cache: str = "lru",
    hw: str | Path | HardwareProfile | None = None,
    memory: api.MemoryOptions | None = None,
    batch: int = 1,
    seed: int = 0,
    artefacts: str | Path | None = None,
    out: str | Path | None = None,
    perfetto: str | Path | None = None,
    own_cores: bool = False,
    progress: Callable[[StepInfo], None] | None = None,
    building: Callable[[int, int], None] | None = None,
) -> LiveMeasuredRun:
    """Generate with a model whose experts are computed where a policy says.

    Args:
        model: ``tiny``, or a Hugging Face folder.
        prompts: texts.
        policy: as in `run_trace`; oracles are refused.
        max_new_tokens: per prompt.
        temperature: 0 decodes greedily.
        residual: vectors for ``pred1_res`` or their file; calibrated now for ``tiny``
            when None.
        verify: compare all logits with the plain model's afterwards.
        store: the model's experts, open or as a folder, built there if it is not; None
            takes `default_store`.
        dtype: to compute in; the checkpoint's own when None (float32 for ``tiny``).
        cache, prefetch, routing, host_cache, hw, memory, batch, seed, artefacts: as in
        `moesim.runs.measured.run_trace`.
        out, perfetto, own_cores, progress, building: as there.

    Raises:
        TraceError, ProfileError, PolicyError, StoreError: bad input, in one line.
        RuntimeFault: the machine does not give what the run needs.
    """
    from moesim.runtime.executor import live  # noqa: PLC0415 - torch
    from moesim.runtime.models.expert_layout import torch_dtype  # noqa: PLC0415
    from moesim.runtime.models.local_model import load_model  # noqa: PLC0415
    from moesim.runtime.models.offloaded import OffloadedModel  # noqa: PLC0415
    from moesim.runtime.models.tiny import tiny_dir  # noqa: PLC0415
    from moesim.runtime.record.residual import residual_for  # noqa: PLC0415

    profile = machine_profile(hw)
    system = compose(policy, cache=cache, prefetch=prefetch, routing=routing)
    tiny = str(model) == "tiny"
    folder = tiny_dir() if tiny else Path(model)
    chosen = dtype or ("float32" if tiny else _own_dtype(folder))
    parts = system.build(gpus=1, host_cache=None)
    _refuse(parts, verify=verify)
    vectors = residual_for(
        api.needed_columns(parts),
        residual,
        partial(load_model, "tiny") if tiny else None,
    )
    begin_s = time.perf_counter()
    device = device_of(profile)
    offloaded = OffloadedModel.load(
        folder, device=device.device, dtype=torch_dtype(chosen)
    )
    dense_s = time.perf_counter() - begin_s
    local = live.reader_of(folder, offloaded, tiny=tiny)
    ids = live.encode(local, prompts)
    begin_s = time.perf_counter()
    own = open_model_store(folder, store, chosen, building)
    try:
        offloaded.check_store(own)
        store_s = time.perf_counter() - begin_s
        live.warm_up(offloaded, own)
        setup = Setup(
            live.live_shape(offloaded, folder, own),
            profile,
            system,
            memory or api.MemoryOptions(),
            host_cache,
            seed,
            artefacts=artefacts,
        )
        columns = api.needed_columns(setup.policies())
        rehearse(setup.planner(), live.made_up_steps(setup.shape, columns))
        runs: list[live.LiveRun] = []

        def forward(executor: Executor) -> live.LiveRun:
            runs.append(
                live.LiveRun(
                    offloaded,
                    local,
                    executor,
                    ids,
                    max_new_tokens=max_new_tokens,
                    batch=batch,
                    columns=columns,
                    residual=vectors,
                    temperature=temperature,
                    seed=seed,
                    keep_passes=verify,
                )
            )
            return runs[0]

        gatings = [layer.gating for layer in offloaded.layers]
        run = execute(
            setup,
            own,
            device,
            forward,
            gatings=gatings,
            out=out,
            progress=progress,
            own_cores=own_cores,
        )
    finally:
        if own is not store:
            own.close()
    result = runs[0].result
    run.startup |= {
        "store_s": store_s,
        "dense_s": dense_s,
        "dense_bytes": offloaded.dense_bytes,
    }
    run.config |= _live_config(setup, model, chosen, own, prompts=len(ids)) | {
        "batch": batch,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "residual": None if vectors is None else vectors.id,
    }
    if run.metrics["routing"] == "altered":
        run.warnings.append(
            "routing is altered: these are not the answers of the model"
        )
    if run.metrics["approximate"]:
        run.warnings.append(
            "experts computed ahead saw the layer before's input: answers approximate"
            " the model's"
        )
    finish(run, setup, result.steps, out, perfetto, decided=True)
    verdict = None
    if verify:
        verdict = live.verify(
            load_model(
                "tiny" if tiny else folder, dtype=chosen, device=str(device.device)
            ).model,
            result.passes,
            chosen,
        )
    return LiveMeasuredRun(
        run.metrics,
        run.timeline,
        run.config,
        run.warnings,
        run.shape,
        run.result,
        run.decision_log,
        run.startup,
        None,
        [local.decode(tokens) for tokens in result.tokens],
        result.tokens,
        result.steps,
        verdict,
    )


def _own_dtype(folder: Path) -> str:
    """Name the type that a checkpoint's weights have."""
    from moesim.runtime.models.configuration import read_config  # noqa: PLC0415 - torch

    return str(read_config(folder)[0].dtype or "float32").removeprefix("torch.")


def _refuse(parts: Policies, *, verify: bool) -> None:
    """Say, before a model is loaded, what cannot be had.

    Raises:
        PolicyError: an oracle, or a policy that changes answers where they are to be
            verified.
    """
    for kind, one in (
        ("assignment", parts.assignment),
        ("prefetch", parts.prefetch),
        ("cache", parts.caches[0]),
    ):
        if one.oracle:
            raise PolicyError(
                f"{kind} policy {parts.names[kind]!r} is an oracle: a live model has no"
                " future; replay a recorded trace, or choose a policy that sees the"
                " past only"
            )
    if verify and parts.routing.alters:
        raise PolicyError(
            f"--verify: routing policy {parts.names['routing']!r} alters the model's"
            " output on purpose; drop one of them"
        )
    if verify and parts.assignment.approximates:
        raise PolicyError(
            f"--verify: assignment policy {parts.names['assignment']!r} computes"
            " experts ahead on the layer before's input, an approximation; drop one of"
            " them"
        )


def open_model_store(
    folder: Path,
    store: str | Path | ExpertStore | None,
    dtype: str,
    building: Callable[[int, int], None] | None = None,
) -> ExpertStore:
    """Open a model's store, or build it first (or continue a build that was
    stopped).
    """
    from moesim.runtime.models.checkpoint import checkpoint_digest  # noqa: PLC0415 - torch
    from moesim.runtime.store.build import build_store  # noqa: PLC0415
    from moesim.runtime.store.store import ExpertStore  # noqa: PLC0415

    if isinstance(store, ExpertStore):
        return store
    if store is None:
        store = default_store(
            f"{folder.resolve().name}-{checkpoint_digest(folder)[:12]}-{dtype}"
        )
    tell = (
        None
        if building is None
        else (lambda done: building(done.records, done.total_records))
    )
    return build_store(folder, store, dtype=dtype, progress=tell)


def _live_config(
    setup: Setup, model: str | Path, dtype: str, store: ExpertStore, *, prompts: int
) -> dict[str, Any]:
    shape = setup.shape
    profile = setup.profile
    system = setup.system
    plan = setup.memory
    return {
        "world": "measured",
        "mode": "live",
        "trace": f"{prompts} prompts",
        "model": str(model),
        "dtype": dtype,
        "hw": profile.name,
        "hw_kind": profile.kind,
        "hw_digest": profile.digest,
        "assignment": system.assignment,
        "cache": system.cache,
        "prefetch": system.prefetch,
        "routing": system.routing,
        "host_cache": setup.host_cache,
        "cache_scope": plan.gpu.scope,
        "cache_slots": plan.gpu.slots.tolist(),
        "cache_bytes": plan.gpu.total_bytes,
        "cache_ratio": plan.gpu.total_bytes / (sum(shape.expert_bytes) * shape.experts),
        "host_bytes": None if plan.host is None else plan.host.total_bytes,
        "staging": plan.staging,
        "prefetch_budget_bytes": setup.options.prefetch_budget_bytes,
        "gpu_split": plan.gpu_split,
        "seed": setup.seed,
        "store": str(store.directory),
        "steps": None,
        "artefacts": None if setup.artefacts is None else str(setup.artefacts),
    }
