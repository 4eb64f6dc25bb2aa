"""`moesim record`: run a model and write its routing trace."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from moesim.cli import parsers
from moesim.cli.checks import check_device, check_places
from moesim.cli.options import AsJson, Batch, Device, Seed

if TYPE_CHECKING:
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.record.record import Recording
    from moesim.runtime.record.residual import Residual

DEFAULT_HOST_BYTES: Final = 4 << 30
"""Host memory for experts that are read from a store one by one."""


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
            parser=parsers.size_bytes,
            help="Memory for experts beside --store. Default: 4GiB.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens to generate per prompt.")
    ] = 64,
    batch: Batch = 1,
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
    device: Device = "cpu",
    split: Annotated[
        str | None,
        typer.Option(
            parser=parsers.one_of("calibration", "evaluation"),
            metavar="calibration|evaluation",
            help=(
                "What the texts are. Default: evaluation, or calibration beside"
                " --calibration."
            ),
        ),
    ] = None,
    seed: Seed = 0,
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
            help="Measure how much recording slows the model.",
        ),
    ] = True,
    as_json: AsJson = False,
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
    check_places(
        files=[out, residual, calibration], folder=store, inputs=[prompts, dataset_file]
    )
    # Finishing needs neither texts nor a model.
    if finish:
        _finish(out, as_json=as_json)
        return
    _check_texts(prompts, dataset_file, column)
    # Without a store the whole model is in memory, whatever it takes.
    if host_memory is not None and store is None:
        raise typer.BadParameter(
            "expected --store DIR beside it", param_hint="--host-memory"
        )
    # What policies know beforehand must not come from what they are judged on.
    if calibration is not None and split == "evaluation":
        raise typer.BadParameter(
            "expected calibration text beside --calibration", param_hint="--split"
        )
    check_device(device)

    from moesim.cli.progress import bar, quiet_libraries

    # Before the imports, since the libraries look at it when they are imported.
    quiet_libraries()
    from moesim.runtime.record.record import record as run
    from moesim.runtime.text.datasets import read_dataset, read_prompts

    if dataset_file is not None:
        texts = read_dataset(dataset_file, column, limit)
    else:
        texts = read_prompts(prompts or "")[:limit]
    _check_unfinished(out, resume=resume)

    with _opened_model(model, store, host_memory, device) as local:
        vectors = _residual_of(
            local,
            residual or default_residual(model),
            # A file that was not named is read if it is there, and never written.
            requested=residual is not None,
            texts=texts if calibration else None,
        )
        with bar("recording", len(texts)) as show, _hint_when_stopped(out):
            recording = run(
                local,
                texts,
                out,
                max_new_tokens=max_new_tokens,
                batch=batch,
                residual=vectors,
                temperature=temperature,
                seed=seed,
                split=split or ("calibration" if calibration else "evaluation"),
                resume=resume,
                measure_overhead=overhead,
                progress=lambda tokens, expected: show(len(texts) * tokens / expected),
            )
        facts = _facts(recording, local)

    if calibration is not None:
        from moesim.runtime.record.calibration import write_calibration

        written = write_calibration(out, calibration, vectors)
        facts["calibration"] = {"file": str(calibration), **written["tensors"]}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def default_residual(model: str) -> Path:
    """Where the residual vectors of a model lie, if it has any."""
    from moesim.runtime.models.tiny import tiny_dir

    return (tiny_dir() if model == "tiny" else Path(model)) / "residual.safetensors"


def _check_texts(
    prompts: Path | None, dataset: Path | None, column: str | None
) -> None:
    """Refuse options about texts that contradict each other.

    Raises:
        typer.BadParameter: naming one of them.
    """
    if (prompts is None) == (dataset is None):
        raise typer.BadParameter(
            "expected either --prompts or --dataset-file, one of them",
            param_hint="--prompts",
        )
    if column is not None and dataset is None:
        raise typer.BadParameter(
            "expected --dataset-file FILE beside it", param_hint="--column"
        )


def _finish(out: Path, *, as_json: bool) -> None:
    """Make a trace of the sequences that a stopped recording has."""
    from moesim.runtime.record.segments import finish

    finished = finish(out)
    if as_json:
        facts = {
            "trace": str(finished.path),
            "sequences": finished.sequences,
            "asked_sequences": finished.planned,
            "prompt_tokens": finished.prompt_tokens,
            "decode_tokens": finished.decode_tokens,
            "rows": finished.rows,
        }
        print(json.dumps(facts, indent=2))
        return
    print(
        f"{finished.sequences} of {finished.planned} sequences, {finished.rows:,} rows\n"
        f"wrote {finished.path}"
    )


def _check_unfinished(out: Path, *, resume: bool) -> None:
    """Keep a user from throwing away what a stopped recording has.

    Raises:
        TraceError: there is one, and no option says that it should go on.
    """
    from moesim.runtime.record.segments import parts_dir, unfinished
    from moesim.traces.errors import TraceError

    if not resume and (sequences := unfinished(out)):
        raise TraceError(
            f"{out}: expected no unfinished recording, found one of {sequences}"
            f" sequences in {parts_dir(out).name}; --resume goes on, --finish makes a"
            " trace of it, removing the folder begins anew"
        )


@contextmanager
def _hint_when_stopped(out: Path) -> Iterator[None]:
    """Tell a user who presses ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        from moesim.runtime.record.segments import unfinished

        if sequences := unfinished(out):
            print(
                f"stopped; {sequences} sequences are kept: --resume goes on, --finish"
                " makes a trace of them",
                file=sys.stderr,
            )
        raise


