"""A comparison over several machines or memories as text: who is fastest where, and by
how much.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from moesim.reporting.tables import aligned
from moesim.reporting.text import caveat_lines, lead_needed
from moesim.reporting.units import ms, number, percent
from moesim.sweeps.comparison import CELL

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from moesim.sweeps.comparison import Comparison

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
