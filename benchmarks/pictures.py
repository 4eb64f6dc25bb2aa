"""Draw the pictures of the documentation anew; ``python -m benchmarks.pictures``.

The picture of answers shows the first table of ``docs/measurements/quality.md``: the
command that measures it takes most of an hour.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pandas as pd

import moesim
from moesim.questions.quality import Quality, quality_drawn

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
TRACE = "gpt-oss-20b-like"
POLICIES = ["greedy", "on-demand", "fiddler", "ktransformers", "llama.cpp", "all-cpu"]


def answers() -> Quality:
    """What was measured of SMoE's router, as far as the picture shows it."""
    page = (DOCS / "measurements" / "quality.md").read_text(encoding="utf-8")
    table = page.partition("| hits |\n|---")[2].partition("\n\n")[0]
    rows = []
    for line in table.splitlines()[1:]:
        cells = line.strip("| ").split(" | ")
        numbers = [float(re.sub(r" [±%].*", "", cell)) for cell in cells]
        _, ratio, perplexity, lost, kl, agreement, mass, altered, hits = numbers
        rows.append(
            {
                "routing": f"expert-cache-router:alpha={cells[0]}",
                "cache_ratio": ratio,
                "perplexity": perplexity,
                "delta_nats": lost,
                "kl": kl,
                "agreement": agreement / 100,
                "gate_mass_kept": mass / 100,
                "altered": altered / 100,
                "hit_rate_active": hits / 100,
            }
        )
    config = {"model": "tiny", "tokens": 1024, "assignment": "on-demand"}
    return Quality(pd.DataFrame(rows), config | {"cache": "lru"})


def main() -> None:
    """Write them into docs/images."""
    machine = {"hw": "rtx4060ti", "gpu_memory": "8GiB"}
    # Other routing of the model, so that caches begin as their authors fill them.
    folder = tempfile.mkdtemp()
    warm = moesim.synth(
        Path(folder) / "other.parquet", tokens=4000, like="gpt-oss-20b", seed=1
    )
    compared = moesim.compare(TRACE, POLICIES, warm=warm.path, **machine).answer()
    several = moesim.compare(
        TRACE,
        ["ktransformers", "on-demand", "greedy"],
        hw=["rtx4060ti", "rtx3080ti"],
        gpu_memory=["4GiB", "6GiB", "8GiB"],
    ).answer()
    run = moesim.answer(moesim.replay(TRACE, "greedy", **machine))
    pictures = {
        "compare": compared.figure(),
        "memory": several.figure("times"),
        "placement": run.figure("placement"),
        "quality": quality_drawn(answers()),
        "step": run.figure("step"),
        "statistics-curves": moesim.answer(moesim.open_trace(TRACE)).figure("curves"),
    }
    for name, figure in pictures.items():
        print(f"wrote {figure.save(IMAGES / f'{name}.png')}")


if __name__ == "__main__":
    main()
