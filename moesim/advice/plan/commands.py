"""Command lines of llama.cpp for a setting, and of llama-bench for a measurement."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING

from moesim.advice.times.work import (
    ALL_LAYERS,
    DEFAULT_BATCH,
    DEFAULT_MICRO_BATCH,
    LAZY,
)
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.memory import Job
    from moesim.advice.times.work import Setting


DEVICE_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "vulkan": "Vulkan", "sycl": "SYCL"}


def flags_of(  # noqa: C901, PLR0912 # one branch per flag
    setting: Setting, model: ModelContents, machine: Machine
) -> list[str]:
    """Return llama.cpp's flags for a setting, without model and context."""
    flags: list[str] = []
    if machine.graphics:
        layers = setting.gpu_layers if setting.gpu_layers < ALL_LAYERS else 99
        flags += ["-ngl", str(layers)]

    on_host = setting.on_host(model)
    if setting.chosen_layers is not None:
        flags += ["-ot", override_pattern(setting.chosen_layers)]
    elif machine.graphics and set(on_host) == set(model.moe_layers):
        flags.append("--cpu-moe")
    elif setting.cpu_layers:
        flags += ["--n-cpu-moe", str(setting.cpu_layers)]

    # Defaults are left out: a short line is easier to trust.
    if setting.micro_batch != DEFAULT_MICRO_BATCH:
        flags += ["-ub", str(setting.micro_batch)]
    if setting.batch != DEFAULT_BATCH:
        flags += ["-b", str(setting.batch)]
    if machine.devices:
        kind = DEVICE_NAMES.get(machine.backend, "CUDA")
        flags += ["--device", ",".join(f"{kind}{at}" for at in machine.devices)]
    if len(setting.split) > 1:
        flags += ["-sm", "layer", "-ts", ",".join(str(each) for each in setting.split)]
    flags += ["-t", str(setting.threads or threads_of(machine))]
    if machine.processor.sockets > 1:
        # Without it a second socket's memory is worth next to nothing.
        flags += ["--numa", "distribute"]
    # Rounded values need flash attention, on the CPU too.
    if machine.graphics or setting.kv_format != "f16":
        flags += ["-fa", "on" if setting.flash else "off"]
    if setting.kv_format != "f16":
        flags += ["-ctk", setting.kv_format, "-ctv", setting.kv_format]
    if on_host and machine.graphics and not setting.mapped:
        flags += ["--load-mode", "none"]
    # Larger tables are left in a mapped file without being asked.
    if setting.tables == LAZY and model.table_bytes <= LAZY_FROM_BYTES:
        flags += ["--lazy-mode", "on"]
    return flags


# Source: llama.cpp, pull requests 27794 and 27837 of 2026-08-28; `--lazy-mode` wants a
# mapped file.
LAZY_FROM_BYTES = 4 * 1024**3


