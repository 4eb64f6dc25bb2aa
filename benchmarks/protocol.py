"""The protocol of `docs/measurements/protocol.md`: sittings, each a calibration and
then every cell, judged together by what was stated before.

    python -m benchmarks.protocol out/protocol --sittings 1

`tests/evidence/test_protocol.py` holds the page and this file together. A change here
is another protocol, and needs a new result. It ends with code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moesim.base.files import write_text
from moesim.base.inputs import load_json, read_text
from moesim.base.version import git_commit
from moesim.cli.output import bar
from moesim.evidence.validation.calibrate import calibrate
from moesim.evidence.validation.verify import Plan, judge, run_cells
from moesim.hwprofiles.schema import ProfileError
from moesim.reporting.tables import aligned, markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.evidence.validation.verify import Verdict

PLAN: Final = Plan()
"""The one that results in `docs/measurements/` follow."""

_INTRODUCTION = (
    "What [the protocol](protocol.md) states was measured by this command, which also"
    " wrote this page:"
)
_SITTING_HEADS = (
    "sitting",
    "began",
    "seconds",
    "calibration",
    "identical runs differed by",
    "drift",
    "load before",
    "verdict",
)
_CELL_HEADS = (
    "sitting",
    "cell",
    "measured",
    "95 %",
    "predicted",
    "error",
    "beyond the interval",
    "lost",
    "counts",
)
_LEGEND = (
    "Times are those of an output token. *beyond the interval*: what of the error the"
    " measurement's own interval does not cover. *lost*: share of the time that other"
    " programs took."
)
_MET = {True: "**met**", False: "**not met**", None: "nothing counts"}


def protocol_page(
    plan: Plan, sittings: Sequence[dict[str, Any]], verdict: Verdict, command: str
) -> str:
    """Lay out a result: aims, sittings, every cell.

    Args:
        plan: what was stated before.
        sittings: what was measured.
        verdict: on it.
        command: that measured it.
    """
    sitting_rows = [
        _sitting_row(number, sitting) for number, sitting in enumerate(sittings, 1)
    ]
    lines = [
        "# Protocol: result",
        "",
        _INTRODUCTION,
        "",
        f"    {command}",
        "",
        *markdown_table(("aim", "stated", "result", ""), aim_rows(plan, verdict)),
        "",
        *markdown_table(_SITTING_HEADS, sitting_rows),
        "",
        *markdown_table(
            _CELL_HEADS, [_cell_row(c) for c in verdict.cells.itertuples()]
        ),
        "",
        _LEGEND,
    ]
    return "\n".join(lines) + "\n"


def aim_rows(plan: Plan, verdict: Verdict) -> list[list[str]]:
    """Aim, what was stated, what came out, and whether it is met."""
    counted = verdict.counted
    met = aims_met(plan, verdict)
    median = worst = raw = ""
    if len(counted):
        errors = verdict.cells["error"][counted.index].abs()
        median, worst = _percent(counted.median()), _percent(counted.max())
        raw = f" (whole error: {_percent(errors.median())}, {_percent(errors.max())})"
    tau = verdict.tau
    return [
        [
            "error, median of cells",
            f"≤ {_percent(plan.median)}",
            median,
            _MET[met["median"]],
        ],
        [
            "error, worst cell",
            f"≤ {_percent(plan.worst)}",
            worst + raw,
            _MET[met["worst"]],
        ],
        [
            "order of policies, tau",
            "1",
            "none" if tau is None else f"{tau:.2f} ({verdict.pairs} pairs)",
            _MET[met["order"]],
        ],
        [
            "calibrations that were trusted",
            str(plan.sittings),
            str(verdict.cells["sitting"].nunique()),
            _MET[met["sittings"]],
        ],
        [
            "cells that count",
            "",
            f"{len(counted)} of {len(verdict.cells)}",
            "",
        ],
    ]


def aims_met(plan: Plan, verdict: Verdict) -> dict[str, bool | None]:
    """By aim, whether it is met; None where nothing counts."""
    trusted = verdict.cells["sitting"].nunique()
    return verdict.met | {"sittings": trusted >= plan.sittings}


def _sitting_row(number: int, sitting: dict[str, Any]) -> list[str]:
    fit = sitting.get("fit", {})
    refused = sitting["refused"]
    return [
        str(number),
        sitting["began"],
        str(sitting["seconds"]),
        f"{sitting['calibration_s']} s" if "calibration_s" in sitting else "",
        _percent(fit.get("noise_floor", {}).get("residual_median")),
        _percent(fit.get("drift", {}).get("residual_median")),
        f"{sitting['load']:.1f}",
        f"refused: {refused}" if refused else "trusted",
    ]


def _cell_row(cell: Any) -> list[str]:
    return [
        str(cell.sitting),
        cell.cell,
        f"{1e3 * cell.measured_s:.1f} ms",
        f"{1e3 * cell.low_s:.1f} to {1e3 * cell.high_s:.1f}",
        f"{1e3 * cell.predicted_s:.1f} ms",
        f"{100 * cell.error:+.1f} %",
        _percent(cell.beyond),
        _percent(cell.lost),
        cell.excluded or "yes",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def earlier(folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """Read the sittings that a folder holds, in order.

    Raises:
        ProfileError: a file is damaged, or follows another protocol.
    """
    sittings = []
    for path in sorted(folder.glob("sitting-*.json")):
        try:
            sitting = load_json(read_text(path))
            followed = sitting["plan"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProfileError(
                f"{path}: expected a sitting of a protocol, found {error}; remove it"
            ) from None
        if followed != _plain(plan):
            raise ProfileError(
                f"{path}: expected a sitting of this protocol, found one of another;"
                " choose an empty folder"
            )
        sittings.append(sitting)
    return sittings


def make_sitting(
    folder: Path,
    plan: Plan,
    *,
    seed: int,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Calibrate, run all cells, and write what was measured.

    A calibration that is refused is a result, too: no cell is run then.

    Args:
        folder: of the sittings.
        plan: the protocol.
        seed: of the order of cells and of drawn routing.
        progress: called with what is done next and the share that is done.
    """
    number = len(list(folder.glob("sitting-*.json"))) + 1
    profile_path = folder / f"sitting-{number}.toml"
    sitting: dict[str, Any] = {
        "plan": _plain(plan),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "git_commit": git_commit(),
        "load": os.getloadavg()[0],
        "refused": "",
    }
    begin_s = time.perf_counter()
    try:
        profile = calibrate(
            profile_path,
            shapes=plan.calibrated,
            quick=True,
            seed=seed,
            progress=lambda part, share: progress(part, 0.5 * share),
        )
    except ProfileError as error:
        sitting["refused"] = str(error).partition(" cannot be trusted: ")[2] or str(
            error
        )
    else:
        sitting["calibration_s"] = round(time.perf_counter() - begin_s)
        sitting["fit"] = {name: dict(fit) for name, fit in profile.fit.items()}
        validation = run_cells(
            plan,
            profile,
            seed=seed,
            progress=lambda part, share: progress(part, 0.5 + 0.5 * share),
        )
        sitting["validation"] = validation.to_json()
    sitting["seconds"] = round(time.perf_counter() - begin_s)
    write_text(folder / f"sitting-{number}.json", json.dumps(sitting, indent=1))
    return sitting


