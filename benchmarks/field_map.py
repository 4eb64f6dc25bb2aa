"""Which policy is fastest where, by how much, and how far that is from what can be
reached.

    python -m benchmarks.field_map --out map [--shared DIR] [--jobs N]

A sweep over models, memories, machines, batches and policies (``field_map.yaml``), kept
in its store, so that an interrupted map goes on where it stopped, and a page of it.
``--shared`` names a folder of other people's recordings; without it all is drawn.

Fixed choices are compared with fixed choices: the winner of a cell was chosen in
hindsight, and is marked so.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml

from benchmarks.recorded import RecordedTexts
from moesim.base.files import write_text
from moesim.base.units import percent
from moesim.evidence.reproduction.report import write_pages
from moesim.evidence.reproduction.workloads import Workload
from moesim.reporting.answers import Answer
from moesim.reporting.parts import Column, Listing
from moesim.runs.bound import bound_of
from moesim.runs.clairvoyant import CLAIRVOYANT
from moesim.runs.config import RunConfig
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.ranking import ranking
from moesim.runs.sweeps.sweep import run_sweep
from moesim.traces.format.reader import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FIELD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Traces, machines, memories and policies."""
_DRAFTED_TOKENS = FIELD["drafted_tokens"]
_DRAFTED = f", {_DRAFTED_TOKENS} tokens drafted"
_WARM = ", warm"

CELL = ["trace", "hw", "cache_ratio", "batch"]
"""What tells cells apart."""


@dataclass(frozen=True, slots=True)
class FieldTrace:
    """A trace of the map, and the batches that it has sequences for."""

    workload: Workload
    batches: tuple[int, ...]

    @property
    def title(self) -> str:
        """Its model, and where its routing is from."""
        is_recorded = isinstance(self.workload, RecordedTexts)
        return f"{self.workload.model}, {'recorded' if is_recorded else 'drawn'}"

    def others(self) -> Workload | None:
        """Other routing of the model, if there is any."""
        load = self.workload
        if not isinstance(load, RecordedTexts):
            return replace(load, seed=load.seed + 1)
        return replace(load, group=load.group - 1) if load.group else None


def field_traces(shared: Path | None = None) -> list[FieldTrace]:
    """Recorded routing where a folder has it, then drawn."""
    traces: list[FieldTrace] = []
    for described in FIELD["traces"]:
        options = FIELD["predicted"] | described
        batches = options.pop("batches")
        kind: type[Workload] = Workload
        if name := options.pop("file", None):
            kind = RecordedTexts
            options["recorded"] = Path(shared or "", f"{name}.parquet")
            if shared is None or not options["recorded"].is_file():
                continue
        load = kind(**options)
        # One text has no batches: those of its model are drawn.
        if any(load.model == trace.workload.model for trace in traces):
            batches = batches[1:]
        traces.append(FieldTrace(load, tuple(batches)))
    return traces


@dataclass(frozen=True)
class FieldMap:
    """The map.

    Attributes:
        runs: a row for each run, as `moesim.sweep` gives it.
        changed: the same of runs with drafts or a warm start.
        bounds: of each cell, in the columns of `CELL`, its title, ``bound_s``, from any
            content, and ``limit``, what limits it.
        refusals: reasons of runs that could not be, with how many there were.
    """

    runs: pd.DataFrame
    changed: pd.DataFrame
    bounds: pd.DataFrame
    refusals: dict[str, int]

    @cached_property
    def seconds(self) -> pd.DataFrame:
        """Of the whole trace: a row for each cell, a column for each policy."""
        return self.runs.pivot_table(index=CELL, columns="policy", values="makespan_s")

    @cached_property
    def behind(self) -> pd.DataFrame:
        """Every policy as a fixed choice: logarithms of its time over the best causal
        one's in each cell, a row for each cell.
        """
        best = self.seconds.drop(columns=CLAIRVOYANT).min(axis=1)
        return self.seconds.div(best, axis=0).apply(np.log)

    @property
    def favourite(self) -> str:
        """The best causal policy, if one must be chosen for all cells."""
        return str(self.behind.drop(columns=CLAIRVOYANT).mean().idxmin())

    @cached_property
    def cells(self) -> pd.DataFrame:
        """A row for each cell, those where the favourite is farthest behind first: its
        winner, who is tied with it, and how far it is from llama.cpp, the clairvoyant
        policy and the bound.
        """
        causal = self.seconds.drop(columns=CLAIRVOYANT)
        best = causal.idxmin(axis=1)
        best_s = causal.min(axis=1)
        ceiling_s = self.seconds[CLAIRVOYANT]
        today_s = causal["llama.cpp"]
        tpot_s = self.runs.set_index([*CELL, "policy"])["tpot_s"]
        ranked = ranking(self.runs)
        # What all cells share is no column of a ranking.
        varying = [name for name in CELL if name in ranked.columns]
        cells = pd.DataFrame(
            {
                "best": best,
                "best_s": best_s,
                "lead": np.partition(causal, 1, axis=1)[:, 1] / best_s - 1.0,
                "tpot_s": [
                    float(tpot_s[(*key, policy)])
                    for key, policy in zip(causal.index, best, strict=True)
                ],
                "of_llama_cpp": best_s / today_s,
                "closed": (today_s - best_s) / (today_s - ceiling_s),
                "ceiling_s": ceiling_s,
                "of_clairvoyant": best_s / ceiling_s,
                "favourite_behind": np.expm1(self.behind[self.favourite]),
            }
        )
        cells = self.bounds.merge(cells.reset_index(), on=CELL)
        tied = ranked.groupby(varying, as_index=False)["tied"].sum()
        cells = cells.merge(tied, on=varying)
        cells["clairvoyant_of_bound"] = cells["ceiling_s"] / cells["bound_s"]
        every: Iterable[Any] = cells.itertuples()
        cells["command"] = [
            f"moesim compare {shlex.quote(cell.trace)} --hw {cell.hw}"
            f" --cache-ratio {cell.cache_ratio:g} --batch {cell.batch}"
            f" --steps {FIELD['passes']}"
            f" --policy {shlex.quote(cell.best)},{CLAIRVOYANT}"
            for cell in every
        ]
        return cells.sort_values("favourite_behind", ascending=False)


