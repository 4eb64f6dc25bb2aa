"""`moesim trace predict`: synthetic predictions of stated accuracy."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli import parsers
from moesim.cli.checks import check_places
from moesim.cli.options import AsJson, DrawSeed, TraceFile


def predict(
    trace: TraceFile,
    target: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The trace to write.", show_default=False),
    ],
    recall: Annotated[
        str | None,
        typer.Option(
            metavar="R1,R2,R3",
            parser=parsers.numbers,
            help=(
                "Recall of pred1_raw, pred2_raw, pred3_raw: used experts among the K"
                " best predicted."
            ),
        ),
    ] = None,
    residual: Annotated[
        float | None,
        typer.Option(metavar="R", help="Recall of pred1_res, which DALI needs."),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=(
                "Measure recalls at N: a token's N best experts, among the N best"
                " predicted. Default: all K."
            ),
        ),
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also draw the gate's scores, and weights.")
    ] = False,
    between_depths: Annotated[
        float, typer.Option(help="Correlation of errors of adjacent depths.")
    ] = 0.6,
    between_tokens: Annotated[
        float, typer.Option(help="Correlation of errors of adjacent tokens.")
    ] = 0.4,
    between_layers: Annotated[
        float, typer.Option(help="Share of difficulty that a token's layers share.")
    ] = 0.4,
    seed: DrawSeed = 0,
    as_json: AsJson = False,
) -> None:
    """Add predictions of stated accuracy to a trace, and scores where it has none.

    They are drawn: the header says so, and so does every result of a replay.

    \b
    Examples:
      moesim trace predict q.parquet p.parquet --recall 0.8,0.7,0.62 --scores
      moesim trace predict q.parquet p.parquet --recall 0.8 --residual 0.86
      moesim trace predict q.parquet p.parquet --recall 0.82 --at 1 --scores
    """
    check_places(files=[target], inputs=[trace])
    from moesim.cli.output import bar
    from moesim.traces.synthetic.predict import predict as draw_predictions
    from moesim.traces.synthetic.prediction_noise import Dependence

    asked = tuple(recall or ())
    dependence = Dependence(
        depths=between_depths, tokens=between_tokens, layers=between_layers
    )
    with bar("predicting", 1.0) as show:
        predicted = draw_predictions(
            trace,
            target,
            recall=[float(value) for value in asked],
            residual=residual,
            at=at,
            scores=scores,
            seed=seed,
            dependence=dependence,
            progress=show,
        )
    if as_json:
        facts = {
            "trace": str(predicted.path),
            "rows": predicted.rows,
            "scores": predicted.scores,
            "predictors": [asdict(predictor) for predictor in predicted.predictors],
            "dependence": asdict(dependence),
            "at": at,
            "seed": seed,
        }
        print(json.dumps(facts, indent=2))
        return
    recall = "recall" if at is None else f"recall at {at}"
    for predictor in predicted.predictors:
        print(
            f"{predictor.column}: {recall} {predictor.measured:.3f}, asked"
            f" {predictor.asked:g}"
        )
    if predicted.scores:
        print("scores: drawn consistent with the experts")
    print(f"wrote {target}: {predicted.rows:,} rows; synthetic (marked in its header)")
