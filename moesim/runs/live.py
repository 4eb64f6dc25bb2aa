"""Live runs on this machine: a model's own gates decide, its tokens come out, and
policies say where experts work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies.base import PolicyError
from moesim.runs.config import MeasuredConfig, takes_options
from moesim.runs.machine import device_of, machine_profile, open_model_store
from moesim.runs.measured import MeasuredRun, execute, finish, rehearse
from moesim.runs.setup import Setup, needed_columns, refuse_oracles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.systems import Policies
    from moesim.runs.config import MemorySize
    from moesim.runs.machine import Building
    from moesim.runtime.executor.executor import Executor, StepInfo
    from moesim.runtime.executor.live import LiveResult, Verdict
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.models.offloaded import OffloadedModel
    from moesim.runtime.record.calibration import Residual
    from moesim.runtime.store.store import ExpertStore
    from moesim.traces.format.batch import RoutedStep


@dataclass(slots=True)
class LiveMeasuredRun(MeasuredRun):
    """A finished live run.

    Attributes:
        texts: what was generated, per prompt.
        tokens: the same as token ids.
        steps: what the gates decided.
        verification: how far logits are from the plain model's; None if they were not
            compared.
    """

    texts: list[str]
    tokens: list[list[int]]
    steps: list[RoutedStep]
    verification: Verdict | None

    def to_json(self) -> dict[str, Any]:
        """As `MeasuredRun.to_json`, with texts and the verification."""
        verification = None
        if self.verification is not None:
            verification = {
                **self.verification._asdict(),
                "passed": self.verification.passed,
            }
        return {
            **MeasuredRun.to_json(self),
            "texts": self.texts,
            "verify": verification,
        }


@takes_options(MeasuredConfig, without=["trace"])
def run_live(
    model: MeasuredConfig | str | Path,
    prompts: Sequence[str | bytes],
    policy: str | None = None,
    *,
    memory: MemorySize | None = None,
    out: str | Path | None = None,
    perfetto: str | Path | None = None,
    progress: Callable[[StepInfo], None] | None = None,
    building: Building | None = None,
    **options: Any,
) -> LiveMeasuredRun:
    """Generate with a model whose experts are computed where a policy says.

    Args:
        model: ``tiny``, or a Hugging Face folder; or a configuration that names one,
            whose options those given here replace.
        prompts: texts.
        policy: as in `moesim.runs.measured.run_trace`; oracles are refused.
        memory, out, perfetto, progress, building: as there.
        options: fields of `moesim.runs.config.MeasuredConfig`. `residual` may be the
            vectors themselves; they are calibrated now for ``tiny`` when None.

    Raises:
        TypeError: an unknown option.
        ConfigError: a value that does not fit its option.
        TraceError, ProfileError, PolicyError, StoreError: bad input, in one line.
        RuntimeFault: the machine does not give what the run needs.
    """
    from moesim.runtime.executor import live  # noqa: PLC0415 - torch
    from moesim.runtime.models import local_model  # noqa: PLC0415 - torch

    # The model stands where traces stand in other functions.
    if not isinstance(model, MeasuredConfig):
        model = MeasuredConfig(model=model)
    config = MeasuredConfig.of(model, policy, memory=memory, **options)
    profile = machine_profile(config.hw, store=config.store_folder)
    # Loading a model takes minutes, so what cannot be is refused before.
    policies = config.system.build(gpus=1, host_cache=None)
    _refuse(policies, verify=config.verify)

    device = device_of(profile)
    loaded = _Loaded.of(config, needed_columns(policies), device)
    ids = live.encode(loaded.local, prompts)

    begin_s = time.perf_counter()
    store = open_model_store(loaded.folder, config.store, loaded.dtype, building)
    try:
        loaded.offloaded.check_store(store)
        store_s = time.perf_counter() - begin_s
        # Libraries initialise themselves at their first call, which is not to be timed.
        live.warm_up(loaded.offloaded, store)
        shape = live.live_shape(loaded.offloaded, loaded.folder, store)
        setup = Setup(config, shape, profile, config.system)
        run, result = _generate(
            loaded, setup, store, device, ids, out=out, progress=progress
        )
    finally:
        # A store that was handed over open is still in use.
        if store is not config.store:
            store.close()

    run.startup |= {
        "store_s": store_s,
        "dense_s": loaded.loading_s,
        "dense_bytes": loaded.offloaded.dense_bytes,
    }
    # Vectors that were calibrated just now lie in no file.
    named = config.residual if isinstance(config.residual, str | Path) else None
    setup.config = config.replaced(
        model="tiny" if loaded.is_tiny else str(loaded.folder.absolute()),
        store=None if config.store is None else store.directory,
        residual=named,
    )
    run.config |= setup.effective_config(None) | {
        **_described(config),
        "trace": f"{len(ids)} prompts",
        "dtype": loaded.dtype,
        "store": str(store.directory),
        "residual": None if loaded.residual is None else loaded.residual.id,
    }
    run.warnings += _warnings(run)
    finish(run, setup, result.steps, out=out, perfetto=perfetto, decided=True)

    verification = None
    # Loaded only now, so that the run has the memory to itself.
    if config.verify:
        plain = local_model.load_weights(loaded.folder, loaded.dtype)
        plain = plain.eval().to(device.device)
        verification = live.verify(plain, result.passes, loaded.dtype)
    measured = {each.name: getattr(run, each.name) for each in fields(run)}
    return LiveMeasuredRun(
        **measured,
        texts=[loaded.local.decode(tokens) for tokens in result.tokens],
        tokens=result.tokens,
        steps=result.steps,
        verification=verification,
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model as a live run needs it.

    Attributes:
        config: what the user asked for.
        folder: of its checkpoint.
        is_tiny: whether it is the one that ships.
        dtype: that it computes in.
        residual: vectors for ``pred1_res``; None where no policy needs them.
        offloaded: the model without its experts.
        local: the same with what reads and writes text.
        loading_s: seconds that loading took.
    """

    config: MeasuredConfig
    folder: Path
    is_tiny: bool
    dtype: str
    residual: Residual | None
    offloaded: OffloadedModel
    local: LocalModel
    loading_s: float

    @classmethod
    def of(cls, config: MeasuredConfig, columns: Sequence[str], device: Any) -> _Loaded:
        """Load what a configuration names, for policies that need these columns."""
        from moesim.runtime.models import checkpoint, local_model  # noqa: PLC0415 - torch
        from moesim.runtime.models.expert_layout import (  # noqa: PLC0415 - torch
            dtype_name,
            torch_dtype,
        )
        from moesim.runtime.models.offloaded import OffloadedModel  # noqa: PLC0415
        from moesim.runtime.record.calibration import residual_for  # noqa: PLC0415

        is_tiny = str(config.model) == "tiny"
        folder = local_model.tiny_dir() if is_tiny else Path(str(config.model))
        # Many CPUs only emulate the shipped model's bfloat16.
        dtype = config.dtype or (
            "float32" if is_tiny else dtype_name(checkpoint.checkpoint_dtype(folder))
        )
        shipped = partial(local_model.load_model, "tiny") if is_tiny else None
        residual = residual_for(columns, config.residual, shipped)

        begin_s = time.perf_counter()
        offloaded = OffloadedModel.load(
            folder, device=device.device, dtype=torch_dtype(dtype)
        )
        tokenizer = None
        if not is_tiny:
            tokenizer = local_model.load_tokenizer(folder, offloaded.model)
        local = local_model.LocalModel(
            folder.resolve().name, offloaded.model, tokenizer
        )
        loading_s = time.perf_counter() - begin_s
        return cls(
            config=config,
            folder=folder,
            is_tiny=is_tiny,
            dtype=dtype,
            residual=residual,
            offloaded=offloaded,
            local=local,
            loading_s=loading_s,
        )


