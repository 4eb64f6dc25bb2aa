"""Results as people read them: text tables, and files beside the run
(`moesim.reporting.figures` draws).

Units change here and nowhere else: seconds become milliseconds, bytes GiB. Every
tokens/s stands beside the bytes that were moved for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from moesim.traces.files import written_beside
from moesim.traces.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd

    from moesim.runs.result import Run

NOTHING = "-"
WORTH_SAYING = 1.01
"""Two policies whose speeds differ by less are equally fast."""


def run_text(run: Run) -> str:
    """Lay out one run for a terminal: what was run, how fast, what was hit, what each
    lane did.
    """
    config = run.config
    m = run.metrics
    moved = {lane: count for lane, count in m["bytes"].items() if count}
    facts = [
        (
            "model",
            f"{config['model']}, {m['steps']:,} forward passes of {config['trace']}",
        ),
        ("machine", f"{config['hw']} ({config['hw_kind']} profile)"),
        ("policy", _policy_words(config)),
        ("cache", _cache_words(config)),
        *([("GPU memory", _gpu_words(config))] if "gpu_bytes" in config else []),
        ("", ""),
        ("first token", _rate(m, "ttft_s", "prefill")),
        ("each further token", _rate(m, "tpot_s", "decode")),
        ("hit rate", _hit_words(m)),
        (
            "accesses",
            (
                f"{m['accesses']:,}: {m['hits']:,} hits, {m['delayed_hits']:,} delayed,"
                f" {m['misses']:,} misses"
            ),
        ),
        (
            "planning",
            (
                f"{ms(m['planning_s'])} of {ms(m['makespan_s'])},"
                f" {percent(m['planning_share'])}"
            ),
        ),
    ]
    if m["prefetched"]:
        facts.append(
            (
                "prefetch",
                (
                    f"{m['prefetched']:,} copies, {percent(m['prefetch_accuracy'])} of"
                    " them used"
                ),
            )
        )
    if m["energy_j"] is not None:
        facts.append(
            (
                "energy",
                f"{m['energy_j']:.0f} J, {number(m['tokens_per_kj'])} tokens per kJ",
            )
        )
    if m["routing"] != "recorded":
        kept = percent(m["gate_mass_kept"])
        facts.append(
            ("routing", f"{m['routing']}: counterfactual, {kept} of the gate mass kept")
        )
    if m["approximate"]:
        facts.append(
            (
                "answers",
                "approximate: experts started ahead see the layer before's input",
            )
        )
    width = max(len(name) for name, _ in facts)
    head = [f"{name:<{width}}  {text}".rstrip() for name, text in facts]
    rows = [["lane", "busy", "of the run", "stalled", "moved", "bandwidth"]]
    shares = busy_shares(run)
    for lane, busy_s in m["busy_s"].items():
        rows.append(
            [
                lane,
                ms(busy_s),
                percent(shares[lane]),
                ms(m["stall_s"][lane]) if lane in m["stall_s"] else "",
                format_bytes(moved[lane]) if lane in moved else "",
                bandwidth(m["bandwidth"].get(lane)) if lane in moved else "",
            ]
        )
    return "\n".join([*head, "", *aligned(rows)])


def comparison_text(table: pd.DataFrame, runs: Mapping[str, Run]) -> str:
    """Lay out a comparison: what all runs share, one row per policy, shortest run
    first, and what it comes to.
    """
    names, rows = comparison_rows(table)
    return "\n".join(
        [
            shared_words(runs),
            "",
            *aligned([names, *rows]),
            "",
            *verdict_lines(table, runs),
        ]
    )


def comparison_rows(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row of words for each run; the SSD only where it is
    used.
    """
    columns: dict[str, Callable[[dict[Any, Any]], str]] = {
        "policy": lambda row: str(row["policy"]),
        "first token": lambda row: ms(row["ttft_s"]),
        "per token": lambda row: ms(row["tpot_s"]),
        "decode": lambda row: number(row["decode_tokens_per_s"], " tok/s"),
        "prefill": lambda row: number(row["prefill_tokens_per_s"], " tok/s"),
        "hit rate": lambda row: percent(row["hit_rate_active"]),
        "to GPU": lambda row: format_bytes(row["h2d_bytes"]),
        "at": lambda row: bandwidth(row["h2d_bytes_per_s"]),
        "from SSD": lambda row: format_bytes(row["ssd_bytes"]),
        "GPU memory": lambda row: format_bytes(row["gpu_bytes"]),
        "busiest lane": lambda row: (
            f"{row['busiest']} {percent(row['busiest_share'], 0)}"
        ),
        "run": lambda row: ms(row["makespan_s"]),
    }
    if not table["ssd_bytes"].sum():
        del columns["from SSD"]
    return list(columns), [
        [words(row) for words in columns.values()] for row in table.to_dict("records")
    ]


