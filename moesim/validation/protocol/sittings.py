"""Makes sittings of a protocol: a calibration, then all cells with its profile.

Each sitting is a file of its own. So sittings may lie hours apart, and what was
measured can be judged again.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moesim.hwprofiles.errors import ProfileError
from moesim.traces.files import write_text
from moesim.traces.shipped import resolve_trace
from moesim.validation.calibrate import calibrate
from moesim.validation.grid import validate
from moesim.version import git_commit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.validation.protocol.plan import Plan


def earlier(folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """Read the sittings that a folder holds, in order.

    Raises:
        ProfileError: a file is damaged, or follows another protocol.
    """
    sittings = []
    for path in sorted(folder.glob("sitting-*.json")):
        try:
            sitting = json.loads(path.read_text(encoding="utf-8"))
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
        validation = validate(
            [resolve_trace(plan.trace)],
            policies=plan.policies,
            cache_ratios=plan.cache_ratios,
            batches=plan.batches,
            hw=profile,
            shapes=plan.shapes,
            steps=plan.steps,
            repetitions=plan.repetitions,
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