def threads_of(machine: Machine) -> int:
    """Return the threads to start with: physical fast cores of one socket.

    More than one per core share its units; those of a second socket read across.
    """
    return max(1, machine.processor.cores // machine.processor.sockets)


def server_command(
    setting: Setting, model: ModelContents, machine: Machine, job: Job
) -> str:
    """Return the line that starts llama-server with a setting."""
    words = ["llama-server", "-m", model_file(model), "-c", str(job.context)]
    if job.sequences > 1:
        # The context is shared out among the requests.
        words[-1] = str(job.context * job.sequences)
        words += ["--parallel", str(job.sequences)]
    return shlex.join([*words, *flags_of(setting, model, machine)])


def bench_command(
    setting: Setting,
    model: ModelContents,
    machine: Machine,
    *,
    prompt_tokens: int = 0,
    answer_tokens: int = 0,
) -> str:
    """Return the line that measures one speed of a setting with llama-bench."""
    words = ["llama-bench", "-m", model_file(model)]
    if machine.graphics:
        words += ["-ngl", "99"]
    if setting.cpu_layers:
        count = min(setting.cpu_layers, len(model.layers))
        words += ["-ncmoe", str(count)]
    if machine.graphics:
        words += ["-fa", "1"]
    if prompt_tokens:
        words += ["-ub", str(setting.micro_batch), "-b", str(setting.batch)]
    if len(setting.split) > 1:
        # llama-bench separates cards by slashes, and runs by commas.
        words += ["-ts", "/".join(str(each) for each in setting.split)]
    if machine.processor.sockets > 1:
        words += ["--numa", "distribute"]
    if setting.on_host(model) and machine.graphics:
        # Without it pages of a mapped file would be uploaded slowly.
        mode = "mmap" if setting.mapped else "none"
        words += ["-lm", mode]
    words += ["-t", str(setting.threads or threads_of(machine))]
    words += ["-p", str(prompt_tokens), "-n", str(answer_tokens), "-o", "jsonl"]
    return shlex.join(words) + " >> rows.jsonl"


def model_file(model: ModelContents) -> str:
    """Return the file name to write on a command line."""
    # The user's own file; otherwise a usual name to replace.
    if model.source == "gguf header":
        return model.name
    return f"{model.name.split()[0]}-{model.quant or 'Q4_K_M'}.gguf"


def override_pattern(layers: Iterable[int]) -> str:
    r"""Write ``-ot``'s expression: ``blk\.(0|3|[5-9])\.ffn_.*_exps.*=CPU``."""
    numbers = "|".join(_runs(sorted(layers)))
    return rf"blk\.({numbers})\.ffn_.*_exps.*=CPU"


def overridden_layers(text: str) -> frozenset[int] | None:
    r"""Read ``-ot`` patterns: which layers' experts stay on the CPU.

    llama.cpp gives a tensor the place of the first pattern that matches its name.

    Args:
        text: such as ``blk\.(1|2)\.ffn_.*_exps.*=CPU``, several separated by commas or
            semicolons.

    Returns:
        Layer numbers below 1,000; None where no pattern is about experts.

    Raises:
        AdviceError: no expression, or one that parts the matrices of a layer's experts.
    """
    rules = []
    for pattern in re.split(r"[;,](?=[^=]*=)", text):
        expression, equals, place = pattern.rpartition("=")
        if not equals:
            continue
        try:
            rules.append((re.compile(expression), place.strip().upper()))
        except re.error:
            raise AdviceError(
                f"-ot {pattern!r}: not a regular expression; is it cut off?"
            ) from None

    layers: set[int] = set()
    named = False
    # Which layers a pattern means depends on the model; more than 1,000 has none.
    for at in range(1000):
        places = [
            _first_place(rules, f"blk.{at}.ffn_{part}_exps.weight")
            for part in ("up", "gate", "down")
        ]
        named = named or any(places)
        on_cpu = [place.startswith("CPU") for place in places]
        if all(on_cpu):
            layers.add(at)
        elif any(on_cpu):
            raise AdviceError(
                f"-ot {text!r}: puts a part of an expert's three matrices on the CPU;"
                " moesim predicts whole layers of experts"
            )
    return frozenset(layers) if named else None


def _first_place(rules: Sequence[tuple[re.Pattern[str], str]], name: str) -> str:
    return next((place for rule, place in rules if rule.search(name)), "")


def _runs(numbers: list[int]) -> list[str]:
    """Shorten runs of one-digit neighbours into ``[3-7]``, as far as digits allow."""
    words: list[str] = []
    at = 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and _neighbours(numbers[end], numbers[end + 1]):
            end += 1
        first = numbers[at]
        last = numbers[end]
        # Two numbers are shorter than a range.
        if end - at < 2:
            words += [str(number) for number in numbers[at : end + 1]]
        else:
            head = str(first)[:-1]
            words.append(f"{head}[{first % 10}-{last % 10}]")
        at = end + 1
    return words


def _neighbours(first: int, second: int) -> bool:
    """Tell whether two numbers follow each other within one decade."""
    return second == first + 1 and second // 10 == first // 10


def layers_in_words(layers: Iterable[int]) -> str:
    """Write ``0-5, 8, 11``."""
    numbers = sorted(layers)
    if not numbers:
        return "none"
    pieces = [[numbers[0], numbers[0]]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in pieces
    )
