"""Live runs on this machine: a model's own gates decide, its tokens come out, and
policies say where experts work.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.policies.base import PolicyError
from moesim.runs.config import MeasuredConfig, takes_options
from moesim.runs.machine import device_of, machine_profile, open_model_store
from moesim.runs.measured import (
    MeasuredRun,
    closed_after,
    execute,
    finish,
    rehearse,
)
from moesim.runs.result import save_run
from moesim.runs.setup import Setup, needed_columns, refuse_oracles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.policies.systems import Policies
    from moesim.runtime.executor.executor import Executor, StepInfo
    from moesim.runtime.store.store import BuildProgress


@takes_options(MeasuredConfig, without=["trace"])
def run_live(
    model: MeasuredConfig | str | Path,
    prompts: Sequence[str | bytes],
    policy: str | None = None,
    *,
    out: str | Path | None = None,
    perfetto: str | Path | None = None,
    progress: Callable[[StepInfo], None] | None = None,
    building: Callable[[BuildProgress], None] | None = None,
    **options: Any,
) -> MeasuredRun:
    """Generate with a model whose experts are computed where a policy says.

    Args:
        model: ``tiny``, or a Hugging Face folder; or a configuration that names one,
            whose options those given here replace.
        prompts: texts.
        policy: as in `moesim.runs.measured.run_trace`; oracles are refused.
        out, perfetto, progress, building: as there.
        options: fields of `moesim.runs.config.MeasuredConfig`. `residual` may be the
            vectors themselves; they are calibrated now for ``tiny`` when None.

    Raises:
        TypeError: an unknown option.
        ConfigError: a value that does not fit its option.
        TraceError, ProfileError, PolicyError, StoreError: bad input, in one line.
        RuntimeFault: the machine does not give what the run needs.
    """
    from moesim.runtime.executor import live  # noqa: PLC0415 - torch
    from moesim.runtime.models import checkpoint, local_model  # noqa: PLC0415 - torch
    from moesim.runtime.models.expert_layout import (  # noqa: PLC0415 - torch
        dtype_name,
        torch_dtype,
    )
    from moesim.runtime.models.offloaded import OffloadedModel  # noqa: PLC0415 - torch
    from moesim.runtime.record.calibration import residual_for  # noqa: PLC0415 - torch

    # The model stands where traces stand in other functions.
    if not isinstance(model, MeasuredConfig):
        model = MeasuredConfig(model=model)
    config = MeasuredConfig.of(model, policy, **options)
    profile = machine_profile(config.hw, store=config.store_folder)
    # Loading a model takes minutes, so what cannot be is refused before.
    policies = config.system.build(gpus=1, host_cache=None)
    _refuse(policies, verify=config.verify)
    columns = needed_columns(policies)

    device = device_of(profile)
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
    name = folder.resolve().name
    local = local_model.LocalModel(name, offloaded.model, tokenizer)
    dense_s = time.perf_counter() - begin_s
    ids = live.encode(local, prompts)

    generations: list[live.LiveRun] = []

    def forward(executor: Executor) -> live.LiveRun:
        generation = live.LiveRun(
            offloaded,
            local,
            executor,
            ids,
            new_tokens=config.new_tokens,
            batch=config.batch,
            columns=columns,
            residual=residual,
            temperature=config.temperature,
            seed=config.seed,
            keep_passes=config.verify,
        )
        # Kept, as `execute` returns times and tables but no tokens.
        generations.append(generation)
        return generation

    begin_s = time.perf_counter()
    store = open_model_store(folder, config.store, dtype, building)
    with closed_after(store, config):
        offloaded.check_store(store)
        store_s = time.perf_counter() - begin_s
        # Libraries initialise themselves at their first call, which is not to be timed.
        live.warm_up(offloaded, store)
        shape = live.live_shape(offloaded, folder, store)
        setup = Setup(config, shape, profile, config.system)
        rehearse(setup.planner(), live.made_up_steps(shape, columns))
        run = execute(
            setup,
            store,
            device,
            forward,
            gatings=offloaded.gatings,
            out=out,
            progress=progress,
        )

    result = generations[0].result
    run.texts = [local.decode(tokens) for tokens in result.tokens]
    run.tokens = result.tokens
    run.steps = result.steps
    run.warnings += _warnings(run)
    run.startup |= {
        "store_s": store_s,
        "dense_s": dense_s,
        "dense_bytes": offloaded.dense_bytes,
    }
    # Vectors that were calibrated just now lie in no file.
    named = config.residual if isinstance(config.residual, str | Path) else None
    model = "tiny" if is_tiny else str(folder.absolute())
    repeated = config.replaced(model=model, residual=named)
    facts = {
        "mode": "live",
        "model": str(config.model),
        # A live model runs until its texts end.
        "steps": None,
        "new_tokens": config.new_tokens,
        "temperature": config.temperature,
        "trace": f"{len(ids)} prompts",
        "dtype": dtype,
        "residual": None if residual is None else residual.id,
    }
    finish(run, setup, repeated, store, result.steps, facts, out=out, perfetto=perfetto)

    # Loaded only now, so that the run had the memory to itself and is kept if the whole
    # model has no room.
    if config.verify:
        plain = local_model.load_weights(folder, dtype).eval().to(device.device)
        run.verification = live.verify(plain, result.passes, dtype)
        if out is not None:
            save_run(run, Path(out))
    return run


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
