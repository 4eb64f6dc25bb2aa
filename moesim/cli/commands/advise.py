"""`moesim advise`: llama.cpp flags for a model on a machine, how fast; `moesim model`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.advice.options import AdviseOptions, ModelOptions
from moesim.cli import output
from moesim.cli.options import from_dataclass

if TYPE_CHECKING:
    from moesim.advice.advise import Advice


@from_dataclass(from_file=False)
def advise(options: AdviseOptions) -> None:
    """Say which llama.cpp settings are fastest for a model on a machine, how fast, and
    how sure that is.

    \b
    Examples:
      moesim advise model.gguf --cpu "Ryzen 7 5700X" --ram 2x16GB-DDR4-3600 --gpu "RTX 4060 Ti 16GB"
      moesim advise qwen3-30b-a3b --hw hw.toml --bench rows.jsonl --explain
      moesim advise gpt-oss-120b --cpu "Ryzen 9 9950X" --ram "2x48GB DDR5-6000" --gpu "2x RTX 3090" --html advice.html
    """
    from moesim.advice.advise import advise as ask
    from moesim.advice.as_json import advice_json
    from moesim.advice.plan.memory import Job
    from moesim.advice.routing import COUNTS_FILE
    from moesim.advice.text import advice_text

    job = Job(
        context=options.context_tokens,
        prompt=options.prompt_tokens,
        answer=options.new_tokens,
        keep_vram_bytes=options.keep_gpu_memory_bytes,
        keep_ram_bytes=options.keep_host_memory_bytes,
        sequences=options.batch,
        micro_batch=options.micro_batch,
    )
    advice = ask(
        options.model,
        cpu=options.cpu,
        ram=options.ram,
        gpu=options.gpu,
        pcie=options.pcie,
        hw=options.hw,
        bench=options.bench,
        quant=options.quant,
        job=job,
        trace=options.routing_trace,
        replay_cache=options.expert_cache,
    )
    if options.html is not None:
        from moesim.advice.page import write_advice

        write_advice(advice, options.html, output.command_line())
    if options.expert_counts is not None:
        _write_counts(advice, options.expert_counts)
    replay_line = ""
    if options.save_profile is not None:
        from moesim.advice.plan.saved_profile import profile_of_advice, replay_command
        from moesim.hwprofiles.profile import save_profile

        save_profile(profile_of_advice(advice), options.save_profile)
        replay_line = replay_command(advice, str(options.save_profile))

    if options.as_json:
        print(json.dumps(advice_json(advice), indent=2))
        return
    counts_file = str(options.expert_counts or COUNTS_FILE)
    print(advice_text(advice, explain=options.explain, counts_file=counts_file))
    if replay_line:
        print(f"\nto replay this placement:\n  {replay_line}")
    output.print_written([options.html, options.save_profile, options.expert_counts])


def _write_counts(advice: "Advice", file: Path) -> None:
    from moesim.runtime.record.calibration import write_expert_counts

    model = advice.model
    experts = model.layers[model.moe_layers[0]].experts
    assert advice.routing is not None
    counts = advice.routing.decodes.counts(experts)
    write_expert_counts(file, counts, model.moe_layers, len(model.layers))


@from_dataclass(from_file=False)
def model(options: ModelOptions) -> None:
    """Print what a model file holds: bytes by layer, experts, weight formats.

    \b
    Examples:
      moesim model model.gguf
      moesim model qwen3-30b-a3b --quant Q8_0 --json
    """
    from moesim.advice.as_json import model_json
    from moesim.advice.model.catalogue import model_contents
    from moesim.advice.text import model_text

    contents = model_contents(options.model, options.quant)
    as_json = options.as_json
    print(
        json.dumps(model_json(contents), indent=2) if as_json else model_text(contents)
    )
