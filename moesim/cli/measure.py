"""`moesim record`, `moesim profile` and `moesim train-tiny`: the commands that need
torch.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import options
from moesim.cli import record as recording


def record(
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts separated by blank lines, one per line, or .jsonl.",
            show_default=False,
        ),
    ] = None,
    dataset_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Instead: a data set, .jsonl, .csv, .tsv or .parquet."
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of the data set; found by itself if named as usual.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Take the first N prompts.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The trace to write.")
    ] = Path("trace.parquet"),
    model: Annotated[
        str,
        typer.Option(
            metavar="tiny|DIR", help="The shipped model or a Hugging Face folder."
        ),
    ] = "tiny",
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Read experts from this store (built if new): for models beyond memory."
            ),
        ),
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=options.size_bytes,
            help="Memory for experts beside --store. Default: 4GiB.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens to generate per prompt.")
    ] = 64,
    batch: options.Batch = 1,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, help="0 decodes greedily; small models then fall into loops."
        ),
    ] = 0.0,
    residual: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Residual vectors for pred1_res; computed and written where the file is"
                " new."
            ),
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Also write what policies may know beforehand, as .safetensors for"
                " --artefacts."
            ),
        ),
    ] = None,
    device: options.Device = "cpu",
    split: Annotated[
        str | None,
        typer.Option(
            parser=options.one_of("calibration", "evaluation"),
            metavar="calibration|evaluation",
            help=(
                "What the texts are. Default: evaluation, or calibration beside"
                " --calibration."
            ),
        ),
    ] = None,
    seed: options.Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a recording that was stopped.")
    ] = False,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish",
            help="Run nothing; make OUT of the sequences a stopped recording has.",
        ),
    ] = False,
    overhead: Annotated[
        bool,
        typer.Option(
            "--overhead/--no-overhead",
            help="Measure how much listening slows the model.",
        ),
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Run a model on prompts and write what its gates said as a trace.

    Residual vectors for pred1_res lie beside the tiny model; other models get theirs
    from --residual FILE, calibrated on text that no evaluation uses, or from
    residual.safetensors in their folder.

    \b
    Examples:
      moesim record --prompts prompts.txt --out trace.parquet
      moesim record --model ~/models/olmoe --dataset-file squad.parquet --limit 100 --batch 4 --resume
      moesim record --model ~/models/olmoe --prompts other.txt --out other.parquet --calibration olmoe.safetensors
      moesim record --model ~/models/large --store /mnt/nvme/large --host-memory 16GiB --prompts prompts.txt
    """
    options.check_places(
        files=[out, residual, calibration], folder=store, inputs=[prompts, dataset_file]
    )
    if finish:
        recording.finish(out, as_json=as_json)
        return
    recording.check_options(
        prompts, dataset_file, column, store, host_memory, calibration, split
    )
    options.check_device(device)
    from moesim.cli.progress import bar, only_ours

    only_ours()
    from moesim.runtime.record.record import record as run
    from moesim.runtime.text.datasets import read_dataset, read_prompts

    texts = (
        read_dataset(dataset_file, column, limit)
        if dataset_file
        else read_prompts(prompts or "")[:limit]
    )
    recording.check_unfinished(out, resume=resume)
    with recording.opened_model(model, store, host_memory, device) as local:
        drift = recording.residual_of(
            local,
            residual or default_residual(model),
            asked=residual is not None,
            texts=texts if calibration else None,
        )
        with bar("recording", len(texts)) as show, recording.hint_when_stopped(out):
            done = run(
                local,
                texts,
                out,
                max_new_tokens=max_new_tokens,
                batch=batch,
                residual=drift,
                temperature=temperature,
                seed=seed,
                split=split or ("calibration" if calibration else "evaluation"),
                resume=resume,
                measure_overhead=overhead,
                progress=lambda tokens, expected: show(len(texts) * tokens / expected),
            )
        facts = recording.facts_of(done, local)
    if calibration is not None:
        from moesim.runtime.record.calibration import write_calibration

        facts["calibration"] = {
            "file": str(calibration),
            **write_calibration(out, calibration, drift)["tensors"],
        }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        recording.say(facts)


def default_residual(model: str) -> Path:
    """Where the residual vectors of a model lie, if it has any."""
    from moesim.runtime.models.tiny import tiny_dir

    return (tiny_dir() if model == "tiny" else Path(model)) / "residual.safetensors"


def train_tiny(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for the checkpoint.", show_default=False
        ),
    ],
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time.")] = 12.0,
    seed: options.Seed = 0,
) -> None:
    """Train the tiny model that ships with the project, from scratch, on the standard
    library's sources.

    \b
    Example:
      moesim train-tiny --out my-tiny --minutes 12
    """
    options.check_places(folder=out)
    from moesim.cli.progress import bar, only_ours

    only_ours()
    from moesim.runtime.train import tiny

    with bar("training", 60 * minutes) as show:
        facts = tiny.train_tiny(out, minutes, seed, lambda point: show(point.seconds_s))
    print(f"{facts['steps']:,} steps in {facts['seconds_s'] / 60:.1f} minutes")
    print(f"held-out loss: {facts['held_out']['nats_per_byte']:.3f} nats per byte")
    print(f"wrote {out}")


def profile(
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The profile to write; ./hw.toml is found by itself."
        ),
    ] = Path("hw.toml"),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="About 10 s instead of 40 s, with fewer sizes."),
    ] = False,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|WORDS",
            help="Model whose experts are measured. Default: qwen3-30b-a3b.",
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder on the disk that will hold experts. Default: that of OUT.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure this PC: expert compute, copies, disk reads, hand-offs, and what they
    cost each other.

    Close other programs first: what they take is measured too.

    \b
    Examples:
      moesim profile
      moesim profile --quick --out laptop.toml --disk /mnt/nvme
    """
    options.check_places(files=[out])
    if out.suffix != ".toml":
        raise typer.BadParameter(
            f"expected a name that ends in .toml, got {str(out)!r}", param_hint="--out"
        )
    from moesim.cli.progress import bar
    from moesim.runtime.measure.profile import measure
    from moesim.traces.models import model_shape

    with bar("measuring", 1.0) as show:
        found = measure(
            None if shape is None else model_shape(shape),
            out,
            quick=quick,
            disk_dir=disk,
            progress=lambda _what, done: show(done),
        )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(f"{found.name}: {found.description}")
    print(f"wrote {out}")
