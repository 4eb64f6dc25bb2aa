"""`moesim reproduce map`: which policy is fastest where, by how much, and how far that
is from what can be reached.

Models × memories × machines × batches × policies, each run once and kept in a sweep's
store, so that an interrupted map goes on where it stopped. Fixed choices are compared
with fixed choices: the winner of a cell was chosen in hindsight, and is marked so.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moesim.base.files import write_text
from moesim.base.inputs import load_json, read_text
from moesim.evidence.reproduction.report import Report, words_table
from moesim.evidence.reproduction.routing import shared_traces
from moesim.evidence.reproduction.workloads import Workload
from moesim.questions.gap import gap
from moesim.reporting.answers import Answer, Listing
from moesim.runs.bound import bound_of
from moesim.runs.clairvoyant import CLAIRVOYANT
from moesim.runs.config import RunConfig
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.ranking import ranking
from moesim.runs.sweeps.sweep import run_sweep
from moesim.traces.format.reader import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

RECALL = 0.75
RESIDUAL = 0.8
"""Recall of the drawn predictions, one layer ahead: 75, 67 and 61 % were measured by
others (everett6/moe-prefetch) for gates applied one, two and three layers earlier.
"""

MACHINES = (
    "rtx4060ti",
    "rtx5060ti-ryzen9900x",
    "rtx3090-epyc7532",
    "rtx3080ti",
    "rtx5070ti-ryzen9600x",
)
RATIOS = (0.05, 0.1, 0.25, 0.5, 0.75)
BATCHES = (1, 4, 16)
PASSES = 128
"""Forward passes of a run, at most: so the map takes 48 minutes of processor time."""

POLICIES = (
    *("llama.cpp", "ktransformers", "krasis", "fiddler", "moe-on-demand"),
    *("mixtral-offloading", "moe-lightning", "freetoken", "dfa-cache"),
    *("hybrimoe", "dali", "dali-hybrimoe", "recall", "recall++next-gate"),
    *(
        f"{assignment}+{cache}"
        for assignment in ("hybrimoe-schedule", "fetch-split", "greedy")
        for cache in ("decayed-frequency", "lru")
    ),
    *("hybrimoe-schedule+lfru", "fetch-split+static"),
    *(
        f"{assignment}+decayed-frequency+{prefetch}"
        for assignment in ("hybrimoe-schedule", "fetch-split")
        for prefetch in ("statistical", "next-gate")
    ),
    CLAIRVOYANT,
)
"""Systems that keep to the recorded routing and to the machine's kernels, and
compositions that nobody ships. Left out are `moe-infinity` and `edgemoe`, whose runs
take a hundred times as long.
"""

DRAFTED_TOKENS = 4
DRAFTS = ("llama.cpp", "hybrimoe-schedule+lfru", "recall", "recall++moe-speq")
"""Verify drafts, too, of one sequence. The last one's draft foretells its routing."""
WARM = ("fetch-split+static", "fetch-split+decayed-frequency", "recall")
"""Begin with what another trace of the model used most, too."""

CELL = ["trace", "hw", "cache_ratio", "batch"]
"""What tells cells apart."""
BOUNDS_KEPT = 25
"""Bounds after which they are written."""

SURPRISES = 10
EXPLAINED_STEPS = 24
"""Forward passes that `gap` looks at."""


@dataclass(frozen=True, slots=True)
class FieldTrace:
    """A trace of the map, and the batches that it has sequences for."""

    workload: Workload
    batches: tuple[int, ...]

    @property
    def title(self) -> str:
        """Its model, and where its routing is from."""
        origin = "recorded" if self.workload.recorded else "drawn"
        return f"{self.workload.model}, {origin}"

    def others(self) -> Workload | None:
        """Other routing of the model, if there is any."""
        if not self.workload.recorded:
            return replace(self.workload, seed=self.workload.seed + 1)
        if not self.workload.group:
            return None
        return replace(self.workload, group=self.workload.group - 1)


