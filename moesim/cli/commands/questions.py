"""`moesim compare`, `hits`, `gap`, `sensitivity` and `quality`: questions about policies."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.inputs import check_input
from moesim.base.options import (
    TIMELINES,
    ConfigError,
    JsonOptions,
    PageOptions,
    TableOptions,
    file_option,
    folder_option,
    input_option,
    jobs_option,
    minutes_option,
    option,
    policies_option,
)
from moesim.cli import output
from moesim.cli.options import check_device, device_option, from_dataclass
from moesim.runs.config import CACHE_SIZES, RunConfig, of_run

if TYPE_CHECKING:
    from moesim.traces.format.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(TableOptions):
    """Which policies are compared, and what is written of it."""

    # From computing everything on the CPU to fetching everything, and one that weighs
    # both for every expert.
    policy: tuple[str, ...] = option(
        ("all-cpu", "llama.cpp", "ktransformers", "fiddler", "on-demand", "greedy"),
        "Systems or assignment policies; greedy+lru+residual adds cache and prefetch."
        " The word systems stands for every published system that the trace can serve.",
        metavar="A",
        policy_kind="assignment",
    )
    hw: tuple[str, ...] = of_run("hw", ())
    cache_ratio: tuple[float, ...] = of_run("cache_ratio", ())
    slots_per_layer: tuple[int, ...] = of_run("slots_per_layer", ())
    gpu_memory_bytes: tuple[int, ...] = of_run("gpu_memory_bytes", ())
    jobs: int | None = jobs_option()
    out: Path | None = folder_option("Write a folder of tables for each run there.")
    perfetto: Path | None = file_option(
        "Write a timeline, with every run, for ui.perfetto.dev.", *TIMELINES
    )

    def places(self) -> dict[str, list[Any]]:
        """Machines and sizes of the GPU cache, where some are stated."""
        stated = {name: getattr(self, name) for name in ("hw", *CACHE_SIZES)}
        return {name: list(values) for name, values in stated.items() if values}


@from_dataclass(without=["arrivals", "slo"])
def compare(config: RunConfig, options: CompareOptions) -> None:
    """Replay one trace under several policies, and rank them: speed, hits, bytes,
    memory, the lane that holds each up.

    With several machines or sizes of memory, separated by commas, say who is fastest on
    each.

    \b
    Examples:
      moesim compare q.parquet --gpu-memory 8GiB
      moesim compare q.parquet --gpu-memory 4GiB,8GiB,16GiB --hw rtx4060ti,hw.toml --png memory.png
      moesim compare q.parquet --policy systems --hw rtx4060ti --out out/systems
      moesim compare q.parquet --policy greedy+lru+none,greedy+lru+residual --html q.html
    """
    from moesim.questions.compare import compare as compare_runs
    from moesim.runs.setup import opened
    from moesim.runs.sweeps.sweep import configs_of
    from moesim.traces.timeline.perfetto import write_perfetto

    config, trace = opened(config)
    places = options.places()
    configs = configs_of(config, places)
    names, left_out = _expand(trace, options.policy, configs)
    is_single = len(configs) == 1
    with output.bar("replaying", 1.0) as show:
        compared = compare_runs(
            config,
            names,
            out=options.out,
            jobs=options.jobs,
            # Pages of one setting draw timelines; those of many would fill memory.
            keep=is_single or options.perfetto is not None,
            progress=show,
            **places,
        )
    if options.perfetto is not None:
        timelines = {
            name if isinstance(name, str) else " | ".join(name): run.timeline
            for name, run in compared.runs.items()
        }
        write_perfetto(options.perfetto, timelines)
    written = [options.out, options.perfetto]
    output.present(compared.answer(), options, more=written, notes=left_out)


def _expand(
    trace: "Trace", names: tuple[str, ...], configs: list[RunConfig]
) -> tuple[list[str], list[str]]:
    """Leave out policies that read columns which the trace lacks; put, for the word
    ``systems``, those that it can serve.

    Returns:
        Policies, and notes about what was left out.

    Raises:
        MissingColumnError: no policy is left.
    """
    from moesim.base.errors import MissingColumnError
    from moesim.policies.systems import SYSTEMS
    from moesim.questions.compare import check

    policies: list[str] = []
    left_out: list[str] = []
    unserved: dict[str, MissingColumnError] = {}
    for name in names:
        for policy in SYSTEMS if name == "systems" else [name]:
            try:
                for config in configs:
                    check(config.replaced(policy=policy))
            except MissingColumnError as error:
                unserved[policy] = error
            except ValueError as error:
                # Who asks for all systems wants those that run; whoever names one is
                # told what is wrong with it, before anything runs.
                if name != "systems":
                    policies.append(policy)
                    continue
                left_out.append(f"left out {policy}: {error}")
            else:
                policies.append(policy)

    if unserved and not policies:
        raise next(iter(unserved.values()))
    if unserved:
        columns = dict.fromkeys(error.column for error in unserved.values())
        left_out.append(
            f"left out {', '.join(unserved)}: {trace.path} lacks {', '.join(columns)};"
            " `moesim trace predict` adds synthetic ones"
        )
    return policies, left_out


# A cache alone has no policies beside it, no machine and no time.
NEEDS_MACHINE = (
    *("policy", "prefetch", "routing", "hw", "slots_per_layer", "gpu_memory_bytes"),
    *("host_memory_bytes", "host_cache", "staging", "prefetch_budget_bytes"),
    *("gpu_split", "context_tokens", "engine", "arrivals", "slo"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitsOptions(TableOptions):
    """Which caches are counted, at which sizes."""

    cache: tuple[str, ...] = of_run("cache", ("lru", "lfu", "arc", "belady"))
    cache_ratio: tuple[float, ...] = of_run(
        "cache_ratio", (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
    )


@from_dataclass(without=NEEDS_MACHINE, from_file=False)
def hits(config: RunConfig, options: HitsOptions) -> None:
    """Say how often each cache would hit, at each size, if every miss were fetched. No
    machine takes part.

    \b
    Examples:
      moesim hits q.parquet
      moesim hits q.parquet --cache lru,lfu:decay=0.9,sieve,belady --cache-ratio 0.1,0.25,0.5 --html hits.html
    """
    from moesim.questions.hit_rates import hit_rates, hits_answer

    count = len(options.cache) * len(options.cache_ratio)
    with output.bar("counting", count) as show:
        rates = hit_rates(config, options.cache, options.cache_ratio, progress=show)
    output.present(hits_answer(rates), options)


@from_dataclass(without=["engine", "arrivals", "slo"])
def gap(config: RunConfig, options: PageOptions) -> None:
    """Say how much of a policy's time above a clairvoyant schedule's is due to which
    of its parts.

    Replays the trace with every combination of its own parts and parts that know the
    future, so --steps saves much.

    \b
    Examples:
      moesim gap q.parquet --policy greedy --steps 100
      moesim gap q.parquet --policy on-demand --cache lfu --prefetch next-gate --batch 8
    """
    from moesim.questions.gap import gap as measure_gap
    from moesim.questions.gap import gap_answer

    with output.bar("replaying", 1.0) as progress:
        measured = measure_gap(config, progress=progress)
    output.present(gap_answer(measured), options)


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityOptions(JsonOptions):
    """What `moesim sensitivity` is asked."""

    policy: tuple[str, ...] = policies_option(
        "greedy+lru",
        "on-demand+lru",
        "all-cpu+none",
    )
    steps: int = of_run("steps", 32)


@from_dataclass(without=["arrivals", "slo", "engine"], from_file=False)
def sensitivity(config: RunConfig, options: SensitivityOptions) -> None:
    """Move every constant of a profile within its interval and say whether another
    policy would win.

    \b
    Example:
      moesim sensitivity q.parquet --hw hw.toml --policy greedy+lru,on-demand+lfu
    """
    from moesim.questions import sensitivity as library

    # Every constant takes two comparisons, so a few steps must do.
    with output.bar("moving constants", 1.0) as progress:
        result = library.sensitivity(
            config,
            options.policy,
            steps=options.steps,
            progress=progress,
        )
    output.present(result.answer(), options)


# A model that reads text has no trace, its lengths are those of the text, and only one
# GPU takes part.
NEEDS_TRACE = (
    *("trace", "gpu_memory_bytes", "gpu_split", "steps"),
    *("engine", "arrivals", "slo"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions(PageOptions):
    """Which model reads what, under which settings."""

    model: str = option(
        "tiny",
        "The shipped model or a Hugging Face folder, read from memory.",
        metavar="tiny|DIR",
    )
    policy: str = option(
        "smoe",
        "A system, or assignment+cache+prefetch, such as on-demand+lru (see: list).",
        metavar="NAME",
        policy_kind="assignment",
    )
    text: Path | None = input_option(
        "UTF-8 text. Default for tiny: passages of the corpus's evaluation part."
    )
    routing: tuple[str, ...] = option(
        (),
        "Routing policies, one setting each, such as expert-cache-router:alpha=0.3.",
        metavar="NAME",
        policy_kind="routing",
    )
    cache_ratio: tuple[float, ...] = of_run("cache_ratio", ())
    tokens: int = option(1024, "Tokens to score, in whole passages.", minimum=1)
    prompt_tokens: int = option(64, "Tokens of a passage read before.", minimum=1)
    scored_tokens: int = option(64, "Tokens of a passage scored.", minimum=1)
    residual: Path | None = input_option(
        "Residual vectors for --prefetch residual (see: record)."
    )
    dtype: str = option(
        "auto",
        "float32, bfloat16, float16, or auto.",
        metavar="NAME",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = device_option()
    minutes: float | None = minutes_option(
        "A limit on reading: passages that do not fit are left out."
    )


@from_dataclass(without=NEEDS_TRACE, from_file=False)
def quality(config: RunConfig, options: QualityOptions) -> None:
    """Let a model read held-out text as it is and under a policy, and compare what both
    expect next.

    \b
    Examples:
      moesim quality --policy on-demand+lru --routing expert-cache-router:alpha=0,expert-cache-router:alpha=0.3
      moesim quality --model ~/models/olmoe --text book.txt --policy daop --cache-ratio 0.125,0.25,0.5 --html daop.html
    """
    from moesim.questions import quality as library
    from moesim.questions.quality import quality_answer

    # Loading a model takes minutes, so all checks come before it.
    if options.cache_ratio and config.slots_per_layer is not None:
        raise ConfigError("--slots-per-layer: expected none beside --cache-ratio")
    check_device(options.device)
    if options.residual is not None:
        check_input(options.residual)
    output.quiet_libraries()
    with output.bar("reading", 1.0) as show:
        result = library.quality(
            config=config,
            progress=show,
            **options.arguments(library.quality),
        )
    output.present(quality_answer(result), options)
