"""DALI's workload-aware cache: hit rates by window and swaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reproduction.experiments.base import Excerpt, Experiment
from moesim.runs import replay as api
from moesim.runs.memory import MemoryOptions

if TYPE_CHECKING:
    from moesim.reproduction.experiments.base import Figures
    from moesim.runs.result import Run

MACHINE = "rtx3090-epyc7532"
WINDOWS = ((2, 8), (2, 16), (4, 8), (8, 8))
"""(window in steps, swaps per window) of DALI's appendix A.6."""
LAST_QUARTER = 0.75
FINAL_ROW = "best late step (w, u) = (8, 1), batch 4, %"


def dali_window(excerpt: Excerpt) -> Figures:
    """DALI's greedy assignment over its window cache at 50 %; hits of GPU-assigned
    experts, by window and swaps.
    """
    figures: Figures = {}
    batch = excerpt.batch_near(8)
    rates: dict[tuple[int, int], float] = {}
    for window, swaps in WINDOWS:
        run = _replay(excerpt, window, swaps, batch)
        rate = run.metrics["hit_rate_gpu"]
        # The rate is one of GPU-assigned experts, of which there may be none.
        if rate is None:
            return {
                "hit rate": (
                    "lacks experts on the GPU: this machine computes all of them on"
                    " its CPU"
                )
            }
        rates[window, swaps] = 100.0 * rate
        figures[f"hit rate (w, u) = ({window}, {swaps}), %"] = rates[window, swaps]
    figures[FINAL_ROW] = _best_late_step(excerpt)
    figures["gain (2, 16) over (2, 8), points"] = rates[2, 16] - rates[2, 8]
    figures["gain (4, 8) over (8, 8), points"] = rates[4, 8] - rates[8, 8]
    figures["batch"] = float(batch)
    return figures


def _replay(excerpt: Excerpt, window: int, swaps: int, batch: int) -> Run:
    return api.replay(
        excerpt.trace,
        "greedy",
        cache=f"workload-window:window={window},swaps={swaps}",
        hw=MACHINE,
        memory=MemoryOptions(cache_ratio=0.5),
        batch=batch,
        steps=excerpt.most_steps,
        seed=excerpt.seed,
    )


def _best_late_step(excerpt: Excerpt) -> float | str:
    """Highest hit rate over GPU-assigned experts of one step in the last quarter.

    DALI's figure 18d ends with it.
    """
    # Figure 18d has batch 4; another batch would not be the same experiment.
    batches, lacks = excerpt.batches([4])
    if not batches:
        return lacks[4]
    run = _replay(excerpt, window=8, swaps=1, batch=batches[0])
    accesses = run.timeline.access_frame()
    is_late = accesses["step"] >= LAST_QUARTER * run.metrics["steps"]
    # The paper counts hits of experts that the GPU computes.
    on_gpu = accesses[is_late & (accesses["lane"] != "cpu")]
    rates = (on_gpu["state"] == "hit").groupby(on_gpu["step"]).mean()
    if rates.empty:
        return "lacks experts on the GPU in the last quarter of the steps"
    return 100.0 * float(rates.max())


_ROWS = {
    "hit_rate_final_max": FINAL_ROW,
    "hit_rate_gain_(2,16)_vs_(2,8)": "gain (2, 16) over (2, 8), points",
    "hit_rate_gain_(4,8)_vs_(8,8)": "gain (4, 8) over (8, 8), points",
}

EXPERIMENTS = (
    Experiment(
        name="dali-window",
        summary=(
            "hit rate by window and swaps of the workload-aware cache (DALI, appendix"
            " A.6)"
        ),
        published=(
            ("DALI", "A.6", "hit_rate_gain_(2,16)_vs_(2,8)"),
            ("DALI", "A.6", "hit_rate_gain_(4,8)_vs_(8,8)"),
            ("DALI", "6.4/Fig18d", "hit_rate_final_max"),
        ),
        unit="as in the row",
        needs="routing",
        computes=(
            "Replays greedy assignment over the window cache at 50 % on a datasheet"
            " profile of DALI's machine, batch 8 where there are sequences for it; hits"
            " over GPU-assigned experts."
        ),
        caveats=(
            (
                "which experts go to the GPU, and so the rate, follows from the"
                " profile's costs for this model"
            ),
            "the model and batch of A.6 are not stated with the two gains",
            (
                "figure 18d is one run of Mixtral with 4 of 8 experts cached; the best"
                " late step is our reading of its end"
            ),
        ),
        row=lambda metric, _: _ROWS[metric],
        run=dali_window,
    ),
)
