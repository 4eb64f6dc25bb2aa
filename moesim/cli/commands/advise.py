"""`moesim advise`: llama.cpp flags for a model on a machine, how fast; `moesim model`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.options import (
    PAGES,
    REQUIRED,
    ConfigError,
    JsonOptions,
    Options,
    file_option,
    input_option,
    option,
)
from moesim.base.units import parse_bytes
from moesim.cli import output
from moesim.cli.options import from_dataclass

if TYPE_CHECKING:
    from moesim.advice.plan.memory import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(JsonOptions):
    """Which model, and how its contents are printed."""

    model: str = option(
        REQUIRED,
        "A GGUF file, a Hugging Face folder, or a name of moesim list models.",
        argument=True,
        metavar="MODEL",
        place="input",
    )
    quant: str = option(
        "",
        "Weight formats of a model given by name. Default: Q4_K_M.",
        metavar="LABEL",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions(ModelOptions):
    """Which machine, what shall be done on it, and where answers go."""

    cpu: str | None = option(
        None,
        "Processor, or numbers as in cores=8,ghz=3.6.",
        metavar="NAME",
    )
    ram: str | None = option(None, "Memory, such as 2x16GB DDR4-3600.", metavar="WORDS")
    gpu: str | None = option(
        None,
        "Card, 2x NAME, NAME + NAME, none, or numbers as in"
        " vram=16GB,bandwidth=448GB/s,tflops=47.",
        metavar="NAME",
    )
    pcie: str | None = option(
        None,
        "Link of the card, such as 4.0x8.",
        metavar="GENxLANES",
    )
    system: str | None = option(
        None,
        "Operating system: linux, windows, wsl, or WSL with its memory, as in"
        " 'wsl 24GB'. Default: linux, or what the other words say.",
        flag="--os",
        metavar="NAME",
    )
    hw: str | None = option(
        None,
        "Profile that moesim profile wrote here.",
        metavar="FILE",
        place="input",
    )
    bench: Path | None = input_option("Rows of llama-bench -o json, jsonl, csv or md.")
    context_tokens: int = option(
        8192,
        "Tokens that the context holds.",
        minimum=1,
    )
    prompt_tokens: int = option(2048, "Tokens of the prompt.", minimum=1)
    new_tokens: int = option(512, "Tokens of the answer.", minimum=1)
    batch: int = option(1, "Requests that run together.", minimum=1, metavar="B")
    micro_batch: int | None = option(
        None,
        "Most prompt tokens of a forward pass, llama.cpp's -ub. Default: the fastest.",
        minimum=1,
    )
    keep_gpu_memory_bytes: int = option(
        "256MiB",
        "GPU memory to leave free.",
        minimum=0,
    )
    keep_host_memory_bytes: int = option(
        0,
        "Host memory to leave free.",
        minimum=0,
    )
    routing_trace: Path | None = input_option(
        "Routing of this model: bound of any schedule, and an expert cache.",
        flag="--trace",
    )
    expert_cache: bool = option(
        False,
        "What an expert cache would give, on this model's routing where it is known.",
    )
    flags: str | None = option(
        None,
        "A line of llama-server or ik_llama.cpp, variables, or settings of ollama or LM"
        " Studio, as pasted or in a file: what it does here, and what to change first.",
        metavar="LINE",
        excludes=(
            "bench",
            "routing_trace",
            "expert_cache",
            "explain",
            "save_profile",
        ),
    )
    measured: float | None = option(
        None,
        "Tokens per second that the line gives, or the advised one: is it normal?",
        minimum=1e-3,
    )
    target: float | None = option(
        None,
        "Tokens per second that are wished for: the smallest change that reaches them.",
        minimum=1e-3,
    )
    mmproj: str | None = option(
        None,
        "Projector of pictures beside the model: its size, or its file.",
        metavar="SIZE|FILE",
    )
    draft: str | None = option(
        None,
        "Draft model or heads for several tokens beside it: size, keys and values"
        " included, or file.",
        metavar="SIZE|FILE",
    )
    explain: bool = option(False, "Print the seconds of every term.")
    html: Path | None = file_option("Write a page with figures.", *PAGES)
    save_profile: Path | None = file_option(
        "Write the machine as a hardware profile, for moesim replay --hw.",
        metavar="FILE.toml",
    )

    def __post_init__(self) -> None:
        """Refuse a context that does not hold prompt and answer."""
        Options.__post_init__(self)
        needed = self.prompt_tokens + self.new_tokens
        if needed > self.context_tokens:
            raise ConfigError(
                f"context_tokens: expected at least {needed}, for a prompt of"
                f" {self.prompt_tokens} and an answer of {self.new_tokens} tokens, got"
                f" {self.context_tokens}"
            )


@from_dataclass(from_file=False)
def advise(options: AdviseOptions) -> None:
    """Say which llama.cpp settings are fastest for a model on a machine, how fast, and
    how sure that is.

    \b
    Examples:
      moesim advise model.gguf --cpu "Ryzen 7 5700X" --ram 2x16GB-DDR4-3600 --gpu "RTX 4060 Ti 16GB"
      moesim advise qwen3-30b-a3b --hw hw.toml --bench rows.jsonl --explain
      moesim advise qwen3-30b-a3b --cpu "Ryzen 7 5700X" --ram 2x16GB-DDR4-3600 --gpu "RTX 3090" --flags "llama-server -ngl 99 --n-cpu-moe 20" --measured 9.5
      moesim advise gpt-oss-120b --cpu "Ryzen 9 9950X" --ram "2x48GB DDR5-6000" --gpu "2x RTX 3090" --html advice.html
    """
    from moesim.advice.advise import advise as ask
    from moesim.advice.answer import advice_answer
    from moesim.advice.plan.commands import server_command
    from moesim.advice.plan.memory import Job

    job = Job(
        context=options.context_tokens,
        prompt=options.prompt_tokens,
        answer=options.new_tokens,
        keep_vram_bytes=options.keep_gpu_memory_bytes,
        keep_ram_bytes=options.keep_host_memory_bytes,
        sequences=options.batch,
        micro_batch=options.micro_batch,
        beside=_beside(options),
    )
    words = {name: getattr(options, name) for name in DESCRIBES}
    if options.flags is not None:
        _flags(options, options.flags, words, job)
        return
    advice = ask(
        options.model,
        **words,
        bench=options.bench,
        job=job,
        trace=options.routing_trace,
        replay_cache=options.expert_cache,
    )
    if options.measured is not None or options.target is not None:
        best = advice.best.candidate.setting
        line = server_command(best, advice.model, advice.machine, job)
        _flags(options, line, words, job)
        return
    answer = advice_answer(advice, explain=options.explain)
    if options.save_profile is not None:
        from moesim.advice.plan.saved_profile import profile_of_advice, replay_command
        from moesim.hwprofiles.profile import save_profile

        save_profile(profile_of_advice(advice), options.save_profile)
        line = replay_command(advice, str(options.save_profile))
        answer.commands = [("to replay this placement", line), *answer.commands]
    output.present(answer, options, more=(options.save_profile,))


DESCRIBES = ("cpu", "ram", "gpu", "pcie", "system", "hw", "quant")
"""Options that describe the machine, and the model's formats."""

