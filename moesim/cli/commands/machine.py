"""`moesim doctor`, `profile`, `verify`, `calibrate` and `validate`: this machine, and how
far the simulator is from it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moesim.base.options import (
    JsonOptions,
    folder_option,
    input_option,
    minutes_option,
    option,
    policies_option,
    seed_option,
    target_argument,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass
from moesim.runs.config import of_run

if TYPE_CHECKING:
    from moesim.evidence.validation.results import Validation

DIFFERENT = 1
"""Exit code of a simulator that does not hold here."""
REPORT = ("validation.json", "validation.md", "validation.html")
"""What `validate` writes into a folder."""

STORES = "Folder of the experts' stores. Default: a temporary one."


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(JsonOptions):
    """What `moesim verify` is asked."""

    out: Path = option(
        Path("verify"),
        "Folder of all results; an interrupted call is continued there.",
        metavar="DIR",
        place="folder",
    )
    minutes: float = minutes_option(
        "For everything; decides how many cells and repetitions are made.", 10.0
    )
    seed: int = seed_option()


@from_dataclass(from_file=False)
def verify(options: VerifyOptions) -> None:
    """Measure this PC, calibrate, run a grid for real and simulated, and say whether
    the simulator holds here. Keep the PC quiet meanwhile.

    \b
    Examples:
      moesim verify
      moesim verify --minutes 30 --out report
    """
    from moesim.evidence.validation import report
    from moesim.evidence.validation import verify as library

    line = output.command_line()
    places = [options.out / library.VERDICT]
    notes: list[str] = []

    def save(result: dict[str, Any]) -> None:
        notes[:] = result["warnings"]
        places[1:] = [report.save(result, options.out, line)[-1]]

    with output.bar("verifying", 1.0) as progress:
        verdict = library.verify(
            options.out,
            minutes=options.minutes,
            seed=options.seed,
            save=save,
            progress=progress,
        )
    output.tell(options, verdict.to_json(), [verdict.words], *places, notes=notes)
    if verdict.holds is False:
        raise typer.Exit(DIFFERENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions(JsonOptions):
    """What `moesim validate` is asked."""

    traces: tuple[Path, ...] = input_option(
        "moesim traces (Parquet).",
        argument=True,
        metavar="TRACE…",
    )
    policy: tuple[str, ...] = policies_option(
        *("all-cpu+none", "on-demand+lru", "fixed-mapping+lru"),
        *("static-threshold+lru", "greedy+lru", "greedy+lfu"),
    )
    cache_ratio: tuple[float, ...] = of_run("cache_ratio", (0.1, 0.3, 0.6))
    batch: tuple[int, ...] = of_run("batch", (1, 4))
    shape: tuple[str, ...] | None = option(
        None,
        "Sizes of the experts. Default: the trace's own.",
        metavar="NAME[/N]",
    )
    host_ratio: tuple[float, ...] = option(
        (1.0,),
        "Shares of experts in host memory.",
        metavar="R",
    )
    hw: str | None = option(
        None,
        "Profile of this machine. Default: measured now.",
        metavar="FILE",
        place="input",
    )
    steps: int = option(16, "Forward passes of each run.", minimum=2)
    repetitions: int = option(5, "Of each real run.", minimum=1)
    minutes: float | None = minutes_option(
        "A limit: cells and repetitions that do not fit are left out, and named."
    )
    store: Path | None = option(None, STORES, metavar="DIR")
    out: Path | None = folder_option(
        "Write the report there, after every half minute; a second call goes on.",
        *REPORT,
    )
    seed: int = seed_option()


@from_dataclass(from_file=False)
def validate(options: ValidateOptions) -> None:
    """Run a grid for real and simulated, interleaved, and say how far they differ.
    Calibrate once before.

    \b
    Examples:
      moesim validate q.parquet --shape olmoe-1b-7b/2 --hw hw.toml --out report
      moesim validate q.parquet --hw hw.toml --out report --minutes 10
      moesim validate a.parquet b.parquet --policy greedy+lru,on-demand+lru --cache-ratio 0.2,0.5 --json
    """
    from moesim.evidence.validation import grid as library
    from moesim.evidence.validation import report
    from moesim.evidence.validation.report import validation_answer

    out = options.out
    line = output.command_line()
    places: list[Path] = []

    def save(validation: "Validation") -> dict[str, Any]:
        result = validation.to_json()
        if out is not None:
            places[:] = report.save(result, out, line)
        return result

    # Simulated and measured runs take turns, so that drift of the machine hits both.
    with output.bar("validating", 1.0) as progress:
        validation = library.validate(
            list(options.traces),
            policies=options.policy,
            cache_ratios=options.cache_ratio,
            hw=options.hw,
            steps=options.steps,
            batches=options.batch,
            # None stands for the shape of each trace.
            shapes=options.shape or (None,),
            host_ratios=options.host_ratio,
            repetitions=options.repetitions,
            stores=options.store,
            seed=options.seed,
            minutes=options.minutes,
            journal=None if out is None else out / "runs.jsonl",
            on_result=None if out is None else save,
            progress=progress,
        )
    answer = validation_answer(save(validation))
    output.present(answer, options, more=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(JsonOptions):
    """What `moesim calibrate` is asked."""

    target: Path = target_argument("The profile to write.", Path("hw.toml"))
    runs: tuple[Path, ...] = input_option(
        "Learn from these folders of finished real runs (moesim run --out) instead of"
        " making designed ones.",
        (),
        metavar="RUN",
        flag="--from",
        excludes=("quick", "shape", "minutes", "store"),
    )
    quick: bool = option(False, "Shorter runs.")
    shape: tuple[str, ...] | None = option(
        None,
        "Two sizes of experts, the larger first.",
        metavar="NAME[/N]",
    )
    hw: str | None = option(
        None,
        "Profile to start from. Default: measured first, about 10 s; with --from that"
        " of DST where it is there, else that of the first run.",
        metavar="FILE",
    )
    minutes: float | None = minutes_option(
        "A limit: runs are repeated less often where they would take longer."
    )
    force: bool = option(False, "Write a profile that cannot be trusted all the same.")
    store: Path | None = option(None, STORES, metavar="DIR")
    seed: int = seed_option()


@from_dataclass(from_file=False)
def calibrate(options: CalibrateOptions) -> None:
    """Calibrate this machine by a designed set of short runs, and write its profile. A
    few minutes; keep it quiet. With --from by runs that were made before.

    \b
    Examples:
      moesim calibrate hw.toml
      moesim calibrate --quick --shape qwen3-30b-a3b/2,qwen3-30b-a3b/4
      moesim calibrate --minutes 5
      moesim calibrate hw.toml --from monday,tuesday
    """
    if options.runs:
        _from(options)
        return
    from moesim.evidence.validation import calibrate as library
    from moesim.evidence.validation.profile_checks import speed_change

    sizes = options.shape or library.SHAPES
    # One size cannot tell latency from bandwidth.
    if len(sizes) < 2:
        raise typer.BadParameter(
            f"expected two sizes, the larger first, got {','.join(sizes)!r}",
            param_hint="--shape",
        )
    with output.bar("calibrating", 1.0) as progress:
        profile = library.calibrate(
            options.target,
            shapes=sizes,
            quick=options.quick,
            hw=options.hw,
            stores=options.store,
            seed=options.seed,
            force=options.force,
            minutes=options.minutes,
            progress=progress,
        )

    # Small changes are said; of large ones a profile is not written.
    if (warning := speed_change(profile)) is not None:
        print(f"note: {warning}", file=sys.stderr)
    facts = {"name": profile.name, "digest": profile.digest, "fit": profile.fit}
    lines = [profile.description]
    for name, report in sorted(profile.fit.items()):
        lines.append(
            f"  {name:<12}  median {100 * report['residual_median']:.1f} %, worst"
            f" {100 * report['residual_worst']:.1f} %"
        )
    output.tell(options, facts, lines, options.target)


def _from(options: CalibrateOptions) -> None:
    """Learn from finished runs, and say how they are predicted now."""
    from moesim.evidence.validation.learning import learn_from

    with output.bar("learning", 1.0) as progress:
        learned = learn_from(
            list(options.runs),
            options.target,
            hw=options.hw,
            force=options.force,
            seed=options.seed,
            progress=progress,
        )
    lines = [learned.profile.description, *learned.lines()]
    output.tell(options, learned.to_json(), lines, options.target)


def disk_option(default: str) -> Any:
    """``--disk``, where experts will lie."""
    text = f"Folder on the disk that will hold experts. Default: {default}."
    return option(None, text, metavar="DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(JsonOptions):
    """What is checked."""

    disk: Path | None = disk_option("temporary files")


@from_dataclass(from_file=False)
def doctor(options: DoctorOptions) -> None:
    """Say what this machine has, and what of it works, in less than a minute.

    torch and accelerator, memory, cores, disk, and the shipped model's answers. Exit
    code 1 where something does not work.

    \b
    Examples:
      moesim doctor
      moesim doctor --disk /mnt/nvme --json > doctor.json
    """
    from moesim.evidence.doctor import diagnose

    output.quiet_libraries()
    with output.bar("checking", 1.0) as show:
        diagnosis = diagnose(options.disk, show)
    output.tell(options, diagnosis.to_json(), diagnosis.lines())
    if diagnosis.of("fails"):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(JsonOptions):
    """What is measured, how long, and where it is written."""

    target: Path = target_argument(
        "The profile to write; ./hw.toml is found by itself.",
        Path("hw.toml"),
        # `load_profile` tells files from names by it.
        suffixes=(".toml",),
    )
    quick: bool = option(False, "About 10 s instead of 40 s, with fewer sizes.")
    shape: str | None = option(
        None,
        "Model whose experts are measured. Default: qwen3-30b-a3b.",
        metavar="NAME|WORDS",
    )
    disk: Path | None = disk_option("that of DST")


@from_dataclass()
def profile(options: ProfileOptions) -> None:
    """Measure this PC: expert compute, copies, disk reads, hand-offs, and what they
    cost each other.

    Close other programs first: what they take is measured too.

    \b
    Examples:
      moesim profile
      moesim profile laptop.toml --quick --disk /mnt/nvme
    """
    from moesim.runtime.measure.profile import measure
    from moesim.traces.models import model_shape

    with output.bar("measuring", 1.0) as show:
        machine = measure(
            # The default is chosen where the costs of other sizes are derived.
            None if options.shape is None else model_shape(options.shape),
            options.target,
            quick=options.quick,
            disk_dir=options.disk,
            progress=show,
        )
    line = f"{machine.name}: {machine.description}"
    output.tell(options, machine.to_dict(), [line], options.target)
