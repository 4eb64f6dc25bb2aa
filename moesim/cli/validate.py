"""`moesim calibrate`, `moesim validate`, `moesim sensitivity`: is simulated equal to
measured, and what hangs on it?
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from moesim.cli import options

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE…", help="moesim traces (Parquet).", show_default=False
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Shorter runs.")]
Stores = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder on the disk that shall hold the experts meanwhile."
    ),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[/N],…", help="Sizes of the experts. Default: the trace's own."
    ),
]
DEFAULT_POLICIES = "all-cpu+none,on-demand+lru,fixed-mapping+lru,static-threshold+lru,greedy+lru,greedy+lfu"


def add_commands(app: typer.Typer) -> None:
    """Add all three."""
    app.command("calibrate", short_help="Learn this PC's costs from runs.")(calibrate)
    app.command("validate", short_help="Compare simulated with measured runs.")(
        validate
    )
    app.command("sensitivity", short_help="Say which constant decides who wins.")(
        sensitivity
    )


def calibrate(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The profile to write.")
    ] = Path("hw.toml"),
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
            help="Profile to start from. Default: measured first, about 10 s.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Say how far its predictions are from this profile's."
        ),
    ] = None,
    stores: Stores = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Calibrate this machine by a designed set of short runs, and write its profile. A
    few minutes; keep it quiet.

    \b
    Examples:
      moesim calibrate --out hw.toml
      moesim calibrate --quick --shapes qwen3-30b-a3b/2,qwen3-30b-a3b/4
      moesim calibrate --out again.toml --against hw.toml
    """
    options.check_places(files=[out])
    from moesim.hwprofiles.profile import load_profile
    from moesim.validation import calibrate as library
    from moesim.validation.profile_checks import speed_change

    other = load_profile(against) if against is not None else None
    sizes = shapes.split(",") if shapes else library.SHAPES
    if len(sizes) < 2:
        raise typer.BadParameter(
            f"expected two sizes, the larger first, got {shapes!r}",
            param_hint="--shapes",
        )
    with _shown("calibrating") as tell:
        profile = library.calibrate(
            out,
            shapes=sizes,
            quick=quick,
            hw=hw,
            stores=stores,
            seed=seed,
            progress=tell,
        )
    if (words := speed_change(profile)) is not None:
        print(f"note: {words}", file=sys.stderr)
    apart: dict[str, Any] | None = None
    if other is not None:
        missed = [abs(value) for value in library.differences(other, profile, sizes)]
        apart = {
            "profile": str(against),
            "median": median(missed),
            "worst": max(missed),
        }
    if as_json:
        found = {
            "name": profile.name,
            "digest": profile.digest,
            "fit": profile.fit,
            "against": apart,
        }
        print(json.dumps(found, indent=2))
        return
    print(profile.description)
    for name, report in sorted(profile.fit.items()):
        words = (
            f"median {100 * report['residual_median']:.1f} %, worst"
            f" {100 * report['residual_worst']:.1f} %"
        )
        print(f"  {name:<12}  {words}")
    if apart is not None:
        words = (
            f"median {100 * apart['median']:.1f} %, worst {100 * apart['worst']:.1f} %"
        )
        print(f"predictions differ from those of {against} by {words}")
    print(f"wrote {out}")


