"""Routing recall against every fixed rival, on traces that it was not tuned on.

Runs that are in the results already are not repeated, so that it may be interrupted::

    python -m benchmarks.judge_recall run results.jsonl --shared DIR
    python -m benchmarks.judge_recall print results.jsonl

``--traces 'NAME;...'`` takes some of them, ``--strongest`` few rivals. A fixed rival is
one system or composition for all cells of a row of the table: the one that is fastest
there in the geometric mean. Figures are means of logarithms over cells.

With ``--draft-tokens N`` all verify the same drafts, into results of their own, and
what is judged is recall with the drafts' routing::

    python -m benchmarks.judge_recall run d.jsonl --shared DIR --draft-tokens 4

With ``--drawn-links N`` machines are drawn in the place of the map's: packaged ones
with links of 1 to 64 GB/s, other processors and the contention that belongs to them
(`benchmarks.drawn_ceilings.machine`); the clairvoyant system is left out there.

``ceilings RESULTS`` lays out what today's software, the best causal one of each cell
and the clairvoyant system take, in ms per token, beside the bound.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from benchmarks.field_map import FIELD
from benchmarks.recorded import RecordedTexts
from moesim.evidence.reproduction.workloads import Workload
from moesim.policies.systems import SYSTEMS, compose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moesim.hwprofiles.profile import HardwareProfile

MACHINES = FIELD["machines"]
RATIOS = (0.1, 0.25, 0.5)
OURS = ("recall", "clairvoyant")
DRAFTING = "recall++moe-speq"
"""Recall whose streams are drafted tokens' experts."""
DRAFTED_RIVALS = tuple(
    f"{assignment}+decayed-frequency+moe-speq"
    for assignment in ("hybrimoe-schedule", "fetch-split", "exact:objective=scheduled")
)
TODAY = "llama.cpp"
BOUND = "bound"
"""Beside policies in the results: what no schedule can beat."""
ASSIGNMENTS = (
    *("hybrimoe-schedule", "fetch-split", "fetch-split:table=0/1/1/2/3", "greedy"),
    *("exact:objective=scheduled", "fixed-mapping", "smoe-balancer"),
)
CACHES = ("decayed-frequency", "lru", "lfu", "arc", "lfru", "workload-window")
STRONGEST = (
    *("hybrimoe-schedule+decayed-frequency", "hybrimoe-schedule+lfru"),
    *("hybrimoe-schedule+lfu", "hybrimoe-schedule+decayed-frequency+statistical"),
    *("fetch-split+decayed-frequency", "fetch-split+decayed-frequency+statistical"),
    "exact:objective=scheduled+decayed-frequency",
    "exact:objective=scheduled+decayed-frequency+statistical",
    "hybrimoe-schedule:contention=true+decayed-frequency",
    "exact:objective=contended+decayed-frequency",
    *("greedy+decayed-frequency", "smoe-balancer+lfru", "dfa-cache"),
)
"""Rivals that were first or second anywhere in a grid of all of them, and the same in
plans that see contention.
"""

LONG_RUNS = {"edgemoe", "moe-infinity"}
"""Systems whose simulated runs take a hundred times as long as others."""

TEXTS = range(16, 24)
"""Texts of gpt-oss-20b, of 64 tokens, behind those that were tuned on."""

IN_A_ROW = "gpt-oss-20b, in a row"
"""The same texts in one run, so that caches and what is remembered stay."""

HELD_BACK = {
    "qwen3-30b-a3b": ("qwen3_30b_a3b_top6", "q4_k_m"),
    "kimi-linear-48b-a3b": ("kimi_linear_48b_a3b_decode300", "q4_k_m"),
    "gpt-oss-20b": ("gpt_oss_20b", "mxfp4"),
    "olmoe-1b-7b": ("olmoe_1b_7b_decode299", "q4_k_m"),
    "qwen3.6-35b-a3b": ("qwen36_35b_a3b_coding_prefill28_decode192", "q4_k_m"),
    "qwen3.8-flash-next": ("qwen38_flash_next_chat_decode67", "q4_k_m"),
}
"""Recorded traces, with their weights; OLMoE was tuned on."""