def field_map(
    out: Path,
    *,
    traces: Sequence[FieldTrace] | None = None,
    policies: Sequence[str] = FIELD["policies"],
    machines: Sequence[str] = FIELD["machines"],
    ratios: Sequence[float] = FIELD["ratios"],
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> FieldMap:
    """Compute the map, or what is missing of it.

    Args:
        out: folder for traces and results.
        traces: None for those of `field_traces`.
        policies: ``llama.cpp`` and ``clairvoyant`` among them.
        machines, ratios: of the cells.
        jobs: processes; None takes as many as help.
        progress: called with the share of the runs that is done.

    Raises:
        TraceError, ProfileError, PolicyError: bad input.
    """
    folder = out / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    bounds = []
    for each in field_traces() if traces is None else traces:
        trace = open_trace(each.workload.draw(folder))
        others = each.others()
        warm = others and others.draw(folder)
        for batch, hw, ratio in product(each.batches, machines, ratios):
            place = RunConfig.of(
                trace, hw=hw, cache_ratio=ratio, batch=batch, steps=FIELD["passes"]
            )
            drafted = place.replaced(draft_tokens=_DRAFTED_TOKENS)
            for config, chosen in (
                (place, policies),
                (drafted, FIELD["drafts"] if batch == 1 else ()),
                (place.replaced(warm=warm), FIELD["warm"] if warm else ()),
            ):
                runs += [config.replaced(policy=policy) for policy in chosen]
            bound = bound_of(place.replaced(**_ANY_CONTENT))
            assert bound is not None
            cell = (trace.name, hw, ratio, batch)
            bounds.append((*cell, each.title, bound.seconds, bound.resource))
    swept = run_sweep(planned(runs), results=out / "runs", jobs=jobs, progress=progress)
    every = swept.frame(details=True)
    is_changed = (every["draft_tokens"] == _DRAFTED_TOKENS) | every["warm"].notna()
    columns = [*CELL, "title", "bound_s", "limit"]
    usual = every[~is_changed]
    # Drafts and warm starts are no axes of these.
    usual.attrs = {}
    return FieldMap(
        usual,
        every[is_changed],
        pd.DataFrame(bounds, columns=columns),
        swept.refusals,
    )


_ANY_CONTENT = {"policy": CLAIRVOYANT, "cache": "foresight", "prefetch": "foresight"}


# -- the page --------------------------------------------------------------------------


def map_answer(mapped: FieldMap) -> Answer:
    """Say which policy is fastest where, and which to fix if only one may be."""
    cells = mapped.cells
    beaten = int((cells["best_s"] < cells["ceiling_s"] * (1 - 1e-9)).sum())
    over_bound = float(cells["clairvoyant_of_bound"].median())
    counts = cells[CELL].nunique()
    facts = [
        (
            f"{len(mapped.runs):,} runs in {len(cells)} cells:"
            f" {counts['trace']} traces, {counts['cache_ratio']} memories,"
            f" {counts['hw']} machines, {counts['batch']} batches;"
            f" {len(mapped.behind.columns) - 1} causal policies"
        ),
        (
            "predictions are drawn everywhere, with a recall of 75 % one layer ahead;"
            " of drawn traces everything is"
        ),
        (
            f"a causal policy beats the clairvoyant one in {beaten} of {len(cells)}"
            f" cells; in the median one that takes {over_bound:.2f} times the bound"
        ),
    ]
    facts += [
        f"left out: {count} runs: {why}" for why, count in mapped.refusals.items()
    ]
    tables = [
        _fixed(mapped.behind),
        _parts(mapped),
        _changes(mapped),
        Listing(
            cells,
            [
                *(Column(name, head) for name, head in _CELL_HEADS.items()),
                *(Column(name, head, "share") for name, head in _SHARES.items()),
                *(Column(name, head, "times") for name, head in _TIMES.items()),
                Column("limit", "limit"),
                Column("command", "command"),
            ],
            title="All cells",
            note=f"First those where the best fixed choice, {mapped.favourite}, is"
            " farthest behind the winner (`moesim gap` says why). Times over"
            " llama.cpp's, over the clairvoyant one's, and its over the bound; closed:"
            " of the way from llama.cpp to clairvoyant. Tied: not certainly slower than"
            " the winner, itself included.",
            lead=4,
        ),
    ]
    return Answer(
        question="which policy is fastest where?",
        subject="",
        setting=[("cells", facts[0])],
        tables=[table for table in tables if len(table.rows)],
        sentences=[f"as a fixed choice: {mapped.favourite}"],
        notes=facts[1:],
    )


_CELL_HEADS = {
    "title": "model",
    "hw": "machine",
    "cache_ratio": "memory",
    "batch": "batch",
    "best": "winner",
    "tied": "tied",
}
_SHARES = {
    "favourite_behind": "best fixed choice behind",
    "lead": "lead",
    "closed": "closed",
}
_TIMES = {
    "of_llama_cpp": "of llama.cpp",
    "of_clairvoyant": "of clairvoyant",
    "clairvoyant_of_bound": "clairvoyant of bound",
}


def _percent(logarithm: float) -> str:
    return percent(np.expm1(logarithm))


def _fixed(behind: pd.DataFrame) -> Listing:
    by_batch = behind.groupby(level="batch").mean()
    means = behind.mean().sort_values()
    rows = [
        (
            policy,
            _percent(mean),
            *map(_percent, by_batch[policy]),
            _percent(behind[policy].max()),
            percent((behind[policy] <= 1e-9).mean(), 0),
        )
        for policy, mean in means.items()
    ]
    batches = (f"batch {batch}" for batch in by_batch.index)
    return Listing.of(
        ("policy", "all cells", *batches, "worst cell", "wins"),
        rows,
        title="Fixed choices",
        note="How much longer each takes than the best causal one of every cell, in the"
        " geometric mean. That best one is chosen in hindsight.",
    )


def _worth(
    title: str, note: str, logarithms: pd.DataFrame, pairs: Iterable[tuple[str, str]]
) -> Listing:
    """Time that the first of each pair saves against the second."""
    rows = []
    for part, without in pairs:
        if {part, without} <= {*logarithms}:
            gain = (logarithms[without] - logarithms[part]).dropna()
            figures = map(_percent, (gain.mean(), gain.min(), gain.max()))
            slower = percent((gain < 0).mean(), 0)
            rows.append((f"{part} over {without}", *figures, slower))
    heads = ("part", "mean", "worst", "best", "slower in")
    return Listing.of(heads, rows, title=title, note=note)


def _parts(mapped: FieldMap) -> Listing:
    return _worth(
        "What parts are worth",
        "Time saved: mean, worst and best cell, and in how many cells it is a loss.",
        mapped.behind,
        [*FIELD["parts"], (CLAIRVOYANT, mapped.favourite)],
    )


def _changes(mapped: FieldMap) -> Listing:
    runs = pd.concat([mapped.runs, mapped.changed])
    drafted = runs["draft_tokens"] == _DRAFTED_TOKENS
    policy = runs["policy"].where(~drafted, runs["policy"] + _DRAFTED)
    policy = policy.where(runs["warm"].isna(), policy + _WARM)
    # Passes that verify drafts have more tokens, so that runs are not of the same ones.
    seconds = runs.assign(policy=policy).pivot_table(
        index=CELL, columns="policy", values="tpot_s"
    )
    *drafts, foretold = FIELD["drafts"]
    warm = [f"{each}{_WARM}" for each in FIELD["warm"]]
    return _worth(
        "What drafts and a warm start are worth",
        "Time saved per token. Drafts cost nothing here, and four of five are right;"
        " they are verified for one sequence. A warm start is from other routing of the"
        " model, where there is any.",
        seconds.apply(np.log),
        [
            *((f"{each}{_DRAFTED}", each) for each in drafts),
            # The last one's draft foretells its routing.
            (f"{foretold}{_DRAFTED}", f"{drafts[-1]}{_DRAFTED}"),
            *zip(warm, FIELD["warm"], strict=True),
            (warm[1], warm[0]),
        ],
    )


def write_map(folder: Path, mapped: FieldMap, answer: Answer) -> list[Path]:
    """Write ``map.html`` and ``map.md``, and ``map.csv`` with a line for each cell."""
    figures = folder / "map.csv"
    pages = write_pages(folder, "map", answer)
    write_text(figures, mapped.cells.to_csv(index=False))
    return [*pages, figures]


def main() -> None:
    """Write the map."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field_map")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--shared", type=Path, metavar="DIR", help="others' traces")
    parser.add_argument("--jobs", type=int)
    asked = parser.parse_args()
    mapped = field_map(asked.out, traces=field_traces(asked.shared), jobs=asked.jobs)
    answer = map_answer(mapped)
    print(answer.sentences[0], *answer.notes, sep="\n")
    print(*write_map(asked.out, mapped, answer), sep="\n")


if __name__ == "__main__":
    main()
