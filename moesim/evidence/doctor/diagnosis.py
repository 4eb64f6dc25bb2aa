"""The doctor: what this machine has, and what of it works, in less than a minute."""

from __future__ import annotations

import datetime as dt
import json
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moesim.base.version import __version__
from moesim.evidence.doctor.runs import REPORT, check_runs
from moesim.reporting.tables import screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moesim.runtime.doctor import Finding

_WORDS: Final = {"ok": "ok", "limited": "limited", "fails": "FAILS"}


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
        """As plain values, for `--json` and `--report`."""
        return {
            "moesim": __version__,
            "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
            "versions": self.versions,
            "verdict": self.verdict,
            "checks": [check.to_json() for check in self.checks],
        }

    def write(self, path: Path) -> None:
        """Write a report to attach to a message."""
        from moesim.base.files import written_beside  # noqa: PLC0415 - pandas

        with written_beside(path) as part:
            text = json.dumps(self.to_json(), indent=2)
            part.write_text(text + "\n", encoding="utf-8")


def diagnose(
    disk: Path | None = None, progress: Callable[[str, float], None] | None = None
) -> Diagnosis:
    """Check everything. No check can end the others.

    Args:
        disk: folder on the disk that will hold experts; that of temporary files if
            None.
        progress: called with the next check's name and the share that is done.
    """
    from moesim.runtime import doctor as lanes  # noqa: PLC0415 - torch
    from moesim.runtime import doctor as system  # noqa: PLC0415 - torch
    from moesim.runtime.measure.profile import versions  # noqa: PLC0415 - torch

    folder = _existing(disk or Path(tempfile.gettempdir()))
    diagnosis = Diagnosis(versions())
    single: list[tuple[str, Callable[[], Finding]]] = [
        ("torch", system.check_torch),
        ("page-locked memory", system.check_page_lock),
        ("memory", system.check_memory),
        ("shared memory", system.check_shared_memory),
        ("cores", system.check_cores),
        ("huge pages", system.check_huge_pages),
        ("direct I/O", lambda: system.check_direct_io(folder)),
        ("disk", lambda: system.check_disk(folder)),
    ]
    several: list[tuple[str, Callable[[], Iterable[tuple[str, Finding]]]]] = [
        ("lanes", lanes.check_lanes),
        ("runs", check_runs),
    ]
    steps = [
        *(
            (name, lambda name=name, check=check: [(name, check())])
            for name, check in single
        ),
        *several,
    ]
    for number, (name, check) in enumerate(steps):
        if progress is not None:
            progress(name, number / len(steps))
        diagnosis.checks += list(_checked(name, check))
    if progress is not None:
        progress("done", 1.0)
    return diagnosis


def _checked(
    name: str, check: Callable[[], Iterable[tuple[str, Finding]]]
) -> Iterable[Checked]:
    """Make a check; whatever it raises is what it found."""
    from moesim.runtime.doctor import fails  # noqa: PLC0415 - torch

    begin_s = time.perf_counter()
    try:
        findings = list(check())
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


def _alone(name: str, check: Callable[[], Finding]) -> list[tuple[str, Finding]]:
    return [(name, check())]


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(
        place for place in (folder, *folder.absolute().parents) if place.exists()
    )