LINKS_SEED = 42

DRAWN = ("mixtral-8x7b", "deepseek-v2-lite")
"""Models whose routing is drawn, with other seeds than what was tuned on."""

STATED = 1.96
"""Standard errors of a 95 % interval."""


def rivals() -> list[str]:
    """Systems that see the past only, keep to the recorded routing and this machine's
    kernels, and need no columns, networks or drafts; and compositions.
    """
    composed = [
        f"{assignment}+{cache}" for assignment in ASSIGNMENTS for cache in CACHES
    ]
    composed += [
        f"{assignment}+decayed-frequency+statistical" for assignment in ASSIGNMENTS
    ]
    return composed + [name for name in SYSTEMS if _is_rival(name)]


def _is_rival(name: str) -> bool:
    system = SYSTEMS[name]
    if name in {*OURS, *LONG_RUNS} or system.kernels is not None:
        return False
    # A learned cache of its own, and results that join a layer later.
    if name in {"flashmoe", "ktransformers-deferral"} or system.draft_tokens:
        return False
    policies = compose(name).build(gpus=1, host_cache=None)
    parts = policies.all()
    is_causal = not any(part.oracle or part.needs for part in parts)
    return is_causal and not policies.routing.alters


def drawn(name: str, shared: Path, folder: Path) -> list[Path]:
    """Write the traces of a model: one for each text."""
    from moesim.traces.importers import import_trace
    from moesim.traces.models import model_shape

    if name in DRAWN:
        workload = Workload(name, "q4_k_m", 32, 96, 3, like=name, seed=32)
        return [workload.draw(folder)]
    if name == IN_A_ROW:
        recorded = shared / f"{HELD_BACK['gpt-oss-20b'][0]}.parquet"
        group = TEXTS.start // len(TEXTS)
        sizes = (0, 64, len(TEXTS))
        workload = RecordedTexts(
            "gpt-oss-20b", "mxfp4", *sizes, recorded=recorded, group=group
        )
        return [workload.draw(folder)]
    file, weights = HELD_BACK[name]
    recorded = shared / f"{file}.parquet"
    if name != "gpt-oss-20b":
        target = folder / f"{name}.parquet"
        import_trace(recorded, target, shape=model_shape(name, weights=weights))
        return [target]
    return [
        RecordedTexts(name, weights, 0, 64, 1, recorded=recorded, group=text).draw(
            folder
        )
        for text in TEXTS
    ]


def run(
    results: Path,
    shared: Path,
    traces: Sequence[str],
    rivals: Sequence[str],
    drafted: int,
    machines: Mapping[str, str | HardwareProfile],
    ours: Sequence[str] = OURS,
) -> None:
    """Replay what the results lack, and append it."""
    import moesim
    from moesim.traces.format.reader import open_trace

    warnings.simplefilter("ignore")
    done = set()
    if results.exists():
        done = {tuple(line[:5]) for line in _lines(results)}
    with results.open("a") as file, tempfile.TemporaryDirectory() as folder:
        for name in traces:
            for text, path in enumerate(drawn(name, shared, Path(folder))):
                trace = open_trace(path)
                for hw, machine in machines.items():
                    for ratio in RATIOS:
                        for policy in (*ours, TODAY, *rivals):
                            cell = (name, text, hw, ratio, policy)
                            if cell in done:
                                continue
                            replayed = moesim.replay(
                                *(trace, policy),
                                hw=machine,
                                cache_ratio=ratio,
                                keep=False,
                                draft_tokens=drafted,
                                bounded=policy == OURS[1] and not drafted,
                            )
                            taken = (
                                replayed.metrics["makespan_s"],
                                replayed.metrics["tpot_s"],
                            )
                            lines = [[*cell, *taken]]
                            if replayed.bound is not None:
                                bound_s = replayed.bound.seconds
                                lines.append([*cell[:4], BOUND, bound_s, None])
                            written = [json.dumps(line) + "\n" for line in lines]
                            file.write("".join(written))
                            file.flush()
            print(name, "done")