def validate(
    traces: Traces,
    policies: Annotated[
        str, typer.Option(metavar="P,…", help="As assignment+cache+prefetch.")
    ] = DEFAULT_POLICIES,
    cache_ratios: Annotated[
        str, typer.Option(metavar="R,…", help="Shares of experts in the GPU cache.")
    ] = "0.1,0.3,0.6",
    batches: Annotated[
        str, typer.Option(metavar="B,…", help="Sequences that run together.")
    ] = "1,4",
    shapes: Shapes = None,
    host_ratios: Annotated[
        str, typer.Option(metavar="R,…", help="Shares of experts in host memory.")
    ] = "1",
    hw: options.ThisMachine = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=2, help="Forward passes of each run.")
    ] = 16,
    repetitions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of each real run.")
    ] = 5,
    stores: Stores = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report there.")
    ] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(
            "--with", metavar="FILE", help="Sum up with an earlier validation.json."
        ),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Run a grid for real and simulated, interleaved, and say how far they differ.
    Calibrate once before.

    \b
    Examples:
      moesim validate q.parquet --shapes olmoe-1b-7b/2 --hw hw.toml --out report
      moesim validate a.parquet b.parquet --policies greedy+lru,on-demand+lru --cache-ratios 0.2,0.5 --json
      moesim validate q.parquet --hw hw.toml --host-ratios 0.5 --with report/validation.json --out both
    """
    options.check_places(folder=out)
    from moesim.reporting import validation_page as report
    from moesim.validation import grid as library
    from moesim.validation.summary import joined

    before = None if earlier is None else report.load(earlier)
    names = options.split_names(policies, "--policies")
    with _shown("validating") as tell:
        found = library.validate(
            traces,
            policies=names,
            cache_ratios=_numbers(cache_ratios),
            hw=hw,
            steps=steps,
            batches=[int(value) for value in _numbers(batches)],
            shapes=shapes.split(",") if shapes else (None,),
            host_ratios=_numbers(host_ratios),
            repetitions=repetitions,
            stores=stores,
            seed=seed,
            progress=tell,
        )
    result = found.to_json() if before is None else joined(found.to_json(), before)
    places = report.save(result, out) if out is not None else []
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(report.markdown(result))
    for place in places:
        print(f"wrote {place}")
    for warning in found.warnings:
        print(f"note: {warning}", file=sys.stderr)


def sensitivity(
    trace: options.TraceFile,
    policies: Annotated[
        str, typer.Option(metavar="P,…", help="Who competes.")
    ] = "greedy+lru,on-demand+lru,all-cpu+none",
    hw: options.Hardware = None,
    cache_ratio: Annotated[
        float, typer.Option(metavar="R", min=0, max=1, help="Share of experts cached.")
    ] = 0.25,
    batch: options.Batch = 1,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Forward passes replayed.")
    ] = 32,
    as_json: options.AsJson = False,
) -> None:
    """Move every constant of a profile within its interval and say whether another
    policy would win.

    \b
    Example:
      moesim sensitivity q.parquet --hw hw.toml --policies greedy+lru,on-demand+lfu
    """
    from moesim.analysis import sensitivity as library

    names = options.split_names(policies, "--policies")
    with _shown("moving constants") as tell:
        found = library.sensitivity(
            trace,
            policies=names,
            hw=hw,
            cache_ratio=cache_ratio,
            batch=batch,
            steps=steps,
            progress=tell,
        ).to_json()
    print(json.dumps(found, indent=2) if as_json else sensitivity_text(found))


def sensitivity_text(found: dict[str, Any]) -> str:
    """Lay out winners, constants, break-even and cliff for a terminal."""
    lines = [
        f"{name:<28} {seconds:10.4f} s"
        for name, seconds in sorted(found["baseline_s"].items(), key=lambda x: x[1])
    ]
    changes = found["winner_changes"]
    lines += [
        "",
        (
            f"winner: {found['winner']}; constants that change it:"
            f" {', '.join(changes) if changes else 'none'}"
        ),
        "",
    ]
    for one in found["constants"][:12]:
        lines.append(
            f"  {one['path']:<36} moves a run by {100 * one['effect']:6.2f} % "
            f" ({one['interval']} interval)"
        )
    fetch = [row["tokens"] for row in found["break_even"] if row["fetch"]]
    words = (
        f"from {fetch[0]} tokens of an expert on"
        if fetch
        else "never, up to 1024 tokens"
    )
    cliff = found["cliff"]
    rates = ", ".join(
        f"{share} x: {100 * (rate or 0):.1f} %"
        for share, rate in cliff["hit_rate"].items()
    )
    lines += [
        "",
        f"fetching an absent expert is cheaper than computing it on the CPU {words}",
        (
            f"capacity cliff of a global LRU: {cliff['working_set']} experts"
            f" ({100 * cliff['ratio']:.1f} %); hits {rates}"
        ),
    ]
    return "\n".join(lines)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers separated by commas, got {text!r}"
        ) from None


@contextmanager
def _shown(what: str) -> Iterator[Callable[[str, float], None]]:
    """Show a bar that fills to one, and what is being done."""
    from moesim.cli.progress import bar

    with bar(what, 1.0) as show:
        yield lambda _words, done: show(done)
