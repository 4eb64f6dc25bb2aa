"""Validations by hand: cells of measured and predicted runs, and their result."""

from moesim.evidence.validation.results import Cell, Coordinates, Validation


def one_run(tpot_s, *, hits=3, lost=0.0):
    figures = {"tpot_s": tpot_s, "ttft_s": 1.0, "hits": hits}
    figures |= {"delayed_hits": 0, "misses": 1}
    return figures | {"lost": lost, "steps_s": [tpot_s] * 8}


def cell(
    policy,
    measured,
    predicted,
    *,
    free=True,
    hits=3,
    ratio=0.5,
    extrapolated=False,
    batch=1,
    lost=0.0,
):
    return Cell(
        Coordinates("t.parquet", "s", policy, ratio, 1.0, batch),
        free,
        extrapolated,
        [one_run(value, lost=lost) for value in measured],
        one_run(predicted, hits=hits),
    )


def result(*cells):
    config = {
        "date": "2026-01-01", "machine": "m", "hw": "h", "hw_date": "2026-01-01",
        "traces": {}, "steps": 8, "repetitions": 2, "seconds": 1,
        "load_before": 0.0, "load_after": 0.0,
    }  # fmt: skip
    return Validation(list(cells), config, ["a note"]).to_json()