def drawn_machines(count: int) -> dict[str, HardwareProfile]:
    """Machines of one card, by their rates: of the link, of the processor's memory."""
    from benchmarks.drawn_ceilings import machine

    drawn: dict[str, HardwareProfile] = {}
    number = 0
    while len(drawn) < count:
        profile = machine(np.random.default_rng([LINKS_SEED, number]))
        number += 1
        if profile.gpus == 1:
            link, cpu = (
                profile.numbers[f"costs.{lane}.bytes_per_s"].value / 1e9
                for lane in ("h2d", "cpu")
            )
            drawn[f"{profile.name} {link:.1f} and {cpu:.0f} GB/s"] = profile
    return drawn


def _lines(results: Path) -> list[list[object]]:
    return [json.loads(line) for line in results.read_text().splitlines()]


# -- what it says ----------------------------------------------------------------------


def verdict(seconds: pd.DataFrame) -> dict[str, object]:
    """Compare over cells, one a row, with policies as columns.

    Returns:
        The best fixed rival, our gain over it with half its 95 % interval, over
        the best of each cell in hindsight, and the share of the way from the best fixed
        rival to the clairvoyant schedule.
    """
    rows = np.log(seconds)
    # Weak rivals were not run everywhere.
    no_rivals = [*OURS, DRAFTING, BOUND]
    of_rivals = rows.drop(columns=no_rivals, errors="ignore").dropna(axis="columns")
    best = str(of_rivals.mean().idxmin())
    ours = rows[DRAFTING if DRAFTING in rows else OURS[0]]
    gain = of_rivals[best] - ours
    texts = gain.groupby("text").mean()
    # Texts are independent of each other, cells of one text are not.
    sample = texts if len(texts) > 1 else gain
    gone = np.exp(of_rivals[best]) - np.exp(ours)
    way = np.nan * gone
    if OURS[1] in rows:
        way = np.exp(of_rivals[best]) - np.exp(rows[OURS[1]])
    return {
        "rival": best,
        "gain": float(gain.mean()),
        "half": STATED * float(sample.std(ddof=1)) / len(sample) ** 0.5,
        "hindsight": float((of_rivals.min(axis=1) - ours).mean()),
        "closed": float(gone.sum() / way.sum(skipna=False)),
    }


COLUMNS = ["trace", "text", "hw", "ratio", "policy", "seconds", "tpot_s"]


def seconds_of(results: Path, figure: str = "seconds") -> pd.DataFrame:
    """A figure of each finished cell, a row each, with policies as columns."""
    cells = pd.DataFrame(_lines(results), columns=COLUMNS).pivot_table(
        index=COLUMNS[:4], columns="policy", values=figure, sort=False
    )
    # An interrupted run leaves a cell unfinished.
    ran = [name for name in (*OURS, *STRONGEST) if name in cells]
    return cells.dropna(subset=ran)


def printed(results: Path) -> str:
    """Lay out all verdicts as rows of a Markdown table."""
    cells = seconds_of(results)
    whole = cells.groupby(level=0).size() % len(RATIOS) == 0
    cells = cells[whole.reindex(cells.index.get_level_values(0)).to_numpy()]
    names = list(dict.fromkeys(cells.index.get_level_values("trace")))
    ratios = cells.index.get_level_values("ratio")
    traces = cells.index.get_level_values("trace")
    recorded = [*HELD_BACK, IN_A_ROW]
    recorded.remove("olmoe-1b-7b")
    recorded.remove("gpt-oss-20b")
    lines = [
        "| trace | experts | best fixed rival | recall | in hindsight | gap closed |",
        "|---|--:|---|--:|--:|--:|",
    ]
    among_recorded = f"the {len(set(recorded) & set(names))} recorded"
    for name in (*names, among_recorded):
        is_here = traces.isin(recorded) if name not in names else traces == name
        if not is_here.any():
            continue
        for words, among in (
            *((f"{ratio:.0%}", ratios == ratio) for ratio in RATIOS),
            ("10 and 25 %", ratios < 0.5),
            ("all", ratios > 0),
        ):
            each = verdict(cells[is_here & among])
            closed = "-" if np.isnan(each["closed"]) else f"{each['closed']:.0%}"
            lines.append(
                f"| {name} | {words} | `{each['rival']}` |"
                f" {each['gain']:+.1%} ± {each['half']:.1%} |"
                f" {each['hindsight']:+.1%} | {closed} |"
            )
    if OURS[1] not in cells:
        return "\n".join(lines)
    clairvoyant = cells[OURS[1]]
    causal = cells.drop(columns=[OURS[1], BOUND], errors="ignore").min(axis=1)
    lines.append(
        f"\n{len(cells)} cells; a causal one is faster than clairvoyant in"
        f" {(causal < clairvoyant).sum()}, the closest takes"
        f" {(causal / clairvoyant).min():.3f} times its time"
    )
    return "\n".join(lines)


