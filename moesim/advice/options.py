"""Options of ``moesim advise`` and ``moesim model``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import (
    PAGES,
    REQUIRED,
    ConfigError,
    Options,
    file_option,
    json_option,
    option,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Options):
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
    as_json: bool = json_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions(ModelOptions):
    """Which machine, what shall be done on it, and where answers go."""

    cpu: str | None = option(
        None, "Processor, or numbers as in cores=8,ghz=3.6.", metavar="NAME"
    )
    ram: str | None = option(None, "Memory, such as 2x16GB DDR4-3600.", metavar="WORDS")
    gpu: str | None = option(
        None,
        "Card, 2x NAME, NAME + NAME, none, or numbers as in"
        " vram=16GB,bandwidth=448GB/s,tflops=47.",
        metavar="NAME",
    )
    pcie: str | None = option(
        None, "Link of the card, such as 4.0x8.", metavar="GENxLANES"
    )
    hw: str | None = option(
        None, "Profile that moesim profile wrote here.", metavar="FILE", place="input"
    )
    bench: Path | None = option(
        None,
        "Rows of llama-bench -o json, jsonl, csv or md.",
        kind=Path,
        metavar="FILE",
        place="input",
    )
    context_tokens: int = option(
        8192,
        "Tokens that the context holds.",
        kind=int,
        minimum=1,
        metavar="N",
    )
    prompt_tokens: int = option(
        2048, "Tokens of the prompt.", kind=int, minimum=1, metavar="N"
    )
    new_tokens: int = option(
        512, "Tokens of the answer.", kind=int, minimum=1, metavar="N"
    )
    batch: int = option(
        1, "Requests that run together.", kind=int, minimum=1, metavar="B"
    )
    micro_batch: int | None = option(
        None,
        "Most prompt tokens of a forward pass, llama.cpp's -ub. Default: the fastest.",
        kind=int,
        minimum=1,
        metavar="N",
    )
    keep_gpu_memory_bytes: int = option(
        "256MiB",
        "Graphics memory to leave free.",
        kind=int,
        is_size=True,
        minimum=0,
        metavar="SIZE",
    )
    keep_host_memory_bytes: int = option(
        0,
        "Host memory to leave free.",
        kind=int,
        is_size=True,
        minimum=0,
        metavar="SIZE",
    )
    routing_trace: Path | None = option(
        None,
        "Routing of this model: bound of any schedule, an expert cache, masks for"
        " ktransformers.",
        kind=Path,
        flag="--trace",
        metavar="FILE",
        place="input",
    )
    expert_counts: Path | None = file_option(
        "Write a trace's counts of experts, as kt-kernel's masks need them.",
        ".pt",
        metavar="FILE.pt",
        needs=("routing_trace",),
    )
    expert_cache: bool = option(
        False,
        "What an expert cache would give, on synthetic routing; takes a few seconds"
        " more.",
        kind=bool,
    )
    explain: bool = option(False, "Print the seconds of every term.", kind=bool)
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