def _generate(
    loaded: _Loaded,
    setup: Setup,
    store: ExpertStore,
    device: Any,
    ids: Sequence[Sequence[int]],
    *,
    out: str | Path | None,
    progress: Callable[[StepInfo], None] | None,
) -> tuple[MeasuredRun, LiveResult]:
    """Run the model on encoded prompts; the measured run, and what was generated."""
    from moesim.runtime.executor import live  # noqa: PLC0415 - torch

    config = loaded.config
    columns = needed_columns(setup.policies())
    rehearse(setup.planner(), live.made_up_steps(setup.shape, columns))
    generations: list[live.LiveRun] = []

    def forward(executor: Executor) -> live.LiveRun:
        generation = live.LiveRun(
            loaded.offloaded,
            loaded.local,
            executor,
            ids,
            new_tokens=config.new_tokens,
            batch=config.batch,
            columns=columns,
            residual=loaded.residual,
            temperature=config.temperature,
            seed=config.seed,
            keep_passes=config.verify,
        )
        # Kept, as `execute` returns times and tables but no tokens.
        generations.append(generation)
        return generation

    run = execute(
        setup,
        store,
        device,
        forward,
        gatings=[layer.gating for layer in loaded.offloaded.layers],
        out=out,
        progress=progress,
    )
    return run, generations[0].result


def _described(config: MeasuredConfig) -> dict[str, Any]:
    """Describe what a live run's options mean for its effective configuration."""
    return {
        "world": "measured",
        "mode": "live",
        "model": str(config.model),
        "host_cache": config.host_cache,
        # A live model runs until its texts end.
        "steps": None,
        "new_tokens": config.new_tokens,
        "temperature": config.temperature,
    }


def _refuse(policies: Policies, *, verify: bool) -> None:
    """Refuse, before a model is loaded, what cannot be had.

    Raises:
        PolicyError: an oracle, or a policy that changes answers where they are to be
            verified.
    """
    refuse_oracles(
        policies,
        "a live model has no future; replay a recorded trace, or choose a policy that"
        " sees the past only",
    )
    # A difference would be no error then, so there is nothing to verify.
    if verify and policies.routing.alters:
        raise PolicyError(
            f"--verify: routing policy {policies.names['routing']!r} alters the model's"
            " output on purpose; drop one of them"
        )
    if verify and policies.assignment.approximates:
        raise PolicyError(
            f"--verify: assignment policy {policies.names['assignment']!r} starts"
            " experts one layer early or joins them one late, an approximation; drop"
            " one of them"
        )


def _warnings(run: MeasuredRun) -> list[str]:
    """In what the answers of a run differ from the model's."""
    warnings = []
    if run.metrics["routing"] == "altered":
        warnings.append("routing is altered: these are not the answers of the model")
    if run.metrics["approximate"]:
        warnings.append(
            "experts started one layer early or joined one late: answers approximate"
            " the model's"
        )
    return warnings
