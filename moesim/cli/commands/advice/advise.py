"""`moesim advise`: which llama.cpp flags for a model on a machine, how fast."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson
from moesim.cli.parsers import size_bytes

if TYPE_CHECKING:
    from moesim.advice.advise import Advice

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
            help=(
                "Routing of this model: bound of any schedule, an expert cache, masks"
                " for ktransformers."
            ),
        ),
    ] = None,
    expert_counts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.pt",
            help="Write a trace's counts of experts, as kt-kernel's masks need them.",
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
        files=[html, save_profile, expert_counts],
        inputs=[path for path in (bench, trace) if path is not None],
    )
    _check_counts(trace, expert_counts)
    from moesim.advice import advise as library
    from moesim.advice.plan.candidates import Job
    from moesim.advice.report.as_json import advice_json
    from moesim.advice.report.text import advice_text
    from moesim.advice.routing.ktransformers import COUNTS_FILE

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

        write_advice(advice, html, output.command_line())
    if expert_counts is not None:
        _write_counts(advice, expert_counts)
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
    counts_file = str(expert_counts or COUNTS_FILE)
    print(advice_text(advice, explain=explain, counts_file=counts_file))
    if replay_line:
        print(f"\nto replay this placement:\n  {replay_line}")
    output.print_written([html, save_profile, expert_counts])


def _check_counts(trace: Path | None, expert_counts: Path | None) -> None:
    """Refuse a file of counts that nothing can be counted for.

    Raises:
        typer.BadParameter: without a trace, or with a name that kt-kernel ignores.
    """
    if expert_counts is None:
        return
    if trace is None:
        raise typer.BadParameter(
            "expected --trace beside it, whose experts are counted",
            param_hint="--expert-counts",
        )
    # Its loader looks at the ending before it looks into the file.
    if expert_counts.suffix != ".pt":
        raise typer.BadParameter(
            f"{expert_counts}: expected a name that ends in .pt",
            param_hint="--expert-counts",
        )


def _write_counts(advice: "Advice", file: Path) -> None:
    from moesim.runtime.record.expert_counts import write_expert_counts

    model = advice.model
    experts = model.layers[model.moe_layers[0]].experts
    assert advice.routing is not None
    counts = advice.routing.decodes.counts(experts)
    write_expert_counts(file, counts, model.moe_layers, len(model.layers))