def ceilings(results: Path) -> str:
    """Lay out ms per token of today's software, of the best causal one of each cell and
    of the clairvoyant system, and that one's time over the bound, as a Markdown table.
    """
    lines = [
        f"| | {TODAY} | best causal | clairvoyant | of the bound |",
        "|---|--:|--:|--:|--:|",
    ]
    seconds = seconds_of(results)
    ms = 1e3 * seconds_of(results, "tpot_s")
    clairvoyant = OURS[1]
    figures = pd.DataFrame(
        {
            TODAY: ms[TODAY],
            "best": ms.drop(columns=[clairvoyant, BOUND], errors="ignore").min(axis=1),
            clairvoyant: ms[clairvoyant],
            BOUND: seconds[clairvoyant] / seconds[BOUND],
        }
    ).groupby(level=["trace", "hw", "ratio"], sort=False)
    for (name, hw), each in figures.mean().groupby(level=["trace", "hw"], sort=False):
        ratios = " / ".join(
            f"{100 * r:g}" for r in each.index.get_level_values("ratio")
        )
        columns = [
            " / ".join(f"{value:.{2 if column == BOUND else 1}f}" for value in values)
            for column, values in each.items()
        ]
        lines.append(f"| {name}, {hw}, {ratios} % | {' | '.join(columns)} |")
    causal = seconds.drop(columns=[clairvoyant, BOUND])
    behind = causal.min(axis=1) / seconds[clairvoyant]
    firsts = (causal.idxmin(axis=1) == OURS[0]).sum()
    lines.append(
        f"\n{len(seconds)} cells; a causal one is faster in {(behind < 1).sum()}, the"
        f" closest takes {behind.min():.2f} times the clairvoyant one's time; recall is"
        f" the best causal one in {firsts}; the median clairvoyant one takes"
        f" {figures[BOUND].mean().median():.2f} times the bound"
    )
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("results", type=Path)
    running.add_argument("--shared", type=Path, required=True)
    running.add_argument("--traces", default=";".join((*HELD_BACK, IN_A_ROW, *DRAWN)))
    running.add_argument("--strongest", action="store_true")
    running.add_argument("--draft-tokens", type=int, default=0)
    running.add_argument("--machines", default=",".join(MACHINES))
    running.add_argument("--drawn-links", type=int, default=0, metavar="N")
    for name, layout in (("print", printed), ("ceilings", ceilings)):
        printing = commands.add_parser(name)
        printing.add_argument("results", type=Path)
        printing.set_defaults(layout=layout)
    given = parser.parse_args()
    if given.command != "run":
        print(given.layout(given.results))
        return
    drafted = given.draft_tokens
    among = [*STRONGEST] if given.strongest or drafted else rivals()
    if drafted:
        among += [DRAFTING, *DRAFTED_RIVALS]
    chosen = given.traces.split(";"), among, drafted
    machines = {name: name for name in given.machines.split(",")}
    if given.drawn_links:
        drawn_ones = drawn_machines(given.drawn_links)
        run(given.results, given.shared, *chosen, drawn_ones, OURS[:1])
    else:
        run(given.results, given.shared, *chosen, machines)


if __name__ == "__main__":
    main()
