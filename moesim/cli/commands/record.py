"""`moesim record`: run a model and write its routing trace."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from moesim.base.options import (
    JsonOptions,
    Options,
    file_option,
    input_option,
    option,
    target_argument,
)
from moesim.cli import output
from moesim.cli.options import check_device, device_option, from_dataclass
from moesim.runtime.record import CALIBRATION, EVALUATION, RecordOptions

if TYPE_CHECKING:
    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.record.calibration import Residual
    from moesim.runtime.record.record import Recording

DEFAULT_HOST_BYTES: Final = 4 << 30
"""Host memory for experts that are read from a store one by one."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(JsonOptions):
    """What is read, by which model, and where its routing goes."""

    prompts: Path | None = input_option(
        "Texts separated by blank lines, or one per line; or a data set, .jsonl, .csv,"
        " .tsv or .parquet."
    )
    column: str | None = option(
        None,
        "Column of a data set; found by itself if named as usual.",
        metavar="NAME",
        needs=("prompts",),
    )
    limit: int | None = option(None, "Take the first N prompts.", minimum=1)
    target: Path = target_argument("The trace to write.", Path("trace.parquet"))
    model: str = option(
        "tiny", "The shipped model or a Hugging Face folder.", metavar="tiny|DIR"
    )
    store: Path | None = option(
        None,
        "Read experts from this store (built if new): for models beyond memory.",
        metavar="DIR",
    )
    host_memory_bytes: int | None = option(
        None,
        "Memory for experts beside --store. Default: 4GiB.",
        # Without a store the whole model is in memory, whatever it takes.
        needs=("store",),
    )


@dataclass(frozen=True, kw_only=True)
class RecordCommand(RecordOptions, TextOptions):
    """All options of `moesim record`."""

    residual: Path | None = file_option(
        "Residual vectors for pred1_res; computed and written where the file is new."
    )
    calibration: Path | None = file_option(
        "Also write what policies may know beforehand, as .safetensors for --artefacts."
    )
    device: str = device_option()
    finish: bool = option(
        False, "Run nothing; make DST of the sequences a stopped recording has."
    )

    def inputs(self) -> list[Path]:
        """Files that are read, a model's own included."""
        files = [*Path(self.model).glob("*"), *Options.inputs(self)]
        return [file for file in files if file != self.residual]


@from_dataclass()
def record(options: RecordCommand) -> None:
    """Run a model on prompts and write what its gates said as a trace.

    Residual vectors for pred1_res lie beside the tiny model; other models get theirs
    from --residual FILE, calibrated on text that no evaluation uses, or from
    residual.safetensors in their folder.

    \b
    Examples:
      moesim record trace.parquet --prompts prompts.txt
      moesim record squad-trace.parquet --model ~/models/olmoe --prompts squad.parquet --limit 100 --batch 4
      moesim record other.parquet --model ~/models/olmoe --prompts other.txt --calibration olmoe.safetensors
      moesim record --model ~/models/large --store /mnt/nvme/large --host-memory 16GiB --prompts prompts.txt
    """
    # Finishing needs neither texts nor a model.
    if options.finish:
        _finish(options)
        return
    _check(options)

    # Before the imports, since the libraries look at it when they are imported.
    output.quiet_libraries()
    from moesim.runtime.record.record import record as run
    from moesim.runtime.text import read_prompts

    texts = read_prompts(options.prompts or "", options.column, options.limit)
    with _opened_model(options) as local:
        vectors = _residual_of(options, local, texts)
        with (
            output.bar("recording", len(texts)) as show,
            _hint_when_stopped(options.target),
        ):
            recording = run(
                local,
                texts,
                options.target,
                _how(options),
                residual=vectors,
                progress=lambda tokens, expected: show(len(texts) * tokens / expected),
            )
        facts = _facts(recording, local)

    lines = _lines(facts)
    if options.calibration is not None:
        from moesim.runtime.record.calibration import write_calibration

        written = write_calibration(options.target, options.calibration, vectors)
        facts["calibration"] = {"file": str(options.calibration), **written["tensors"]}
        lines.append(f"calibration: {', '.join(written['tensors'])}")
    output.tell(options, facts, lines, options.target, options.calibration)


def _how(options: RecordCommand) -> RecordOptions:
    """What the recorder is told."""
    values = {each.name: getattr(options, each.name) for each in fields(RecordOptions)}
    # What policies know beforehand comes from calibration text.
    split = CALIBRATION if options.calibration else EVALUATION
    return RecordOptions(**values | {"split": options.split or split})