LONGEST_PATH = 255


def _flags(
    options: AdviseOptions, line: str, words: dict[str, Any], job: "Job"
) -> None:
    """Answer a line that somebody has."""
    from moesim.advice.answer import flags_answer
    from moesim.advice.given.answer import advise_flags
    from moesim.base.inputs import read_text

    if len(line) <= LONGEST_PATH and Path(line).is_file():
        line = read_text(Path(line))
    answer = advise_flags(
        options.model,
        line,
        **words,
        job=job,
        measured=options.measured,
        target=options.target,
    )
    output.present(flags_answer(answer), options)


def _beside(options: AdviseOptions) -> dict[str, float]:
    """Bytes on the card of what runs beside the model."""
    beside = {}
    for item, text in (("mmproj", options.mmproj), ("draft", options.draft)):
        if text is None:
            continue
        file = Path(text).expanduser()
        if file.is_file():
            beside[item] = float(file.stat().st_size)
        else:
            beside[item] = float(parse_bytes(text, where=f"--{item}"))
    return beside


@from_dataclass(from_file=False)
def model(options: ModelOptions) -> None:
    """Print what a model file holds: bytes by layer, experts, weight formats.

    \b
    Examples:
      moesim model model.gguf
      moesim model qwen3-30b-a3b --quant Q8_0 --json
    """
    from moesim.advice.answer import model_answer
    from moesim.advice.model.catalogue import model_contents

    contents = model_contents(options.model, options.quant)
    output.present(model_answer(contents), options)
