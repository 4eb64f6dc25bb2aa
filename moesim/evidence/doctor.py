"""The doctor: what this machine has, and what of it works, in less than a minute."""

from __future__ import annotations

import datetime as dt
import platform
import tempfile
import textwrap
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moesim.base import host_checks
from moesim.base.host_checks import Finding, fails, holds, limited
from moesim.base.units import percent
from moesim.base.version import __version__
from moesim.hwprofiles.profile import HardwareProfile, load_profile
from moesim.reporting.tables import screen
from moesim.runs.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


# -- diagnosis -------------------------------------------------------------------------
# The doctor: what this machine has, and what of it works, in less than a minute.

_WORDS: Final = {"ok": "ok", "limited": "limited", "fails": "FAILS"}

NO_TORCH: Final = limited(
    "not installed: moesim simulates, and neither records nor runs models",
    "pip install 'moesim[runtime]'",
)


@dataclass(frozen=True)
class Checked:
    """One check: its name, what it found, and how long it took."""

    name: str
    finding: Finding
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        finding = self.finding._asdict()
        return {"check": self.name, **finding, "seconds": round(self.seconds, 3)}


@dataclass
class Diagnosis:
    """All checks of a machine, in the order in which they were made."""

    versions: dict[str, str]
    checks: list[Checked] = field(default_factory=list)

    def of(self, verdict: str) -> list[Checked]:
        """Checks with this verdict."""
        return [check for check in self.checks if check.finding.verdict == verdict]

    @property
    def verdict(self) -> str:
        """One line for all of them, with a way out for the first that needs one."""
        broken = self.of("fails")
        lost = self.of("limited")
        if broken:
            names = ", ".join(check.name for check in broken)
            return f"{names}: does not work here; {broken[0].finding.way_out}"
        if lost:
            names = ", ".join(check.name for check in lost)
            return f"everything works, within limits: {names}"
        return "everything works"

    def lines(self) -> list[str]:
        """The report as text: each check, and its way out below it."""
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            word = _WORDS[check.finding.verdict]
            lines += _wrapped(
                f"{check.name:{width}}  {word:7}  ", check.finding.outcome
            )
            if check.finding.way_out:
                arrow = f"{'':{width}}  {'':7}  -> "
                lines += _wrapped(arrow, check.finding.way_out)
        return [*lines, f"verdict: {self.verdict}"]

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `--json`."""
        return {
            "moesim": __version__,
            "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
            "versions": self.versions,
            "verdict": self.verdict,
            "checks": [check.to_json() for check in self.checks],
        }


def diagnose(
    disk: Path | None = None, progress: Callable[[str, float], None] | None = None
) -> Diagnosis:
    """Check everything. No check can end the others.

    Args:
        disk: folder on the disk that will hold experts; that of temporary files if
            None.
        progress: called with the next check's name and the share that is done.
    """
    steps: dict[str, Callable[[], Finding | Iterable[tuple[str, Finding]]]] = {
        "compiled": host_checks.check_extensions,
        "memory": host_checks.check_memory,
        "shared memory": host_checks.check_shared_memory,
        "cores": host_checks.check_cores,
        "huge pages": host_checks.check_huge_pages,
    }
    if find_spec("torch") is None:
        diagnosis = Diagnosis({"python": platform.python_version()})
        steps["torch"] = lambda: NO_TORCH
    else:
        from moesim.runtime import doctor as system  # noqa: PLC0415 - torch
        from moesim.runtime.measure.profile import versions  # noqa: PLC0415 - torch

        folder = _existing(disk or Path(tempfile.gettempdir()))
        diagnosis = Diagnosis(versions())
        steps |= {
            "torch": system.check_torch,
            "page-locked memory": system.check_page_lock,
            # The rest find several things each.
            "disk": lambda: system.check_disk(folder),
            "lanes": system.check_lanes,
            "runs": check_runs,
        }
    for number, (name, check) in enumerate(steps.items()):
        if progress is not None:
            progress(name, number / len(steps))
        diagnosis.checks += list(_checked(name, check))
    if progress is not None:
        progress("done", 1.0)
    return diagnosis


def _checked(
    name: str, check: Callable[[], Finding | Iterable[tuple[str, Finding]]]
) -> Iterable[Checked]:
    """Make a check; whatever it raises is what it found."""
    begin_s = time.perf_counter()
    try:
        answer = check()
        findings = [(name, answer)] if isinstance(answer, Finding) else list(answer)
    except Exception as error:  # noqa: BLE001 - a report of what is broken must not break
        lines = str(error).splitlines() or [""]
        words = f"{type(error).__name__}: {lines[0]}"
        findings = [(name, fails(words, REPORT))]
    seconds = time.perf_counter() - begin_s
    for check_name, finding in findings:
        yield Checked(check_name, finding, seconds / len(findings))


def _wrapped(begin: str, text: str) -> list[str]:
    """A text behind its beginning, in lines as wide as the terminal."""
    return textwrap.wrap(
        text,
        screen().width,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(
        place for place in (folder, *folder.absolute().parents) if place.exists()
    )


# -- runs ------------------------------------------------------------------------------
# Checks by real runs of what ships: answers, plans, copies beside products.

PROMPT: Final = "import os\nimport sys\n\ndef main():\n"
REPORT: Final = "report it with the output of `moesim doctor --json`"
"""The way out of what should not be."""


def rough_profile() -> HardwareProfile:
    """A profile whose lanes are this machine's, for runs that nobody times."""
    from moesim.runtime.measure.profile import workers_of  # noqa: PLC0415 - torch

    kind, cores = this_machine()
    shipped = load_profile("two-core-host")
    number = replace(shipped.numbers["cores"], value=cores)
    return replace(
        shipped,
        name="this-machine",
        accelerator=kind,
        workers=workers_of(cores, 0 if kind == "host" else 1, reads_share=False),
        numbers={**shipped.numbers, "cores": number},
    )


