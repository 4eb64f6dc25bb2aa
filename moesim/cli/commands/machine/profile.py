"""`moesim profile`: measure this machine."""

import json
from dataclasses import dataclass
from pathlib import Path

from moesim.base.options import Options, json_option, option
from moesim.cli import output
from moesim.cli.options import from_dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(Options):
    """What is measured, how long, and where it is written."""

    out: Path = option(
        Path("hw.toml"),
        "The profile to write; ./hw.toml is found by itself.",
        kind=Path,
        metavar="FILE",
        place="file",
        # `load_profile` tells files from names by it.
        suffixes=(".toml",),
    )
    quick: bool = option(
        False, "About 10 s instead of 40 s, with fewer sizes.", kind=bool
    )
    shape: str | None = option(
        None,
        "Model whose experts are measured. Default: qwen3-30b-a3b.",
        metavar="NAME|WORDS",
    )
    disk: Path | None = option(
        None,
        "Folder on the disk that will hold experts. Default: that of OUT.",
        kind=Path,
        metavar="DIR",
    )
    as_json: bool = json_option()


@from_dataclass()
def profile(options: ProfileOptions) -> None:
    """Measure this PC: expert compute, copies, disk reads, hand-offs, and what they
    cost each other.

    Close other programs first: what they take is measured too.

    \b
    Examples:
      moesim profile
      moesim profile --quick --out laptop.toml --disk /mnt/nvme
    """
    from moesim.cli.output import bar
    from moesim.runtime.measure.profile import measure
    from moesim.traces.models import model_shape

    with bar("measuring", 1.0) as show:
        machine = measure(
            # The default is chosen where the costs of other sizes are derived.
            None if options.shape is None else model_shape(options.shape),
            options.out,
            quick=options.quick,
            disk_dir=options.disk,
            progress=lambda _part, done: show(done),
        )
    if options.as_json:
        print(json.dumps(machine.to_dict(), indent=2))
        return
    print(f"{machine.name}: {machine.description}")
    output.print_written([options.out])