def field_traces() -> list[FieldTrace]:
    """Recorded routing where a checkout has it beside it, then drawn."""
    # Model, its file, tokens and sequences taken of it, and which of its groups: the
    # first texts of gpt-oss-20b were tuned on.
    recorded = [
        ("gpt-oss-20b", "gpt_oss_20b", 64, 16, 1),
        ("qwen3-30b-a3b", "qwen3_30b_a3b_top6", 64, 1, 0),
        ("olmoe-1b-7b", "olmoe_1b_7b_decode299", 128, 1, 0),
        ("kimi-linear-48b-a3b", "kimi_linear_48b_a3b_decode300", 128, 1, 0),
    ]
    traces = []
    for model, name, tokens, sequences, group in recorded:
        file = shared_traces() / f"{name}.parquet"
        weights = "mxfp4" if model == "gpt-oss-20b" else "q4_k_m"
        workload = Workload(
            *(model, weights, 0, tokens, sequences),
            recorded=file,
            group=group,
            recall=RECALL,
            residual=RESIDUAL,
        )
        if file.is_file():
            traces.append(FieldTrace(workload, BATCHES if sequences > 1 else (1,)))
    # One text has no batches: those of its model are drawn.
    texts = {trace.workload.model for trace in traces if trace.batches == (1,)}
    drawn = [
        Workload(
            *(model, "q4_k_m", 16, 48, 16),
            like=model,
            recall=RECALL,
            residual=RESIDUAL,
        )
        for model in ("qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v2-lite")
    ]
    traces += [
        FieldTrace(each, BATCHES[1:] if each.model in texts else BATCHES)
        for each in drawn
    ]
    return traces


@dataclass(frozen=True, slots=True)
class FieldMap:
    """The map.

    Attributes:
        runs: a row for each run, as `moesim.sweep` gives it.
        changed: the same of runs with drafts or a warm start.
        cells: a row for each cell, see `_cell`.
        refusals: reasons of runs that could not be, with how many there were.
        explained: of the most surprising cells, where the favourite loses its time.
    """

    runs: pd.DataFrame
    changed: pd.DataFrame
    cells: list[dict[str, Any]]
    refusals: dict[str, int]
    explained: list[tuple[str, ...]]