def verdict_lines(table: pd.DataFrame, runs: Mapping[str, Run]) -> list[str]:
    """Who is fastest and what holds it up; then what a reader must know before
    believing the ranking.
    """
    lines = []
    real = table[~table["oracle"].astype(bool)]
    if len(real):
        best = real.iloc[0]
        words = f"fastest over the whole trace: {best['policy']}{_speed_words(best)}"
        lines.append(
            f"{words}; its {best['busiest']} works {percent(best['busiest_share'], 0)}"
            " of the time"
        )
        decode = real.sort_values(
            "decode_tokens_per_s", ascending=False, kind="stable"
        ).iloc[0]
        gain = (decode["decode_tokens_per_s"] or 0.0) / (
            best["decode_tokens_per_s"] or 1.0
        )
        if gain > WORTH_SAYING:
            lines.append(
                f"fastest once it generates: {decode['policy']}{_speed_words(decode)}"
            )
    return [*lines, *rivalry_lines(runs)]


def rivalry_lines(runs: Mapping[str, Run]) -> list[str]:
    """What a reader must know of policies before believing a ranking of them."""
    notes = {
        "sees the future, so no rival": [
            name for name, run in runs.items() if run.config["oracle"]
        ],
        "changes the routing, so other answers": [
            n for n, run in runs.items() if run.metrics["routing"] != "recorded"
        ],
        "starts experts on the input of the layer before, so other answers": [
            name for name, run in runs.items() if run.metrics["approximate"]
        ],
    }
    lines = [f"{', '.join(names)}: {words}" for words, names in notes.items() if names]
    return [*lines, "hit rate: of active experts, CPU-computed ones included"]


def _speed_words(row: pd.Series) -> str:
    decode = row["decode_tokens_per_s"]
    first_s = row["ttft_s"]
    words = "" if _missing(decode) else f", {number(decode)} tokens/s"
    return words if _missing(first_s) else f"{words}, first token after {ms(first_s)}"


def busiest(run: Run) -> tuple[str, float | None]:
    """The lane that worked most, and its share of the run: where more speed would help
    first.
    """
    shares = busy_shares(run)
    lane = max(shares, key=lambda name: shares[name] or 0.0)
    return lane, shares[lane]


def busy_shares(run: Run) -> dict[str, float | None]:
    """Share of the run in which each lane worked; None for a run without any work."""
    whole_s = run.metrics["makespan_s"]
    return {
        lane: busy_s / whole_s if whole_s else None
        for lane, busy_s in run.metrics["busy_s"].items()
    }


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell: the first to the left, the others to the
    right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        padded = (
            f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)
        )
        lines.append("  ".join([f"{first:<{widths[0]}}", *padded]).rstrip())
    return lines


def save_table(table: pd.DataFrame, path: Path) -> Path:
    """Write a comparison, in seconds and bytes: as Parquet if its name ends so, else as
    CSV.
    """
    with written_beside(path) as part:
        if path.suffix == ".parquet":
            table.convert_dtypes().to_parquet(part, index=False)
        else:
            table.to_csv(part, index=False, lineterminator="\n")
    return path


