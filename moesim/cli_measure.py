"""`moesim record`, `moesim profile` and `moesim train-tiny`: the commands that need torch."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim import cli_options as options


def record(
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Texts separated by blank lines, one per line, or .jsonl.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The trace to write.")] = Path("trace.parquet"),
    model: Annotated[
        str, typer.Option(metavar="tiny|DIR", help="The shipped model or a Hugging Face folder.")
    ] = "tiny",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens to generate per prompt.")] = 64,
    batch: options.Batch = 1,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 decodes greedily; small models then fall into loops.")
    ] = 0.0,
    residual: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Residual vectors for pred1_res; computed and written where the file is new."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    split: Annotated[
        str, typer.Option(parser=options.one_of("calibration", "evaluation"), help="What the texts are.")
    ] = "evaluation",
    seed: options.Seed = 0,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Also measure how much listening slows the model.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run a model on prompts and write what its gates said as a trace.

    Residual vectors for pred1_res lie beside the tiny model; other models get theirs from --residual FILE, calibrated
    on text that no evaluation uses, or from residual.safetensors in their folder.

    \b
    Examples:
      moesim record --prompts prompts.txt --out trace.parquet
      moesim record --model ~/models/olmoe --prompts prompts.txt --batch 4 --residual olmoe.safetensors
    """
    options.check_places(files=[out, residual])
    from moesim.progress import bar, messages, only_ours

    only_ours()
    from runtime.calibrate_residual import Residual, residual_vectors
    from runtime.record import load_model, read_prompts
    from runtime.record import record as run

    texts = read_prompts(prompts)
    local = load_model(model, device=device)
    given = residual or default_residual(model)
    drift = Residual.load(given) if given.is_file() else None
    if drift is None and residual is not None:
        with messages("calibrating residual vectors"):
            drift = residual_vectors(local)
        drift.save(residual)
    with bar("recording", len(texts)) as show:
        done = run(
            local, texts, out, max_new_tokens=max_new_tokens, batch=batch, residual=drift, temperature=temperature,
            seed=seed, split=split, measure_overhead=overhead,
            progress=lambda tokens, expected: show(len(texts) * tokens / expected),
        )  # fmt: skip
    facts: dict[str, Any] = {
        "trace": str(done.path), "sequences": done.sequences, "prompt_tokens": done.prompt_tokens,
        "decode_tokens": done.decode_tokens, "rows": done.rows, "seconds_s": done.seconds_s,
        "tokens_per_s": done.tokens_per_s, "slowdown": done.overhead.slowdown if done.overhead else None,
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(
        f"{done.sequences} sequences, {done.prompt_tokens:,} prompt and {done.decode_tokens:,} generated tokens,"
        f" {done.rows:,} rows in {done.seconds_s:.1f} s ({done.tokens_per_s:.0f} tokens/s)"
    )
    if done.overhead is not None:
        print(f"recording takes {done.overhead.slowdown:.2f} times as long as running the model alone")
    print(f"wrote {done.path}")


def default_residual(model: str) -> Path:
    """Where the residual vectors of a model lie, if it has any."""
    from runtime.tiny import tiny_dir

    return (tiny_dir() if model == "tiny" else Path(model)) / "residual.safetensors"


def train_tiny(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the checkpoint.", show_default=False)],
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time.")] = 12.0,
    seed: options.Seed = 0,
) -> None:
    """Train the tiny model that ships with the project, from scratch, on the standard library's sources.

    \b
    Example:
      moesim train-tiny --out my-tiny --minutes 12
    """
    options.check_places(folder=out)
    from moesim.progress import bar, only_ours

    only_ours()
    from runtime import tiny

    with bar("training", 60 * minutes) as show:
        facts = tiny.train_tiny(out, minutes, seed, lambda point: show(point.seconds_s))
    print(f"{facts['steps']:,} steps in {facts['seconds_s'] / 60:.1f} minutes")
    print(f"held-out loss: {facts['held_out']['nats_per_byte']:.3f} nats per byte")
    print(f"wrote {out}")


def profile(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The profile to write; ./hw.toml is found by itself.")
    ] = Path("hw.toml"),
    quick: Annotated[bool, typer.Option("--quick", help="About 10 s instead of 40 s, with fewer sizes.")] = False,
    shape: Annotated[
        str | None, typer.Option(metavar="NAME|WORDS", help="Model whose experts are measured. Default: qwen3-30b-a3b.")
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder on the disk that will hold experts. Default: that of OUT."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure this PC: expert compute, copies, disk reads, hand-offs, and what they cost each other.

    Close other programs first: what they take is measured too.

    \b
    Examples:
      moesim profile
      moesim profile --quick --out laptop.toml --disk /mnt/nvme
    """
    options.check_places(files=[out])
    if out.suffix != ".toml":
        raise typer.BadParameter(f"expected a name that ends in .toml, got {str(out)!r}", param_hint="--out")
    from moesim.progress import bar
    from runtime.measure import measure
    from traces.models import model_shape

    with bar("measuring", 1.0) as show:
        found = measure(
            None if shape is None else model_shape(shape), out, quick=quick, disk_dir=disk,
            progress=lambda _what, done: show(done),
        )  # fmt: skip
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(f"{found.name}: {found.description}")
    print(f"wrote {out}")
