"""`moesim doctor` and `moesim profile` look at this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from moesim.base.options import JsonOptions, option, target_argument
from moesim.cli import output
from moesim.cli.options import from_dataclass


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

    torch and accelerator, memory, cores, disk; every lane alone and in pairs; the
    shipped model's answers; plans; copies beside products. Exit code 1 where something
    does not work.

    \b
    Examples:
      moesim doctor
      moesim doctor --disk /mnt/nvme --json > doctor.json
    """
    from moesim.cli.output import bar, quiet_libraries
    from moesim.evidence.doctor import diagnose

    quiet_libraries()
    with bar("checking", 1.0) as show:
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
    from moesim.cli.output import bar
    from moesim.runtime.measure.profile import measure
    from moesim.traces.models import model_shape

    with bar("measuring", 1.0) as show:
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
