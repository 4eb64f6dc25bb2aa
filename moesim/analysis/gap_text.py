"""The report of `moesim gap` for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reporting.tables import aligned, facts_lines

if TYPE_CHECKING:
    from moesim.analysis.assignment_grades import Grades
    from moesim.analysis.gap import Gap
    from moesim.analysis.gap_eviction import EvictionSplit


def gap_text(report: Gap) -> str:
    """Lay out a gap for a terminal: the times, the shares, the eviction gap, the
    assignment's grades.
    """
    config = report.config
    facts = [
        ("model", f"{config['model']}, {config['trace']}"),
        (
            "machine",
            f"{config['hw']} ({config['hw_kind']} profile), batch {config['batch']}",
        ),
        (
            "policy",
            (
                f"{_ms(report.policy_s)}: {config['assignment']}, {config['cache']},"
                f" prefetch {config['prefetch']}"
            ),
        ),
        ("bound", f"{_ms(report.bound_s)}: {_bound_words(report)}"),
        (
            "gap",
            (
                f"{_ms(report.gap_s)}, {_percent(report.gap_s, report.policy_s)} of the"
                " policy's time"
            ),
        ),
        (
            "all resident",
            f"{_ms(report.resident_s)}: the bound if the GPUs held every expert",
        ),
    ]
    facts += [("note", caveat) for caveat in config["synthetic"]]
    head = facts_lines(facts)
    rows = [["part", "share", "of the gap", "alone", "last", "exchanged for"]]
    rows += [
        [
            part.name,
            _ms(part.share_s),
            _percent(part.share_s, report.gap_s),
            _ms(part.alone_s),
            _ms(part.last_s),
            part.replaced_by or "nothing",
        ]
        for part in report.parts
    ]
    rows.append(
        ["sum", _ms(report.gap_s), _percent(report.gap_s, report.gap_s), "", "", ""]
    )
    legend = (
        "share: saved on average over all orders of exchanges; alone: as the only one;"
        " last: after all others"
    )
    blocks = ["\n".join(head), "\n".join([*aligned(rows), "", legend])]
    # A policy with the bound's cache has no eviction gap.
    if report.belady_s is not None:
        blocks.append("\n".join(_eviction_lines(report, report.eviction)))
    blocks.append("\n".join(_assignment_lines(report.grades)))
    return "\n\n".join(blocks)


def _bound_words(report: Gap) -> str:
    used = [part.replaced_by for part in report.parts if part.replaced_by]
    return (
        "exchanged for " + " + ".join(used)
        if used
        else "nothing known of the future helps"
    )


def _eviction_lines(report: Gap, split: EvictionSplit | None) -> list[str]:
    assert report.belady_s is not None
    assert report.forced_s is not None
    eviction_s = report.policy_s - report.belady_s
    victims_s = report.policy_s - report.forced_s
    lines = [
        (
            f"eviction alone: {_ms(eviction_s)} to Belady; {_ms(victims_s)} of it to a"
            " Belady that must admit every fetch"
        ),
    ]
    # Replacements that follow a clock depend on times, which misses alone do not tell.
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
    # Shares of nothing say nothing.
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


def _assignment_lines(grades: Grades) -> list[str]:
    figures = grades.to_json()
    if not figures["layer_steps"]:
        return ["assignment: no layer step to grade"]
    lines = [
        (
            f"assignment of {figures['layer_steps']:,} layer steps, makespan over the"
            " least possible:"
        )
    ]
    # Two models of a layer step, since no policy knows how lanes will really overlap.
    for name, model in (
        ("modelled", "sums of costs"),
        ("scheduled", "copies in turn"),
    ):
        ratios = figures[name]
        lines.append(
            f"  {name:<9}  mean {ratios['mean']:.3f}, p95 {ratios['p95']:.3f}, max"
            f" {ratios['max']:.3f}; {ratios['optimal_share']:.1%} optimal ({model})"
        )
    if figures["unproven"]:
        lines.append(
            f"  {figures['unproven']} were too large to solve exactly: their ratio may"
            " be too small"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds:.3f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.2f} ms"


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"
