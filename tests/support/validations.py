"""Validations by hand: cells of measured and predicted runs, and their result."""

from moesim.evidence.validation.drift import TERMS
from moesim.evidence.validation.results import Cell, Coordinates, Validation


def one_run(tpot_s, *, hits=3, ttft_s=1.0, planning_s=0.1):
    return {
        "tpot_s": tpot_s,
        "tpot_p50_s": tpot_s,
        "tpot_p95_s": tpot_s,
        "ttft_s": ttft_s,
        "hits": hits,
        "delayed_hits": 0,
        "misses": 1,
        "planning_s": planning_s,
        "makespan_s": 10 * tpot_s,
        "busy_s": {"cpu": 1.0},
        "bytes": {"h2d0": 8},
        "terms": dict.fromkeys(TERMS, 2 * tpot_s),
    }


def cell(
    policy,
    measured,
    predicted,
    *,
    free=True,
    hits=3,
    ratio=0.5,
    extrapolated=False,
    host=1.0,
    drift=None,
):
    return Cell(
        Coordinates("t.parquet", "s", policy, ratio, host, 1),
        free,
        extrapolated,
        [one_run(value) for value in measured],
        one_run(predicted, hits=hits),
        predicted,
        [[value] * 8 for value in measured],
        [predicted] * 8,
        {"dense": [3.0] + [0.75] * 8, "lanes": [1.0] + [0.25] * 8},
        drift,
    )


def result(*cells):
    config = {
        "date": "2026-01-01", "machine": "m", "hw": "h", "hw_date": "2026-01-01",
        "traces": {}, "steps": 8, "repetitions": 2, "seconds": 1,
        "load_before": 0.0, "load_after": 0.0,
    }  # fmt: skip
    return Validation(list(cells), config, ["a note"]).to_json()
