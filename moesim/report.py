"""Results as people read them: text tables, a picture, files beside the run.

Units change here and nowhere else: seconds become milliseconds, bytes GiB. Every tokens/s stands beside the bytes
that were moved for it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.files import written_beside
from traces.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from moesim.api import Run

NOTHING = "-"
_STRONG, _QUIET = "#2f6690", "#9bb1bd"


def run_text(run: Run) -> str:
    """Lay out one run for a terminal: what was run, how fast, what was hit, what each lane did."""
    config, m = run.config, run.metrics
    moved = {lane: count for lane, count in m["bytes"].items() if count}
    facts = [
        ("model", f"{config['model']}, {m['steps']:,} forward passes of {config['trace']}"),
        ("machine", f"{config['hw']} ({config['hw_kind']} profile)"),
        ("policy", _policy_words(config)),
        ("cache", _cache_words(config)),
        ("", ""),
        ("first token", _rate(m, "ttft_s", "prefill")),
        ("each further token", _rate(m, "tpot_s", "decode")),
        ("hit rate", _hit_words(m)),
        ("accesses", f"{m['accesses']:,}: {m['hits']:,} hits, {m['delayed_hits']:,} delayed, {m['misses']:,} misses"),
        ("planning", f"{_ms(m['planning_s'])} of {_ms(m['makespan_s'])}, {_percent(m['planning_share'])}"),
    ]
    if m["prefetched"]:
        facts.append(("prefetch", f"{m['prefetched']:,} copies, {_percent(m['prefetch_accuracy'])} of them used"))
    if m["energy_j"] is not None:
        facts.append(("energy", f"{m['energy_j']:.0f} J, {_number(m['tokens_per_kj'])} tokens per kJ"))
    if m["routing"] != "recorded":
        kept = _percent(m["gate_mass_kept"])
        facts.append(("routing", f"{m['routing']}: counterfactual, {kept} of the gate mass kept"))
    if m["approximate"]:
        facts.append(("answers", "approximate: experts started ahead see the layer before's input"))
    width = max(len(name) for name, _ in facts)
    head = [f"{name:<{width}}  {text}".rstrip() for name, text in facts]
    rows = [["lane", "busy", "of the run", "stalled", "moved", "bandwidth"]]
    for lane, busy_s in m["busy_s"].items():
        bandwidth = m["bandwidth"].get(lane)
        rows.append([
            lane,
            _ms(busy_s),
            _percent(busy_s / m["makespan_s"] if m["makespan_s"] else None),
            _ms(m["stall_s"][lane]) if lane in m["stall_s"] else "",
            format_bytes(moved[lane]) if lane in moved else "",
            f"{bandwidth / 1e9:.1f} GB/s" if lane in moved and bandwidth else "",
        ])  # fmt: skip
    return "\n".join([*head, "", *aligned(rows)])


def comparison_text(table: pd.DataFrame, runs: Mapping[str, Run]) -> str:
    """Lay out a comparison: what all runs share, then one row per policy, fastest first."""
    ssd = bool(table["ssd_bytes"].sum())
    names = ["policy", "first token", "per token", "decode", "prefill", "hit rate", "to GPU", "at", "from SSD", "run"]
    rows = [
        [
            row["policy"],
            _ms(row["ttft_s"]),
            _ms(row["tpot_s"]),
            _number(row["decode_tokens_per_s"], " tok/s"),
            _number(row["prefill_tokens_per_s"], " tok/s"),
            _percent(row["hit_rate_active"]),
            format_bytes(row["h2d_bytes"]),
            _bandwidth(runs[row["policy"]].metrics, "h2d"),
            format_bytes(row["ssd_bytes"]),
            _ms(row["makespan_s"]),
        ]
        for row in table.to_dict("records")
    ]
    cells = [
        [cell for name, cell in zip(names, row, strict=True) if ssd or name != "from SSD"] for row in [names, *rows]
    ]
    shared = _shared_words(next(iter(runs.values())).config)
    return "\n".join([shared, "", *aligned(cells), "", "hit rate: of active experts, CPU-computed ones included"])


def comparison_figure(table: pd.DataFrame, runs: Mapping[str, Run], path: str | Path) -> Path:
    """Draw a comparison as three rows of bars that share their policies: speed, hit rate, bytes.

    Returns:
        The PNG's place.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - half a second, for pictures only
    from matplotlib.figure import Figure  # noqa: PLC0415

    phase = "decode" if table["decode_tokens_per_s"].notna().any() else "prefill"
    panels: tuple[tuple[pd.Series, str, Callable[[float], str], str], ...] = (
        (table[f"{phase}_tokens_per_s"], f"{phase}, tokens/s", _number, _STRONG),
        (table["hit_rate_active"], "hit rate of active experts", _percent, _QUIET),
        (table["h2d_bytes"] + table["ssd_bytes"], "copied to the GPU and read from SSD", format_bytes, _QUIET),
    )
    figure = Figure(figsize=(11, 1.4 + 0.42 * len(table)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (column, title, words, colour) in zip(axes, panels, strict=True):
        values = column.astype(float).fillna(0.0)
        bars = axis.barh(range(len(values)), values, color=colour, height=0.65)
        axis.bar_label(bars, [words(value) for value in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(x=0.18)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
    axes[0].set_yticks(range(len(table)), table["policy"])
    axes[0].invert_yaxis()
    figure.suptitle(_shared_words(next(iter(runs.values())).config).replace("\n", "; "), fontsize=9, x=0.01, ha="left")
    with written_beside(path) as part:
        figure.savefig(part, format="png", dpi=120)
    return Path(path)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        padded = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *padded]).rstrip())
    return lines


def save_run(run: Run, folder: Path | None) -> list[Path]:
    """Write figures and effective configuration beside the tables of a run; return all files of the folder."""
    if folder is None:
        return []
    with written_beside(folder / "run.json") as part:
        part.write_text(json.dumps(run.to_json(), indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in ("timeline.parquet", "accesses.parquet", "steps.parquet", "run.json")]


def save_table(table: pd.DataFrame, path: Path) -> Path:
    """Write a comparison as CSV, in seconds and bytes."""
    with written_beside(path) as part:
        table.to_csv(part, index=False, lineterminator="\n")
    return path


def stacked(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One table of several comparisons, shortest run first."""
    import pandas as pd  # noqa: PLC0415 - a plain replay need not pay for it

    return pd.concat(tables).sort_values("makespan_s", kind="stable").reset_index(drop=True)


def cache_text(counts: Mapping[str, Any]) -> str:
    """Hits of a cache alone, for people."""
    rate = counts["accesses"] / counts["wall_s"]
    slots = counts["cache_slots"]
    held = f"{slots[0]} experts per layer" if counts["scope"] == "layer" else f"{slots[0]} experts in one pool"
    hit_rate = (
        "no accesses" if counts["hit_rate_active"] is None else f"{counts['hit_rate_active']:.2%} of active experts"
    )
    facts = {
        "cache": f"{counts['cache']}, {held}",
        "hit rate": f"{hit_rate}: {counts['hits']:,} hits, {counts['misses']:,} misses",
        "replayed": f"{counts['accesses']:,} accesses in {counts['wall_s']:.2f} s, {rate / 1e6:.2f} million per second",
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
        held = f"{min(slots)}{f' to {max(slots)}' if max(slots) > min(slots) else ''} experts per layer"
    text = f"{held}, {_percent(config['cache_ratio'])} of all ({format_bytes(config['cache_bytes'])})"
    if config["host_bytes"] is not None:
        text += f"; {format_bytes(config['host_bytes'])} of experts in host memory, the rest on SSD"
    return text


def _shared_words(config: Mapping[str, Any]) -> str:
    machine = f"{config['model']} on {config['hw']} ({config['hw_kind']} profile), batch {config['batch']}"
    return f"{machine}\ncache: {_cache_words(config)}"


def _rate(metrics: Mapping[str, Any], time: str, phase: str) -> str:
    total, each = metrics[f"{phase}_tokens_per_s"], metrics[f"{phase}_tokens_per_s_seq"]
    if total is None:
        return f"the trace has no {phase}"
    text = f"{_ms(metrics[time])}, {_number(total)} {'prompt ' if phase == 'prefill' else ''}tokens/s"
    return text if each is None or math.isclose(total, each, rel_tol=1e-3) else f"{text} ({_number(each)} per sequence)"


def _hit_words(metrics: Mapping[str, Any]) -> str:
    return (
        f"{_percent(metrics['hit_rate_active'])} of active experts, {_percent(metrics['hit_rate_gpu'])} of GPU-assigned"
        f" ones, {_percent(metrics['hit_rate_token'])} weighted by tokens"
    )


def _bandwidth(metrics: Mapping[str, Any], link: str) -> str:
    """Bytes per second of all links of a class while they were busy."""
    lanes = [lane for lane, count in metrics["bytes"].items() if lane.startswith(link) and count]
    busy_s = sum(metrics["busy_s"][lane] for lane in lanes)
    return f"{sum(metrics['bytes'][lane] for lane in lanes) / busy_s / 1e9:.1f} GB/s" if busy_s else NOTHING


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _ms(seconds: float | None) -> str:
    """Milliseconds; seconds from one second on."""
    if _missing(seconds):
        return NOTHING
    assert seconds is not None
    return _number(seconds, " s") if seconds >= 1 else _number(seconds * 1e3, " ms")


def _percent(share: float | None) -> str:
    return NOTHING if _missing(share) else f"{100 * share:.1f} %"  # type: ignore[operator]


def _number(value: float | None, unit: str = "") -> str:
    """Three significant digits below a thousand, whole numbers above."""
    if _missing(value):
        return NOTHING
    assert value is not None
    if value == 0:
        return f"0{unit}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}{unit}"
