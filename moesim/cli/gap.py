"""`moesim gap`: where a policy loses its time."""

import json
from typing import TYPE_CHECKING

import typer

from moesim.cli import options

if TYPE_CHECKING:
    from moesim.analysis.assignment_grades import Grades
    from moesim.analysis.gap import Gap
    from moesim.analysis.gap_eviction import EvictionSplit


def add_commands(app: typer.Typer) -> None:
    """Add `gap`."""
    app.command("gap", short_help="Say where a policy loses its time.")(gap)


@options.with_setting
def gap(
    trace: options.TraceFile,
    policy: options.Policy = "greedy",
    *,
    setting: options.Setting,
    as_json: options.AsJson = False,
) -> None:
    """Say how much of a policy's time above the clairvoyant bound is due to which of
    its parts.

    Replays the trace with every mix of its own parts and parts that know the future, so
    --steps saves much.

    \b
    Examples:
      moesim gap q.parquet --policy greedy --steps 100
      moesim gap q.parquet --policy on-demand --cache lfu --prefetch next-gate --batch 8
    """
    from moesim.analysis import gap as library
    from moesim.cli.progress import bar

    with bar("replaying") as progress:
        found = library.gap(trace, policy, **setting.keywords(), progress=progress)
    print(json.dumps(found.to_json(), indent=2) if as_json else gap_text(found))


def gap_text(found: "Gap") -> str:
    """Lay out a gap for a terminal: the times, the shares, the eviction gap, the
    assignment's grades.
    """
    from moesim.reporting.text import aligned

    config = found.config
    facts = [
        ("model", f"{config['model']}, {config['trace']}"),
        (
            "machine",
            f"{config['hw']} ({config['hw_kind']} profile), batch {config['batch']}",
        ),
        (
            "policy",
            (
                f"{_ms(found.policy_s)}: {config['assignment']}, {config['cache']},"
                f" prefetch {config['prefetch']}"
            ),
        ),
        ("bound", f"{_ms(found.bound_s)}: {_bound_words(found)}"),
        (
            "gap",
            (
                f"{_ms(found.gap_s)}, {_percent(found.gap_s, found.policy_s)} of the"
                " policy's time"
            ),
        ),
        (
            "all resident",
            f"{_ms(found.resident_s)}: the bound if the GPUs held every expert",
        ),
    ]
    width = max(len(name) for name, _ in facts)
    head = [f"{name:<{width}}  {text}" for name, text in facts]
    rows = [["part", "share", "of the gap", "alone", "last", "exchanged for"]]
    rows += [
        [
            part.name,
            _ms(part.share_s),
            _percent(part.share_s, found.gap_s),
            _ms(part.alone_s),
            _ms(part.last_s),
            part.replaced_by or "nothing",
        ]
        for part in found.parts
    ]
    rows.append(
        ["sum", _ms(found.gap_s), _percent(found.gap_s, found.gap_s), "", "", ""]
    )
    legend = (
        "share: saved on average over all orders of exchanges; alone: as the only one;"
        " last: after all others"
    )
    blocks = ["\n".join(head), "\n".join([*aligned(rows), "", legend])]
    if found.belady_s is not None:
        blocks.append("\n".join(_eviction_lines(found, found.eviction)))
    blocks.append("\n".join(_assignment_lines(found.grades)))
    return "\n\n".join(blocks)


def _bound_words(found: "Gap") -> str:
    used = [part.replaced_by for part in found.parts if part.replaced_by]
    return (
        "exchanged for " + " + ".join(used)
        if used
        else "nothing known of the future helps"
    )


def _eviction_lines(found: "Gap", split: "EvictionSplit | None") -> list[str]:
    assert found.belady_s is not None
    assert found.forced_s is not None
    whole_s = found.policy_s - found.belady_s
    victims_s = found.policy_s - found.forced_s
    lines = [
        (
            f"eviction alone: {_ms(whole_s)} to Belady; {_ms(victims_s)} of it to a"
            " Belady that must admit every fetch"
        ),
    ]
    if split is None:
        return [
            *lines,
            (
                "its misses cannot be told without the machine: this cache swaps by its"
                " own clock"
            ),
        ]
    lines.append(
        f"cache alone: misses {_percent(split.misses, split.accesses)},"
        f" forced-admission Belady {_percent(split.forced, split.accesses)}, Belady"
        f" {_percent(split.belady, split.accesses)} of {split.accesses:,} accesses"
    )
    if split.gap:
        lines += [
            (
                f"of that gap {_percent(split.victims, split.gap)} is not knowing whom"
                f" to evict, {_percent(split.admissions, split.gap)} not knowing whom"
                " to turn away"
            ),
            (
                f"the best causal cache at hand ({split.best_causal}) wins"
                f" {_percent(split.won, split.gap)} of it;"
                f" {_percent(split.gap - split.won, split.gap)} is won by none"
            ),
        ]
    return lines


def _assignment_lines(grades: "Grades") -> list[str]:
    figures = grades.to_json()
    if not figures["layer_steps"]:
        return ["assignment: no layer step to grade"]
    lines = [
        (
            f"assignment of {figures['layer_steps']:,} layer steps, makespan over the least"
            " possible:"
        )
    ]
    for name, words in (
        ("modelled", "lanes as sums of costs"),
        ("scheduled", "copies one after another"),
    ):
        found = figures[name]
        lines.append(
            f"  {name:<9}  mean {found['mean']:.3f}, p95 {found['p95']:.3f}, max"
            f" {found['max']:.3f}; {found['optimal_share']:.1%} optimal ({words})"
        )
    if figures["unproven"]:
        lines.append(
            f"  {figures['unproven']} were too large to solve exactly: their ratio may"
            " be too small"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds:.3f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.2f} ms"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
