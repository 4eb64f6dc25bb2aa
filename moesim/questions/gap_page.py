"""The gap of a policy as a page: which part costs how much, and every mix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from moesim.base.units import ms, percent
from moesim.questions.gap import gap_text
from moesim.questions.replay import shared_setting_of
from moesim.reporting.charts import GPU, QUIET, Chart, channel, layer, rule, shown
from moesim.reporting.pages import Page, PageTable, Text, page_origin, trace_words

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.questions.gap import Gap
    from moesim.reporting.charts import Columns


def write_gap(gap: Gap, path: Path, command: str | None = None) -> Path:
    """Write the page of a gap.

    Args:
        gap: of `moesim.gap`.
        path: of the page.
        command: the command line that made it; None for a call from Python.

    Returns:
        The same path.
    """
    config = gap.config
    largest = max(gap.parts, key=lambda part: part.share_s, default=None)
    answer = "no time is lost to a policy that knows the future"
    if gap.gap_s > 0 and largest is not None:
        answer = (
            f"{percent(gap.gap_s / gap.policy_s)} of the time is lost to not knowing"
            f" the future, most of it by {largest.name} ({largest.policy}):"
            f" {percent(largest.share_s / gap.policy_s)}"
        )
    trace = trace_words(config["trace"], config["trace_digest"])
    page = Page(
        f"{config['model']} on {config['hw']}: where the policy loses its time",
        page_origin(command, trace=trace),
        setting=shared_setting_of(config).split("\n"),
        answer=answer,
    )
    page.add("", gap_figure(gap))
    heads = ["part", "policy", "replaced by", "alone saves", "last saves", "share"]
    rows = [
        [
            part.name,
            part.policy,
            part.replaced_by or "-",
            ms(part.alone_s),
            ms(part.last_s),
            ms(part.share_s),
        ]
        for part in gap.parts
    ]
    page.add(
        "What would each part save?",
        PageTable(heads, rows, "Parts"),
        note="Alone: only this part knows the future; last: all others do already;"
        " share: the mean over all orders, which sums to the gap.",
    )
    mixes = sorted(gap.mixes.items(), key=lambda mix: mix[1])
    table = [[name, ms(s), percent(s / gap.policy_s - 1)] for name, s in mixes]
    page.add("Every mix", PageTable(["mix", "run", "against it"], table, "Every mix"))
    page.add("In words", Text([gap_text(gap)], "folded"))
    page.add("Settings", Text([json.dumps(config, indent=1)], "folded"))
    return page.write(path)


def gap_figure(gap: Gap) -> Chart:
    """Draw the time of a run from the policy down to the clairvoyant bound, a bar for
    each part that loses some.
    """
    names = ["the policy"]
    starts = [0.0]
    ends = [gap.policy_s]
    left = gap.policy_s
    for part in sorted(gap.parts, key=lambda part: -part.share_s):
        names.append(part.name)
        ends.append(left)
        left -= part.share_s
        starts.append(left)
    names.append("clairvoyant bound")
    starts.append(0.0)
    ends.append(gap.bound_s)
    data: Columns = {
        "name": names,
        "from": starts,
        "to": ends,
        "words": [ms(end - start) for start, end in zip(starts, ends, strict=True)],
        "is_part": [name not in (names[0], names[-1]) for name in names],
    }
    y = channel("name", None, "N", sort=names)
    scale = {"domain": [0, 1.12 * gap.policy_s or 1], "nice": False}
    x = channel(
        "from", "s, whole run; the line: a GPU that holds all experts", scale=scale
    )
    colour = {"condition": {"test": "datum.is_part", "value": GPU}, "value": QUIET}
    hover = shown(("name", "part"), ("words", "takes"))
    bars = layer("bar", x=x, x2={"field": "to"}, y=y, color=colour, tooltip=hover)
    end = {"field": "to", "type": "quantitative"}
    text = {"type": "text", "align": "left", "dx": 4}
    labels = layer(text, x=end, y=y, text={"field": "words"})
    spec = {
        "data": {"name": "parts"},
        "width": 700,
        "height": 30 * len(names),
        "layer": [bars, labels, rule(gap.resident_s, "x")],
    }
    return Chart(spec, {"parts": data}, "From the policy's time to the bound, by part")