def cache_text(counts: Mapping[str, Any]) -> str:
    """Hits of a cache alone, for people."""
    rate = counts["accesses"] / counts["wall_s"]
    slots = counts["cache_slots"]
    held = (
        f"{slots[0]} experts per layer"
        if counts["scope"] == "layer"
        else f"{slots[0]} experts in one pool"
    )
    hit_rate = (
        "no accesses"
        if counts["hit_rate_active"] is None
        else f"{counts['hit_rate_active']:.2%} of active experts"
    )
    facts = {
        "cache": f"{counts['cache']}, {held}",
        "hit rate": f"{hit_rate}: {counts['hits']:,} hits, {counts['misses']:,} misses",
        "replayed": (
            f"{counts['accesses']:,} accesses in {counts['wall_s']:.2f} s,"
            f" {rate / 1e6:.2f} million per second"
        ),
    }
    return "\n".join(f"{name:<10}{words}" for name, words in facts.items())


def _policy_words(config: Mapping[str, Any]) -> str:
    parts = [
        f"assignment {config['assignment']}",
        f"cache {config['cache']}",
        f"prefetch {config['prefetch']}",
        f"routing {config['routing']}",
        f"batch {config['batch']}",
    ]
    return ", ".join(parts)


def _cache_words(config: Mapping[str, Any]) -> str:
    slots = config["cache_slots"]
    if config["cache_scope"] == "global":
        held = f"{slots[0]:,} experts of any layer"
    else:
        held = (
            f"{min(slots)}{f' to {max(slots)}' if max(slots) > min(slots) else ''}"
            " experts per layer"
        )
    text = (
        f"{held}, {percent(config['cache_ratio'])} of all"
        f" ({format_bytes(config['cache_bytes'])})"
    )
    if config["host_bytes"] is not None:
        text += (
            f"; {format_bytes(config['host_bytes'])} of experts in host memory, the"
            " rest on SSD"
        )
    return text


def _gpu_words(config: Mapping[str, Any]) -> str:
    each = "each of them takes " if config["gpus"] > 1 else ""
    return (
        f"{each}{format_bytes(config['gpu_bytes'])}: cache, {config['staging']} staged"
        " experts, the rest of the model"
    )


def shared_words(runs: Mapping[str, Run]) -> str:
    """Model, machine and batch; the cache where all runs have the same."""
    config = next(iter(runs.values())).config
    machine = (
        f"{config['model']} on {config['hw']} ({config['hw_kind']} profile), batch"
        f" {config['batch']}"
    )
    caches = {_cache_words(run.config) for run in runs.values()}
    several = "as each system has it, within the same memory"
    words = caches.pop() if len(caches) == 1 else several
    return f"{machine}\ncache: {words}"


def _rate(metrics: Mapping[str, Any], time: str, phase: str) -> str:
    total = metrics[f"{phase}_tokens_per_s"]
    each = metrics[f"{phase}_tokens_per_s_seq"]
    if total is None:
        return f"the trace has no {phase}"
    text = (
        f"{ms(metrics[time])}, {number(total)}"
        f" {'prompt ' if phase == 'prefill' else ''}tokens/s"
    )
    return (
        text
        if each is None or math.isclose(total, each, rel_tol=1e-3)
        else f"{text} ({number(each)} per sequence)"
    )


def _hit_words(metrics: Mapping[str, Any]) -> str:
    return (
        f"{percent(metrics['hit_rate_active'])} of active experts,"
        f" {percent(metrics['hit_rate_gpu'])} of GPU-assigned ones,"
        f" {percent(metrics['hit_rate_token'])} weighted by tokens"
    )


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def ms(seconds: float | None) -> str:
    """Milliseconds; seconds from one second on."""
    if _missing(seconds):
        return NOTHING
    assert seconds is not None
    return number(seconds, " s") if seconds >= 1 else number(seconds * 1e3, " ms")


def percent(share: float | None, decimals: int = 1) -> str:
    """A share as per cent."""
    return NOTHING if _missing(share) else f"{100 * share:.{decimals}f} %"  # type: ignore[operator]


def bandwidth(bytes_per_s: float | None) -> str:
    """Bytes per second as vendors write them."""
    return NOTHING if _missing(bytes_per_s) else f"{bytes_per_s / 1e9:.1f} GB/s"  # type: ignore[operator]


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits below a thousand, whole numbers above."""
    if _missing(value):
        return NOTHING
    assert value is not None
    if value == 0:
        return f"0{unit}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}{unit}"
