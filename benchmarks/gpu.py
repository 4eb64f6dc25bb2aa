"""Does it all hold on this machine's card? One program, eight minutes, one folder.

    python -m benchmarks.gpu --out DIR [--rehearse] [--minutes 8]

Five parts, each of named steps: checks of the device, a profile of it, a recording with
it, real runs beside simulated ones, a verdict. A step's result is in ``results.json``,
and the page ``gpu.md`` written anew, before the next begins; so a call that was ended
by whatever means leaves all that it measured, and the next goes on behind it. A step
that fails is named, the others are made all the same, and the next call tries it again.
`--rehearse` walks through the same on the host accelerator. It ends with code 1 where
something does not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.base.errors import RuntimeFault
from moesim.base.files import write_text
from moesim.base.inputs import load_json, read_text
from moesim.base.units import percent
from moesim.cli.output import bar, quiet_libraries
from moesim.evidence.validation.verify import (
    CALIBRATED,
    JOURNAL,
    MACHINE,
    Plan,
    calibrated,
    judged_cells,
)
from moesim.hwprofiles import paths
from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import ProfileError
from moesim.reporting.tables import markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moesim.base.host import Finding
    from moesim.runtime.accelerators import Accelerator

MINUTES: Final = 8.0
RESULTS: Final = "results.json"
PAGE: Final = "gpu.md"
VALIDATION: Final = "validation.json"
_STORES: Final = "stores"

PARTS: Final = ("checks", "profile", "recording", "runs", "verdict")
SHAPES: Final = ("olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b")
FORMATS: Final = ("bfloat16", "float16", "float32")
SYSTEMS: Final = (
    "all-cpu+none",
    "on-demand+lru",
    "greedy+lru",
    "fiddler+lru",
    "hybrimoe",
    "mixtral-offloading",
)
LIVE_SYSTEMS: Final = ("on-demand", "greedy", "mixtral-offloading", "fiddler")
NEW_TOKENS: Final = 64
_HALF_ULP: Final = 2.0**-10
"""Scores are recorded in 16 bits: two that round from values this close may differ."""

Step = dict[str, Any]


class Extent(NamedTuple):
    """How much is measured.

    Attributes:
        tokens: of each expert, for the table of products.
        seconds: of each table of products, and of each other table.
        plan: real runs and those that costs are learned from.
        calibration_minutes: for those.
    """

    tokens: tuple[int, ...]
    seconds: float
    plan: Plan
    calibration_minutes: float


CARD: Final = Extent(
    tokens=(1, 4, 16, 64, 256),
    seconds=2.0,
    plan=Plan(
        sittings=1,
        calibrated=("olmoe-1b-7b", "olmoe-1b-7b/2"),
        shapes=("qwen3-30b-a3b",),
        policies=SYSTEMS,
        cache_ratios=(0.15, 0.4, 0.8),
        steps=12,
        repetitions=3,
    ),
    calibration_minutes=1.0,
)
REHEARSAL: Final = Extent(
    tokens=(1, 8),
    seconds=0.5,
    plan=replace(
        CARD.plan,
        calibrated=("olmoe-1b-7b/4", "olmoe-1b-7b/8"),
        shapes=("qwen3-30b-a3b/8",),
        steps=6,
    ),
    calibration_minutes=0.5,
)


@dataclass
class Session:
    """One call, and what earlier ones have measured.

    Attributes:
        folder: of everything.
        accelerator: that is tried.
        extent: how much is measured.
        minutes: for everything.
        machine: what was measured: a result of another machine is begun anew.
        steps: ``part/name`` -> its result, or why it failed, with its seconds.
        report: called with each step's name before it begins.
    """

    folder: Path
    accelerator: Accelerator
    extent: Extent
    minutes: float
    machine: dict[str, Any]
    steps: dict[str, Step] = field(default_factory=dict)
    report: Callable[[str, float], None] = lambda _name, _share: None

    @property
    def rehearsed(self) -> bool:
        """Whether the host stands in for a card."""
        return self.accelerator.kind == "host"

    @property
    def spent_s(self) -> float:
        """Seconds of all steps that were made."""
        return sum(step["seconds"] for step in self.steps.values())

    def left_minutes(self) -> float:
        """What is left for the step at hand."""
        return max(0.2, self.minutes - self.spent_s / 60.0)

    def result(self, name: str) -> Any:
        """What a step found; None where it failed or was not made."""
        return self.steps.get(name, {}).get("result")

    def load(self) -> None:
        """Take back what an earlier call measured on this machine."""
        place = self.folder / RESULTS
        try:
            saved = load_json(read_text(place))
            steps = saved["steps"]
            same = saved["machine"] == self.machine
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same or f"{PARTS[-1]}/words" in steps:
            for name in (MACHINE, CALIBRATED, JOURNAL, VALIDATION, PAGE, RESULTS):
                (self.folder / name).unlink(missing_ok=True)
            return
        self.steps = {name: step for name, step in steps.items() if "result" in step}

    def save(self) -> None:
        """Write the results so far, and their page."""
        saved = {"machine": self.machine, "steps": self.steps}
        write_text(self.folder / RESULTS, json.dumps(saved, indent=1) + "\n")
        write_text(self.folder / PAGE, page(self.machine, self.steps))

    def make(self, name: str, work: Callable[[], Any]) -> None:
        """Make one step, unless an earlier call has; whatever ends it is noted."""
        if name in self.steps:
            return
        self.report(name, min(1.0, self.spent_s / (60.0 * self.minutes)))
        begin_s = time.perf_counter()
        try:
            step: Step = {"result": work()}
        except Exception as error:  # noqa: BLE001 - named in the results, and the rest goes on
            lines = str(error).splitlines() or [""]
            step = {"failed": f"{type(error).__name__}: {lines[0]}"}
        step["seconds"] = round(time.perf_counter() - begin_s, 2)
        self.steps[name] = step
        self.save()


def verify_gpu(
    folder: Path,
    *,
    rehearse: bool = False,
    minutes: float = MINUTES,
    progress: Callable[[str, float], None] = lambda _name, _share: None,
) -> Session:
    """Make all five parts, going on where an earlier call stopped.

    Args:
        folder: of all results.
        rehearse: on the host accelerator, whatever there is.
        minutes: for everything.
        progress: called with the step that is made next and the share of the time.

    Raises:
        RuntimeFault: there is no card.
        OSError: the folder cannot be written.
    """
    from moesim.runtime.accelerators import (
        Rehearsal,
        accelerator_here,
    )
    from moesim.runtime.measure.profile import versions

    card = accelerator_here()
    if rehearse and card is not None:
        raise RuntimeFault(
            f"--rehearse: there is a card ({card.name}), which runs would take; leave"
            " it out"
        )
    accelerator = Rehearsal() if rehearse else card
    if accelerator is None:
        raise RuntimeFault(
            "expected a card, torch finds none; install the torch build for it,"
            " or walk through on the host accelerator with --rehearse"
        )
    machine = versions() | {
        "accelerator": accelerator.name,
        "driver": accelerator.driver,
        "kind": accelerator.kind,
    }
    session = Session(
        folder,
        accelerator,
        REHEARSAL if rehearse else CARD,
        minutes,
        machine,
        report=progress,
    )
    folder.mkdir(parents=True, exist_ok=True)
    session.load()
    for part in (_checks, _profile, _recording, _runs):
        part(session)
    session.make("verdict/words", lambda: verdict(session.steps))
    # Weights are random, and of no further use.
    shutil.rmtree(folder / _STORES, ignore_errors=True)
    return session


# -- the parts -------------------------------------------------------------------------


def _checks(session: Session) -> None:
    """Products, copies, streams and locked memory do what the runtime relies on."""
    from benchmarks.device_checks import CHECKS

    def checked(check: Callable[[Accelerator], Finding]) -> dict[str, Any]:
        return check(session.accelerator)._asdict()

    for name, check in CHECKS.items():
        session.make(f"checks/{name}", partial(checked, check))


def _profile(session: Session) -> None:
    """What products, copies, launches and both together take, and joules."""
    from benchmarks import card
    from moesim.runtime.measure.experts import Size
    from moesim.runtime.measure.neighbours import torch_threads
    from moesim.runtime.measure.profile import measure
    from moesim.runtime.models.expert_layout import torch_dtype
    from moesim.traces.models import model_shape

    device = session.accelerator
    seconds = session.extent.seconds

    def lanes() -> dict[str, float]:
        profile = measure(None, session.folder / MACHINE, quick=True)
        wanted = (
            *(f"costs.{link}.bytes_per_s" for link in ("h2d", "d2h", "ssd")),
            *("contention.cpu.h2d", "contention.h2d.cpu"),
            *("contention.cpu.gpu", "contention.gpu.cpu"),
            *(paths.HOST_BESIDE_LINK, paths.LINK_BESIDE_HOST, paths.DEVICE_READ),
        )
        numbers = profile.numbers
        return {path: numbers[path].value for path in wanted if path in numbers}

    def alone(work: Callable[[], Any]) -> Any:
        # Launches come from one thread, as in a run.
        with torch_threads(1):
            return work()

    session.make("profile/lanes", lanes)
    for name in SHAPES:
        shape = model_shape(name)
        size = Size(shape.hidden, shape.expert_intermediate)
        for dtype in FORMATS:
            products = partial(
                card.products,
                device,
                size,
                torch_dtype(dtype),
                session.extent.tokens,
                seconds=seconds,
            )
            session.make(
                f"profile/products of {name}, {dtype}", partial(alone, products)
            )
    tables: dict[str, Callable[[], Any]] = {
        "links": partial(card.links, device, seconds=2 * seconds),
        "both directions": partial(card.both_ways, device, seconds=seconds),
        "launches": partial(card.launches, device, seconds=seconds),
        "energy": partial(card.energy, device, Size(2048, 768)),
    }
    for step, work in tables.items():
        session.make(f"profile/{step}", partial(alone, work))


def _recording(session: Session) -> None:
    """The shipped model's gates say with the card what they say with the CPU, and so do
    answers whose experts are computed where a policy says.
    """
    from moesim.evidence.doctor import (
        exact_output,
        rough_profile,
    )

    session.make("recording/same routing", partial(_recorded, session))
    # No run's time counts here, so the lanes need not be measured.
    profile = rough_profile()
    store = session.folder / _STORES / "tiny"

    def answers(system: str) -> dict[str, Any]:
        compared = exact_output(profile, store, system)
        return {**compared._asdict(), "passed": compared.passed}

    for system in LIVE_SYSTEMS:
        session.make(f"recording/answers, {system}", partial(answers, system))


def _recorded(session: Session) -> dict[str, Any]:
    """Record the same text on the device and on the CPU, and compare."""
    from moesim.evidence.doctor import PROMPT
    from moesim.runtime.models.local_model import load_model
    from moesim.runtime.record.record import record
    from moesim.traces.format.reader import open_trace

    columns = ("token", "scores")
    rows = {}
    speed = 0.0
    for where in ("cpu", str(session.accelerator.device)):
        recording = record(
            load_model("tiny", dtype="float32", device=where),
            [PROMPT],
            session.folder / f"recorded-{where.replace(':', '')}.parquet",
            new_tokens=NEW_TOKENS,
        )
        speed = recording.tokens_per_s
        trace = open_trace(recording.path)
        rows[where] = next(iter(trace.sequences(columns))).arrays()
    cpu, *device = rows.values()
    compared = same_routing(cpu, device[0] if device else cpu, trace.shape.layers)
    return compared | {"tokens_per_s": speed}


def same_routing(
    cpu: Mapping[str, np.ndarray], device: Mapping[str, np.ndarray], layers: int
) -> dict[str, Any]:
    """Compare two recordings of one text.

    Args:
        cpu, device: ``token`` [N], ``scores`` [N, E] and ``experts`` [N, K] by token
            and layer.
        layers: of the model.

    Returns:
        ``tokens`` compared (up to the first that was generated differently, which all
        later ones depend on); ``same_tokens``; ``same_experts``, the share of equal
        choices; ``largest``, the difference of scores; ``passed``: tokens and scores
        are equal within the rounding of 16 bits, and choices wherever scores tell them
        apart.
    """
    rows = (cpu, device)
    tokens = [values["token"].reshape(-1, layers)[:, 0] for values in rows]
    length = min(map(len, tokens))
    differ = np.flatnonzero(tokens[0][:length] != tokens[1][:length])
    compared = int(differ[0]) if len(differ) else length
    end = compared * layers
    scores = [values["scores"][:end].astype(np.float32) for values in rows]
    chosen = [np.sort(values["experts"][:end], axis=1) for values in rows]
    apart = np.abs(scores[0] - scores[1])
    allowed = _HALF_ULP * np.maximum(np.abs(scores[0]), 1e-2)
    same = (chosen[0] == chosen[1]).all(axis=1)
    # Two experts whose scores are equal in 16 bits may change places.
    top_k = chosen[0].shape[1]
    ranked = -np.sort(-scores[0], axis=1)
    tied = ranked[:, top_k - 1] - ranked[:, top_k] <= allowed.max(axis=1)
    return {
        "tokens": compared,
        "same_tokens": not len(differ),
        "same_experts": float(same.mean()),
        "largest": float(apart.max()),
        "passed": bool(
            not len(differ) and (apart <= allowed).all() and (same | tied).all()
        ),
    }


def _runs(session: Session) -> None:
    """Real runs beside simulated ones: costs learned from other runs; decisions and
    times over the grid.
    """
    session.make("runs/costs", partial(_learned_costs, session))
    session.make("runs/times", partial(_times, session))


def _learned_costs(session: Session) -> dict[str, Any]:
    """Learn the costs of this machine from designed runs."""
    profile = calibrated(
        session.folder,
        session.extent.plan,
        stores=_stores(session, "calibration"),
        minutes=min(session.extent.calibration_minutes, session.left_minutes() / 2),
        # Doubts are told with the verdict; without any profile there is none.
        force=True,
    )
    return {"digest": profile.digest, "fit": profile.fit}


def _costs(session: Session) -> Any:
    """The learned profile, or the lanes alone where nothing could be learned."""
    for name in (CALIBRATED, MACHINE):
        if (session.folder / name).exists():
            return load_profile(session.folder / name)
    raise ProfileError("no profile of this machine: its measurement failed")


def _times(session: Session) -> dict[str, Any]:
    """Run the grid, and judge it as `moesim verify` does."""
    result: dict[str, Any] = {}

    def save(so_far: dict[str, Any]) -> None:
        result.update(so_far)
        write_text(session.folder / VALIDATION, json.dumps(so_far))

    judged = judged_cells(
        session.folder,
        session.extent.plan,
        _costs(session),
        save,
        # The mean of few drawn runs: time is for real ones.
        replications=2,
        stores=_stores(session, "grid"),
        minutes=session.left_minutes(),
        progress=lambda cell, share: session.report(f"runs/times: {cell}", share),
    )
    columns = (
        *("policy", "cache_ratio", "batch", "tpot_measured_s", "tpot_error"),
        *("ttft_error", "noise_floor", "timing_free", "decisions_equal"),
    )
    return judged.to_json() | {
        "whole_error": result["tpot_error_median"],
        "first_token_error": result["ttft_error_median"],
        "repetitions": result["noise_floor"],
        "rows": [{name: cell[name] for name in columns} for cell in result["cells"]],
    }


def _stores(session: Session, name: str) -> Path:
    """A folder for stores of experts, in the folder of the run."""
    place = session.folder / _STORES / name
    place.mkdir(parents=True, exist_ok=True)
    return place


# -- what came out ---------------------------------------------------------------------


def failures(steps: Mapping[str, Step]) -> list[str]:
    """Name the steps that failed, and the findings that do not hold."""
    named = []
    for name, step in steps.items():
        if "failed" in step:
            named.append(f"{name}: {step['failed']}")
            continue
        result = step["result"]
        if not isinstance(result, dict):
            continue
        if result.get("verdict") == "fails":
            named.append(f"{name}: {result['outcome']}")
        elif result.get("passed") is False:
            named.append(f"{name}: differs from the CPU by {result['largest']:.1e}")
        elif result.get("holds") is False:
            named.append(f"{name}: {result['words']}")
        named += [
            f"{name}: {system} decided otherwise than simulated"
            for system, equal in _decided(result).items()
            if not equal
        ]
    return named


def _decided(times: Mapping[str, Any]) -> dict[str, bool]:
    """System whose decisions no timing moves -> whether all were as simulated."""
    equal: dict[str, bool] = {}
    for row in times.get("rows", ()):
        if row["timing_free"]:
            equal[row["policy"]] = (
                equal.get(row["policy"], True) and row["decisions_equal"]
            )
    return equal


def holds(steps: Mapping[str, Step]) -> bool | None:
    """Whether everything holds; None where times tell nothing, or were not measured."""
    if failures(steps):
        return False
    times = steps.get("runs/times", {}).get("result") or {}
    return times.get("holds")


def verdict(steps: Mapping[str, Step]) -> list[str]:
    """Say what came out in ten lines at most."""
    answer = {True: "it holds", False: "it does not hold", None: "cannot tell yet"}
    result = {name: step.get("result") for name, step in steps.items()}
    first = answer[holds(steps)]
    if named := failures(steps):
        first += f": {'; '.join(named[:3])}"
        if len(named) > 3:
            first += f"; and {len(named) - 3} more"
    return [first, *(line for words in _WORDS for line in words(result))][:10]


def _checked_words(result: Mapping[str, Any]) -> list[str]:
    findings = [value for name, value in result.items() if name.startswith("checks/")]
    good = sum(value is not None and value["verdict"] == "ok" for value in findings)
    return [f"device: {good} of {len(findings)} checks hold without a limit"]


def _product_words(result: Mapping[str, Any]) -> list[str]:
    rows = [
        row
        for name, value in result.items()
        if name.startswith("profile/products") and value
        for row in value
    ]
    if not rows:
        return []
    rate = max(row["expert_bytes"] / row["alone_s"] for row in rows)
    words = f"products: weights read at up to {rate / 1e9:.0f} GB/s"
    gains = [
        row["grouped_experts"] * row["alone_s"] / row["grouped_s"]
        for row in rows
        if row["grouped_s"] and row["tokens"] == 1
    ]
    if gains:
        words += f"; one grouped launch is worth a factor {median(gains):.1f}"
    return [words]


def _link_words(result: Mapping[str, Any]) -> list[str]:
    rows = result.get("profile/links")
    if not rows:
        return []
    best = {
        (direction, locked): max(
            row["bytes_per_s"]
            for row in rows
            if row["direction"] == direction and row["page_locked"] == locked
        )
        for direction in ("h2d", "d2h")
        for locked in (True, False)
    }
    words = ", ".join(
        f"{direction} {best[direction, True] / 1e9:.1f} GB/s page-locked and"
        f" {best[direction, False] / 1e9:.1f} pageable"
        for direction in ("h2d", "d2h")
    )
    both = result.get("profile/both directions")
    if both:
        words += f"; both at once take {both['both_over_slower']:.2f} times the slower"
    return [f"link: {words}"]


def _launch_words(result: Mapping[str, Any]) -> list[str]:
    launches = result.get("profile/launches")
    energy = result.get("profile/energy") or {}
    lines = []
    if launches:
        lines.append(
            f"launches: {1e6 * launches['host_s']:.1f} us of the host,"
            f" {1e6 * launches['back_to_back_s']:.1f} us one behind the other"
        )
    if energy.get("busy_watts") is not None:
        lines.append(
            f"energy: {energy['idle_watts']:.0f} W idle, {energy['busy_watts']:.0f} W"
            " computing experts, by the card's own counter"
        )
    return lines


def _recording_words(result: Mapping[str, Any]) -> list[str]:
    same = result.get("recording/same routing")
    if not same:
        return []
    words = (
        f"recording: {same['tokens']} tokens compared with the CPU's,"
        f" {percent(same['same_experts'])} of choices equal, scores within"
        f" {same['largest']:.1e}"
    )
    return [words]


def _run_words(result: Mapping[str, Any]) -> list[str]:
    lines = []
    if times := result.get("runs/times"):
        if decided := _decided(times):
            lines.append(
                f"decisions: {sum(decided.values())} of {len(decided)} systems whose"
                " decisions no timing moves did exactly what was simulated"
            )
        lines.append(f"times: {times['words']}")
        lines.append(
            f"times, whole errors: per token {percent(times['whole_error'] or 0.0)},"
            f" first token {percent(times['first_token_error'] or 0.0)} in the median;"
            f" repetitions differ by {percent(times['repetitions'] or 0.0)}"
        )
        if times["left_out"]:
            lines.append(f"left out for want of time: {times['left_out']}")
    return lines


_WORDS: Final = (
    _checked_words,
    _product_words,
    _link_words,
    _launch_words,
    _recording_words,
    _run_words,
)


def part_seconds(steps: Mapping[str, Step]) -> dict[str, float]:
    """Seconds of each part."""
    return {
        part: sum(
            step["seconds"]
            for name, step in steps.items()
            if name.startswith(f"{part}/")
        )
        for part in PARTS
    }


def page(machine: Mapping[str, Any], steps: Mapping[str, Step]) -> str:
    """The page of what there is so far, in Markdown."""
    rehearsed = machine["kind"] == "host"
    title = "Eight minutes on a card"
    if rehearsed:
        title = "Rehearsal on the host accelerator: no figure here is a card's"
    done = f"{PARTS[-1]}/words" in steps
    lines = [f"# {title}", ""]
    lines += [f"- **{name}**: {value}" for name, value in machine.items()]
    lines += ["", "## Verdict", ""]
    if not done:
        lines += ["Not finished; the same command goes on.", ""]
    lines += [f"{number}. {line}" for number, line in enumerate(verdict(steps), 1)]
    rows = [[part, f"{took_s:.0f}"] for part, took_s in part_seconds(steps).items()]
    lines += ["", "## Time", "", *markdown_table(["part", "seconds"], rows)]
    for part in PARTS[:-1]:
        lines += ["", f"## {part.capitalize()}", ""]
        for name, step in steps.items():
            if name.startswith(f"{part}/"):
                lines += _section(name.partition("/")[2], step)
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, step: Step) -> list[str]:
    """A step's part of the page: a line, or a table of its rows."""
    if "failed" in step:
        return [f"- **{name}** FAILED: {step['failed']}"]
    result = step["result"]
    if isinstance(result, dict) and "rows" in result:
        result = result["rows"]
    if isinstance(result, list):
        if not result:
            return [f"- {name}: nothing"]
        heads = list(result[0])
        rows = [[_cell(row[head]) for head in heads] for row in result]
        return ["", f"**{name}**", "", *markdown_table(heads, rows), ""]
    if "outcome" in result:
        return [f"- {name}: {result['verdict']}, {result['outcome']}"]
    figures = ", ".join(
        f"{key} {_cell(value)}"
        for key, value in result.items()
        if not isinstance(value, dict)
    )
    return [f"- {name}: {figures}"]


def _cell(value: Any) -> str:
    """A value in a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: Sequence[str] | None = None) -> int:
    """Make what is missing, and print the verdict and the time of each part."""
    parser = argparse.ArgumentParser(description="Eight minutes on a card.")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--rehearse", action="store_true", help="without a card")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything")
    arguments = parser.parse_args(words)
    quiet_libraries()
    try:
        with bar("verifying", 1.0) as progress:
            session = verify_gpu(
                arguments.out,
                rehearse=arguments.rehearse,
                minutes=arguments.minutes,
                progress=progress,
            )
    except (RuntimeFault, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(verdict(session.steps)))
    seconds = part_seconds(session.steps)
    print(", ".join(f"{part} {took_s:.0f} s" for part, took_s in seconds.items()))
    print(f"wrote {arguments.out / PAGE}")
    return int(holds(session.steps) is False)


if __name__ == "__main__":
    sys.exit(main())
