"""What `moesim record` does around the recorder: opens the model, keeps what was
stopped, says what was done.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from moesim.runtime.models.local_model import LocalModel
    from moesim.runtime.record.record import Recording
    from moesim.runtime.record.residual import Residual

DEFAULT_HOST_BYTES: Final = 4 << 30
"""Host memory for experts that visit from a store."""


def check_options(
    prompts: Path | None,
    dataset: Path | None,
    column: str | None,
    store: Path | None,
    host_bytes: int | None,
    calibration: Path | None,
    split: str | None,
) -> None:
    """Refuse options that contradict each other.

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
    if host_bytes is not None and store is None:
        raise typer.BadParameter(
            "expected --store DIR beside it", param_hint="--host-memory"
        )
    if calibration is not None and split == "evaluation":
        raise typer.BadParameter(
            "expected calibration text beside --calibration", param_hint="--split"
        )


def finish(out: Path, *, as_json: bool) -> None:
    """Make a trace of what there is, and say so."""
    from moesim.runtime.record.segments import finish

    made = finish(out)
    if as_json:
        facts = {
            "trace": str(made.path),
            "sequences": made.sequences,
            "asked_sequences": made.planned,
            "prompt_tokens": made.prompt_tokens,
            "decode_tokens": made.decode_tokens,
            "rows": made.rows,
        }
        print(json.dumps(facts, indent=2))
        return
    print(
        f"{made.sequences} of {made.planned} sequences, {made.rows:,} rows\nwrote"
        f" {made.path}"
    )


def check_unfinished(out: Path, *, resume: bool) -> None:
    """Keep a user from throwing away what a stopped recording has.

    Raises:
        TraceError: there is one, and nobody said that it should go on.
    """
    from moesim.runtime.record.segments import parts_dir, unfinished
    from moesim.traces.errors import TraceError

    if not resume and (had := unfinished(out)):
        raise TraceError(
            f"{out}: expected no unfinished recording, found one of {had} sequences in"
            f" {parts_dir(out).name}; --resume goes on, --finish makes a trace of it,"
            " removing the folder begins anew"
        )


@contextmanager
def hint_when_stopped(out: Path) -> Iterator[None]:
    """Tell who presses ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        from moesim.runtime.record.segments import unfinished

        if had := unfinished(out):
            print(
                f"stopped; {had} sequences are kept: --resume goes on, --finish makes a"
                " trace of them",
                file=sys.stderr,
            )
        raise


@contextmanager
def opened_model(
    spec: str, store: Path | None, host_bytes: int | None, device: str
) -> Iterator[LocalModel]:
    """Load a model, or open it with its experts in a store."""
    if store is None:
        from moesim.runtime.models.local_model import load_model

        yield load_model(spec, device=device)
        return
    from moesim.cli.progress import bar
    from moesim.runtime.record.stored_model import stored_model

    host_bytes = DEFAULT_HOST_BYTES if host_bytes is None else host_bytes
    with ExitStack() as held:
        with bar("opening the store", 1.0) as show:
            opened = stored_model(
                spec,
                store,
                host_bytes=host_bytes,
                device=device,
                building=lambda done: show(done.records / done.total_records),
            )
            local = held.enter_context(opened)
        yield local


def residual_of(
    local: LocalModel, file: Path, *, asked: bool, texts: Sequence[str] | None
) -> Residual | None:
    """Read residual vectors, or calibrate them where they are wanted: on `texts`, or on
    the corpus that ships.

    Args:
        local: the model.
        file: where the vectors lie, or will lie.
        asked: the user named the file, so it is made.
        texts: calibration text; without it, vectors are made only if asked for.
    """
    from moesim.cli.progress import messages
    from moesim.runtime.record.residual import Residual, residual_vectors

    if file.is_file():
        return Residual.load(file)
    if not asked and texts is None:
        return None
    with messages("calibrating residual vectors"):
        found = residual_vectors(local, texts)
    if asked:
        found.save(file)
    return found


def facts_of(done: Recording, local: LocalModel) -> dict[str, Any]:
    """What was done, as `moesim record --json` prints it."""
    facts: dict[str, Any] = {
        "trace": str(done.path),
        "sequences": done.sequences,
        "resumed": done.resumed,
        "prompt_tokens": done.prompt_tokens,
        "decode_tokens": done.decode_tokens,
        "rows": done.rows,
        "seconds_s": done.seconds_s,
        "tokens_per_s": done.tokens_per_s,
        "slowdown": done.overhead.slowdown if done.overhead else None,
    }
    cache = getattr(local, "cache", None)
    if cache is not None:
        facts |= {
            "host_experts": cache.slots,
            "reads": cache.reads,
            "read_bytes": cache.read_bytes,
            "hits": cache.hits,
        }
    return facts


def say(facts: dict[str, Any]) -> None:
    """Print what was done, for people."""
    from moesim.traces.sizes import format_bytes

    kept = f" ({facts['resumed']} of them before)" if facts["resumed"] else ""
    print(
        f"{facts['sequences']} sequences{kept}, {facts['prompt_tokens']:,} prompt and"
        f" {facts['decode_tokens']:,} generated tokens, {facts['rows']:,} rows in"
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
        file, *tensors = facts["calibration"].items()
        print(f"wrote {file[1]}: {', '.join(name for name, _ in tensors)}")
