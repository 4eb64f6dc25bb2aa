"""`moesim validate`: compare simulated with measured runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import output, parsers
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, Seed, Stores, ThisMachine

DEFAULT_POLICIES = "all-cpu+none,on-demand+lru,fixed-mapping+lru,static-threshold+lru,greedy+lru,greedy+lfu"

DIFFERENT = 1
"""Exit code of a structure that differs, and of aims that are not met."""


def validate(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="TRACE…",
            help="moesim traces (Parquet); with --structure folders of real runs.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="P,…", help="As assignment+cache+prefetch.")
    ] = DEFAULT_POLICIES,
    cache_ratios: Annotated[
        str, typer.Option(metavar="R,…", help="Shares of experts in the GPU cache.")
    ] = "0.1,0.3,0.6",
    batches: Annotated[
        str, typer.Option(metavar="B,…", help="Sequences that run together.")
    ] = "1,4",
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[/N],…",
            help="Sizes of the experts. Default: the trace's own.",
        ),
    ] = None,
    host_ratios: Annotated[
        str, typer.Option(metavar="R,…", help="Shares of experts in host memory.")
    ] = "1",
    hw: ThisMachine = None,
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
    structure: Annotated[
        bool,
        typer.Option(
            "--structure",
            help=(
                "Instead: replay finished real runs with their measured times. What"
                " differs then is structure, no noise."
            ),
        ),
    ] = False,
    machines: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Instead: predict other people's measurements in this folder.",
        ),
    ] = None,
    protocol: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Instead: follow docs/measurements/protocol.md, calibrations included;"
                " sittings and the result go there."
            ),
        ),
    ] = None,
    sittings: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="With --protocol: sittings now; 0 judges those that are there.",
        ),
    ] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(
            "--with", metavar="FILE", help="Sum up with an earlier validation.json."
        ),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Run a grid for real and simulated, interleaved, and say how far they differ.
    Calibrate once before.

    \b
    Examples:
      moesim validate q.parquet --shapes olmoe-1b-7b/2 --hw hw.toml --out report
      moesim validate a.parquet b.parquet --policies greedy+lru,on-demand+lru --cache-ratios 0.2,0.5 --json
      moesim validate q.parquet --hw hw.toml --host-ratios 0.5 --with report/validation.json --out both
      moesim validate --structure run1 run2
      moesim validate --machines measured --out report
      moesim validate --protocol out/protocol
    """
    if sittings is not None and protocol is None:
        raise typer.BadParameter("it is meant for --protocol", param_hint="--sittings")
    if protocol is not None:
        _protocol(protocol, sittings, seed=seed, as_json=as_json)
        return
    check_places(folder=out)
    if structure:
        _structure(traces or [], as_json=as_json)
        return
    if machines is not None:
        _machines(machines, out, as_json=as_json)
        return
    if not traces:
        raise typer.BadParameter("expected traces, --structure RUN…, or --machines DIR")
    from moesim.cli.progress import steps_of
    from moesim.reporting import validation_page as report
    from moesim.reporting.validation_text import validation_text
    from moesim.validation import grid as library
    from moesim.validation.summary import joined

    # Read first: a missing file should not cost an hour of runs.
    before = None if earlier is None else report.load(earlier)
    # Parsed before anything runs, like every other list here.
    names = parsers.split_policies(policies, "--policies")
    # Simulated and measured runs take turns, so that drift of the machine hits both.
    with steps_of("validating") as progress:
        validation = library.validate(
            traces,
            policies=names,
            cache_ratios=parsers.numbers(cache_ratios),
            hw=hw,
            steps=steps,
            batches=[int(value) for value in parsers.numbers(batches)],
            # None stands for the shape of each trace.
            shapes=shapes.split(",") if shapes else (None,),
            host_ratios=parsers.numbers(host_ratios),
            repetitions=repetitions,
            stores=stores,
            seed=seed,
            progress=progress,
        )

    result = validation.to_json()
    if before is not None:
        result = joined(result, before)
    places = []
    if out is not None:
        places = report.save(result, out, output.command_line())
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(validation_text(result))
    output.print_written(places)
    output.print_notes(validation.warnings)


def _structure(folders: list[Path], *, as_json: bool) -> None:
    """Compare the structure of finished real runs with their replays'.

    Args:
        folders: of ``moesim run --out``.
        as_json: print JSON instead of the table.

    Raises:
        typer.Exit: code 1 where a run differs by more than the aims.
    """
    if not folders:
        raise typer.BadParameter("expected folders of real runs (moesim run --out)")
    from moesim.validation.finished_runs import load_run
    from moesim.validation.structure import compare_structure
    from moesim.validation.structure_text import structure_text

    results = []
    for folder in folders:
        run = load_run(folder)
        results.append(compare_structure(*run))
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=2))
    else:
        print(structure_text(results))
    if not all(result.is_equal for result in results):
        raise typer.Exit(DIFFERENT)


def _machines(folder: Path, out: Path | None, *, as_json: bool) -> None:
    """Predict every row of other people's machines blind, and say how far off.

    Args:
        folder: with ``decode.csv``, ``llama_bench.csv`` and the like.
        out: folder for the page and all predictions.
        as_json: print JSON instead of the table.
    """
    from moesim.advice.measured.folder import read_folder
    from moesim.advice.measured.page import save, terminal_text, to_json
    from moesim.advice.measured.table import compare
    from moesim.cli.progress import bar

    rows = read_folder(folder)
    with bar("predicting", 1.0) as show:
        comparison = compare(rows, lambda _name, share: show(share))
    written = []
    if out is not None:
        written = save(comparison, out, output.command_line())
    if as_json:
        print(json.dumps(to_json(comparison), indent=2))
        return
    print(terminal_text(comparison))
    output.print_written(written)


def _protocol(folder: Path, sittings: int | None, *, seed: int, as_json: bool) -> None:
    """Make sittings of the protocol, judge all that are there, and write the page.

    Args:
        folder: of the sittings, ``protocol.md`` and ``protocol.json``.
        sittings: to be made now; None makes those that the protocol still lacks.
        seed: of the first sitting; each later one has its own.
        as_json: print JSON instead of the table.

    Raises:
        typer.Exit: code 1 where an aim is not met.
    """
    check_places(folder=folder)
    from moesim.cli.progress import steps_of
    from moesim.reporting.tables import aligned
    from moesim.traces.files import write_text
    from moesim.validation.protocol.judgement import judge
    from moesim.validation.protocol.page import aim_rows, protocol_page
    from moesim.validation.protocol.plan import PLAN
    from moesim.validation.protocol.sittings import earlier, make_sitting

    measured = earlier(folder, PLAN)
    if sittings is None:
        sittings = max(0, PLAN.sittings - len(measured))
    for number in range(sittings):
        with steps_of(f"sitting {number + 1} of {sittings}") as progress:
            sitting = make_sitting(
                folder, PLAN, seed=seed + len(measured), progress=progress
            )
        measured.append(sitting)

    verdict = judge(PLAN, measured)
    page = protocol_page(PLAN, measured, verdict, output.command_line())
    places = [folder / "protocol.md", folder / "protocol.json"]
    result = json.dumps(verdict.to_json(), indent=2)
    write_text(places[0], page)
    write_text(places[1], result + "\n")
    if as_json:
        print(result)
    else:
        print("\n".join(aligned(aim_rows(PLAN, verdict))).replace("*", ""))
        output.print_written(places)
    if not all(verdict.met.values()):
        raise typer.Exit(DIFFERENT)
