"""`moesim advise`: which llama.cpp flags for a model on a machine, how fast."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson
from moesim.cli.parsers import size_bytes

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, a Hugging Face folder, or a name of moesim list models.",
        show_default=False,
    ),
]
Quant = Annotated[
    str,
    typer.Option(
        metavar="LABEL",
        help="Weight formats of a model given by name. Default: Q4_K_M.",
    ),
]


def advise(
    model: Model,
    cpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Processor, or numbers as in cores=8,ghz=3.6."
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="Memory, such as 2x16GB DDR4-3600."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Card, 2x NAME, none, or numbers as in"
                " vram=16GB,bandwidth=448GB/s,tflops=47."
            ),
        ),
    ] = None,
    pcie: Annotated[
        str | None,
        typer.Option(metavar="GENxLANES", help="Link of the card, such as 4.0x8."),
    ] = None,
    hw: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Profile that moesim profile wrote here."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Rows of llama-bench -o json, jsonl, csv or md."
        ),
    ] = None,
    quant: Quant = "",
    context: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that the context holds.")
    ] = 8192,
    prompt: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of the prompt.")
    ] = 2048,
    answer: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of the answer.")
    ] = 512,
    parallel: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests at the same time.")
    ] = 1,
    keep_vram: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=size_bytes,
            help="Graphics memory to leave free.",
        ),
    ] = "256MiB",  # type: ignore[assignment] # parsed as if it was typed
    keep_ram: Annotated[
        int,
        typer.Option(
            metavar="SIZE", parser=size_bytes, help="Host memory to leave free."
        ),
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Routing of this model, to say what an expert cache would give.",
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache", help="The same on synthetic routing; takes a few seconds more."
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the seconds of every term.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with figures.")
    ] = None,
    save_profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Write the machine as a hardware profile, for moesim replay --hw.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which llama.cpp settings are fastest for a model on a machine, how fast, and
    how sure that is.

    \b
    Examples:
      moesim advise model.gguf --cpu "Ryzen 7 5700X" --ram 2x16GB-DDR4-3600 --gpu "RTX 4060 Ti 16GB"
      moesim advise qwen3-30b-a3b --hw hw.toml --bench rows.jsonl --explain
      moesim advise gpt-oss-120b --cpu "Ryzen 9 9950X" --ram "2x48GB DDR5-6000" --gpu "RTX 3090" --html advice.html
    """
    # Before anything is computed: a result needs a place.
    check_places(
        files=[html, save_profile],
        inputs=[path for path in (bench, trace) if path is not None],
    )
    from moesim.advice import advise as library
    from moesim.advice.plan.candidates import Job
    from moesim.advice.report.as_json import advice_json
    from moesim.advice.report.text import advice_text

    # Everything below only prints.
    advice = library.advise(
        model,
        cpu=cpu,
        ram=ram,
        gpu=gpu,
        pcie=pcie,
        hw=hw,
        bench=bench,
        quant=quant,
        job=Job(
            context=context,
            prompt=prompt,
            answer=answer,
            keep_vram_bytes=keep_vram,
            keep_ram_bytes=keep_ram,
            sequences=parallel,
        ),
        trace=trace,
        replay_cache=cache,
    )
    # matplotlib takes a second, so only pages load it.
    if html is not None:
        from moesim.advice.report.page import write_advice

        write_advice(advice, html)
    replay_line = ""
    if save_profile is not None:
        from moesim.advice.plan.saved_profile import profile_of_advice, replay_command
        from moesim.hwprofiles.profile import save_profile as save

        save(profile_of_advice(advice), save_profile)
        replay_line = replay_command(advice, str(save_profile))

    # Alone on standard output, for other programs.
    if as_json:
        print(json.dumps(advice_json(advice), indent=2))
        return
    print(advice_text(advice, explain=explain))
    if replay_line:
        print(f"\nto replay this placement:\n  {replay_line}")
    output.print_written([html, save_profile])
