"""`moesim quality`: what policies that change routing do to a model's answers."""

from dataclasses import dataclass
from pathlib import Path

from moesim.base.inputs import check_input
from moesim.base.options import (
    ConfigError,
    JsonOptions,
    folder_option,
    input_option,
    minutes_option,
    option,
)
from moesim.cli import output
from moesim.cli.options import check_device, device_option, from_dataclass
from moesim.runs.config import RunConfig, of_run

# A model that reads text has no trace, its lengths are those of the text, and only one
# GPU takes part.
WITHOUT = (
    *("trace", "gpu_memory_bytes", "gpu_split", "steps", "noise_seed"),
    *("engine", "arrivals", "slo"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions(JsonOptions):
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
    out: Path | None = folder_option(
        "Write figures and pictures there.",
        *("quality.json", "quality.html"),
        *("quality-kl.png", "quality-agreement.png"),
    )


@from_dataclass(without=WITHOUT, from_file=False)
def quality(config: RunConfig, options: QualityOptions) -> None:
    """Let a model read held-out text as it is and under a policy, and compare what both
    expect next.

    \b
    Examples:
      moesim quality --policy on-demand+lru --routing expert-cache-router:alpha=0,expert-cache-router:alpha=0.3
      moesim quality --model ~/models/olmoe --text book.txt --policy daop --cache-ratio 0.125,0.25,0.5 --out daop
    """
    from moesim.cli.output import bar, quiet_libraries
    from moesim.questions import quality as library
    from moesim.questions.quality import quality_answer, save_quality

    # Loading a model takes minutes, so all checks come before it.
    if options.cache_ratio and config.slots_per_layer is not None:
        raise ConfigError("--slots-per-layer: expected none beside --cache-ratio")
    check_device(options.device)
    if options.residual is not None:
        check_input(options.residual)
    quiet_libraries()
    with bar("reading", 1.0) as show:
        result = library.quality(
            config=config,
            progress=show,
            **options.arguments(library.quality),
        )
    written = [] if options.out is None else save_quality(result, options.out)
    output.present(quality_answer(result), options, more=written)