def field_map(
    out: Path,
    *,
    traces: Sequence[FieldTrace] | None = None,
    policies: Sequence[str] = POLICIES,
    machines: Sequence[str] = MACHINES,
    ratios: Sequence[float] = RATIOS,
    jobs: int | None = None,
    cluster: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> FieldMap:
    """Compute the map, or what is missing of it.

    Args:
        out: folder for traces, results and bounds.
        traces: None for those of `field_traces`.
        policies: ``llama.cpp`` and ``clairvoyant`` among them.
        machines, ratios: of the cells.
        jobs: processes; None takes as many as help.
        cluster: a Dask scheduler, as `moesim.sweep` takes it.
        progress: called with the share of the runs that is done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    folder = out / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    titles: dict[str, str] = {}
    places = {}
    runs = []
    for each in field_traces() if traces is None else traces:
        trace = open_trace(each.workload.draw(folder))
        titles[trace.name] = each.title
        others = each.others()
        warm = others and others.draw(folder)
        for batch, hw, ratio in product(each.batches, machines, ratios):
            place = RunConfig.of(
                trace, hw=hw, cache_ratio=ratio, batch=batch, steps=PASSES
            )
            places[trace.name, hw, ratio, batch] = place
            runs += [place.replaced(policy=policy) for policy in policies]
            if batch == 1:
                drafted = place.replaced(draft_tokens=DRAFTED_TOKENS)
                runs += [drafted.replaced(policy=policy) for policy in DRAFTS]
            if warm:
                begun = place.replaced(warm=warm)
                runs += [begun.replaced(policy=policy) for policy in WARM]
    swept = run_sweep(
        planned(runs), store=out / "runs", jobs=jobs, cluster=cluster, progress=progress
    )
    every = swept.frame(details=True)
    is_changed = (every["draft_tokens"] == DRAFTED_TOKENS) | every["warm"].notna()
    frame = every[~is_changed]
    bounds = _bounds(places, out / "bounds.json")
    ranked = ranking(frame)
    # What all cells share is no column of a ranking.
    varying = [name for name in CELL if name in ranked.columns]
    tied = {key: int(each["tied"].sum()) for key, each in ranked.groupby(varying)}
    cells = []
    for key, runs_of_cell in frame.groupby(CELL, sort=False):
        cell = dict(zip(CELL, key, strict=True)) | {"title": titles[str(key[0])]}
        cell |= _cell(runs_of_cell, bounds[_label(key)])
        cell["tied"] = tied[tuple(cell[name] for name in varying)]
        cells.append(cell)
    explained = _explained(frame, cells, places)
    return FieldMap(frame, every[is_changed], cells, swept.refusals, explained)


def _label(key: Iterable[Any]) -> str:
    return " ".join(map(str, key))


def _bounds(places: dict[Any, RunConfig], kept: Path) -> dict[str, tuple[float, str]]:
    """Least seconds of each cell, from any content, and what limits it."""
    known = load_json(read_text(kept)) if kept.is_file() else {}
    for key, place in places.items():
        if _label(key) in known:
            continue
        bound = bound_of(
            place.replaced(policy=CLAIRVOYANT, cache="foresight", prefetch="foresight")
        )
        assert bound is not None
        known[_label(key)] = bound.seconds, bound.resource
        if len(known) % BOUNDS_KEPT == 0 or len(known) == len(places):
            write_text(kept, json.dumps(known))
    return known


def _cell(runs: pd.DataFrame, bound: tuple[float, str]) -> dict[str, Any]:
    """What a cell's runs say: seconds of the whole trace, and who took them."""
    seconds = runs.set_index("policy")["makespan_s"]
    ceiling_s = float(seconds[CLAIRVOYANT])
    causal = seconds.drop(CLAIRVOYANT).sort_values(kind="stable")
    best_s = float(causal.iloc[0])
    today_s = float(causal["llama.cpp"])
    return {
        "best": causal.index[0],
        "best_s": best_s,
        "second": causal.index[1],
        "lead": float(causal.iloc[1]) / best_s - 1.0,
        "today_s": today_s,
        "ceiling_s": ceiling_s,
        "bound_s": bound[0],
        "limit": bound[1],
        "closed": (today_s - best_s) / (today_s - ceiling_s),
        "tpot_s": float(runs.set_index("policy")["tpot_s"][causal.index[0]]),
    }


# -- the page --------------------------------------------------------------------------


def standings(runs: pd.DataFrame) -> pd.DataFrame:
    """Every policy as a fixed choice: logarithms of its time over the best causal one's
    in each cell, a row for each cell.
    """
    seconds = runs.pivot_table(index=CELL, columns="policy", values="makespan_s")
    best = seconds.drop(columns=CLAIRVOYANT).min(axis=1)
    return seconds.div(best, axis=0).apply(np.log)


def report_of(mapped: FieldMap) -> Report:
    """Lay out the map."""
    behind = standings(mapped.runs)
    cells = mapped.cells
    beaten = sum(cell["best_s"] < cell["ceiling_s"] * (1 - 1e-9) for cell in cells)
    over_bound = float(
        np.median([cell["ceiling_s"] / cell["bound_s"] for cell in cells])
    )
    counts = {name: len({cell[name] for cell in cells}) for name in CELL}
    facts = [
        (
            f"{len(mapped.runs):,} runs in {len(cells)} cells:"
            f" {counts['trace']} traces, {counts['cache_ratio']} memories,"
            f" {counts['hw']} machines, {counts['batch']} batches;"
            f" {len(behind.columns) - 1} causal policies"
        ),
        (
            "predictions are drawn everywhere, with a recall of 75 % one layer ahead;"
            " of drawn traces everything is"
        ),
        (
            f"a causal policy beats the clairvoyant one in {beaten} of {len(cells)}"
            " cells; in the median cell that one takes"
            f" {over_bound:.2f} times the bound"
        ),
    ]
    facts += [
        f"left out: {count} runs: {why}" for why, count in mapped.refusals.items()
    ]
    pages = dict.fromkeys((cell["title"], cell["batch"]) for cell in cells)
    return Report(
        facts,
        [
            _fixed(behind),
            *(_winners(cells, *key) for key in pages),
            _answers(behind),
            _changes(mapped),
            words_table(
                "The most surprising cells",
                f"Where the best fixed choice, {_favourite(behind)}, is farthest behind"
                " the winner; where it loses its time, by `moesim gap`.",
                ("cell", "behind", "winner", "eviction", "assignment", "prefetch"),
                mapped.explained,
            ),
            _all_cells(cells),
        ],
        {},
    )


def _favourite(behind: pd.DataFrame) -> str:
    return str(behind.drop(columns=CLAIRVOYANT).mean().idxmin())


def _fixed(behind: pd.DataFrame) -> Listing:
    batches = sorted(set(behind.index.get_level_values("batch")))
    rows = []
    for policy in behind.mean().sort_values().index:
        shares = behind[policy]
        by_batch = [
            shares[shares.index.get_level_values("batch") == b] for b in batches
        ]
        rows.append(
            (
                policy,
                *(_percent(each.mean()) for each in (shares, *by_batch)),
                _percent(shares.max()),
                f"{(shares <= 1e-9).mean():.0%}",
            )
        )
    return words_table(
        "Fixed choices",
        "How much longer each takes than the best causal one of every cell, in the"
        " geometric mean. That best one is chosen in hindsight.",
        (
            *("policy", "all cells"),
            *(f"batch {batch}" for batch in batches),
            *("worst cell", "wins"),
        ),
        rows,
    )


def _winners(cells: Sequence[dict[str, Any]], title: str, batch: int) -> Listing:
    """Winners by machine and memory."""
    rows: dict[str, list[str]] = {}
    here = [cell for cell in cells if (cell["title"], cell["batch"]) == (title, batch)]
    ratios = dict.fromkeys(cell["cache_ratio"] for cell in here)
    for cell in here:
        text = f"{cell['best']}, {1e3 * cell['tpot_s']:.1f} ms"
        rows.setdefault(cell["hw"], []).append(text)
    return words_table(
        f"{title}, batch {batch}",
        "The winner in hindsight, and its time per token.",
        ("machine", *(f"{ratio:.0%}" for ratio in ratios)),
        [(hw, *texts) for hw, texts in rows.items()],
    )


def _worth(
    title: str, note: str, logarithms: pd.DataFrame, pairs: Sequence[tuple[str, str]]
) -> Listing:
    """Time that the first of each pair saves against the second."""
    rows = []
    for parts, without in pairs:
        if {parts, without} <= {*logarithms}:
            gain = (logarithms[without] - logarithms[parts]).dropna()
            figures = map(_percent, (gain.mean(), gain.min(), gain.max()))
            slower = f"{(gain < 0).mean():.0%}"
            rows.append((f"{parts} over {without}", *figures, slower))
    return words_table(
        title, note, ("part", "mean", "worst", "best", "slower in"), rows
    )


def _answers(behind: pd.DataFrame) -> Listing:
    base = "fetch-split+decayed-frequency"
    schedule = "hybrimoe-schedule+decayed-frequency"
    return _worth(
        "What parts are worth",
        "Time saved: mean, worst and best cell, and in how many cells it is a loss.",
        behind,
        [
            (base, "fetch-split+static"),
            (f"{base}+next-gate", base),
            (f"{base}+statistical", base),
            (f"{schedule}+next-gate", schedule),
            (f"{schedule}+statistical", schedule),
            ("recall", schedule),
            ("recall++next-gate", "recall"),
            (CLAIRVOYANT, _favourite(behind)),
        ],
    )


def _changes(mapped: FieldMap) -> Listing:
    runs = pd.concat([mapped.runs, mapped.changed])
    drafted = f", {DRAFTED_TOKENS} tokens drafted"
    change = runs["draft_tokens"].eq(DRAFTED_TOKENS).map({True: drafted, False: ""})
    change += runs["warm"].notna().map({True: ", warm", False: ""})
    # Passes that verify drafts have more tokens, so that runs are not of the same ones.
    seconds = runs.assign(policy=runs["policy"] + change).pivot_table(
        index=CELL, columns="policy", values="tpot_s"
    )
    return _worth(
        "What drafts and a warm start are worth",
        "Time saved per token. Drafts cost nothing here, and four of five are right;"
        " they are verified for one sequence. A warm start is from other routing of the"
        " model, where there is any.",
        seconds.apply(np.log),
        [
            *((f"{policy}{drafted}", policy) for policy in DRAFTS[:-1]),
            (f"{DRAFTS[-1]}{drafted}", f"{DRAFTS[-2]}{drafted}"),
            *((f"{policy}, warm", policy) for policy in WARM),
            (f"{WARM[1]}, warm", f"{WARM[0]}, warm"),
        ],
    )


def _all_cells(cells: Sequence[dict[str, Any]]) -> Listing:
    rows = []
    for cell in cells:
        command = (
            f"moesim compare {shlex.quote(cell['trace'])} --hw {cell['hw']}"
            f" --cache-ratio {cell['cache_ratio']:g} --batch {cell['batch']}"
            f" --steps {PASSES} --policy {shlex.quote(cell['best'])},clairvoyant"
        )
        rows.append(
            (
                _label(cell[name] for name in ("title", *CELL[1:])),
                f"{cell['best']} ({cell['lead']:.1%} before {cell['second']})",
                str(cell["tied"]),
                f"{cell['best_s'] / cell['today_s']:.2f}",
                f"{cell['closed']:.0%}",
                f"{cell['best_s'] / cell['ceiling_s']:.3f}",
                f"{cell['ceiling_s'] / cell['bound_s']:.3f}",
                cell["limit"],
                command,
            )
        )
    return words_table(
        "All cells",
        "Times over llama.cpp's, over the clairvoyant one's, and its over the bound;"
        " closed: of the way from llama.cpp to clairvoyant. Tied: not certainly slower"
        " than the winner, itself included.",
        (
            *("cell", "winner", "tied", "of llama.cpp", "closed", "of clairvoyant"),
            *("clairvoyant of bound", "limit", "command"),
        ),
        rows,
    )


def _percent(logarithm: float) -> str:
    return f"{100 * np.expm1(logarithm):.1f} %"


def _explained(
    runs: pd.DataFrame, cells: Sequence[dict[str, Any]], places: dict[Any, RunConfig]
) -> list[tuple[str, ...]]:
    """Where the best fixed choice loses its time in the cells that it loses most."""
    behind = standings(runs)
    favourite = _favourite(behind)
    by_key = {tuple(cell[name] for name in CELL): cell for cell in cells}
    rows = []
    for key in behind[favourite].sort_values().index[::-1][:SURPRISES]:
        place = places[key]
        lost = gap(place.replaced(policy=favourite, steps=EXPLAINED_STEPS))
        shares = {part.name: part.share_s / lost.gap_s for part in lost.parts}
        rows.append(
            (
                _label((by_key[key]["title"], *key[1:])),
                _percent(behind[favourite][key]),
                by_key[key]["best"],
                *(
                    f"{shares.get(name, 0.0):.0%}"
                    for name in ("eviction", "assignment", "prefetch")
                ),
            )
        )
    return rows


def map_answer(mapped: FieldMap) -> Answer:
    """Say which policy is fastest where, and which to fix if only one may be."""
    report = report_of(mapped)
    return Answer(
        question="which policy is fastest where?",
        subject="",
        setting=[("cells", report.facts[0])],
        tables=[table for table in report.tables if len(table.rows)],
        sentences=[f"as a fixed choice: {_favourite(standings(mapped.runs))}"],
        notes=report.facts[1:],
    )


def write_map(folder: Path, mapped: FieldMap, command: str | None = None) -> list[Path]:
    """Write ``map.html`` and ``map.md``, and ``map.csv`` with a line for each cell."""
    answer = map_answer(mapped)
    answer.command = command
    html = answer.write(folder / "map.html")
    write_text(folder / "map.md", answer.markdown())
    figures = folder / "map.csv"
    write_text(figures, pd.DataFrame(mapped.cells).to_csv(index=False))
    return [html, folder / "map.md", figures]