def _plain(plan: Plan) -> dict[str, Any]:
    """The plan as JSON reads it back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return plain


def main(words: Sequence[str] | None = None) -> int:
    """Make the sittings that are missing, judge all that are there, write the page."""
    parser = argparse.ArgumentParser(description="Follow the protocol.")
    parser.add_argument("folder", type=Path, help="of sittings and result")
    parser.add_argument(
        "--sittings", type=int, help="to be made now; 0 judges those that are there"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first sitting")
    arguments = parser.parse_args(words)
    folder = arguments.folder
    sittings = earlier(folder, PLAN)
    missing = max(0, PLAN.sittings - len(sittings))
    wanted = missing if arguments.sittings is None else arguments.sittings
    for number in range(1, wanted + 1):
        seed = arguments.seed + len(sittings)
        with bar(f"sitting {number} of {wanted}", 1.0) as progress:
            sittings.append(make_sitting(folder, PLAN, seed=seed, progress=progress))

    nothing = {"cells": []}
    verdict = judge(PLAN, [each.get("validation", nothing) for each in sittings])
    met = aims_met(PLAN, verdict)
    command = f"python -m benchmarks.protocol {shlex.quote(str(folder))}"
    page = protocol_page(PLAN, sittings, verdict, command)
    write_text(folder / "protocol.md", page)
    counted = verdict.counted
    result = {
        "cells": verdict.cells.to_dict("records"),
        "pairs": verdict.pairs,
        "agreed": verdict.agreed,
        "tau": verdict.tau,
        "refused": {
            number: each["refused"]
            for number, each in enumerate(sittings, 1)
            if each["refused"]
        },
        "median": counted.median() if len(counted) else None,
        "worst": counted.max() if len(counted) else None,
        "met": met,
    }
    write_text(folder / "protocol.json", json.dumps(result, indent=2) + "\n")
    print("\n".join(aligned(aim_rows(PLAN, verdict))).replace("*", ""))
    return int(not all(met.values()))


if __name__ == "__main__":
    sys.exit(main())