def default_residual(model: str) -> Path:
    """Where the residual vectors of a model lie, if it has any."""
    from moesim.runtime.models.local_model import tiny_dir

    return (tiny_dir() if model == "tiny" else Path(model)) / "residual.safetensors"


def _check(options: RecordCommand) -> None:
    """Refuse, before torch is imported, what cannot be recorded.

    Raises:
        typer.BadParameter: naming the option.
    """
    if options.prompts is None:
        raise typer.BadParameter("expected a file with prompts", param_hint="--prompts")
    # What policies know beforehand must not come from what they are judged on.
    if options.calibration is not None and options.split == EVALUATION:
        raise typer.BadParameter(
            "expected calibration text beside --calibration", param_hint="--split"
        )
    check_device(options.device)


def _finish(options: RecordCommand) -> None:
    """Make a trace of the sequences that a stopped recording has."""
    from moesim.runtime.record.segments import finish

    finished = finish(options.target)
    facts = {
        "trace": str(finished.path),
        "sequences": finished.sequences,
        "asked_sequences": finished.planned,
        "prompt_tokens": finished.prompt_tokens,
        "decode_tokens": finished.decode_tokens,
        "rows": finished.rows,
    }
    line = (
        f"{finished.sequences} of {finished.planned} sequences, {finished.rows:,} rows"
    )
    output.tell(options, facts, [line], finished.path)


@contextmanager
def _hint_when_stopped(out: Path) -> Iterator[None]:
    """Tell a user who presses ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        from moesim.runtime.record.segments import unfinished

        if sequences := unfinished(out):
            print(
                f"stopped; {sequences} sequences are kept: the same command goes on,"
                " --finish makes a trace of them",
                file=sys.stderr,
            )
        raise


@contextmanager
def _opened_model(options: RecordCommand) -> Iterator["LocalModel"]:
    """Load a model, or open it with its experts in a store."""
    if options.store is None:
        from moesim.runtime.models.local_model import load_model

        yield load_model(options.model, device=options.device)
        return
    from moesim.runtime.models.offloaded import stored_model

    # The bar ends when the store is open, the store only after the recording.
    with ExitStack() as resources:
        with output.bar("opening the store", 1.0) as show:
            opened = stored_model(
                options.model,
                options.store,
                host_bytes=options.host_memory_bytes or DEFAULT_HOST_BYTES,
                device=options.device,
                building=lambda done: show(done.records / done.total_records),
            )
            local = resources.enter_context(opened)
        yield local


def _residual_of(
    options: RecordCommand, local: "LocalModel", texts: Sequence[str]
) -> "Residual | None":
    """Read residual vectors, or calibrate them where they are wanted: on the texts
    beside --calibration, else on the corpus that ships.
    """
    from moesim.runtime.record.calibration import Residual, residual_vectors

    # A file that was not named is read if it is there, and never written.
    file = options.residual or default_residual(options.model)
    if file.is_file():
        return Residual.load(file)
    if options.residual is None and options.calibration is None:
        return None
    with output.bar("calibrating residual vectors"):
        vectors = residual_vectors(local, texts if options.calibration else None)
    if options.residual is not None:
        vectors.save(file)
    return vectors


def _facts(recording: "Recording", local: "LocalModel") -> dict[str, Any]:
    """What was recorded, as `moesim record --json` prints it."""
    facts: dict[str, Any] = {
        "trace": str(recording.path),
        "sequences": recording.sequences,
        "resumed": recording.resumed,
        "prompt_tokens": recording.prompt_tokens,
        "decode_tokens": recording.decode_tokens,
        "rows": recording.rows,
        "seconds_s": recording.seconds_s,
        "tokens_per_s": recording.tokens_per_s,
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


def _lines(facts: dict[str, Any]) -> list[str]:
    """What was recorded, for people."""
    from moesim.base.units import format_bytes

    resumed = f" ({facts['resumed']} of them before)" if facts["resumed"] else ""
    line = (
        f"{facts['sequences']} sequences{resumed}, {facts['prompt_tokens']:,} prompt"
        f" and {facts['decode_tokens']:,} generated tokens, {facts['rows']:,} rows in"
        f" {facts['seconds_s']:.1f} s ({facts['tokens_per_s']:.0f} tokens/s)"
    )
    if "reads" not in facts:
        return [line]
    reads = (
        f"{facts['host_experts']:,} experts fit in memory; {facts['reads']:,} reads"
        f" in all, {format_bytes(facts['read_bytes'])}; {facts['hits']:,} times one"
        " was there"
    )
    return [line, reads]
