"""`moesim profile`: measure this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson


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
    as_json: AsJson = False,
) -> None:
    """Measure this PC: expert compute, copies, disk reads, hand-offs, and what they
    cost each other.

    Close other programs first: what they take is measured too.

    \b
    Examples:
      moesim profile
      moesim profile --quick --out laptop.toml --disk /mnt/nvme
    """
    check_places(files=[out])
    # `load_profile` tells files from names by it.
    if out.suffix != ".toml":
        raise typer.BadParameter(
            f"expected a name that ends in .toml, got {str(out)!r}", param_hint="--out"
        )
    from moesim.cli.progress import bar
    from moesim.runtime.measure.profile import measure
    from moesim.traces.models import model_shape

    with bar("measuring", 1.0) as show:
        machine = measure(
            # The default is chosen where the costs of other sizes are derived.
            None if shape is None else model_shape(shape),
            out,
            quick=quick,
            disk_dir=disk,
            progress=lambda _part, done: show(done),
        )
    if as_json:
        print(json.dumps(machine.to_dict(), indent=2))
        return
    print(f"{machine.name}: {machine.description}")
    output.print_written([out])
