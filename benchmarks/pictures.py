"""Draw the pictures of the documentation anew; ``python -m benchmarks.pictures``.

The picture of answers shows the first table of ``docs/measurements/quality.md``: the
command that measures it takes most of an hour.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import moesim
from moesim.questions.quality import Quality, Row, quality_figure
from moesim.questions.trace_page import curves_chart
from moesim.traces.stats.trace_summary import summarise_trace

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
TRACE = "gpt-oss-20b-like"
POLICIES = ["greedy", "on-demand", "fiddler", "ktransformers", "llama.cpp", "all-cpu"]


def answers() -> Quality:
    """What was measured of SMoE's router; figures that the picture lacks are NaN."""
    page = (DOCS / "measurements" / "quality.md").read_text(encoding="utf-8")
    table = page.partition("| hits |\n|---")[2].partition("\n\n")[0]
    rows = []
    for line in table.splitlines()[1:]:
        cells = line.strip("| ").split(" | ")
        numbers = [float(re.sub(r" [±%].*", "", cell)) for cell in cells]
        _, ratio, perplexity, lost, kl, agreement, mass, altered, hits = numbers
        nats = math.log(perplexity)
        row = Row(
            routing="expert-cache-router",
            cache_ratio=ratio,
            swept=cells[0],
            nats=nats,
            reference_nats=nats - lost,
            delta_nats_se=math.nan,
            kl=kl,
            agreement=agreement / 100,
            gate_mass_kept=mass / 100,
            altered=altered / 100,
            stale=math.nan,
            hit_rate_active=hits / 100,
            experts_used=math.nan,
        )
        rows.append(row)
    config = {"model": "tiny", "tokens": 1024, "assignment": "on-demand"}
    config |= {"cache": "lru", "routing": "expert-cache-router", "sweep": "alpha=0"}
    return Quality(rows, config)


def main() -> None:
    """Write them into docs/images."""
    table, runs = moesim.compare(TRACE, POLICIES, hw="rtx4060ti", gpu_memory="8GiB")
    cells = moesim.compare_cells(
        TRACE,
        ["ktransformers", "on-demand", "greedy"],
        hw=["rtx4060ti", "rtx3080ti"],
        memory=["4GiB", "6GiB", "8GiB"],
    )
    pictures = {
        "compare": moesim.comparison_figure(table, runs),
        "memory": moesim.cells_figure(cells),
        "placement": moesim.placement_figure(runs["greedy"]),
        "quality": quality_figure(answers()),
        "step": moesim.step_figure(runs["greedy"]),
        "statistics-curves": curves_chart(summarise_trace(moesim.open_trace(TRACE))),
    }
    for name, chart in pictures.items():
        print(f"wrote {chart.save(IMAGES / f'{name}.png')}")


if __name__ == "__main__":
    main()
