"""`moesim doctor`: what this machine has, and what of it works."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson


def doctor(
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a report to attach to a message."),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder on the disk that will hold experts. Default: temporary files.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has, and what of it works, in less than a minute.

    torch and accelerator, memory, cores, disk; every lane alone and in pairs; the
    shipped model's answers; plans; copies beside products. Exit code 1 where something
    does not work.

    \b
    Examples:
      moesim doctor
      moesim doctor --disk /mnt/nvme --report doctor.json
    """
    check_places(files=[report])
    from moesim.cli.progress import bar, quiet_libraries
    from moesim.doctor.diagnosis import diagnose

    quiet_libraries()
    with bar("checking", 1.0) as show:
        diagnosis = diagnose(disk, lambda _name, done: show(done))
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        print("\n".join(diagnosis.lines()))
    if report is not None:
        diagnosis.write(report)
        if not as_json:
            output.print_written([report])
    if diagnosis.of("fails"):
        raise typer.Exit(1)
