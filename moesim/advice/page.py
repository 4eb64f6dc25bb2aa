"""Advice as one HTML page: the command line, speed over layers with its band and
measured points, memory and cliff, terms, changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.advice.plan.commands import server_command
from moesim.advice.text import (
    bound_words,
    grade_words,
    interval_words,
    memory_words,
    model_words,
    row_lines,
    setting_rows,
    speed_words,
    term_rows,
    tie_lines,
    what_if_rows,
)
from moesim.reporting.charts import (
    LIMIT,
    PALETTE,
    QUIET,
    Chart,
    channel,
    layer,
    records,
    shown,
)
from moesim.reporting.pages import Page, PageTable, Text, page_origin

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moesim.advice.advise import Advice


def write_advice(advice: Advice, path: Path, command: str | None = None) -> Path:
    """Write the page; return its path.

    Args:
        advice: what it shows.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    best = advice.best
    machine = advice.machine
    rests = f"speeds rest on {grade_words(advice)}"
    if machine.assumed:
        rests += f"; assumed: {'; '.join(machine.assumed)}"
    decode = speed_words(best.decode)
    prompt = speed_words(best.prefill)
    job = interval_words(best.job, "s")
    page = Page(
        f"{advice.model.name} on {machine.name}: which settings are fastest?",
        page_origin(command),
        setting=[
            f"{machine.name}{memory_words(machine)}; {rests}.",
            model_words(advice.model),
        ],
        answer=f"Decode {decode}, prompt {prompt}, the job {job}.",
        notes=[bound_words(advice), *tie_lines(advice)],
    )
    setting = best.candidate.setting
    line = server_command(setting, advice.model, machine, advice.job)
    page.add("", Text([line], "command"))
    # A machine without a card has no such curve.
    if advice.curve:
        page.add(
            "Speed over layers on the CPU",
            *(_speed_chart(advice, kind) for kind in ("decode", "prefill")),
            note="Line: median. Band: 90 %. Marks: measured here; hollow: with another"
            " -ub. Shaded: does not fit, so no speed is promised.",
        )
    page.add(
        "Memory",
        memory_chart(advice),
        note="What the advised setting needs; beyond the line it spills over.",
    )
    settings = _table(setting_rows(advice), "Settings")
    page.add(
        "Settings",
        settings,
        note="Fastest first; = marks those that cannot be told from the first.",
    )
    terms = _table(term_rows(best), "Seconds by term")
    page.add("Where the time goes", terms, note="Of the first setting.")
    page.add("What would change it", _table(what_if_rows(advice), "Changes"))
    rows = row_lines(advice)
    page.add("Measured rows", Text(rows) if rows else None)
    asked = [
        part
        for question in advice.questions
        for part in (
            Text([question.command], "command"),
            Text([question.reason], "note"),
        )
    ]
    return page.add("What to measure next", *asked).write(path)


def _table(rows: Sequence[Sequence[str]], label: str) -> PageTable:
    return PageTable(rows[0], rows[1:], label)


GIB = 1024**3


def _speed_chart(advice: Advice, kind: str) -> Chart:
    """Decode or prompt speed over layers on the CPU, with its 90 % band, measured
    points and where the memory ends.
    """
    words = "decode" if kind == "decode" else "prompt"
    curve = []
    for point in advice.curve:
        speed = getattr(point, kind)
        at = {"layers": point.cpu_layers, "speed": speed.value}
        curve.append(at | {"low": speed.low, "high": speed.high, "fits": point.fits})
    last = curve[-1]["layers"]
    measured = []
    for row in advice.observed.used:
        if row.row.kind != kind:
            continue
        setting = row.target.setting
        # The curve ends at the last layer; measured rows may name a larger number.
        # A prompt measured at another micro-batch does not lie on this curve: hollow.
        size = advice.best.candidate.setting.micro_batch
        measured.append(
            {
                "layers": min(setting.cpu_layers, last),
                "speed": row.row.tokens_per_s,
                "same": kind == "decode" or setting.micro_batch == size,
            }
        )
    x = channel("layers", "layers with experts on the CPU (--n-cpu-moe)")
    x["scale"] = {"nice": False}
    y = channel("speed", f"{words}, tokens/s", scale={"zero": True})
    hover = shown(
        ("layers", "layers on the CPU"),
        ("speed", "tokens/s", ".3g"),
        ("low", "90 % from", ".3g"),
        ("high", "to", ".3g"),
        ("fits", "fits the memory"),
    )
    low = {"field": "low", "type": "quantitative"}
    layers = [
        layer(
            {"type": "area", "opacity": 0.3, "color": QUIET},
            x=x,
            y=low,
            y2={"field": "high"},
        ),
        layer({"type": "line", "point": True}, x=x, y=y, tooltip=hover),
    ]
    beyond = [row["layers"] for row in curve if not row["fits"]]
    if beyond:
        shade = {"type": "rect", "color": LIMIT, "opacity": 0.18}
        ends = {"x": {"datum": min(beyond) - 0.5}, "x2": {"datum": max(beyond) + 0.5}}
        layers.insert(0, {"data": {"values": [{}]}, "mark": shade, "encoding": ends})
    if measured:
        fill = {"condition": {"test": "datum.same", "value": 1}, "value": 0}
        mark = {"type": "point", "shape": "diamond", "size": 90, "color": PALETTE[1]}
        seen = shown(("layers", "layers on the CPU"), ("speed", "measured, tokens/s"))
        layers.append(
            layer(mark, data="measured", x=x, y=y, fillOpacity=fill, tooltip=seen)
        )
    spec = {"data": {"name": "curve"}, "width": 640, "height": 220, "layer": layers}
    data = {"curve": records(curve), "measured": records(measured)}
    return Chart(spec, data, f"Speed of the {words} over layers on the CPU")


def memory_chart(advice: Advice) -> Chart:
    """Draw what the advised setting puts into either memory, beside what is free."""
    bill = advice.best.candidate.bill
    memories = [("host memory", bill.host, bill.host_free)]
    if advice.machine.graphics:
        memories.append(("graphics memory", bill.gpu, bill.gpu_free))
    rows = [
        {"memory": name, "item": item, "gib": size / GIB}
        for name, parts, _ in memories
        for item, size in parts.items()
    ]
    free = [{"memory": name, "gib": size / GIB} for name, _, size in memories if size]
    y = channel("memory", None, "N", sort=None)
    x = channel("gib", "GiB; the line is what programs may use", stack="zero")
    bars = layer(
        "bar",
        x=x,
        y=y,
        color=channel("item", None, "N", sort=None),
        tooltip=shown(("memory", "memory"), ("item", "for"), ("gib", "GiB", ".2f")),
    )
    mark = {"type": "tick", "color": LIMIT, "thickness": 3, "size": 34}
    at = {"field": "gib", "type": "quantitative"}
    seen = shown(("memory", "memory"), ("gib", "GiB programs may use", ".2f"))
    limits = layer(mark, data="free", x=at, y=y, tooltip=seen)
    size = {"width": 560, "height": 40 * len(memories)}
    spec = {"data": {"name": "bill"}, **size, "layer": [bars, limits]}
    data = {"bill": records(rows), "free": records(free)}
    return Chart(spec, data, "Memory of the advised setting")