@contextmanager
def _opened_model(
    spec: str, store: Path | None, host_bytes: int | None, device: str
) -> Iterator["LocalModel"]:
    """Load a model, or open it with its experts in a store."""
    if store is None:
        from moesim.runtime.models.local_model import load_model

        yield load_model(spec, device=device)
        return
    from moesim.cli.progress import bar
    from moesim.runtime.record.stored_model import stored_model

    host_bytes = DEFAULT_HOST_BYTES if host_bytes is None else host_bytes
    # The bar ends when the store is open, the store only after the recording.
    with ExitStack() as resources:
        with bar("opening the store", 1.0) as show:
            opened = stored_model(
                spec,
                store,
                host_bytes=host_bytes,
                device=device,
                building=lambda done: show(done.records / done.total_records),
            )
            local = resources.enter_context(opened)
        yield local


def _residual_of(
    local: "LocalModel", file: Path, *, requested: bool, texts: Sequence[str] | None
) -> "Residual | None":
    """Read residual vectors, or calibrate them where they are wanted: on `texts`, or on
    the corpus that ships.

    Args:
        local: the model.
        file: where the vectors lie, or will lie.
        requested: the user named the file, so it is made.
        texts: calibration text; without it, vectors are made only if requested.
    """
    from moesim.cli.progress import messages
    from moesim.runtime.record.residual import Residual, residual_vectors

    if file.is_file():
        return Residual.load(file)
    if not requested and texts is None:
        return None
    with messages("calibrating residual vectors"):
        vectors = residual_vectors(local, texts)
    if requested:
        vectors.save(file)
    return vectors


def _facts(recording: "Recording", local: "LocalModel") -> dict[str, Any]:
    """What was recorded, as `moesim record --json` prints it."""
    overhead = recording.overhead
    facts: dict[str, Any] = {
        "trace": str(recording.path),
        "sequences": recording.sequences,
        "resumed": recording.resumed,
        "prompt_tokens": recording.prompt_tokens,
        "decode_tokens": recording.decode_tokens,
        "rows": recording.rows,
        "seconds_s": recording.seconds_s,
        "tokens_per_s": recording.tokens_per_s,
        "slowdown": overhead.slowdown if overhead else None,
    }
    # Only a model with its experts in a store has them.
    cache = getattr(local, "cache", None)
    if cache is not None:
        facts |= {
            "host_experts": cache.slots,
            "reads": cache.reads,
            "read_bytes": cache.read_bytes,
            "hits": cache.hits,
        }
    return facts


def _print(facts: dict[str, Any]) -> None:
    """Print what was recorded, for people."""
    from moesim.traces.sizes import format_bytes

    resumed = f" ({facts['resumed']} of them before)" if facts["resumed"] else ""
    print(
        f"{facts['sequences']} sequences{resumed}, {facts['prompt_tokens']:,} prompt"
        f" and {facts['decode_tokens']:,} generated tokens, {facts['rows']:,} rows in"
        f" {facts['seconds_s']:.1f} s ({facts['tokens_per_s']:.0f} tokens/s)"
    )
    if "reads" in facts:
        print(
            f"{facts['host_experts']:,} experts fit in memory; {facts['reads']:,} reads"
            f" in all, {format_bytes(facts['read_bytes'])}; {facts['hits']:,} times one"
            " was there"
        )
    if facts["slowdown"] is not None:
        print(
            f"recording takes {facts['slowdown']:.2f} times as long as running the"
            " model alone"
        )
    print(f"wrote {facts['trace']}")
    if "calibration" in facts:
        calibration = dict(facts["calibration"])
        file = calibration.pop("file")
        print(f"wrote {file}: {', '.join(calibration)}")
