"""`moesim doctor`: what this machine has, and what of it works."""

import json
import sys
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
    warm: Annotated[
        bool,
        typer.Option(
            "--warm", help="Only compile everything that runs would wait for once."
        ),
    ] = False,
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
      moesim doctor --warm
    """
    if warm:
        _compile_ahead()
        return
    check_places(files=[report])
    from moesim.cli.output import bar, quiet_libraries
    from moesim.evidence.doctor import diagnose

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


def _compile_ahead() -> None:
    from moesim.base.host_limits import available_cores
    from moesim.cli.output import bar
    from moesim.machine_code.ahead import compile_ahead
    from moesim.machine_code.store import folder

    print("compiling everything, once, about 20 s of one core", file=sys.stderr)
    with bar("compiling", 1.0) as show:
        made = compile_ahead(available_cores(), show)
    print(f"{made} functions compiled; all are in {folder()}")
