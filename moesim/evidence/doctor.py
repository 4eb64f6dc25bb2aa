"""The doctor: what this machine has, and what of it works, in less than a minute."""

from __future__ import annotations

import datetime as dt
import platform
import shutil
import tempfile
import textwrap
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.base import host
from moesim.base.errors import RuntimeFault
from moesim.base.host import LEAST_FREE_BYTES, Finding, fails, holds, limited, processor
from moesim.base.version import __version__
from moesim.hwprofiles.profile import HardwareProfile, load_profile
from moesim.reporting.tables import screen
from moesim.runs.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
        "compiled": host.check_extensions,
        "memory": host.check_memory,
        "shared memory": host.check_shared_memory,
        "cores": host.check_cores,
        "huge pages": host.check_huge_pages,
    }
    if find_spec("torch") is None:
        diagnosis = Diagnosis({"python": platform.python_version()})
        steps["torch"] = lambda: NO_TORCH
    else:
        from moesim.runtime.measure.profile import versions  # noqa: PLC0415 - torch

        folder = _existing(disk or Path(tempfile.gettempdir()))
        diagnosis = Diagnosis(versions())
        steps |= {
            "torch": check_torch,
            "page-locked memory": check_page_lock,
            "disk": lambda: check_disk(folder),
            "exact output": check_exact_output,
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


# -- torch and the disk ----------------------------------------------------------------

_MIB: Final = 1 << 20
_READ_BYTES: Final = 4 * _MIB
_NOISE_BYTES: Final = 16 * _READ_BYTES

CARDS: Final[Mapping[str, str]] = {
    "/dev/nvidia0": "NVIDIA",
    "/dev/kfd": "AMD",
    "/dev/dri/renderD128": "other",
}
"""Files of the kernel -> whose graphics they stand for."""


def check_torch(cards: Sequence[str] | None = None) -> Finding:
    """Name torch, and the accelerator that it finds.

    Args:
        cards: makers of graphics that the system shows; looked for when None.
    """
    from moesim.runtime.accelerators import accelerator_here  # noqa: PLC0415 - torch
    from moesim.runtime.measure.profile import versions  # noqa: PLC0415 - torch

    version = f"torch {versions()['torch']}"
    accelerator = accelerator_here()
    if accelerator is not None:
        memory = accelerator.total_bytes / 2**30
        return holds(
            f"{version}, {accelerator.driver}: {accelerator.name}, {memory:.1f} GiB",
            kind=accelerator.kind,
            unified=accelerator.unified,
        )
    if cards is None:
        cards = [maker for path, maker in CARDS.items() if Path(path).exists()]
    known = [maker for maker in cards if maker != "other"]
    if known:
        return fails(
            f"{version} finds no accelerator, but the system has {known[0]} graphics",
            "install the torch build for it (pytorch.org, 'Get started'), and its"
            " driver",
        )
    return holds(
        f"{version}, no graphics: a core of {processor()} stands in", kind="host"
    )


def check_page_lock() -> Finding:
    """Page-lock some memory for the accelerator, where there is one."""
    from moesim.runtime.accelerators import accelerator_here  # noqa: PLC0415 - torch
    from moesim.runtime.store.memory import HostSlots  # noqa: PLC0415 - torch

    accelerator = accelerator_here()
    if accelerator is None or not accelerator.page_locks:
        return holds("not needed: no copies to a device's own memory")
    try:
        with HostSlots(64, _MIB, page_lock=accelerator):
            return holds("64 MiB page-locked")
    except RuntimeFault as error:
        return fails(
            str(error), "raise the limit: `ulimit -l unlimited`, or --ulimit memlock=-1"
        )


def check_disk(folder: Path) -> list[tuple[str, Finding]]:
    """Read a file of noise around the page cache, in pieces of an expert's size.

    Raises:
        RuntimeFault: it cannot be written.
    """
    from moesim.runtime.measure.copies import noise_file  # noqa: PLC0415 - torch
    from moesim.runtime.measure.sampling import once_s  # noqa: PLC0415 - torch
    from moesim.runtime.store.memory import HostSlots  # noqa: PLC0415 - torch

    usage = shutil.disk_usage(folder)
    with HostSlots(1, _READ_BYTES) as slots, noise_file(folder, _NOISE_BYTES) as file:
        view = memoryview(slots.record(0).numpy())
        offsets = range(0, _NOISE_BYTES, _READ_BYTES)
        times_s = [once_s(lambda at: file.read_into(at, view), at) for at in offsets]
    around = holds(f"reads in {folder} go around the page cache")
    if not file.direct:
        around = limited(
            f"{folder}: {file.reason}, so they may come from memory",
            "put experts on a disk with ext4 or xfs: --store DIR",
            reason=file.reason,
        )
    rate = _READ_BYTES / float(np.median(times_s))
    words = f"{rate / 1e9:.2f} GB/s in pieces of 4 MiB"
    figures: dict[str, Any] = {"bytes_per_s": rate}
    # Some file systems in memory count nothing.
    if usage.total:
        words += f", {usage.free / 2**30:.0f} GiB free"
        figures["free_bytes"] = usage.free
    speed = holds(words, **figures)
    if usage.total and usage.free < LEAST_FREE_BYTES:
        way_out = "make room, or name another disk: --disk DIR"
        speed = limited(words, way_out, **figures)
    return [("direct I/O", around), ("disk", speed)]


# -- a real run ------------------------------------------------------------------------

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


def check_exact_output() -> Finding:
    """Run the shipped model for real, and compare what it says."""
    with tempfile.TemporaryDirectory() as folder:
        verdict = exact_output(
            rough_profile(), Path(folder) / "tiny", "greedy", prefetch="next-gate"
        )
    words = (
        f"the shipped model's logits differ by {verdict.largest:.1e} at most, rounding"
        f" explains {verdict.tolerance:.1e}"
    )
    if verdict.passed:
        return holds(words)
    return fails(words, f"answers are wrong; {REPORT}")


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
