"""Draw the pictures of the documentation anew; ``python -m benchmarks.pictures``.

The picture of answers is made by the command in ``docs/how-to/quality.md``.
"""

from __future__ import annotations

from pathlib import Path

import moesim
from moesim.questions.trace_page import curves_chart
from moesim.traces.stats.trace_summary import summarise_trace

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TRACE = "gpt-oss-20b-like"
POLICIES = ["greedy", "on-demand", "fiddler", "ktransformers", "llama.cpp", "all-cpu"]


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
        "step": moesim.step_figure(runs["greedy"]),
        "statistics-curves": curves_chart(summarise_trace(moesim.open_trace(TRACE))),
    }
    for name, chart in pictures.items():
        print(f"wrote {chart.save(IMAGES / f'{name}.png')}")


if __name__ == "__main__":
    main()
