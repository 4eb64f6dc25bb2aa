"""A comparison as text: who is fastest, what limits it, and what a reader must know."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from moesim.base.units import is_missing, ms, number, percent
from moesim.questions.compare import CELL, comparison_rows
from moesim.questions.replay import error_of, shared_setting
from moesim.reporting.tables import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    from moesim.questions.compare import Comparison
    from moesim.runs.result import Run

LEAST_LEAD = 0.01
"""Share of the time by which a run must be ahead of another to be called faster, where
the profile does not state how well it predicts.
"""


def comparison_text(table: pd.DataFrame, runs: Mapping[str, Run]) -> str:
    """Lay out a comparison: what all runs share, one row per policy, the fastest.

    Args:
        table: as `moesim.compare` returns it.
        runs: as `moesim.compare` returns them.
    """
    heads, rows = comparison_rows(table)
    lines = [
        shared_setting(runs),
        "",
        *aligned([heads, *rows]),
        "",
        *ranking_lines(table, runs),
    ]
    return "\n".join(lines)


def ranking_lines(table: pd.DataFrame, runs: Mapping[str, Run]) -> list[str]:
    """Say who is fastest and what limits it; then what a reader must know before
    believing the ranking.
    """
    # A policy that sees the future is a bound, and cannot win.
    causal = table[~table["oracle"].astype(bool)]
    if causal.empty:
        return caveat_lines(runs)
    best = causal.iloc[0]
    busy = percent(best["busiest_share"], 0)
    lines = [
        (
            f"fastest over the whole trace: {best['policy']}{_speed_of(best)}; its"
            f" {best['busiest']} works {busy} of the time"
        )
    ]
    # Less than a model of a machine can tell is no lead.
    run = runs.get(best["policy"])
    lead = lead_needed(run)
    near = causal[causal["makespan_s"] <= best["makespan_s"] * (1 + lead)]["policy"]
    if len(near) > 1:
        # Where the profile states an interval, it is the reason.
        error = None if run is None else error_of(run)
        within = "" if error is None else f" within the profile's ±{percent(error, 0)}"
        names = ", ".join(near)
        lines[0] = f"a tie over the whole trace{within}: {names}{_speed_of(best)}"

    if len(causal) > 1 and causal["makespan_s"].max() <= best["makespan_s"] * (
        1 + LEAST_LEAD
    ):
        lines.append(alike_line(best["busiest"], best["busiest_share"], run))

    # A long prompt can hide who generates faster, which matters more to a user.
    by_decode = causal.sort_values(
        "decode_tokens_per_s", ascending=False, kind="stable"
    )
    generator = by_decode.iloc[0]
    best_rate = best["decode_tokens_per_s"] or 1.0
    if (generator["decode_tokens_per_s"] or 0.0) / best_rate > 1 + lead:
        lines.append(
            f"fastest once it generates: {generator['policy']}{_speed_of(generator)}"
        )
    return [*lines, *caveat_lines(runs)]


def alike_line(lane: str, share: float, run: Run | None = None) -> str:
    """Why all policies take the same time: what the busiest lane does most of the time.

    Args:
        lane: the busiest.
        share: of the run in which it works.
        run: with its timeline, which tells dense parts from experts; None without.
    """
    line = f"all within 1 %: {lane} works {percent(share, 0)} of the time under each"
    if run is None:
        return line
    spans = run.timeline.frame()
    spans = spans[spans["lane"] == lane]
    seconds = (spans["end_s"] - spans["start_s"]).groupby(spans["kind"]).sum()
    dense = float(seconds.get("dense", 0.0) / (run.metrics["makespan_s"] or 1.0))
    if dense < share / 2:
        return f"{line}, most of it on the same experts"
    return (
        f"{line}, {percent(dense, 0)} on the dense parts of layers (attention, norms,"
        " gate, launches), which no policy changes"
    )


def lead_needed(run: Run | None) -> float:
    """By which share of the time a run must be ahead to be called faster: the interval
    of its profile, where it states one.
    """
    error = None if run is None else error_of(run)
    return LEAST_LEAD if error is None else error


def caveat_lines(runs: Mapping[str, Run]) -> list[str]:
    """What a reader must know of policies before believing a ranking of them."""
    caveats: dict[str, list[str]] = {}
    for name, run in runs.items():
        if run.config["oracle"]:
            parts = ", ".join(_oracles_of(run.config))
            reason = f"sees the future ({parts}), so no rival"
            caveats.setdefault(reason, []).append(name)
    caveats |= {
        "changes the routing, so other answers": [
            name for name, run in runs.items() if run.metrics["routing"] != "recorded"
        ],
        "starts experts one layer early or joins them one late, so other answers": [
            name for name, run in runs.items() if run.metrics["approximate"]
        ],
    }
    lines = [f"{', '.join(names)}: {text}" for text, names in caveats.items() if names]
    return [*lines, "hit rate: of active experts, CPU-computed ones included"]


def _oracles_of(config: Mapping[str, Any]) -> list[str]:
    """The parts of a policy that see the future."""
    # Finding a policy imports it; few comparisons have one of these.
    from moesim.policies.registry import resolve  # noqa: PLC0415

    return [
        f"{part} {config[part]}"
        for part in ("assignment", "cache", "prefetch", "routing")
        if resolve(config[part], part).oracle
    ]


def _speed_of(row: pd.Series) -> str:
    """Tokens per second and time to the first token, as far as the trace has them."""
    decode = row["decode_tokens_per_s"]
    first_s = row["ttft_s"]
    speed = "" if is_missing(decode) else f", {number(decode)} tokens/s"
    if is_missing(first_s):
        return speed
    return f"{speed}, first token after {ms(first_s)}"


TIE = "a tie"
MEMORY_HEADS = {
    "gpu_memory_bytes": "GPU memory",
    "slots_per_layer": "per layer",
    "cache_ratio": "GPU cache",
}
"""By the way in which sizes were stated: head of the column that holds them."""


def cells_text(compared: Comparison) -> str:
    """Lay out a comparison: who wins where, the time of every policy there, who wins
    how often.
    """
    winner_heads, winners = winner_rows(compared)
    time_heads, times = time_rows(compared)
    lines = [
        cells_setting(compared),
        "",
        # Machine and memory together name a row, so both lead every block.
        *aligned([winner_heads, *winners], lead=len(CELL)),
        "",
        *aligned([time_heads, *times], lead=len(CELL)),
        "",
        *answer_lines(compared),
    ]
    return "\n".join(lines)


def cells_setting(compared: Comparison) -> str:
    """The model, and how many policies were replayed on how many machines and
    memories.
    """
    config = next(iter(compared.runs.values())).config
    machines = compared.table["hw"].nunique()
    memories = compared.table["memory"].nunique()
    machine = f"{machines} machines"
    if machines == 1:
        machine = f"{config['hw']} ({config['hw_kind']} profile)"
    memory = f"{memories} memory sizes"
    if memories == 1:
        memory = f"{memory_head(compared)} {compared.table['memory'].iloc[0]}"
        if compared.axis == "slots_per_layer":
            memory = f"{compared.table['memory'].iloc[0]} per layer"
    policies = len(compared.by_policy())
    return (
        f"{config['model']}, batch {config['batch']}, {policies} policies on {machine}"
        f" with {memory}"
    )


def answer_lines(compared: Comparison) -> list[str]:
    """Who is fastest in how many cells; then what a reader must know before believing
    it.
    """
    wins = Counter(
        TIE if _lead(cell, compared) == TIE else str(cell["policy"].iloc[0])
        for cell in _causal_cells(compared)
    )
    winners = ", ".join(
        f"{policy} in {count} of {compared.cells}"
        for policy, count in wins.most_common()
    )
    answer = (
        f"fastest over the whole trace: {winners or 'none that sees the past only'}"
    )
    return [answer, *caveat_lines(compared.by_policy())]


def winner_rows(compared: Comparison) -> tuple[list[str], list[list[str]]]:
    """Heads of columns, and a row for every machine with every memory: the fastest
    policy there.
    """
    heads = [
        "machine",
        memory_head(compared),
        "fastest",
        "first token",
        "per token",
        "decode",
        "hit rate",
        "ahead by",
        "of",
    ]
    rows = []
    for cell in _causal_cells(compared):
        # The table holds the shortest run of each cell first.
        best, *others = cell.to_dict("records")
        second = others[0]["policy"] if others else ""
        rows.append(
            [
                best["hw"],
                best["memory"],
                best["policy"],
                ms(best["ttft_s"]),
                ms(best["tpot_s"]),
                number(best["decode_tokens_per_s"], " tok/s"),
                percent(best["hit_rate_active"]),
                _lead(cell, compared),
                second,
            ]
        )
    return heads, rows


def _causal_cells(compared: Comparison) -> Iterator[pd.DataFrame]:
    """Rows of each cell, the shortest run first, without policies that see the future:
    they are bounds, and win nothing.
    """
    causal = compared.table[~compared.table["oracle"]]
    for _, cell in causal.groupby(CELL, sort=False):
        yield cell


def _lead(cell: pd.DataFrame, compared: Comparison) -> str:
    """By how much the fastest run of a cell is ahead of the second; a tie where it is
    by less than the machine's profile can tell.
    """
    times_s = cell["makespan_s"].tolist()
    if len(times_s) < 2 or not times_s[0]:
        return ""
    lead = times_s[1] / times_s[0] - 1
    fastest = cell.iloc[0]
    run = compared.runs.get((fastest["hw"], fastest["memory"], fastest["policy"]))
    return TIE if lead <= lead_needed(run) else percent(lead)


def time_rows(compared: Comparison) -> tuple[list[str], list[list[str]]]:
    """Heads of columns, and a row for every machine with every memory: the time of each
    policy there.
    """
    column, meaning = time_column(compared.table)
    # One order of policies for all cells, whoever is fastest in each.
    policies = list(compared.by_policy())
    rows = []
    for (machine, memory), cell in compared.table.groupby(CELL, sort=False):
        times = cell.set_index("policy")[column]
        rows.append(
            [str(machine), str(memory), *(ms(times[policy]) for policy in policies)]
        )
    return [meaning, memory_head(compared), *policies], rows


def time_column(table: pd.DataFrame) -> tuple[str, str]:
    """The column that is compared, and its meaning in words: time per token, or
    the whole run where no token is generated.
    """
    if table["tpot_s"].notna().any():
        return "tpot_s", "per token"
    return "makespan_s", "whole trace"


def memory_head(compared: Comparison) -> str:
    """Head of the column of memory sizes."""
    return MEMORY_HEADS[compared.axis]
