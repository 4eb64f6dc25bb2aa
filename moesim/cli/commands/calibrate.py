"""`moesim calibrate`: learn this machine's costs from runs."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli import output
from moesim.cli.checks import check_places, refuse_options
from moesim.cli.options import AsJson, Quick, Seed, Stores

if TYPE_CHECKING:
    from moesim.hwprofiles.profile import HardwareProfile


def calibrate(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN…",
            help="With --from: folders of real runs (moesim run --out).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The profile to write.")
    ] = Path("hw.toml"),
    from_runs: Annotated[
        bool,
        typer.Option(
            "--from",
            help="Learn from finished real runs instead of making designed ones.",
        ),
    ] = False,
    quick: Quick = False,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[/N],…", help="Two sizes of experts, the larger first."
        ),
    ] = None,
    hw: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Profile to start from. Default: measured first, about 10 s; with"
                " --from that of --out where it is there, else that of the first run."
            ),
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Say how far its predictions are from this profile's."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            min=0,
            help=(
                "Repeat runs for so long at most, until no constant is so wide that"
                " predictions move by more than 2 %."
            ),
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Write a profile that cannot be trusted all the same."
        ),
    ] = False,
    stores: Stores = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Calibrate this machine by a designed set of short runs, and write its profile. A
    few minutes; keep it quiet. With --from by runs that were made before.

    \b
    Examples:
      moesim calibrate --out hw.toml
      moesim calibrate --quick --shapes qwen3-30b-a3b/2,qwen3-30b-a3b/4
      moesim calibrate --out again.toml --against hw.toml
      moesim calibrate --from monday tuesday --out hw.toml
    """
    if from_runs:
        refuse_options(
            context,
            ("quick", "shapes", "against", "minutes", "stores"),
            "designed runs",
        )
        _from(runs or [], out, hw, seed=seed, force=force, as_json=as_json)
        return
    if runs:
        raise typer.BadParameter(
            "expected folders of runs only with --from", param_hint="RUN…"
        )
    check_places(files=[out])
    from statistics import median

    from moesim.cli.progress import steps_of
    from moesim.hwprofiles.profile import load_profile
    from moesim.validation import calibrate as library
    from moesim.validation.profile_checks import speed_change
    from moesim.validation.wide import wide_constants

    # Read first: a missing file should not cost minutes of measuring.
    reference = None if against is None else load_profile(against)
    sizes = shapes.split(",") if shapes else library.SHAPES
    # One size cannot tell latency from bandwidth.
    if len(sizes) < 2:
        raise typer.BadParameter(
            f"expected two sizes, the larger first, got {shapes!r}",
            param_hint="--shapes",
        )
    with steps_of("calibrating") as progress:
        profile = library.calibrate(
            out,
            shapes=sizes,
            quick=quick,
            hw=hw,
            stores=stores,
            seed=seed,
            force=force,
            minutes=minutes,
            progress=progress,
        )

    # Small changes are said; of large ones a profile is not written.
    if (warning := speed_change(profile)) is not None:
        print(f"note: {warning}", file=sys.stderr)
    difference: dict[str, Any] | None = None
    if reference is not None:
        errors = [
            abs(error) for error in library.differences(reference, profile, sizes)
        ]
        difference = {
            "profile": str(against),
            "median": median(errors),
            "worst": max(errors),
        }
    if as_json:
        facts = {
            "name": profile.name,
            "digest": profile.digest,
            "fit": profile.fit,
            "against": difference,
        }
        print(json.dumps(facts, indent=2))
        return
    _print(profile, difference)
    shape = library.shape_of(sizes[0])
    for wide in wide_constants(profile, shape):
        print(f"still wide: {wide.words()}")
    output.print_written([out])


def _print(profile: "HardwareProfile", difference: dict[str, Any] | None) -> None:
    print(profile.description)
    for name, report in sorted(profile.fit.items()):
        print(
            f"  {name:<12}  median {100 * report['residual_median']:.1f} %, worst"
            f" {100 * report['residual_worst']:.1f} %"
        )
    if difference is not None:
        print(
            f"predictions differ from those of {difference['profile']} by median"
            f" {100 * difference['median']:.1f} %, worst"
            f" {100 * difference['worst']:.1f} %"
        )


def _from(
    folders: list[Path],
    out: Path,
    hw: str | None,
    *,
    seed: int,
    force: bool,
    as_json: bool,
) -> None:
    """Learn from finished runs, and say how they are predicted now.

    Args:
        folders: of ``moesim run --out``.
        out: the profile to write.
        hw: the profile to start from.
        seed: of the resampling behind intervals.
        force: write a profile that cannot be trusted all the same.
        as_json: print JSON instead of lines.
    """
    if not folders:
        raise typer.BadParameter(
            "expected folders of real runs (moesim run --out)", param_hint="RUN…"
        )
    check_places(files=[out])
    from moesim.cli.progress import steps_of
    from moesim.validation.learning.earlier_runs import learn_from

    with steps_of("learning") as progress:
        learned = learn_from(
            folders, out, hw=hw, force=force, seed=seed, progress=progress
        )
    if as_json:
        print(json.dumps(learned.to_json(), indent=2))
        return
    print(learned.profile.description)
    print("\n".join(learned.lines()))
    output.print_written([out])