def check_runs() -> Iterable[tuple[str, Finding]]:
    """Run the shipped model and trace for real: exact output, the same plans from the
    same views, and copies beside products.
    """
    from moesim.runtime.doctor import ONE_CORE  # noqa: PLC0415 - torch

    profile = rough_profile()
    with tempfile.TemporaryDirectory() as folder:
        passed, words = _exact(profile, Path(folder))
        yield (
            "exact output",
            holds(words) if passed else fails(words, f"answers are wrong; {REPORT}"),
        )
        run, words = _parity(profile, Path(folder))
        yield "parity", holds(words) if run is not None else fails(words, REPORT)
        if run is not None:
            # On one core threads overlap in time without getting anything done.
            alone = this_machine()[1] < 2
            yield "copies and products", ONE_CORE if alone else _overlap(run)


def exact_output(
    profile: HardwareProfile, store: Path, policy: str, **parts: Any
) -> Any:
    """Let the shipped model write a little, its experts computed where a policy says,
    and compare with the plain model: a `moesim.runtime.executor.live.Verdict`.

    Args:
        profile: of this machine's lanes.
        store: folder of the experts.
        policy: a system or an assignment policy.
        parts: that replace the system's, by kind.
    """
    from moesim.runs.live import run_live  # noqa: PLC0415 - torch

    live = run_live(
        "tiny",
        [PROMPT, PROMPT[:12]],
        policy,
        cache_ratio=0.25,
        hw=profile,
        batch=2,
        new_tokens=4,
        store=store,
        verify=True,
        **parts,
    )
    assert live.verification is not None, "it was asked for"
    return live.verification


def _exact(profile: HardwareProfile, folder: Path) -> tuple[bool, str]:
    verdict = exact_output(profile, folder / "tiny", "greedy", prefetch="next-gate")
    words = (
        f"the shipped model's logits differ by {verdict.largest:.1e} at most, rounding"
        f" explains {verdict.tolerance:.1e}"
    )
    return verdict.passed, words


def _parity(profile: HardwareProfile, folder: Path) -> tuple[Any, str]:
    """A run from the SSD, and a fresh planner that is told what it saw."""
    from moesim.engine.observers import repeat  # noqa: PLC0415
    from moesim.policies.base import PolicyError  # noqa: PLC0415
    from moesim.runs.config import MeasuredConfig  # noqa: PLC0415
    from moesim.runs.measured import columns_of, run_trace  # noqa: PLC0415
    from moesim.runs.setup import Setup  # noqa: PLC0415
    from moesim.runtime.executor.trace_driven import shape_for  # noqa: PLC0415 - torch
    from moesim.traces.format.batch import compose  # noqa: PLC0415
    from moesim.traces.format.reader import open_trace  # noqa: PLC0415
    from moesim.traces.shipped import resolve_trace  # noqa: PLC0415

    trace = open_trace(resolve_trace("tiny"))
    shape = shape_for(trace.shape, "qwen3-30b-a3b/16")
    config = MeasuredConfig.of(
        trace,
        "on-demand+lru+next-gate",
        cache_ratio=0.25,
        host_memory_bytes=shape.routed_bytes // 2,
        shape="qwen3-30b-a3b/16",
        dtype="float32",
        distinct=32,
        steps=4,
        hw=profile,
        store=folder / "experts",
    )
    run = run_trace(config)
    setup = Setup.of(config, trace, profile=profile, shape=shape)
    steps = compose(trace, steps=4, columns=columns_of(trace, setup.policies()))
    try:
        plans = repeat(run.decision_log.entries, setup.planner(), steps)
    except PolicyError as error:
        return None, str(error)
    return run, f"{len(plans)} plans repeat from what the run saw"


def _overlap(run: Any) -> Finding:
    """How much of the copies' and reads' time something was computed."""
    spans = run.timeline.frame()
    spans = spans[spans["end_s"] >= spans["start_s"]]
    busy = spans[spans["kind"].isin(["compute", "dense"])]
    moves = spans[spans["kind"].isin(["fetch", "prefetch", "read"])]
    hidden_s = sum(
        max(0.0, min(move_end, end) - max(move_start, start))
        for move_start, move_end in moves[["start_s", "end_s"]].to_numpy()
        for start, end in busy[["start_s", "end_s"]].to_numpy()
    )
    total_s = float((moves["end_s"] - moves["start_s"]).sum())
    share = min(1.0, hidden_s / total_s) if total_s else 0.0
    words = f"{percent(share, 0)} of copying and reading was hidden behind computing"
    if share > 0.0 or not total_s:
        return holds(words, share=share)
    return limited(
        words, "give the process two cores or more, or see `--perfetto`", share=share
    )
